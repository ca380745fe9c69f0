"""The integer programs of packing, for the cases where bounds prove that the heuristic may be far
off.

One program asks for V micro-batches whose slowest is as fast as possible (Eq. 1 for one V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ds_hydra.sampler.ilp import SolverLimits, make_model
from ds_hydra.sampler.schedule import FloatArray, IntArray

if TYPE_CHECKING:
    import mip


@dataclass(frozen=True, slots=True)
class MicroBatchesSolution:
    """Micro-batches found for one V (None: none found), and what was proven about the load of the
    slowest micro-batch.
    """

    micro_batches: IntArray | None
    load_bound_ms: float
    """Lower bound of the slowest micro-batch's sequence time; inf where V micro-batches cannot hold
    the sequences.
    """


def solve_micro_batches(
    lengths: IntArray,
    sequence_ms: FloatArray,
    num_micro_batches: int,
    max_len_tokens: int,
    *,
    limits: SolverLimits,
    below_ms: float = np.inf,
    start: IntArray | None = None,
) -> MicroBatchesSolution:
    """Micro-batches 0..`num_micro_batches`-1 for `lengths` (descending) with the fastest slowest
    micro-batch.

    Only solutions faster than `below_ms` are looked for. `start` is a known packing into
    `num_micro_batches` micro-batches.
    """
    import mip

    model = make_model(limits)
    num_sequences = lengths.size
    # is_in[i, j]: sequence i is in micro-batch j. Micro-batches are alike, so sequence i may as
    # well be in one of micro-batches 0..i.
    is_in = {
        (i, j): model.add_var(var_type=mip.BINARY)
        for i in range(num_sequences)
        for j in range(min(i + 1, num_micro_batches))
    }
    # slowest: sequence time of the slowest micro-batch, between what V micro-batches need at least
    # and what is known already.
    lowest = max(float(sequence_ms.max()), float(sequence_ms.sum()) / num_micro_batches)
    slowest = model.add_var(
        lb=lowest, ub=max(lowest, below_ms) if np.isfinite(below_ms) else mip.INF
    )
    # [Constraint] Every sequence is in one micro-batch.
    for i in range(num_sequences):
        model += mip.xsum(is_in[i, j] for j in range(min(i + 1, num_micro_batches))) == 1
    for j in range(num_micro_batches):
        members = range(j, num_sequences)
        # [Constraint] No micro-batch is longer than MaxLen.
        model += mip.xsum(int(lengths[i]) * is_in[i, j] for i in members) <= max_len_tokens
        # [Constraint] No micro-batch takes longer than the slowest.
        model += mip.xsum(float(sequence_ms[i]) * is_in[i, j] for i in members) <= slowest
    model.objective = slowest
    if start is not None:
        model.start = _start_values(is_in, start)
    status = model.optimize(max_seconds=limits.deadline_s, max_nodes=limits.max_nodes)
    if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
        return MicroBatchesSolution(None, below_ms)
    bound = max(lowest, model.objective_bound) if model.objective_bound is not None else lowest
    if model.num_solutions == 0:
        return MicroBatchesSolution(None, bound)
    micro_batches = np.zeros(num_sequences, dtype=np.int64)
    for (i, j), variable in is_in.items():
        if variable.x > 0.5:
            micro_batches[i] = j
    return MicroBatchesSolution(micro_batches, bound)


def _start_values(
    is_in: dict[tuple[int, int], mip.Var], start: IntArray
) -> list[tuple[mip.Var, float]]:
    """`start` with its micro-batches renumbered in the order of their first sequences, as the
    program wants them.
    """
    number: dict[int, int] = {}
    renumbered = [number.setdefault(int(micro_batch), len(number)) for micro_batch in start]
    return [(variable, float(renumbered[i] == j)) for (i, j), variable in is_in.items()]
