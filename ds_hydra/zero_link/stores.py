"""Blocks of shards, slices and packed buffers as views, and what is done to pairs of them.

Legend: tensors ending in `_P` are flat ZeRO-3 shards of one parameter, tensors ending in `_S` flat
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hydra.zero_link.messages import Batch, Piece, Store
from ds_hydra.zero_link.packed import Copy
from ds_hydra.zero_link.views import view_of


@dataclass(frozen=True, slots=True)
class Stores:
    """The tensors that one round reads and writes, of one type; those it does not touch may be
    empty.
    """

    dtype: torch.dtype
    shards_P: Sequence[Tensor]
    slices_S: Sequence[Tensor]
    stages: dict[int, Tensor]

    def tensor(self, store: Store, key: int) -> Tensor:
        """The flat tensor of a piece."""
        if store is Store.RELAY:
            return self.stages[key]
        return (self.shards_P if store is Store.SHARD else self.slices_S)[key]

    def view(self, batch: Batch, piece: Piece) -> Tensor:
        """[rows, cols] of a piece of `batch`."""
        return view_of(self.tensor(batch.store, piece.key), piece)


def stored_views(stores: Stores, copies: Sequence[Copy]) -> list[Tensor]:
    """[count, rows, cols] of each copy in its store."""
    views = []
    for copy in copies:
        tensor = stores.tensor(copy.store, copy.key)
        offset = tensor.storage_offset() + copy.begin
        views.append(tensor.as_strided(copy.shape, (*copy.strides, 1), offset))
    return views


def packed_views(buffer: Tensor, copies: Sequence[Copy]) -> list[Tensor]:
    """[count, rows, cols] of each copy in the packed buffer."""
    begin = buffer.storage_offset()
    return [
        buffer.as_strided(
            copy.shape, (copy.packed_stride, copy.shape[2], 1), begin + copy.packed_begin
        )
        for copy in copies
    ]


def run_pairs(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    run: Callable[[list[Tensor], list[Tensor]], object] = torch._foreach_copy_,
) -> None:
    """`run` on pairs: what is contiguous on both sides in one kernel where the device has one."""
    runs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if target.is_contiguous() and source.is_contiguous():
            runs[0].append(target)
            runs[1].append(source)
        else:
            run([target], [source])
    if runs[0]:
        run(*runs)
