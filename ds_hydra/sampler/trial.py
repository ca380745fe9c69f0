"""Sampled mini-batches, on which candidates are tried: which strategy wins how many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from ds_hydra.configs.hydra_config import MAX_PROCESS_GROUPS, Space
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner import heuristic_times
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.sampler.screening import Screen
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.profiles.link_times import LinkTimes
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import (
    homogeneous_strategies,
)
from ds_hydra.strategy.schemes.neighbours import neighbour_strategies
from ds_hydra.strategy.schemes.placement import MAX_GROUPS_OF_RANK
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

Progress = Callable[[int, int], None]
"""Called with the number of mini-batches planned and their total."""

HEURISTIC = PlannerSettings().heuristic()

_MANY = 4_500_000
"""Above so many dispatched sequences, of all mini-batches for all candidates, half of the
mini-batches have to do.
"""
_LEAST_GAIN = 1e-3
"""By so much a strategy makes the estimates of all faster, or it is not planned."""
_MOST_STEPS = 5
_NUM_SCREENED, _NUM_TRIED = 24, 40
_REACH = 0.05
"""Strategies are planned for a mini-batch whose estimate is at most so much above the best one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningSettings:
    """How candidates are tried out.

    `num_rounds`: how often the strategies one step away from the winners are tried too.
    `max_planned`: strategies that are planned for a mini-batch; of more, those among the best of
    one greedy dispatch. `tolerance`: how much slower, on average over the sampled mini-batches, the
    set that stays may be than the set of all candidates. `max_communicators`:
    process groups that the set may need at most, `max_groups_of_rank` those of one rank.
    `links_of`: pull and push of a strategy, which then count; None where they are not known.
    """

    num_batches: int = 32
    max_planned: int = 24
    num_rounds: int = 1
    tolerance: float = 0.002
    max_communicators: int = MAX_PROCESS_GROUPS
    max_groups_of_rank: int = MAX_GROUPS_OF_RANK
    seed: int = 0
    planner: PlannerSettings = HEURISTIC
    links_of: Callable[[Strategy], LinkTimes] | None = None


DEFAULT_PRUNING = PruningSettings()


