"""The micro-batch whose forward runs now, for attention, rotary embeddings and experts: layers of
some families drop keyword arguments, and a layer that is computed again in backward has to see its
own micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_hydra.engine.parallel.context_parallel import checkpoint_contexts

if TYPE_CHECKING:
    from ds_hydra.engine.model.attention import PackedMicroBatch

_in_sight: list[tuple[PackedMicroBatch, bool]] = []
"""Micro-batches, the innermost last, and whether they are computed again."""


def find_in_sight() -> PackedMicroBatch | None:
    """The micro-batch whose forward runs now, or whose checkpointed layer is computed again."""
    return _in_sight[-1][0] if _in_sight else None


def is_computed_again() -> bool:
    """Whether backward runs the forward of a layer now."""
    return bool(_in_sight) and _in_sight[-1][1]


@contextmanager
def in_sight(micro_batch: PackedMicroBatch, *, again: bool = False) -> Iterator[None]:
    """Have `micro_batch` in sight in this context."""
    _in_sight.append((micro_batch, again))
    try:
        yield
    finally:
        _in_sight.pop()


@torch.compiler.disable(recursive=False)
def checkpointed(layer: Callable[..., Any], *args: Any) -> Any:
    """`layer(*args)`, computed again in backward with the same micro-batch in sight."""
    run = functools.partial(_run, find_in_sight(), layer)
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # see [Note: Noise by counting]
        context_fn=checkpoint_contexts,
    )


def _run(micro_batch: PackedMicroBatch, layer: Callable[..., Any], *args: Any) -> Any:
    if find_in_sight() is micro_batch:
        return layer(*args)
    with in_sight(micro_batch, again=True):
        return layer(*args)
