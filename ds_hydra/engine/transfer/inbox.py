"""Pieces of gradients on their way to the rank that sums them, without a rank waiting for another.

[Note: Inbox]
Each rank of a host has a slot for every rank beside it, itself included, in memory that they all
reach. A sender waits until its slot is free, copies a piece there, and says what it is in words of
memory that the hosts' processes share; the owner's thread finds it, adds it to its own sums, and
frees the slot. Both are threads that do nothing else, so neither waits for anyone's computation.
The owner's thread ends when every sender has said that it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hydra.engine.ranks.hosts import SharedMemory
from ds_hydra.engine.transfer.link_thread import Cancelled, DeviceClock

_POLL_S = 5e-5

_STATE, _DONE, _DTYPE, _SHAPE, _WHAT = 0, 1, 2, slice(3, 5), slice(5, 12)
_WORDS = 12
_FREE, _FULL, _FAILED = 0, 1, 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Add = Callable[[list[int], Tensor], None]
"""Adds a piece, of which the sender said this, to the sums here."""


def control_bytes(num_ranks: int) -> int:
    """Of the words that `num_ranks` ranks of a host share."""
    return num_ranks * num_ranks * _WORDS * 8


class Inbox:
    """The slots of the ranks of a host, as rank number `place` among them uses them; not
    collective.

    `slots[owner]` are bytes [sender, size]. One thread sends, another one serves.
    """

    def __init__(
        self, slots: Sequence[Tensor], control: SharedMemory, place: int, clock: DeviceClock
    ):
        self._slots = slots
        self._place = place
        self._clock = clock
        num_ranks = len(slots)
        words = control.bytes[: control_bytes(num_ranks)].view(torch.int64)
        self._control = words.view(num_ranks, num_ranks, _WORDS).numpy()
        self._round = 0
        self._sent: Any = None
        self.served: Any = None
        """Where the serving thread's stream was when it last added."""

    def begin(self) -> None:
        """Forget what was under way, and begin a round; every rank calls it, then a barrier."""
        self._round += 1
        self._control[self._place, :, _STATE] = _FREE

    def send(self, owner: int, what: Sequence[int], piece: Tensor) -> None:
        """Give `piece` [m, n] to `owner`, with up to 7 numbers that say `what` it is."""
        words = self._wait_for_slot(owner)
        slot = self._slots[owner][self._place]
        if owner == self._place and self.served is not None:
            self._clock.wait_for(self.served)
        slot[: piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
        self._sent = self._clock.stamp()
        self._clock.settle(self._sent)
        words[_DTYPE] = _DTYPES.index(piece.dtype)
        words[_SHAPE] = piece.shape
        words[_WHAT][: len(what)] = what
        words[_STATE] = _FULL

    def finish(self) -> None:
        """Wait until all that was sent has been added, and tell every owner."""
        for owner in range(len(self._slots)):
            self._wait_for_slot(owner)[_DONE] = self._round

    def serve(self, add: Add) -> None:
        """Add what comes until every sender has finished. In a thread of its own."""
        mine, round_ = self._control[self._place], self._round
        try:
            while self._round == round_ and (mine[:, _DONE] != round_).any():
                senders = (mine[:, _STATE] == _FULL).nonzero()[0].tolist()
                for sender in senders:
                    self._take(mine[sender], sender, add)
                if not senders:
                    time.sleep(_POLL_S)
        except BaseException:
            mine[:, _STATE] = _FAILED
            raise

    def _take(self, words: Any, sender: int, add: Add) -> None:
        dtype, shape = _DTYPES[words[_DTYPE]], words[_SHAPE].tolist()
        nbytes = shape[0] * shape[1] * dtype.itemsize
        piece = self._slots[self._place][sender][:nbytes].view(dtype).view(shape)
        if sender == self._place:
            self._clock.wait_for(self._sent)
        add(words[_WHAT].tolist(), piece)
        self.served = self._clock.stamp()
        self._clock.settle(self.served)
        words[_STATE] = _FREE

    def _wait_for_slot(self, owner: int) -> Any:
        words, round_ = self._control[owner, self._place], self._round
        while words[_STATE] != _FREE:
            if words[_STATE] == _FAILED:
                raise RuntimeError(f"rank {owner} of this host could not add to its sums")
            if self._round != round_:
                raise Cancelled
            time.sleep(_POLL_S)
        return words
