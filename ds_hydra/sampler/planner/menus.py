"""Menus of groups of ranks, and phases of one global batch that are put together of them.

[Note: Phases]
Where all ranks gather layers for every pass (`;gather`), a strategy leaves nothing behind. So
pipelines may be cut anew for every micro-batch at no cost, and an iteration may run several
strategies one after another, its phases: long sequences on wide groups of all ranks, then short
ones on narrow groups of all ranks.

Such schemes are a menu of groups: the planner takes the schemes of strategies that gather, one for
each number of ranks, and cuts the ranks into them as it likes ([Note: Mixed groups]). Sizes divide
each other, so groups lie as they do under the strategies of one scheme on all ranks, whose
communicators the candidates need. Groups may have any power of two of ranks, too (24 ranks are
16 + 8), or all ranks. Steps are phases as they are. Where slices stay with the ranks, all sequences
run under one strategy.

Gathered weights may stay on the nodes (`hpz`), whatever the candidates say: groups are the same.
It costs memory, so it is tried where a step waits for weights, or where times were measured.

A search that goes step by step may end slower with more schemes. So it is made again among those
that a plan uses, and where that leaves the plan far above its bound, without each of these, with
each scheme alone, and with those that hold most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.planner.group_steps import GroupStep, MixedGroups, plan_steps
from ds_hydra.sampler.planner.phase_plan import PhasePlan, PlanningProblem
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.profiles.profile import LatencyModel, LinkTimes
from ds_hydra.strategy.schemes.enumeration import is_power_of_two
from ds_hydra.strategy.schemes.placement import GroupKey, ends_of_phases, groups_of, groups_of_all
from ds_hydra.strategy.schemes.scheme import MAX_PHASES, Scheme, Strategy

_MANY = 16
"""Equal sequences of a full micro-batch, for which a second menu is put together."""

_NESTED_GAP, _NESTED_MOST = 0.05, 2**16
"""Share above its lower bound by which a plan may be slower than one with fewer schemes, so that
these are looked at, and sequences times devices up to which there is time to.
"""


class MenuEntry(NamedTuple):
    """A scheme of a menu."""

    scheme: Scheme
    latency: LatencyModel
    """T, with the factor."""
    factor: float
    """T over that of the profile."""
    max_len_tokens: int
    link: LinkTimes
    """Pull and push."""

    def cost_of(self, num_sequences: int) -> tuple[float, int]:
        """Return ms a token of a full micro-batch of equal sequences; of equals the larger wins."""
        lengths = [max(1, self.max_len_tokens // num_sequences)] * num_sequences
        return self.latency.micro_batch_ms(lengths) / sum(lengths), -self.max_len_tokens


class GroupMenu(NamedTuple):
    """Schemes that the planner may cut the ranks into, one for each number of ranks."""

    entries: tuple[MenuEntry, ...]
    """Entries, those of the fewest ranks first."""

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Schemes of the entries."""
        return tuple(entry.scheme for entry in self.entries)

    @property
    def link(self) -> LinkTimes:
        """Pull and push of the scheme for which they take longest."""
        return max((entry.link for entry in self.entries), key=_total_ms)

    def alike(self, num_devices: int) -> tuple[Strategy, ...]:
        """The strategies of one scheme on all ranks, whose groups are those of the menu."""
        return tuple(_on_all_ranks(s, self.schemes[0], num_devices) for s in self.schemes)

    def groups_of_step(self, num_devices: int) -> MixedGroups:
        """Times of groups of its sizes."""
        return MixedGroups(
            num_devices,
            [entry.scheme.num_devices for entry in self.entries],
            [entry.max_len_tokens for entry in self.entries],
            [entry.latency.constant_ms for entry in self.entries],
            [entry.latency.sequences_ms for entry in self.entries],
        )

    def slices_of(self, step: GroupStep) -> tuple[tuple[int, int], ...]:
        """TP, and the ranks next to each other that have it: equal where ranks need the same
        slices.
        """
        known = zip(self.schemes, step.counts.tolist())
        runs = groupby(((s.tp, s.num_devices * n) for s, n in known if n), key=itemgetter(0))
        return tuple((tp, sum(ranks for _, ranks in run)) for tp, run in runs)

    def strategy_of(self, step: GroupStep) -> tuple[Strategy, IntArray]:
        """The strategy of a step, and in which of its pipelines each sequence is."""
        strategy = Strategy(tuple(s for s, n in zip(self.schemes, step.counts) for _ in range(n)))
        # A strategy sorts its schemes, and groups are numbered by size
        places = [np.flatnonzero([s == own for own in strategy.schemes]) for s in self.schemes]
        pipeline_of = np.concatenate(places)
        return strategy, pipeline_of[step.group_of]


