"""Checkpoint files that survive a crash: which names they may have, written aside, digested and
renamed; checked before they are read.

[Note: Layout of a checkpoint folder]
DeepSpeed's own, `<save_dir>/<tag>/*.pt` and `<save_dir>/latest`, with two files more: the manifest
`<save_dir>/<tag>/ds_hydra_manifest.json` with size and SHA-256 of every file, and the mark
`<save_dir>/<tag>/ds_hydra_latest` of the checkpoint that `latest` names (two while it changes).
While it is written, a checkpoint lives in `<save_dir>/.saving-<tag>-<id>`; one that is written
again is moved to `<save_dir>/.replaced-<tag>` for the moment between two renames. A folder without
a manifest (stock DeepSpeed's) is read without digests, and needs no mark.

[Note: Two jobs, one folder]
The id of a `.saving-` folder is drawn for every saving, so that files of two jobs never meet in
one. Meanwhile the committing rank holds a lock on `save_dir`: a second job is refused, and what
lies there unlocked is a dead job's and removed. Some network file systems cannot lock a folder;
there the second job may remove what the first one writes, whose saving then fails by name.

[Note: Trial]
A folder that nobody may write to, or whose mount cannot rename folders (object storage), would end
a run at its first checkpoint. `try_folder` finds it before the first step, with the calls of a
checkpoint and a name of its own: it takes no lock, so that jobs that share a folder do not meet.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import functools
import hashlib
import io
import json
import logging
import os
import pickle
import secrets
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.utils._pytree import tree_map_only

from ds_hydra.engine.ranks.agreement import broadcast_text, run_together
from ds_hydra.errors import CheckpointError, HydraConfigError
from ds_hydra.version import __version__

logger = logging.getLogger(__name__)

MANIFEST_SCHEMA = "ds_hydra.manifest/1"
MANIFEST_NAME = "ds_hydra_manifest.json"
LATEST_MARK = "ds_hydra_latest"
_SAVING, _DIGESTS = ".saving-", "digests"
_ENDING = "_states.pt"
"""Ending of the names of all files of a DeepSpeed checkpoint."""
_BLOCK_BYTES = 1 << 22
_POLL_S = 0.05
_MAX_MANIFEST_BYTES = 1 << 26

_SHARE = (
    'Save to a folder that all hosts share, or set "checkpoint": {"use_node_local_storage": true} in '
    "the DeepSpeed configuration"
)

_WRITABLE = "Name a folder on a disk with free space that all ranks may write to"
_RENAMES = (
    "Name a folder on a file system that renames folders, a local disk or a shared one, not a mount of object storage, "
    "and copy whole checkpoints from there"
)

_SAFE_CLASSES = (
    *(LossScaler, DynamicLossScaler, ZeroStageEnum),
    # By their own reduction: NumPy has moved these functions between releases
    *(np.float64(0).__reduce__()[0], np.dtype),
    *(type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"),
    *(np.zeros(0).__reduce__()[0], np.ndarray),
)
"""Classes and functions of plain values that files hold besides tensors and containers: classes of
DeepSpeed's own ZeRO-3 files, and NumPy's numbers and arrays of them, which easily get into a
client_state. Arrays of objects are not read: their dtype is not among these.
"""


def _enum_member(kind: Any, name: str) -> Enum:
    """Stand in for `getattr` while reading: Python 3.11.0 to 3.11.3 pickles an enum's member as
    getattr(enum, name).
    """
    # A free `getattr` would reach any function from a class that may be read
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"Unsupported getattr({kind!r}, {name!r})")
    return kind[name]


def _no_bytes() -> bytes:
    """Stand in for `bytes` while reading: the content of an empty array, and nothing longer."""
    return b""


class HydraCheckpointEngine(TorchCheckpointEngine):
    """Writer and reader of DeepSpeed's files: digests on writing, tensors and plain values only on
    reading.

    Errors of writing are kept until `take_error`, because DeepSpeed's ranks still meet in barriers.
    `handed` maps the ending of a file name to content that is given to DeepSpeed in place of the
    file's. `hold`, where it is set, gives a copy of a file's content that is written later, by
    `write_held`; None writes the file at once.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.handed: dict[str, Any] = {}
        self.hold: Callable[[Any], Any] | None = None
        self._held: list[tuple[Any, str]] = []
        self._digests: dict[str, dict[str, Any]] = {}
        self._error: OSError | RuntimeError | None = None
        self._path_of_error = ""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder; an error is kept."""
        self.keep_error(lambda: os.makedirs(path, exist_ok=exist_ok), path)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file to the disk (not only to the page cache), with its digest remembered."""
        copied = None if self.hold is None else self.hold(state_dict)
        if copied is not None:
            self._held.append((copied, path))
        else:
            self.keep_error(lambda: self._save(state_dict, path), path)

    def detach(self) -> HydraCheckpointEngine:
        """The writer of the files so far, for another thread; this one begins anew."""
        # Shallow: lists and digests go to the other one, and new ones are made here
        detached = copy.copy(self)
        self.hold, detached.hold = None, None
        self._held, self._digests, self._error = [], {}, None
        return detached

    def write_held(self, check: Callable[[], None]) -> None:
        """Write what is held. An error is kept; one of `check`, which is asked on the way, is
        raised.
        """
        while self._held and self._error is None:
            state_dict, path = self._held.pop(0)
            self.keep_error(functools.partial(self._save, state_dict, path, check), path)

    def _save(self, state_dict: Any, path: str, check: Callable[[], None] = lambda: None) -> None:
        with open(path, "wb") as file:
            # Hashed on the way: reading it again would cost a pass over the file
            digesting = _DigestingFile(file, check)
            torch.save(state_dict, digesting)
            file.flush()
            sync(file.fileno())
        self._digests[path] = digesting.to_json()

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file: the one handed over for it, else read with `read_tensors`."""
        # DeepSpeed asks for files of this very rank, which a smaller world has not written
        for ending, content in self.handed.items():
            if path.endswith(ending):
                return content
        return read_tensors(Path(path))

    def keep_error(self, action: Callable[[], Any], path: str = "") -> None:
        """Run `action`, which writes to `path`; an error is kept."""
        try:
            action()
        # torch's zip writer raises RuntimeError on a full disk
        except (OSError, RuntimeError) as error:
            # The first one: what follows a full disk says less
            if self._error is None:
                self._error, self._path_of_error = error, path

    def take_error(self) -> CheckpointError | None:
        """The error since the last call, if any."""
        error, self._error = self._error, None
        if error is None:
            return None
        hint = ""
        if isinstance(error, FileNotFoundError):  # rank 0 has made the folder
            hint = f". {_SHARE}"
        elif self._path_of_error:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(Path(self._path_of_error).parent).free
                hint = f" ({self._path_of_error}, beside which {free / 1e9:.3g} GB are free)"
        return CheckpointError(
            f"the checkpoint was not saved: {error}; the one before it is untouched{hint}"
        )

    def write_digests(self, folder: Path, rank: int) -> None:
        """Leave the digests of this rank's files in `folder` for the rank that commits."""
        # Weights that `save_16bit_model` has written since are no part of this checkpoint.
        digests = {
            os.path.basename(path): digest
            for path, digest in self._digests.items()
            if Path(path).is_relative_to(folder)
        }
        self._digests.clear()
        # Whole or not there: another process may wait for it.
        path = folder / _DIGESTS / f"{rank}.json"
        self.keep_error(lambda: _replace_text(path, json.dumps(digests, indent=1)))


