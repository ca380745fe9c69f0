"""Checkpointed layers: what their second pass, in backward, takes from the first.

[Note: Attention runs once]
A checkpointed layer keeps its input and, of each call of attention by a kernel, the output and the
log-sum-exp of rows; its input alone where all layers of the model are checkpointed on the device,
which is for memory. Offloaded layers keep all of it in the host's (offload.py). When backward runs
the layer again everything else is computed anew, and
attention returns what it has kept, which with the queries, keys and values of the second pass is
all that a kernel's backward reads. The calls of both passes are the same, in the same order.
Exchanges around attention (SP, CP) run again, in their order on all ranks. Nobody reads what they
bring before attention's backward, which waits for it: until then the rest of the layer and the
backward of its MLP run.

torch's selective checkpointing would see every operator of a layer in Python, and none of
attention's, which eager layers call without torch.library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_hydra.engine.parallel.offload import OffloadedLayer

Outputs = tuple[Tensor, Tensor]
"""Output of attention, and log-sum-exp of its rows."""


class _Layer:
    """A checkpointed layer that is being computed, for the second time where it runs `again`."""

    def __init__(
        self, kept: deque[Any], *, keeps: bool, again: bool, offloaded: OffloadedLayer | None
    ):
        self.kept, self.keeps, self.again, self.offloaded = kept, keeps, again, offloaded

    def keep(self, outputs: Outputs) -> None:
        put = Tensor.detach if self.offloaded is None else self.offloaded.put
        # Outputs themselves would hold the graph, which holds what is kept.
        self.kept.append(tuple(map(put, outputs)))

    def take(self) -> Outputs:
        first, second = self.kept.popleft()
        if self.offloaded is not None:
            first, second = self.offloaded.get(first), self.offloaded.get(second)
        return first, second


_layer: _Layer | None = None
_waits: list[Callable[[], None]] = []


def is_checkpointed() -> bool:
    """Whether the layer that is being computed is checkpointed."""
    return _layer is not None


def contexts(
    *, keeps: bool = True, offloaded: OffloadedLayer | None = None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of both passes, for `torch.utils.checkpoint`. `keeps`: what attention returns, where
    the layer is `offloaded` in the host's memory.
    """
    # One queue for both passes: the first one fills it, the second one empties it.
    kept: deque[Any] = deque()
    first, second = (
        _Layer(kept, keeps=keeps, again=again, offloaded=offloaded) for again in (False, True)
    )
    return _running(first), _running(second)


@contextmanager
def _running(layer: _Layer) -> Iterator[None]:
    global _layer
    if not layer.again:
        _waits.clear()  # of a backward that has failed
    before, _layer = _layer, layer
    try:
        yield
    finally:
        _layer = before


def run_once(run: Callable[[], Outputs], *, keeps: bool) -> Outputs:
    """The outputs of `run`, those of the first pass where it `keeps` them for the second. Only what
    the layer's graph holds, too, can be kept: a compiler overwrites other outputs.
    """
    layer = _layer if keeps and _layer is not None and _layer.keeps else None
    if layer is not None and layer.again and layer.kept:
        return layer.take()
    # Attention that runs now reads what its exchanges have brought.
    settle()
    out, lse = run()
    # A second pass that found nothing has nobody to keep it for.
    if layer is not None and not layer.again:
        layer.keep((out, lse))
    return out, lse


def is_late() -> bool:
    """Whether the next call of attention reads none of its inputs before its backward."""
    return _layer is not None and _layer.again and bool(_layer.kept)


def settle_late(wait: Callable[[], None]) -> None:
    """Call `wait`, for what the next call of attention reads: at once, or before its backward."""
    if is_late():
        _waits.append(wait)
    else:
        wait()


@torch.no_grad()
def settle() -> None:
    """Make the calls that `settle_late` has put off."""
    while _waits:
        _waits.pop(0)()
