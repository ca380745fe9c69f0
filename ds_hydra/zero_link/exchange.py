"""Carries out link plans: packs the elements of each hop, posts one all-to-all, unpacks or adds.
Decides nothing. Under node-aware routes a round has two hops, one across nodes and one inside them.

Legend: tensors ending in `_P` are flat ZeRO-3 shards of one parameter, tensors ending in `_S` flat
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_link.buffers import (
    ExchangeBuffers,
    OrderedSum,
    PackedBuffer,
    PackedHop,
    Stores,
    pack_hop,
    packed_views,
    run_pairs,
)
from ds_hydra.zero_link.layout import STAYS, LinkPlan, Round


class _Posted(NamedTuple):
    """An all-to-all under way; its buffers must live until it is done."""

    work: dist.Work
    outgoing: Tensor
    incoming: Tensor


RoundUnderWay = Callable[[], None]
"""A round in flight: waits for it and writes the received elements. Holds the round's buffers."""


def _members(group: dist.ProcessGroup | None) -> slice:
    """Neighbouring ranks that `group` consists of, None of all ranks."""
    if group is None:
        return slice(None)
    ranks = dist.get_process_group_ranks(group)
    return slice(ranks[0], ranks[-1] + 1)


class Link:
    """The LNK operator (§5.2) between ZeRO-3 shards and the slices of one iteration.

    All methods are collective over `group`, which spans all ranks of the plans; every rank calls
    them with its own part of the same plan, begins the rounds in the same order, and finishes them
    in that order. Nothing in here waits for another rank's computation.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        gradient_dtype: torch.dtype = torch.float32,
        buffers: ExchangeBuffers | None = None,
        node_group: dist.ProcessGroup | None = None,
    ):
        """`buffers` may be shared by links that one thread runs one after the other.

        `node_group` carries the second hop of node-aware plans: ranks of this rank's node, in
        order. One hop is posted when a round begins, the other one when it is finished: with a
        group of its own the order of neither depends on how many rounds were begun before.
        """
        self._packed: dict[int, tuple[Round, tuple[PackedHop, ...]]] = {}
        self._groups = (group, group if node_group is None else node_group)
        # Plans count all ranks, an all-to-all those of its group alone.
        self._members = tuple(_members(group) for group in self._groups)
        self._buffers = ExchangeBuffers(device) if buffers is None else buffers
        self._gradient_dtype = gradient_dtype
        self._relayed: dict[int, Tensor] = {}
        self._abandoned: list[RoundUnderWay] = []

    def reserve(self, plan: LinkPlan, shards_P: Sequence[Tensor]) -> None:
        """Take the memory of all that stays on this rank for its node, until `forget_relayed`. Call
        before the first pull of such a `plan`, in the stream that computes: memory of the link's
        stream would be of no use to computation afterwards. Not collective.
        """
        numels = {
            index: round_.relayed_numel
            for index, round_ in enumerate(plan.rounds)
            if round_.relayed_numel and round_.relayed_until == STAYS
        }
        self._relayed |= {index: shards_P[0].new_empty(n) for index, n in numels.items()}

    def begin_pull(
        self, plan: LinkPlan, index: int, shards_P: Sequence[Tensor], slices_S: Sequence[Tensor]
    ) -> RoundUnderWay:
        """Post round `index` of a pull; `slices_S` are this rank's of that round, empty if it has
        none.

        The slices hold nothing of use until `finish`, and the shards must not change until then. A
        plan with nodes needs its rounds in ascending order, unless it was planned with
        `independent_rounds`.
        """
        round_, packed = plan.rounds[index], self._pack(plan, index)
        dtype = shards_P[0].dtype
        # Holds the dictionary itself, so that memory taken below is in it.
        stores = Stores(dtype, shards_P, slices_S, self._relayed)
        if round_.relayed_numel and round_.relayed_until != STAYS:
            # Stays after this round: a cell crosses nodes once, and later rounds read it here.
            self._relayed[index] = self._buffers.take(round_.relayed_numel, dtype)

        def post(number: int) -> _Posted:
            side = packed[number]
            return self._post(side.shards, side.slices, stores, dtype, number)

        posted = post(0)

        def finish() -> None:
            self._unpack(posted, packed[0], stores)
            # Not posted before: the second hop sends on what the first one has brought.
            for number in range(1, len(packed)):
                self._unpack(post(number), packed[number], stores)
            for first in [r for r in self._relayed if plan.rounds[r].relayed_until == index]:
                self._buffers.give_back(self._relayed.pop(first))

        return finish

    def begin_push(
        self, plan: LinkPlan, index: int, grads_S: Sequence[Tensor], grads_P: Sequence[Tensor]
    ) -> RoundUnderWay:
        """Post round `index` of a push; `grads_S` are this rank's of that round, empty if it has
        none.

        `grads_S` must stay as they are and `grads_P` hold the sum only after `finish`. A plan with
        nodes needs its rounds in descending order, unless it was planned with `independent_rounds`.
        """
        packed = self._pack(plan, index)
        # Sums have fp32 on relays as on owners, whatever type travels.
        stores = Stores(torch.float32, grads_P, grads_S, self._relayed)
        # Sums that several rounds add to are in the memory of the first one, the last of a push.
        for first, other in enumerate(plan.rounds[: index + 1]):
            if other.relayed_numel and other.relayed_until >= index and first not in self._relayed:
                sums = self._buffers.take(other.relayed_numel, torch.float32)
                self._relayed[first] = sums.zero_()

        def post(number: int) -> _Posted:
            side = packed[number]
            return self._post(side.slices, side.shards, stores, self._gradient_dtype, number)

        # The reverse of a pull: first inside the node, where relays sum, then across nodes.
        *earlier, last = range(len(packed))
        posted = post(last)

        def finish() -> None:
            self._add(posted, packed[last], stores)
            # The node's sums are complete now, and go on to the ranks that own them.
            for number in reversed(earlier):
                self._add(post(number), packed[number], stores)
            # Rounds descend, or are independent: nothing is added to these sums any more.
            if index in self._relayed:
                self._buffers.give_back(self._relayed.pop(index))

        return finish

    def abandon(self, under_way: RoundUnderWay) -> None:
        """Keep a failed round's messages for as long as the link lives: it will not be
        finished.

        gloo takes back a receipt that nobody holds any more, and its message would go to the next
        round.
        """
        self._abandoned.append(under_way)

    def forget_relayed(self) -> None:
        """Release weights that stay for the node, and relayed parts of failed rounds; call when no
        round is under way. Not collective.
        """
        self._relayed.clear()

    def _pack(self, plan: LinkPlan, index: int) -> tuple[PackedHop, ...]:
        """Packing of the hops of round `index`, planned once."""
        round_ = plan.rounds[index]
        if id(round_) not in self._packed:  # which stays alive with its entry
            packed = tuple(pack_hop(hop, plan.rank, plan.num_ranks) for hop in round_.hops)
            self._packed[id(round_)] = round_, packed
        return self._packed[id(round_)][1]

    def _post(
        self,
        send: PackedBuffer,
        receive: PackedBuffer,
        stores: Stores,
        dtype: torch.dtype,
        hop: int,
    ) -> _Posted:
        outgoing, incoming = (self._buffers.take(side.numel, dtype) for side in (send, receive))
        views = packed_views(outgoing, send.copies)
        run_pairs(views, stores.views(send.copies), send.copies.num_plain)
        work = dist.all_to_all_single(
            incoming,
            outgoing,
            list(receive.splits[self._members[hop]]),
            list(send.splits[self._members[hop]]),
            group=self._groups[hop],
            async_op=True,
        )
        return _Posted(work, outgoing, incoming)

    def _unpack(self, posted: _Posted, packed: PackedHop, stores: Stores) -> None:
        """Copy received elements, and own ones that this rank needs, in as few kernels as
        possible.
        """
        posted.work.wait()
        copies, local = packed.slices.copies, packed.needed
        targets, sources = stores.views(copies), packed_views(posted.incoming, copies)
        # Plain ones of both go into one kernel.
        place = copies.num_plain
        targets[place:place] = stores.views(local)
        sources[place:place] = stores.views(packed.owned)
        run_pairs(targets, sources, place + local.num_plain)
        self._give_back(posted)

    def _add(self, posted: _Posted, packed: PackedHop, stores: Stores) -> None:
        """See [Note: Sums in packed buffers]."""
        posted.work.wait()
        incoming = posted.incoming
        for addition in packed.additions:
            if addition.is_direct and self._gradient_dtype == torch.float32:
                self._add_in_place(addition, incoming, stores)
                continue
            # Begins with what the shards hold already, of other rounds and of earlier phases.
            sums = self._buffers.take(addition.numel, stores.dtype)
            targets, num_plain = stores.views(addition.targets), addition.targets.num_plain
            places = packed_views(sums, addition.targets)
            run_pairs(places, targets, num_plain)
            for begin in addition.begins:
                if begin is not None:
                    # What arrives may have 16 bits, the sum has 32.
                    sums.add_(incoming[begin : begin + addition.numel])
                    continue
                own, views = addition.own, packed_views(sums, addition.own)
                run_pairs(views, stores.views(own), own.num_plain, torch._foreach_add_)
            run_pairs(targets, places, num_plain)
            self._buffers.give_back(sums)
        self._give_back(posted)

    @staticmethod
    def _add_in_place(addition: OrderedSum, received: Tensor, stores: Stores) -> None:
        targets, num_plain = stores.views(addition.targets), addition.targets.num_plain
        for begin in addition.begins:
            if begin is None:
                sources, of_own = stores.views(addition.own), addition.own.num_plain
                # Plain ones come first in both lists; a pair is plain where both of its ends are.
                run_pairs(targets, sources, min(num_plain, of_own), torch._foreach_add_)
            else:
                sources = packed_views(received[begin : begin + addition.numel], addition.targets)
                run_pairs(targets, sources, num_plain, torch._foreach_add_)

    def _give_back(self, posted: _Posted) -> None:
        for buffer in (posted.outgoing, posted.incoming):
            self._buffers.give_back(buffer)