class _DigestingFile:
    """A file that is written from front to back (as torch's zip writer does), hashed on the way."""

    def __init__(self, file: BinaryIO, check: Callable[[], None]) -> None:
        self._file, self._check = file, check
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        whole = memoryview(data)
        for begin in range(0, len(whole), _BLOCK_BYTES):
            # Before each block, so that a file that is given up costs no more of them
            self._check()
            block = whole[begin : begin + _BLOCK_BYTES]
            self._file.write(block)
            self._hash.update(block)
        self._num_bytes += len(whole)
        return len(whole)

    def flush(self) -> None:
        self._file.flush()

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest()}


class Saving:
    """One checkpoint on its way to `save_dir/tag`. Methods are for the committing rank but for
    `check_shared`.

    Whenever the process dies, `save_dir` holds the checkpoint before or the new one, whole, and
    `latest` names one that is there. `saving_id` is equal on all ranks, and of this saving alone.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str, saving_id: str) -> None:
        check_new_tag(tag)
        self._save_dir = Path(save_dir)
        self._tag = tag
        self._lock: int | None = None
        self.target = self._save_dir / tag
        """Place of the checkpoint when it is whole."""
        # Beside the target, in one file system: a rename does not cross mounts
        self.folder = self._save_dir / f"{_SAVING}{tag}-{saving_id}"
        """Folder that DeepSpeed saves to, in place of `save_dir`."""

    def begin(self) -> None:
        """Lock `save_dir` and make the folder, without remains of a crash."""
        self._save_dir.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self._save_dir)
        # First: a crash between two renames may have left the target under its other name
        restore_replaced(self._save_dir)
        target = self.target
        if target.is_symlink():
            logger.warning(
                "%s is a link to %s: the checkpoint takes the place of the link, and what it points to stays as it is. "
                "To save elsewhere pass that folder as save_dir",
                target,
                os.readlink(target),
            )
        elif target.exists() and not target.is_dir():
            raise CheckpointError(
                f"{target} is a file, and a checkpoint is a folder; pass another tag or save_dir to save_checkpoint"
            )
        for leftover in self._save_dir.glob(f"{_SAVING}*"):
            shutil.rmtree(leftover)
        (self.folder / _DIGESTS).mkdir(parents=True)

    def check_shared(self) -> None:
        """Raise CheckpointError where this rank does not see the folder that `begin` has made."""
        if not (self.folder / _DIGESTS).is_dir():
            raise CheckpointError(
                f"there is no folder {self.folder} here, which another rank has made. {_SHARE}"
            )

    def wait_for(self, ranks: Iterable[int], check: Callable[[], None]) -> None:
        """Return once `ranks` have written; what `check` raises meanwhile is raised."""
        for rank in ranks:
            path = self.folder / _DIGESTS / f"{rank}.json"
            while not path.exists():
                try:
                    check()
                except CheckpointError:
                    if path.exists():  # written before whatever ends the wait
                        break
                    raise
                time.sleep(_POLL_S)

    def commit(self, *, world_size: int, save_latest: bool, ranks: Iterable[int]) -> None:
        """Put the checkpoint, to which `ranks` have written, in its place and `latest` on it."""
        written, target = self.folder / self._tag, self.target
        _write_manifest(written, self._read_digests(ranks), world_size)
        if save_latest:
            # After the manifest, which must not list it: the next commit takes the mark away
            (written / LATEST_MARK).touch()
        # Names before the rename: after a power failure a folder in its place must be whole
        _sync_folder(written)
        put_in_place(written, target)
        if save_latest:
            # Only now, when what it names is in place
            _replace_text(self._save_dir / "latest", self._tag)
            for mark in self._save_dir.glob(f"*/{LATEST_MARK}"):
                # Last: while `latest` changes both have a mark, and either is right
                if mark.parent != target:
                    mark.unlink()
        shutil.rmtree(self.folder / _DIGESTS)
        for script in self.folder.iterdir():  # DeepSpeed's zero_to_fp32.py
            os.replace(script, self._save_dir / script.name)
        self.folder.rmdir()

    def abort(self) -> None:
        """Remove written files, so that a full disk is not full any longer."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def unlock(self) -> None:
        """Let other jobs save to `save_dir`."""
        unlock(self._lock)
        self._lock = None

    def _read_digests(self, ranks: Iterable[int]) -> dict[str, Any]:
        digests: dict[str, Any] = {}
        for rank in ranks:
            path = self.folder / _DIGESTS / f"{rank}.json"
            if not path.exists():
                raise CheckpointError(f"rank {rank} has written nothing to {self.folder}. {_SHARE}")
            digests |= json.loads(path.read_text(encoding="utf-8"))
        return digests