def plan_phases(
    planning: PlanningProblem, strategies: Sequence[Strategy], limit_ms: float = np.inf
) -> BestPhases:
    """Phases out of the groups that `strategies` have ([Note: Phases]): each step of any of the
    menus, or of those with one TP alone; none that take `limit_ms` or more. Where a step waits for
    weights, these may stay on the nodes.
    """
    schemes = dict.fromkeys(s for strategy in strategies for s in strategy.schemes)
    groups, number = groups_of_all(strategies), planning.num_devices
    known = menu_entries(planning, schemes, groups)
    # Weights stay on the nodes in all pipelines of a strategy or in none: never one menu
    crossing, on_nodes = (
        [entry for entry in known if entry.scheme.hpz == hpz] for hpz in (False, True)
    )
    # First without hpz: these steps tell whether anything waits for weights
    best = BestPhases(planning, limit_ms)
    best.compose(_choices(crossing, number))
    there = {entry.scheme for entry in on_nodes}
    kept = _worth_keeping(planning, schemes, best.phases, there)
    on_nodes += menu_entries(planning, kept, groups)
    best.compose(_choices(on_nodes, number))
    if not best.phases:
        return best
    # A search among fewer schemes looks further
    used = {scheme for phase in best.phases for scheme in phase.strategy.schemes}
    fewer = [entry for entry in (*crossing, *on_nodes) if entry.scheme in used]
    best.compose(_choices(fewer, number))
    if planning.lengths.size * number > _NESTED_MOST:
        return best
    if best.time_ms > (1 + _NESTED_GAP) * _bound_ms(planning, [*crossing, *on_nodes]):
        for left_out in fewer:
            best.compose(_choices([one for one in fewer if one is not left_out], number))
        for alone in (*crossing, *on_nodes):
            # Groups of one size use all ranks only where it divides their number
            if number % alone.scheme.num_devices == 0:
                best.compose([[GroupMenu((alone,))]])
        best.compose(_choices(_roomiest(crossing), number))
        best.compose(_choices(_roomiest(on_nodes), number))
    return best


def _worth_keeping(
    planning: PlanningProblem,
    schemes: Iterable[Scheme],
    found: Sequence[PhasePlan],
    there: Collection[Scheme],
) -> list[Scheme]:
    """Return the gathered `schemes` with weights that stay on the nodes, without those `there`.

    None where that was not measured, no candidate asks for it, and no step of the phases that were
    `found` waits for weights.
    """
    latency_of = planning.profile.latency
    of_nodes = {scheme: own for scheme in schemes if (own := scheme.staying) != scheme}
    is_asked_for = there or any(scheme in latency_of for scheme in of_nodes.values())
    if found and not is_asked_for and not any(phase.waits_for_weights for phase in found):
        return []
    # `hpz_traffic_ms` is 0 where as much would cross, and memory would be spent for nothing
    get_latency = planning.profile.get_latency
    return [
        scheme
        for crossing, scheme in of_nodes.items()
        if scheme not in there and (scheme in latency_of or get_latency(crossing).hpz_traffic_ms)
    ]


def _roomiest(entries: Iterable[MenuEntry]) -> list[MenuEntry]:
    """Return the entry of most tokens for each number of ranks and of checkpointed layers: it may
    hold one sequence more than that which is fastest for a full micro-batch.
    """
    found: dict[tuple[int, int, bool], MenuEntry] = {}
    for entry in entries:
        key = (entry.scheme.num_devices, entry.scheme.ckpt, entry.scheme.offload)
        found[key] = max(found.get(key, entry), entry, key=lambda one: one.max_len_tokens)
    return list(found.values())


def _bound_ms(planning: PlanningProblem, entries: Sequence[MenuEntry]) -> float:
    """Return a lower bound of phases of `entries`: the longest sequence takes its time, and all
    together theirs, each where it takes devices least, in as few steps as hold them.
    """
    lengths, number = planning.lengths, planning.num_devices
    if not lengths.size:
        return 0.0
    table = np.array([entry.latency.sequences_ms(lengths) for entry in entries])
    sizes = np.array([entry.scheme.num_devices for entry in entries])
    constants = np.array([entry.latency.constant_ms for entry in entries])
    held = np.array([entry.max_len_tokens for entry in entries])
    # A step holds most where all ranks are in groups of most tokens a rank
    fewest = np.ceil(lengths.sum() / (number * (held / sizes).max()))
    # Phases were found, so some entry holds the longest sequence
    alone_ms = (table[:, 0] + constants)[held >= lengths[0]].min()
    work_ms = (table * sizes[:, None]).min(axis=0).sum() / number
    together_ms = work_ms + fewest * constants.min()
    # On a core of its own a rank may be so much faster
    return float(max(alone_ms, together_ms) / planning.profile.ranks_per_core)


