"""One global batch and the pipelines of one strategy, as the arrays that compiled code works on; in
which order they are tried, and when one time is better than another; the integer programs of
dispatch (Eq. 3) and packing (Eq. 1), and when their solver stops.

Solvers run in one thread and are limited by nodes first, so that the same program gives the same
answer everywhere; the limit in seconds is a safety net. `mip` is imported when it is needed: that
takes as long as many plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.schedule import FloatArray, IntArray, balance_micro_batches
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION

if TYPE_CHECKING:
    import mip


EPSILON = 1e-9
"""Relative improvement below which two times count as equal: rounding must not decide."""


class PipelineKind(NamedTuple):
    """`num_pipelines` interchangeable pipelines: same scheme, same MaxLen."""

    num_pipelines: int
    num_stages: int
    max_len_tokens: int
    latency: LatencyModel


class DispatchProblem(NamedTuple):
    """Sequences (descending) and pipelines of one strategy.

    `kind_of[j]` is the kind of pipeline j; pipelines of one kind are consecutive. `sequence_ms[k,
    i]` is a l^2 + b l of sequence i on kind k; no micro-batch takes less than `traffic_ms[k]`;
    `ratio[k]` and `share[k]` are its `MicroBatchBalance`. A pipeline is valued by Eq. (2) without
    the constant of T (`is_eq2`), as in Eq. (3), or else by the time that an even packing will take,
    which is what the planner needs: by the closed form, or nearly by the 1F1B recurrence
    (`is_exact`).
    """

    lengths: IntArray
    sequence_ms: FloatArray
    kind_of: IntArray
    num_stages: IntArray
    constant_ms: FloatArray
    traffic_ms: FloatArray
    max_len_tokens: IntArray
    ratio: FloatArray
    share: FloatArray
    forward_fraction: float
    is_exact: bool
    is_eq2: bool


def make_problem(
    lengths: IntArray,
    kinds: Sequence[PipelineKind],
    *,
    forward_fraction: float = FORWARD_FRACTION,
    is_exact: bool = True,
    is_eq2: bool = False,
) -> DispatchProblem:
    """The problem of dispatching `lengths` (descending) to the pipelines of `kinds`."""
    latency = [kind.latency for kind in kinds]
    balance = [balance_micro_batches(kind.num_stages, forward_fraction) for kind in kinds]
    return DispatchProblem(
        lengths=np.array(lengths, dtype=np.int64),
        sequence_ms=np.array([t.sequences_ms(lengths) for t in latency]),
        kind_of=np.repeat(np.arange(len(kinds)), [kind.num_pipelines for kind in kinds]),
        num_stages=np.array([kind.num_stages for kind in kinds], dtype=np.int64),
        constant_ms=np.array([0.0 if is_eq2 else t.constant_ms for t in latency], dtype=np.float64),
        traffic_ms=np.array([0.0 if is_eq2 else t.traffic_ms for t in latency], dtype=np.float64),
        max_len_tokens=np.array([kind.max_len_tokens for kind in kinds], dtype=np.int64),
        ratio=np.array([b.ratio for b in balance]),
        share=np.array([b.share for b in balance]),
        forward_fraction=forward_fraction,
        is_exact=is_exact,
        is_eq2=is_eq2,
    )


@compiled
def shuffled_order(lengths: IntArray, spread: float, seed: int) -> IntArray:
    """Positions of `lengths` by descending length, where each length is first scaled by 1 to 1 +
    `spread`.

    `spread` 0 sorts, a large one shuffles. The generator is a small LCG of its own, so that a seed
    means the same order everywhere.
    """
    keys = np.empty(lengths.size)
    state = seed % 2**31
    for i in range(lengths.size):
        # Fits in 64 bits: both factors are below 2^31
        state = (state * 1103515245 + 12345) % 2**31
        keys[i] = -lengths[i] * (1.0 + spread * state / 2**31)
    return np.argsort(keys, kind="mergesort")


@compiled
def sift_down(heap: IntArray, value: FloatArray, parent: int = 0) -> None:
    """Restores the order of a heap of positions in `value`, the smallest value on top, after the
    value at `parent` has grown.
    """
    while 2 * parent + 1 < heap.size:
        child = 2 * parent + 1
        if child + 1 < heap.size and value[heap[child + 1]] < value[heap[child]]:
            child += 1
        if value[heap[parent]] <= value[heap[child]]:
            return
        heap[parent], heap[child] = heap[child], heap[parent]
        parent = child


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """Limits of the solution of an integer program.

    `gap_tolerance`: a heuristic result that is proven this close to the optimum is kept as it is.
    """

    solver: Literal["cbc", "highs"] = "cbc"
    gap_tolerance: float = 0.01
    max_nodes: int = 2000
    deadline_s: float = 10.0


def make_model(limits: SolverLimits) -> mip.Model:
    """An empty minimisation with the limits set; raises HydraConfigError for a missing HiGHS."""
    import mip

    try:
        model = mip.Model(
            sense=mip.MINIMIZE, solver_name=mip.HIGHS if limits.solver == "highs" else mip.CBC
        )
    except FileNotFoundError as error:
        raise HydraConfigError(
            "the solver 'highs' is not installed; pip install 'ds_hydra[highs]' or choose the solver 'cbc'"
        ) from error
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    model.max_mip_gap = 1e-6
    return model


def solve_dispatch(problem: DispatchProblem, limits: SolverLimits, assignment: IntArray) -> float:
    """Improves `assignment`, the start, by the program of Eq. (3); returns the bound that it
    proves.

    The problem must be valued by Eq. (2). Grows with sequences times pipelines: seconds at 64 GPUs.
    """
    import mip

    model = make_model(limits)
    num_sequences, num_pipelines = problem.lengths.size, problem.kind_of.size
    cost = problem.sequence_ms[problem.kind_of]
    allowed = problem.lengths[None, :] <= problem.max_len_tokens[problem.kind_of][:, None]
    # is_on[j, i]: sequence i runs on pipeline j.
    is_on = {
        (j, i): model.add_var(var_type=mip.BINARY)
        for j in range(num_pipelines)
        for i in range(num_sequences)
        if allowed[j, i]
    }
    # slowest: time of the slowest pipeline.
    slowest = model.add_var(lb=0.0)
    # [Constraint] Every sequence runs on one pipeline that can fit it (m_ij of Eq. 3).
    for i in range(num_sequences):
        model += mip.xsum(is_on[j, i] for j in range(num_pipelines) if allowed[j, i]) == 1
    loads = []
    for j in range(num_pipelines):
        members = np.flatnonzero(allowed[j]).tolist()
        loads.append(mip.xsum(float(cost[j, i]) * is_on[j, i] for i in members))
        num_waits = int(problem.num_stages[problem.kind_of[j]]) - 1
        # longest: time of the longest sequence on j, which Eq. (2) counts PP - 1 times more.
        longest = model.add_var(lb=0.0)
        if num_waits > 0:
            # [Constraint] The longest sequence is no shorter than any.
            for i in members:
                model += longest >= float(cost[j, i]) * is_on[j, i]
        # [Constraint] No pipeline takes longer than the slowest.
        model += loads[j] + num_waits * longest <= slowest
    for j in range(1, num_pipelines):
        if problem.kind_of[j] == problem.kind_of[j - 1]:
            # [Constraint] Alike pipelines are numbered by load, which leaves one of many equal
            # answers.
            model += loads[j] <= loads[j - 1]
    model.objective = slowest
    start = _sort_alike(problem, assignment)
    model.start = [(variable, float(start[i] == j)) for (j, i), variable in is_on.items()]
    model.optimize(max_seconds=limits.deadline_s, max_nodes=limits.max_nodes)
    if model.num_solutions > 0:
        # Solvers give whole numbers up to a tolerance.
        for (j, i), variable in is_on.items():
            if variable.x > 0.5:
                assignment[i] = j
    return float(model.objective_bound) if model.objective_bound is not None else 0.0


def _sort_alike(problem: DispatchProblem, assignment: IntArray) -> IntArray:
    """`assignment` with alike pipelines renumbered by descending load."""
    num_pipelines = problem.kind_of.size
    cost = problem.sequence_ms[problem.kind_of[assignment], np.arange(assignment.size)]
    load = np.bincount(assignment, weights=cost, minlength=num_pipelines)
    ranking = np.lexsort((-load, problem.kind_of))
    new_number = np.empty(num_pipelines, dtype=np.int64)
    new_number[ranking] = np.arange(num_pipelines)
    renumbered: IntArray = new_number[assignment]
    return renumbered


@dataclass(frozen=True, slots=True)
class MicroBatchesSolution:
    """Micro-batches found for one V (None: none found), and the proven bound of the load of the
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
        # Nothing is faster than `below_ms`; where that is infinite, V is too few for MaxLen
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
