"""Carries out one iteration plan: pull slices, run 1F1B, push gradients. Decides nothing.

Legend: tensors ending in `_P` are flat ZeRO-3 shards, tensors ending in `_S` flat slices, `_T` one value per
token of a packed row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_hydra.engine.agreement import gather_rows
from ds_hydra.engine.attention import PackedRow
from ds_hydra.engine.groups import GroupPool
from ds_hydra.engine.pipeline import StageInfo, StageIO, run_1f1b, run_forward_only
from ds_hydra.engine.skeleton import Skeleton
from ds_hydra.engine.tensor_parallel import IGNORED_LABEL, summed_cross_entropy
from ds_hydra.errors import PlanMismatchError
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.zero_link import LinkPlan, RankBuckets, plan_link
from ds_hydra.zero_link.exchange import Link

Example = tuple[Tensor, Tensor]
"""(input_ids [l], labels [l]) of one sequence, int64; labels not yet shifted."""

LoadExample = Callable[[int], Example]
"""The sequence at a position of the plan; called only on ranks that need its tokens or labels."""


@dataclass(frozen=True, slots=True)
class Role:
    """This rank's place in a strategy."""

    pipeline: int
    scheme: Scheme
    stage: int
    tp_rank: int
    ranks: tuple[int, ...]

    @classmethod
    def find(cls, strategy: Strategy, rank: int) -> Role | None:
        """The role of `rank`, or None where the strategy leaves it idle."""
        for index, (scheme, ranks) in enumerate(zip(strategy.schemes, strategy.place(), strict=True)):
            if rank in ranks:
                stage, tp_rank = divmod(ranks.index(rank), scheme.tp)
                return cls(index, scheme, stage, tp_rank, ranks)
        return None

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The TP group."""
        begin = self.stage * self.scheme.tp
        return self.ranks[begin : begin + self.scheme.tp]


@dataclass(frozen=True, slots=True)
class StrategyLink:
    """This rank's link plans for one strategy."""

    role: Role | None
    buckets: RankBuckets
    pull: LinkPlan
    push: LinkPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank measured in one iteration; times in milliseconds."""

    loss_sum: float
    """Sum over labelled tokens, on exactly one rank of each pipeline; 0.0 elsewhere."""
    pull_ms: float
    propagate_ms: float
    push_ms: float


class Slices:
    """The slices of this rank's stage for one iteration, and their fp32 gradients."""

    def __init__(self, skeleton: Skeleton, link: StrategyLink, dtype: torch.dtype, device: torch.device):
        self.leaves: dict[int, nn.Parameter] = {}
        self.bucket_S: list[list[Tensor]] = []
        self.grad_bucket_S: list[list[Tensor]] = []
        for bucket in link.buckets:
            flats, grads = [], []
            for ref in bucket:
                spec = skeleton.specs[ref.param]
                shape = spec.slice_shape(ref.region)
                make = torch.empty if ref.region.numel else torch.zeros  # nothing is pulled into zeros
                leaf = nn.Parameter(make(shape, dtype=dtype, device=device), spec.requires_grad)
                self.leaves[ref.param] = leaf
                flats.append(leaf.data.view(-1))
                grads.append(_attach_fp32_gradient(leaf))
            self.bucket_S.append(flats)
            self.grad_bucket_S.append(grads)


def _attach_fp32_gradient(leaf: nn.Parameter) -> Tensor:
    """Flat fp32 tensor in which the gradient of `leaf` adds up over micro-batches."""
    if not leaf.requires_grad:
        return leaf.data.new_empty(0)
    main_grad = torch.zeros_like(leaf, dtype=torch.float32)
    if leaf.dtype == torch.float32:
        leaf.grad = main_grad  # autograd adds in place
        return main_grad.view(-1)

    def add_to_main(param: Tensor) -> None:
        # A 16-bit sum over micro-batches would lose what small gradients contribute.
        assert param.grad is not None
        main_grad.add_(param.grad)
        param.grad = None

    leaf.register_post_accumulate_grad_hook(add_to_main)
    return main_grad.view(-1)


