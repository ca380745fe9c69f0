"""Planning processes: the same plans as in line, also when processes die or are late, and no
process left.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from dataclasses import replace

import pytest
from distributed import wait_until
from reference import make_batch, make_profile
from shared_data import REPOSITORY

from ds_hydra.errors import InfeasiblePlanError
from ds_hydra.sampler.background import BackgroundPlanner, PlannedIteration
from ds_hydra.sampler.planner.planner_settings import PlanningTask
from ds_hydra.strategy.schemes.scheme import parse_strategies

PROFILE = make_profile(
    {"<1,1>": (0.01, 1.0, 3.0), "<2,1>": (0.006, 0.6, 4.0), "<1,2>": (0.005, 0.5, 2.0)}
)
STRATEGIES = parse_strategies(["4x<1,1>", "2x<2,1>", "1x<2,1> + 1x<1,2>"])
BATCHES = [make_batch([5 + (7 * i + j * j) % 60 for j in range(20 + i)], i) for i in range(6)]


LONG_S = 400
"""Only a planning process that hangs takes so long."""


def make_planner(**changes):
    settings = {"deadline_s": LONG_S, **changes}
    task = PlanningTask(strategies=STRATEGIES, profile=PROFILE, num_devices=4)
    return BackgroundPlanner(task, **settings)


def state_of(pid):
    """The letter for a process's state, "X" where there is none; it may end while its line is
    read.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # ENOENT, then ESRCH
        return "X"


def is_alive(pid):
    """Whether a process exists and is not a zombie."""
    return state_of(pid) not in "ZX"


