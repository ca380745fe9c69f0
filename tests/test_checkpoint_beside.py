"""Checkpoints that are written beside training: the same files, one at a time, errors on all ranks,
and a crash leaves the one before.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import test_checkpoint_files
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from distributed import run_distributed, wait_until
from engines import raised_by, refused
from faults import die, run_until_end
from models import tiny
from test_checkpoint import start, train
from test_checkpoint_files import FILES, check_every_moment
from test_trainer import make, prepare

from ds_hydra.engine.checkpointing import beside, files
from ds_hydra.engine.checkpointing.beside import HostCopies, SavingBeside
from ds_hydra.engine.checkpointing.files import HydraCheckpointEngine, Saving
from ds_hydra.errors import CheckpointError

BESIDE = {"checkpoint": {"asynchronous": True}}
HOST = torch.device("cpu")


def test_a_copy_is_of_the_moment_and_shares_what_is_shared():
    whole = torch.arange(6.0)
    state = {
        "whole": whole,
        "views": [whole[2:4], whole.view(2, 3).t()],
        "trained": torch.nn.Parameter(torch.ones(3)),
        "rest": ({"lr": [0.1]}, torch.Size([2, 3]), None, torch.ones(0), torch.tensor(7)),
    }
    copies = HostCopies(HOST, 1)
    copies.begin()
    taken = copies.take(state)
    whole += 1
    state["rest"][0]["lr"].append(0.2)
    assert taken["whole"].tolist() == [0, 1, 2, 3, 4, 5]
    assert taken["views"][0].tolist() == [2, 3]
    assert taken["views"][1].tolist() == [[0, 3], [1, 4], [2, 5]]
    taken["whole"][2] = 9
    assert taken["views"][0][0] == 9
    assert isinstance(taken["trained"], torch.nn.Parameter)
    lr, *others = taken["rest"]
    assert lr == {"lr": [0.1]}
    assert others[:2] == [torch.Size([2, 3]), None]
    assert type(others[0]) is torch.Size
    assert [others[2].shape, int(others[3])] == [(0,), 7]


def test_memory_of_copies_is_kept_and_only_that():
    copies = HostCopies(HOST, 1)
    state = [torch.ones(1 << 18), torch.ones(1 << 19), torch.ones(3)]
    places = []
    for _ in range(3):
        copies.begin()
        assert not copies._buffers
        places.append([tensor.data_ptr() for tensor in copies.take(state)[:2]])
    assert places[0] == places[1] == places[2]
    copies.begin()
    copies.take(state[1:])
    copies.begin()
    assert [size for size, free in copies._free.items() if free] == [4 << 19]


def test_what_memory_does_not_hold_is_not_copied(monkeypatch, caplog):
    monkeypatch.setattr(beside, "available_bytes", lambda: 6e6)
    state = [torch.ones(1 << 19), torch.ones(1 << 19)]
    copies = HostCopies(HOST, 2)
    copies.begin()
    assert copies.take(state) is None
    (message,) = caplog.messages
    assert "takes 0.00419 GB of the host's memory, and its share is 0.0027 GB; free" in message
    assert "hydra.checkpoint.asynchronous" in message
    monkeypatch.setattr(beside, "available_bytes", lambda: 1e9)
    assert copies.take(state) is not None
    monkeypatch.setattr(beside, "available_bytes", lambda: 0.0)
    copies.begin()
    assert copies.take(state) is not None  # in the memory that it has


class Gate:
    """Lets no thread write a checkpoint until it is opened."""

    def __init__(self):
        self.opened = threading.Event()
        plain = HydraCheckpointEngine.write_held

        def write_held(writer, check):
            assert self.opened.wait(60)
            plain(writer, check)

        self._patch = mock.patch.object(HydraCheckpointEngine, "write_held", write_held)

    def __enter__(self):
        self._patch.start()
        return self

    def __exit__(self, *_):
        self.opened.set()
        self._patch.stop()


def check_same(mine, other):
    """Raise AssertionError unless both hold the same values, bit for bit, in the same places."""
    assert type(mine) is type(other)
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, other)
        assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
    elif isinstance(mine, dict):
        assert list(mine) == list(other)
        check_same(list(mine.values()), list(other.values()))
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for one, another in zip(mine, other, strict=True):
            check_same(one, another)
    elif isinstance(mine, LossScaler):
        check_same(vars(mine), vars(other))
    else:
        assert mine == other


def save_and_go_on(folder):
    """Save while training goes on, and the same while it waits."""
    engine = start(folder, tiny("llama_tied"), hydra=BESIDE)
    train(engine, 2)
    with mock.patch.object(HostCopies, "take", return_value=None):  # as where memory is short
        engine.save_checkpoint(f"{folder}/waiting", tag="first")
        engine.wait_for_checkpoint()
    save_dir = Path(folder, "beside")
    log = logging.getLogger("ds_hydra.engine.checkpointing.beside")
    with Gate() as gate:
        engine.save_checkpoint(str(save_dir), tag="first")
        losses = train(engine, 2)[0]
        assert [path.name[:8] for path in save_dir.iterdir()] == [".saving-"]
        assert sum(t.name == "ds_hydra-checkpoint" for t in threading.enumerate()) == 1
        with mock.patch.object(log, "info") as said:
            said.side_effect = lambda *_: gate.opened.set()  # that it waits
            if dist.get_rank() != 0:
                gate.opened.set()
            engine.save_checkpoint(str(save_dir), tag="second")
        waits = f"waiting for {folder}/beside/first, which is written beside training"
        told = [str(call.args[0] % call.args[1:]) for call in said.call_args_list]
        assert (waits in told) == (dist.get_rank() == 0)
        assert (save_dir / "latest").read_text() == "first"
    engine.load_checkpoint(str(save_dir))  # the second one, for which it waits
    assert (engine.global_steps, (save_dir / "latest").read_text()) == (4, "second")
    engine.load_checkpoint(str(save_dir), tag="first")
    assert train(engine, 2)[0] == losses
    engine.save_checkpoint(str(save_dir), tag="last")
    engine.destroy()
    left = {path.name for path in save_dir.iterdir()}
    assert left >= {"first", "last", "latest", "second"}
    assert not [name for name in left if name.startswith(".")]


@pytest.mark.distributed
def test_what_is_written_beside_training_is_what_was_copied(tmp_path):
    run_distributed(save_and_go_on, 2, str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "waiting" / "first").glob("*.pt"))
    assert len(names) == 4
    for name in names:
        both = (
            files.read_tensors(tmp_path / kind / "first" / name) for kind in ("waiting", "beside")
        )
        check_same(*both)
    for tag in ("first", "second", "last"):
        files.verify(tmp_path / "beside" / tag)


def fail_on_rank_1(folder):
    """Check what each call raises after rank 1 could not write, and what is left."""
    engine = start(folder, tiny("llama"), hydra=BESIDE)
    train(engine, 1)
    save_dir = Path(folder, "saved")
    engine.save_checkpoint(str(save_dir), tag="good")
    engine.wait_for_checkpoint()
    plain = HydraCheckpointEngine._save

    def fail(writer, state, path, *check):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        plain(writer, state, path, *check)

    def train_until_told():
        while True:  # the error ends it
            engine.train_batch()

    for call in (
        train_until_told,
        lambda: engine.save_checkpoint(str(save_dir), tag="next"),
        lambda: engine.load_checkpoint(str(save_dir)),
        engine.wait_for_checkpoint,
        engine.destroy,
    ):
        with mock.patch.object(HydraCheckpointEngine, "_save", fail):
            engine.save_checkpoint(str(save_dir), tag="bad")
            text = refused(call, CheckpointError)
        assert f"{folder}/saved/bad, written beside training: " in text
        assert "No space left on device" in text
        assert not [path for path in save_dir.iterdir() if path.name.startswith(".saving")]
        assert (save_dir / "latest").read_text() == "good"
        if call != engine.destroy:
            engine.save_checkpoint(str(save_dir), tag="good")
            engine.wait_for_checkpoint()
    assert engine.is_destroyed


@pytest.mark.distributed
def test_what_a_rank_cannot_write_is_raised_on_all_and_the_one_before_stays(tmp_path):
    run_distributed(fail_on_rank_1, 2, str(tmp_path))
    files.verify(tmp_path / "saved" / "good")


def save(save_dir, tag, value, *, numel=2000):
    """Save `value` beside training as an engine of one rank does."""
    saving, writer = Saving(str(save_dir), tag, f"{os.getpid()}"), HydraCheckpointEngine()
    copies = HostCopies(HOST, 1)
    saving.begin()
    copies.begin()
    writer.hold = copies.take
    writer.makedirs(str(saving.folder / tag), exist_ok=True)
    for name in FILES:
        states = {"value": value, "weights": torch.full((numel,), value)}
        writer.save(states, str(saving.folder / tag / name))
    commit = functools.partial(saving.commit, world_size=1, save_latest=True, ranks=[0])
    written = SavingBeside(saving, writer.detach(), 0, HOST, ranks=[0], commit=commit)
    written._thread.join()
    if written._error is not None:
        raise written._error


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_thread_that_writes_gives_way_to_training(tmp_path, monkeypatch):
    noted, write = [], SavingBeside._write

    def noting(beside):
        noted.append(os.getpriority(os.PRIO_PROCESS, 0))
        write(beside)

    monkeypatch.setattr(SavingBeside, "_write", noting)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    save(tmp_path, "step1", 1.0)
    assert noted == [min(own + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.slow
def test_a_crash_at_any_moment_leaves_the_one_before_or_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(test_checkpoint_files, "save", save)
    check_every_moment(tmp_path, "step1", every=3)


def end_after_saving(folder, how):
    engine = start(folder, tiny("llama"), hydra=BESIDE)
    train(engine, 1)
    engine.save_checkpoint(f"{folder}/saved", tag="before")
    engine.wait_for_checkpoint()
    plain = HydraCheckpointEngine.write_held

    def write_late(writer, check):
        wait_until(lambda: not threading.main_thread().is_alive() or how == "lost")
        if how == "lost" and dist.get_rank() == 1:
            die(folder)
        plain(writer, check)

    HydraCheckpointEngine.write_held = write_late
    engine.save_checkpoint(f"{folder}/saved", tag="last")
    while how == "lost":
        engine.train_batch()
    # A process of its own ends so; that of a test leaves out the threads
    threading._shutdown()


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["ended", "lost"])
def test_a_script_ends_with_its_checkpoint_and_a_lost_rank_without(tmp_path, how):
    ended = run_until_end(end_after_saving, 2, tmp_path, str(tmp_path), how)
    codes = [rank.exit_code for rank in ended]
    if how == "ended":
        assert codes == [0, 0], ended
    else:
        assert codes[1] == -signal.SIGKILL
        assert codes[0] != 0
        assert "rank 1 is gone" in ended[0].stderr
    wanted = "last" if how == "ended" else "before"
    assert (tmp_path / "saved" / "latest").read_text() == wanted
    files.verify(tmp_path / "saved" / wanted)


def train_with_trainer(folder):
    """Train with checkpoints beside training, resume; return what is left and the losses."""
    data = prepare(folder)
    settings = {
        "num_train_epochs": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "eval_dataset": data.select(range(4)),
    }
    trainer = make(folder, "beside", data=data, hydra=BESIDE, **settings)
    trainer.train()
    left = sorted(os.listdir(Path(folder, "beside")))
    dist.barrier()
    shutil.rmtree(Path(folder, "beside", left[-1]), ignore_errors=True)
    dist.barrier()
    again = make(folder, "beside", data=data, hydra=BESIDE, **settings)
    again.train(resume_from_checkpoint=True)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (trainer, again)]
    found = Path(trainer.state.best_model_checkpoint).name, left, losses
    plain = HydraCheckpointEngine._save

    def fail(writer, state, path, *check):
        if "optim" in path and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        plain(writer, state, path, *check)

    failing = make(folder, "failing", data=data, hydra=BESIDE, max_steps=2, save_steps=1)
    with mock.patch.object(HydraCheckpointEngine, "_save", fail):
        _, said = raised_by(failing.train)
    return found, said, os.listdir(Path(folder, "failing"))


@pytest.mark.slow
@pytest.mark.distributed
def test_the_trainers_checkpoints_are_complete_and_rotated(tmp_path):
    for (best, kept, losses), text, left in run_distributed(train_with_trainer, 2, str(tmp_path)):
        assert len(kept) == 2
        assert best in kept
        assert losses[0] == losses[1]
        assert "No space left on device" in text
        assert left == []