class Propagator:
    """Runs plans on this rank. All methods are collective over all ranks unless they say otherwise."""

    def __init__(self, skeleton: Skeleton, *, device: torch.device, max_groups: int):
        self.skeleton = skeleton
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._device = device
        self.groups = GroupPool(max_groups)
        everyone = tuple(range(self.num_ranks))
        self.groups.create([("pull", everyone), ("push", everyone)])
        self._pull_link = Link(self.groups.get("pull", everyone), device)
        self._push_link = Link(self.groups.get("push", everyone), device)
        self._links: dict[Strategy, StrategyLink] = {}

    def prepare(self, strategies: Iterable[Strategy]) -> None:
        """Create the process groups of `strategies`."""
        self.groups.ensure(strategies)

    def check_plan(self, plan: IterationPlan, batch_fingerprint: int = 0) -> None:
        """Raise PlanMismatchError on every rank where ranks hold different plans or mini-batches."""
        mine = torch.tensor([plan.digest, batch_fingerprint], dtype=torch.int64, device=self._device)
        all_ranks = gather_rows(mine)
        for what, digests in zip(("plan", "mini-batch"), all_ranks.T.tolist(), strict=True):
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
        return [position for row in plan.pipelines[role.pipeline].micro_batches for position in row]

    def train(
        self, plan: IterationPlan, load: LoadExample, grads_P: Sequence[Tensor], loss_scale: float
    ) -> Outcome:
        """Add the gradient of the global token-mean loss, times `loss_scale`, to this rank's `grads_P`.

        `grads_P[param]` are flat fp32 shards (empty for frozen parameters). Slices live only inside this call.
        """
        outcome, slices = self._pull_and_propagate(plan, load, loss_scale)
        start = self._now()
        self._push_link.push(self._link_of(plan.strategy).push, slices.grad_bucket_S, grads_P)
        return replace(outcome, push_ms=(self._now() - start) * 1e3)

    def evaluate(self, plan: IterationPlan, load: LoadExample) -> Outcome:
        """Forward only; no gradient is computed."""
        return self._pull_and_propagate(plan, load, None)[0]

    def _pull_and_propagate(
        self, plan: IterationPlan, load: LoadExample, loss_scale: float | None
    ) -> tuple[Outcome, Slices]:
        link = self._link_of(plan.strategy)
        start = self._now()
        slices = self._pull(link)
        pulled = self._now()
        loss_sum = self._propagate(plan, link, slices, load, loss_scale)
        propagate_ms = (self._now() - pulled) * 1e3
        pull_ms = (pulled - start) * 1e3
        return Outcome(loss_sum=loss_sum, pull_ms=pull_ms, propagate_ms=propagate_ms, push_ms=0.0), slices

    def time_propagation(self, plan: IterationPlan, load: LoadExample) -> float:
        """Milliseconds of the slowest rank in one forward + backward of `plan`; gradients are thrown away."""
        link = self._link_of(plan.strategy)
        slices = self._pull(link)
        dist.barrier()
        start = self._now()
        self._propagate(plan, link, slices, load, 1.0)
        return self.max_over_ranks((self._now() - start) * 1e3)

    def max_over_ranks(self, value: float) -> float:
        """The largest `value` of any rank."""
        largest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def _link_of(self, strategy: Strategy) -> StrategyLink:
        if strategy not in self._links:
            rank_buckets = []
            for rank in range(self.num_ranks):
                role = Role.find(strategy, rank)
                rank_buckets.append(
                    self.skeleton.buckets(role.scheme, role.stage, role.tp_rank) if role else ()
                )
            specs = self.skeleton.specs
            self._links[strategy] = StrategyLink(
                role=Role.find(strategy, self.rank),
                buckets=rank_buckets[self.rank],
                pull=plan_link(specs, rank_buckets, self.rank),
                push=plan_link(specs, rank_buckets, self.rank, gradients=True),
            )
        return self._links[strategy]

    def _pull(self, link: StrategyLink) -> Slices:
        shards_P = [p.ds_tensor.detach() for p in self.skeleton.params]
        slices = Slices(self.skeleton, link, shards_P[0].dtype, self._device)
        self._pull_link.pull(link.pull, shards_P, slices.bucket_S)
        return slices

    def _propagate(
        self,
        plan: IterationPlan,
        link: StrategyLink,
        slices: Slices,
        load: LoadExample,
        loss_scale: float | None,
    ) -> float:
        """Loss sum of this rank's pipeline (on one rank of its last stage); trains where `loss_scale` is given.

        Collective over the pipeline only.
        """
        role = link.role
        if role is None or not plan.pipelines[role.pipeline].micro_batches:
            return 0.0
        self._enter(role, slices)
        try:
            stage = self._stage_info(role, slices)
            rows = RowTensors.load(plan, plan.pipelines[role.pipeline], stage, load, self._device)
            scale = 1.0 if loss_scale is None else loss_scale / plan.num_label_tokens

            def forward(index: int, hidden: Tensor | None) -> Tensor:
                return self._forward_row(stage, rows[index], hidden, scale)

            run = run_forward_only if loss_scale is None else run_1f1b
            row_tokens = [row.packed.num_tokens for row in rows]
            losses = run(stage, self._stage_io(role), row_tokens, forward)
        finally:
            self.skeleton.unbind()
        if not losses or role.tp_rank > 0:
            return 0.0
        return float(torch.stack(losses).double().sum()) / scale

    def _forward_row(self, stage: StageInfo, row: RowTensors, hidden: Tensor | None, scale: float) -> Tensor:
        output = self.skeleton.forward_stage(
            row.packed, input_ids=row.input_ids_T, hidden=hidden, is_last=stage.is_last
        )
        if not stage.is_last:
            return output
        assert row.targets_T is not None
        return summed_cross_entropy(output[0], row.targets_T, self.skeleton.tp) * scale

    def _enter(self, role: Role, slices: Slices) -> None:
        tp = role.scheme.tp
        group = self.groups.get("tp", role.tp_ranks) if tp > 1 else None
        vocab_begin = role.tp_rank * self.skeleton.vocab_size // tp
        self.skeleton.tp.enter(group, tp, role.tp_rank, vocab_begin)
        self.skeleton.bind(role.scheme, role.stage, slices.leaves)

    def _stage_info(self, role: Role, slices: Slices) -> StageInfo:
        return StageInfo(
            num_stages=role.scheme.pp,
            stage=role.stage,
            hidden_size=self.skeleton.hidden_size,
            dtype=next(iter(slices.leaves.values())).dtype,
            device=self._device,
        )

    def _stage_io(self, role: Role) -> StageIO:
        tp, pp = role.scheme.tp, role.scheme.pp
        place = role.stage * tp + role.tp_rank
        return StageIO(
            previous_rank=role.ranks[place - tp] if role.stage > 0 else None,
            next_rank=role.ranks[place + tp] if role.stage < pp - 1 else None,
            down_group=self.groups.get("pp_down", role.ranks) if pp > 1 else None,
            up_group=self.groups.get("pp_up", role.ranks) if pp > 1 else None,
        )

    def _now(self) -> float:
        get_accelerator().synchronize()
        return time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """One packed row on the compute device; tokens only on first stages, targets only on last ones."""

    packed: PackedRow
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
    ) -> list[RowTensors]:
        """The rows of `pipeline` that `stage` needs."""
        rows = []
        for micro_batch in pipeline.micro_batches:
            ids, targets = None, None
            if stage.is_first or stage.is_last:
                examples = [load(position) for position in micro_batch]
                if stage.is_first:
                    ids = torch.cat([input_ids for input_ids, _ in examples]).unsqueeze(0).to(device)
                if stage.is_last:
                    targets = torch.cat([shift_labels(labels) for _, labels in examples]).to(device)
            packed = PackedRow.build(plan.row_lengths(micro_batch), device)
            rows.append(cls(packed=packed, input_ids_T=ids, targets_T=targets))
        return rows


def shift_labels(labels_T: Tensor) -> Tensor:
    """[l] labels -> [l] targets: position i is scored against label i + 1, the last position not at all."""
    return torch.cat([labels_T[1:], labels_T.new_full((1,), IGNORED_LABEL)])