def stop(pid):
    """Returns when the process has stopped, which is some time after the signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T")


def submit_to_stopped(planner, batch):
    """Returns when the batch is in the pipe of the only worker, which is stopped."""
    planner.submit(batch)
    pipe = planner._workers[0]._process.stdin.fileno()
    wait_until(lambda: struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"    "))[0] > 0)


def plan_all(planner, batches=BATCHES):
    """Submits all, then fetches all."""
    for batch in batches:
        planner.submit(batch)
    return [planner.get(batch.iteration) for batch in batches]


@pytest.fixture(scope="module")
def inline_plans():
    with make_planner(num_workers=0) as planner:
        results = plan_all(planner)
    assert {result.source for result in results} == {"inline"}
    return [result.plan for result in results]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_plans_do_not_depend_on_the_number_of_workers(num_workers, inline_plans):
    with make_planner(num_workers=num_workers) as planner:
        for batch in BATCHES:
            planner.submit(batch)
        results = {i: planner.get(i) for i in (3, 0, 5, 1, 2, 4)}
        pids = planner.worker_pids
    assert [results[i].plan for i in range(6)] == inline_plans
    assert {result.source for result in results.values()} == {"worker"}
    assert all(result.planning_ms > 0 for result in results.values())
    assert results[3].waited_ms > 0  # for the start of a process, too
    assert len(pids) >= 1
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
def test_killed_workers_lose_no_iteration_and_change_no_plan(inline_plans, caplog):
    with make_planner(num_workers=1) as planner:
        planner.submit(BATCHES[0])
        planner.get(0)
        results = []
        for batch in BATCHES[1:4]:
            (victim,) = planner.worker_pids
            stop(victim)  # so that it is in the middle of what comes next
            submit_to_stopped(planner, batch)
            os.kill(victim, signal.SIGKILL)
            results.append(planner.get(batch.iteration))
        assert planner.num_restarts == len(results)
    assert [result.plan for result in results] == inline_plans[1:4]
    assert {result.source for result in results} == {"worker"}
    assert "starting another one" in caplog.text


def test_plans_are_made_in_line_where_no_worker_can_start(monkeypatch, inline_plans, caplog):
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    with make_planner(num_workers=2) as planner:
        results = plan_all(planner)
    assert [result.plan for result in results] == inline_plans
    assert {result.source for result in results} == {"inline"}
    assert caplog.text.count("could not be started") < 3 * len(BATCHES)
    assert caplog.text.count("in line from now on") == 1


@pytest.mark.slow
def test_a_hung_worker_is_late_once_and_replaced(inline_plans, caplog):
    times = 2
    with make_planner(num_workers=1) as planner:
        for hang in range(times):
            planner.deadline_s = LONG_S
            planner.submit(BATCHES[2 * hang])
            assert planner.get(2 * hang).plan == inline_plans[2 * hang]
            (victim,) = planner.worker_pids
            stop(victim)
            submit_to_stopped(planner, BATCHES[2 * hang + 1])
            planner.deadline_s = 0.2
            late = planner.get(2 * hang + 1)
            assert late.source == "deadline"
            assert late.waited_ms >= 200
            assert late.plan.iteration == 2 * hang + 1
            assert planner.num_late == hang + 1
            wait_until(lambda pid=victim: not is_alive(pid))
        wait_until(lambda: planner.num_restarts == times)
    assert "iteration 1: no plan after 0.2 s" in caplog.text
    assert "starting another one" in caplog.text


def test_a_worker_that_still_starts_is_late_and_kept(caplog):
    with make_planner(num_workers=1, deadline_s=0.1) as planner:
        planner.submit(BATCHES[0])
        wait_until(lambda: planner.worker_pids)
        pids = planner.worker_pids
        stop(*pids)  # or it might be there in time
        assert planner.get(0).source == "deadline"
        os.kill(*pids, signal.SIGCONT)
        planner.deadline_s = LONG_S
        planner.submit(BATCHES[1])
        assert planner.get(1).source == "worker"
        assert planner.worker_pids == pids


@pytest.mark.slow
def test_a_worker_out_of_memory_is_replaced(inline_plans):
    large = make_batch([5] * 20_000, iteration=100)
    with make_planner(num_workers=1) as planner:
        planner.submit(BATCHES[0])
        planner.get(0)
        (victim,) = planner.worker_pids
        # Nothing more from now on
        resource.prlimit(victim, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
        planner.submit(large)
        result = planner.get(100)
        assert planner.num_restarts == 1
        assert victim not in planner.worker_pids
        planner.submit(BATCHES[1])
        assert planner.get(1).plan == inline_plans[1]
    assert result.source == "worker"
    assert result.plan.lengths == large.lengths


@pytest.mark.slow
def test_no_memory_for_any_worker_means_plans_in_line(monkeypatch, inline_plans, caplog):
    popen = subprocess.Popen

    def starved(*arguments, **options):
        process = popen(*arguments, **options)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        return process

    monkeypatch.setattr(subprocess, "Popen", starved)
    with make_planner(num_workers=2) as planner:
        results = plan_all(planner)
    assert [result.plan for result in results] == inline_plans
    assert {result.source for result in results} == {"inline"}
    assert 9 <= caplog.text.count("starting another one") <= 12, "of three iterations, or a fourth"


def test_errors_travel_back_and_do_not_end_the_worker(inline_plans):
    with make_planner(num_workers=1) as planner:
        planner.submit(make_batch([10_000], iteration=77))
        planner.submit(BATCHES[0])
        planner._pending[77].reply.result(LONG_S)
        assert planner.peek(77) is None
        with pytest.raises(InfeasiblePlanError, match="iteration 77: sequence 0 has 10000 tokens"):
            planner.get(77)
        assert planner.get(0).plan == inline_plans[0]
        assert planner.num_restarts == 0


def test_a_plan_that_is_ready_can_be_seen_before_it_is_fetched(inline_plans):
    with make_planner() as planner:
        assert planner.peek(0) is None
        planner.submit(BATCHES[0])
        planner._pending[0].reply.result(LONG_S)
        seen = [PlannedIteration.from_json(planner.peek(0)) for _ in range(2)]
        fetched = planner.get(0)
        assert planner.peek(0) is None
    assert seen == [replace(fetched, waited_ms=0.0)] * 2
    assert fetched.plan == inline_plans[0]


def test_a_closed_planner_takes_nothing():
    with make_planner(num_workers=0) as planner:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        planner.submit(BATCHES[1])


SCRIPT = """
    import signal, sys, time
    sys.path.insert(0, {tests!r})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    from test_background import BATCHES, make_planner

    planner = make_planner(num_workers=2)
    for batch in BATCHES:
        planner.submit(batch)
    planner.get(0)
    print(*planner.worker_pids, flush=True)
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "kill"),
    [
        ("raise RuntimeError('training failed')", None),
        ("time.sleep(600)", signal.SIGINT),
        ("time.sleep(600)", signal.SIGKILL),
    ],
    ids=["exception", "ctrl-c", "killed"],
)
def test_no_process_is_left_and_nothing_hangs(end, kill):
    code = textwrap.dedent(SCRIPT).format(tests=str(REPOSITORY / "tests"), end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    if kill == signal.SIGINT:
        os.killpg(process.pid, kill)  # as a terminal does
    elif kill is not None:
        process.send_signal(kill)
    process.communicate(timeout=LONG_S)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