def _choices(gathered: Sequence[MenuEntry], num_devices: int) -> list[list[GroupMenu]]:
    """Return menus of gathered layers that are composed together: of all schemes, and of one TP.

    Each again without checkpointed layers. Between steps with other slices pull and push are seen.
    Longer steps with checkpointed layers look fast to a search that goes step by step, and the
    whole iteration may be slower.
    """
    # Where nothing is checkpointed, or all have one TP, lists repeat: each is kept once
    choices: dict[tuple[tuple[Scheme, ...], ...], list[GroupMenu]] = {}
    for entries in (gathered, [entry for entry in gathered if not entry.scheme.ckpt]):
        tps = sorted({entry.scheme.tp for entry in entries})
        of_one_tp = ([entry for entry in entries if entry.scheme.tp == tp] for tp in tps)
        for own in (entries, *of_one_tp):
            menus = find_menus(own, num_devices)
            choices.setdefault(tuple(menu.schemes for menu in menus), menus)
    return list(choices.values())


@dataclass(slots=True)
class BestPhases:
    """The fastest phases so far; none that take `time_ms`, the limit, or more."""

    planning: PlanningProblem
    time_ms: float
    phases: list[PhasePlan] = field(default_factory=list)
    _tried: set[tuple[tuple[Scheme, ...], ...]] = field(default_factory=set)

    def compose(self, choices: Iterable[Sequence[GroupMenu]]) -> None:
        """Compose phases of any of `choices`, but of no menus twice."""
        for menus in filter(None, choices):
            key = tuple(menu.schemes for menu in menus)
            if key in self._tried:
                continue
            self._tried.add(key)
            phases = _compose(self.planning, menus, self.time_ms)
            time_ms = sum(phase.iteration_ms for phase in phases)
            # The steps were below the limit; with pull and push the phases need not be
            if phases and time_ms < self.time_ms:
                self.phases, self.time_ms = phases, time_ms


def _compose(
    planning: PlanningProblem, menus: Sequence[GroupMenu], limit_ms: float
) -> list[PhasePlan]:
    """Phases of `menus`; none where steps alone are not below `limit_ms`."""
    entries = [entry for menu in menus for entry in menu.entries]
    if not planning.is_held(max(entry.max_len_tokens for entry in entries)):
        return []
    # Ranks that share a core run faster where others of a step are done
    limit_ms *= planning.profile.ranks_per_core
    # What pull and push add to steps of the same slices, and what the layers of each move
    link_ms = max(_total_ms(entry.link) for entry in entries)
    least_ms = link_ms / max(1, planning.num_buckets)
    # All ranks gather each layer together, so the most traffic is the floor of a step
    floor_ms = max(entry.latency.traffic_ms for entry in entries)
    has_one_tp = len({entry.scheme.tp for entry in entries}) == 1

    def total_ms(slowest: FloatArray) -> float:
        return float(np.maximum(slowest, floor_ms).sum()) + least_ms

    def between_ms(before: GroupStep, step: GroupStep) -> float:
        """Return what of pull and push is seen between steps with other slices."""
        if has_one_tp or menus[before.kind].slices_of(before) == menus[step.kind].slices_of(step):
            return 0.0
        # The push of the one and the pull of the other hide behind both steps
        return max(least_ms, link_ms - before.slowest_ms - step.slowest_ms)

    kinds = [menu.groups_of_step(planning.num_devices) for menu in menus]
    # Before the search: where even the fewest steps are too many there is no plan
    num_tokens = int(planning.lengths.sum())
    if min(kind.fewest(num_tokens) for kind in kinds) > MAX_PHASES:
        return []
    steps = plan_steps(kinds, planning.lengths, total_ms, limit_ms, between_ms)
    if len(steps) > MAX_PHASES:  # each is a phase
        return []
    return _gathered_phases(planning, menus, steps)


def _gathered_phases(
    planning: PlanningProblem, menus: Sequence[GroupMenu], steps: Sequence[GroupStep]
) -> list[PhasePlan]:
    """Each step is a phase in which every pipeline has one micro-batch."""
    phases = []
    of_steps = [menus[step.kind].strategy_of(step) for step in steps]
    ends = ends_of_phases([strategy for strategy, _ in of_steps])
    for step, (strategy, assignment), own in zip(steps, of_steps, ends):
        menu = menus[step.kind]
        phase = PhasePlan.of(
            planning,
            strategy,
            members=step.members,
            factors=_factors(planning, menu, strategy),
            # Phases of equal slices are one list of transfers, whose ends alone are seen
            link=menu.link.at_ends(*own),
        )
        phases.append(phase.pack(assignment))
    return phases


