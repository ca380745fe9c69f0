"""DeepSpeed ZeRO-3 with Ulysses sequence parallelism, with and without activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hydra.sampler.schedule import IntArray
from ds_hydra.simulator.fixed_length import MicroBatches, pack_fixed_length
from ds_hydra.simulator.scenario import (
    Outcome,
    Scenario,
    SystemResult,
    best_of,
    packed_micro_batch_ms,
    summarize,
)
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.options import FORWARD_FRACTION

LAYER_INPUT_BYTES = 2
"""Bytes that activation checkpointing keeps for each token, layer and hidden unit."""
RECOMPUTE = FORWARD_FRACTION
"""Share of T that activation checkpointing computes again."""


def deepspeed_ulysses(
    scenario: Scenario, *, is_checkpointed: bool, name: str
) -> SystemResult | None:
    """ZeRO-3 with groups of ranks that share sequences (Ulysses), tuned over the size of the
    groups.

    Micro-batches are first-fit-decreasing micro-batches of the context, dealt to the groups in
    turn. T of one rank is PP times that of a profiled <1,PP>, divided by the group's size without
    its constant; attention exchanges heads four times per layer and direction. All ranks gather
    every layer for every micro-batch, forward and backward, and reduce its gradients: a micro-batch
    takes the longer of its computation and this traffic, which assumes perfect prefetching, and as
    long as in the slowest group, because gathers are collective. None where the profile has no
    <1,PP> or no size of the groups holds the context.
    """
    single = _single_rank_latency(scenario)
    if single is None:
        return None
    results = []
    heads = scenario.profile.document["model"].get("num_attention_heads", scenario.num_devices)
    for size in (2**i for i in range(scenario.num_devices.bit_length())):
        if scenario.num_devices % size or heads % size:
            continue
        if _ulysses_max_len(scenario, size, is_checkpointed) < scenario.context_length:
            continue
        num_groups = scenario.num_devices // size
        outcomes = []
        for lengths in scenario.lengths:
            micro_batches = pack_fixed_length(lengths, scenario.context_length, num_groups)
            outcomes.append(
                _ulysses_outcome(scenario, single, size, lengths, micro_batches, is_checkpointed)
            )
        results.append(
            summarize(name, f"DP{num_groups} SP{size}{' AC' if is_checkpointed else ''}", outcomes)
        )
    return best_of(name, results) if results else None


def _single_rank_latency(scenario: Scenario) -> LatencyModel | None:
    """T of the whole model on one rank: the cheapest PP times T of <1,PP> for a micro-batch of the
    context.
    """
    found = []
    for scheme, latency in scenario.profile.latency.items():
        if scheme.tp == 1 and scheme.is_plain:
            found.append(
                LatencyModel(
                    quadratic_ms=scheme.pp * latency.quadratic_ms,
                    linear_ms=scheme.pp * latency.linear_ms,
                    constant_ms=scheme.pp * latency.constant_ms,
                )
            )
    return min(found, key=lambda t: t.micro_batch_ms([scenario.context_length]), default=None)


def _ulysses_max_len(scenario: Scenario, size: int, is_checkpointed: bool) -> int:
    """Tokens of a micro-batch on `size` ranks: fully sharded states, two gathered layers and the
    embedding beside them.
    """
    memory = scenario.profile.memory
    hidden = memory.hidden_size
    if 1 not in memory.activation_bytes:
        return 0
    # 16-bit parameters, 2 of 16 bytes of all states
    layer_bytes = memory.state_bytes / 8 * hidden**2
    states = (
        memory.num_layers * hidden**2 * memory.state_bytes + 16 * hidden * memory.vocab_size
    ) / (scenario.num_devices)
    gathered = 2 * layer_bytes + 2 * 2 * hidden * memory.vocab_size
    budget = memory.memory_bytes - memory.safety_margin_bytes - memory.reserved_bytes
    kept = memory.num_layers * memory.activation_bytes[1]
    if is_checkpointed:
        kept = memory.num_layers * LAYER_INPUT_BYTES + memory.activation_bytes[1]
    return int(size * ((budget - states - gathered) // (hidden * kept)))


def _ulysses_outcome(
    scenario: Scenario,
    single: LatencyModel,
    size: int,
    lengths: IntArray,
    micro_batches: Sequence[MicroBatches],
    is_checkpointed: bool,
) -> Outcome:
    num_steps = max(len(group) for group in micro_batches)
    times = np.zeros((len(micro_batches), num_steps))
    for group, group_micro_batches in enumerate(micro_batches):
        for step, micro_batch in enumerate(group_micro_batches):
            times[group, step] = _ulysses_micro_batch_ms(
                scenario, single, size, lengths[micro_batch], is_checkpointed
            )
    traffic = _zero3_traffic_ms(scenario)
    steps = times.max(axis=0)
    busy = times.sum(axis=1)
    propagation = float(steps.sum())
    total = float(np.maximum(steps, traffic).sum())
    used = busy[busy > 0]
    return Outcome(
        propagation_ms=propagation,
        iteration_ms=total + (scenario.cluster.step_ms if scenario.cluster else 0.0),
        imbalance=float(used.max() / used.min() - 1) if used.size else 0.0,
        bubble=1 - float(busy.sum()) / (propagation * len(micro_batches)) if propagation else 0.0,
    )


def _ulysses_micro_batch_ms(
    scenario: Scenario, single: LatencyModel, size: int, lengths: IntArray, is_checkpointed: bool
) -> float:
    compute = (
        packed_micro_batch_ms(single, lengths) - single.constant_ms
    ) / size + single.constant_ms
    compute *= 1 + (RECOMPUTE if is_checkpointed else 0.0)
    cluster = scenario.cluster
    if size == 1 or cluster is None:
        return compute
    is_inside = size <= cluster.hardware.devices_per_node
    rate = cluster.hardware.intra_node_rate if is_inside else (
        cluster.hardware.inter_node_rate / cluster.hardware.devices_per_node
    )  # fmt: skip
    once = int(lengths.sum()) / size * cluster.shape.hidden_size * 2 * (size - 1) / size / rate
    num_exchanges = 4 * (3 if is_checkpointed else 2)
    each_ms = 1e3 * once + cluster.hardware.collective_overhead_ms
    return compute + num_exchanges * cluster.shape.num_layers * each_ms


def _zero3_traffic_ms(scenario: Scenario) -> float:
    """Two gathers of all 16-bit parameters and one reduction of 16-bit gradients, on the slowest
    link.
    """
    cluster = scenario.cluster
    if cluster is None:
        return 0.0
    inside = cluster.num_params * (1 - 1 / cluster.num_devices) / cluster.hardware.intra_node_rate
    share = max(0.0, 1 - cluster.hardware.devices_per_node / cluster.num_devices)
    return 1e3 * 3 * 2 * max(inside, cluster.num_params * share / cluster.hardware.inter_node_rate)
