"""Carries out one iteration plan: pull slices, run 1F1B, push gradients. Decides nothing.

Legend: tensors ending in `_P` are flat ZeRO-3 shards, tensors ending in `_S` flat slices, `_T` one
value per token of a packed micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.model.attention import PackedMicroBatch
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.parallel.one_f_one_b import StageInfo, StageIO, run_1f1b, run_forward_only
from ds_hydra.engine.parallel.tensor_parallel import summed_cross_entropy
from ds_hydra.engine.parallel.ulysses import SequenceShard
from ds_hydra.engine.ranks.agreement import gather_rows, raise_together
from ds_hydra.engine.ranks.host_memory import to_device
from ds_hydra.engine.ranks.hosts import find_hosts, ranks_per_node, warn_of_placement
from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.engine.transfer.frozen import FrozenKeeper, without_frozen
from ds_hydra.engine.transfer.home import SharedMemoryHome
from ds_hydra.engine.transfer.link_agreement import check_link_plans
from ds_hydra.engine.transfer.link_session import DeviceClock, LinkSession, LinkThread
from ds_hydra.engine.transfer.slices import SlicePool, Slices, gradient_numel, held_numel
from ds_hydra.engine.transfer.stream_plan import (
    StageStreams,
    check_streams,
    count_addends,
    only_copied,
    stage_passes,
)
from ds_hydra.engine.transfer.streaming import AcrossHosts, HomeSlices, StreamSession
from ds_hydra.errors import PlanMismatchError
from ds_hydra.sampler.data.examples import IGNORED_LABEL
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.zero_link import LinkPlan, RankBuckets, plan_link
from ds_hydra.zero_link.buffers import ExchangeBuffers
from ds_hydra.zero_link.exchange import Link
from ds_hydra.zero_link.home_parts import flat_specs, parts_from_other_hosts

Example = tuple[Tensor, Tensor]
"""(input_ids [l], labels [l]) of one sequence, int64; labels not yet shifted."""

LoadExample = Callable[[int], Example]
"""The sequence at a position of the plan; called only on ranks that need its tokens or labels."""


GRADIENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Values of `hydra.link.gradient_dtype`."""


def find_ranks_per_node(config: LinkConfig, host_of: Sequence[int]) -> int | None:
    """Ranks of a node for node-aware routes, or None for direct ones (always on a single node).

    `host_of`, the host of every rank, answers what `hydra.link.devices_per_node` leaves open.
    """
    found = config.devices_per_node or ranks_per_node(host_of)
    return found if config.routes == "node" and 1 < found < len(host_of) else None