def _factors(planning: PlanningProblem, menu: GroupMenu, strategy: Strategy) -> list[float]:
    """Factor of T of each pipeline, slow ranks included."""
    factors = {entry.scheme: entry.factor for entry in menu.entries}
    return [
        factors[scheme] * planning.corrections.slowdown(ranks)
        for scheme, ranks in zip(strategy.schemes, strategy.place())
    ]


def menu_entries(
    planning: PlanningProblem,
    schemes: Iterable[Scheme],
    groups: Collection[GroupKey] | None = None,
) -> list[MenuEntry]:
    """Return those of `schemes` that a menu may have: they gather, hold something and have a place.

    `groups`: those that exist, where schemes that need others are left out.
    """
    found = []
    for scheme in dict.fromkeys(schemes):
        if not scheme.gather or scheme.ep > 1 or not _has_place(scheme, planning.num_devices):
            continue
        single = replace(scheme, sp=1, cp=1, tp=1)
        # Groups and link times are those of strategies: this one stands for the scheme
        alike = _on_all_ranks(scheme, single, planning.num_devices)
        if groups is not None and not groups_of(alike).issubset(groups):
            continue
        factor, held = planning.corrections.factor(scheme), planning.max_len_tokens(scheme)
        latency = planning.profile.get_latency(scheme).scaled(factor)
        if held > 0:
            found.append(MenuEntry(scheme, latency, factor, held, planning.links_of(alike)))
    return found


def find_menus(entries: Iterable[MenuEntry], num_devices: int) -> list[GroupMenu]:
    """Return menus out of `entries`: two at most for each number of checkpointed layers.

    For each number of ranks they have the scheme that is fastest for one sequence as long as it
    holds, or for `_MANY` short ones.
    """
    of_kind: dict[tuple[bool, int, bool, int], dict[int, MenuEntry]] = {}
    for one in entries:
        scheme = one.scheme
        for count in (1, _MANY):
            of_size = of_kind.setdefault((scheme.hpz, scheme.ckpt, scheme.offload, count), {})
            other = of_size.get(scheme.num_devices)
            if other is None or one.cost_of(count) < other.cost_of(count):
                of_size[scheme.num_devices] = one
    found: dict[tuple[Scheme, ...], GroupMenu] = {}
    for of_size in of_kind.values():
        for sizes in _sizes_with_cuts(tuple(sorted(of_size)), num_devices):
            menu = GroupMenu(tuple(of_size[size] for size in sizes))
            found[menu.schemes] = menu
    return list(found.values())


def _has_place(scheme: Scheme, num_devices: int) -> bool:
    """Whether all ranks are a multiple of its own, or its ranks are a power of two."""
    size = scheme.num_devices
    return num_devices % size == 0 or (size < num_devices and is_power_of_two(size))


def _on_all_ranks(scheme: Scheme, single: Scheme, num_devices: int) -> Strategy:
    """The strategy with as many of `scheme` as have a place, and `single` on the rest."""
    number, rest = divmod(num_devices, scheme.num_devices)
    return Strategy((scheme,) * number + (single,) * (rest // single.num_devices))


@lru_cache(maxsize=256)
def _sizes_with_cuts(sizes: tuple[int, ...], num_devices: int) -> list[list[int]]:
    """Return sets of two or more of `sizes` into which the ranks may be cut; each size is in one.

    In a set are those that divide each other and all ranks, and where one rank may be alone all
    powers of two.
    """
    has_single = 1 in sizes
    dividing = [n for n in sizes if num_devices % n == 0]
    found: list[set[int]] = []
    for first in sizes:
        own = {first}
        if first not in dividing:  # it is beside powers of two alone
            own = {n for n in dividing if is_power_of_two(n) or n == num_devices}
        # The largest first: of sizes that do not divide each other the wider one stays
        for n in reversed(dividing):
            if all(max(m, n) % min(m, n) == 0 for m in own):
                own.add(n)
        if has_single and all(is_power_of_two(n) or n == num_devices for n in own):
            own |= {n for n in sizes if is_power_of_two(n)}
        if len(own) > 1 and own not in found:
            found.append(own)
    # Cuts may leave sizes out, so a set has all those of the sets inside it
    return [sorted(own) for own in found if not any(own < other for other in found)]


def _total_ms(link: LinkTimes) -> float:
    return link.pull_ms + link.push_ms
