"""Faults, injected: the others stop and name the rank, and a restart goes on with the very same
curve.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import datasets
import deepspeed
import pytest
import restarted_script
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import (
    dataset_of,
    gradient_on_rank_1,
    refused,
    small_profile,
    start_hydra,
    write_json,
)
from faults import (
    LATER_PHASES,
    START_PHASES,
    append_json,
    die,
    end_at_start,
    kill_in,
    mark_fault,
    read_json_lines,
    run_until_end,
)
from models import tiny
from restarted_script import NUM_ITERATIONS, data_of
from test_engine_parity import hand_plan
from test_engine_training import batches

from ds_hydra.engine import planning
from ds_hydra.engine.checkpointing.files import lock_folder
from ds_hydra.engine.ranks import agreement, process
from ds_hydra.errors import CheckpointError, HydraDataError, PlanMismatchError

STRATEGIES = {
    "kept": ("1x<1,3>", "1x<2,1> + 1x<1,1>", "3x<1,1>"),
    "gathered": ("3x<1,1;gather>", "1x<2,1;gather> + 1x<1,1;gather>", "1x<cp3,1;gather>"),
}
"""By what becomes of weights between two passes."""


def train_to_the_end(folder, where=None, victim=None, at=None, passes=0, weights="kept"):
    """Resume, train the ten iterations, save after every second one; the victim dies at iteration
    `at`, when it comes to `where` for another time after `passes`.
    """
    deaths = [] if victim is None else [f"{victim}:{at}:{where}:{passes}"]
    strategies = STRATEGIES[weights]
    restarted_script.main(Path(folder), deaths, strategies, num_hidden_layers=3)


KILLS = {
    "kept": (
        ("pull", 2, 1, 0),
        ("forward", 1, 2, 0),
        ("backward", 2, 3, 0),
        ("push", 0, 4, 0),
        ("step", 1, 6, 0),
        ("save", 2, 7, 0),
    ),
    "gathered": (
        ("pull", 2, 1, 0),
        ("pull", 1, 2, 3),  # between two layers, while the one before computes
        ("forward", 1, 3, 1),
        ("backward", 2, 4, 0),
        ("pull", 0, 5, 8),  # for the backward pass
        ("push", 0, 6, 2),
    ),
}
"""Where, which rank, in which iteration, and how often it has come there before."""


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "weights",
    [
        pytest.param("kept", marks=pytest.mark.slow),
        pytest.param("gathered", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_is_named_and_restarts_give_the_same_curve(tmp_path, weights):
    whole = tmp_path / "whole"
    nobody = (None, None, None, 0, weights)
    trained = run_until_end(train_to_the_end, 3, whole, str(whole), *nobody)
    assert [rank.exit_code for rank in trained] == [0, 0, 0]
    wanted = dict(read_json_lines(whole / "losses"))
    parts = tmp_path / "parts"
    for where, victim, at, passes in KILLS[weights][2:]:
        arguments = (where, victim, at, passes, weights)
        ended = run_until_end(train_to_the_end, 3, parts, str(parts), *arguments)
        assert ended[victim].exit_code == -signal.SIGKILL, where
        for rank in {0, 1, 2} - {victim}:
            assert ended[rank].exit_code not in (0, -signal.SIGKILL), (where, rank)
            assert f"rank {victim} is gone: its process ended" in ended[rank].stderr, (where, rank)
    trained = run_until_end(train_to_the_end, 3, parts, str(parts), *nobody)
    assert [rank.exit_code for rank in trained] == [0, 0, 0]
    seen = read_json_lines(parts / "losses")
    assert all(wanted[iteration] == loss for iteration, loss in seen)
    assert {iteration for iteration, _ in seen} == set(range(NUM_ITERATIONS))
    assert len(seen) > NUM_ITERATIONS, "some iterations were lost and trained again"


def one_rank_fails(folder, how):
    faults = {"silence_s": 8, "grace_s": 60 if how == "torn down" else 1}
    engine = start_hydra(tiny("llama_tied", num_hidden_layers=3), hydra={"faults": faults})
    engine.train_batch(data_of(0), strategy=STRATEGIES["kept"][0])
    if dist.get_rank() == 1:
        mark_fault(folder)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        elif how == "aborted":
            os.abort()
        elif how == "torn down":
            engine.propagator.train = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        else:

            def fail(*_, **__):
                raise MemoryError("no room left, on purpose")

            engine.propagator.stage_model.forward_stage = fail
    elif how == "torn down":
        # As NCCL: a collective that misses a rank does not end, and a monitor aborts the process
        logging.getLogger("ds_hydra").addHandler(logging.StreamHandler())  # as outside of pytest
        engine.propagator.train = lambda *_: (
            threading.Timer(5, os.abort).start() or time.sleep(3600)
        )
    try:
        engine.train_batch(data_of(1), strategy=STRATEGIES["kept"][0])
    except MemoryError:
        # A script that catches the error: the process stays, its connections stay open
        time.sleep(3600)


def lost_in_the_middle(folder, where, number, passes):
    """An iteration of two micro-batches a rank, in the middle of whose gathered layers one ends,
    stops or fails.
    """
    faults = {"silence_s": 6, "grace_s": 2}
    engine = start_hydra(tiny("llama", num_hidden_layers=3), hydra={"faults": faults})
    engine.train_batch(data_of(0), strategy="2x<1,1;gather>")
    if dist.get_rank() == 1:
        kill_in(engine, where, folder, number, passes)
    plan, plain = hand_plan("2x<1,1;gather>", data_of(1)), engine.propagator.train
    engine.propagator.train = lambda _, load, *rest: plain(plan, load, *rest)
    engine.train_batch(data_of(1), strategy=plan.strategy)


def start_with_data(folder, *, hydra=None, model=None, rows=None, **sections):
    profile = write_json(f"{folder}/profile.json", small_profile(6_000_000, num_layers=4))
    own = {
        "profile": profile,
        "tokens_per_iteration": 300,
        "planner": {"num_workers": 0},
        **(hydra or {}),
    }
    data = datasets.Dataset.from_list(rows) if rows else dataset_of(batches(2))
    return start_hydra(model or tiny("llama_tied"), hydra=own, training_data=data, **sections)


def whole_life(folder, where=None, victim=None, number=signal.SIGKILL):
    """All that an engine does from its start to its end; the victim ends, or stops, at `where`."""
    is_victim = dist.get_rank() == victim
    if is_victim and where in START_PHASES:
        end_at_start(where, folder, number)
    engine = start_hydra(
        tiny("llama_tied"),
        hydra={
            "context_length": 32,
            "tokens_per_iteration": 100,
            "profiling": {"repeats": 1},
            "faults": {"silence_s": 6, "grace_s": 2},
        },
        training_data=dataset_of(batches(2)),
        zero_optimization={
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    )
    if is_victim and where in LATER_PHASES:
        kill_in(engine, where, folder, number)
    engine.train_batch()
    engine.eval_batch(data_of(0))
    engine.save_checkpoint(f"{folder}/checkpoints")
    engine.load_checkpoint(f"{folder}/checkpoints")
    engine.save_16bit_model(f"{folder}/weights")
    engine.train_batch()
    engine.destroy()


def life_between_calls(folder, where=None, victim=None, number=signal.SIGKILL):
    """Training whose victim ends, or stops, outside of the engine's calls; then the others come to
    a collective that is not the engine's.
    """
    faults = {"silence_s": 6, "grace_s": 2}
    engine = start_hydra(tiny("llama_tied"), hydra={"faults": faults})
    engine.train_batch(data_of(0))
    if dist.get_rank() == victim:
        die(folder, number)
    if where == "own object":
        dist.broadcast_object_list([where], src=victim)
    elif where == "own handle":
        handle = dist.all_reduce(torch.ones(1), async_op=True)
        handle.wait()
    elif where == "after training":
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


KILL, STOP, FAIL = signal.SIGKILL, signal.SIGSTOP, None
TOLD = {
    KILL: "rank 1 is gone: its process ended",
    STOP: "rank 1 is silent for",
    FAIL: "rank 1 failed in propagation: MemoryError: no room left, on purpose",
}
ERROR, WATCHDOG, MONITOR = 1, 75, -signal.SIGABRT
"""Ends of the others: an error, the watchdog, or a monitor like NCCL's before it."""
BETWEEN = "rank 0 was between two calls of the engine"


