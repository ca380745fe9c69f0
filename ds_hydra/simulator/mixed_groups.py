"""Groups of different sizes side by side, formed anew for every micro-batch, which all end before
the next: FlexSP, and Megatron-Core's dynamic context parallelism.

[Note: Mixed groups] A step takes some of the sequences. Every way to cut the ranks into groups of
the known sizes is tried, in order of a lower bound, until the bound is no better than the best.
Each gets the sequences longest first, where they then end first. A mini-batch is cut into the
fewest steps that can hold it, or up to `MORE_STEPS` more: neighbours in length together, or dealt
out; the better is taken, with hindsight. The papers solve integer programs with deadlines for this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.simulator.context_parallel import ContextParallel
from ds_hydra.simulator.scenario import Outcome, Scenario, SystemResult, best_of, summarize
from ds_hydra.simulator.sharded import sharded_groups, with_traffic_ms
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

MORE_STEPS = 2


class MixedGroups:
    """What groups of some sizes take. `sizes` in ranks, smallest first; `max_len` of each."""

    def __init__(
        self,
        num_ranks: int,
        sizes: Sequence[int],
        max_len: Sequence[int],
        constants_ms: Sequence[float],
        sequences_ms: Sequence[Callable[[IntArray], FloatArray]],
    ) -> None:
        self.num_ranks, self.longest = num_ranks, max(max_len)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._max_len = np.array(max_len, dtype=np.int64)
        self._constants = np.array(constants_ms, dtype=np.float64)
        self._sequences_ms = sequences_ms
        self._cuts = np.array(cuts(num_ranks, tuple(sizes)), dtype=np.int64)
        most = (self._cuts * self._max_len).sum(axis=1)
        self._room = int(most.max())

    def steps_ms(self, lengths: IntArray, finish: Callable[[FloatArray], float]) -> FloatArray:
        """Times of the steps of a mini-batch (lengths descending), [steps, 2]: the slowest group,
        and the device time of all; the steps for which `finish` of the slowest is least.
        """
        table = np.array([of(lengths) for of in self._sequences_ms])
        fewest = max(1, -(-int(lengths.sum()) // self._room))
        best, least, tried, count = np.zeros((0, 2)), np.inf, 0, fewest
        while tried <= MORE_STEPS and count <= max(fewest, lengths.size):
            is_found = False
            for members in (_by_length(lengths, count), _dealt(lengths, count)):
                steps = self._solve(lengths, table, members)
                if steps is not None:
                    is_found = True
                    if (ms := finish(steps[:, 0])) < least:
                        best, least = steps, ms
            tried += is_found
            count += 1
        return best

    def _solve(
        self, lengths: IntArray, table: FloatArray, members: list[IntArray]
    ) -> FloatArray | None:
        found = np.zeros((len(members), 2))
        for step, own in enumerate(members):
            costs = np.ascontiguousarray(table[:, own])
            is_held = not own.size or solve_step(
                lengths[own],
                costs,
                self._constants,
                self._sizes,
                self._max_len,
                self._cuts,
                self.num_ranks,
                found[step],
            )
            if not is_held:
                return None
        return found


@lru_cache(maxsize=64)
def cuts(num_ranks: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """How many groups of each size: every way to use all ranks, or all that `sizes` can fill.

    >>> cuts(4, (1, 2))
    [(4, 0), (2, 1), (0, 2)]
    """
    if len(sizes) == 1:
        return [(num_ranks // sizes[0],)]
    last = sizes[-1]
    return [
        (*head, count)
        for count in range(num_ranks // last + 1)
        for head in cuts(num_ranks - count * last, sizes[:-1])
    ]


def _by_length(lengths: IntArray, count: int) -> list[IntArray]:
    """Neighbours in length together, about as many tokens in each step."""
    ends = np.cumsum(lengths)
    step = np.minimum(count - 1, (ends - 1) * count // max(1, int(ends[-1])))
    return [np.flatnonzero(step == k) for k in range(count)]


def _dealt(lengths: IntArray, count: int) -> list[IntArray]:
    """Every step gets sequences of all lengths."""
    return [np.arange(k, lengths.size, count) for k in range(count)]


@compiled
def solve_step(
    lengths: IntArray,
    table: FloatArray,
    constants: FloatArray,
    sizes: IntArray,
    max_len: IntArray,
    cuts: IntArray,
    num_ranks: int,
    found: FloatArray,
) -> bool:
    """Writes the time of the slowest group and the device time of all, for the best cut; False
    where no cut holds the sequences. `table`: ms of [size, sequence]. See [Note: Mixed groups].
    """
    num_sizes, num_sequences = table.shape
    bounds = np.full(cuts.shape[0], np.inf)
    total = lengths.sum()
    for row in range(cuts.shape[0]):
        room, alone, work = 0, np.inf, 0.0
        for k in range(num_sizes):
            if cuts[row, k] > 0:
                room += cuts[row, k] * max_len[k]
                if lengths[0] <= max_len[k]:
                    alone = min(alone, table[k, 0] + constants[k])
        if room < total or alone == np.inf:
            continue
        for i in range(num_sequences):
            cheapest = np.inf
            for k in range(num_sizes):
                if cuts[row, k] > 0 and lengths[i] <= max_len[k]:
                    cheapest = min(cheapest, sizes[k] * table[k, i])
            work += cheapest
        bounds[row] = max(alone, work / num_ranks)
    best = np.inf
    ends, filled = np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64)
    kind = np.zeros(num_ranks, dtype=np.int64)
    for row in np.argsort(bounds):
        if bounds[row] >= best:
            break
        num_groups = 0
        for k in range(num_sizes):
            for _ in range(cuts[row, k]):
                ends[num_groups], filled[num_groups], kind[num_groups] = constants[k], 0, k
                num_groups += 1
        slowest = 0.0
        for i in range(num_sequences):
            group, end = -1, best
            for g in range(num_groups):
                if filled[g] + lengths[i] <= max_len[kind[g]] and ends[g] + table[kind[g], i] < end:
                    group, end = g, ends[g] + table[kind[g], i]
            if group < 0:
                slowest = np.inf
                break
            ends[group] = end
            filled[group] += lengths[i]
            slowest = max(slowest, end)
        if slowest < best:
            best = slowest
            found[0], found[1] = slowest, 0.0
            for g in range(num_groups):
                if filled[g] > 0:
                    found[1] += sizes[kind[g]] * ends[g]
    return best < np.inf


def flexsp(scenario: Scenario, *, name: str) -> SystemResult | None:
    """FlexSP: ZeRO-3, groups of Ulysses sequence parallelism of sizes chosen for each micro-batch,
    with activation checkpointing or not. See [Note: Mixed groups]. None where nothing holds the
    context.
    """
    results = []
    for is_checkpointed in (False, True):
        groups = list(sharded_groups(scenario, [is_checkpointed]))
        if not groups or groups[-1].max_len < scenario.context_length:
            continue
        mixed = MixedGroups(
            scenario.num_devices,
            [group.size for group in groups],
            [group.max_len for group in groups],
            [group.terms()[2] for group in groups],
            [group.sequences_ms for group in groups],
        )
        step_ms = scenario.cluster.step_ms if scenario.cluster else 0.0

        def total_ms(slowest: FloatArray) -> float:
            return float(with_traffic_ms(scenario, slowest).sum())

        outcomes = []
        for lengths in scenario.lengths:
            steps = mixed.steps_ms(lengths, total_ms)
            propagation = float(steps[:, 0].sum())
            busy = float(steps[:, 1].sum()) / scenario.num_devices
            outcomes.append(
                Outcome(
                    propagation_ms=propagation,
                    iteration_ms=total_ms(steps[:, 0]) + step_ms,
                    imbalance=0.0,
                    bubble=1 - busy / propagation if propagation else 0.0,
                )
            )
        text = "groups for each micro-batch" + (", AC" if is_checkpointed else "")
        results.append(summarize(name, text, outcomes))
    return best_of(results) if results else None


def dynamic_cp(scenario: Scenario, *, name: str) -> SystemResult | None:
    """Megatron-Core's dynamic context parallelism: <TP,PP> fixed, ranks of all pipelines in groups
    of CP sizes chosen for each micro-batch. See [Note: Mixed groups]. Tuned over <TP,PP>.
    """
    results = []
    for scheme in usable_schemes(scenario.profile, scenario.num_devices):
        found = _dynamic_cp(scenario, scheme, name)
        if found is not None:
            results.append(found)
    return best_of(results) if results else None


def _dynamic_cp(scenario: Scenario, scheme: Scheme, name: str) -> SystemResult | None:
    num_pipelines = scenario.num_devices // scheme.num_devices
    degrees = [2**k for k in range(num_pipelines.bit_length())]
    groups = [ContextParallel(scenario=scenario, scheme=scheme, cp=cp) for cp in degrees]
    if groups[-1].max_len < scenario.context_length:
        return None
    mixed = MixedGroups(
        num_pipelines,
        degrees,
        [group.max_len for group in groups],
        [group.latency.constant_ms for group in groups],
        [group.sequences_ms for group in groups],
    )
    alike = Strategy((scheme,) * num_pipelines)

    def total_ms(slowest: FloatArray) -> float:
        return float(slowest.sum() + (scheme.pp - 1) * slowest.max())

    outcomes = []
    for lengths in scenario.lengths:
        steps = mixed.steps_ms(lengths, total_ms)
        tokens = [int(lengths.sum()) // (len(steps) * num_pipelines)] * len(steps)
        found = scenario.run_times(alike, [steps[:, 0]] * num_pipelines, [tokens] * num_pipelines)
        outcomes.append(found)
    return summarize(name, f"{scheme}, CP for each micro-batch", outcomes)
