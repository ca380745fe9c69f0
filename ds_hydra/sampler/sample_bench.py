"""Sampled global batches on which candidates are rated, and settings of the choice beside profile
and lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from ds_hydra.configs.hydra_config import HydraConfig, Space
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner.dispatch import dispatch_trials
from ds_hydra.sampler.planner.iteration import times_alone
from ds_hydra.sampler.planner.menus import plan_phases
from ds_hydra.sampler.planner.phase_plan import PlanningProblem
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.planner.problem import DispatchProblem, PipelineKind, make_problem
from ds_hydra.sampler.schedule import BoolArray, FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.cost_models.costs import CanRun, Costs, World, runs_all
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import default_tokens_per_iteration, homogeneous_strategies
from ds_hydra.strategy.schemes.enumeration import neighbour_strategies
from ds_hydra.strategy.schemes.placement import group_limit
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION, Scheme, Strategy

TellProgress = Callable[[int, int], None]
"""Called with the number of global batches planned and their total."""

HEURISTIC = PlannerSettings().heuristic()

MAX_ENUMERATED_RANKS = 8
"""Ranks up to which every strategy of two schemes is a candidate; for more, the lengths of the data
decide.
"""

UNEVEN_STEPS = 1.5
"""Factor of lockstep on the estimate where pipelines have different numbers of micro-batches: one
with two beside others with one.
"""

_MANY = 4_500_000
"""Number of dispatched sequences, of all global batches for all candidates, above which half of the
global batches have to do.
"""
_FEWEST_BATCHES, _MOST_BATCHES, _ENOUGH = 4, 32, 8_000
"""Global batches of a sample, and the sequences that are enough: a large global batch is a sample
of lengths by itself.
"""
TOLERANCE = 0.002
"""Share by which the set that stays may be slower than the set of all candidates, on average over
the sampled global batches.
"""
_MAX_PLANNED = 24
"""Strategies that are planned for a global batch; of more, those among the best of one greedy
dispatch.
"""
_LEAST_GAIN = 1e-3
"""Least share by which a strategy makes the estimates of all faster, or it is not planned."""
# Four steps and 24 strategies instead of 40 make simulated iterations half a percent longer.
_MOST_STEPS = 5
_NUM_SCREENED, _NUM_TRIED = 24, 40
_REACH = 0.05
"""Strategies are planned for a global batch whose estimate is at most so much above the best
one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSettings:
    """Settings for the choice of candidates beside profile and lengths.

    `tokens_per_iteration`: None for the paper's budget. `given`: strategies of the user, which are
    then all. `staying`: strategies whose process groups stay beside those of a proposal on many
    devices, if not those without lengths. `can_run`: whether the model runs a scheme on these
    devices. `cluster`: what pull and push cost, which count where it is known. `max_groups`:
    process groups there may be (None: `group_limit`), of which `num_link_groups` are those of pull
    and push. `max_enumerated`: devices up to which all strategies of two schemes are candidates.

    How proposed ones are tried: on `num_batches` global batches drawn with `seed` (None: 32, fewer
    where these have more than `_ENOUGH` sequences together), by plans of `planner`.
    """

    num_devices: int
    context_length: int
    tokens_per_iteration: int | None = None
    given: tuple[Strategy, ...] = ()
    staying: tuple[Strategy, ...] = ()
    space: Space = "full"
    can_run: CanRun = runs_all
    cluster: Cluster | None = None
    max_groups: int | None = None
    num_link_groups: int = 2
    max_enumerated: int = MAX_ENUMERATED_RANKS
    num_batches: int | None = None
    seed: int = 0
    planner: PlannerSettings = HEURISTIC

    @classmethod
    def of(
        cls,
        config: HydraConfig,
        *,
        num_devices: int,
        given: Sequence[Strategy],
        staying: Sequence[Strategy] = (),
        can_run: CanRun,
        cluster: Cluster | None,
        num_link_groups: int,
    ) -> CandidateSettings:
        """The settings of a validated configuration."""
        return cls(
            num_devices=num_devices,
            context_length=config.context_length,
            tokens_per_iteration=config.tokens_per_iteration,
            given=tuple(given),
            staying=tuple(staying),
            space=config.planner.space,
            can_run=can_run,
            cluster=cluster,
            max_groups=config.max_process_groups,
            num_link_groups=num_link_groups,
            max_enumerated=MAX_ENUMERATED_RANKS,
            seed=config.seed,
            planner=replace(
                HEURISTIC,
                overlaps_links=config.link.overlap,
                forward_fraction=config.forward_fraction,
            ),
        )

    @property
    def group_limit(self) -> int:
        """`max_groups`, or as many as there are without it."""
        return group_limit(self.num_devices, self.max_groups)

    def world(self, profile: Profile) -> World:
        """The World (devices, costs, context) for `profile`."""
        return World(
            costs=Costs(profile, self.cluster),
            num_devices=self.num_devices,
            context_length=self.context_length,
            can_run=self.can_run,
        )

    @property
    def is_enumerated(self) -> bool:
        """Whether all strategies of two schemes are candidates."""
        return self.num_devices <= self.max_enumerated

    @property
    def num_tokens(self) -> int:
        """Tokens of a global batch."""
        return self.tokens_per_iteration or default_tokens_per_iteration(
            self.num_devices, self.context_length
        )


