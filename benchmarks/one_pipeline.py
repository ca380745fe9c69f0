"""The packing of one pipeline by itself, with all effort: what references of packing are compared
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hydra.sampler.planner.bounds import PipelineCost, pipeline_bound_ms
from ds_hydra.sampler.planner.packing import THOROUGH, pack_micro_batches, solve_packing
from ds_hydra.sampler.planner.problem import EPSILON, SolverLimits
from ds_hydra.sampler.schedule import balance_micro_batches
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Micro-batches of one pipeline in 1F1B order; `micro_batches[j]` lists positions in the given
    lengths.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    objective_ms: float
    lower_bound_ms: float

    @property
    def gap(self) -> float:
        """How far the objective may be above the optimum, relative to the lower bound."""
        return self.objective_ms / self.lower_bound_ms - 1 if self.lower_bound_ms > 0 else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether the lower bound proves that no packing is faster."""
        return self.gap <= EPSILON


def pack_sequences(
    lengths: Sequence[int],
    *,
    latency: LatencyModel,
    num_stages: int,
    max_len_tokens: int,
    is_exact: bool = True,
    forward_fraction: float = FORWARD_FRACTION,
    limits: SolverLimits | None = None,
) -> Packing:
    """The best packing found for one pipeline; `limits` allow integer programs where the gap is
    large.
    """
    order = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    descending = np.array(lengths, dtype=np.int64)[order]
    sequence_ms = np.array(
        [latency.sequence_ms(int(length)) for length in descending], dtype=np.float64
    )
    balance = balance_micro_batches(num_stages, forward_fraction)
    cost = PipelineCost(
        num_stages,
        float(latency.constant_ms),
        float(latency.traffic_ms),
        max_len_tokens,
        forward_fraction,
        is_exact,
        balance,
    )
    micro_batches = np.zeros_like(descending)
    objective = pack_micro_batches(descending, sequence_ms, cost, THOROUGH, micro_batches)
    lower_bound = pipeline_bound_ms(descending, sequence_ms, cost)
    if limits is not None and objective > lower_bound * (1 + limits.gap_tolerance):
        objective, lower_bound = solve_packing(descending, sequence_ms, cost, limits, micro_batches)
    return Packing(
        micro_batches=tuple(
            tuple(order[micro_batches == micro_batch].tolist())
            for micro_batch in range(micro_batches.max(initial=-1) + 1)
        ),
        objective_ms=objective,
        lower_bound_ms=min(lower_bound, objective),
    )
