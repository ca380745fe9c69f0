"""Carries out link plans: packs, one all-to-all per round, unpacks. Decides nothing.

Legend: tensors ending in `_P` are flat ZeRO-3 shards of one parameter, tensors ending in `_S` flat slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_link.plan import LinkPlan, Round, Transfer


def _shard_view(shard_P: Tensor, transfer: Transfer) -> Tensor:
    block = transfer.block
    offset = shard_P.storage_offset() + block.shard_offset
    return shard_P.as_strided((block.num_rows, block.num_cols), (block.shard_stride, 1), offset)


def _slice_view(slice_S: Tensor, transfer: Transfer) -> Tensor:
    block = transfer.block
    offset = slice_S.storage_offset() + block.slice_offset
    return slice_S.as_strided((block.num_rows, block.num_cols), (block.slice_stride, 1), offset)


def _buffer_view(buffer: Tensor, transfer: Transfer) -> Tensor:
    block = transfer.block
    begin = transfer.buffer_offset
    return buffer[begin : begin + block.numel].view(block.num_rows, block.num_cols)


class Link:
    """The LNK operator (§5.2) between ZeRO-3 shards and the slices of one iteration.

    All methods are collective over `group`, which spans all ranks of the plans; every rank calls them
    with its own part of the same plan and in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self._group = group
        self._device = device

    def pull(self, plan: LinkPlan, shards_P: Sequence[Tensor], bucket_S: Sequence[Sequence[Tensor]]) -> None:
        """Fill this rank's slices from all ranks' shards.

        `shards_P[param]` are this rank's shards (flat, one dtype), `bucket_S[r][slot]` the flat slices
        of its r-th bucket, written in place.
        """
        dtype = _common_dtype(shards_P)

        def begin(index: int) -> _Exchange:
            round_ = plan.rounds[index]
            send = self._pack(round_.shard_side, dtype, lambda t: _shard_view(shards_P[t.param], t))
            return self._all_to_all(send, round_.shard_splits, round_.slice_splits)

        def finish(index: int, received: Tensor) -> None:
            round_ = plan.rounds[index]
            slices = bucket_S[index] if index < len(bucket_S) else ()
            for transfer in round_.local:
                _slice_view(slices[transfer.slot], transfer).copy_(
                    _shard_view(shards_P[transfer.param], transfer)
                )
            for transfer in round_.slice_side:
                _slice_view(slices[transfer.slot], transfer).copy_(_buffer_view(received, transfer))

        _run_rounds(range(len(plan.rounds)), begin, finish)

    def push(
        self, plan: LinkPlan, grad_bucket_S: Sequence[Sequence[Tensor]], grads_P: Sequence[Tensor]
    ) -> None:
        """Add this rank's slice gradients into the owners' flat fp32 gradient shards `grads_P`.

        Sums run in fp32 in the order of contributing ranks, so they are deterministic for a given plan.
        Buckets go in reverse, the order in which backward completes them.
        """

        def grads_of(index: int) -> Sequence[Tensor]:
            return grad_bucket_S[index] if index < len(grad_bucket_S) else ()

        def begin(index: int) -> _Exchange:
            round_ = plan.rounds[index]
            send = self._pack(round_.slice_side, torch.float32, _slices_of(grads_of(index)))
            return self._all_to_all(send, round_.slice_splits, round_.shard_splits)

        def finish(index: int, received: Tensor) -> None:
            self._accumulate(plan.rank, plan.rounds[index], grads_of(index), received, grads_P)

        _run_rounds(reversed(range(len(plan.rounds))), begin, finish)

    def _accumulate(
        self,
        rank: int,
        round_: Round,
        grads: Sequence[Tensor],
        received: Tensor,
        grads_P: Sequence[Tensor],
    ) -> None:
        """Sum contributions in rank order: lower ranks, this rank, higher ranks."""
        below = sum(round_.shard_splits[:rank])

        def add_received(transfers: Iterable[Transfer]) -> None:
            for transfer in transfers:
                _shard_view(grads_P[transfer.param], transfer).add_(_buffer_view(received, transfer))

        add_received(t for t in round_.shard_side if t.buffer_offset < below)
        for transfer in round_.local:
            _shard_view(grads_P[transfer.param], transfer).add_(_slice_view(grads[transfer.slot], transfer))
        add_received(t for t in round_.shard_side if t.buffer_offset >= below)

    def _pack(
        self, transfers: Sequence[Transfer], dtype: torch.dtype, source: Callable[[Transfer], Tensor]
    ) -> Tensor:
        numel = transfers[-1].buffer_offset + transfers[-1].block.numel if transfers else 0
        buffer = torch.empty(numel, dtype=dtype, device=self._device)
        for transfer in transfers:
            _buffer_view(buffer, transfer).copy_(source(transfer))
        return buffer

    def _all_to_all(
        self, send: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]
    ) -> _Exchange:
        received = torch.empty(sum(receive_splits), dtype=send.dtype, device=self._device)
        if len(send_splits) == 1:
            return _Exchange(None, send, received)
        work = dist.all_to_all_single(
            received, send, list(receive_splits), list(send_splits), group=self._group, async_op=True
        )
        return _Exchange(work, send, received)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """An all-to-all under way; both buffers must live until it is done."""

    work: dist.Work | None
    send: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


def _run_rounds(
    order: Iterable[int], begin: Callable[[int], _Exchange], finish: Callable[[int, Tensor], None]
) -> None:
    """All rounds, each packed and posted while the one before is on the wire (a window of two rounds).

    Nothing in here waits for another rank's computation, so every rank posts every round in the same order.
    """
    under_way: tuple[int, _Exchange] | None = None
    for index in order:
        next_exchange = begin(index)
        if under_way is not None:
            finish(under_way[0], under_way[1].wait())
        under_way = (index, next_exchange)
    if under_way is not None:
        finish(under_way[0], under_way[1].wait())


def _slices_of(slices: Sequence[Tensor]) -> Callable[[Transfer], Tensor]:
    return lambda transfer: _slice_view(slices[transfer.slot], transfer)


def _common_dtype(shards: Sequence[Tensor]) -> torch.dtype:
    return shards[0].dtype if shards else torch.float32