def lock_folder(folder: Path) -> int | None:
    """A descriptor that locks `folder` until it is closed; None where its file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"another job is saving to {folder} at this moment, nothing was written; give one of the jobs "
            "another save_dir or output_dir; leave save_on_each_node out where nodes share it"
        ) from error
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Release the lock of `lock_folder`."""
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone leaves it to processes forked since
        os.close(descriptor)


def put_in_place(written: Path, target: Path) -> None:
    """Rename a folder to `target`, in place of a folder there; see `restore_replaced`."""
    replaced = target.with_name(f"{REPLACED_PREFIX}{target.name}")
    if os.path.lexists(target):
        # Moved aside: a rename does not replace a folder that has files
        target.rename(replaced)
    written.rename(target)
    _sync_folder(target.parent)
    if os.path.lexists(replaced):
        _forget(replaced, target)


def try_folder(
    folder: Path, key: str, device: torch.device, *, commits: bool, writes: bool = True
) -> None:
    """Raise HydraConfigError, on all ranks, where no checkpoint can be saved to `folder`, which
    `key` names. Collective over all ranks; see [Note: Trial].

    Ranks that `commits` make a folder and rename it, one on each file system; those that `writes`
    write to it.
    """
    # Drawn once: all ranks try one folder, and no other job the same
    (name,) = broadcast_text([f".trial-{secrets.token_hex(4)}"], 0, device)
    trial = folder / name
    saving, file = trial / "saving", f"{dist.get_rank()}"
    steps: tuple[tuple[bool, Callable[[], Any], str, str], ...] = (
        (commits, lambda: make_folder(folder, key), "", ""),
        (commits, lambda: saving.mkdir(parents=True), "make a folder in", _WRITABLE),
        (commits or writes, lambda: _write_text(saving / file, " " * 4096), "write to", _WRITABLE),
        (commits, lambda: put_in_place(saving, trial / "saved"), "rename a folder in", _RENAMES),
        (commits, lambda: shutil.rmtree(trial), "remove a folder in", _WRITABLE),
    )

    def take(step: Callable[[], Any], goal: str, advice: str) -> None:
        try:
            step()
        except OSError as error:
            # Another rank has made the folder, and this host does not show it
            if isinstance(error, FileNotFoundError) and not commits:
                advice = _SHARE
            # Two hosts that commit have met in one folder
            if isinstance(error, FileExistsError):
                advice = "leave save_on_each_node out where nodes share the folder"
            raise HydraConfigError(
                f"{key} is {str(folder)!r}, and every checkpoint would fail there: cannot {goal} it ({error}). {advice}"
            ) from error

    try:
        for takes_part, step, goal, advice in steps:
            run_together(
                functools.partial(take, step, goal, advice) if takes_part else lambda: None, device
            )
    finally:
        if commits:
            shutil.rmtree(trial, ignore_errors=True)


