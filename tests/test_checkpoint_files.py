"""Files of a checkpoint: a crash at any moment leaves one that can be read, damage is named, no
code is run.
"""

from __future__ import annotations

import datetime
import errno
import functools
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_hydra.engine.checkpointing import files
from ds_hydra.engine.checkpointing.files import (
    HydraCheckpointEngine,
    Saving,
    check_client_state,
    read_tensors,
    verify,
)
from ds_hydra.errors import CheckpointError

FILES = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def save(save_dir, tag, value, *, numel=2000, in_between=lambda: None):
    """Save `value` as an engine of one rank does; DeepSpeed's part is the loop over files."""
    saving, writer = Saving(str(save_dir), tag, f"{os.getpid()}"), HydraCheckpointEngine()
    try:
        write_and_commit(saving, writer, tag, value, numel, in_between)
    finally:
        saving.unlock()


def write_and_commit(saving, writer, tag, value, numel, in_between):
    saving.begin()
    writer.makedirs(str(saving.folder / tag), exist_ok=True)
    for name in FILES:
        writer.save(
            {"value": value, "weights": torch.full((numel,), value)},
            str(saving.folder / tag / name),
        )
    script = Path(saving.folder, "zero_to_fp32.py")
    writer.keep_error(lambda: script.write_text("# DeepSpeed's script\n"))
    in_between()
    writer.write_digests(saving.folder, 0)
    if error := writer.take_error():
        saving.abort()
        raise error
    saving.commit(world_size=1, save_latest=True, ranks=[0])


def load(save_dir):
    """The value of the last checkpoint, after all checks that `load_checkpoint` makes."""
    tag = files.find_tag(Path(save_dir), "latest")
    folder = Path(save_dir, files.resolve_tag(Path(save_dir), tag))
    verify(folder)
    contents = [read_tensors(folder / name) for name in FILES]
    assert {c["value"] for c in contents} == {float(c["weights"][0]) for c in contents}
    (value,) = {c["value"] for c in contents}
    return value


def in_child(action):
    """Exit code of a forked process that runs `action`."""
    process = multiprocessing.get_context("fork").Process(target=action)
    process.start()
    process.join()
    return process.exitcode


def watch_events(seen, limit=None):
    """Count what touches the disk; die at event number `limit`."""
    wanted = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}

    def touch(*_):
        seen.append(1)
        if len(seen) == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, _: touch() if event in wanted else None)
    write = files._DigestingFile.write

    def counting_write(self, data):
        touch()
        return write(self, data)

    files._DigestingFile.write = counting_write


@pytest.mark.parametrize(
    "tag",
    [
        pytest.param("step2", marks=pytest.mark.slow, id="new tag"),
        pytest.param("step1", id="same tag"),
    ],
)
def test_a_crash_at_any_moment_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path, monkeypatch, tag
):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and the page cache survives a process
    check_every_moment(tmp_path, tag)


def check_every_moment(tmp_path, tag, every=1):
    save(tmp_path / "before", "step1", 1.0)
    shutil.copytree(tmp_path / "before", tmp_path / "count")

    def count():
        seen = []
        watch_events(seen)
        save(tmp_path / "count", tag, 2.0)
        (tmp_path / "num_events").write_text(str(len(seen)))

    assert in_child(count) == 0
    num_events = int((tmp_path / "num_events").read_text())
    assert num_events > 30
    found = []
    for moment in range(1, num_events + 1, every):
        save_dir = shutil.copytree(tmp_path / "before", tmp_path / f"run{moment}")

        def crash(save_dir=save_dir, moment=moment):
            watch_events([], moment)
            save(save_dir, tag, 2.0)

        assert in_child(crash) == -signal.SIGKILL
        found.append(load(save_dir))
        save(save_dir, "step3", 3.0)
        assert load(save_dir) == 3.0
        assert not [p for p in save_dir.iterdir() if p.name.startswith(".")]
    assert sorted(found) == found, "the old one up to some moment, the new one from then on"
    assert set(found) == {1.0, 2.0}


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, "step1", 1.0)
    save(tmp_path, "step2", 2.0)
    return tmp_path


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "altered":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()


