"""This rank's pull and push of every strategy: link plans, memory of slices, sessions.

Legend: tensors ending in `_P` are flat ZeRO-3 shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.ranks.agreement import max_over_ranks
from ds_hydra.engine.ranks.hosts import Hosts, find_ranks_per_node, warn_of_placement
from ds_hydra.engine.transfer.frozen import FrozenKeeper, without_frozen
from ds_hydra.engine.transfer.gathering import GatherSession, plan_rounds
from ds_hydra.engine.transfer.home import Home, open_home
from ds_hydra.engine.transfer.link_agreement import check_link_plans
from ds_hydra.engine.transfer.link_memory import LinkMemory
from ds_hydra.engine.transfer.link_session import DeviceClock, LinkSession, LinkThread
from ds_hydra.engine.transfer.slices import (
    SlicePool,
    Slices,
    gradient_numel,
    held_numel,
    slot_numels,
)
from ds_hydra.engine.transfer.stream_plan import (
    StageStreams,
    Window,
    check_streams,
    count_addends,
    only_copied,
    stage_passes,
)
from ds_hydra.engine.transfer.streaming import HomeSlices, StreamSession
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.profiles.state_bytes import EXCHANGE_BUFFERS
from ds_hydra.strategy.schemes.placement import Role, slices_key
from ds_hydra.zero_link import LinkPlan, RankBuckets, plan_link
from ds_hydra.zero_link.buffers import ExchangeBuffers
from ds_hydra.zero_link.exchange import Link

GRADIENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Values of `LinkConfig.gradient_dtype`."""


@dataclass(frozen=True, slots=True)
class StrategyLink:
    """This rank's link plans for one strategy, or for all that need the same slices."""

    buckets: RankBuckets
    pull: LinkPlan
    pull_trained: LinkPlan
    """The pull without frozen parameters; the same object as `pull` where none is frozen."""
    push: LinkPlan
    memory: LinkMemory


@dataclass(frozen=True, slots=True)
class StreamLink:
    """This rank's part of a strategy in which layers stream."""

    role: Role | None
    buckets: RankBuckets
    streams: StageStreams
    memory: LinkMemory

    def uses(self, plan: IterationPlan, *, training: bool) -> list[int]:
        """In which order this rank uses the buckets of its window."""
        role = self.role
        if role is None:
            return []
        num_micro_batches = len(plan.pipelines[role.pipeline].micro_batches)
        return self.streams.window.uses(
            stage_passes(role.scheme.pp, role.stage, num_micro_batches, training=training)
        )


@dataclass(frozen=True, slots=True)
class Work:
    """A rank's part of one iteration's computation, and what it calls before it reads slices, and
    before it waits for another stage.
    """

    role: Role | None
    await_bucket: Callable[[int], None]
    before_backward: Mapping[int, Callable[[], None] | None]
    await_posts: Callable[[], None] = lambda: None
    """Where layers are gathered there are no stages."""


