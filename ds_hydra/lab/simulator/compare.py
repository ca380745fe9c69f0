"""ds_hydra against other ways to train: one workload, the same global batches for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ds_hydra.configs.hydra_config import Space
from ds_hydra.lab.simulator.cases import Workload, check_workload
from ds_hydra.lab.simulator.results import Comparison, Planned
from ds_hydra.lab.simulator.scenario import Scenario, perfect_balance_ms
from ds_hydra.lab.simulator.systems import (
    DS_HYDRA,
    LABELS,
    OUR_SYSTEMS,
    PAPER,
    PLAIN,
    SYSTEMS,
    Settings,
    dynamic,
)
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.sample_bench import (
    HEURISTIC,
    MAX_ENUMERATED_RANKS,
    CandidateSettings,
)
from ds_hydra.strategy.profiles.profile import (
    has_published_states,
    with_engine_layers,
)
from ds_hydra.strategy.proposal.program import (
    check_context,
    usable_schemes,
)
from ds_hydra.strategy.proposal.space import (
    candidate_schemes,
    pruned_schemes,
    unpruned_schemes,
)
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, schemes_of


def compare(
    workload: Workload,
    settings: Settings,
    progress: Callable[[str], None] = lambda _: None,
    run_each: Callable[..., Iterable[Any]] = map,
) -> Comparison:
    """Simulate ds_hydra and `settings.systems` on the same global batches of `workload`.

    ds_hydra has the engine's memory; others, and the paper's system, have what the profile says.
    Systems that cannot run the context are left out. `progress` is told the label of each system as
    it begins, or is waited for. `run_each`: `map`, or that of a pool of processes. Raises
    HydraConfigError where no scheme of ds_hydra fits the context.
    """
    # A profile of ranks that shared cores is of a machine for trials; clusters have devices
    workload = workload.knowing(replace(workload.profile, ranks_per_core=1.0))
    is_plain = settings.space == "plain" or bool(workload.strategies)
    start = replace(settings, iterations=0).scenario(workload)
    own = start.knowing(with_engine_layers(workload.profile))
    own = replace(own, can_run=workload.can_run)
    if not (is_plain or own.statics() or _fits_extended(workload, own)):
        check_context(own, is_full=True, tokens_per_iteration=workload.tokens_per_iteration)
    check_workload(workload, is_plain=is_plain)
    scenario = settings.scenario(workload)
    own = replace(own, batches=scenario.batches)
    jobs: dict[str, Callable[[], Any]] = {DS_HYDRA: partial(_run_in_space, workload, own, settings)}
    for name, each in ((PLAIN, own), (PAPER, scenario)):
        # Where the profile has the engine's memory already, PAPER would be PLAIN again
        if name in settings.systems and (name == PLAIN or has_published_states(each.profile)):
            jobs[name] = partial(_run_plain, name, workload, each, settings)
    others = [name for name in settings.systems if name not in OUR_SYSTEMS]
    kept = own.profile.memory.activation_bytes
    memory = replace(scenario.profile.memory, activation_bytes=kept)
    alike = scenario.knowing(replace(scenario.profile, memory=memory, latency=own.profile.latency))
    for name in others:
        system = SYSTEMS[name]
        each = alike if system.has_own_layers else scenario
        jobs[name] = partial(system.run, each, name=name)
    found = _run_all(jobs, progress, run_each)
    planned = {n: found[n] for n in OUR_SYSTEMS if found.get(n) is not None}
    found |= {name: each.result for name, each in planned.items()}
    results = [found.get(name) for name in settings.systems]
    missing = [n for n, own in zip(settings.systems, results) if own is None and n != PAPER]
    return Comparison(
        workload=workload,
        settings=settings,
        num_tokens=np.array([batch.num_tokens for batch in scenario.batches], dtype=np.float64),
        results=(planned[DS_HYDRA].result, *(result for result in results if result is not None)),
        planned=planned,
        left_out=tuple(missing),
    )


def _run_all(
    jobs: Mapping[str, Callable[[], Any]],
    progress: Callable[[str], None],
    run_each: Callable[..., Iterable[Any]],
) -> dict[str, Any]:
    """Run the jobs and return the result of each."""
    results = iter(run_each(_call, jobs.values()))
    found = {}
    for name in jobs:
        progress(LABELS[name])
        found[name] = next(results)
    return found


def _call(job: Callable[[], Any]) -> Any:
    return job()


def _fits_extended(workload: Workload, own: Scenario) -> bool:
    """Whether a scheme of the full space fits the context, as `_propose` looks for it."""
    extended = candidate_schemes(own, "full", workload.tokens_per_iteration)
    fitting = (s for s in extended if s.num_devices <= own.num_devices)
    return any(own.max_len_tokens(s) >= own.context_length for s in fitting)


def _run_in_space(workload: Workload, own: Scenario, settings: Settings) -> Planned:
    """ds_hydra in the space of the settings."""
    if workload.strategies or settings.space == "plain":
        if not workload.strategies:
            check_context(own)
        strategies = workload.strategies or _propose(workload, own, settings, "plain")
        return _run_strategies(DS_HYDRA, own, strategies, usable_schemes(own))
    world = own.measured
    unpruned = unpruned_schemes(world, 0.0)
    schemes = pruned_schemes(world, unpruned)
    strategies = _propose(workload, own, settings, "full")
    known = (*unpruned, *schemes, *sorted(schemes_of(strategies)))
    return _run_strategies(DS_HYDRA, own.knowing(world.costs.table(known)), strategies, schemes)


def _run_plain(
    name: str, workload: Workload, scenario: Scenario, settings: Settings
) -> Planned | None:
    """ds_hydra with <TP,PP> alone, None where that does not fit the context."""
    named = workload.strategies or workload.plain_strategies
    if not named and not scenario.statics():
        return None
    strategies = named or _propose(workload, scenario, settings, "plain")
    return _run_strategies(name, scenario, strategies, usable_schemes(scenario))


def _run_strategies(
    name: str, scenario: Scenario, strategies: Sequence[Strategy], schemes: Collection[Scheme]
) -> Planned:
    """ds_hydra with `strategies`; the bounds are those of `schemes` and of what the strategies have
    besides.
    """
    result, plans = dynamic(scenario, strategies, name=name)
    schemes = tuple(dict.fromkeys((*schemes, *(s for each in strategies for s in each.schemes))))
    return Planned(
        result=result,
        profile=scenario.profile,
        strategies=tuple(strategies),
        plans=tuple(plans),
        perfect_balance_ms=np.array(
            [perfect_balance_ms(scenario, batch, schemes) for batch in scenario.batches]
        ),
    )


def _propose(
    workload: Workload,
    scenario: Scenario,
    settings: Settings,
    space: Space,
) -> tuple[Strategy, ...]:
    """Candidates that the engine and `ds-hydra propose` would choose among."""
    found = decide_candidates(
        scenario.profile,
        workload.histogram,
        CandidateSettings(
            num_devices=workload.num_devices,
            context_length=workload.context_length,
            tokens_per_iteration=workload.tokens_per_iteration,
            space=space,
            cluster=scenario.cluster,
            can_run=scenario.can_run,
            # Of <TP,PP> alone what suits the lengths: each of all pairs would be planned at length
            max_enumerated=0 if space == "plain" else MAX_ENUMERATED_RANKS,
            num_batches=settings.num_proposal_batches,
            seed=settings.seed + 1,
            planner=replace(HEURISTIC, overlaps_links=settings.overlap),
        ),
    )
    return found.strategies
