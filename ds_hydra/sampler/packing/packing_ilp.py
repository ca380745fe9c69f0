"""The integer programs of packing, for the cases where bounds prove that the heuristic may be far
off.

One program asks for V rows whose slowest is as fast as possible (Eq. 1 for one V).
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
class RowsSolution:
    """Rows found for one V (None: none found), and what was proven about the load of the slowest
    row.
    """

    rows: IntArray | None
    load_bound_ms: float
    """Lower bound of the slowest row's sequence time; inf where V rows cannot hold the
    sequences.
    """


def solve_rows(
    lengths: IntArray,
    sequence_ms: FloatArray,
    num_rows: int,
    max_len_tokens: int,
    *,
    limits: SolverLimits,
    below_ms: float = np.inf,
    start: IntArray | None = None,
) -> RowsSolution:
    """Rows 0..`num_rows`-1 for `lengths` (descending) with the fastest slowest row.

    Only solutions faster than `below_ms` are looked for. `start` is a known packing into `num_rows`
    rows.
    """
    import mip

    model = make_model(limits)
    num_sequences = lengths.size
    # is_in[i, j]: sequence i is in row j. Rows are alike, so sequence i may as well be in one of
    # rows 0..i.
    is_in = {
        (i, j): model.add_var(var_type=mip.BINARY)
        for i in range(num_sequences)
        for j in range(min(i + 1, num_rows))
    }
    # slowest: sequence time of the slowest row, between what V rows need at least and what is known
    # already.
    lowest = max(float(sequence_ms.max()), float(sequence_ms.sum()) / num_rows)
    slowest = model.add_var(
        lb=lowest, ub=max(lowest, below_ms) if np.isfinite(below_ms) else mip.INF
    )
    # [Constraint] Every sequence is in one row.
    for i in range(num_sequences):
        model += mip.xsum(is_in[i, j] for j in range(min(i + 1, num_rows))) == 1
    for j in range(num_rows):
        members = range(j, num_sequences)
        # [Constraint] No row is longer than MaxLen.
        model += mip.xsum(int(lengths[i]) * is_in[i, j] for i in members) <= max_len_tokens
        # [Constraint] No row takes longer than the slowest.
        model += mip.xsum(float(sequence_ms[i]) * is_in[i, j] for i in members) <= slowest
    model.objective = slowest
    if start is not None:
        model.start = _start_values(is_in, start)
    status = model.optimize(max_seconds=limits.deadline_s, max_nodes=limits.max_nodes)
    if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
        return RowsSolution(None, below_ms)
    bound = max(lowest, model.objective_bound) if model.objective_bound is not None else lowest
    if model.num_solutions == 0:
        return RowsSolution(None, bound)
    rows = np.zeros(num_sequences, dtype=np.int64)
    for (i, j), variable in is_in.items():
        if variable.x > 0.5:
            rows[i] = j
    return RowsSolution(rows, bound)


def _start_values(
    is_in: dict[tuple[int, int], mip.Var], start: IntArray
) -> list[tuple[mip.Var, float]]:
    """`start` with its rows renumbered in the order of their first sequences, as the program wants
    them.
    """
    number: dict[int, int] = {}
    renumbered = [number.setdefault(int(row), len(number)) for row in start]
    return [(variable, float(renumbered[i] == j)) for (i, j), variable in is_in.items()]
