"""Which of many strategies are worth a plan: what one greedy dispatch makes of a mini-batch under
each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds_hydra.sampler.dispatch.dispatch import dispatch_trials
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.problem import DispatchProblem, PipelineKind, make_problem
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

BoolArray = NDArray[np.bool_]

UNEVEN_STEPS = 1.5
"""What lockstep makes of the estimate where pipelines have different numbers of micro-batches: one
with two beside others with one.
"""


class Screen:
    """Strategies as the arrays that compiled code works on; their mini-batches come one by one."""

    def __init__(
        self,
        strategies: Sequence[Strategy],
        profile: Profile,
        num_devices: int,
        *,
        num_trials: int = 1,
        seed: int = 0,
    ) -> None:
        self._num_trials, self._seed = num_trials, seed
        placed = dict.fromkeys(scheme for strategy in strategies for scheme in strategy.schemes)
        schemes: list[Scheme] = []
        for gathers in (False, True):  # a strategy has one kind
            if alike := tuple(scheme for scheme in placed if scheme.gather is gathers):
                schemes += Strategy(alike).schemes
        column = {scheme: k for k, scheme in enumerate(schemes)}
        self._counts = np.zeros((len(strategies), len(schemes)), dtype=np.int64)
        self._max_len = np.zeros((len(strategies), len(schemes)), dtype=np.int64)
        for row, strategy in enumerate(strategies):
            for scheme, count in Counter(strategy.schemes).items():
                self._counts[row, column[scheme]] = count
                longest = profile.max_len_tokens(scheme, num_devices, strategy)
                self._max_len[row, column[scheme]] = max(0, longest)
        self._gathers = np.array([strategy.gathers for strategy in strategies], dtype=np.bool_)
        self._kinds = [
            PipelineKind(1, scheme.pp, 1, profile.get_latency(scheme)) for scheme in schemes
        ]

    def estimates_ms(self, batch: GlobalBatch) -> FloatArray:
        """Time of the slowest pipeline of each strategy after the trials of Alg. 1, without
        packing; inf where a sequence does not fit.
        """
        lengths = np.sort(np.array(batch.lengths, dtype=np.int64))[::-1]
        found = np.zeros(self._counts.shape[0])
        if lengths.size and found.size:
            every = make_problem(lengths, self._kinds)
            _screen(
                every,
                self._counts,
                self._max_len,
                self._gathers,
                self._num_trials,
                self._seed,
                found,
            )
        return found


@compiled
def _screen(
    every: DispatchProblem,
    counts: IntArray,
    max_len: IntArray,
    gathers: BoolArray,
    num_trials: int,
    seed: int,
    found: FloatArray,
) -> None:
    """Writes the estimate of each strategy; `every` has one pipeline of each kind there is."""
    assignment = np.zeros(every.lengths.size, dtype=np.int64)
    for row in range(counts.shape[0]):
        kinds = np.flatnonzero(counts[row])
        if max_len[row].max() < every.lengths[0]:
            found[row] = np.inf
            continue
        problem = DispatchProblem(
            every.lengths,
            every.sequence_ms[kinds],
            np.repeat(np.arange(kinds.size), counts[row][kinds]),
            every.num_stages[kinds],
            every.constant_ms[kinds],
            every.traffic_ms[kinds],
            max_len[row][kinds],
            every.ratio[kinds],
            every.share[kinds],
            every.forward_fraction,
            every.is_exact,
            every.is_eq2,
        )
        found[row] = dispatch_trials(problem, num_trials, seed, assignment)
        if gathers[row]:
            tokens = np.zeros(problem.kind_of.size)
            for i in range(assignment.size):
                tokens[assignment[i]] += every.lengths[i]
            steps = np.ceil(tokens / problem.max_len_tokens[problem.kind_of])
            if steps.max() > max(1.0, steps.min()):  # some wait for others in lockstep
                found[row] *= UNEVEN_STEPS
