"""The exact (0,1)-integer program of dispatch (Eq. 3): the reference, and `dispatch: ideal`."""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.ilp import SolverLimits, make_model
from ds_hydra.sampler.problem import DispatchProblem
from ds_hydra.sampler.schedule import IntArray


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
