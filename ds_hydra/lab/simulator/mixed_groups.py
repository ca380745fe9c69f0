"""Systems that form groups of different sizes anew for every micro-batch: FlexSP, and
Megatron-Core's dynamic context parallelism. See [Note: Mixed groups].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hydra.lab.simulator.context_parallel import ContextParallel
from ds_hydra.lab.simulator.scenario import Outcome, Scenario, SystemResult, best_of, summarize
from ds_hydra.lab.simulator.sharded import sharded_groups, with_traffic_ms, zero3_ends_ms
from ds_hydra.sampler.group_steps import GroupStep, MixedGroups, plan_steps
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


def flexsp(scenario: Scenario, *, name: str) -> SystemResult | None:
    """FlexSP: ZeRO-3, groups of Ulysses sequence parallelism of sizes chosen for each micro-batch,
    with activation checkpointing or not. See [Note: Mixed groups]. None where nothing holds the
    context.
    """
    ends_ms = zero3_ends_ms(scenario)

    def total_ms(slowest: FloatArray) -> float:
        return float(with_traffic_ms(scenario, slowest).sum())

    found: list[Outcome | None] = [None] * len(scenario.lengths)
    for is_checkpointed in (False, True):
        groups = list(sharded_groups(scenario, [is_checkpointed]))
        if not groups or groups[-1].max_len < scenario.context_length:
            continue
        mixed = MixedGroups(
            scenario.num_devices,
            [group.size for group in groups],
            [group.max_len for group in groups],
            [group.terms[2] for group in groups],
            [group.sequences_ms for group in groups],
        )
        for number, lengths in enumerate(scenario.lengths):
            known = found[number]
            limit = known.iteration_ms - ends_ms if known else np.inf
            steps = _times_ms(plan_steps([mixed], lengths, total_ms, limit))
            if not steps.size:
                continue
            propagation = float(steps[:, 0].sum())
            busy = float(steps[:, 1].sum()) / scenario.num_devices
            found[number] = Outcome(
                propagation_ms=propagation,
                iteration_ms=total_ms(steps[:, 0]) + ends_ms,
                imbalance=0.0,
                bubble=1 - busy / propagation if propagation else 0.0,
            )
    outcomes = [outcome for outcome in found if outcome is not None]
    if len(outcomes) < len(found):
        return None
    return summarize(name, "groups for each micro-batch", outcomes)


def dynamic_cp(scenario: Scenario, *, name: str) -> SystemResult | None:
    """Megatron-Core's dynamic context parallelism: <TP,PP> fixed, ranks of all pipelines in groups
    of CP sizes chosen for each micro-batch. See [Note: Mixed groups]. Tuned over <TP,PP>.
    """
    results = []
    for scheme in usable_schemes(scenario):
        found = _dynamic_cp(scenario, scheme, name)
        if found is not None:
            results.append(found)
    return best_of(results) if results else None


def _dynamic_cp(scenario: Scenario, scheme: Scheme, name: str) -> SystemResult | None:
    num_pipelines = scenario.num_devices // scheme.num_devices
    degrees = [2**k for k in range(num_pipelines.bit_length())]
    groups = [ContextParallel(scenario=scenario, scheme=scheme, cp=cp) for cp in degrees]
    if groups[-1].max_len < scenario.context_length:
        return None
    mixed = MixedGroups(
        num_pipelines,
        degrees,
        [group.max_len for group in groups],
        [group.latency.constant_ms for group in groups],
        [group.sequences_ms for group in groups],
    )
    alike = Strategy((scheme,) * num_pipelines)

    def total_ms(slowest: FloatArray) -> float:
        return float(slowest.sum() + (scheme.pp - 1) * slowest.max())

    outcomes = []
    for lengths in scenario.lengths:
        steps = _times_ms(plan_steps([mixed], lengths, total_ms))
        tokens = [int(lengths.sum()) // (len(steps) * num_pipelines)] * len(steps)
        found = scenario.run_times(alike, [steps[:, 0]] * num_pipelines, [tokens] * num_pipelines)
        outcomes.append(found)
    return summarize(name, f"{scheme}, CP for each micro-batch", outcomes)


def _times_ms(steps: Sequence[GroupStep]) -> FloatArray:
    """[step, (the slowest group, device time of all)]."""
    return np.array([[s.slowest_ms, s.device_ms] for s in steps]).reshape(-1, 2)
