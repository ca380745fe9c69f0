"""Carries out one iteration plan: pull slices, run 1F1B, push gradients. Decides nothing.

Legend: tensors ending in `_P` are flat ZeRO-3 shards, `_T` one value per token of a packed
micro-batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.losses.loss import PLAIN, HeadLoss, Tokens
from ds_hydra.engine.losses.objective import Objective, are_alike, evaluate, find_difference
from ds_hydra.engine.losses.objective import fingerprint as fingerprint_of
from ds_hydra.engine.model.attention_choice import prepare_kernels
from ds_hydra.engine.model.micro_batches import LoadExample, MicroBatchTensors, Task, long_segments
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.parallel.logit_transform import LogitTransform
from ds_hydra.engine.parallel.logits import Vocabulary
from ds_hydra.engine.parallel.one_f_one_b import PipelineStage, run_1f1b, run_forward_only
from ds_hydra.engine.parallel.tensor_parallel import TokenShards
from ds_hydra.engine.parallel.token_cuts import TokenLayout
from ds_hydra.engine.ranks.agreement import (
    gather_by_hosts,
    max_over_ranks,
    on_all_ranks,
    raise_together,
)
from ds_hydra.engine.ranks.hosts import find_hosts
from ds_hydra.engine.ranks.memory import naming_memory_limit
from ds_hydra.engine.strategy_links import StrategyLinks
from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.engine.transfer.session import TransferSession
from ds_hydra.errors import HydraConfigError, PlanMismatchError
from ds_hydra.records.timeline import EventKind
from ds_hydra.sampler.plan import IterationPlan, RankPhase
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.schemes.placement import Role, slices_key


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Milliseconds of one rank in one iteration.

    `pull_ms` and `push_ms` are the link's own: packing, transport, unpacking or summing, and
    waiting for other ranks in it, but not for this rank's gradients. `visible_*` is the part that
    computation waited for.
    """

    pull_ms: float
    push_ms: float
    visible_pull_ms: float
    visible_push_ms: float
    phase_ms: tuple[float, ...]
    """Forward and backward of each phase, without waiting for slices."""
    busy_ms: float
    """Time inside forwards and backwards, TP collectives included, waiting for slices not."""

    def to_row(self) -> list[float]:
        """The numbers one after another, those of phases, which differ in number, last."""
        return [*(getattr(self, name) for name in _SINGLE_TIMES), *self.phase_ms]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> RankTimes:
        """Read a row of `to_row`."""
        single = dict(zip(_SINGLE_TIMES, row))
        return cls(**single, phase_ms=tuple(row[len(single) :]))


