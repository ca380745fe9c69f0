"""A group of ranks that share sequences (Ulysses) under ZeRO-3: its time, its MaxLen, its gathers.

T of one rank (`Costs.single_rank`) is divided by the group's size without its constant; attention
lasts as long as on the rank with most heads (DeepSpeed's `uneven_heads_all2all`: they need not
divide), and its exchanges cost what ds_hydra's own do (`sequence_parallel_latency`). All ranks
gather every layer for every micro-batch, forward and backward, and reduce its gradients: one takes
the longer of its computation and this traffic, which assumes perfect prefetching, unless
`Scenario.seen` says what share of the traffic nothing hides. With `Scenario.hpz` weights cross
between nodes once for a micro-batch, and a share of them stays on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from ds_hydra.lab.simulator.fixed_length import MicroBatches
from ds_hydra.lab.simulator.scenario import Scenario, packed_ms
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.cost_models.analytic import sequence_parallel_latency
from ds_hydra.strategy.profiles.memory_model import SP_ACTIVATIONS
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION, Scheme

LAYER_INPUT_BYTES = 2
"""Bytes that activation checkpointing keeps for each token, layer and hidden unit."""
RECOMPUTE = FORWARD_FRACTION
"""Share of T that activation checkpointing computes again."""
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

    @property
    def num_groups(self) -> int:
        """Groups of this size on all devices."""
        return self.scenario.num_devices // self.size

    def __str__(self) -> str:
        layers = "" if self.checkpointed == 1 else f" of {self.checkpointed:.0%} of the layers"
        return f"DP{self.num_groups} SP{self.size}" + (f" AC{layers}" if self.checkpointed else "")

    @cached_property
    def terms(self) -> tuple[float, float, float]:
        """Coefficients of l^2 and l of a sequence, and the constant of a micro-batch, in ms."""
        one, two = 1 << 10, 1 << 11
        nothing, once, twice = (
            self.micro_batch_ms(np.array(lengths, dtype=np.int64)) for lengths in ([], [one], [two])
        )
        quadratic = (twice - 2 * once + nothing) / (two**2 - 2 * one**2)
        return quadratic, (once - nothing) / one - quadratic * one, nothing

    def sequences_ms(self, lengths: IntArray) -> FloatArray:
        """What each sequence adds to the time of its micro-batch: a l^2 + b l."""
        quadratic, linear, _ = self.terms
        return np.array((quadratic * lengths + linear) * lengths, dtype=np.float64)

    def times_ms(
        self, lengths: IntArray, micro_batches: Sequence[MicroBatches]
    ) -> list[FloatArray]:
        """T of the micro-batches of each group; 0.0 of empty ones."""
        return [
            np.array([self.micro_batch_ms(lengths[m]) if len(m) else 0.0 for m in own])
            for own in micro_batches
        ]

    def micro_batch_ms(self, lengths: IntArray) -> float:
        """T of a micro-batch of `lengths`."""
        busiest = -(-self.num_heads // self.size) * self.size / self.num_heads
        single = replace(self.single, quadratic_ms=self.single.quadratic_ms * busiest)
        compute = (
            packed_ms(single, single.sequences_ms(lengths)) - single.constant_ms
        ) / self.size + single.constant_ms
        compute *= 1 + RECOMPUTE * self.checkpointed
        cluster = self.scenario.cluster
        if self.size == 1 or cluster is None:
            return compute
        sp = Scheme(1, 1, sp=self.size)
        more = sequence_parallel_latency(cluster.shape, cluster.hardware, sp)
        assert more is not None
        # Recomputation exchanges once more beside forward and backward
        passes = 1 + self.checkpointed / 2
        return compute + passes * (more.linear_ms * int(lengths.sum()) + more.constant_ms)


def sharded_groups(scenario: Scenario, checkpointing: Sequence[float]) -> Iterator[ShardedGroup]:
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
            )


def rank_tokens(scenario: Scenario, checkpointed: float, *, exchanges: bool) -> int:
    """Tokens of a micro-batch for each of its ranks: fully sharded states, two gathered layers, the
    16-bit gradients of one and the embedding beside them; with Ulysses' `exchanges` attention's
    output on both sides of one.
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
    gathered = 3 * layer_bytes + 2 * 2 * hidden * memory.vocab_size
    if scenario.hpz:  # a share of each rank of a node in what comes from other nodes
        params = memory.num_layers * layer_bytes / 2 + 2 * hidden * memory.vocab_size
        gathered += memory.on_node_bytes(params, scenario.num_devices)
    budget = memory.memory_bytes - memory.safety_margin_bytes - memory.reserved_bytes
    layers, again = memory.num_layers, math.ceil(memory.num_layers * checkpointed)
    # One of those that are computed again is whole in backward
    whole = layers - again + (1 if again else 0)
    kept = whole * memory.activation_bytes[1] + again * LAYER_INPUT_BYTES
    kept *= SP_ACTIVATIONS if exchanges else 1.0
    return int((budget - states - gathered) // (hidden * kept))


def with_traffic_ms(scenario: Scenario, computed_ms: FloatArray) -> FloatArray:
    """Micro-batches that compute so long, with the gathers and reductions of each."""
    traffic = zero3_traffic_ms(scenario)
    if scenario.seen is not None:
        return computed_ms + scenario.seen * traffic
    return np.maximum(computed_ms, traffic)


def zero3_traffic_ms(scenario: Scenario) -> float:
    """Two gathers of all parameters and one reduction of 16-bit gradients: as of ds_hydra's own
    gathered layers, in 8 bits where those are (FSDP2 has that, too).
    """
    gathered = replace(_GATHERED, hpz=scenario.hpz)
    return 0.0 if scenario.cluster is None else scenario.cluster.gather_ms(gathered)


def zero3_ends_ms(scenario: Scenario) -> float:
    """What no computation is beside: the gather of a first layer, the reduction of a last one, and
    the optimizer's step.
    """
    cluster = scenario.cluster
    if cluster is None:
        return 0.0
    visible = 0.0 if scenario.seen is not None else 2 / 3 * cluster.gather_ms(_GATHERED)
    return cluster.step_ms + visible / cluster.shape.num_layers