@dataclass(frozen=True, slots=True)
class Role:
    """This rank's place in a strategy."""

    pipeline: int
    scheme: Scheme
    stage: int
    sp_rank: int
    tp_rank: int
    ranks: tuple[int, ...]

    @classmethod
    def find(cls, strategy: Strategy, rank: int) -> Role | None:
        """The role of `rank`, or None where the strategy leaves it idle."""
        for index, (scheme, ranks) in enumerate(
            zip(strategy.schemes, strategy.place(), strict=True)
        ):
            if rank in ranks:
                return cls._at(ranks.index(rank), index, scheme, ranks)
        return None

    @classmethod
    def of_all(cls, strategy: Strategy) -> dict[int, Role]:
        """The role of every rank that is not idle."""
        return {
            rank: cls._at(place, index, scheme, ranks)
            for index, (scheme, ranks) in enumerate(
                zip(strategy.schemes, strategy.place(), strict=True)
            )
            for place, rank in enumerate(ranks)
        }

    @classmethod
    def _at(cls, place: int, pipeline: int, scheme: Scheme, ranks: tuple[int, ...]) -> Role:
        group, tp_rank = divmod(place, scheme.tp)
        return cls(pipeline, scheme, *divmod(group, scheme.sp), tp_rank, ranks)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The TP group."""
        begin = (self.stage * self.scheme.sp + self.sp_rank) * self.scheme.tp
        return self.ranks[begin : begin + self.scheme.tp]

    @property
    def sp_ranks(self) -> tuple[int, ...]:
        """The SP group: ranks with the same slices, in the order of their sequence shards of it."""
        begin = self.stage * self.scheme.ranks_per_stage
        return self.ranks[begin : begin + self.scheme.ranks_per_stage][
            self.tp_rank :: self.scheme.tp
        ]


@dataclass(frozen=True, slots=True)
class StrategyLink:
    """This rank's link plans for one strategy."""

    role: Role | None
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
    across: AcrossHosts
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
    """A rank's part of one iteration's computation, and what it calls before it reads slices."""

    role: Role | None
    await_bucket: Callable[[int], None]
    before_backward: Mapping[int, Callable[[], None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMemory:
    """Most bytes that a strategy makes this rank hold for propagation, activations left out."""

    slice_bytes: int
    gradient_bytes: int
    window_bytes: int
    """Packed exchange buffers: a window of two rounds has four, each as large as the largest.

    Memory of the CPU is handed out with gaps, which may add as much again.
    """
    relayed_bytes: int
    """What this rank holds of other nodes' shards (pull) or sums for them (push), with node-aware
    routes.
    """

    @property
    def total_bytes(self) -> int:
        """All of it."""
        exchanged = self.window_bytes + self.relayed_bytes
        return self.slice_bytes + self.gradient_bytes + exchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank measured in one iteration; times in milliseconds."""

    loss_sum: float
    """Sum over labelled tokens, each on exactly one rank; 0.0 on ranks without any."""
    propagate_ms: float
    """Forward and backward, without waiting for slices."""
    pull_ms: float
    push_ms: float
    visible_pull_ms: float
    visible_push_ms: float
    """See LinkTimes for these four."""
    busy_ms: float
    """Time inside forwards and backwards, TP collectives included."""


class Propagator:
    """Runs plans on this rank. All methods are collective over all ranks unless they say
    otherwise.
    """

    def __init__(
        self,
        stage_model: StageModel,
        *,
        device: torch.device,
        max_groups: int,
        link_config: LinkConfig | None = None,
    ):
        link_config = link_config or LinkConfig()
        self.stage_model = stage_model
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._device = device
        self.groups = GroupPool(max_groups, device)
        everyone = tuple(range(self.num_ranks))
        self.hosts = find_hosts(device)
        if self.rank == 0 and link_config.devices_per_node is None:
            warn_of_placement(self.hosts.of_rank)
        self._ranks_per_node = find_ranks_per_node(link_config, self.hosts.of_rank)
        purposes = ["pull", "push"] + (["pull_node", "push_node"] if self._ranks_per_node else [])
        self.groups.create([(purpose, everyone) for purpose in purposes])
        pull, push, *of_nodes = (self.groups.get(purpose, everyone) for purpose in purposes)
        pull_node, push_node = of_nodes or (None, None)
        self._gradient_dtype = GRADIENT_DTYPES[link_config.gradient_dtype]
        self.buffers = ExchangeBuffers(device)
        self.pool = SlicePool(device)
        self._pull_link = Link(pull, device, buffers=self.buffers, node_group=pull_node)
        self._push_link = Link(push, device, self._gradient_dtype, self.buffers, push_node)
        self._clock = DeviceClock(device)
        self._thread = LinkThread(device, overlap=link_config.overlap)
        self._frozen: FrozenKeeper | None = None
        self._frozen_at_home: FrozenKeeper | None = None
        """The same of what homes of several hosts got from each other."""
        if link_config.keep_frozen and not all(spec.requires_grad for spec in stage_model.specs):
            self._frozen = self._keep_frozen()
            if len(self.hosts.names) > 1:
                self._frozen_at_home = self._keep_frozen()
        self._links: dict[Strategy, StrategyLink] = {}
        self._stream_links: dict[Strategy, StreamLink] = {}
        self.home: SharedMemoryHome | None = None
        """Where weights and sums of streamed layers are, once a strategy has some."""
        self.recorder = Recorder()

    def close(self) -> None:
        """End the link's thread and destroy the process groups; not collective."""
        self._thread.close()
        self.groups.destroy()
        if self.home is not None:
            self.home.close()
            self.home = None

    def weight_addresses(self) -> set[int]:
        """Where storages with weights or their gradients begin. Not collective."""
        home = set() if self.home is None else {self.home.address}
        return self.pool.addresses() | home

    def link_memory(self, strategy: Strategy) -> LinkMemory:
        """Most bytes that `strategy` makes this rank hold, activations left out. Not collective."""
        streams = any(scheme.stream for scheme in strategy.schemes)
        link = self._stream_link_of(strategy) if streams else self._link_of(strategy)
        return link.memory

    def prepare(self, strategies: Iterable[Strategy]) -> None:
        """Create the process groups of `strategies`, and the home of their streamed layers."""
        strategies = list(strategies)
        streaming = sorted(
            {scheme for strategy in strategies for scheme in strategy.schemes if scheme.stream}
        )
        check_streams(streaming, self._device.type)
        if streaming and self.home is None:
            purpose = f"scheme {streaming[0]}: streamed layers need a home; leave stream out of hydra.strategies"
            dtype = self._shards_P()[0].dtype
            self.home = SharedMemoryHome(
                self.stage_model.specs, dtype, self._device, self.hosts, purpose
            )
        self.groups.ensure(strategies)

    def check_plan(
        self, plan: IterationPlan, batch_fingerprint: int = 0, problem: Exception | None = None
    ) -> None:
        """Raise PlanMismatchError on every rank where ranks hold different plans or mini-batches.

        A `problem` that any rank brings is raised on all. One all-gather.
        """
        row = [plan.digest, batch_fingerprint, problem is not None]
        all_ranks = gather_rows(to_device(torch.tensor(row), self._device))
        *columns, problems = all_ranks.T.tolist()
        if any(problems):
            raise_together(problem, self._device)
        for what, digests in zip(("plan", "mini-batch"), columns, strict=True):
            differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if differing:
                raise PlanMismatchError(
                    f"iteration {plan.iteration}: the digest of the {what} is {digests[0]:016x} on rank 0 and "
                    f"{digests[differing[0]]:016x} on rank {differing[0]} ({len(differing)} of "
                    f"{self.num_ranks} ranks differ); nothing was exchanged. Give every rank the same "
                    "mini-batch, dataset and configuration"
                )

    def positions_needed(self, plan: IterationPlan) -> list[int]:
        """Positions of the sequences whose tokens or labels this rank needs; not collective."""
        role = Role.find(plan.strategy, self.rank)
        if role is None or 0 < role.stage < role.scheme.pp - 1:
            return []
        return [
            position
            for micro_batch in plan.pipelines[role.pipeline].micro_batches
            for position in micro_batch
        ]

    def train(
        self, plan: IterationPlan, load: LoadExample, grads_P: Sequence[Tensor], loss_scale: float
    ) -> Outcome:
        """Add the gradient of the global token-mean loss, times `loss_scale`, to this rank's
        `grads_P`.

        `grads_P[param]` are flat fp32 shards (empty for frozen parameters). Slices live only inside
        this call.
        """
        return self._run(plan, load, grads_P, loss_scale)

    def evaluate(self, plan: IterationPlan, load: LoadExample) -> Outcome:
        """Forward only; no gradient is computed."""
        return self._run(plan, load, None, None)

    def _run(
        self,
        plan: IterationPlan,
        load: LoadExample,
        grads_P: Sequence[Tensor] | None,
        loss_scale: float | None,
    ) -> Outcome:
        self.recorder.begin()
        begin = self._clock.stamp()
        training = loss_scale is not None
        slices, session, work = self._open_plan(plan, training=training, grads_P=grads_P)
        with session:
            loss_sum = self._propagate(plan, work, slices, load, loss_scale)
            end = self._clock.stamp()
            times = session.finish()
        session.record(self.recorder)
        waited_in_passes_ms = times.visible_pull_ms if self._thread.overlap else 0.0
        return Outcome(
            loss_sum=loss_sum,
            propagate_ms=max(0.0, self._clock.ms_between(begin, end) - times.visible_pull_ms),
            busy_ms=max(0.0, self.recorder.busy_ms - waited_in_passes_ms),
            **asdict(times),
        )

    def time_propagation(
        self,
        plan: IterationPlan,
        load: LoadExample,
        *,
        beside: Callable[[], Iterable[dist.Work]] = tuple,
    ) -> float:
        """Milliseconds of the slowest rank in one forward + backward of `plan`; gradients are
        thrown away.

        `beside` starts work that runs at the same time and counts until its end: the same
        collectives in the same order on all ranks, in a group that nothing else uses. Collective
        over all ranks.
        """
        slices, session, work = self._open_plan(plan, training=True, grads_P=None)
        with session:
            session.await_all()
            dist.barrier()
            begin = self._clock.stamp()
            others = beside()
            self._propagate(plan, work, slices, load, 1.0)
            for work in others:
                work.wait()
            end = self._clock.stamp()
            session.finish()
        return self.max_over_ranks(self._clock.ms_between(begin, end))

    def max_over_ranks(self, value: float) -> float:
        """The largest `value` of any rank."""
        largest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def _link_of(self, strategy: Strategy) -> StrategyLink:
        """Link plans of `strategy`; the first time collective, because ranks compare them."""
        if strategy not in self._links:
            rank_buckets = self.stage_model.strategy_buckets(strategy, self.num_ranks)

            def plan(rank_buckets: Sequence[RankBuckets], *, gradients: bool) -> LinkPlan:
                return plan_link(
                    self.stage_model.specs,
                    rank_buckets,
                    self.rank,
                    gradients=gradients,
                    ranks_per_node=self._ranks_per_node,
                )

            roles = Role.of_all(strategy)
            pull, push = plan(rank_buckets, gradients=False), plan(rank_buckets, gradients=True)
            pull_trained = pull
            if self._frozen is not None:
                trained = without_frozen(self.stage_model.specs, rank_buckets)
                pull_trained = plan(trained, gradients=False)
            check_link_plans(strategy, (pull, pull_trained, push), self._device)
            self._links[strategy] = StrategyLink(
                role=roles.get(self.rank),
                buckets=rank_buckets[self.rank],
                pull=pull,
                pull_trained=pull_trained,
                push=push,
                memory=self._memory_of(rank_buckets[self.rank], pull, push),
            )
        return self._links[strategy]

    def _open(
        self, strategy: Strategy, *, with_gradients: bool, grads_P: Sequence[Tensor] | None
    ) -> tuple[Slices, LinkSession]:
        """Memory for the slices of `strategy`, and the session that fills it and pushes into
        `grads_P`.
        """
        link = self._link_of(strategy)
        self._forget_failed()
        skip_frozen = self._frozen is not None and self._frozen.may_skip(strategy)
        if self._frozen is not None and not skip_frozen:
            self._frozen.pulled(strategy)
        shards_P = self._shards_P()
        slices = Slices(
            self.stage_model.specs,
            link.buckets,
            self.pool,
            shards_P[0].dtype,
            with_gradients=with_gradients,
        )
        session = LinkSession(
            self._thread,
            self._clock,
            pull=(self._pull_link, link.pull_trained if skip_frozen else link.pull),
            push=(self._push_link, link.push),
            shards_P=shards_P,
            slices=slices,
            grads_P=grads_P,
        )
        return slices, session

    def _forget_failed(self) -> None:
        self.buffers.forget_failed()
        self._pull_link.forget_failed()
        self._push_link.forget_failed()

    def _open_plan(
        self, plan: IterationPlan, *, training: bool, grads_P: Sequence[Tensor] | None
    ) -> tuple[Slices, LinkSession | StreamSession, Work]:
        """What `plan` runs on; the first time collective, as `_link_of` is."""
        if any(scheme.stream for scheme in plan.strategy.schemes):
            return self._open_streams(plan, training=training, grads_P=grads_P)
        link = self._link_of(plan.strategy)
        slices, session = self._open(plan.strategy, with_gradients=training, grads_P=grads_P)
        return slices, session, Work(link.role, session.await_bucket, {})

    def _open_streams(
        self, plan: IterationPlan, *, training: bool, grads_P: Sequence[Tensor] | None
    ) -> tuple[Slices, StreamSession, Work]:
        link = self._stream_link_of(plan.strategy)
        assert self.home is not None, plan.strategy
        specs, shards_P = self.stage_model.specs, self._shards_P()
        if self._frozen is not None:
            self._frozen.forget()  # what is copied takes the pool's memory
        self._forget_failed()
        across = self._skip_frozen(plan.strategy, link.across)
        slices = Slices(
            specs,
            link.buckets,
            self.pool,
            shards_P[0].dtype,
            with_gradients=training,
            slot_of=link.streams.window.slot_of,
            home=HomeSlices(self.home, specs, link.buckets, link.streams),
        )
        num_micro_batches = [len(pipeline.micro_batches) for pipeline in plan.pipelines]
        session = StreamSession(
            self._thread,
            self._clock,
            self.home,
            across=across,
            num_addends=count_addends(plan.strategy, num_micro_batches),
            uses=link.uses(plan, training=training),
            shards_P=shards_P,
            buckets=link.buckets,
            slices=slices,
            grads_P=grads_P,
            with_gradients=training,
        )
        window = link.streams.window
        before_backward = {
            index: functools.partial(session.enter, index) if has_backward else None
            for index, has_backward in zip(window.buckets, window.has_backward, strict=True)
        }
        return slices, session, Work(link.role, session.await_bucket, before_backward)

    def _stream_link_of(self, strategy: Strategy) -> StreamLink:
        """This rank's part of a strategy with streamed layers; with several hosts collective the
        first time, because ranks compare their link plans.
        """
        if strategy not in self._stream_links:
            role = Role.find(strategy, self.rank)
            buckets, streams = (), StageStreams()
            if role is not None:
                place = role.scheme, role.stage, role.tp_rank
                buckets = self.stage_model.buckets(*place)
                streams = self.stage_model.stage_streams(*place)
            across = self._across_hosts(strategy) if len(self.hosts.names) > 1 else AcrossHosts()
            memory = self._stream_memory_of(buckets, streams, across)
            self._stream_links[strategy] = StreamLink(role, buckets, streams, across, memory)
        return self._stream_links[strategy]

    def _across_hosts(self, strategy: Strategy) -> AcrossHosts:
        """How homes of several hosts are filled for `strategy`. Collective over all ranks."""
        specs = self.stage_model.specs
        brought = parts_from_other_hosts(
            specs,
            [[b.param for b in unit.bindings] for unit in self.stage_model.units],
            self.stage_model.strategy_buckets(strategy, self.num_ranks),
            self.hosts.of_rank,
        )
        flat = flat_specs(specs)
        pull, push = (
            plan_link(flat, brought, self.rank, gradients=gradients) for gradients in (False, True)
        )
        pull_trained = pull
        if self._frozen_at_home is not None:
            pull_trained = plan_link(flat, without_frozen(flat, brought), self.rank)
        check_link_plans(strategy, (pull, pull_trained, push), self._device)
        return AcrossHosts(
            brought=brought[self.rank],
            pull=(self._pull_link, pull),
            pull_trained=(self._pull_link, pull_trained),
            push=(self._push_link, push),
        )

    def _skip_frozen(self, strategy: Strategy, across: AcrossHosts) -> AcrossHosts:
        """`across` without what homes have already got of other hosts. Collective over all
        ranks.
        """
        keeper = self._frozen_at_home
        if keeper is None:
            return across
        if keeper.may_skip(strategy):
            return replace(across, pull=across.pull_trained)
        keeper.pulled(strategy)
        return across

    def _stream_memory_of(
        self, buckets: RankBuckets, streams: StageStreams, across: AcrossHosts
    ) -> LinkMemory:
        assert self.home is not None
        specs, itemsize = self.stage_model.specs, self.stage_model.params[0].ds_tensor.itemsize
        copied = only_copied(buckets, streams.copied)
        kept = [bucket for r, bucket in enumerate(buckets) if r not in streams.buckets]
        copies = held_numel(specs, copied, streams.window.slot_of) * itemsize
        window_bytes = 0
        if across.pull is not None and across.push is not None:
            window_bytes = self._window_bytes(across.pull[1], across.push[1])
        return LinkMemory(
            slice_bytes=self.home.weight_bytes + copies,
            gradient_bytes=self.home.sum_bytes + sum(gradient_numel(specs, b) for b in kept) * 4,
            window_bytes=window_bytes,
            relayed_bytes=0,
        )

    def _window_bytes(self, pull: LinkPlan, push: LinkPlan) -> int:
        itemsize = self.stage_model.params[0].ds_tensor.itemsize
        of_pull = pull.buffer_elements * itemsize
        return 4 * max(of_pull, push.buffer_elements * self._gradient_dtype.itemsize)

    def _shards_P(self) -> list[Tensor]:
        return [p.ds_tensor.detach() for p in self.stage_model.params]

    def _keep_frozen(self) -> FrozenKeeper:
        return FrozenKeeper(self._frozen_P, lambda changed: self.max_over_ranks(float(changed)) > 0)

    def _frozen_P(self) -> list[Tensor]:
        specs = self.stage_model.specs
        return [
            s for s, spec in zip(self._shards_P(), specs, strict=True) if not spec.requires_grad
        ]

    def _propagate(
        self,
        plan: IterationPlan,
        work: Work,
        slices: Slices,
        load: LoadExample,
        loss_scale: float | None,
    ) -> float:
        """Loss sum of this rank's tokens (on one TP rank of the last stage); trains where
        `loss_scale` is given.

        Collective over the pipeline only.
        """
        role = work.role
        if role is None or not plan.pipelines[role.pipeline].micro_batches:
            return 0.0
        self._enter(role, work, slices)
        try:
            stage = self._stage_info(role, slices)
            sequence_shard = self._sequence_shard(role)
            micro_batches = MicroBatchTensors.load(
                plan, plan.pipelines[role.pipeline], stage, load, self._device, sequence_shard
            )
            scale = 1.0 if loss_scale is None else loss_scale / plan.num_label_tokens

            def forward(index: int, hidden: Tensor | None) -> Tensor:
                return self._forward_micro_batch(stage, micro_batches[index], hidden, scale)

            io = self._stage_io(role)
            micro_batch_tokens = [
                self.stage_model.tp.shard_tokens(micro_batch.packed.num_tokens)
                for micro_batch in micro_batches
            ]
            if loss_scale is None:
                losses = run_forward_only(stage, io, micro_batch_tokens, forward)
            else:
                before_last = slices.expect_last_backward
                losses = run_1f1b(
                    stage, io, micro_batch_tokens, forward, self.recorder, before_last
                )
        finally:
            self.stage_model.unbind()
        if not losses or role.tp_rank > 0:
            return 0.0
        return float(torch.stack(losses).double().sum()) / scale

    def _forward_micro_batch(
        self, stage: StageInfo, micro_batch: MicroBatchTensors, hidden: Tensor | None, scale: float
    ) -> Tensor:
        output = self.stage_model.forward_stage(
            micro_batch.packed,
            input_ids=micro_batch.input_ids_T,
            hidden=hidden,
            is_last=stage.is_last,
        )
        if not stage.is_last:
            return output
        assert micro_batch.targets_T is not None
        tp = self.stage_model.tp
        first_column = tp.first_row(self.stage_model.num_logits)
        return summed_cross_entropy(
            output.squeeze(0), micro_batch.targets_T, tp, scale, first_column
        )

    def _enter(self, role: Role, work: Work, slices: Slices) -> None:
        tp = role.scheme.tp
        group = self.groups.get("tp", role.tp_ranks) if tp > 1 else None
        self.stage_model.tp.enter(group, tp, role.tp_rank)
        self.stage_model.bind(
            role.scheme, role.stage, slices.leaves, work.await_bucket, work.before_backward
        )

    def _stage_info(self, role: Role, slices: Slices) -> StageInfo:
        return StageInfo(
            num_stages=role.scheme.pp,
            stage=role.stage,
            hidden_size=self.stage_model.hidden_size,
            dtype=next(iter(slices.leaves.values())).dtype,
            device=self._device,
        )

    def _sequence_shard(self, role: Role) -> SequenceShard | None:
        """What this rank holds of each micro-batch, where its pipeline cuts or pads it."""
        sp, multiple = role.scheme.sp, self.stage_model.tp.micro_batch_multiple(role.scheme.tp)
        if sp == 1 and multiple == 1:
            return None
        group = self.groups.get("sp", role.sp_ranks) if sp > 1 else None
        return SequenceShard(group, sp, role.sp_rank, multiple)

    def _stage_io(self, role: Role) -> StageIO:
        step, pp = role.scheme.ranks_per_stage, role.scheme.pp
        place = role.ranks.index(self.rank)
        return StageIO(
            previous_rank=role.ranks[place - step] if role.stage > 0 else None,
            next_rank=role.ranks[place + step] if role.stage < pp - 1 else None,
            down_group=self.groups.get("pp_down", role.ranks) if pp > 1 else None,
            up_group=self.groups.get("pp_up", role.ranks) if pp > 1 else None,
        )

    def _memory_of(self, buckets: RankBuckets, pull: LinkPlan, push: LinkPlan) -> LinkMemory:
        specs = self.stage_model.specs
        itemsize = self.stage_model.params[0].ds_tensor.itemsize
        return LinkMemory(
            slice_bytes=held_numel(specs, buckets, {}) * itemsize,
            gradient_bytes=sum(gradient_numel(specs, bucket) for bucket in buckets) * 4,
            window_bytes=self._window_bytes(pull, push),
            relayed_bytes=max(pull.relayed_elements * itemsize, push.relayed_elements * 4),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTensors:
    """One packed micro-batch, or this rank's sequence shard of it, on the compute device; T are its
    tokens.

    Tokens only on first stages, targets only on last ones.
    """

    packed: PackedMicroBatch
    input_ids_T: Tensor | None
    """[1, T]."""
    targets_T: Tensor | None
    """[T]: the next token inside the same sequence, IGNORED_LABEL at sequence ends."""

    @classmethod
    def load(
        cls,
        plan: IterationPlan,
        pipeline: PipelinePlan,
        stage: StageInfo,
        load: LoadExample,
        device: torch.device,
        sequence_shard: SequenceShard | None = None,
    ) -> list[MicroBatchTensors]:
        """The micro-batches of `pipeline` that `stage` needs, cut to `sequence_shard` after labels
        were shifted.
        """

        def join(parts: list[Tensor], fill: int) -> Tensor:
            micro_batch_T = torch.cat(parts)
            return to_device(
                micro_batch_T
                if sequence_shard is None
                else sequence_shard.cut(micro_batch_T, fill),
                device,
            )

        micro_batches = []
        for micro_batch in pipeline.micro_batches:
            ids, targets = None, None
            if stage.is_first or stage.is_last:
                examples = [load(position) for position in micro_batch]
                if stage.is_first:
                    ids = join([input_ids for input_ids, _ in examples], 0).unsqueeze(0)
                if stage.is_last:
                    targets = join([shift_labels(labels) for _, labels in examples], IGNORED_LABEL)
            packed = PackedMicroBatch.build(
                plan.micro_batch_lengths(micro_batch), device, sequence_shard
            )
            micro_batches.append(cls(packed=packed, input_ids_T=ids, targets_T=targets))
        return micro_batches


def shift_labels(labels_T: Tensor) -> Tensor:
    """[l] labels -> [l] targets: position i is scored against label i + 1, the last position not at
    all.
    """
    return torch.cat([labels_T[1:], labels_T.new_full((1,), IGNORED_LABEL)])