def losses():
    """Cases: what the ranks do, how many they are, the fault of rank 1, ends of the others, what
    each of these says.
    """

    def case(life, num_ranks, fault, told, ends=(ERROR, WATCHDOG), marks=()):
        words = [life.__name__, *(getattr(word, "name", str(word)) for word in fault)]
        return pytest.param(life, num_ranks, fault, ends, told, marks=marks, id=" ".join(words))

    slow, nightly = (pytest.mark.slow,), (pytest.mark.nightly,)
    of_ctrl_c = "rank 1 was interrupted by its user between two calls of the engine"
    hows = {"stopped": TOLD[STOP], "failed": TOLD[FAIL], "ctrl-c": of_ctrl_c, "aborted": TOLD[KILL]}
    for how, told in hows.items():
        yield case(one_rank_fails, 3, (how,), [told], marks=nightly if how == "aborted" else slow)
    yield case(one_rank_fails, 3, ("torn down",), [TOLD[KILL]], (MONITOR,), slow)
    for where, number, passes in (
        ("pull", KILL, 8),  # for the backward pass
        ("pull", STOP, 3),  # beside the forward pass
        ("forward", STOP, 1),  # after the first micro-batch
        ("backward", STOP, 1),
        ("push", STOP, 2),  # beside the backward pass
        ("push", KILL, 6),
        ("pull", FAIL, 8),
        ("forward", FAIL, 1),
        ("backward", FAIL, 0),
        ("push", FAIL, 2),
    ):
        marks = () if (where, number) == ("pull", KILL) else nightly
        yield case(lost_in_the_middle, 2, (where, number, passes), [TOLD[number]], marks=marks)
    for where, number, told in (
        ("join", KILL, "rank 1 is gone"),
        ("profile", STOP, TOLD[STOP]),
        ("save 16 bit", KILL, TOLD[KILL]),
        ("destroy", KILL, TOLD[KILL]),
    ):
        marks = () if where == "destroy" else slow
        yield case(whole_life, 2, (where, 1, number), [told], marks=marks)
    for where, number, end, marks in (
        ("own collective", KILL, ERROR, ()),
        ("own handle", STOP, WATCHDOG, slow),
    ):
        yield case(
            life_between_calls, 2, (where, 1, number), [TOLD[number], BETWEEN], (end,), marks
        )


