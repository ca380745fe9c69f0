"""DeepSpeed ZeRO-3 with Ulysses sequence parallelism, with and without activation checkpointing,
and with micro-batches balanced by time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.simulator.fixed_length import MicroBatches, pack_fixed_length
from ds_hydra.simulator.scenario import (
    Outcome,
    Scenario,
    SystemResult,
    best_of,
    packed_micro_batch_ms,
    summarize,
)
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.proposal.streamed import single_rank_latency
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
    turn. T of one rank (`single_rank_latency`) is divided by the group's size without its constant;
    attention exchanges heads four times per layer and direction. All ranks gather every layer for
    every micro-batch, forward and backward, and reduce its gradients: a micro-batch takes the
    longer of its computation and this traffic, which assumes perfect prefetching, and as long as in
    the slowest group, because gathers are collective. None where the profile has no <1,PP> or no
    size of the groups fits the context.
    """

    def place(
        micro_batch: _MicroBatch, lengths: IntArray, num_groups: int
    ) -> list[Sequence[MicroBatches]]:
        return [pack_fixed_length(lengths, scenario.context_length, num_groups)]

    return _tuned(scenario, place, [is_checkpointed], name)


def balanced_ulysses(scenario: Scenario, *, name: str) -> SystemResult | None:
    """The same with micro-batches up to the MaxLen of the group that are balanced by time, with
    activation checkpointing or not.

    Sequences go, longest first, to the micro-batch that then ends first, and micro-batches of about
    the same time run in the same step of all groups; or to the micro-batch that makes the steps
    together least longer. Each mini-batch gets the better of both, with the fewest micro-batches
    and with one more.
    """

    def place(
        micro_batch: _MicroBatch, lengths: IntArray, num_groups: int
    ) -> list[Sequence[MicroBatches]]:
        found: list[Sequence[MicroBatches]] = []
        work = micro_batch.sequences_ms(lengths)
        for by_steps in (False, True):
            num_steps = max(1, -(-int(lengths.sum()) // (micro_batch.max_len * num_groups)))
            wanted = 2
            while wanted and num_steps <= lengths.size:
                micro_batches = np.zeros(lengths.size, dtype=np.int64)
                if balance_micro_batches_by_time(lengths, work, num_groups, num_steps, micro_batch.max_len,
                                        by_steps, micro_batches):  # fmt: skip
                    found.append(_groups_of(micro_batches, work, num_groups, num_steps, by_steps))
                    wanted -= 1
                num_steps += 1
        return found

    return _tuned(scenario, place, [False, True], name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """A micro-batch of a group of `size` ranks."""

    scenario: Scenario
    single: LatencyModel
    size: int
    is_checkpointed: bool
    max_len: int

    def sequences_ms(self, lengths: IntArray) -> FloatArray:
        """What each sequence adds to the time of its micro-batch: a l^2 + b l, by micro-batches of
        two lengths.
        """
        one, two = 1 << 10, 1 << 11
        nothing, once, twice = (
            self.micro_batch_ms(np.array(micro_batch, dtype=np.int64))
            for micro_batch in ([], [one], [two])
        )
        quadratic = (twice - 2 * once + nothing) / (two**2 - 2 * one**2)
        linear = (once - nothing) / one - quadratic * one
        return np.array((quadratic * lengths + linear) * lengths, dtype=np.float64)

    def micro_batch_ms(self, lengths: IntArray) -> float:
        """T of a micro-batch of `lengths`."""
        return _ulysses_micro_batch_ms(
            self.scenario, self.single, self.size, lengths, self.is_checkpointed
        )


_Place = Callable[[_MicroBatch, IntArray, int], list[Sequence[MicroBatches]]]


def _tuned(
    scenario: Scenario, place: _Place, checkpointing: Sequence[bool], name: str
) -> SystemResult | None:
    """The best size of the groups, and the best of `place` for each mini-batch."""
    single = single_rank_latency(scenario.profile, bounds_attention=scenario.bounds_attention)
    if single is None:
        return None
    results = []
    heads = scenario.profile.document["model"].get("num_attention_heads", scenario.num_devices)
    for size, is_checkpointed in product(
        (2**i for i in range(scenario.num_devices.bit_length())), checkpointing
    ):
        if scenario.num_devices % size or heads % size:
            continue
        max_len = _ulysses_max_len(scenario, size, is_checkpointed)
        if max_len < scenario.context_length:
            continue
        num_groups = scenario.num_devices // size
        micro_batch = _MicroBatch(
            scenario=scenario,
            single=single,
            size=size,
            is_checkpointed=is_checkpointed,
            max_len=max_len,
        )
        outcomes = [
            min(
                (
                    _ulysses_outcome(micro_batch, lengths, micro_batches)
                    for micro_batches in place(micro_batch, lengths, num_groups)
                ),
                key=lambda outcome: outcome.iteration_ms,
            )
            for lengths in scenario.lengths
        ]
        text = f"DP{num_groups} SP{size}{' AC' if is_checkpointed else ''}"
        results.append(summarize(name, text, outcomes))
    return best_of(name, results) if results else None


@compiled
def balance_micro_batches_by_time(
    lengths: IntArray,
    work_ms: FloatArray,
    num_groups: int,
    num_steps: int,
    max_len: int,
    by_steps: bool,
    micro_batches: IntArray,
) -> bool:
    """Writes the micro-batch of each sequence (lengths descending), `num_steps` for each group;
    False where one fits in none.

    Micro-batch r belongs to step r // `num_groups`. To the micro-batch that then ends first, or
    with `by_steps` to the one that makes its step least longer, of equals to the emptiest.
    """
    times, tokens = np.zeros(num_groups * num_steps), np.zeros(num_groups * num_steps)
    step_ms = np.zeros(num_steps)
    for i in range(lengths.size):
        best, best_longer = -1, np.inf
        for micro_batch in range(times.size):
            if tokens[micro_batch] + lengths[i] > max_len:
                continue
            longer = max(0.0, times[micro_batch] + work_ms[i] - step_ms[micro_batch // num_groups])
            if not by_steps:
                longer = 0.0
            if (
                best < 0
                or longer < best_longer
                or (longer == best_longer and times[micro_batch] < times[best])
            ):
                best, best_longer = micro_batch, longer
        if best < 0:
            return False
        micro_batches[i] = best
        times[best] += work_ms[i]
        tokens[best] += lengths[i]
        step_ms[best // num_groups] = max(step_ms[best // num_groups], times[best])
    return True


def _groups_of(
    micro_batches: IntArray, work_ms: FloatArray, num_groups: int, num_steps: int, by_steps: bool
) -> list[MicroBatches]:
    """The micro-batches of each group; the steps hold micro-batches of about the same time, or
    those they have.
    """
    times = np.bincount(micro_batches, weights=work_ms, minlength=num_groups * num_steps)
    order = np.arange(times.size) if by_steps else np.argsort(-times, kind="stable")
    members = [np.flatnonzero(micro_batches == micro_batch) for micro_batch in order]
    return [members[group::num_groups] for group in range(num_groups)]


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
    micro_batch: _MicroBatch, lengths: IntArray, micro_batches: Sequence[MicroBatches]
) -> Outcome:
    scenario = micro_batch.scenario
    num_steps = max(len(group) for group in micro_batches)
    times = np.zeros((len(micro_batches), num_steps))
    for group, group_micro_batches in enumerate(micro_batches):
        for step, members in enumerate(group_micro_batches):
            times[group, step] = (
                micro_batch.micro_batch_ms(lengths[members]) if len(members) else 0.0
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
    interconnect.
    """
    cluster = scenario.cluster
    if cluster is None:
        return 0.0
    inside = cluster.num_params * (1 - 1 / cluster.num_devices) / cluster.hardware.intra_node_rate
    share = max(0.0, 1 - cluster.hardware.devices_per_node / cluster.num_devices)
    return 1e3 * 3 * 2 * max(inside, cluster.num_params * share / cluster.hardware.inter_node_rate)
