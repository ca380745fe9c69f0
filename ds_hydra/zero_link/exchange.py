"""Carries out link plans: packs, one all-to-all per round, unpacks. Decides nothing.

Legend: tensors ending in `_P` are flat ZeRO-3 shards of one parameter, tensors ending in `_S` flat slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_link.buffers import ExchangeBuffers
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
    with its own part of the same plan, and begins and finishes the same rounds in the same order. A caller
    that overlaps rounds with computation begins and finishes them one at a time; `pull` and `push` run all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        gradient_dtype: torch.dtype = torch.float32,
        buffers: ExchangeBuffers | None = None,
    ):
        """`buffers` may be shared by links that one thread runs one after the other."""
        self._group = group
        self._buffers = ExchangeBuffers(device) if buffers is None else buffers
        self._gradient_dtype = gradient_dtype

    def pull(self, plan: LinkPlan, shards_P: Sequence[Tensor], bucket_S: Sequence[Sequence[Tensor]]) -> None:
        """Fill this rank's slices from all ranks' shards.

        `shards_P[param]` are this rank's shards (flat, one dtype), `bucket_S[r][slot]` the flat slices
        of its r-th bucket, written in place.
        """
        self._run_rounds(
            range(len(plan.rounds)),
            lambda index: self.begin_pull(plan, index, shards_P, _bucket(bucket_S, index)),
        )

    def push(
        self, plan: LinkPlan, grad_bucket_S: Sequence[Sequence[Tensor]], grads_P: Sequence[Tensor]
    ) -> None:
        """Add this rank's slice gradients into the owners' flat fp32 gradient shards `grads_P`.

        Sums run in fp32 in the order of contributing ranks, so they are deterministic for a given plan.
        Buckets go in reverse, the order in which backward completes them.
        """
        self._run_rounds(
            reversed(range(len(plan.rounds))),
            lambda index: self.begin_push(plan, index, _bucket(grad_bucket_S, index), grads_P),
        )

    def begin_pull(
        self, plan: LinkPlan, index: int, shards_P: Sequence[Tensor], slices: Sequence[Tensor]
    ) -> RoundUnderWay:
        """Pack and post round `index` of a pull; `slices` are this rank's of that round, empty if it has none.

        The slices hold nothing of use until `finish`.
        """
        round_ = plan.rounds[index]

        def unpack(received: Tensor) -> None:
            for transfer in round_.local:
                _slice_view(slices[transfer.slot], transfer).copy_(
                    _shard_view(shards_P[transfer.param], transfer)
                )
            for transfer in round_.slice_side:
                _slice_view(slices[transfer.slot], transfer).copy_(_buffer_view(received, transfer))

        send = self._pack(round_.shard_side, shards_P[0].dtype, lambda t: _shard_view(shards_P[t.param], t))
        return self._all_to_all(send, round_.shard_splits, round_.slice_splits, unpack)

    def begin_push(
        self, plan: LinkPlan, index: int, grads: Sequence[Tensor], grads_P: Sequence[Tensor]
    ) -> RoundUnderWay:
        """Pack and post round `index` of a push; `grads` are this rank's of that round, empty if it has none.

        `grads` must stay as they are and `grads_P` hold the sum only after `finish`.
        """
        round_ = plan.rounds[index]
        send = self._pack(round_.slice_side, self._gradient_dtype, _slices_of(grads))
        return self._all_to_all(
            send,
            round_.slice_splits,
            round_.shard_splits,
            lambda received: _accumulate(plan.rank, round_, grads, received, grads_P),
        )

    def finish(self, under_way: RoundUnderWay) -> None:
        """Wait for a round that was begun, and write what it brought."""
        if under_way.work is not None:
            under_way.work.wait()
        under_way.unpack(under_way.received)
        self._buffers.give_back(under_way.send)
        self._buffers.give_back(under_way.received)

    def _run_rounds(self, order: Iterable[int], begin: Callable[[int], RoundUnderWay]) -> None:
        """All rounds, each packed and posted while the one before is on the wire (a window of two rounds).

        Nothing in here waits for another rank's computation, so every rank posts every round in the same order.
        """
        under_way: RoundUnderWay | None = None
        for index in order:
            next_round = begin(index)
            if under_way is not None:
                self.finish(under_way)
            under_way = next_round
        if under_way is not None:
            self.finish(under_way)

    def _pack(
        self, transfers: Sequence[Transfer], dtype: torch.dtype, source: Callable[[Transfer], Tensor]
    ) -> Tensor:
        numel = transfers[-1].buffer_offset + transfers[-1].block.numel if transfers else 0
        buffer = self._buffers.take(numel, dtype)
        for transfer in transfers:
            _buffer_view(buffer, transfer).copy_(source(transfer))
        return buffer

    def _all_to_all(
        self,
        send: Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        unpack: Callable[[Tensor], None],
    ) -> RoundUnderWay:
        received = self._buffers.take(sum(receive_splits), send.dtype)
        work = None
        if len(send_splits) > 1:
            work = dist.all_to_all_single(
                received, send, list(receive_splits), list(send_splits), group=self._group, async_op=True
            )
        return RoundUnderWay(work, send, received, unpack)


@dataclass(frozen=True, slots=True)
class RoundUnderWay:
    """A round that was begun and not finished; its buffers must live until it is."""

    work: dist.Work | None
    send: Tensor
    received: Tensor
    unpack: Callable[[Tensor], None]


def _accumulate(
    rank: int, round_: Round, grads: Sequence[Tensor], received: Tensor, grads_P: Sequence[Tensor]
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


def _bucket(buckets: Sequence[Sequence[Tensor]], index: int) -> Sequence[Tensor]:
    return buckets[index] if index < len(buckets) else ()


def _slices_of(slices: Sequence[Tensor]) -> Callable[[Transfer], Tensor]:
    return lambda transfer: _slice_view(slices[transfer.slot], transfer)
