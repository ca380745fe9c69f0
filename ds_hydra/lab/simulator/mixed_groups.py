"""Systems that form groups of different sizes anew for every micro-batch: FlexSP, FCP, and
Megatron-Core's dynamic context parallelism. See [Note: Mixed groups].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ds_hydra.lab.simulator.scenario import (
    NUM_FINALISTS,
    NUM_TRIAL_BATCHES,
    PARTIAL,
    Outcome,
    Scenario,
    SystemResult,
    best_of,
    recomputing,
    summarize,
)
from ds_hydra.lab.simulator.ulysses import (
    optimizer_ms,
    rank_tokens,
    recomputed,
    sharded_groups,
    sharded_ms,
)
from ds_hydra.sampler.planner.group_steps import GroupStep, MixedGroups, find_cuts, plan_steps
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.cost_models.analytic import key_values_ms
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

_MOST_CUTS = 4000
"""Ways to cut the ranks that FCP tries all: those of up to 32 into groups of any size."""


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Pipelines of `scheme`, <TP,PP>, whose stages are `cp` times as wide.

    A document is cut so that all CP ranks have the same attention. T of a sequence is b l / CP and
    a l^2 / CP, or what the ring takes, whichever is longer: keys and values travel behind
    attention. A micro-batch holds CP times MaxLen.
    """

    scenario: Scenario
    scheme: Scheme
    cp: int

    @property
    def latency(self) -> LatencyModel:
        """T of a stage without CP."""
        return self.scenario.profile.get_latency(self.scheme)

    @property
    def max_len(self) -> int:
        """Tokens of one micro-batch."""
        return self.cp * self.scenario.max_len_tokens(self.scheme)

    def sequences_ms(self, lengths: IntArray) -> FloatArray:
        """Milliseconds that each sequence adds to the time of its micro-batch in one stage."""
        tokens = lengths.astype(np.float64)
        attention = self.latency.quadratic_ms * tokens**2 / self.cp
        cluster, wide = self.scenario.cluster, replace(self.scheme, cp=self.cp)
        ring = key_values_ms(cluster.shape, cluster.hardware, wide) if cluster else 0.0
        attention = np.maximum(attention, ring * tokens)
        return attention + self.latency.linear_ms * tokens / self.cp


def flexsp(scenario: Scenario, *, name: str, hides_exchanges: bool = False) -> SystemResult | None:
    """FlexSP: ZeRO-3, groups of Ulysses sequence parallelism of sizes chosen for each micro-batch,
    with activation checkpointing of some layers, all or none. See [Note: Mixed groups]. None where
    nothing holds the context. `hides_exchanges`: as ds_hydra does.
    """
    choices = []
    for checkpointed in PARTIAL:
        groups = list(sharded_groups(scenario, [checkpointed], hides_exchanges=hides_exchanges))
        if groups:
            mixed = MixedGroups(
                scenario.num_devices,
                [group.size for group in groups],
                [group.max_len for group in groups],
                [group.latency.constant_ms for group in groups],
                [group.latency.sequences_ms for group in groups],
            )
            choices.append(mixed)
    return _in_steps(scenario, choices, name)


def fcp(scenario: Scenario, *, name: str) -> SystemResult | None:
    """FCP (Flexible Context Parallelism, arXiv:2602.21788): ZeRO-3, groups of any size up to a node
    and of whole nodes, chosen for each micro-batch; each shares its sequences by a ring (CP) that
    hides behind attention (`ContextParallel`). With activation checkpointing of some layers, all or
    none. None where nothing holds the context.

    Granted: a group may have ranks of two nodes at the price of one, groups cost nothing to form,
    and no launch is slower for shorter pieces of a sequence.
    """
    one, single = Scheme(1, 1), scenario.costs.single_rank
    if single is None:
        return None
    num_devices, node = scenario.num_devices, _devices_of_node(scenario)
    sizes = [*range(1, node), *range(node, num_devices + 1, node)]
    choices: list[MixedGroups] = []
    for checkpointed in PARTIAL:
        again = recomputed(single, checkpointed)
        alone = scenario.knowing(replace(scenario.profile, latency={one: again}))
        tokens = rank_tokens(scenario, checkpointed, exchanges=False)
        if tokens > 0:
            mixed = MixedGroups(
                num_devices,
                sizes,
                [size * tokens for size in sizes],
                [again.constant_ms for _ in sizes],
                [ContextParallel(scenario=alone, scheme=one, cp=s).sequences_ms for s in sizes],
                cuts=find_cuts(num_devices, tuple(sizes), anywhere=True, most=_MOST_CUTS),
            )
            choices.append(mixed)
    return _in_steps(scenario, choices, name)


def _devices_of_node(scenario: Scenario) -> int:
    cluster = scenario.cluster
    most = cluster.hardware.devices_per_node if cluster else scenario.num_devices
    return min(most, scenario.num_devices)


def _in_steps(scenario: Scenario, choices: Sequence[MixedGroups], name: str) -> SystemResult | None:
    """ZeRO-3 with the groups that are fastest for each global batch, steps of all ranks together;
    None where no choice holds the context.
    """
    if not any(mixed.longest >= scenario.context_length for mixed in choices):
        return None
    total_ms = partial(sharded_ms, scenario)
    chosen: list[tuple[MixedGroups, Sequence[GroupStep]] | None] = [None] * len(scenario.lengths)
    least = np.full(len(chosen), np.inf)
    for mixed in choices:
        for number, lengths in enumerate(scenario.lengths):
            # Chosen for each global batch: what does not hold the context may hold this one
            if mixed.longest < lengths.max():
                continue
            steps = plan_steps([mixed], lengths, total_ms, float(least[number]))
            if steps:
                chosen[number], least[number] = (mixed, steps), total_ms(_times_ms(steps)[:, 0])
    outcomes = []
    for found in chosen:
        if found is None:
            return None
        each = _times_ms(found[1])
        propagation = float(each[:, 0].sum())
        busy = float(each[:, 1].sum()) / scenario.num_devices
        outcomes.append(
            Outcome(
                propagation_ms=propagation,
                iteration_ms=total_ms(each[:, 0]) + optimizer_ms(scenario),
                imbalance=0.0,
                bubble=1 - busy / propagation if propagation else 0.0,
            )
        )
    return summarize(name, "groups for each micro-batch", outcomes)


def dynamic_cp(scenario: Scenario, *, name: str) -> SystemResult | None:
    """Megatron-Core's dynamic context parallelism: <TP,PP> fixed, ranks of all pipelines in groups
    of CP sizes chosen for each micro-batch. See [Note: Mixed groups]. Tuned over <TP,PP>, some
    layers recomputed, all or none.
    """
    scenario, schemes = recomputing(scenario)
    few = replace(scenario, batches=scenario.batches[:NUM_TRIAL_BATCHES])
    tried = {s: found for s in schemes if (found := _dynamic_cp(few, s, name)) is not None}
    if len(scenario.batches) <= NUM_TRIAL_BATCHES:
        return best_of(tried.values())
    finalists = sorted(tried, key=lambda s: float(tried[s].iteration_ms.mean()))[:NUM_FINALISTS]
    results = (_dynamic_cp(scenario, scheme, name) for scheme in finalists)
    return best_of([found for found in results if found is not None])


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
    alike = Strategy.alike(scheme, scenario.num_devices)

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
