"""A group of ranks that share sequences (Ulysses) under ZeRO-3: its time, its MaxLen, its gathers.

T of one rank (`Costs.single_rank`) is divided by the group's size without its constant; exchanges
of attention are priced as ds_hydra's own (`sequence_parallel_latency`). All ranks gather every
layer for every micro-batch, forward and backward, and reduce its gradients: a micro-batch takes the
longer of its computation and this traffic, which assumes perfect prefetching, unless
`Scenario.seen` says what share of the traffic nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from ds_hydra.lab.simulator.scenario import Scenario, packed_ms
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.cost_models.analytic import sequence_parallel_latency
from ds_hydra.strategy.profiles.memory_model import SP_ACTIVATIONS
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.options import FORWARD_FRACTION
from ds_hydra.strategy.schemes.scheme import Scheme

LAYER_INPUT_BYTES = 2
"""Bytes that activation checkpointing keeps for each token, layer and hidden unit."""
RECOMPUTE = FORWARD_FRACTION
"""Share of T that activation checkpointing computes again."""
_GATHERED = Scheme(1, 1, gather=True)


@dataclass(frozen=True, kw_only=True)
class ShardedGroup:
    """`size` ranks that share the sequences of their micro-batches, of `max_len` tokens at most."""

    scenario: Scenario
    single: LatencyModel
    size: int
    is_checkpointed: bool
    max_len: int

    @property
    def num_groups(self) -> int:
        """Groups of this size on all devices."""
        return self.scenario.num_devices // self.size

    def __str__(self) -> str:
        return f"DP{self.num_groups} SP{self.size}{' AC' if self.is_checkpointed else ''}"

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

    def micro_batch_ms(self, lengths: IntArray) -> float:
        """T of a micro-batch of `lengths`."""
        compute = (
            packed_ms(self.single, self.single.sequences_ms(lengths)) - self.single.constant_ms
        ) / self.size + self.single.constant_ms
        compute *= 1 + (RECOMPUTE if self.is_checkpointed else 0.0)
        cluster = self.scenario.cluster
        if self.size == 1 or cluster is None:
            return compute
        sp = Scheme(1, 1, sp=self.size)
        more = sequence_parallel_latency(cluster.shape, cluster.hardware, sp)
        assert more is not None
        # Recomputation exchanges once more beside forward and backward
        passes = 3 / 2 if self.is_checkpointed else 1.0
        return compute + passes * (more.linear_ms * int(lengths.sum()) + more.constant_ms)


def sharded_groups(scenario: Scenario, checkpointing: Sequence[bool]) -> Iterator[ShardedGroup]:
    """Groups of every size that divides devices and heads and holds one token at least, smallest
    first; none where the profile has no <1,PP>.
    """
    single = scenario.costs.single_rank
    heads = scenario.profile.document["model"].get("num_attention_heads", scenario.num_devices)
    sizes = (2**i for i in range(scenario.num_devices.bit_length()))
    for size, is_checkpointed in product(sizes, checkpointing):
        if single is None or scenario.num_devices % size or heads % size:
            continue
        max_len = _max_len(scenario, size, is_checkpointed)
        if max_len > 0:
            yield ShardedGroup(
                scenario=scenario,
                single=single,
                size=size,
                is_checkpointed=is_checkpointed,
                max_len=max_len,
            )


def _max_len(scenario: Scenario, size: int, is_checkpointed: bool) -> int:
    """Tokens of a micro-batch on `size` ranks: fully sharded states, two gathered layers, the
    16-bit gradients of one and the embedding beside them; of Ulysses attention's output on both
    sides of an exchange.
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
    budget = memory.memory_bytes - memory.safety_margin_bytes - memory.reserved_bytes
    kept = memory.num_layers * memory.activation_bytes[1]
    if is_checkpointed:
        kept = memory.num_layers * LAYER_INPUT_BYTES + memory.activation_bytes[1]
    kept *= SP_ACTIVATIONS if size > 1 else 1.0
    return int(size * ((budget - states - gathered) // (hidden * kept)))


def with_traffic_ms(scenario: Scenario, computed_ms: FloatArray) -> FloatArray:
    """Micro-batches that compute so long, with the gathers and reductions of each."""
    traffic = zero3_traffic_ms(scenario)
    if scenario.seen is not None:
        return computed_ms + scenario.seen * traffic
    return np.maximum(computed_ms, traffic)


def zero3_traffic_ms(scenario: Scenario) -> float:
    """Two gathers of all 16-bit parameters and one reduction of 16-bit gradients: as of ds_hydra's
    own gathered layers.
    """
    return 0.0 if scenario.cluster is None else scenario.cluster.gather_ms(_GATHERED)


def zero3_ends_ms(scenario: Scenario) -> float:
    """What no computation is beside: the gather of a first layer, the reduction of a last one, and
    the optimizer's step.
    """
    cluster = scenario.cluster
    if cluster is None:
        return 0.0
    visible = 0.0 if scenario.seen is not None else 2 / 3 * zero3_traffic_ms(scenario)
    return cluster.step_ms + visible / cluster.shape.num_layers
