"""Checkpoints that a thread writes beside training: copies of the states in memory of the host, and
the thread of each rank that writes them.

[Note: Ranks agree beside training]
A collective of a second thread could meet one of training's. So the threads exchange nothing: each
leaves its digests in the folder of the checkpoint when its files are on the disk, and the thread of
the rank that commits waits for those of all. What failed is told by the engine's own thread, where
all ranks stand at the same place: after an iteration, before the next checkpoint, at the end. Only
there a rank also hears that it need not wait any longer. A rank that is lost ends the wait through
the watchdog, and the checkpoint before stays the last one.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_hydra.engine.checkpointing.files import HydraCheckpointEngine, Saving
from ds_hydra.engine.ranks.agreement import gather_by_hosts, raise_known
from ds_hydra.engine.ranks.memory import available_bytes
from ds_hydra.engine.ranks.watchdog import is_rank_lost
from ds_hydra.errors import CheckpointError

logger = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 20
"""Size from which on a buffer is worth keeping: its first use costs several times the copy."""
_SHARE = 0.9
"""Share of the memory that is left which copies may take."""
_PATIENCE_S = 300.0
"""Longest that files which another rank has written are looked for: a network mount may show them
late.
"""

_NICENESS = 10
"""Steps by which the thread that writes gives way: where no core is free training has ten times its
share. At 19 it would hardly write there.
"""

_WRITING, _WRITTEN, _DONE, _FAILED = range(4)


class HostCopies:
    """Copies of states in memory of the host, which stays from one checkpoint to the next.

    `num_sharing` ranks take from the memory of this host at the same time.
    """

    def __init__(self, device: torch.device, num_sharing: int) -> None:
        self._pins = device.type != "cpu"
        self._num_sharing = num_sharing
        self._buffers: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}

    def begin(self) -> None:
        """Take all buffers for free. What no copy takes until the next call is released then."""
        # By size: states of a run have the same sizes in every checkpoint
        self._free = defaultdict(list)
        for buffer in self._buffers:
            self._free[buffer.numel()].append(buffer)
        self._buffers = []

    def take(self, state: Any) -> Any | None:
        """A copy of `state` as it is now, for another thread; tensors that share memory share it
        there. None, with a warning, where the host's memory does not hold it.
        """
        leaves = tree_leaves(state)
        kept = {size: len(buffers) for size, buffers in self._free.items()}
        new = 0
        # Only what no buffer is there for: memory that is kept is not free on the host
        for size in _storage_bytes(leaves):
            kept[size] = kept.get(size, 0) - 1
            new += size if kept[size] < 0 else 0
        share = _SHARE * available_bytes() / self._num_sharing
        if new >= _LARGE_BYTES and new > share:
            logger.warning(
                f"training waits for the checkpoint's files: a copy of this rank's states takes {new / 1e9:.3g} GB of "
                f"the host's memory, and its share is {share / 1e9:.3g} GB; free memory, or set "
                "hydra.checkpoint.asynchronous to false"
            )
            return None
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            copied = {id(leaf): self._copy(leaf, storages) for leaf in leaves if _is_plain(leaf)}
            # With tensors in its memo all types stay: `tree_map` makes a tuple of `torch.Size`
            taken = copy.deepcopy(state, copied)
        if self._pins:
            get_accelerator().synchronize()  # before the next step changes what is copied
        return taken

    def _copy(self, leaf: Tensor, copied: dict[int, torch.UntypedStorage]) -> Tensor:
        storage = leaf.untyped_storage()
        if storage._cdata not in copied:
            buffer = self._find_buffer(storage.nbytes())
            # Whole storages as bytes: tensors that share one share its copy, too
            whole = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(storage)
            buffer.copy_(whole, non_blocking=True)
            copied[storage._cdata] = buffer.untyped_storage()
        place = copied[storage._cdata], leaf.storage_offset(), leaf.size(), leaf.stride()
        taken = torch.empty(0, dtype=leaf.dtype).set_(*place)
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(taken, leaf.requires_grad)
        return taken.requires_grad_(leaf.requires_grad)

    def _find_buffer(self, size: int) -> Tensor:
        if size < _LARGE_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        if free := self._free.get(size):
            self._buffers.append(free.pop())
        else:
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pins))
        return self._buffers[-1]


def _is_plain(leaf: Any) -> bool:
    """Whether `leaf` is a tensor whose storage can be copied as bytes."""
    return (
        type(leaf) in (Tensor, nn.Parameter)
        and leaf.layout is torch.strided
        and leaf.device.type != "meta"
        and not leaf.is_quantized
    )


def _storage_bytes(leaves: Iterable[Any]) -> Iterable[int]:
    """Bytes of each storage of tensors among `leaves` that can be copied."""
    storages = (leaf.untyped_storage() for leaf in leaves if _is_plain(leaf))
    return {storage._cdata: storage.nbytes() for storage in storages}.values()


class SavingBeside:
    """A checkpoint that is copied, and written by a thread of each rank.

    `writer` holds this rank's files; the rank that commits brings `commit`, which puts them in
    their place once all `ranks` that share the folder have written.
    """

    def __init__(
        self,
        saving: Saving,
        writer: HydraCheckpointEngine,
        rank: int,
        device: torch.device,
        *,
        ranks: Sequence[int],
        commit: Callable[[], None] | None,
    ) -> None:
        self._saving, self._writer = saving, writer
        self._rank, self._device, self._ranks, self._commit = rank, device, ranks, commit
        self._error: Exception | None = None
        self._is_given_up, self._is_written = threading.Event(), threading.Event()
        self._all_written_at: float | None = None
        """Time since when digests can only be missing because a mount shows them late."""
        self._after: list[Callable[[Exception | None], None]] = []
        self._is_over, self._lock = False, threading.Lock()
        self._began = time.monotonic()
        # No daemon: a script that ends after save_checkpoint ends when its files are there
        self._thread = threading.Thread(target=self._run, name="ds_hydra-checkpoint")
        self._thread.start()

    def then(self, action: Callable[[Exception | None], None]) -> None:
        """Let this rank's thread run `action` once the checkpoint is in its place, or has failed
        with the error that is given to it. Not collective.
        """
        with self._lock:
            if not self._is_over:
                self._after.append(action)
                return
        action(self._error)

    def look(self) -> bool:
        """Whether all ranks are through. Raises, on all, the error of one of them. Collective over
        all ranks.
        """
        states = gather_by_hosts(torch.tensor([self._state()]), self._device).flatten().tolist()
        if _FAILED in states:
            self._is_given_up.set()
            self._thread.join()
            # Who only heard of it does not speak
            mine = self._error if states[self._rank] == _FAILED else None
            raise_known(mine, [state == _FAILED for state in states], self._device)
        return min(states) == _DONE

    def wait(self) -> bool:
        """True when all ranks are through. Errors as in `look`. Collective over all ranks."""
        if self._rank == 0 and self._thread.is_alive():
            logger.info("waiting for %s, which is written beside training", self._saving.target)
        self._is_written.wait()
        if self.look():
            return True
        # Who has come here knows that all have written: each waits for its own before `look`
        self._all_written_at = time.monotonic()
        self._thread.join()
        return self.look()

    def _state(self) -> int:
        if self._error is not None:  # also while the thread clears up
            return _FAILED
        if not self._thread.is_alive():
            return _DONE
        return _WRITTEN if self._is_written.is_set() and self._commit is not None else _WRITING

    # The thread.

    def _run(self) -> None:
        if sys.platform == "linux":  # of this thread alone; elsewhere of the process
            os.nice(_NICENESS)
        self._keep_error(self._write)
        self._is_written.set()
        with self._lock:
            self._is_over = True
        for action in self._after:
            self._keep_error(functools.partial(action, self._error))

    def _keep_error(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, the others are told
            text = f"{self._saving.target}, written beside training: {error}"
            self._error = self._error or CheckpointError(text)

    def _write(self) -> None:
        try:
            self._writer.write_held(self._check)
            # Not after an error: digests say that all is there
            if (error := self._writer.take_error()) is None:
                self._writer.write_digests(self._saving.folder, self._rank)
                error = self._writer.take_error()
            if error is not None:
                raise error
            self._is_written.set()
            if self._commit is not None:
                self._saving.wait_for(self._ranks, self._check)
                self._commit()
                seconds = time.monotonic() - self._began
                logger.info("%s is complete, %.1f s after its copy", self._saving.target, seconds)
        except Exception:
            if self._commit is not None:
                self._saving.abort()
            raise
        finally:
            if self._commit is not None:
                self._saving.unlock()

    def _check(self) -> None:
        """Raise CheckpointError where the rest need not be written, or will not be."""
        if self._is_given_up.is_set():
            raise CheckpointError("given up, because another rank could not write")
        if is_rank_lost():
            raise CheckpointError("given up, because a rank is lost")
        if not self._is_written.is_set():
            return
        now = time.monotonic()
        if self._all_written_at is None and not threading.main_thread().is_alive():
            self._all_written_at = now  # the process ends, and those of the others do
        if self._all_written_at is not None and now - self._all_written_at > _PATIENCE_S:
            raise CheckpointError(f"another rank's digests have not come in {_PATIENCE_S:.0f} s")
