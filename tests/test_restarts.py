"""Launchers on one host: a rank is killed, the launcher sees it, a restart goes on with the very
same curve.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import restarted_script
from distributed import free_port, remove_shared_memory
from faults import read_json_lines, run_until_end
from shared_data import REPOSITORY

from ds_hydra.engine.ranks.process import find_restart_problem

SCRIPT = REPOSITORY / "tests" / "restarted_script.py"
BIN = Path(sys.executable).parent


def launch(command, log):
    """Exit code of a launcher; the whole tree of processes is gone when this returns."""
    env = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torchrun's restarts hang
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            return process.wait(800)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def torchrun(folder, *deaths):
    # Two for the deaths, two where another process takes the port that the launcher had found free.
    options = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 4]
    return launch([BIN / "torchrun", *options, SCRIPT, folder, *deaths], folder / "torchrun.log")


def deepspeed(folder, name, *deaths):
    port = free_port()
    options = ["--num_gpus", 2, "--master_port", port, "--no_local_rank"]
    try:
        return launch([BIN / "deepspeed", *options, SCRIPT, folder, *deaths], folder / name)
    finally:
        remove_shared_memory(port)


@pytest.fixture(scope="module")
def whole_curve(tmp_path_factory):
    """Losses by iteration of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    ended = run_until_end(restarted_script.main, 2, folder, folder, [])
    assert [rank.exit_code for rank in ended] == [0, 0], ended
    return dict(read_json_lines(folder / "losses"))


def check_curve(folder, whole_curve):
    """Every loss, those of iterations that were trained twice included, is the uninterrupted
    run's.
    """
    seen = read_json_lines(folder / "losses")
    assert {iteration for iteration, _ in seen} == set(range(restarted_script.NUM_ITERATIONS))
    assert [loss for _, loss in seen] == [whole_curve[iteration] for iteration, _ in seen]


@pytest.mark.parametrize(
    ("environment", "is_warned"),
    [
        ({}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}, True),
    ],
)
def test_restarts_that_would_hang_are_announced(environment, is_warned):
    problem = find_restart_problem(environment)
    assert (problem is not None) == is_warned
    assert not is_warned or "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun" in problem
    is_set = environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert not is_warned or "start with --standalone" in find_restart_problem(is_set)


@pytest.mark.nightly
@pytest.mark.distributed
def test_torchrun_restarts_and_the_curve_goes_on(tmp_path, whole_curve):
    code = torchrun(tmp_path, "1:3:forward", "0:6:push")
    log = (tmp_path / "torchrun.log").read_text()
    assert code == 0, log[-20_000:]
    # Each death is one restart; others are a taken port's alone.
    tries = len(read_json_lines(tmp_path / "tries"))
    assert tries == 3 or "address already in use" in log.lower(), log[-20_000:]
    assert [step for step, *_ in read_json_lines(tmp_path / "starts")] == [0, 2, 6]
    check_curve(tmp_path, whole_curve)


@pytest.mark.nightly
@pytest.mark.distributed
def test_the_deepspeed_launcher_fails_with_the_rank_named_and_starts_again(tmp_path, whole_curve):
    assert deepspeed(tmp_path, "first.log", "1:5:backward") not in (0, None)
    assert "rank 1 is gone: its process ended" in (tmp_path / "first.log").read_text()
    assert deepspeed(tmp_path, "second.log") == 0, (tmp_path / "second.log").read_text()[-4000:]
    assert [step for step, *_ in read_json_lines(tmp_path / "starts")] == [0, 4]
    check_curve(tmp_path, whole_curve)
