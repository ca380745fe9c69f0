"""Pulls of gathered layers whose weights travel in 8 bits, because they multiply in 8 bits.

[Note: Weights that travel in 8 bits]
An 8-bit product casts its weight by scales of powers of two ([Note: Scales of 8-bit products]).
The owner of a shard makes the same cast, with the scale of the whole weight, on which all ranks
agree at the start of an iteration: weights change in the optimizer's step alone. What is sent are
the 8 bits. The reader divides by the scale, which is exact in 16 bit, and has weights that the
product casts to the numbers it would have cast the whole ones to: a number that 8 bits hold is not
rounded. Where rounding moves the largest number to a power of two the product's scale doubles, and
nothing else. So every result has the bits it has without.

*Tensorwise* one scale serves all passes. *Rowwise* products take scales of rows in forward and of
columns in backward. A layer that is gathered for forward passes comes by the one, for backward
passes by the other. Where both read what one pull brings (the layers in the two slots where forward
turns into backward, and back; layers that run again in backward), it travels as it is.

A round is two: all other slices of the bucket, and those in 8 bits.

Legend: tensors ending in `_P` are flat ZeRO-3 shards of one parameter, tensors ending in `_S` flat
slices. R and C are rows and columns of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from ds_hydra.engine.parallel.one_f_one_b import Pass
from ds_hydra.engine.transfer.schedule import Transfer
from ds_hydra.engine.transfer.session import LinkCarrier
from ds_hydra.zero_link import LinkPlan, ParamSpec, RankBuckets, Region, keep_only
from ds_hydra.zero_link.buffers import ExchangeBuffers
from ds_hydra.zero_link.exchange import Link, RoundUnderWay

WHOLE, ROWS, COLUMNS = "whole", "rows", "columns"
"""What has a scale of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EightBitPlans:
    """The pull of one strategy in two parts, and what of it is in 8 bits."""

    eight: LinkPlan
    rest: LinkPlan
    params: tuple[frozenset[int], ...]
    """Of each round, those that any rank pulls in 8 bits."""
    buckets: RankBuckets
    """Of this rank."""


def plan_eight_bits(
    rank_buckets: Sequence[RankBuckets],
    params: frozenset[int],
    rank: int,
    plan: Callable[[Sequence[RankBuckets]], LinkPlan],
) -> EightBitPlans:
    """`plan` makes a pull of the buckets of all ranks, of which `params` travel in 8 bits. Pure."""
    distinct = {id(buckets): buckets for buckets in rank_buckets}
    rounds = zip_longest(*distinct.values(), fillvalue=())
    asked = [{r.param for bucket in of_ranks for r in bucket} & params for of_ranks in rounds]
    return EightBitPlans(
        eight=plan(keep_only(rank_buckets, lambda param: param in params)),
        rest=plan(keep_only(rank_buckets, lambda param: param not in params)),
        params=tuple(map(frozenset, asked)),
        buckets=rank_buckets[rank],
    )


