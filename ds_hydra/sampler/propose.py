"""Which candidate strategies a run gets: those of the histogram's programme that win sampled mini-batches.

`strategy.proposal` finds strategies for the dataset as a whole. Here the planner decides between them on
mini-batches drawn from the same histogram, and the smallest set that is as fast stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner import PlannerSettings, plan_with_time
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.strategy.candidates import STRATEGIES_SCHEMA
from ds_hydra.strategy.histogram import LengthHistogram
from ds_hydra.strategy.link_times import LinkTimes
from ds_hydra.strategy.neighbours import neighbour_strategies
from ds_hydra.strategy.profile import Profile
from ds_hydra.strategy.proposal import (
    ProposalSettings,
    ProposedStrategy,
    default_tokens_per_iteration,
    homogeneous_strategies,
    propose_from_histogram,
    usable_schemes,
)
from ds_hydra.strategy.scheme import Strategy

Progress = Callable[[int, int], None]
"""Called with the number of mini-batches planned and their total."""


HEURISTIC = PlannerSettings().heuristic()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningSettings:
    """How candidates are tried out.

    `num_rounds`: how often the strategies one step away from the winners are tried too.
    `tolerance`: how much slower, on average over the sampled mini-batches, the set that stays may be than
    the set of all candidates. `max_communicators`: process groups that the set may need at most.
    `links_of`: pull and push of a strategy, which then count; None where they are not known.
    """

    num_batches: int = 32
    num_rounds: int = 1
    tolerance: float = 0.002
    max_communicators: int = 512
    seed: int = 0
    planner: PlannerSettings = HEURISTIC
    links_of: Callable[[Strategy], LinkTimes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStrategy:
    """A candidate that stays, and why.

    `share_won` is its share of the sampled mini-batches, planned with the kept set. `max_lengths_tokens`
    are the maximum lengths whose S[N][L] it is near to; empty for a static choice that is near to none.
    """

    strategy: Strategy
    share_won: float
    max_lengths_tokens: tuple[int, ...]
    is_best_static: bool

    @property
    def reason(self) -> str:
        """One sentence for the user."""
        parts = [f"fastest for {self.share_won:.0%} of the sampled mini-batches"]
        if self.max_lengths_tokens:
            low, high = self.max_lengths_tokens[0], self.max_lengths_tokens[-1]
            parts.append(
                f"suits maximum lengths {low} to {high}" if high > low else f"suits maximum length {low}"
            )
        if self.is_best_static:
            parts.append("the best static strategy, which holds the whole context")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The candidate set of a run. Times are means over the sampled mini-batches, as planned, with pull and push
    where those are known.
    """

    num_devices: int
    context_length: int
    tokens_per_iteration: int
    kept: tuple[KeptStrategy, ...]
    num_candidates: int
    num_communicators: int
    kept_ms: float
    all_candidates_ms: float
    best_static_ms: float

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The candidates, the one that wins most often first."""
        return tuple(kept.strategy for kept in self.kept)

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.strategies/1` document, with the reasons."""
        return {
            "schema": STRATEGIES_SCHEMA,
            "num_devices": self.num_devices,
            "context_length": self.context_length,
            "strategies": [str(strategy) for strategy in self.strategies],
            "tokens_per_iteration": self.tokens_per_iteration,
            "num_candidates": self.num_candidates,
            "num_communicators": self.num_communicators,
            "expected_ms": {
                "proposed": self.kept_ms,
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
    pruning: PruningSettings = PruningSettings(),
    progress: Progress | None = None,
) -> Proposal:
    """The smallest candidate set found that is as fast as all candidates on sampled mini-batches.

    The best static strategy stays in it whatever it wins, so that every sequence of the context has a
    place and the set is never slower than static training. Raises HydraConfigError if no scheme holds the
    context, or if the best static strategy alone needs more communicators than allowed.
    """
    tokens = tokens_per_iteration or default_tokens_per_iteration(num_devices, context_length)
    histogram = histogram.limit(context_length)
    candidates = propose_from_histogram(
        profile,
        histogram,
        num_devices=num_devices,
        context_length=context_length,
        # 128 tokens are the paper's step for 32K; a short context needs its own for schemes to differ.
        settings=ProposalSettings(
            tokens_per_iteration=tokens, length_step=max(1, min(128, context_length // 16))
        ),
    )
    batches = _sample_batches(histogram, tokens, pruning)
    trial = _Trial(batches, profile, num_devices, pruning)
    static = homogeneous_strategies(profile, num_devices, context_length)
    static_ms = [trial.times_ms(strategy) for strategy in static]
    best = int(np.argmin([times.mean() for times in static_ms]))
    winners = trial.winners([c.strategy for c in candidates], progress)
    for _ in range(pruning.num_rounds):
        schemes = usable_schemes(profile, num_devices)
        near = dict.fromkeys(n for won in winners for n in (won, *neighbour_strategies(won, schemes)))
        winners = tuple(dict.fromkeys((*winners, *trial.winners(tuple(near), None, share=1 / 2))))
    table = {strategy: trial.times_ms(strategy) for strategy in winners}
    table[static[best]] = static_ms[best]
    chosen = _smallest_set(table, static[best], pruning)
    return _describe(candidates, table, chosen, static[best], num_devices, context_length, tokens)


def count_communicators(strategies: Sequence[Strategy]) -> int:
    """Process groups that `strategies` need together: one per TP or SP group, two per pipeline of several stages.

    Strategies share the groups that have the same ranks, which placement in blocks makes frequent.
    """
    return len(set().union(*(_communicators(strategy) for strategy in strategies)))


def _communicators(strategy: Strategy) -> set[tuple[str, int, int, int]]:
    """Groups by purpose, first rank, size, and distance of their ranks."""
    groups = set()
    for scheme, ranks in zip(strategy.schemes, strategy.place()):
        if scheme.tp > 1:
            groups |= {("tp", start, scheme.tp, 1) for start in ranks[:: scheme.tp]}
        if scheme.sp > 1:
            stages = ranks[:: scheme.ranks_per_stage]
            groups |= {("sp", start + t, scheme.sp, scheme.tp) for start in stages for t in range(scheme.tp)}
        if scheme.pp > 1:
            groups |= {("down", ranks[0], len(ranks), 1), ("up", ranks[0], len(ranks), 1)}
    return groups


class _Trial:
    """Plans the same mini-batches with different candidates."""

    def __init__(
        self,
        batches: Sequence[GlobalBatch],
        profile: Profile,
        num_devices: int,
        pruning: PruningSettings,
    ) -> None:
        self._batches, self._profile = batches, profile
        self._num_devices, self._pruning = num_devices, pruning

    def times_ms(self, strategy: Strategy) -> FloatArray:
        """Planned time of every mini-batch with `strategy` alone, inf where a sequence does not fit."""
        longest = max(self._profile.max_len_tokens(s, self._num_devices) for s in set(strategy.schemes))
        return np.array(
            [
                self._plan(batch, [strategy])[1] if max(batch.lengths) <= longest else np.inf
                for batch in self._batches
            ]
        )

    def winners(
        self, strategies: Sequence[Strategy], progress: Progress | None, share: float = 1.0
    ) -> tuple[Strategy, ...]:
        """Strategies that are the planner's choice for a mini-batch at least, most frequent first.

        `share`: of the mini-batches that are looked at, rounded up.
        """
        won: Counter[Strategy] = Counter()
        for done, batch in enumerate(self._batches[: ceil(share * len(self._batches))], start=1):
            won[self._plan(batch, strategies)[0]] += 1
            if progress is not None:
                progress(done, len(self._batches))
        return tuple(strategy for strategy, _ in won.most_common())

    def _plan(self, batch: GlobalBatch, strategies: Sequence[Strategy]) -> tuple[Strategy, float]:
        settings, links_of = self._pruning.planner, self._pruning.links_of
        if links_of is not None:
            settings = replace(settings, link_times={s: links_of(s) for s in strategies})
        plan, time_ms = plan_with_time(
            batch,
            strategies=strategies,
            profile=self._profile,
            num_devices=self._num_devices,
            settings=settings,
        )
        return plan.strategy, time_ms


def _sample_batches(
    histogram: LengthHistogram, tokens_per_iteration: int, pruning: PruningSettings
) -> tuple[GlobalBatch, ...]:
    drawn = histogram.draw_batches(tokens_per_iteration, pruning.num_batches, pruning.seed)
    return tuple(
        GlobalBatch(
            iteration=iteration,
            sample_indices=tuple(range(len(lengths))),
            lengths=tuple(lengths.tolist()),
            num_label_tokens=int((lengths - 1).sum()),
        )
        for iteration, lengths in enumerate(drawn)
    )


def _smallest_set(
    table: dict[Strategy, FloatArray], best_static: Strategy, pruning: PruningSettings
) -> list[Strategy]:
    """Greedy: add what shortens the mean most, until within tolerance of all or out of communicators."""
    needed = count_communicators([best_static])
    if needed > pruning.max_communicators:
        raise HydraConfigError(
            f"the best static strategy {best_static} needs {needed} communicators, more than "
            f"{pruning.max_communicators}; allow {needed} or more (--max-communicators, or "
            "hydra.max_process_groups, half of which is for other strategies)"
        )
    goal_ms = float(np.min(list(table.values()), axis=0).mean()) * (1 + pruning.tolerance)
    chosen, times = [best_static], table[best_static]
    open_ = [strategy for strategy in table if strategy != best_static]
    while open_ and times.mean() > goal_ms:
        affordable = [s for s in open_ if count_communicators([*chosen, s]) <= pruning.max_communicators]
        gains = [float((times - np.minimum(times, table[s])).mean()) for s in affordable]
        if not affordable or max(gains) <= 0:
            break
        added = affordable[int(np.argmax(gains))]
        chosen.append(added)
        times = np.minimum(times, table[added])
        open_.remove(added)
    return chosen


def _describe(
    candidates: Sequence[ProposedStrategy],
    table: dict[Strategy, FloatArray],
    chosen: Sequence[Strategy],
    best_static: Strategy,
    num_devices: int,
    context_length: int,
    tokens_per_iteration: int,
) -> Proposal:
    times = np.stack([table[strategy] for strategy in chosen])
    won = Counter(np.argmin(times, axis=0).tolist())
    lengths_of = {c.strategy: c.max_lengths_tokens for c in candidates}
    kept = [
        KeptStrategy(
            strategy=strategy,
            share_won=won[index] / times.shape[1],
            max_lengths_tokens=lengths_of.get(strategy, ()),
            is_best_static=strategy == best_static,
        )
        for index, strategy in enumerate(chosen)
    ]
    return Proposal(
        num_devices=num_devices,
        context_length=context_length,
        tokens_per_iteration=tokens_per_iteration,
        kept=tuple(sorted(kept, key=lambda k: -k.share_won)),
        num_candidates=len(candidates),
        num_communicators=count_communicators(chosen),
        kept_ms=float(times.min(axis=0).mean()),
        all_candidates_ms=float(np.min(list(table.values()), axis=0).mean()),
        best_static_ms=float(table[best_static].mean()),
    )
