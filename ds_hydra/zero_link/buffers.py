"""Exchange buffers that outlive their round, so that memory is allocated and touched once."""

from __future__ import annotations

import torch
from torch import Tensor


class ExchangeBuffers:
    """Packed send and receive buffers of one thread's rounds, taken when a round begins and given back when it ends.

    Holds as many buffers as were in use at once, none larger than the largest ever asked for: with a window of
    two rounds that is at most four times the largest send or receive buffer of any plan that ran.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[Tensor] = []
        self._in_use: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return sum(b.numel() for b in self._free) + sum(b.numel() for b in self._in_use.values())

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel] of unknown content."""
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype, device=self._device)
        buffer = self._find_free(nbytes)
        taken = buffer[:nbytes].view(dtype)
        self._in_use[taken.data_ptr()] = buffer
        return taken

    def give_back(self, tensor: Tensor) -> None:
        """Let later rounds use the memory of `tensor`, which `take` returned."""
        if tensor.numel():
            self._free.append(self._in_use.pop(tensor.data_ptr()))

    def _find_free(self, nbytes: int) -> Tensor:
        """The smallest free buffer that is large enough; else a new one in place of the largest free one."""
        self._free.sort(key=lambda buffer: buffer.numel())
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