MANIFEST = files.MANIFEST_NAME


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((FILES[0], kind) for kind in ("truncated", "altered", "missing")),
        (FILES[1], "altered"),
        (MANIFEST, "truncated"),
        (MANIFEST, "sizes"),
    ],
)
def test_damage_is_reported_by_name_with_what_else_is_there(saved, name, kind):
    path = saved / "step2" / name
    if kind == "sizes":
        path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1'))
        name = FILES[0]
    else:
        damage(path, kind)
    with pytest.raises(CheckpointError, match=f"{name}.*(truncated|altered|missing)") as caught:
        load(saved)
    if name != MANIFEST:
        assert "there is also step1: pass tag=... to load_checkpoint" in str(caught.value)
    if kind in ("truncated", "missing"):  # without a manifest, as stock DeepSpeed's
        (saved / "step2" / MANIFEST).unlink()
        damage(saved / "step2" / FILES[1], kind)
        with pytest.raises(CheckpointError, match=FILES[1] if name == MANIFEST else name):
            load(saved)


FILES_OF = {"schema": files.MANIFEST_SCHEMA}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"schema": "other"},
        FILES_OF,
        {**FILES_OF, "files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}},
        {**FILES_OF, "files": {"a": 3}},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(saved, document):
    (saved / "step2" / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=MANIFEST):
        load(saved)


def test_the_newest_ones_are_advised_also_where_latest_is_missing(tmp_path, caplog):
    assert files.find_tag(tmp_path, "latest") is None
    assert not caplog.messages
    for step in range(8, 13):
        save(tmp_path, f"global_step{step}", float(step))
    damage(tmp_path / "global_step12" / FILES[0], "truncated")
    newest = "there is also global_step11, global_step10, global_step9 and 1 older ones: pass tag="
    with pytest.raises(CheckpointError, match=newest):
        load(tmp_path)
    (tmp_path / "latest").unlink()
    assert files.find_tag(tmp_path, "latest") is None
    (message,) = caplog.messages
    assert "latest is missing, so that nothing is loaded; there is also global_step12" in message


@pytest.mark.parametrize("damaged", ["step1", "step1\n", "step2"])
def test_a_latest_that_names_another_checkpoint_is_refused(tmp_path, damaged):
    for number in (1, 2, 10):
        save(tmp_path, f"step{number}", float(number))
    latest = tmp_path / "latest"
    assert latest.read_text() == "step10"  # and nothing else, for stock DeepSpeed
    assert load(tmp_path) == 10.0
    latest.write_text(damaged)
    with pytest.raises(
        CheckpointError, match=r"latest names 'step[12]', and .* last is 'step10', .* tag='step10'"
    ):
        load(tmp_path)
    latest.write_text("step10\n")
    assert load(tmp_path) == 10.0
    latest.write_text("step2")
    (tmp_path / "step10" / files.LATEST_MARK).unlink()  # as the message says
    assert load(tmp_path) == 2.0
    save(tmp_path, "step1", 1.5)
    save(tmp_path, "step1", 1.75)
    assert load(tmp_path) == 1.75
    assert [mark.parent.name for mark in tmp_path.glob(f"*/{files.LATEST_MARK}")] == ["step1"]


def test_a_latest_that_stock_deepspeed_has_written_is_taken(tmp_path):
    save(tmp_path, "step1", 1.0)
    (tmp_path / "step2").mkdir()  # without a manifest
    (tmp_path / "latest").write_text("step2")
    assert files.find_tag(tmp_path, "latest") == "step2"
    save(tmp_path, "step3", 3.0)
    assert load(tmp_path) == 3.0


def test_what_users_put_beside_the_files_stays(tmp_path):
    folder = tmp_path / "best"
    (folder / "data").mkdir(parents=True)
    kept = {"tokenizer.json": "{}", "data/train.jsonl": "[]"}
    for name, text in kept.items():
        (folder / name).write_text(text)
    (folder / "zero_pp_rank_9_mp_rank_00_model_states.pt").write_text("of more ranks")
    for value in (1.0, 2.0):
        save(tmp_path, "best", value)
        assert load(tmp_path) == value
        assert {name: (folder / name).read_text() for name in kept} == kept
        assert not (folder / "zero_pp_rank_9_mp_rank_00_model_states.pt").exists()
    (folder / "notes").write_text("x")
    folder.rename(tmp_path / ".replaced-best")  # as a crash between two renames leaves it
    save(tmp_path, "other", 3.0)
    assert (folder / "notes").read_text() == "x"
    folder.rename(tmp_path / ".replaced-best")
    save(tmp_path / "new", "best", 4.0)
    (tmp_path / "new" / "best").rename(folder)  # and one after both
    save(tmp_path, "other", 5.0)
    assert (folder / "notes").read_text() == "x"
    for text in ("", '{"schema": "other"}'):  # a damaged one is written again
        (folder / files.MANIFEST_NAME).write_text(text)
        save(tmp_path, "best", 6.0)
        assert load(tmp_path) == 6.0
        assert (folder / "notes").read_text() == "x"
    assert not list(tmp_path.glob(".replaced-*"))


def test_a_link_is_replaced_with_a_warning_and_a_file_is_not(tmp_path, caplog):
    save(tmp_path / "disk", "elsewhere", 1.0)
    save_dir = tmp_path / "saved"
    save_dir.mkdir()
    (save_dir / "last").symlink_to(tmp_path / "disk" / "elsewhere")
    for value in (2.0, 3.0):
        save(save_dir, "last", value)
        assert load(save_dir) == value
    assert load(tmp_path / "disk") == 1.0
    (warning,) = caplog.messages
    assert f"last is a link to {tmp_path}/disk/elsewhere: the checkpoint takes the place" in warning
    (save_dir / "gone").symlink_to(tmp_path / "nowhere")
    save(save_dir, "gone", 4.0)
    assert load(save_dir) == 4.0
    (save_dir / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="notes is a file, and a checkpoint is a folder"):
        save(save_dir, "notes", 5.0)
    assert (save_dir / "notes").read_text() == "mine"
    save(save_dir, "last", 6.0)
    assert load(save_dir) == 6.0


def test_weights_that_were_saved_elsewhere_are_no_part_of_a_checkpoint(tmp_path):
    saving, writer = Saving(str(tmp_path), "step1", "0"), HydraCheckpointEngine()
    writer.save({"weights": torch.ones(3)}, str(tmp_path / "pytorch_model.bin"))
    write_and_commit(saving, writer, "step1", 1.0, 3, lambda: None)
    saving.unlock()
    assert load(tmp_path) == 1.0
    saving = Saving(str(tmp_path), "step2", "1")
    write_and_commit(saving, writer, "step2", 2.0, 3, lambda: None)
    saving.unlock()
    assert load(tmp_path) == 2.0


class Malicious:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (str(self._path), "w")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_no_code_of_a_file_is_run(tmp_path, legacy):
    path, trace = tmp_path / "file.pt", tmp_path / "trace"
    torch.save({"a": Malicious(trace)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read: .*io\.open"):
        read_tensors(path)
    with files.only_weights(), pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=False)  # as DeepSpeed asks for it
    assert not trace.exists()


NO_FOLDER = ("", "../evil", "a/b", ".hidden", "a\0b")
NO_NAME = ("latest", "latest_universal", "zero_to_fp32.py", " ", "a b", "a\n", "a\tb", "x" * 201, 7)
"""Tags that could not be read back out of `latest`."""


@pytest.mark.parametrize("tag", [*NO_FOLDER, *NO_NAME])
def test_a_tag_is_the_name_of_one_folder_that_latest_can_name(tmp_path, tag):
    is_folder = tag in NO_NAME
    said = "the checkpoint tag is" if is_folder else "expected the name of a folder"
    with pytest.raises(CheckpointError, match=said) as refused:
        Saving(str(tmp_path), tag, "0")
    assert not list(tmp_path.iterdir())
    advised = re.search("such as '(.*?)'", str(refused.value))
    save(tmp_path, advised[1] if tag == "latest" else "step1", 1.0)
    assert load(tmp_path) == 1.0
    if not is_folder:
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(
            CheckpointError, match=r"latest: .* the name of a folder.* also step1: pass"
        ):
            files.find_tag(tmp_path, "latest")


@pytest.mark.parametrize("can_lock", [True, False])
def test_two_jobs_in_one_folder_never_mix(tmp_path, monkeypatch, can_lock):
    def refuse_locks(*_):
        raise OSError(9, "as NFS does for a folder")

    if not can_lock:
        monkeypatch.setattr(files.fcntl, "flock", refuse_locks)
    save(tmp_path, "step0", 0.0)
    codes = []

    def other_job():
        try:
            save(tmp_path, "step1", 2.0)
        except CheckpointError as error:
            os._exit(7 if "another job is saving" in str(error) else 8)

    def save_here():
        save(tmp_path, "step1", 1.0, in_between=lambda: codes.append(in_child(other_job)))

    if can_lock:
        save_here()
        assert set(codes) == {7}
        assert load(tmp_path) == 1.0
    else:  # the second one wins, the first one is told
        with pytest.raises(CheckpointError, match="No such file or directory"):
            save_here()
        assert codes[0] == 0
        assert load(tmp_path) == 2.0
    save(tmp_path, "step2", 3.0)
    assert load(tmp_path) == 3.0
    assert not list(tmp_path.glob(".saving-*"))


def test_a_file_of_a_rank_that_is_not_there_is_missed(tmp_path):
    """Before `latest` names the checkpoint."""
    saving, writer = Saving(str(tmp_path), "step", "1"), HydraCheckpointEngine()
    saving.begin()
    commit = functools.partial(saving.commit, world_size=1, save_latest=True, ranks=[0])
    written = saving.folder / "step"
    written.mkdir()
    for name in ("a.pt", "b.pt"):
        writer.save({"value": name}, str(written / name))
    with pytest.raises(CheckpointError, match="rank 0 has written nothing"):
        commit()
    writer.write_digests(saving.folder, 0)
    (written / "a.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step lacks a\.pt, which a rank has written"):
        commit()
    saving.unlock()
    assert not (written / MANIFEST).exists()
    assert not (tmp_path / "latest").exists()


def test_a_full_disk_leaves_the_checkpoint_before(saved):
    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # as a full disk: write() fails
        try:
            save(saved, "step3", 3.0, numel=1_000_000)
        except CheckpointError as error:
            os._exit(7 if "was not saved" in str(error) else 8)

    assert in_child(fill) == 7
    assert load(saved) == 2.0
    assert not list(saved.glob(".saving-*"))


class Attribute:
    """Pickled as getattr(owner, name), which is what Python 3.11.2 makes of an enum's member."""

    def __init__(self, owner, name):
        self._parts = (owner, name)

    def __reduce__(self):
        return getattr, self._parts


def test_enums_of_early_python_3_11_are_read_and_no_other_attribute(tmp_path):
    path = tmp_path / "states.pt"
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "weights")}, path)
    assert read_tensors(path) == {"zero_stage": ZeroStageEnum.weights}
    for owner, name in ((ZeroStageEnum, "mro"), (LossScaler, "backward"), ("text", "format")):
        torch.save({"zero_stage": Attribute(owner, name)}, path)
        with pytest.raises(CheckpointError, match="Unsupported getattr"):
            read_tensors(path)