class Trial:
    """Plans the same mini-batches with different candidates."""

    def __init__(
        self,
        batches: Sequence[GlobalBatch],
        profile: Profile,
        num_devices: int,
        context_length: int,
        pruning: PruningSettings,
    ) -> None:
        self.profile, self.num_devices, self.context_length = profile, num_devices, context_length
        self._batches, self._pruning = batches, pruning
        self._numbers = range(len(batches))
        self._known: list[dict[Strategy, float]] = [{} for _ in batches]

    def fits_context(self, strategy: Strategy) -> bool:
        """Whether a sequence of the context has a place in `strategy`."""
        return self._longest(strategy) >= self.context_length

    def _longest(self, strategy: Strategy) -> int:
        return max(
            self.profile.max_len_tokens(s, self.num_devices, strategy)
            for s in dict.fromkeys(strategy.schemes)
        )

    def best_static(self, space: Space) -> tuple[Strategy, FloatArray]:
        """The fastest strategy of one scheme that fits the context, on average, and its times."""
        world = World.of(self.profile, None, self.num_devices, self.context_length)
        static = homogeneous_strategies(world, space)
        times = {strategy: self.times_ms(strategy) for strategy in static}
        return min(times.items(), key=lambda item: float(item[1].mean()))

    def search(
        self, candidates: Sequence[Strategy], schemes: Iterable[Scheme], progress: Progress | None
    ) -> dict[Strategy, FloatArray]:
        """Times of the strategies that win a mini-batch: `candidates`, and those a step away by one
        of `schemes`.
        """
        sequences = sum(len(batch.lengths) for batch in self._batches)
        many = len(candidates) * sequences > _MANY
        winners = self.winners(candidates, progress, share=1 / 2 if many else 1.0)
        for _ in range(self._pruning.num_rounds):
            near = dict.fromkeys(
                n for won in winners for n in (won, *neighbour_strategies(won, schemes))
            )
            winners = tuple(
                dict.fromkeys((*winners, *self.winners(tuple(near), None, share=1 / 2)))
            )
        return {strategy: self.times_ms(strategy) for strategy in winners}

    def search_near(
        self, start: Sequence[Strategy], schemes: Sequence[Scheme], progress: Progress | None
    ) -> dict[Strategy, FloatArray]:
        """Times of the strategies that may make the mini-batches faster beside `start`: those of
        one of `schemes`, and what exchanges of pipelines lead to from them and from `start`, one
        step at a time, each from the best set so far.

        Each is estimated by one greedy dispatch of some mini-batches; the best set is planned.
        """
        number = self.num_devices
        alike = [Strategy((s,) * (number // s.num_devices)) for s in schemes]
        screened: dict[Strategy, FloatArray] = {}
        chosen: list[Strategy] = [*start]
        for done in range(_MOST_STEPS):
            near = dict.fromkeys([*chosen, *alike])
            near |= dict.fromkeys(n for s in chosen for n in neighbour_strategies(s, schemes))
            new = [strategy for strategy in near if strategy not in screened]
            screen = Screen(new, self.profile, number)
            times = [screen.estimates_ms(batch) for batch in self._batches[:_NUM_SCREENED]]
            screened |= dict(zip(new, np.array(times).T))
            before, chosen = chosen, fastest_together(start, screened, most=_NUM_TRIED)
            if progress is not None:
                progress(done + 1, _MOST_STEPS)
            if chosen == before:
                break
        return {strategy: self.times_ms(strategy) for strategy in chosen}

    def times_ms(self, strategy: Strategy) -> FloatArray:
        """Time of every mini-batch with `strategy` alone, inf where a sequence does not fit."""
        return np.array([self._times_ms(number, [strategy])[0] for number in self._numbers])

    def _times_ms(self, number: int, strategies: Sequence[Strategy]) -> FloatArray:
        """Time of one mini-batch with each of `strategies`; each is planned once."""
        known = self._known[number]
        missing = [strategy for strategy in strategies if strategy not in known]
        if missing:
            times = heuristic_times(
                self._batches[number],
                strategies=missing,
                profile=self.profile,
                num_devices=self.num_devices,
                settings=self._settings(missing),
            )
            known.update(zip(missing, times.tolist()))
        return np.array([known[strategy] for strategy in strategies])

    def winners(
        self, strategies: Sequence[Strategy], progress: Progress | None, share: float = 1.0
    ) -> tuple[Strategy, ...]:
        """Strategies that are the planner's choice for a mini-batch at least, most frequent first.

        `share`: of the mini-batches that are looked at, rounded up.
        """
        won: Counter[Strategy] = Counter()
        screen = None
        if len(strategies) > self._pruning.max_planned:
            screen = Screen(
                strategies,
                self.profile,
                self.num_devices,
                num_trials=self._pruning.planner.num_trials,
                seed=self._pruning.planner.seed,
            )
        for number in self._numbers[: ceil(share * len(self._batches))]:
            tried = strategies
            if screen is not None:
                estimates = screen.estimates_ms(self._batches[number])
                best = np.argsort(estimates, kind="stable")[: self._pruning.max_planned]
                near = best[estimates[best] <= (1 + _REACH) * estimates[best[0]]]
                tried = [strategies[index] for index in np.sort(near)]
            won[tried[int(np.argmin(self._times_ms(number, tried)))]] += 1
            if progress is not None:
                progress(number + 1, len(self._batches))
        return tuple(strategy for strategy, _ in won.most_common())

    def _settings(self, strategies: Sequence[Strategy]) -> PlannerSettings:
        links_of = self._pruning.links_of
        times = (
            {strategy: links_of(strategy) for strategy in strategies}
            if links_of is not None
            else {}
        )
        return replace(self._pruning.planner, link_times=times)


def fastest_together(
    start: Sequence[Strategy], times_ms: Mapping[Strategy, FloatArray], *, most: int
) -> list[Strategy]:
    """`start`, or the fastest strategy where there is none, and one by one up to `most` that which
    makes mini-batches faster by most.

    `times_ms` [mini-batch] of each strategy, `start` among them.
    """
    chosen = list(start) or [min(times_ms, key=lambda s: float(times_ms[s].mean()))]
    best = np.min([times_ms[strategy] for strategy in chosen], axis=0)
    open_ = [strategy for strategy in times_ms if strategy not in chosen]
    times = np.array([times_ms[strategy] for strategy in open_]).reshape(len(open_), best.size)
    while len(chosen) < min(most, len(times_ms)):
        means = np.minimum(best, times).mean(axis=1)
        added = int(np.argmin(means))
        if not means[added] < (1 - _LEAST_GAIN) * best.mean():
            break
        chosen.append(open_[added])
        best = np.minimum(best, times[added])
    return chosen


def sample_batches(
    histogram: LengthHistogram, tokens_per_iteration: int, pruning: PruningSettings
) -> tuple[GlobalBatch, ...]:
    """The mini-batches of `pruning`, drawn from `histogram`."""
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