class StrategyLinks:
    """Pull and push of strategies on this rank. Methods are collective over all ranks where they
    say so.
    """

    def __init__(
        self,
        stage_model: StageModel,
        groups: GroupPool,
        hosts: Hosts,
        config: LinkConfig,
        device: torch.device,
    ):
        """Collective over all ranks: creates the groups of pull and push."""
        self.stage_model = stage_model
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.hosts, self._groups, self._device = hosts, groups, device
        everyone = range(self.num_ranks)
        if self.rank == 0 and config.devices_per_node is None:
            warn_of_placement(hosts.of_rank)
        self.ranks_per_node = find_ranks_per_node(config, hosts.of_rank)
        purposes = ["pull", "push"] + (["pull_node", "push_node"] if self.ranks_per_node else [])
        groups.create([(purpose, everyone) for purpose in purposes])
        pull, push, *of_nodes = (groups.get(purpose, everyone) for purpose in purposes)
        pull_node, push_node = of_nodes or (None, None)
        self._dtype: torch.dtype = stage_model.params[0].ds_tensor.dtype
        self._gradient_dtype = GRADIENT_DTYPES[config.gradient_dtype]
        self.buffers = ExchangeBuffers(device)
        self.pool = SlicePool(device)
        self.pull_link = Link(pull, device, buffers=self.buffers, node_group=pull_node)
        self.push_link = Link(push, device, self._gradient_dtype, self.buffers, push_node)
        self.clock = DeviceClock(device)
        self.thread = LinkThread(device, overlap=config.overlap)
        self._frozen: FrozenKeeper | None = None
        if config.keep_frozen and not all(spec.requires_grad for spec in stage_model.specs):
            self._frozen = FrozenKeeper(
                self._frozen_P, lambda changed: max_over_ranks(float(changed), device) > 0
            )
        self._links: dict[Hashable, StrategyLink] = {}
        self._stream_links: dict[Strategy, StreamLink] = {}
        self.home: Home | None = None
        """Where weights and sums of streamed layers are, once a strategy has some."""

    def close(self) -> None:
        """End the link's thread and leave the home; not collective."""
        self.thread.close()
        if self.home is not None:
            self.home.close()
            self.home = None

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Create the home of streamed layers, where `strategies` have some. Collective over all
        ranks.
        """
        streaming = sorted(
            {scheme for strategy in strategies for scheme in strategy.schemes if scheme.stream}
        )
        check_streams(streaming, self._device.type)
        if streaming and self.home is None:
            purpose = f"scheme {streaming[0]}: streamed layers need a home; leave stream out of hydra.strategies"
            layers = [[b.param for b in u.bindings] for u in self.stage_model.units[1:-1]]
            self.home = open_home(
                self.stage_model.specs,
                layers,
                self._dtype,
                self._device,
                self._groups,
                purpose,
            )

    def weight_addresses(self) -> set[int]:
        """Where storages with weights or their gradients begin. Not collective."""
        home = set() if self.home is None else {self.home.address}
        return self.pool.addresses() | home

    def link_memory(self, strategy: Strategy) -> LinkMemory:
        """Most bytes that `strategy` makes this rank hold, activations left out. Not collective."""
        streams = any(scheme.stream for scheme in strategy.schemes)
        link = self._stream_link_of(strategy) if streams else self.of(strategy)
        return link.memory

    def of(self, strategy: Strategy) -> StrategyLink:
        """Link plans of `strategy`; the first time collective, because ranks compare them."""
        key = slices_key(strategy)
        if key not in self._links:
            rank_buckets = self.stage_model.strategy_buckets(strategy, self.num_ranks)

            def plan(rank_buckets: Sequence[RankBuckets], *, gradients: bool) -> LinkPlan:
                return plan_link(
                    self.stage_model.specs,
                    rank_buckets,
                    self.rank,
                    gradients=gradients,
                    ranks_per_node=self.ranks_per_node,
                    independent_rounds=strategy.gathers,
                )

            pull, push = plan(rank_buckets, gradients=False), plan(rank_buckets, gradients=True)
            pull_trained = pull
            if self._frozen is not None and not strategy.gathers:
                trained = without_frozen(self.stage_model.specs, rank_buckets)
                pull_trained = plan(trained, gradients=False)
            check_link_plans(strategy, (pull, pull_trained, push), self._device)
            self._links[key] = StrategyLink(
                buckets=rank_buckets[self.rank],
                pull=pull,
                pull_trained=pull_trained,
                push=push,
                memory=self._memory_of(strategy, rank_buckets[self.rank], pull, push),
            )
        return self._links[key]

    def open(
        self, strategy: Strategy, *, with_gradients: bool, grads_P: Sequence[Tensor] | None
    ) -> tuple[Slices, LinkSession]:
        """Memory for the slices of `strategy`, and the session that fills it and pushes into
        `grads_P`.
        """
        link = self.of(strategy)
        self._forget_failed()
        pull = link.pull
        if self._frozen is not None:
            pull = self._frozen.choose(slices_key(strategy), link.pull, link.pull_trained)
        slices = Slices(
            self.stage_model.specs,
            link.buckets,
            self.pool,
            self._dtype,
            with_gradients=with_gradients,
        )
        session = LinkSession(
            self.thread,
            self.clock,
            pull=(self.pull_link, pull),
            push=(self.push_link, link.push),
            shards_P=self.shards_P(),
            slices=slices,
            grads_P=grads_P,
        )
        return slices, session

    def _forget_failed(self) -> None:
        self.buffers.forget_failed()
        self.pull_link.forget_failed()
        self.push_link.forget_failed()

    def open_plan(
        self, plan: IterationPlan, *, training: bool, grads_P: Sequence[Tensor] | None
    ) -> tuple[Slices, LinkSession | StreamSession | GatherSession, Work]:
        """What `plan` runs on; the first time collective, as `of` is."""
        if any(scheme.stream for scheme in plan.strategy.schemes):
            return self._open_streams(plan, training=training, grads_P=grads_P)
        if plan.strategy.gathers:
            return self._open_gather(plan, training=training, grads_P=grads_P)
        slices, session = self.open(plan.strategy, with_gradients=training, grads_P=grads_P)
        role = Role.find(plan.strategy, self.rank)
        return slices, session, Work(role, session.await_bucket, {}, session.await_posts)

    def _open_gather(
        self, plan: IterationPlan, *, training: bool, grads_P: Sequence[Tensor] | None
    ) -> tuple[Slices, GatherSession, Work]:
        link, model = self.of(plan.strategy), self.stage_model
        window = model.gather_window(plan.strategy.schemes[0])
        if self._frozen is not None:
            self._frozen.forget()  # layers take turns in the pool's memory
        self._forget_failed()
        slices = Slices(
            model.specs,
            link.buckets,
            self.pool,
            self._dtype,
            with_gradients=training,
            slot_of=self._slots(plan.strategy, link.buckets),
            gathers=True,
        )
        most = max(len(pipeline.micro_batches) for pipeline in plan.pipelines)
        session = GatherSession(
            self.thread,
            self.clock,
            pull=(self.pull_link, link.pull),
            push=(self.push_link, link.push),
            schedule=plan_rounds(window, len(model.units), most, training=training),
            shards_P=self.shards_P(),
            slices=slices,
            grads_P=grads_P,
        )
        role = Role.find(plan.strategy, self.rank)
        return slices, session, Work(role, session.await_bucket, _backward_hooks(window, session))

    def _open_streams(
        self, plan: IterationPlan, *, training: bool, grads_P: Sequence[Tensor] | None
    ) -> tuple[Slices, StreamSession, Work]:
        link = self._stream_link_of(plan.strategy)
        assert self.home is not None, plan.strategy
        specs = self.stage_model.specs
        if self._frozen is not None:
            self._frozen.forget()  # what is copied takes the pool's memory
        self._forget_failed()
        slices = Slices(
            specs,
            link.buckets,
            self.pool,
            self._dtype,
            with_gradients=training,
            slot_of=link.streams.window.slot_of,
            home=HomeSlices(self.home, specs, link.buckets, link.streams),
        )
        num_micro_batches = [len(pipeline.micro_batches) for pipeline in plan.pipelines]
        session = StreamSession(
            self.thread,
            self.clock,
            self.home,
            num_addends=count_addends(plan.strategy, num_micro_batches),
            uses=link.uses(plan, training=training),
            shards_P=self.shards_P(),
            buckets=link.buckets,
            slices=slices,
            grads_P=grads_P,
            with_gradients=training,
        )
        hooks = _backward_hooks(link.streams.window, session)
        return slices, session, Work(link.role, session.await_bucket, hooks, session.await_posts)

    def _stream_link_of(self, strategy: Strategy) -> StreamLink:
        """This rank's part of a strategy with streamed layers."""
        if strategy not in self._stream_links:
            role = Role.find(strategy, self.rank)
            buckets, streams = (), StageStreams()
            if role is not None and self.home is not None:
                place = role.scheme, role.stage, role.tp_rank, role.ep_rank
                buckets = self.stage_model.buckets(*place)
                streams = self.stage_model.stage_streams(*place, has_views=self.home.has_views)
            memory = self._stream_memory_of(buckets, streams)
            self._stream_links[strategy] = StreamLink(role, buckets, streams, memory)
        return self._stream_links[strategy]

    def _stream_memory_of(self, buckets: RankBuckets, streams: StageStreams) -> LinkMemory:
        assert self.home is not None
        specs = self.stage_model.specs
        copied = only_copied(buckets, streams.copied)
        kept = () if streams.is_streamed else buckets
        copies = held_numel(specs, copied, streams.window.slot_of) * self._dtype.itemsize
        return LinkMemory(
            slice_bytes=self.home.weight_bytes + copies,
            gradient_bytes=self.home.sum_bytes + sum(gradient_numel(specs, b) for b in kept) * 4,
            exchange_bytes=0,
            relayed_bytes=0,
        )

    def _exchange_bytes(self, pull: LinkPlan, push: LinkPlan) -> int:
        packs = self._device.type != "cpu"
        sent = ((pull, self._dtype.itemsize), (push, self._gradient_dtype.itemsize))
        return EXCHANGE_BUFFERS * max(
            plan.packed_elements * size if packs else plan.buffer_bytes(size) for plan, size in sent
        )

    def shards_P(self) -> list[Tensor]:
        """This rank's ZeRO-3 shards."""
        return [p.ds_tensor.detach() for p in self.stage_model.params]

    def _frozen_P(self) -> list[Tensor]:
        specs = self.stage_model.specs
        return [s for s, spec in zip(self.shards_P(), specs, strict=True) if not spec.requires_grad]

    def _memory_of(
        self, strategy: Strategy, buckets: RankBuckets, pull: LinkPlan, push: LinkPlan
    ) -> LinkMemory:
        specs = self.stage_model.specs
        itemsize = self._dtype.itemsize
        slot_of = self._slots(strategy, buckets)
        kept = [bucket for r, bucket in enumerate(buckets) if r not in slot_of]
        return LinkMemory(
            slice_bytes=held_numel(specs, buckets, slot_of) * itemsize,
            gradient_bytes=sum(gradient_numel(specs, bucket) for bucket in kept) * 4
            + sum(slot_numels(gradient_numel, specs, buckets, slot_of).values()) * itemsize,
            exchange_bytes=self._exchange_bytes(pull, push),
            relayed_bytes=max(pull.relayed_elements * itemsize, push.relayed_elements * 4),
        )

    def _slots(self, strategy: Strategy, buckets: RankBuckets) -> Mapping[int, int]:
        """In which slot each bucket is gathered."""
        if not strategy.gathers or not buckets:
            return {}
        return self.stage_model.gather_window(strategy.schemes[0]).slot_of


def _backward_hooks(
    window: Window, session: StreamSession | GatherSession
) -> dict[int, Callable[[], None] | None]:
    """What is called before the backward pass of each bucket of `window`."""
    return {
        index: functools.partial(session.enter, index) if has_backward else None
        for index, has_backward in zip(window.buckets, window.has_backward, strict=True)
        if has_backward or index > 0
    }
