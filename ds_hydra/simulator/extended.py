"""The full space of ds_hydra, sequence and context parallelism and streamed layers beside <TP,PP>:
which schemes there are, and which strategies it gets.

Nobody has published T of such schemes, and the paper has no such system, so every time here is an
estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner import heuristic_times
from ds_hydra.sampler.propose_phases import (
    PhaseSettings,
    propose_phases,
)
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.sampler.screening import Screen
from ds_hydra.simulator.scenario import Scenario
from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.profiles.sequence_parallel import with_estimates
from ds_hydra.strategy.proposal.expert_parallel import with_shared_experts
from ds_hydra.strategy.proposal.extended import stretched_schemes
from ds_hydra.strategy.proposal.rows import schemes_beyond_heads, with_rows
from ds_hydra.strategy.proposal.streamed import with_streamed_schemes
from ds_hydra.strategy.schemes.neighbours import neighbour_strategies
from ds_hydra.strategy.schemes.placement import count_groups
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

TOLERANCE = 0.001
"""A strategy joins the set if it makes the sampled mini-batches faster by this share on average."""

_NUM_ROUNDS = 5
_NUM_SCREENED, _NUM_TRIED = 24, 40


def extended_scenario(scenario: Scenario) -> Scenario:
    """`scenario` with a profile that knows schemes with SP, and where there is a cluster those
    whose layers stream.
    """
    cluster = scenario.cluster
    profile = with_sequence_parallelism(scenario.profile, scenario.num_devices, cluster)
    if cluster is not None:
        profile = with_shared_experts(profile, num_devices=scenario.num_devices, cluster=cluster)
        profile = with_streamed_schemes(
            profile,
            num_devices=scenario.num_devices,
            cluster=cluster,
            bounds_attention=scenario.bounds_attention,
            tokens_per_iteration=float(np.mean([b.num_tokens for b in scenario.batches])),
        )
        profile = _with_seen_traffic(profile, scenario.seen)
    scenario = replace(scenario, profile=profile)
    return replace(scenario, profile=profile.with_schemes(extended_schemes(scenario)))


def with_gathered(scenario: Scenario) -> Scenario:
    """`scenario` with a profile that also knows what phases may be put together of."""
    if scenario.cluster is None:
        return scenario
    profile = with_streamed_schemes(
        scenario.profile,
        num_devices=scenario.num_devices,
        cluster=scenario.cluster,
        bounds_attention=scenario.bounds_attention,
        tokens_per_iteration=0.0,
    )
    new = profile.only(profile.latency.keys() - scenario.profile.latency.keys())
    seen = _with_seen_traffic(new, scenario.seen)
    return replace(scenario, profile=scenario.profile.with_entries(seen, seen.latency))


def _with_seen_traffic(profile: Profile, share: float | None) -> Profile:
    """`profile` with `share` of the traffic of streamed layers on top of their computation."""
    if share is None:
        return profile
    return profile.with_latency(
        {
            scheme: replace(model, constant_ms=model.constant_ms + share * model.traffic_ms)
            for scheme, model in profile.latency.items()
            if model.traffic_ms
        }
    )


def extended_schemes(scenario: Scenario) -> tuple[Scheme, ...]:
    """Schemes that fit the devices and fit a micro-batch of one token at least, without those that
    another one makes useless: <TP,PP>, SP, streamed layers, and checkpointed ones where that holds
    longer micro-batches with less device time.
    """
    return stretched_schemes(
        scenario.profile,
        num_devices=scenario.num_devices,
        context_length=scenario.context_length,
    )


def with_sequence_parallelism(
    profile: Profile, num_devices: int, cluster: Cluster | None
) -> Profile:
    """`profile` with an estimate for every <SP,TP,1> on up to `num_devices` ranks, SP a power of
    two, and for CP on top where heads forbid more SP.

    Where <SP x TP,1> was profiled, by `estimate_latency`. Where it was not, a micro-batch's
    exchanges count as in `ulysses.py`, by the interconnects of `cluster`; without one such schemes
    are left out.
    """
    heads = profile.document["model"].get("num_attention_heads", num_devices)
    wanted, exchanged = [], []
    for scheme in profile.latency:
        widths = [
            2**i for i in range(1, num_devices.bit_length()) if 2**i * scheme.tp <= num_devices
        ]
        for sp in widths if scheme.is_plain and scheme.pp == 1 else ():
            is_profiled = Scheme(sp * scheme.tp, 1) in profile.latency
            extended = replace(scheme, sp=sp)
            if heads % extended.ranks_per_stage == 0 and extended not in profile.latency:
                if is_profiled or cluster is not None:
                    wanted.append(extended)
                if not is_profiled and cluster is not None:
                    exchanged.append(extended)
    known = with_estimates(profile, [Strategy((scheme,)) for scheme in wanted])
    if cluster is not None and exchanged:
        known = known.with_latency(
            {s: cluster.with_exchanges(known.get_latency(s), s) for s in exchanged}
        )
    beyond = [s for s in schemes_beyond_heads(profile, num_devices) if s.pp == 1]
    return with_rows(known, beyond, cluster)


def extended_strategies(
    scenario: Scenario,
    strategies: Sequence[Strategy],
    batches: Sequence[GlobalBatch],
    *,
    max_communicators: int,
) -> tuple[Strategy, ...]:
    """`strategies`, and those of other schemes that make `batches` faster beside them; without any,
    first the one strategy that is fastest.

    `scenario.profile` knows the schemes; those of phases come on top. Tried are strategies in which
    pipelines of one scheme of a strategy have given way to another scheme on the same devices, and
    of the best of them again: many by the estimate of a greedy dispatch on some mini-batches, what
    is left planned by the heuristic on all.
    """
    schemes = extended_schemes(scenario)
    screened: dict[Strategy, FloatArray] = {}
    chosen = list(strategies)
    alike = [Strategy((s,) * (scenario.num_devices // s.num_devices)) for s in schemes]
    for _ in range(_NUM_ROUNDS):
        near = dict.fromkeys(n for s in chosen for n in (s, *neighbour_strategies(s, schemes)))
        near |= dict.fromkeys(alike)
        new = [strategy for strategy in near if strategy not in screened]
        screen = Screen(
            new,
            scenario.profile,
            scenario.num_devices,
            forward_fraction=scenario.forward_fraction,
        )
        times = [screen.estimates_ms(batch) for batch in batches[:_NUM_SCREENED]]
        screened |= dict(zip(new, np.array(times).T))
        chosen = _faster_together(screened, strategies, max_communicators, _NUM_TRIED)
    planned = {strategy: _planned_ms(scenario, strategy, batches) for strategy in chosen}
    chosen = _faster_together(planned, strategies, max_communicators, len(planned))
    known_ms = np.min([planned[strategy] for strategy in chosen], axis=0)
    settings = PhaseSettings(
        num_devices=scenario.num_devices,
        planner=scenario.linked_settings(()).heuristic(),
        links_of=scenario.links if scenario.cluster else None,
        fits=lambda palette: count_groups([*chosen, *palette]) <= max_communicators,
        tolerance=TOLERANCE,
    )
    profile = with_gathered(scenario).profile
    return (*chosen, *propose_phases(profile, batches, known_ms, settings)[0])


def _planned_ms(
    scenario: Scenario, strategy: Strategy, batches: Iterable[GlobalBatch]
) -> FloatArray:
    """Times with pull and push by the planner's heuristic, inf where a sequence fits nowhere."""
    settings = scenario.linked_settings([strategy])
    return np.concatenate(
        [
            heuristic_times(
                batch,
                strategies=[strategy],
                profile=scenario.profile,
                num_devices=scenario.num_devices,
                settings=settings,
            )
            for batch in batches
        ]
    )


def _faster_together(
    times: dict[Strategy, FloatArray], given: Sequence[Strategy], max_communicators: int, most: int
) -> list[Strategy]:
    """`given`, and one by one the strategy with which the fastest of all so far gains most on
    average.
    """
    chosen = list(given) or [min(times, key=lambda s: float(times[s].mean()))]
    best = np.min([times[strategy] for strategy in chosen], axis=0)
    open_ = [strategy for strategy in times if strategy not in chosen]
    while open_ and len(chosen) < most:
        gains = [float((best - np.minimum(best, times[strategy])).mean()) for strategy in open_]
        added = open_.pop(int(np.argmax(gains)))
        if max(gains) <= TOLERANCE * best.mean():
            break
        if count_groups([*chosen, added]) <= max_communicators:
            chosen.append(added)
            best = np.minimum(best, times[added])
    return chosen