class SampleBench:
    """The same global batches, planned with different candidates."""

    def __init__(
        self, batches: Sequence[GlobalBatch], world: World, settings: CandidateSettings
    ) -> None:
        self.world, self.settings, self.batches = world, settings, batches
        self._known: list[dict[Strategy, float]] = [{} for _ in batches]

    def fits_context(self, strategy: Strategy) -> bool:
        """Whether a sequence of the context has a place in `strategy`."""
        longest = max(self.world.max_len_tokens(s) for s in dict.fromkeys(strategy.schemes))
        return longest >= self.world.context_length

    def best_static(self, space: Space) -> Strategy:
        """The fastest strategy of one scheme that fits the context, on average."""
        static = homogeneous_strategies(self.world, space)
        return min(static, key=lambda strategy: float(self.times_ms(strategy).mean()))

    def winners_near(
        self,
        candidates: Sequence[Strategy],
        schemes: Iterable[Scheme],
        progress: TellProgress | None,
    ) -> list[Strategy]:
        """Strategies that win a global batch: of `candidates`, and of those a step away by one of
        `schemes`.
        """
        sequences = sum(len(batch.lengths) for batch in self.batches)
        many = len(candidates) * sequences > _MANY
        winners = self.winners(candidates, progress, share=1 / 2 if many else 1.0)
        near = dict.fromkeys(
            n for won in winners for n in (won, *neighbour_strategies(won, schemes))
        )
        return [*dict.fromkeys((*winners, *self.winners(tuple(near), None, share=1 / 2)))]

    def climb(
        self, start: Sequence[Strategy], schemes: Sequence[Scheme], progress: TellProgress | None
    ) -> list[Strategy]:
        """Strategies that may make the global batches faster beside `start`: those of one of
        `schemes`, and others by hill climbing: from the best set so far, every strategy one
        exchange of pipelines away is tried.

        Each is estimated by one greedy dispatch of some global batches.
        """
        # Exchanges keep to one kind of gathering, so each kind needs a strategy to start from
        alike = [Strategy.alike(scheme, self.world.num_devices) for scheme in schemes]
        screened: dict[Strategy, FloatArray] = {}
        chosen: list[Strategy] = [*start]
        for done in range(_MOST_STEPS):
            # A dict keeps the order, which decides between equal times.
            near = dict.fromkeys([*chosen, *alike])
            near |= dict.fromkeys(n for s in chosen for n in neighbour_strategies(s, schemes))
            new = [strategy for strategy in near if strategy not in screened]
            estimator = FastEstimator(new, self.world, self.settings.planner.forward_fraction)
            times = [estimator.estimates_ms(batch) for batch in self.batches[:_NUM_SCREENED]]
            screened |= dict(zip(new, np.array(times).T))
            before, chosen = chosen, fastest_together(start, screened, most=_NUM_TRIED)
            if progress is not None:
                progress(done + 1, _MOST_STEPS)
            # The same set has the same neighbours, and all of them are known by now
            if chosen == before:
                break
        return chosen

    def times_ms(self, strategy: Strategy) -> FloatArray:
        """Time of every global batch with `strategy` alone, inf where a sequence does not fit."""
        numbers = range(len(self.batches))
        return np.array([self._times_ms(number, [strategy])[0] for number in numbers])

    def _times_ms(self, number: int, strategies: Sequence[Strategy]) -> FloatArray:
        """Time of one global batch with each of `strategies`; each is planned once."""
        known = self._known[number]
        missing = [strategy for strategy in strategies if strategy not in known]
        if missing:
            planner = self._planner(missing).heuristic()
            planning = PlanningProblem(
                self.batches[number], self.world.profile, self.world.num_devices, planner
            )
            known.update(zip(missing, times_alone(planning, missing).tolist()))
        return np.array([known[strategy] for strategy in strategies])

    def with_phases_ms(
        self, strategies: Sequence[Strategy], known_ms: FloatArray, profile: Profile
    ) -> FloatArray:
        """`known_ms` of each of the first global batches, or the time of phases out of `strategies`
        by `profile` where that is less.
        """
        planner, found = self._planner(strategies), []
        # As many global batches as times are given: the first ones
        for batch, limit_ms in zip(self.batches, known_ms.tolist()):
            planning = PlanningProblem(batch, profile, self.world.num_devices, planner)
            found.append(plan_phases(planning, strategies, limit_ms).time_ms)
        return np.array(found)

    def _planner(self, strategies: Iterable[Strategy]) -> PlannerSettings:
        """Settings of the planner with link times of `strategies`, where a cluster is known."""
        planner, cluster = self.settings.planner, self.settings.cluster
        if cluster is None:
            return planner
        return replace(planner, link_times={s: cluster.link_times(s) for s in strategies})

    def winners(
        self, strategies: Sequence[Strategy], progress: TellProgress | None, share: float = 1.0
    ) -> list[Strategy]:
        """Strategies that are the planner's choice for a global batch at least, most frequent
        first.

        `share`: of the global batches that are looked at, rounded up.
        """
        won: Counter[Strategy] = Counter()
        estimator = None
        if len(strategies) > _MAX_PLANNED:
            fraction = self.settings.planner.forward_fraction
            estimator = FastEstimator(strategies, self.world, fraction)
        for number in range(ceil(share * len(self.batches))):
            tried = strategies
            if estimator is not None:
                estimates = estimator.estimates_ms(self.batches[number])
                best = np.argsort(estimates, kind="stable")[:_MAX_PLANNED]
                near = best[estimates[best] <= (1 + _REACH) * estimates[best[0]]]
                # In the order of the candidates: of equal times the first wins, whatever was
                # estimated.
                tried = [strategies[index] for index in np.sort(near)]
            won[tried[int(np.argmin(self._times_ms(number, tried)))]] += 1
            if progress is not None:
                progress(number + 1, len(self.batches))
        return [strategy for strategy, _ in won.most_common()]