def make_folder(folder: Path, key: str) -> None:
    """Make `folder`, which `key` names, unless it is there; HydraConfigError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HydraConfigError(
            f"{key} is {str(folder)!r}, which is no folder and cannot be made ({error}). {_WRITABLE}"
        ) from error


def restore_replaced(save_dir: Path) -> None:
    """Put back a checkpoint whose replacement did not arrive; forget one whose replacement did."""
    for replaced in save_dir.glob(f"{REPLACED_PREFIX}*"):
        target = save_dir / replaced.name.removeprefix(REPLACED_PREFIX)
        if target.exists():
            _forget(replaced, target)
        else:
            replaced.rename(target)


def _forget(replaced: Path, target: Path) -> None:
    """Remove a checkpoint whose successor is in place. Files that users have put beside its own go
    over to that.
    """
    if replaced.is_symlink() or not replaced.is_dir():
        replaced.unlink()
        return
    # Of transformers' folders, which have no manifest, nobody knows what is a user's.
    if (target / MANIFEST_NAME).exists():
        own = {MANIFEST_NAME}
        # A damaged one, perhaps why the checkpoint was written again, tells nothing.
        with contextlib.suppress(CheckpointError):
            own |= {Path(name).parts[0] for name in _read_manifest(replaced / MANIFEST_NAME)}
        for path in replaced.iterdir():
            is_own = path.name in own or path.name.endswith(_ENDING)
            if not is_own and not os.path.lexists(target / path.name):
                path.rename(target / path.name)
    shutil.rmtree(replaced)


def _write_manifest(folder: Path, digests: Mapping[str, Any], world_size: int) -> None:
    """Write the manifest of all files in `folder`; hashes those that `digests` does not know."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST_NAME):
        name = path.relative_to(folder).as_posix()
        files[name] = digests.get(name) or {
            "bytes": path.stat().st_size,
            "sha256": _hash_file(path),
        }
    if missing := digests.keys() - files.keys():
        raise CheckpointError(
            f"{folder} lacks {sorted(missing)[0]}, which a rank has written there"
        )
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "version": __version__,
        "world_size": world_size,
        "files": files,
    }
    _write_text(folder / MANIFEST_NAME, json.dumps(manifest, indent=1))


