"""Which candidate strategies a run gets: those of the histogram's program that win sampled
mini-batches.

`strategy.proposal` finds strategies for the dataset as a whole. Here the planner decides between
them on mini-batches drawn from the same histogram, and the smallest set that is as fast stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.configs.hydra_config import Space
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.propose_phases import (
    Phases,
    PhaseSettings,
    groups_of_gathered,
    phases_ms,
    propose_phases,
)
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.sampler.trial import DEFAULT_PRUNING, Progress, PruningSettings, Trial, sample_batches
from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.cost_models.costs import CanRun, Costs, World
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.candidates import STRATEGIES_SCHEMA
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import (
    ProposalSettings,
    check_context,
    default_tokens_per_iteration,
    homogeneous_strategies,
    propose_from_histogram,
    usable_schemes,
)
from ds_hydra.strategy.proposal.space import candidate_schemes
from ds_hydra.strategy.schemes.neighbours import full_strategies
from ds_hydra.strategy.schemes.placement import (
    count_groups,
    groups_of_all,
    most_groups_of_rank,
)
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, schemes_of

_MAX_SINGLE_STAGE = 2000
"""Strategies of <TP,1> that are all tried, if there are no more; 64 devices have some hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStrategy:
    """A candidate that stays, and why.

    `share_won` is its share of the sampled mini-batches, planned with the kept set.
    `max_lengths_tokens` are the maximum lengths whose S[N][L] it is near to; empty for a static
    choice that is near to none. `is_for_phases`: it is there for what the planner puts together of
    it and others, and `share_won` is that of these ([Note: Phases]).
    """

    strategy: Strategy
    share_won: float
    max_lengths_tokens: tuple[int, ...] = ()
    is_best_static: bool = False
    is_for_phases: bool = False

    @property
    def reason(self) -> str:
        """One sentence for the user."""
        if self.is_for_phases:
            return (
                f"pipelines of it are put together with others anew for every step, which is fastest for "
                f"{self.share_won:.0%} of the sampled mini-batches"
            )
        parts = [f"fastest for {self.share_won:.0%} of the sampled mini-batches"]
        if self.max_lengths_tokens:
            low, high = self.max_lengths_tokens[0], self.max_lengths_tokens[-1]
            parts.append(
                f"suits maximum lengths {low} to {high}"
                if high > low
                else f"suits maximum length {low}"
            )
        if self.is_best_static:
            parts.append("the best static strategy, which fits the whole context")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The candidate set of a run. Times are means over the sampled mini-batches, as planned, with
    pull and push where those are known.
    """

    space: Space
    num_devices: int
    context_length: int
    tokens_per_iteration: int
    kept: tuple[KeptStrategy, ...]
    num_candidates: int
    num_communicators: int
    assumed: tuple[Scheme, ...]
    """Schemes of the kept strategies whose times nobody measured."""
    kept_ms: float
    plain_ms: float | None
    """With the kept strategies of <TP,PP> alone; None where those do not fit every sequence."""
    all_candidates_ms: float
    best_static_ms: float | None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The candidates, the one that wins most often first."""
        return tuple(kept.strategy for kept in self.kept)

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.strategies/1` document, with the reasons."""
        return {
            "schema": STRATEGIES_SCHEMA,
            "space": self.space,
            "num_devices": self.num_devices,
            "context_length": self.context_length,
            "strategies": [str(strategy) for strategy in self.strategies],
            "tokens_per_iteration": self.tokens_per_iteration,
            "num_candidates": self.num_candidates,
            "num_communicators": self.num_communicators,
            "assumed_schemes": [str(scheme) for scheme in self.assumed],
            "expected_ms": {
                "proposed": self.kept_ms,
                "plain": self.plain_ms,
                "all_candidates": self.all_candidates_ms,
                "best_static": self.best_static_ms,
            },
            "reasons": [
                {
                    "strategy": str(kept.strategy),
                    "share_won": kept.share_won,
                    "max_lengths_tokens": list(kept.max_lengths_tokens),
                    "is_best_static": kept.is_best_static,
                    "reason": kept.reason,
                }
                for kept in self.kept
            ],
        }


def propose_strategies(
    profile: Profile,
    histogram: LengthHistogram,
    *,
    num_devices: int,
    context_length: int,
    tokens_per_iteration: int | None = None,
    space: Space = "full",
    can_run: CanRun = lambda _: True,
    given: Sequence[Strategy] = (),
    pruning: PruningSettings = DEFAULT_PRUNING,
    cluster: Cluster | None = None,
    progress: Progress | None = None,
) -> Proposal:
    """`propose_among` the schemes of `profile`, and in the full space what follows from it;
    gathered ones where `cluster` says how fast layers move.
    """
    if space == "full":
        tokens = tokens_per_iteration or default_tokens_per_iteration(num_devices, context_length)
        world = World.of(profile, cluster, num_devices, context_length).measured
        schemes = candidate_schemes(replace(world, can_run=can_run), space, tokens)
        profile = world.costs.table(schemes)
    return propose_among(
        profile,
        histogram,
        num_devices=num_devices,
        context_length=context_length,
        tokens_per_iteration=tokens_per_iteration,
        space=space,
        can_run=can_run,
        given=given,
        pruning=pruning,
        progress=progress,
    )


def propose_among(
    profile: Profile,
    histogram: LengthHistogram,
    *,
    num_devices: int,
    context_length: int,
    tokens_per_iteration: int | None = None,
    space: Space = "full",
    can_run: CanRun = lambda _: True,
    given: Sequence[Strategy] = (),
    pruning: PruningSettings = DEFAULT_PRUNING,
    progress: Progress | None = None,
    gathered: Profile | None = None,
) -> Proposal:
    """The smallest candidate set found that is as fast as all candidates on sampled mini-batches.

    First of strategies of <TP,PP>: the best static one stays in it whatever it wins, so that every
    sequence of the context has a place and the set is never slower than static training. Or the
    strategies `given`, in its place. Then strategies of the extended schemes of `space` come on top
    where they make the sampled mini-batches faster; a planner that chooses from more is never
    slower. At last what phases are put together of, among the gathered schemes of `profile` or of
    `gathered`.

    Raises HydraConfigError if no scheme of the space holds the context, or if the best static
    strategy alone needs more communicators than allowed.
    """
    tokens = tokens_per_iteration or default_tokens_per_iteration(num_devices, context_length)
    histogram = histogram.limit(context_length)
    world = replace(World.of(profile, None, num_devices, context_length), can_run=can_run)
    is_extended = not all(scheme.is_plain for scheme in usable_schemes(world, space))
    plain_fits = bool(homogeneous_strategies(world)) or not is_extended
    spaces: list[Space] = ["plain"] if plain_fits and not given else []
    spaces += [space] if is_extended else []

    if not is_extended and not given:
        check_context(world, advises_full=True)

    batches = sample_batches(histogram, tokens, pruning)
    trial = Trial(batches, profile, num_devices, context_length, pruning)
    table = {strategy: trial.times_ms(strategy) for strategy in given}
    chosen, plain, staying = list(given), list(given), list(given)
    proposed: dict[Strategy, tuple[int, ...]] = {}
    for turn, each in enumerate(spaces):
        seen = _in_turn(progress, turn, len(spaces))
        schemes = usable_schemes(world, each)
        if each == "plain":
            # 128 tokens are the paper's step for 32K; a short context needs its own for schemes to
            # differ.
            step = max(1, min(128, context_length // 16))
            settings_of_program = ProposalSettings(tokens_per_iteration=tokens, length_step=step)
            candidates = propose_from_histogram(world, histogram, settings_of_program)
            proposed = {c.strategy: c.max_lengths_tokens for c in candidates}
            single = [scheme for scheme in schemes if scheme.pp == 1]
            tried = dict.fromkeys(proposed)
            tried |= dict.fromkeys(full_strategies(single, num_devices, _MAX_SINGLE_STAGE))
            table |= trial.search(tuple(tried), schemes, seen)
        if not any(map(trial.fits_context, chosen)):
            check_context(world, schemes)
            static, times_ms = trial.best_static(each)
            table[static] = times_ms
            _check_communicators(static, pruning)
            chosen.append(static)
            staying.append(static)
        if each != "plain":
            table |= trial.search_near(chosen, schemes, seen)
        chosen = _grow(chosen, table, pruning, pruning.tolerance)
        plain = chosen if each == "plain" else plain
    gathered = profile if gathered is None else gathered

    def settings(beside: Sequence[Strategy]) -> PhaseSettings:
        return PhaseSettings(
            num_devices=num_devices,
            planner=pruning.planner,
            links_of=pruning.links_of,
            fits=lambda palette: _fits(beside, palette, pruning),
            tolerance=pruning.tolerance,
            can_run=can_run,
        )

    def propose(beside: Sequence[Strategy], known_ms: FloatArray) -> Phases:
        return propose_phases(gathered, batches, known_ms, settings(beside))

    known_ms = np.min([table[strategy] for strategy in chosen], axis=0)
    palette, times_ms, are_refused = propose(chosen, known_ms)
    if are_refused and len(chosen) > len(staying):
        instead = _instead(staying, table, propose, pruning)
        if instead.times_ms.mean() < times_ms.mean():
            chosen, palette, times_ms = instead
            known_ms = np.min([table[strategy] for strategy in chosen], axis=0)
    beside = settings(chosen)
    if more := groups_of_gathered(chosen, palette, num_devices, beside.fits):
        palette = (*palette, *more)
        known = Costs(gathered).extended(schemes_of((*chosen, *palette)))
        times_ms = phases_ms(batches, times_ms, (*chosen, *palette), known, beside)
    found = _describe(trial, proposed, table, chosen, plain, space, tokens)
    if not palette:
        return found
    share = float((times_ms < known_ms).mean())
    kept = [
        KeptStrategy(strategy=s, share_won=share, is_for_phases=True)
        for s in palette
        if s not in chosen
    ]
    used = schemes_of(palette)
    return replace(
        found,
        kept=(*found.kept, *kept),
        num_communicators=count_groups([*chosen, *palette]),
        assumed=tuple(
            sorted({*found.assumed} | (used - profile.latency.keys()) | (used & profile.assumed))
        ),
        kept_ms=float(times_ms.mean()),
    )


class _Set(NamedTuple):
    """Candidates, those that phases are put together of, and what mini-batches take with all."""

    chosen: list[Strategy]
    palette: tuple[Strategy, ...]
    times_ms: FloatArray


def _instead(
    staying: Sequence[Strategy],
    table: Mapping[Strategy, FloatArray],
    propose: Callable[[Sequence[Strategy], FloatArray], Phases],
    pruning: PruningSettings,
) -> _Set:
    """Phases beside `staying` alone, and then what is still worth a place beside both: for where
    the candidates leave no communicators for phases.
    """
    palette, times_ms, _ = propose(staying, np.min([table[s] for s in staying], axis=0))
    with_phases = {**table, **dict.fromkeys(palette, times_ms)}
    grown = _grow([*staying, *palette], with_phases, pruning, pruning.tolerance)
    times_ms = np.min([with_phases[strategy] for strategy in grown], axis=0)
    return _Set([s for s in grown if s not in palette], palette, times_ms)


def _fits(
    chosen: Sequence[Strategy], palette: Sequence[Strategy], pruning: PruningSettings
) -> bool:
    keys = groups_of_all([*chosen, *palette])
    is_enough = len(keys) <= pruning.max_communicators
    return is_enough and most_groups_of_rank(keys) <= pruning.max_groups_of_rank


def _in_turn(progress: Progress | None, turn: int, num_turns: int) -> Progress | None:
    """`progress` of one of several rounds over the mini-batches, as part of all of them."""
    if progress is None:
        return None
    return lambda done, total: progress(turn * total + done, num_turns * total)


def _check_communicators(static: Strategy, pruning: PruningSettings) -> None:
    needed = count_groups([static])
    if needed > pruning.max_communicators:
        raise HydraConfigError(
            f"the best static strategy {static} needs {needed} communicators, more than "
            f"{pruning.max_communicators}; allow {needed} or more (--max-communicators, or "
            "hydra.max_process_groups, half of which is for other strategies)"
        )


def _grow(
    start: Sequence[Strategy],
    table: Mapping[Strategy, FloatArray],
    pruning: PruningSettings,
    tolerance: float,
) -> list[Strategy]:
    """Greedy: add what shortens the mean most, until within `tolerance` of all or out of
    communicators.

    One strategy of `start` at least has a time for every mini-batch.
    """
    goal_ms = float(np.min(list(table.values()), axis=0).mean()) * (1 + tolerance)
    chosen, times = list(start), np.min([table[strategy] for strategy in start], axis=0)
    open_ = [strategy for strategy in table if strategy not in chosen]
    while open_ and times.mean() > goal_ms:
        affordable = [s for s in open_ if count_groups([*chosen, s]) <= pruning.max_communicators]
        gains = [float((times - np.minimum(times, table[s])).mean()) for s in affordable]
        if not affordable or max(gains) <= 0:
            break
        added = affordable[int(np.argmax(gains))]
        open_.remove(added)
        if most_groups_of_rank(groups_of_all([*chosen, added])) > pruning.max_groups_of_rank:
            continue
        chosen.append(added)
        times = np.minimum(times, table[added])
    return chosen


def _describe(
    trial: Trial,
    proposed: Mapping[Strategy, tuple[int, ...]],
    table: Mapping[Strategy, FloatArray],
    chosen: Sequence[Strategy],
    plain: Sequence[Strategy],
    space: Space,
    tokens_per_iteration: int,
) -> Proposal:
    times = np.stack([table[strategy] for strategy in chosen])
    won = Counter(np.argmin(times, axis=0).tolist())
    static = [s for s in chosen if not s.is_heterogeneous and trial.fits_context(s)]
    best_static = min(static, key=lambda s: float(table[s].mean()), default=None)
    plain_ms = float(np.min([table[s] for s in plain], axis=0).mean()) if plain else np.inf
    kept = [
        KeptStrategy(
            strategy=strategy,
            share_won=won[index] / times.shape[1],
            max_lengths_tokens=proposed.get(strategy, ()),
            is_best_static=strategy == best_static,
        )
        for index, strategy in enumerate(chosen)
    ]
    return Proposal(
        space=space,
        num_devices=trial.num_devices,
        context_length=trial.context_length,
        tokens_per_iteration=tokens_per_iteration,
        kept=tuple(sorted(kept, key=lambda k: -k.share_won)),
        num_candidates=len({*proposed, *table}),
        num_communicators=count_groups(chosen),
        assumed=tuple(sorted({s for c in chosen for s in c.schemes} & trial.profile.assumed)),
        kept_ms=float(times.min(axis=0).mean()),
        plain_ms=plain_ms if np.isfinite(plain_ms) else None,
        all_candidates_ms=float(np.min(list(table.values()), axis=0).mean()),
        best_static_ms=None if best_static is None else float(table[best_static].mean()),
    )
