"""One iteration: the plan that ranks agree on, its objective, and its measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.losses.loss import WEIGHT, SequenceLoss
from ds_hydra.engine.losses.objective import (
    Objective,
    Scores,
    TokenScoreRecorder,
    WeightedObjective,
    check_value,
    name_of,
)
from ds_hydra.engine.model.micro_batches import LoadExample
from ds_hydra.engine.propagation import Propagator, RankOutcome
from ds_hydra.engine.ranks.agreement import (
    check_alike,
    gather_by_hosts,
    gather_rows,
    on_all_ranks,
    raise_together,
    run_together,
)
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.engine.ranks.settings import (
    SAME_TO,
    digest_of_numbers,
    numbers_in,
    settings_of_groups,
)
from ds_hydra.errors import HydraDataError
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.plan import IterationPlan


@dataclass(frozen=True, slots=True)
class Iteration:
    """A plan that all ranks agree on, and where its sequences come from."""

    planned: PlannedIteration
    load: LoadExample
    objective: Objective | None = None
    """Objective of a given loss for a given global batch; None for the mean cross entropy."""
    labels: Sequence[Tensor] = ()
    """[l] of each sequence of a given global batch."""

    @property
    def plan(self) -> IterationPlan:
        """The plan."""
        return self.planned.plan


class RankReport(NamedTuple):
    """Numbers that a rank tells the others before the step, in the one collective that the host
    waits for; flags are 0 or 1.
    """

    has_problem: float
    """Whether a given loss has failed on the rank."""
    is_stop_requested: float
    """Whether the rank was told to stop (SIGTERM)."""
    settings: float
    """Digest of the numbers of its optimizer's groups; 0 in evaluation."""
    loss_sum: float
    """Sum over labelled tokens, each on exactly one rank."""
    balance_loss: float
    """Part of the loss of balance of experts."""
    squares: tuple[float, ...]
    """Squared norm of the gradients that it owns of each group that ZeRO-3 steps at once, NaN or
    Inf where one is; none in evaluation.
    """
    times: tuple[float, ...] = ()
    """Row of its `RankTimes`; none where a device must reach the end of its passes first."""

    @classmethod
    def from_row(cls, row: Sequence[float], num_squares: int) -> RankReport:
        """Read a row of `row_of`."""
        told, squares, times = row[:5], row[5 : 5 + num_squares], row[5 + num_squares :]
        return cls(*told, squares=tuple(squares), times=tuple(times))

    @classmethod
    def row_of(
        cls,
        outcome: RankOutcome,
        squares: Tensor,
        *,
        has_problem: bool,
        is_stop_requested: bool,
        settings: float,
        times: Sequence[float] = (),
    ) -> Tensor:
        """[n] fp64 on the device of `squares`: the numbers one after another."""
        known = [has_problem, is_stop_requested, settings]
        known, last = (torch.tensor(x, dtype=torch.float64) for x in (known, times))
        of_passes = torch.stack([outcome.loss_sum, outcome.balance_loss])
        own = [to_device(known, squares.device), of_passes, squares]
        # Times come along on CPU ranks alone, where the rest is on the CPU, too.
        return torch.cat([*own, last] if times else own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Reports of all ranks in one iteration."""

    own: RankOutcome
    """Results of this rank."""
    ranks: list[RankReport]
    nonfinite_position: int = -1
    """Position of a sequence in a micro-batch with a NaN or Inf loss; -1 without one."""
    expert_tokens_LE: Tensor | None = None
    """[layers with experts, E]: tokens that chose an expert, if a training iteration had any."""

    @property
    def nonfinite_ranks(self) -> list[int]:
        """Ranks with NaN or Inf among the gradients that they own."""
        return [n for n, r in enumerate(self.ranks) if not all(map(math.isfinite, r.squares))]

    @property
    def is_stop_requested(self) -> bool:
        """Whether any rank was told to stop."""
        return any(r.is_stop_requested for r in self.ranks)

    @property
    def squares(self) -> list[float]:
        """Squared norm of the gradients of each group that ZeRO-3 steps at once."""
        # On every rank the same numbers in the same order: all clip by the same norm.
        return [sum(of_ranks) for of_ranks in zip(*(r.squares for r in self.ranks))]

    @property
    def balance_loss(self) -> float:
        """The loss of balance of experts."""
        return sum(r.balance_loss for r in self.ranks)

    def loss(self) -> float:
        """Mean over the label tokens of the plan, or over the divisor of the objective, and the
        loss of balance. Raises HydraDataError, on all ranks, where the loss of an objective is not
        finite.
        """
        plan, objective = self.own.plan, self.own.objective
        loss_sum = sum(r.loss_sum for r in self.ranks)
        if objective is None:
            return loss_sum / plan.num_label_tokens + self.balance_loss
        if self.nonfinite_position >= 0:
            of_pipelines = (p.micro_batches for p in plan.pipelines)
            beside = next(m for ms in of_pipelines for m in ms if self.nonfinite_position in m)
            read = (*objective.loss.token_fields, *objective.loss.sequence_fields)
            raise on_all_ranks(
                HydraDataError(
                    f"iteration {plan.iteration}: loss {name_of(objective.loss)} is not finite in the micro-batch "
                    f"of examples {', '.join(map(str, sorted(beside)))}; no weight was changed. Look at their "
                    f"fields {', '.join(read) or '(none)'}"
                )
            )
        # These passes had weighted sums with the loss's gradient; its value comes from the scores.
        if isinstance(objective, WeightedObjective):
            return objective.value + self.balance_loss
        return loss_sum / objective.normaliser + self.balance_loss


def gather_outcomes(
    propagator: Propagator,
    outcome: RankOutcome,
    squares: Tensor | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    *,
    is_stop_requested: bool = False,
) -> Outcomes:
    """Gather what all ranks report, in rank order, on every rank; the one time in an iteration that
    the host waits for the device. Collective over all ranks.

    `squares` are those of this rank's gradients where it trains, with the `groups` of its
    optimizer. Raises, on all ranks, the error of a given loss on one of them, and PlanMismatchError
    where numbers of groups differ.
    """
    problem, device = propagator.problem, propagator.device
    settings = dict(numbers_in(settings_of_groups(groups), "optimizer.param_groups"))
    trains, has_streams = squares is not None, propagator.clock.has_streams
    if squares is None:
        squares = torch.zeros(0, dtype=torch.float64, device=device)
    mine_N = RankReport.row_of(
        outcome,
        squares,
        has_problem=problem is not None,
        is_stop_requested=is_stop_requested,
        settings=digest_of_numbers(settings.items()) if groups else 0.0,
        times=outcome.times().to_row() if trains and not has_streams else (),
    )
    rows = gather_rows(mine_N)
    balance, read = propagator.stage_model.balance, [rows]
    # Read with the rows and in their type: one copy, hence one wait.
    if trains and balance.layers:
        dist.all_reduce(balance.counts_LE)
        read.append(balance.counts_LE.double())
    # Here the host waits for all passes.
    told = torch.cat([x.flatten() for x in read]).cpu()
    table, counts = told[: rows.numel()].view_as(rows), told[rows.numel() :]
    ranks = [RankReport.from_row(row, len(squares)) for row in table.tolist()]
    # Every rank has all rows: only where there is a problem does telling it cost a collective.
    if any(rank.has_problem for rank in ranks):
        raise_together(problem, device)
    # Close numbers may have other digests, so values decide, up to `SAME_TO`.
    if len({rank.settings for rank in ranks}) > 1:
        check_alike(settings, device, rel_tol=SAME_TO)
    positions = [-1]
    # On all ranks or none: each of them has the sums of all.
    if not all(math.isfinite(rank.loss_sum) for rank in ranks):
        mine = torch.tensor([outcome.find_nonfinite()])
        positions = gather_by_hosts(mine, device).flatten().tolist()
    return Outcomes(
        own=outcome,
        ranks=ranks,
        nonfinite_position=next((p for p in positions if p >= 0), -1),
        expert_tokens_LE=counts.view_as(balance.counts_LE).long() if len(read) > 1 else None,
    )


def score(
    iteration: Iteration,
    propagator: Propagator,
    *,
    entropy: bool = False,
    details: bool = False,
    noise: bool = False,
) -> Scores:
    """Scores of every token of the iteration's sequences, forward only, with the `noise` that
    training has where it is asked for. Collective over all ranks, returned on each.
    """
    lengths, device = iteration.plan.lengths, propagator.device
    recorder = TokenScoreRecorder(sum(lengths), device, entropy=entropy, details=details)
    objective = recorder.objective(lengths)
    propagator.evaluate(iteration.plan, iteration.load, objective, noise=noise)
    raise_together(propagator.problem, device)
    return gather_scores(iteration, recorder, propagator)


def with_score_recorder(
    iteration: Iteration, device: torch.device, *, wanted: bool
) -> tuple[Objective | None, TokenScoreRecorder | None]:
    """The objective of `iteration`, and where `wanted` the recorder of the scores of its tokens."""
    objective, lengths = iteration.objective, iteration.plan.lengths
    if not wanted or objective is None:
        return objective, None
    recorder = TokenScoreRecorder(
        sum(lengths), device, entropy=True, details=True, inner=objective.loss
    )
    return recorder.objective(lengths, objective), recorder


def gather_scores(
    iteration: Iteration, recorder: TokenScoreRecorder, propagator: Propagator
) -> Scores:
    """Gather the scores of all ranks' `recorder` on each rank. Collective over all ranks."""
    here = [False] * len(iteration.plan.lengths)
    for phase in iteration.plan.on_rank(propagator.rank):
        # TP ranks have the same scores, which count once; what a rank has not scored is 0.
        if phase.role is not None and phase.role.tp_rank == 0:
            for position in phase.positions:
                here[position] = True
    return recorder.gather(iteration.plan.lengths, here)


def linearised(iteration: Iteration, propagator: Propagator) -> Iteration:
    """`iteration`, with a loss of sequences turned into weighted sums. Collective over all ranks;
    one forward pass where it is one.
    """
    objective = iteration.objective
    if objective is None or not isinstance(objective.loss, SequenceLoss):
        return iteration
    device = propagator.device
    # With training's noise, which hashing repeats: weights belong to the scores of the next pass.
    log_probs = score(iteration, propagator, noise=True).log_probs
    # A loss of the user's may fail on one rank alone.
    weighted = run_together(lambda: objective.weighted(log_probs, iteration.labels), device)
    weights_N = torch.stack([fields[WEIGHT] for fields in weighted.fields]).double()
    value = weights_N.new_tensor([weighted.value])
    # Each rank has computed its own: unequal ones would train something else, in silence.
    check_value(name_of(objective.loss), torch.cat([value, weights_N]), device)
    return replace(iteration, objective=weighted)