@pytest.mark.distributed
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("life", "num_ranks", "fault", "ends", "told"), losses())
def test_a_lost_rank_is_named(tmp_path, life, num_ranks, fault, ends, told):
    ended = run_until_end(life, num_ranks, tmp_path, str(tmp_path), *fault, victim=1)
    assert (tmp_path / "fault").exists(), "it came there"
    for rank in {*range(num_ranks)} - {1}:
        assert ended[rank].exit_code in ends, ended[rank].stderr
        assert all(text in ended[rank].stderr for text in told), ended[rank].stderr
    if life is lost_in_the_middle and FAIL in fault:
        assert "MemoryError: no room left, on purpose" in ended[1].stderr


def weights_of(engine):
    return [p.ds_tensor.clone() for p in engine.module.parameters()]


def faults_that_ranks_survive(folder):
    """Several faults in a row on one engine; each leaves it able to train."""
    rank, checkpoints = dist.get_rank(), f"{folder}/checkpoints"
    engine = start_with_data(folder, hydra={"run_dir": f"{folder}/run", "save_plans": False})
    assert deepspeed.comm.comm.cdb.shm_comm_op is None
    assert not [*Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_*")]
    assert process.let_collectives_end_at_exit.cache_info().currsize == 1
    engine.train_batch()

    # NaN in the gradient of one rank: nobody steps.
    before = weights_of(engine)
    with gradient_on_rank_1(engine, float("nan")):
        engine.train_batch()
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(engine), strict=True))
    assert engine.skipped_steps == engine.last_metrics.skipped_steps == 1
    assert (engine.global_steps, engine.optimizer.overflow) == (2, True)
    engine.train_batch()
    assert not engine.optimizer.overflow

    # The user's data raise on the ranks that read them.
    data, sampler = engine.source.data, engine.source.sampler
    broken = sampler.draw(sampler.state)[0].sample_indices[1]
    read = type(data).__getitem__

    def read_unless_broken(self, index):
        if index == broken:
            raise OSError("bad block")
        return read(self, index)

    with mock.patch.object(type(data), "__getitem__", read_unless_broken):
        text = refused(engine.train_batch, HydraDataError)
    assert f"example {broken} of the training data raised OSError: bad block" in text

    # Plans that differ, on either rank: nothing is exchanged.
    broadcast = planning.broadcast_plans

    def other_plan(deviant, *arguments):
        planned, document = broadcast(*arguments)
        if rank != deviant:
            return planned, document
        plan = dataclasses.replace(planned.plan, num_label_tokens=planned.plan.num_label_tokens + 1)
        return dataclasses.replace(planned, plan=plan), document

    for deviant in (1, 0, 1):
        other = functools.partial(other_plan, deviant)
        with mock.patch.object(planning, "broadcast_plans", other):
            said = [None, None]
            dist.all_gather_object(said, refused(engine.train_batch, PlanMismatchError))
            assert said[0] == said[1]

    # The disk with the metrics is full: training goes on.
    if rank == 0:
        engine.reporter.log._file.close()
        engine.reporter.log._file = open("/dev/full", "w")  # noqa: SIM115
    engine.train_batch()
    assert engine.global_steps == 4

    # A checkpoint cannot be written on one rank.
    def try_to_save(tag="new", save_dir=checkpoints):
        return refused(lambda: engine.save_checkpoint(save_dir, tag=tag), CheckpointError)

    engine.save_checkpoint(checkpoints, tag="good")
    full = OSError(28, "No space left on device") if rank == 1 else None
    save = engine.checkpoint_engine._save
    with mock.patch.object(engine.checkpoint_engine, "_save", side_effect=full, wraps=save):
        assert "No space left on device" in try_to_save("bad")
    dist.barrier()  # rank 0 cleans up after the error
    left = sorted(p.name for p in Path(checkpoints).iterdir())
    assert left == ["good", "latest", "zero_to_fp32.py", "zero_to_torch.py"]
    assert Path(checkpoints, "latest").read_text() == "good"
    dist.barrier()  # both have looked before the next one begins
    engine.save_checkpoint(checkpoints, tag="better")

    # Arguments that name no checkpoint, on one rank or all; another job that saves there.
    assert "tag is 'latest'" in try_to_save("latest")
    assert "tag is 'a b'" in try_to_save("a b" if rank == 1 else "new")
    assert "and tag 'on_rank_1' on rank 1, and" in try_to_save(f"on_rank_{rank}")
    other_folder = try_to_save(save_dir=f"{checkpoints}/{rank}")
    assert "checkpoints/1' and tag 'new' on rank 1, and" in other_folder
    assert "save_dir is ''" in try_to_save(save_dir="")
    assert "save_dir is None" in try_to_save(save_dir=None)
    assert "load_dir is ''" in refused(lambda: engine.load_checkpoint(""), CheckpointError)
    dist.barrier()
    lock = lock_folder(Path(checkpoints)) if rank == 1 else None
    dist.barrier()
    assert "another job is saving" in try_to_save()
    if lock is not None:
        os.close(lock)
    assert sorted(p.name for p in Path(checkpoints).iterdir()) == sorted([*left, "better"])
    assert engine.train_batch() > 0


