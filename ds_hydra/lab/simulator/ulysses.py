"""DeepSpeed ZeRO-3, or FSDP: of single ranks; with Ulysses sequence parallelism as it is, and with
micro-batches balanced by time.

[Note: A group of ranks that share sequences]
T of one rank (`Costs.single_rank`) is divided by the group's size without its constant; attention
lasts as long as on the rank with most heads (DeepSpeed's `uneven_heads_all2all`: they need not
divide), and its exchanges cost what ds_hydra's own do (`sequence_parallel_latency`). All ranks
gather every layer for every micro-batch, forward and backward, and reduce its gradients, which is
charged as ds_hydra's own gathered layers are: one takes the longer of its computation and this
traffic, which assumes perfect prefetching. With `Scenario.hpz` weights cross between nodes once for
a micro-batch, and a share of them stays on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from ds_hydra.lab.simulator.fixed_length import MicroBatches, pack_evenly, pack_fixed_length
from ds_hydra.lab.simulator.scenario import (
    PARTIAL,
    Outcome,
    Scenario,
    SystemResult,
    packed_ms,
    summarize,
)
from ds_hydra.sampler.schedule import FloatArray, IntArray, linked_ms, steps_ms
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.cost_models.analytic import sequence_parallel_latency
from ds_hydra.strategy.profiles.memory_model import SP_ACTIVATIONS
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION, Scheme, Strategy

LAYER_INPUT_BYTES = 2
"""Bytes that activation checkpointing keeps for each token, layer and hidden unit."""
RECOMPUTE = FORWARD_FRACTION
"""Share of T that activation checkpointing computes again."""


def recomputed(model: LatencyModel, checkpointed: float) -> LatencyModel:
    """T of `model` with that share of its layers checkpointed; their attention runs again where all
    are, as ds_hydra's does.
    """
    ratio = 1 + RECOMPUTE * checkpointed
    return model.scaled(ratio, 1.0 if checkpointed < 1 else ratio)


_GATHERED = Scheme(1, 1, gather=True)


@dataclass(frozen=True, kw_only=True)
class ShardedGroup:
    """`size` ranks that share the sequences of their micro-batches, of `max_len` tokens at most;
    `checkpointed` is the share of layers that are computed again.
    """

    scenario: Scenario
    single: LatencyModel
    size: int
    num_heads: int
    checkpointed: float
    max_len: int
    hides_exchanges: bool = False
    """Whether heads travel in parts beside attention to others, as ds_hydra's do."""

    @property
    def num_groups(self) -> int:
        """Groups of this size on all devices."""
        return self.scenario.num_devices // self.size

    def __str__(self) -> str:
        layers = "" if self.checkpointed == 1 else f" of {self.checkpointed:.0%} of the layers"
        return f"DP{self.num_groups} SP{self.size}" + (f" AC{layers}" if self.checkpointed else "")

    @cached_property
    def latency(self) -> LatencyModel:
        """T of a micro-batch of the group."""
        busiest = -(-self.num_heads // self.size) * self.size / self.num_heads
        single = replace(self.single, quadratic_ms=self.single.quadratic_ms * busiest)
        shared = single.shared(self.size)
        sp, cluster = Scheme(1, 1, sp=self.size), self.scenario.cluster
        if self.size == 1 or cluster is None:
            return recomputed(shared, self.checkpointed)
        if self.hides_exchanges:
            shared = self.scenario.costs.with_exchanges(shared, sp)
            return recomputed(shared, self.checkpointed)
        more = sequence_parallel_latency(cluster.shape, cluster.hardware, sp)
        assert more is not None
        # Recomputation exchanges once more beside forward and backward
        passes = 1 + self.checkpointed / 2
        shared = recomputed(shared, self.checkpointed)
        return replace(
            shared,
            linear_ms=shared.linear_ms + passes * more.linear_ms,
            constant_ms=shared.constant_ms + passes * more.constant_ms,
        )

    def times_ms(
        self, lengths: IntArray, micro_batches: Sequence[MicroBatches]
    ) -> list[FloatArray]:
        """T of the micro-batches of each group; 0.0 of empty ones."""
        work = self.latency.sequences_ms(lengths)
        return [
            np.array([packed_ms(self.latency, work[m]) if len(m) else 0.0 for m in own])
            for own in micro_batches
        ]


def sharded_groups(
    scenario: Scenario, checkpointing: Sequence[float], *, hides_exchanges: bool = False
) -> Iterator[ShardedGroup]:
    """Groups of every power of two that divides the devices, has a head for each rank and holds one
    token at least, smallest first; none where the profile has no <1,PP>.
    """
    single = scenario.costs.single_rank
    heads = scenario.profile.document["model"].get("num_attention_heads", scenario.num_devices)
    sizes = (2**i for i in range(scenario.num_devices.bit_length()))
    for size, checkpointed in product(sizes, checkpointing):
        if single is None or scenario.num_devices % size or size > heads:
            continue
        max_len = size * rank_tokens(scenario, checkpointed, exchanges=size > 1)
        if max_len > 0:
            yield ShardedGroup(
                scenario=scenario,
                single=single,
                size=size,
                num_heads=heads,
                checkpointed=checkpointed,
                max_len=max_len,
                hides_exchanges=hides_exchanges,
            )


def rank_tokens(scenario: Scenario, checkpointed: float, *, exchanges: bool) -> int:
    """Tokens of a micro-batch for each of its ranks, see `_rank_bytes`."""
    memory = scenario.profile.memory
    if 1 not in memory.activation_bytes:
        return 0
    fixed, each = _rank_bytes(scenario, checkpointed, exchanges=exchanges)
    return int((memory.usable_bytes - fixed) // each)


def _rank_bytes(scenario: Scenario, checkpointed: float, *, exchanges: bool) -> tuple[float, float]:
    """Bytes of a rank without tokens, and of each token: fully sharded states, two gathered layers,
    the 16-bit gradients of one and the embedding beside them; with Ulysses' `exchanges` attention's
    output on both sides of one.
    """
    memory = scenario.profile.memory
    hidden = memory.hidden_size
    # 16-bit parameters, 2 of 16 bytes of all states
    layer_bytes = memory.state_bytes / 8 * hidden**2
    states = (
        memory.num_layers * hidden**2 * memory.state_bytes + 16 * hidden * memory.vocab_size
    ) / (scenario.num_devices)
    gathered = 3 * layer_bytes + 2 * 2 * hidden * memory.vocab_size
    if scenario.hpz:  # a share of each rank of a node in what comes from other nodes
        params = memory.num_layers * layer_bytes / 2 + 2 * hidden * memory.vocab_size
        gathered += memory.on_node_bytes(params, scenario.num_devices)
    layers, again = memory.num_layers, math.ceil(memory.num_layers * checkpointed)
    # One of those that are computed again is whole in backward
    whole = layers - again + (1 if again else 0)
    of_attention = memory.attention_bytes / hidden if checkpointed < 1 else 0.0
    of_one = LAYER_INPUT_BYTES + of_attention
    kept = whole * memory.activation_bytes[1] + again * of_one
    kept *= SP_ACTIVATIONS if exchanges else 1.0
    return states + gathered, hidden * kept


def sharded_ms(scenario: Scenario, computed_ms: FloatArray) -> float:
    """Micro-batches that compute so long, from the first gather to the last reduction, charged as
    those of ds_hydra's own gathered layers (`linked_ms`): one takes as long as its layers travel at
    least, in the first one forward waits for its gathers by itself.
    """
    traffic_ms = zero3_traffic_ms(scenario)
    if not computed_ms.size:
        return 0.0
    links = scenario.links(Strategy.alike(_GATHERED, scenario.num_devices))
    return linked_ms(
        np.maximum(computed_ms, traffic_ms),
        1,
        FORWARD_FRACTION,
        links.pull_ms,
        links.push_ms,
        scenario.profile.memory.num_layers if scenario.overlap else 0,
        float(computed_ms[0]),
    )


def zero3_traffic_ms(scenario: Scenario) -> float:
    """Two gathers of all parameters and one reduction of 16-bit gradients: as of ds_hydra's own
    gathered layers, in 8 bits where those are (FSDP2 has that, too).
    """
    gathered = replace(_GATHERED, hpz=scenario.hpz)
    return 0.0 if scenario.cluster is None else scenario.cluster.gather_ms(gathered)


def optimizer_ms(scenario: Scenario) -> float:
    """Time of the optimizer's step, and of the host beside it."""
    return scenario.cluster.end_ms if scenario.cluster else 0.0


def packed_zero3(scenario: Scenario, *, name: str) -> SystemResult | None:
    """ZeRO-3 or FSDP as most have it: each rank runs micro-batches of the context that are packed
    first-fit-decreasing and dealt in turn, or as `pack_evenly` does where that is faster, in
    lockstep, with activation checkpointing of some layers, all or none. None where one rank does
    not hold the context.
    """

    def place(group: ShardedGroup, lengths: IntArray) -> list[Sequence[MicroBatches]]:
        packs = (pack_fixed_length, pack_evenly)
        return [pack(lengths, scenario.context_length, group.num_groups) for pack in packs]

    return _tuned(scenario, place, PARTIAL, name, shares_sequences=False)


def deepspeed_ulysses(scenario: Scenario, *, name: str) -> SystemResult | None:
    """ZeRO-3 with groups of ranks that share sequences (Ulysses), tuned over the size of the
    groups, all layers checkpointed or none.

    Micro-batches are first-fit-decreasing micro-batches of the context, dealt to the groups in
    turn; each lasts as long as in the slowest group, because gathers are collective. None where the
    profile has no <1,PP> or no size of the groups fits the context.
    """

    def place(group: ShardedGroup, lengths: IntArray) -> list[Sequence[MicroBatches]]:
        return [pack_fixed_length(lengths, scenario.context_length, group.num_groups)]

    return _tuned(scenario, place, (0.0, 1.0), name)


def balanced_ulysses(
    scenario: Scenario, *, name: str, chooses_degree: bool = False
) -> SystemResult | None:
    """The same with micro-batches up to the MaxLen of the group that are balanced by time, with
    activation checkpointing of some layers, all or none.

    Sequences go, longest first, to the micro-batch that then ends first, and micro-batches of about
    the same time run in the same step of all groups; or to the micro-batch that makes the steps
    together least longer. Each global batch gets the better of both, with the fewest micro-batches
    and with one more. `chooses_degree`: of all sizes of groups, too.
    """

    def place(group: ShardedGroup, lengths: IntArray) -> list[Sequence[MicroBatches]]:
        found: list[Sequence[MicroBatches]] = []
        work = group.latency.sequences_ms(lengths)
        num_groups = group.num_groups
        for by_steps in (False, True):
            num_steps = max(1, -(-int(lengths.sum()) // (group.max_len * num_groups)))
            wanted = 2
            while wanted and num_steps <= lengths.size:
                micro_batches = np.zeros(lengths.size, dtype=np.int64)
                if balance_micro_batches_by_time(lengths, work, num_groups, num_steps,
                                        group.max_len, by_steps, micro_batches):  # fmt: skip
                    found.append(_groups_of(micro_batches, work, num_groups, num_steps, by_steps))
                    wanted -= 1
                num_steps += 1
        return found

    return _tuned(scenario, place, PARTIAL, name, chooses_degree)


_Place = Callable[[ShardedGroup, IntArray], list[Sequence[MicroBatches]]]


class _Chosen(NamedTuple):
    """Groups, and what a global batch takes with them."""

    group: ShardedGroup
    outcome: Outcome


def _tuned(
    scenario: Scenario,
    place: _Place,
    checkpointing: Sequence[float],
    name: str,
    chooses_degree: bool = False,
    shares_sequences: bool = True,
) -> SystemResult | None:
    """The best size of the groups, that of each global batch with `chooses_degree`, and the best of
    `place` for each global batch; groups of one rank unless it `shares_sequences`.
    """

    def best(group: ShardedGroup, lengths: IntArray) -> _Chosen:
        placed = (group.times_ms(lengths, each) for each in place(group, lengths))
        return min((_Chosen(group, in_lockstep(group, t)) for t in placed), key=_iteration_ms)

    groups = [
        group
        for group in sharded_groups(scenario, checkpointing)
        if shares_sequences or group.size == 1
    ]
    holding = [group for group in groups if group.max_len >= scenario.context_length]
    if not holding:
        return None
    if chooses_degree:
        each = [
            min((best(g, lengths) for g in groups if g.max_len >= lengths.max()), key=_iteration_ms)
            for lengths in scenario.lengths
        ]
        outcomes = [chosen.outcome for chosen in each]
        return summarize(name, "a degree for each global batch", outcomes)
    of_group = [[best(group, lengths) for lengths in scenario.lengths] for group in holding]
    found = min(of_group, key=lambda own: sum(map(_iteration_ms, own)))
    return summarize(name, str(found[0].group), [chosen.outcome for chosen in found])


def _iteration_ms(chosen: _Chosen) -> float:
    return chosen.outcome.iteration_ms


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
    # By steps, because groups wait for each other after each: only the slowest of a step counts.
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


def in_lockstep(group: ShardedGroup, times_ms: Sequence[FloatArray]) -> Outcome:
    """Micro-batches of all groups begin together, because gathers are collective."""
    steps = steps_ms(times_ms)
    busy = np.array([own.sum() for own in times_ms])
    propagation, used = float(steps.sum()), busy[busy > 0]
    return Outcome(
        propagation_ms=propagation,
        iteration_ms=sharded_ms(group.scenario, steps) + optimizer_ms(group.scenario),
        imbalance=float(used.max() / used.min() - 1) if used.size else 0.0,
        bubble=1 - float(busy.sum()) / (propagation * busy.size) if propagation else 0.0,
    )
