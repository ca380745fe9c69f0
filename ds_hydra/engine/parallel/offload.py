"""Tensors that checkpointed layers keep in the host's memory until backward reads them.

[Note: Offloaded layers]
What a layer keeps is copied to pinned memory by a stream beside computation. On the device it stays
until the next such layer begins, which waits for the copies. Backward fetches what a layer has kept
while the layer above, whose backward comes first, computes. So the device has that of two layers at
most, and its memory is taken and freed in the order of the computing stream: the host waits for
nothing. On CPU ranks copies are made at once.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

_LEAST_BYTES = 1024
"""Bytes of a tensor that is worth a copy."""


class _Kept:
    """One tensor: in the host's memory, and until it is released or after it is fetched on the
    device, from `copied` on.
    """

    __slots__ = ("copied", "device", "host", "on_device")

    def __init__(self, tensor: Tensor):
        self.device, self.on_device = tensor.device, tensor
        # A device copies beside computation from and to pinned memory alone.
        make = torch.empty if tensor.device.type == "cpu" else get_accelerator().pin_empty
        self.host = make(tensor.shape, dtype=tensor.dtype)
        self.copied = _copy_beside(self.host, tensor)

    def release(self) -> None:
        """Let the device's memory go, after the copy."""
        if self.on_device is not None:
            # Else computation would be given this memory while the copy still reads it.
            _wait_for(self.copied)
            self.on_device = None

    def fetch(self) -> None:
        """Begin to copy it to the device."""
        if self.on_device is None:
            # Of the computing stream, in whose order it is also given back.
            self.on_device = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            self.copied = _copy_beside(self.on_device, self.host)

    def get(self) -> Tensor:
        """The tensor on the device, which has no further use for it here."""
        self.fetch()
        tensor = self.on_device
        assert tensor is not None
        # Waits for the copy, so that whoever gets the tensor may read it.
        self.release()
        return tensor


class OffloadedLayer:
    """Tensors that one checkpointed layer keeps of one micro-batch, and the layer that ran before
    it.
    """

    # Weak: layers live as long as the graph of their micro-batch.
    _latest: weakref.ref[OffloadedLayer] | None = None

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._is_fetched = self._is_read = False
        before = OffloadedLayer._latest
        self._before = before
        if before is not None and (layer := before()) is not None:
            for kept in layer._kept:
                kept.release()
        OffloadedLayer._latest = weakref.ref(self)

    def put(self, tensor: Tensor) -> _Kept:
        """Keep `tensor`, which nobody writes to any more."""
        self._kept.append(_Kept(tensor.detach()))
        return self._kept[-1]

    def get(self, kept: _Kept) -> Tensor:
        """Return the tensor that `put` has kept, on its device, and begin to fetch those of the
        layer before.
        """
        if not self._is_read:
            self._is_read = True
            before = self._before and self._before()
            # Above the last of these layers there is none that has begun to fetch its tensors.
            self._fetch()
            if before is not None:
                before._fetch()
        return kept.get()

    def _fetch(self) -> None:
        if not self._is_fetched:
            self._is_fetched = True
            for kept in self._kept:
                kept.fetch()

    def keeping_input(self) -> AbstractContextManager[Any]:
        """A context for `torch.utils.checkpoint`, in which the layer's input is put here."""

        def pack(tensor: Tensor) -> Any:
            is_large = tensor.nbytes >= _LEAST_BYTES and tensor.is_floating_point()
            return self.put(tensor) if is_large else tensor

        def unpack(kept: Any) -> Tensor:
            return self.get(kept) if isinstance(kept, _Kept) else kept

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@functools.cache
def _beside() -> Any:
    return get_accelerator().Stream()


def _copy_beside(target: Tensor, source: Tensor) -> Any:
    """Copy in the stream beside computation, after what that has been given so far; the event of
    its end. On the CPU the copy is made now.
    """
    if source.device.type == target.device.type == "cpu":
        target.copy_(source)
        return None
    stream = _beside()
    # Computation may still write the source, or use the memory of the target.
    stream.wait_stream(get_accelerator().current_stream())
    with get_accelerator().stream(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()


def _wait_for(copied: Any) -> None:
    if copied is not None:
        get_accelerator().current_stream().wait_event(copied)