@pytest.mark.distributed
def test_faults_that_leave_all_ranks_able_to_train(tmp_path):
    run_distributed(faults_that_ranks_survive, 2, str(tmp_path))


CALLS = {
    "save_checkpoint()": lambda engine, folder: engine.save_checkpoint(f"{folder}/checkpoints"),
    "save_16bit_model() or save_model()": lambda engine, folder: engine.save_16bit_model(folder),
    "load_checkpoint()": lambda engine, folder: engine.load_checkpoint(folder),
    "eval_batch()": lambda engine, folder: engine.eval_batch(data_of(1)),
    "score()": lambda engine, folder: engine.score(data_of(1)),
    "train_batch(batch)": lambda engine, folder: engine.train_batch(data_of(1)),
}


def call_on_one_rank_alone(folder):
    """The method is named on all ranks, and nothing happens."""
    engine = start_with_data(folder)
    for name, call in CALLS.items():
        act = call if dist.get_rank() == 1 else lambda engine, _: engine.train_batch()
        said = refused(functools.partial(act, engine, folder), PlanMismatchError)
        assert f"train_batch() on rank 0; {name} on rank 1" in said
    assert [path.name for path in Path(folder).iterdir()] == ["profile.json"]
    assert engine.train_batch() > 0
    with mock.patch.object(agreement, "_all_gather", wraps=agreement._all_gather) as gather:
        engine.train_batch(data_of(1))
    # What is called, with what is wrong; whether plans are alike; what came out
    assert gather.call_count == 3


@pytest.mark.distributed
def test_a_method_that_one_rank_alone_calls_is_named_on_all_and_nothing_happens(tmp_path):
    run_distributed(call_on_one_rank_alone, 2, str(tmp_path))


def stop_on_sigterm(folder):
    engine = start_with_data(folder, hydra={"faults": {"save_on_sigterm": f"{folder}/checkpoints"}})
    if dist.get_rank() == 0:
        append_json(f"{folder}/start", engine.global_steps)
    engine.load_checkpoint(f"{folder}/checkpoints")
    for _ in range(3):
        if dist.get_rank() == 1 and engine.global_steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = float(engine.train_batch())
        if dist.get_rank() == 0:
            append_json(f"{folder}/losses", [engine.global_steps, loss])


@pytest.mark.slow
@pytest.mark.distributed
def test_sigterm_of_one_rank_saves_after_the_iteration_and_all_end_cleanly(tmp_path):
    assert [
        rank.exit_code for rank in run_until_end(stop_on_sigterm, 2, tmp_path, str(tmp_path))
    ] == [0, 0]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step2"
    assert len(read_json_lines(tmp_path / "losses")) == 1
    assert [
        rank.exit_code for rank in run_until_end(stop_on_sigterm, 2, tmp_path, str(tmp_path))
    ] == [0, 0]
    assert [step for step, _ in read_json_lines(tmp_path / "losses")] == [1, 3, 4, 5]
