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

import numpy as np

from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.simulator.context_parallel import ContextParallel
from ds_hydra.simulator.scenario import Outcome, Scenario, SystemResult, best_of, summarize
from ds_hydra.simulator.sharded import sharded_groups, with_traffic_ms
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.neighbours import cuts
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

    def steps_ms(
        self, lengths: IntArray, finish: Callable[[FloatArray], float], limit: float = np.inf
    ) -> FloatArray:
        """Times of the steps of a mini-batch (lengths descending), [steps, 2]: the slowest group,
        and the device time of all; the steps for which `finish` of the slowest, a convex function,
        is least. No steps where that is not below `limit`.
        """
        table = np.array([of(lengths) for of in self._sequences_ms])
        fewest = max(1, -(-int(lengths.sum()) // self._room))
        shared_ms = float((table * self._sizes[:, None]).min(axis=0).sum()) / self.num_ranks
        best, least, tried, count = np.zeros((0, 2)), limit, 0, fewest
        while tried <= MORE_STEPS and count <= max(fewest, lengths.size):
            is_found = False
            if finish(np.full(count, shared_ms / count)) >= least:
                break
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
    # A bound for each cut, cheapest first: placing is what takes long, and a few cuts are placed.
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
    for row in np.argsort(bounds):
        if bounds[row] >= best:
            break
        slowest = _place(lengths, table, constants, max_len, cuts[row], best, ends, filled)
        if slowest < best:
            best = slowest
            found[0], found[1] = slowest, 0.0
            first = 0
            for k in range(num_sizes):
                for g in range(first, first + cuts[row, k]):
                    if filled[g] > 0:
                        found[1] += sizes[k] * ends[g]
                first += cuts[row, k]
    return best < np.inf


@compiled
def _place(
    lengths: IntArray,
    table: FloatArray,
    constants: FloatArray,
    max_len: IntArray,
    cut: IntArray,
    limit: float,
    ends: FloatArray,
    filled: IntArray,
) -> float:
    """The end of the slowest group, infinite where it is not below `limit`; writes the end of each
    group and its tokens, groups of one size as a heap with the earliest first.

    Each sequence goes to the earliest group of the size where it ends first and has room.
    """
    first = 0
    for k in range(cut.size):
        for g in range(first, first + cut[k]):
            ends[g], filled[g] = constants[k], 0
        first += cut[k]
    slowest = 0.0
    for i in range(lengths.size):
        end, kind, top = limit, -1, 0
        first = 0
        for k in range(cut.size):
            has_room = cut[k] > 0 and filled[first] + lengths[i] <= max_len[k]
            if has_room and ends[first] + table[k, i] < end:
                end, kind, top = ends[first] + table[k, i], k, first
            first += cut[k]
        if kind < 0:
            return np.inf
        slowest = max(slowest, end)
        tokens = filled[top] + lengths[i]
        place = 0
        while True:  # down, past every group that ends earlier
            child = 2 * place + 1
            if child >= cut[kind]:
                break
            if child + 1 < cut[kind] and ends[top + child + 1] < ends[top + child]:
                child += 1
            if ends[top + child] >= end:
                break
            ends[top + place], filled[top + place] = ends[top + child], filled[top + child]
            place = child
        ends[top + place], filled[top + place] = end, tokens
    return slowest


def flexsp(scenario: Scenario, *, name: str) -> SystemResult | None:
    """FlexSP: ZeRO-3, groups of Ulysses sequence parallelism of sizes chosen for each micro-batch,
    with activation checkpointing or not. See [Note: Mixed groups]. None where nothing holds the
    context.
    """
    step_ms = scenario.cluster.step_ms if scenario.cluster else 0.0

    def total_ms(slowest: FloatArray) -> float:
        return float(with_traffic_ms(scenario, slowest).sum())

    found: list[Outcome | None] = [None] * len(scenario.lengths)
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
        for number, lengths in enumerate(scenario.lengths):
            known = found[number]
            limit = known.iteration_ms - step_ms if known else np.inf
            steps = mixed.steps_ms(lengths, total_ms, limit)
            if not steps.size:
                continue
            propagation = float(steps[:, 0].sum())
            busy = float(steps[:, 1].sum()) / scenario.num_devices
            found[number] = Outcome(
                propagation_ms=propagation,
                iteration_ms=total_ms(steps[:, 0]) + step_ms,
                imbalance=0.0,
                bubble=1 - busy / propagation if propagation else 0.0,
            )
    outcomes = [outcome for outcome in found if outcome is not None]
    if len(outcomes) < len(found):
        return None
    return summarize(name, "groups for each micro-batch", outcomes)


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