def verify(folder: Path, *, reader: int = 0, num_readers: int = 1) -> None:
    """Raise CheckpointError naming the first file that is not as the manifest says; without one, do
    nothing.

    Sizes of all files are compared; the digests are shared out over `num_readers` callers.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}{_others(folder)}")
    manifest = folder / MANIFEST_NAME
    if not manifest.exists():
        return
    for index, (name, wanted) in enumerate(sorted(_read_manifest(manifest).items())):
        path = folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; the checkpoint is not complete{_others(folder)}"
            )
        if (size := path.stat().st_size) != wanted["bytes"]:
            raise CheckpointError(
                f"{path} has {size} bytes, {wanted['bytes']} were written: it was truncated or altered"
                f"{_others(folder)}"
            )
        # Sizes cost nothing; hashing reads the whole file, so each is hashed by one rank
        if index % num_readers == reader and (digest := _hash_file(path)) != wanted["sha256"]:
            raise CheckpointError(
                f"{path} was altered: its SHA-256 is {digest[:16]}..., written was {wanted['sha256'][:16]}..."
                f"{_others(folder)}"
            )


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    try:
        # Before it is read: an altered one must not fill the memory
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it has more than {_MAX_MANIFEST_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != MANIFEST_SCHEMA:
            raise ValueError(f"schema {document['schema']!r}, expected {MANIFEST_SCHEMA!r}")
        files: dict[str, dict[str, Any]] = document["files"]
        for name, wanted in files.items():
            # A manifest may have been altered, too: no file outside of the folder is looked at
            is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
            if not (
                is_inside and isinstance(wanted["bytes"], int) and isinstance(wanted["sha256"], str)
            ):
                raise ValueError(f"entry {name!r}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be used: {error!r}; it was truncated or altered"
        ) from error
    return files


def _others(folder: Path) -> str:
    """Advice: which other checkpoints lie beside `folder`, the newest first."""
    manifests = [p for p in folder.parent.glob(f"[!.]*/{MANIFEST_NAME}") if p.parent != folder]
    manifests.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    tags = [path.parent.name for path in manifests]
    if not tags:
        return ""
    more = f" and {len(tags) - 3} older ones" if len(tags) > 3 else ""
    return f"; there is also {', '.join(tags[:3])}{more}: pass tag=... to load_checkpoint"


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """The content of a `.pt` file on the CPU: tensors and plain values; anything else is an error
    by name.

    With `mmap` tensors are read from the disk when they are used.
    """
    try:
        with only_weights():
            # torch maps files of its zip format only, and raises for older ones
            can_map = mmap and zipfile.is_zipfile(path)
            return torch.load(path, map_location="cpu", mmap=can_map or None, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is not complete") from error
    except Exception as error:  # whatever a damaged pickle makes torch raise
        raise CheckpointError(
            f"{path} cannot be read: {_reason(error)} (only tensors and plain values are; if you trust the file and "
            "a class of yours is in its client_state, call torch.serialization.add_safe_globals([...]) before)"
        ) from error


def check_client_state(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the key, for what `read_tensors` would not read back, and for
    keys that belong to DeepSpeed or ds_hydra.
    """
    for key, value in state.items():
        if key in RESERVED_KEYS:
            raise CheckpointError(
                f"client_state has the key {key!r}, under which a checkpoint keeps something of its own; give yours "
                f"another name, such as 'my_{key}'"
            )
        # What counts are classes: the content of tensors would be copied for nothing
        shapes = tree_map_only(torch.Tensor, lambda tensor: torch.empty(0), value)
        buffer = io.BytesIO()
        try:
            torch.save(shapes, buffer)
            buffer.seek(0)
            with only_weights():
                torch.load(buffer, weights_only=True)
        except Exception as error:  # whatever a class of the user's raises
            raise CheckpointError(
                f"client_state[{key!r}] is a {type(value).__name__} that could be saved and not loaded: "
                f"{_reason(error)} (tensors, numbers, texts, their lists, tuples and dicts, and NumPy arrays of "
                "numbers are read back; turn it into these, or call torch.serialization.add_safe_globals([...]) before "
                "saving and before loading)"
            ) from error


def _reason(error: Exception) -> str:
    """The line of torch's text that names the class."""
    text = str(error).strip().split("\n")
    names = ("Unsupported", "GLOBAL", "Can only build")
    reason = next((line.strip() for line in text if any(name in line for name in names)), text[0])
    return reason[:300]


