"""Which gathered schemes join the candidates, for the planner to put phases together of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.batch_planner import BatchPlanner
from ds_hydra.sampler.phases import find_palettes
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.strategy.cost_models.costs import CanRun
from ds_hydra.strategy.profiles.link_times import NO_LINKS, LinkTimes
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.placement import count_groups
from ds_hydra.strategy.schemes.scheme import Strategy

_CKPT_STEPS = 4
"""Shares of checkpointed layers that are tried."""
_NUM_TRIED = 8
"""Mini-batches that decide."""
_MAX_PALETTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSettings:
    """What decides beside profile and mini-batches. `fits`: whether there are communicators for
    further strategies; `tolerance`: what a palette has to gain, of the mean time.
    """

    num_devices: int
    planner: PlannerSettings
    links_of: Callable[[Strategy], LinkTimes] | None
    fits: Callable[[Sequence[Strategy]], bool]
    tolerance: float
    can_run: CanRun = lambda _: True


class Phases(NamedTuple):
    """Strategies of one gathered scheme each, and what mini-batches take with phases of them. See
    [Note: Phases]. `are_refused`: whether there were others, for which communicators are missing.
    """

    strategies: tuple[Strategy, ...]
    times_ms: FloatArray
    are_refused: bool


def propose_phases(
    profile: Profile,
    batches: Sequence[GlobalBatch],
    known_ms: FloatArray,
    settings: PhaseSettings,
) -> Phases:
    """What makes `batches` faster than `known_ms` [mini-batch], of one or two numbers of
    checkpointed layers; nothing where none does.
    """
    best = known_ms[:_NUM_TRIED]
    palettes = _palettes(profile, settings)
    chosen: tuple[Strategy, ...] = ()
    are_refused = False
    for _ in range(_MAX_PALETTES):
        tried = {number: (*chosen, *own) for number, own in palettes.items()}
        times = {
            number: phases_ms(batches, best, own, profile, settings)
            for number, own in tried.items()
            if settings.fits(own)
        }
        are_refused |= len(times) < len(tried)
        number = min(times, key=lambda n: float(times[n].mean()), default=None)
        if number is None or times[number].mean() > (1 - settings.tolerance) * best.mean():
            break
        chosen, best = tried[number], times[number]
        del palettes[number]
    if chosen:
        known_ms = phases_ms(batches, known_ms, chosen, profile, settings)
    return Phases(chosen, known_ms, are_refused)


def groups_of_gathered(
    chosen: Sequence[Strategy],
    palette: Sequence[Strategy],
    num_devices: int,
    fits: Callable[[Sequence[Strategy]], bool],
) -> tuple[Strategy, ...]:
    """Strategies of one scheme for the gathered schemes of `chosen`, where their numbers of ranks
    differ and beside `palette` there are communicators for them, those of the fewest groups first.

    With all groups of a size the planner may cut the ranks anew for every step. Candidates are the
    fastest on average; phases of the same groups hold a mini-batch that none of them suits. All
    sizes are there with as many checkpointed layers as the widest has, too, whose groups hold what
    is longest.
    """
    alike: dict[int, dict[Strategy, int]] = {}
    used = dict.fromkeys(s for strategy in chosen for s in strategy.schemes)
    gathered = [s for s in used if s.gather and s.ep == 1 and num_devices % s.num_devices == 0]
    if gathered:
        widest = max(gathered, key=lambda scheme: scheme.num_devices)
        gathered += [replace(scheme, ckpt=widest.ckpt) for scheme in gathered]
    for scheme in dict.fromkeys(gathered):
        number = num_devices // scheme.num_devices
        alike.setdefault(scheme.ckpt, {})[Strategy((scheme,) * number)] = scheme.num_devices
    wanted = [s for of_kind in alike.values() if len({*of_kind.values()}) > 1 for s in of_kind]
    found: list[Strategy] = []
    for strategy in sorted(wanted, key=lambda strategy: count_groups([strategy])):
        is_there = strategy in chosen or strategy in palette
        if not is_there and fits([*palette, *found, strategy]):
            found.append(strategy)
    return tuple(found)


def _palettes(profile: Profile, settings: PhaseSettings) -> dict[int, tuple[Strategy, ...]]:
    """Strategies of one scheme, one for each number of ranks, by number."""
    number, layers = settings.num_devices, profile.memory.num_layers
    gathered = [s for s in profile.latency if s.gather and not s.ckpt and profile.memory.knows(s)]
    is_checkpointed = bool(profile.document.get("activation_checkpointing"))
    found: dict[int, tuple[Strategy, ...]] = {}
    for step in [0] if is_checkpointed else range(_CKPT_STEPS + 1):
        ckpt = -(-layers * step // _CKPT_STEPS)
        schemes = [s for s in (replace(s, ckpt=ckpt) for s in gathered) if settings.can_run(s)]
        made_of = find_palettes(
            schemes,
            profile,
            number,
            max_len_tokens=lambda scheme, _: profile.max_len_tokens(scheme, number),
            links_of=lambda _: NO_LINKS,
        )
        for palette in made_of:
            found[len(found)] = tuple(
                Strategy((s,) * (number // s.num_devices)) for s in palette.schemes
            )
    return found


def phases_ms(
    batches: Sequence[GlobalBatch],
    known_ms: FloatArray,
    strategies: Sequence[Strategy],
    profile: Profile,
    settings: PhaseSettings,
) -> FloatArray:
    """`known_ms`, or what phases take where that is less."""
    planner = settings.planner
    if settings.links_of is not None:
        planner = replace(planner, link_times={s: settings.links_of(s) for s in strategies})
    planners = (BatchPlanner(b, profile, settings.num_devices, planner) for b in batches)
    found = [p.phases_ms(strategies, limit) for p, limit in zip(planners, known_ms)]
    return np.minimum(known_ms, found)