_SINGLE_TIMES = [field.name for field in fields(RankTimes) if field.name != "phase_ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """Results of one rank's passes, for which nobody has waited."""

    plan: IterationPlan
    objective: Objective | None
    """Objective that was evaluated; None for the mean cross entropy."""
    loss_sum: Tensor
    """0-dim fp64: sum over labelled tokens, each on exactly one rank; 0 on ranks without any."""
    balance_loss: Tensor
    """0-dim fp64: this rank's part of the loss of balance of experts, as it is added to the
    mean.
    """
    spans: Sequence[tuple[Any, Any]]
    """Begin and end of each phase; on an accelerator its passes may still run."""
    losses: Sequence[tuple[RankPhase, Tensor]]
    """Phases with labelled tokens of this rank, and the loss sum of each micro-batch."""
    recorder: Recorder

    def find_nonfinite(self) -> int:
        """Position of a sequence in the first micro-batch with a NaN or Inf loss; -1 without one.
        The host waits for the device.
        """
        for phase, losses in self.losses:
            for micro_batch, loss in zip(phase.micro_batches, losses.tolist()):
                if not math.isfinite(loss):
                    return micro_batch[0]
        return -1

    def times(self) -> RankTimes:
        """Times of all passes; the device has reached their end."""
        recorder = self.recorder
        phase_ms = (
            recorder.clock.ms_between(*span) - recorder.waited_ms(number)
            for number, span in enumerate(self.spans)
        )
        push_ms = recorder.total_ms(EventKind.PUSH)
        return RankTimes(
            phase_ms=tuple(max(0.0, ms) for ms in phase_ms),
            busy_ms=recorder.busy_ms(),
            pull_ms=recorder.total_ms(EventKind.PULL),
            push_ms=push_ms,
            visible_pull_ms=recorder.waited_ms(),
            visible_push_ms=recorder.rested_ms() if push_ms else 0.0,
        )


class Propagator:
    """Runs plans on this rank. All methods are collective over all ranks unless they say
    otherwise.
    """

    def __init__(
        self,
        stage_model: StageModel,
        *,
        device: torch.device,
        max_groups: int | None = None,
        link_config: LinkConfig | None = None,
        seed: int = 0,
        memory_limit_bytes: int | None = None,
    ):
        self.stage_model = stage_model
        self._seed, self._memory_limit_bytes = seed, memory_limit_bytes
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.device = device
        if device.type != "cpu":
            # Autograd's thread has no context before its first kernel, and cuBLAS would warn of it.
            with torch.inference_mode(False), torch.enable_grad():
                torch.ones(1, device=device, requires_grad=True).exp().backward()
        self.groups = GroupPool(max_groups, device)
        self.hosts = find_hosts(device)
        self.links = StrategyLinks(
            stage_model, self.groups, self.hosts, link_config or LinkConfig(), device
        )
        self.recorder = self.links.recorder
        self.clock = self.recorder.clock
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self.problem: HydraConfigError | None = None
        """Error of a given loss on this rank in the last run of a plan."""
        self.temperature = 1.0
        """Scores and losses are those of the logits divided by it."""

    def close(self) -> None:
        """Let go of weights and destroy the process groups; not collective."""
        self.links.close()
        self.groups.destroy()

    def prepare(self, strategies: Iterable[Strategy]) -> None:
        """Create the process groups of `strategies`."""
        self.groups.ensure(list(strategies))

    def check_plan(
        self,
        plan: IterationPlan,
        fingerprint: tuple[int, int, int] = (0, 0, 0),
        problem: Exception | None = None,
        objective: Objective | None = None,
    ) -> None:
        """Raise PlanMismatchError on all ranks where plans, `fingerprint`s of batches, or
        objectives differ.

        A `problem` that any rank brings is raised on all. One all-gather.
        """
        of_plan = (plan.digest, len(plan.lengths), sum(plan.lengths))
        row = [problem is not None, *of_plan, *fingerprint, *fingerprint_of(objective)]
        all_ranks = gather_by_hosts(torch.tensor(row), self.device).tolist()
        if any(row[0] for row in all_ranks):
            raise_together(problem, self.device)
        # Three numbers of each stand in a row: digest, sequences, tokens.
        for what, begin in (("plan", 1), ("global batch", 4)):
            held = [tuple(row[begin : begin + 3]) for row in all_ranks]
            differing = [rank for rank, its in enumerate(held) if its != held[0]]
            if differing:
                first, other = (
                    f"{number} sequences of {tokens} tokens (digest {digest:016x})"
                    for digest, number, tokens in (held[0], held[differing[0]])
                )
                raise on_all_ranks(
                    PlanMismatchError(
                        f"iteration {plan.iteration}: the {what} has {first} on rank 0 and {other} on rank "
                        f"{differing[0]} ({len(differing)} of {self.num_ranks} ranks differ); nothing was "
                        "exchanged. Give every rank the same global batch, dataset and configuration"
                    )
                )
        objectives = [(row[7], row[8]) for row in all_ranks]
        differing = [
            rank for rank, its in enumerate(objectives) if not are_alike(objectives[0], its)
        ]
        if differing:
            # Collective: every rank has the same rows, and comes here with the same answer.
            found = find_difference(objective, differing[0], self.device)
            raise on_all_ranks(
                PlanMismatchError(
                    f"iteration {plan.iteration}: {found} ({len(differing)} of {self.num_ranks} ranks differ); nothing "
                    "was exchanged. Give every rank the same loss and fields: what is computed on one rank can be sent "
                    "to all by torch.distributed.broadcast_object_list"
                )
            )

    def train(
        self,
        plan: IterationPlan,
        load: LoadExample,
        grads_P: Sequence[Tensor],
        loss_scale: float,
        objective: Objective | None = None,
    ) -> RankOutcome:
        """Add the gradient of the global token-mean loss, or of `objective`, times `loss_scale`, to
        this rank's `grads_P`.

        `grads_P[param]` are flat fp32 shards (empty for frozen parameters). Slices live only inside
        this call.
        """
        return self._run(plan, Task(load, objective, loss_scale, self._noise_seed), grads_P)

    def evaluate(
        self,
        plan: IterationPlan,
        load: LoadExample,
        objective: Objective | None = None,
        *,
        noise: bool = False,
    ) -> RankOutcome:
        """Forward only; no gradient is computed. With the `noise` of training where it is asked
        for.
        """
        seed = self._noise_seed if noise else None
        return self._run(plan, Task(load, objective, None, seed), None)

    @property
    def _noise_seed(self) -> int | None:
        return self._seed if self.stage_model.has_noise else None

    def _run(
        self, plan: IterationPlan, task: Task, grads_P: Sequence[Tensor] | None
    ) -> RankOutcome:
        self.recorder.begin()
        self.problem = None
        # Here, where no round is posted: building a plan waits until the device has nothing to do.
        prepare_kernels(long_segments(plan), self.stage_model.flops_of_pair / plan.num_devices)
        self.stage_model.balance.begin(self.device, task.loss_scale, plan.num_tokens)
        spans: list[tuple[Any, Any]] = []
        losses: list[tuple[RankPhase, Tensor]] = []
        # `staying`: hooks go in and out once an iteration, because each time costs the host.
        with naming_memory_limit(self._memory_limit_bytes), self.stage_model.staying():
            mine = plan.on_rank(self.rank)
            # Neighbours alone: slices of another phase would take the memory of these in between.
            for _, alike in itertools.groupby(mine, lambda own: slices_key(own.plan.strategy)):
                self._run_phases(list(alike), task, grads_P, spans, losses)
        of_phases = [of_phase.sum() for _, of_phase in losses]
        return RankOutcome(
            plan=plan,
            objective=task.objective,
            # The zero stands for ranks without labelled tokens, whose list is empty.
            loss_sum=torch.stack([self._zero, *of_phases]).sum(),
            balance_loss=self._zero + self.stage_model.balance.value,
            spans=spans,
            losses=losses,
            recorder=self.recorder,
        )

    def _run_phases(
        self,
        phases: Sequence[RankPhase],
        task: Task,
        grads_P: Sequence[Tensor] | None,
        spans: list[tuple[Any, Any]],
        losses: list[tuple[RankPhase, Tensor]],
    ) -> None:
        """Phases that need the same slices, one after another: one session pulls and pushes for
        all. Where slices stay, ranks go on to their next phase without waiting for others. Adds to
        `spans` and `losses` of the outcome.
        """
        self.recorder.phase = len(spans)
        # Before the session opens: what it waits for is taken off when times are read.
        begin = self.clock.stamp()
        session = self.links.open(phases, training=task.is_training, grads_P=grads_P)
        busy = [number for number, phase in enumerate(phases) if phase.micro_batches]
        with session:
            for number, phase in enumerate(phases):
                if number:
                    session.begin_phase(number)
                    begin = self.clock.stamp()
                    self.recorder.phase = len(spans)
                if number in busy:
                    # Kept gradients add up over phases: only this rank's last one completes them.
                    is_last = number == busy[-1]
                    found = self._propagate(phase, session, task, completes_gradients=is_last)
                    if found is not None:
                        losses.append((phase, found))
                spans.append((begin, self.clock.stamp()))
            session.finish()
        # Only now: what an error has left may serve no other iteration.
        self.links.keep_for_reuse(session.weights)

    def time_propagation(
        self,
        plan: IterationPlan,
        load: LoadExample,
        *,
        at_begin: Callable[[], None] | None = None,
    ) -> float:
        """Milliseconds of the slowest rank in one forward + backward of `plan`; gradients are
        thrown away.

        `at_begin` is called once all slices are there. Collective over all ranks.
        """
        prepare_kernels(long_segments(plan), math.inf)
        (phase,) = phases = plan.on_rank(self.rank)
        session = self.links.open(phases, training=True, grads_P=None)
        self.stage_model.balance.begin(self.device, 1.0, plan.num_tokens)
        with session:
            # Of passes alone: all slices are there, and all ranks begin together.
            session.await_all()
            dist.barrier()
            begin = self.clock.stamp()
            if at_begin is not None:
                at_begin()
            self._propagate(phase, session, Task(load, None, 1.0, self._noise_seed))
            end = self.clock.stamp()
            session.finish()
        self.links.keep_for_reuse(session.weights)
        self.clock.settle(end)
        return self.max_over_ranks(self.clock.ms_between(begin, end))

    def max_over_ranks(self, value: float) -> float:
        """The largest `value` of any rank."""
        return max_over_ranks(value, self.device)

    def _propagate(
        self,
        phase: RankPhase,
        session: TransferSession,
        task: Task,
        *,
        completes_gradients: bool = True,
    ) -> Tensor | None:
        """Run this rank's micro-batches of `phase`; nothing is added to gradients afterwards where
        this `completes_gradients`.

        Returns the loss sum of this rank's tokens of each micro-batch, fp64 on its device; None on
        ranks that have none (all but the first TP rank of the last stage). Collective over the
        pipeline only.
        """
        role = phase.role
        if role is None or not phase.micro_batches:
            return None
        if self.stage_model.has_experts:
            # Routing reads the device in every layer: others would wait for these layers' rounds.
            session.await_posts()
        try:
            self._enter(role, session)
            stage, layout = self._stage(role, session), self._token_layout(role)
            micro_batches = MicroBatchTensors.load(phase, stage, task, layout)
            forward = functools.partial(
                self._forward_micro_batch, phase, stage, task, micro_batches
            )
            # What stages send each other is a shard where TP cuts micro-batches.
            micro_batch_tokens = [
                self.stage_model.tp.shard_tokens(micro_batch.packed.num_tokens)
                for micro_batch in micro_batches
            ]
            if task.is_training:
                expect_last = session.weights.expect_last_backward
                before_last = expect_last if completes_gradients else lambda: None
                losses = run_1f1b(stage, micro_batch_tokens, forward, self.recorder, before_last)
            else:
                losses = run_forward_only(stage, micro_batch_tokens, forward)
        finally:
            # After an error, too, or modules would keep the slices of the iteration alive.
            self.stage_model.unbind()
        # All ranks of a TP group have the same loss, which counts once.
        if not losses or role.tp_rank > 0:
            return None
        # Scaled for backward, whose gradients may be of 16 bit; told as the sum that it is.
        return torch.stack(losses).double() / task.scale(phase.plan)

    def _forward_micro_batch(
        self,
        phase: RankPhase,
        stage: PipelineStage,
        task: Task,
        micro_batches: Sequence[MicroBatchTensors],
        index: int,
        hidden: Tensor | None,
    ) -> Tensor:
        """The stage's forward pass of one micro-batch: hidden states, or the scaled loss on the
        last.
        """
        micro_batch = micro_batches[index]
        run = functools.partial(
            self.stage_model.forward_stage, micro_batch.packed, micro_batch.input_ids_T, hidden
        )
        if not stage.is_last:
            return run()
        assert micro_batch.targets_T is not None
        loss, scale = task.loss, task.scale(phase.plan)

        def evaluate_chunk(tokens: Tokens) -> Tensor:
            if loss is None:
                return PLAIN(tokens) * scale
            value, problem = evaluate(loss, tokens, phase.micro_batches[index])
            if problem:
                # Not raised here, where other ranks would wait for the messages of this one.
                self.problem = self.problem or HydraConfigError(problem)
            return value * scale

        transform = self.stage_model.after_head.transform
        head_loss = HeadLoss(
            vocabulary=Vocabulary(
                tp=self.stage_model.tp,
                num_columns=self.stage_model.num_logits,
                # Without a known transform the model applies its own: only the temperature is left.
                transform=(transform or LogitTransform()).over(self.temperature),
            ),
            targets_T=micro_batch.targets_T,
            fields=micro_batch.fields or {},
            loss=PLAIN if loss is None else loss,
            evaluate=evaluate_chunk,
        )
        if transform is None:
            # The model's own forward makes the logits: nobody knows what it adds to its head.
            return head_loss.of_logits(run().squeeze(0))
        return run(at_head=head_loss.of_hidden)

    def _enter(self, role: Role, session: TransferSession) -> None:
        # Modules are the stage's before its groups set hooks on them.
        self.stage_model.enter()
        tp = role.scheme.tp
        group = self.groups.get("tp", role.tp_ranks) if tp > 1 else None
        # Under EP experts are whole, and TP must not sum their outputs as if they were parts.
        self.stage_model.tp.enter(group, tp, role.tp_rank, cuts_experts=role.scheme.ep == 1)
        if role.scheme.ep > 1:
            ep_group = self.groups.get(*role.ep_group)
            size = role.scheme.sp * role.scheme.tp
            self.stage_model.ep.enter(ep_group, size, role.ep_place, role.scheme.ep)
        self.stage_model.bind(
            role.scheme,
            role.stage,
            session.weights.leaves,
            session.await_bucket,
            session.before_backward,
        )

    def _stage(self, role: Role, session: TransferSession) -> PipelineStage:
        has_neighbours = role.scheme.pp > 1
        return PipelineStage(
            num_stages=role.scheme.pp,
            stage=role.stage,
            hidden_size=self.stage_model.hidden_size,
            dtype=next(iter(session.weights.leaves.values())).dtype,
            device=self.device,
            previous_rank=role.previous_rank,
            next_rank=role.next_rank,
            down_group=self.groups.get("pp_down", role.ranks) if has_neighbours else None,
            up_group=self.groups.get("pp_up", role.ranks) if has_neighbours else None,
            before_message=session.await_posts,
        )

    def _token_layout(self, role: Role) -> TokenLayout | None:
        """This rank's layout of each micro-batch, where its pipeline cuts or pads it."""
        sp, cp = role.scheme.sp, role.scheme.cp
        multiple = self.stage_model.tp.micro_batch_multiple(role.scheme.tp)
        if role.scheme.num_shards == 1 and multiple == 1:
            return None
        group = self.groups.get("sp", role.sp_ranks) if sp > 1 else None
        rows = TokenShards(self.groups.get("cp", role.cp_ranks), cp) if cp > 1 else None
        return TokenLayout(group, sp, role.sp_rank, multiple, rows, role.cp_rank if rows else 0)
