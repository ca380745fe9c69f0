"""Exchange buffers in memory that outlives their round, so that it is allocated and touched
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_hydra.zero_link.messages import ALIGNMENT_BYTES


@dataclass(slots=True)
class _Slab:
    """One piece of memory and the free ranges [begin, end) in it, in order, none adjacent to the
    next.
    """

    memory: Tensor
    free: list[tuple[int, int]] = field(default_factory=list)

    def find(self, nbytes: int) -> int | None:
        """Take the first free range that is large enough; its begin."""
        for index, (begin, end) in enumerate(self.free):
            if end - begin >= nbytes:
                self.free[index : index + 1] = (
                    [(begin + nbytes, end)] if end - begin > nbytes else []
                )
                return begin
        return None

    def release(self, begin: int, nbytes: int) -> None:
        ranges = sorted([*self.free, (begin, begin + nbytes)])
        self.free = ranges[:1]
        for low, high in ranges[1:]:
            if low == self.free[-1][1]:
                self.free[-1] = (self.free[-1][0], high)
            else:
                self.free.append((low, high))


class ExchangeBuffers:
    """Packed send and receive buffers of one thread's rounds, taken when a round begins and given
    back when it ends.

    On the CPU they are cut out of one slab, as large as the most that was in use at once and the
    gaps between them, because touching memory for the first time is slow there. Elsewhere the
    device's caching allocator does the same.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._caches = device.type == "cpu"
        self._slabs: list[_Slab] = []
        self._taken: dict[int, tuple[_Slab, int, int]] = {}
        self._in_use_bytes = 0
        self.peak_bytes = 0
        """The most that was in use at once."""

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return sum(slab.memory.numel() for slab in self._slabs)

    def forget_failed(self) -> None:
        """Let go of what rounds that failed did not give back; call when no round is under way."""
        if self._taken:  # a message may still write to it
            self._taken.clear()
            self._slabs.clear()
            self._in_use_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel] of unknown content."""
        nbytes = -(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not nbytes or not self._caches:
            return torch.empty(numel, dtype=dtype, device=self._device)
        self._in_use_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._in_use_bytes)
        slab, begin = self._cut(nbytes)
        tensor = slab.memory[begin : begin + numel * dtype.itemsize].view(dtype)
        self._taken[tensor.data_ptr()] = (slab, begin, nbytes)
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Let later rounds use the memory of `tensor`, which `take` returned."""
        if not tensor.numel() or not self._caches:
            return
        slab, begin, nbytes = self._taken.pop(tensor.data_ptr())
        slab.release(begin, nbytes)
        self._in_use_bytes -= nbytes
        if not self._taken and len(self._slabs) > 1:
            # One slab for the peak; where one of that size was not enough, gaps between buffers
            # need the rest.
            gaps = self._slabs[0].memory.numel() >= self.peak_bytes
            merged = self.nbytes if gaps else self.peak_bytes
            self._slabs.clear()
            self._add_slab(merged)

    def _cut(self, nbytes: int) -> tuple[_Slab, int]:
        for slab in self._slabs:
            begin = slab.find(nbytes)
            if begin is not None:
                return slab, begin
        slab = self._add_slab(nbytes)
        slab.free = []
        return slab, 0

    def _add_slab(self, nbytes: int) -> _Slab:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._slabs.append(_Slab(memory, [(0, nbytes)]))
        return self._slabs[-1]
