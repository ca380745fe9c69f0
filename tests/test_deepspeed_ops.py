"""Locks of compilers: a stale one is removed, one in use stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

from ds_hydra.engine.ranks import process


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return lock


def grow_old(folder):
    for path in folder.rglob("*"):
        os.utime(path, (0, time.time() - process.QUIET_S - 1))


def test_an_old_lock_that_nobody_holds_is_removed_and_named(lock, caplog):
    grow_old(lock.parents[1])
    process.remove_stale_locks(is_first=True)
    assert not lock.exists()
    assert f"removed {lock}" in caplog.text


def test_a_lock_of_a_living_compiler_stays(lock):
    grow_old(lock.parents[1])
    descriptor = os.open(lock, os.O_RDONLY)  # as torch keeps it open while it compiles
    process.remove_stale_locks(is_first=True)
    os.close(descriptor)
    assert lock.exists()


def test_a_young_lock_is_waited_for_by_name(lock, caplog, monkeypatch):
    naps = []

    def nap(seconds):
        naps.append(seconds)
        grow_old(lock.parents[1])

    monkeypatch.setattr(process.time, "sleep", nap)
    process.remove_stale_locks(is_first=True)
    assert naps == [1.0]
    assert not lock.exists()
    assert f"for {lock}: no process of this host holds this lock" in caplog.text


def test_a_lock_of_a_clock_that_was_set_back_does_not_hold_the_start(lock, monkeypatch):
    monkeypatch.setattr(process.time, "sleep", lambda _: pytest.fail("waits"))
    ahead = time.time() + 86400
    os.utime(lock, (ahead, ahead))
    process.remove_stale_locks(is_first=True)
    assert not lock.exists()


def test_a_folder_in_which_something_is_written_is_not_quiet(lock, monkeypatch):
    monkeypatch.setattr(process, "QUIET_S", 100.0)
    grow_old(lock.parents[1])
    (lock.parent / "cpu_adam.o").touch()
    naps = []

    def nap(seconds):
        naps.append(seconds)
        lock.unlink()  # the compiler has finished

    monkeypatch.setattr(process.time, "sleep", nap)
    process.remove_stale_locks(is_first=True)
    assert naps == [1.0]


@pytest.mark.slow
def test_no_shared_memory_is_compiled_for_scripts_that_start_deepspeed_themselves():
    script = """
        import deepspeed, ds_hydra, sys
        assert sys.modules["deepspeed.comm.torch"].build_shm_op() is None
    """
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": "/nowhere"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, env=environment, check=True, timeout=300)