class EightBitScales:
    """The scales of this iteration's weights, and casts by them. `is_tensorwise` names the
    parameters that travel in 8 bits, by their number in `specs`.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        is_tensorwise: Mapping[int, bool],
        rank: int,
        num_ranks: int,
        device: torch.device,
    ):
        self._rank, self._num_ranks = rank, num_ranks
        self.params = frozenset(is_tensorwise)
        self.one_serves_all = all(is_tensorwise.values())
        """Whether no scale depends on the pass that reads a weight."""
        self._specs, self._is_tensorwise = specs, is_tensorwise
        self._places: dict[tuple[int, str], slice] = {}
        begin = 0
        for param, whole in is_tensorwise.items():
            rows, columns = specs[param].shape
            parts = {WHOLE: 1} if whole else {ROWS: rows, COLUMNS: columns}
            for side, length in parts.items():
                self._places[param, side] = slice(begin, begin + length)
                begin += length
        self._scales = self._inverses = torch.zeros(begin, device=device)

    def measure(self, shards_P: Sequence[Tensor]) -> None:
        """Find the scales of the weights as they are now. Collective over all ranks."""
        largest = self.find_largest(shards_P)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self.take(largest)

    def take(self, largest: Tensor) -> None:
        """Scale by the `largest` numbers of all ranks."""
        self._scales = amax_to_scale(largest, e4m3_dtype, round_scales_to_power_of_2=True)
        self._inverses = self._scales.reciprocal()

    def find_largest(self, shards_P: Sequence[Tensor]) -> Tensor:
        """The largest numbers of this rank's shards, for each scale."""
        largest = torch.zeros_like(self._scales)
        owned = {param: self._own(param, shards_P[param]) for param in self._is_tensorwise}
        owned = {param: own_P for param, own_P in owned.items() if own_P.numel()}
        whole = [param for param in owned if self._is_tensorwise[param]]
        if whole:  # of all at once: the host pays for every launch
            norms = torch._foreach_norm([owned[param] for param in whole], math.inf)
            places = [self._places[param, WHOLE].start for param in whole]
            largest[torch.tensor(places, device=largest.device)] = torch.stack(norms).float()
        for param in owned.keys() - whole:
            # Zeros stand for what other ranks own: they raise no largest number.
            first, _, rows_RC = self._as_rows(param, owned[param].abs())
            begin = self._places[param, ROWS].start + first
            largest[begin : begin + len(rows_RC)] = rows_RC.amax(dim=1).float()
            largest[self._places[param, COLUMNS]] = rows_RC.amax(dim=0).float()
        return largest

    def cast(self, param: int, side: str, shard: Tensor) -> Tensor:
        """The 8 bits of a shard, for passes that take scales of ROWS or COLUMNS."""
        own = self._own(param, shard)
        if self._is_tensorwise[param]:
            scale = self._scales[self._places[param, WHOLE]]
            # In fp32, as torchao casts: by a power of two no number is rounded before the cast.
            # Sent as bytes, because gloo takes no 8-bit floating point.
            return to_fp8_saturated(own.float() * scale, e4m3_dtype).view(torch.uint8)
        # Whole rows, for the sake of their shape: what others own is zeros, and is cut off again.
        first, before, rows_RC = self._as_rows(param, own)
        scales = self._scales[self._places[param, side]]
        scales = scales[first : first + len(rows_RC), None] if side == ROWS else scales
        eight_RC = to_fp8_saturated(rows_RC.float() * scales, e4m3_dtype).view(torch.uint8)
        return eight_RC.flatten()[before : before + own.numel()]

    def write(self, param: int, side: str, region: Region, bits_S: Tensor, slice_S: Tensor) -> None:
        """Put into a slice what its 8 bits stand for."""
        shape = self._specs[param].slice_shape(region)
        if self._is_tensorwise[param]:
            inverses = self._inverses[self._places[param, WHOLE]]
        elif side == ROWS:
            inverses = self._inverses[self._places[param, ROWS]]
            inverses = inverses[region.row : region.row + shape[0], None]
        else:
            inverses = self._inverses[self._places[param, COLUMNS]]
            inverses = inverses[region.col : region.col + shape[1]]
        weight = slice_S.view(shape)
        # Loses nothing: 16 bits hold what 8 say, and the inverses are powers of 2.
        weight.copy_(bits_S.view(e4m3_dtype).view(shape))
        weight.mul_(inverses)

    def _own(self, param: int, shard: Tensor) -> Tensor:
        """`shard` without padding."""
        return shard[: max(0, self._specs[param].numel - self._begin(param))]

    def _begin(self, param: int) -> int:
        return self._rank * self._specs[param].shard_numel(self._num_ranks)

    def _as_rows(self, param: int, own: Tensor) -> tuple[int, int, Tensor]:
        """The first row that this rank has a part of, the elements before that part, and the rows
        [R, C], with zeros where other ranks have them.
        """
        columns = self._specs[param].shape[1]
        first, before = divmod(self._begin(param), columns)
        after = -(before + own.numel()) % columns
        rows_RC = torch.nn.functional.pad(own, (before, after)).view(-1, columns)
        return first, before, rows_RC if own.numel() else rows_RC[:0]


class EightBitCarrier(LinkCarrier):
    """Rounds of a link as LinkCarrier's, `plans` of the pull in 8 bits where passes allow it."""

    def __init__(
        self,
        *args: Any,
        scales: EightBitScales,
        plans: EightBitPlans,
        link: Link,
        buffers: ExchangeBuffers,
    ):
        """`link` is for what travels in 8 bits: two rounds are under way at once."""
        super().__init__(*args)
        self._scales, self._plans, self._link, self._buffers = scales, plans, link, buffers

    def open(self) -> bool:
        """Find this iteration's scales."""
        self._scales.measure(self._shards_P)
        return True

    def _begin_pull(self, transfer: Transfer, slices_S: Sequence[Tensor]) -> RoundUnderWay:
        bucket, scales, plans = transfer.bucket, self._scales, self._plans
        # Of all ranks, not of this one: an owner casts whatever anybody pulls.
        params = plans.params[bucket]
        if not params or not (scales.one_serves_all or len(transfer.readers) == 1):
            return super()._begin_pull(transfer, slices_S)
        side = ROWS if Pass.FORWARD in transfer.readers else COLUMNS
        rest = self._pull_link.begin_pull(plans.rest, bucket, self._shards_P, slices_S)
        entries = plans.buckets[bucket] if bucket < len(plans.buckets) else ()
        numels = [ref.region.numel if ref.param in params else 0 for ref in entries]
        try:
            nothing = self._shards_P[0].new_empty(0, dtype=torch.uint8)
            eight_P = [
                scales.cast(param, side, shard) if param in params else nothing
                for param, shard in enumerate(self._shards_P)
            ]
            landing = self._buffers.take(sum(numels), torch.uint8)
            eight_S = landing.split(numels) if numels else ()
            eight = self._link.begin_pull(plans.eight, bucket, eight_P, eight_S)
        except BaseException:
            self.abandon(rest)  # it is on the wire, and nobody else knows of it
            raise

        def finish() -> None:
            # In the order of their begin: both post a second hop when they end, in one group.
            rest()
            eight()
            for ref, bits_S, slice_S in zip(entries, eight_S, slices_S, strict=True):
                if bits_S.numel():
                    scales.write(ref.param, side, ref.region, bits_S, slice_S)
            self._buffers.give_back(landing)

        return finish