ARRAYS = (
    np.linspace(0, 1, 3), np.random.RandomState(3).get_state()[1], np.ones(2, np.complex64), np.array(True),
    np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)), np.zeros((0, 3)),
)  # fmt: skip


def test_numbers_and_arrays_of_numpy_in_a_client_state_are_read_and_no_objects(tmp_path):
    path = tmp_path / "states.pt"
    numbers = [np.float64(0.5), np.float32(2), np.int64(7), np.int32(-1), np.bool_(True)]
    state = {"best": numbers, "curves": ARRAYS, "rng": np.random.RandomState(3).get_state()}
    check_client_state(state)
    torch.save(state, path)
    read = read_tensors(path)
    assert read["best"] == numbers
    for array, own in zip(read["curves"], ARRAYS, strict=True):
        assert array.dtype == own.dtype.newbyteorder("=")
        np.testing.assert_array_equal(array, own)
    torch.save({"best": np.array([print, 1])}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(path)


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}], dtype=object),
        np.array(["a"]),
        np.ma.array([1, 2], mask=[0, 1]),
        datetime.date(2026, 1, 1),
        lambda: 0,
        Attribute(ZeroStageEnum, "mro"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_be_loaded_is_refused_before_saving_by_its_key(value):
    with pytest.raises(CheckpointError, match=r"client_state\['mine'\] is a .* not loaded: "):
        check_client_state({"fine": torch.ones(2), "mine": {"deep": [value]}})


@pytest.mark.parametrize("key", ["module", "lr_scheduler", "global_steps", "ds_hydra"])
def test_a_key_of_deepspeed_in_a_client_state_is_refused(key):
    with pytest.raises(CheckpointError, match=f"client_state has the key '{key}', .*'my_{key}'"):
        check_client_state({key: 1})


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_knows_no_fsync_of_folders_is_no_error(tmp_path, monkeypatch, number):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    expected = pytest.raises(OSError, match="error") if number == errno.EIO else nullcontext()
    with expected:
        files._sync_folder(tmp_path)