@contextlib.contextmanager
def only_weights() -> Iterator[None]:
    """Let every `torch.load` inside, DeepSpeed's too, unpickle tensors and plain values only."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    # For good: torch's context does not nest.
    replaced = [(_enum_member, "builtins.getattr"), (_no_bytes, "builtins.bytes")]
    torch.serialization.add_safe_globals([*_SAFE_CLASSES, *replaced])
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def do_together(action: Callable[[], Any], device: torch.device) -> Any:
    """Run `action`, which works on files of a checkpoint, and return its result. An error is raised
    on all ranks. Collective over all ranks.
    """

    def do() -> Any:
        try:
            return action()
        except OSError as error:
            raise CheckpointError(
                f"{error}; the checkpoint before it, if any, is as it was"
            ) from error

    return run_together(do, device)


def _hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _replace_text(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, finds the old content or the new one."""
    aside = path.with_name(f".{path.name}.new")
    _write_text(aside, text)
    os.replace(aside, path)
    _sync_folder(path.parent)


def _write_text(path: Path, text: str) -> None:
    """Write to the disk, not only to the page cache."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())


def sync(descriptor: int) -> None:
    """Make a file, or the names in a folder, as durable as the file system can: some network mounts
    know no fsync of a folder.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


REPLACED_PREFIX = ".replaced-"
"""Prefix of the tag of a checkpoint whose successor is being put in its place."""

RESERVED_KEYS = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
        "checkpoint_parallel_dimensions", "ds_hydra",
    )
)  # fmt: skip
"""Keys that DeepSpeed and ds_hydra keep beside a client_state, which would replace them."""

_NO_TAGS = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
"""Files that lie beside the checkpoints."""

_MAX_TAG_BYTES = 200


def _check_tag(tag: str) -> None:
    """Raise CheckpointError unless `tag` is the name of one folder."""
    is_name = isinstance(tag, str) and tag and not tag.startswith(".")
    if not is_name or tag != os.path.basename(tag) or "\0" in tag:
        raise CheckpointError(
            f"the checkpoint tag is {tag!r}, expected the name of a folder without {os.sep!r} and not starting "
            "with a dot, such as 'global_step100'"
        )


def check_new_tag(tag: str) -> None:
    """Raise CheckpointError unless `tag` is the name of a folder that `latest` can name."""
    _check_tag(tag)
    if tag in _NO_TAGS:
        raise CheckpointError(
            f"the checkpoint tag is {tag!r}, which is a file beside the checkpoints; pass another tag, such as "
            f"'{tag.split('.')[0]}_1'"
        )
    if not tag.isprintable() or " " in tag or len(tag.encode()) > _MAX_TAG_BYTES:
        raise CheckpointError(
            f"the checkpoint tag is {tag!r}, expected up to {_MAX_TAG_BYTES} bytes without blanks, line ends and "
            "control characters, such as 'global_step100'"
        )


def check_folder_name(argument: str, folder: Any) -> None:
    """Raise CheckpointError unless `folder`, given as `argument`, names a folder."""
    name = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise CheckpointError(
            f"{argument} is {folder!r}, expected the path of a folder, such as 'checkpoints' ('.' is the working "
            "directory)"
        )


def resolve_tag(load_dir: Path, tag: str) -> str:
    """The folder in `load_dir` with the checkpoint `tag`: that name, or the place of one being
    replaced.
    """
    _check_tag(tag)
    replaced = f"{REPLACED_PREFIX}{tag}"
    return replaced if not (load_dir / tag).exists() and (load_dir / replaced).exists() else tag


def find_tag(load_dir: Path, name: str) -> str | None:
    """Return the tag in `load_dir/latest` (or another `name`); None where there is no such file.
    Raises CheckpointError where `latest` names another checkpoint than the one that is marked.
    """
    path = load_dir / name
    try:
        with path.open("rb") as file:
            # Bounded: whatever lies there, a tag is short
            tag = file.read(4096).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        if others := _others(path):
            logger.warning(f"{path} is missing, so that nothing is loaded{others}")
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        _check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}{_others(path)}") from error
    # The mark tells a `latest` that was cut or edited to the name of another checkpoint
    marks = [mark.parent.name for mark in load_dir.glob(f"[!.]*/{LATEST_MARK}")]
    is_own = name == "latest" and (load_dir / tag / MANIFEST_NAME).exists()
    if marks and is_own and tag not in marks:
        raise CheckpointError(
            f"{path} names {tag!r}, and the checkpoint that was saved last is {marks[0]!r}, by its file {LATEST_MARK}: "
            f"{name} was truncated or altered; pass tag={marks[0]!r} (or {tag!r}) to load_checkpoint, or remove "
            f"{load_dir / marks[0] / LATEST_MARK} if you have altered {name} yourself"
        )
    return tag