def fastest_together(
    start: Sequence[Strategy], times_ms: Mapping[Strategy, FloatArray], *, most: int
) -> list[Strategy]:
    """`start`, or the fastest strategy where there is none, and one by one up to `most` that which
    makes global batches faster by most.

    `times_ms` [global batch] of each strategy, `start` among them.
    """
    chosen = list(start) or [min(times_ms, key=lambda s: float(times_ms[s].mean()))]
    best = np.min([times_ms[strategy] for strategy in chosen], axis=0)
    open_ = [strategy for strategy in times_ms if strategy not in chosen]
    times = np.array([times_ms[strategy] for strategy in open_]).reshape(len(open_), best.size)
    while len(chosen) < min(most, len(times_ms)):
        means = np.minimum(best, times).mean(axis=1)
        added = int(np.argmin(means))
        # Ends as well where both means are infinite, because a batch fits nowhere
        if not means[added] < (1 - _LEAST_GAIN) * best.mean():
            break
        # It need not leave the open ones: it makes nothing faster a second time.
        chosen.append(open_[added])
        best = np.minimum(best, times[added])
    return chosen


def sample_batches(
    histogram: LengthHistogram, settings: CandidateSettings
) -> tuple[GlobalBatch, ...]:
    """The global batches of `settings`, drawn from `histogram`."""
    number = settings.num_batches
    if number is None:
        # Sequences of a global batch in the mean
        of_each = settings.num_tokens * histogram.num_sequences / histogram.num_tokens
        number = min(_MOST_BATCHES, max(_FEWEST_BATCHES, ceil(_ENOUGH / of_each)))
    drawn = histogram.draw_batches(settings.num_tokens, number, settings.seed)
    return tuple(
        GlobalBatch(
            iteration=iteration,
            sample_indices=tuple(range(len(lengths))),
            lengths=tuple(lengths.tolist()),
            # The first token of a sequence is predicted by nothing
            num_label_tokens=int((lengths - 1).sum()),
        )
        for iteration, lengths in enumerate(drawn)
    )


