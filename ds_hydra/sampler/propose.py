"""Proposal of a run's candidate strategies: those of the histogram's program that win sampled
global batches.

`strategy.proposal` finds strategies for the dataset as a whole. Here the planner decides between
them on global batches drawn from the same histogram, and the smallest set that is as fast stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.configs.hydra_config import Space
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner.menus import find_menus, menu_entries
from ds_hydra.sampler.planner.phase_plan import PlanningProblem
from ds_hydra.sampler.sample_bench import (
    TOLERANCE,
    CandidateSettings,
    SampleBench,
    TellProgress,
    sample_batches,
)
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import (
    ProposalSettings,
    check_context,
    homogeneous_strategies,
    propose_from_histogram,
    usable_schemes,
)
from ds_hydra.strategy.schemes.enumeration import STRATEGIES_SCHEMA, full_strategies
from ds_hydra.strategy.schemes.placement import (
    MAX_GROUPS_OF_RANK,
    GroupKey,
    count_groups,
    groups_of_all,
    most_groups_of_rank,
)
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, schemes_of

_MAX_SINGLE_STAGE = 2000
"""Strategies of <TP,1> that are all tried, if there are no more; 64 devices have some hundred."""
_CKPT_STEPS = 4
"""Shares of checkpointed layers of which menus are tried."""
_NUM_DECIDING = 8
"""Global batches that decide between menus."""
_MAX_MENUS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStrategy:
    """A candidate that stays, and why.

    `share_won` is its share of the sampled global batches, planned with the kept set.
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
                f"{self.share_won:.0%} of the sampled global batches"
            )
        parts = [f"fastest for {self.share_won:.0%} of the sampled global batches"]
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
    """The candidate set of a run. Times are means over the sampled global batches, as planned, with
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
    """Milliseconds with the kept <TP,PP> alone; None where those do not fit every sequence."""
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


class GroupLimits(NamedTuple):
    """Most communicators that the candidates may need, and that one rank may be in."""

    num_groups: int
    num_groups_of_rank: int = MAX_GROUPS_OF_RANK

    def allow(self, groups: Collection[GroupKey]) -> bool:
        """Whether `groups` are no more."""
        is_enough = len(groups) <= self.num_groups
        return is_enough and most_groups_of_rank(groups) <= self.num_groups_of_rank


def propose_among(
    world: World,
    histogram: LengthHistogram,
    settings: CandidateSettings,
    *,
    start: Sequence[Strategy],
    limits: GroupLimits,
    gathered: Profile,
    progress: TellProgress | None,
) -> Proposal:
    """The smallest candidate set found that is as fast as all candidates on sampled global batches.

    It begins with strategies of <TP,PP>. The best static one always stays, so that every sequence
    of the context has a place and the set is never slower than static training. Or the strategies
    of `start` stay in its place. Then strategies of the other schemes of `world` come on top
    where they make the sampled global batches faster. Finally, gathered schemes of `gathered`
    are added that phases can be composed from.

    Raises HydraConfigError if no scheme of the space holds the context, or if the best static
    strategy alone needs more communicators than allowed.
    """
    world, space = world.linked_by(None), settings.space
    histogram = histogram.limit(settings.context_length)
    is_extended = not all(scheme.is_plain for scheme in usable_schemes(world, space))
    plain_fits = bool(homogeneous_strategies(world)) or not is_extended
    spaces: list[Space] = ["plain"] if plain_fits and not start else []
    spaces += [space] if is_extended else []
    if not is_extended and not start:
        check_context(world, advises_full=True)

    bench = SampleBench(sample_batches(histogram, settings), world, settings)
    choice = _Choice(limits, [*start], [*start])
    # Rated first: `grow` measures gains against what is chosen
    for strategy in start:
        choice.table[strategy] = bench.times_ms(strategy)
    proposed = _of_program(world, histogram, settings) if "plain" in spaces else {}
    plain = choice.chosen
    for turn, each in enumerate(spaces):
        show = _in_turn(progress, turn, len(spaces))
        for strategy in _candidates(bench, choice, each, proposed, show):
            choice.table[strategy] = bench.times_ms(strategy)
        choice.grow()
        plain = choice.chosen if each == "plain" else plain
    for_phases = _with_phases(bench, choice, gathered)
    return _describe(bench, choice, plain, proposed, for_phases)


@dataclass(slots=True)
class _Choice:
    """Candidates that were rated, and those of them that a run gets."""

    limits: GroupLimits
    staying: list[Strategy]
    """Strategies that a run gets whatever they win."""
    chosen: list[Strategy]
    table: dict[Strategy, FloatArray] = field(default_factory=dict)
    """Time of each global batch, [global batch], with each candidate that was rated."""

    def keep(self, strategy: Strategy) -> None:
        """Lets `strategy` stay whatever it wins."""
        self.chosen = [*self.chosen, strategy]
        self.staying.append(strategy)

    @property
    def times_ms(self) -> FloatArray:
        """Milliseconds of each global batch, with the best of the chosen ones."""
        times: FloatArray = np.min([self.table[strategy] for strategy in self.chosen], axis=0)
        return times

    def grow(self) -> None:
        """Choose greedily: add the strategy that shortens the mean most, until within the tolerance
        of all or out of communicators.

        One strategy at least has been chosen that has a time for every global batch.
        """
        times, limits = self.times_ms, self.limits
        goal_ms = float(np.min(list(self.table.values()), axis=0).mean()) * (1 + TOLERANCE)
        open_ = [strategy for strategy in self.table if strategy not in self.chosen]
        while open_ and times.mean() > goal_ms:
            affordable = [s for s in open_ if count_groups([*self.chosen, s]) <= limits.num_groups]
            gains = [float((times - np.minimum(times, self.table[s])).mean()) for s in affordable]
            if not affordable or max(gains) <= 0:
                break
            added = affordable[int(np.argmax(gains))]
            # Refused for its groups or taken, it need not be looked at again: no group goes away
            open_.remove(added)
            # Asked of the best one alone, because it looks at the groups of every rank.
            if not limits.allow(groups_of_all([*self.chosen, added])):
                continue
            self.chosen = [*self.chosen, added]
            times = np.minimum(times, self.table[added])


def _of_program(
    world: World, histogram: LengthHistogram, settings: CandidateSettings
) -> dict[Strategy, tuple[int, ...]]:
    """Strategies of <TP,PP> near those of the histogram's program, and the maximum lengths that
    they suit.
    """
    # 128 tokens are the paper's step for 32K; a short context needs its own for schemes to differ.
    step = max(1, min(128, settings.context_length // 16))
    steps = ProposalSettings(tokens_per_iteration=settings.num_tokens, length_step=step)
    return propose_from_histogram(world, histogram, steps)


def _candidates(
    bench: SampleBench,
    choice: _Choice,
    space: Space,
    proposed: Iterable[Strategy],
    progress: TellProgress | None,
) -> Iterator[Strategy]:
    """Strategies of `space` that are worth a rating, beside those chosen so far."""
    schemes = usable_schemes(bench.world, space)
    if space == "plain":
        single = [scheme for scheme in schemes if scheme.pp == 1]
        tried = dict.fromkeys(proposed)
        tried |= dict.fromkeys(full_strategies(single, bench.world.num_devices, _MAX_SINGLE_STAGE))
        yield from bench.winners_near(tuple(tried), schemes, progress)
    # At most once: the next space begins with the static one of the space before
    if not any(map(bench.fits_context, choice.chosen)):
        check_context(bench.world, schemes)
        static = bench.best_static(space)
        _check_communicators(static, choice.limits)
        choice.keep(static)
        yield static
    if space != "plain":
        yield from bench.climb(choice.chosen, schemes, progress)


class ForPhases(NamedTuple):
    """Strategies of one gathered scheme each, beside the candidates `chosen`, and the times of
    global batches with all of them. See [Note: Phases]. `are_refused`: whether there were others,
    for which communicators are missing.
    """

    chosen: Sequence[Strategy]
    strategies: tuple[Strategy, ...]
    times_ms: FloatArray
    are_refused: bool = False


def _with_phases(bench: SampleBench, choice: _Choice, profile: Profile) -> ForPhases:
    """The candidates, with gathered schemes of `profile` that phases can be composed from."""
    limits, table = choice.limits, choice.table
    found = propose_phases(bench, profile, limits, choice.chosen, choice.times_ms)
    if found.are_refused and len(choice.chosen) > len(choice.staying):
        # The candidates leave no communicators: phases beside those that stay, and then what is
        # still worth a place beside both
        times_ms = np.min([table[strategy] for strategy in choice.staying], axis=0)
        instead = propose_phases(bench, profile, limits, choice.staying, times_ms)
        own = instead.strategies
        # Phases are made of all of `own` together, so each has the time of all
        grown = replace(
            choice,
            chosen=[*dict.fromkeys([*choice.staying, *own])],
            table={**table, **dict.fromkeys(own, instead.times_ms)},
        )
        grown.grow()
        if grown.times_ms.mean() < found.times_ms.mean():
            chosen = [s for s in grown.chosen if s not in own or s in choice.staying]
            found = ForPhases(chosen, own, grown.times_ms)
    more = groups_of_gathered(found.chosen, found.strategies, bench.settings.num_devices, limits)
    if more:
        every = (*found.chosen, *found.strategies, *more)
        # Plans price schemes by this table alone, and `profile` may lack some of them
        known = Costs(profile).extended(schemes_of(every))
        return ForPhases(
            found.chosen,
            (*found.strategies, *more),
            bench.with_phases_ms(every, found.times_ms, known),
        )
    return found


def propose_phases(
    bench: SampleBench,
    profile: Profile,
    limits: GroupLimits,
    beside: Sequence[Strategy],
    known_ms: FloatArray,
) -> ForPhases:
    """Strategies of gathered schemes of `profile`, at most two menus of them, whose phases make the
    global batches faster than `known_ms` [global batch]; none where none does.
    """
    # Some global batches decide; what was chosen is then rated on all
    best = known_ms[:_NUM_DECIDING]
    menus = dict(enumerate(_menus(profile, bench.settings)))
    chosen: tuple[Strategy, ...] = ()
    # Groups of the candidates beside are there in any case: menus may use them
    are_refused, taken = False, groups_of_all(beside)
    for _ in range(_MAX_MENUS):
        # Menus may share strategies
        tried = {n: tuple(dict.fromkeys((*chosen, *own))) for n, own in menus.items()}
        times = {
            number: bench.with_phases_ms(strategies, best, profile)
            for number, strategies in tried.items()
            if limits.allow(taken | groups_of_all(strategies))
        }
        are_refused |= len(times) < len(tried)
        number = min(times, key=lambda n: float(times[n].mean()), default=None)
        if number is None or times[number].mean() > (1 - TOLERANCE) * best.mean():
            break
        chosen, best = tried[number], times[number]
        del menus[number]
    if chosen:
        known_ms = bench.with_phases_ms(chosen, known_ms, profile)
    return ForPhases(beside, chosen, known_ms, are_refused)


def _menus(profile: Profile, settings: CandidateSettings) -> Iterable[tuple[Strategy, ...]]:
    """Strategies of one scheme, one for each number of ranks; each menu once."""
    found: dict[tuple[Strategy, ...], None] = {}
    number, layers = settings.num_devices, profile.memory.num_layers
    planning = PlanningProblem(GlobalBatch.of_lengths(()), profile, number)  # prices and MaxLen
    # The planner makes hpz of these itself; checkpointed layers follow below
    known = (s for s in profile.latency if s.gathering == (True, False) and not s.ckpt)
    gathered = [scheme for scheme in known if profile.memory.knows(scheme)]
    # A profile with checkpointing has all layers checkpointed already
    for step in [0] if profile.is_checkpointed else range(_CKPT_STEPS + 1):
        ckpt = -(-layers * step // _CKPT_STEPS)
        schemes = [replace(scheme, ckpt=ckpt) for scheme in gathered]
        schemes = [scheme for scheme in schemes if settings.can_run(scheme)]
        # Sizes that do not divide the ranks need more communicators
        even = [scheme for scheme in schemes if number % scheme.num_devices == 0]
        # Fewer still where every group is cut in one way
        by_context = [s for s in even if s.tp == 1 and (s.sp == 1 or s.context_first)]
        for own in (schemes, even, by_context):
            menus = find_menus(menu_entries(planning, own), number)
            found |= dict.fromkeys(menu.alike(number) for menu in menus)
    return found


def groups_of_gathered(
    chosen: Sequence[Strategy],
    menus: Sequence[Strategy],
    num_devices: int,
    limits: GroupLimits,
) -> tuple[Strategy, ...]:
    """Strategies of one scheme for the gathered schemes of `chosen`, where their numbers of ranks
    differ and beside `menus` there are communicators for them, those of the fewest groups first.

    With all groups of a size the planner may cut the ranks anew for every step. Candidates are the
    fastest on average; phases of the same groups hold a global batch that none of them suits. All
    sizes are there with as many checkpointed layers as the widest has, too, whose groups hold what
    is longest.
    """
    alike: dict[int, dict[Strategy, int]] = {}
    used = dict.fromkeys(s for strategy in chosen for s in strategy.schemes)
    gathered = [s for s in used if s.gather and s.ep == 1 and num_devices % s.num_devices == 0]
    if gathered:
        widest = max(gathered, key=lambda scheme: scheme.num_devices)
        gathered += [
            replace(scheme, ckpt=widest.ckpt, offload=widest.offload) for scheme in gathered
        ]
    for scheme in dict.fromkeys(gathered):
        strategy = Strategy.alike(scheme, num_devices)
        alike.setdefault(scheme.ckpt, {})[strategy] = scheme.num_devices
    # Ranks can be cut into groups of one size in one way: nothing is there to put together
    wanted = [s for of_kind in alike.values() if len({*of_kind.values()}) > 1 for s in of_kind]
    found: list[Strategy] = []
    for strategy in sorted(wanted, key=lambda strategy: count_groups([strategy])):
        is_there = strategy in chosen or strategy in menus
        if not is_there and limits.allow(groups_of_all([*chosen, *menus, *found, strategy])):
            found.append(strategy)
    return tuple(found)


def _in_turn(progress: TellProgress | None, turn: int, num_turns: int) -> TellProgress | None:
    """`progress` of one of several rounds over the global batches, as part of all of them."""
    if progress is None:
        return None
    return lambda done, total: progress(turn * total + done, num_turns * total)


def _check_communicators(static: Strategy, limits: GroupLimits) -> None:
    needed = count_groups([static])
    if needed > limits.num_groups:
        raise HydraConfigError(
            f"the best static strategy {static} needs {needed} communicators, more than "
            f"{limits.num_groups}; allow {needed} or more (--max-communicators, or "
            "hydra.max_process_groups, half of which is for other strategies)"
        )


def _describe(
    bench: SampleBench,
    choice: _Choice,
    plain: Sequence[Strategy],
    proposed: Mapping[Strategy, tuple[int, ...]],
    for_phases: ForPhases,
) -> Proposal:
    table, chosen, settings = choice.table, for_phases.chosen, bench.settings
    times = np.stack([table[strategy] for strategy in chosen])
    # Among strategies alone: what phases win is one share for all of theirs
    won = Counter(np.argmin(times, axis=0).tolist())
    static = [s for s in chosen if not s.is_heterogeneous and bench.fits_context(s)]
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
    kept.sort(key=lambda k: -k.share_won)
    share = float((for_phases.times_ms < times.min(axis=0)).mean())
    kept += [
        KeptStrategy(strategy=s, share_won=share, is_for_phases=True)
        for s in for_phases.strategies
        if s not in chosen
    ]
    profile = bench.world.profile
    # Schemes of phases may have no entry here: what is not measured is assumed
    measured = profile.latency.keys() - profile.assumed
    assumed = schemes_of(chosen) & profile.assumed
    assumed |= schemes_of(for_phases.strategies) - measured
    return Proposal(
        space=settings.space,
        num_devices=settings.num_devices,
        context_length=settings.context_length,
        tokens_per_iteration=settings.num_tokens,
        kept=tuple(kept),
        num_candidates=len({*proposed, *table, *for_phases.strategies}),
        num_communicators=count_groups([*chosen, *for_phases.strategies]),
        assumed=tuple(sorted(assumed)),
        kept_ms=float(for_phases.times_ms.mean()),
        plain_ms=plain_ms if np.isfinite(plain_ms) else None,
        all_candidates_ms=float(np.min(list(table.values()), axis=0).mean()),
        best_static_ms=None if best_static is None else float(table[best_static].mean()),
    )