class FastEstimator:
    """Estimates of a global batch under each of many strategies by one greedy dispatch, to find
    those that are worth a plan. Arrays are in the form that compiled code works on.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        world: World,
        forward_fraction: float = FORWARD_FRACTION,
    ) -> None:
        self._forward_fraction = forward_fraction
        placed = dict.fromkeys(scheme for strategy in strategies for scheme in strategy.schemes)
        schemes: list[Scheme] = []
        for kind in sorted({scheme.gathering for scheme in placed}):  # a strategy has one kind
            alike = tuple(scheme for scheme in placed if scheme.gathering == kind)
            # In the order of placement, by which a dispatch decides between kinds that end
            # together.
            schemes += Strategy(alike).schemes
        column = {scheme: k for k, scheme in enumerate(schemes)}
        self._counts = np.zeros((len(strategies), len(schemes)), dtype=np.int64)
        self._max_len = np.zeros((len(strategies), len(schemes)), dtype=np.int64)
        for row, strategy in enumerate(strategies):
            for scheme, count in Counter(strategy.schemes).items():
                self._counts[row, column[scheme]] = count
                longest = world.max_len_tokens(scheme)
                self._max_len[row, column[scheme]] = max(0, longest)
        self._gathers = np.array([strategy.gathers for strategy in strategies], dtype=np.bool_)
        # MaxLen 1 stands for what `_screen` puts in its place: it depends on the strategy
        self._kinds = [
            PipelineKind(1, scheme.pp, 1, world.profile.get_latency(scheme)) for scheme in schemes
        ]

    def estimates_ms(self, batch: GlobalBatch) -> FloatArray:
        """Time of the slowest pipeline of each strategy after one trial of Alg. 1, without
        packing; inf where a sequence does not fit.
        """
        lengths = np.sort(np.array(batch.lengths, dtype=np.int64))[::-1]
        found = np.zeros(self._counts.shape[0])
        if lengths.size and found.size:
            every = make_problem(lengths, self._kinds, forward_fraction=self._forward_fraction)
            _screen(every, self._counts, self._max_len, self._gathers, found)
        return found


@compiled
def _screen(
    every: DispatchProblem,
    counts: IntArray,
    max_len: IntArray,
    gathers: BoolArray,
    found: FloatArray,
) -> None:
    """Writes the estimate of each strategy; `every` has one pipeline of each kind there is."""
    assignment = np.zeros(every.lengths.size, dtype=np.int64)
    for row in range(counts.shape[0]):
        kinds = np.flatnonzero(counts[row])
        # Lengths descend: if the first one fits somewhere, all do.
        if max_len[row].max() < every.lengths[0]:
            found[row] = np.inf
            continue
        # Rows of one table: T of all sequences was computed once for all strategies
        problem = DispatchProblem(
            every.lengths,
            every.sequence_ms[kinds],
            np.repeat(np.arange(kinds.size), counts[row][kinds]),
            every.num_stages[kinds],
            every.constant_ms[kinds],
            every.traffic_ms[kinds],
            max_len[row][kinds],
            every.ratio[kinds],
            every.share[kinds],
            every.forward_fraction,
            every.is_exact,
            every.is_eq2,
        )
        found[row] = dispatch_trials(problem, 1, 0, assignment)
        if gathers[row]:
            tokens = np.zeros(problem.kind_of.size)
            for i in range(assignment.size):
                tokens[assignment[i]] += every.lengths[i]
            # Nothing is packed here: the fewest micro-batches that hold the tokens stand for steps.
            steps = np.ceil(tokens / np.maximum(problem.max_len_tokens[problem.kind_of], 1))
            if steps.max() > max(1.0, steps.min()):  # some wait for others in lockstep
                found[row] *= UNEVEN_STEPS
