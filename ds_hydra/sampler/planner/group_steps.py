"""Groups of ranks of different sizes side by side, formed anew for every step, in which each group
has one micro-batch and which ends before the next.

[Note: Mixed groups] A step takes some of the sequences. Every way to cut the ranks into groups of
the known sizes is tried (of many, some: `MixedGroups.step`), in order of a lower bound, until the
bound is no better than the best.
Sequences are assigned in order of decreasing length, each to the group that would finish it
earliest. A global batch is cut into the fewest steps that can hold it, or up to `MORE_STEPS` more.
Where one number of steps after another holds too little, more and more of them are passed over.
Steps are made one after the other out of the sequences that are left: the longest of them, about as
many tokens as each step would have, somewhat less, or every second one of two steps. What else ends
before the slowest group, and has room, goes into the same step, longest first. So a step that has
to wait for a long sequence has short ones beside it, and the steps after it are shorter. A way is
left once what it has takes longer, with the others all busy, than the best. In the best steps
sequences then change places between the slowest group and others, as pipelines do in a dispatch.
FlexSP, whose space this is, solves integer programs with deadlines for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.planner.problem import EPSILON, DispatchProblem, sift_down
from ds_hydra.sampler.planner.refine import improve_dispatch
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.schemes.enumeration import cuts, is_power_of_two, num_cuts
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION

MORE_STEPS = 2
_MAX_EXCHANGES, _NUM_TARGETS, _ENOUGH_GAP = 400, 4, 1e-3
"""Exchanges in a step at most, with as many of the fastest groups, until it is as near to having
all ranks busy.
"""
_EVERY = 0.0
# Thirteen shares instead of these four shorten iterations of ByteScale's case by 0.3%.
_SHARES = (_EVERY, 1.0, 0.9, 0.8)
"""Shares of its part of the tokens that a step takes first, longest sequences first; or every n-th
sequence where n steps are left.
"""
MAX_CUTS = 2400
"""Ways to cut the ranks that are all tried: 64 ranks have 1,828 into powers of two."""
_FAILED_A_STRIDE = 3
"""Numbers of steps in a row that do not hold the sequences, until one more is passed over."""
_NUM_DEADLINES = 12
_NUM_PLACES = 33
"""Sequences of a global batch, evenly spread over its lengths, whose length bounds the steps."""
_ROUNDING = 1e-6
"""Relative tolerance when step times are compared. Smaller gains are rounding."""


class GroupStep(NamedTuple):
    """One step: groups side by side, each with one micro-batch.

    `kind`: which of the `MixedGroups` it is of. `slowest_ms`: time of its slowest group.
    `device_ms`: time of all devices together. `members`: positions of its sequences, descending in
    length. `group_of`: the group of each member, groups of the smallest size first. `counts`:
    number of groups of each size.
    """

    kind: int
    slowest_ms: float
    device_ms: float
    members: IntArray
    group_of: IntArray
    counts: IntArray


class Cuts(NamedTuple):
    """Ways to use all ranks. `first`: how many groups of each size, [cut, size]. `exchanges`: what
    makes others of them, [exchange, size]; none where the first are all.
    """

    first: IntArray
    exchanges: IntArray

    @classmethod
    def all(cls, found: Sequence[Sequence[int]] | IntArray) -> Cuts:
        """Cuts that are these and no others."""
        first = np.array(found, dtype=np.int64)
        return cls(first, first[:0])


class MixedGroups:
    """Times of groups of some sizes. `sizes` in ranks; `max_len` of each. `cuts`: in place of
    `find_cuts`.
    """

    def __init__(
        self,
        num_ranks: int,
        sizes: Sequence[int],
        max_len: Sequence[int],
        constants_ms: Sequence[float],
        sequences_ms: Sequence[Callable[[IntArray], FloatArray]],
        cuts: Cuts | None = None,
    ) -> None:
        self.num_ranks, self.longest = num_ranks, max(max_len)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._max_len = np.array(max_len, dtype=np.int64)
        self._constants = np.array(constants_ms, dtype=np.float64)
        self.start_ms = float(self._constants.min())
        """Lower bound of any step."""
        self._sequences_ms = sequences_ms
        self._cuts = find_cuts(num_ranks, tuple(sizes)) if cuts is None else cuts
        most = (self._cuts.first * self._max_len).sum(axis=1)
        self._room = int(most.max())
        self._of_first = sizes_used(self._cuts.first)  # which every step tries

    def fewest(self, num_tokens: int) -> int:
        """Steps that hold so many tokens, at least."""
        return max(1, -(-num_tokens // self._room))

    def most_sequences(self, lengths: IntArray) -> IntArray:
        """Return how many sequences of each of `lengths` one step can hold at most."""
        held = self._max_len[:, None] // lengths
        of_all = held * self.num_ranks // self._sizes[:, None]
        most: IntArray = of_all.max(axis=0)
        return most

    def table_ms(self, lengths: IntArray) -> FloatArray:
        """Milliseconds that each sequence adds to a micro-batch: [size, sequence]."""
        return np.array([of(lengths) for of in self._sequences_ms])

    def work_ms(self, table: FloatArray) -> FloatArray:
        """Milliseconds of each sequence, shared by all ranks, at the size where it takes least."""
        least: FloatArray = (table * self._sizes[:, None]).min(axis=0) / self.num_ranks
        return least

    def groups_of(self, lengths: IntArray, step: GroupStep) -> tuple[FloatArray, IntArray]:
        """Time in ms and ranks of each group of `step` that has sequences."""
        kinds = np.repeat(np.arange(self._sizes.size), step.counts)
        times = self._constants[kinds]
        table = self.table_ms(lengths[step.members])
        np.add.at(times, step.group_of, table[kinds[step.group_of], np.arange(step.members.size)])
        used = np.unique(step.group_of)
        return times[used], self._sizes[kinds][used]

    def improved(self, lengths: IntArray, table: FloatArray, step: GroupStep) -> GroupStep:
        """`step` once no exchange of sequences makes its slowest group faster."""
        kind_of = np.repeat(np.arange(self._sizes.size), step.counts)
        own_ms = np.ascontiguousarray(table[:, step.members])
        # A second micro-batch costs more than all there is to save, so that no exchange pays for it
        dear_ms = float(own_ms.sum(axis=1).max() + self._constants.max())
        of_all = np.ones_like(self._constants)
        problem = DispatchProblem(
            lengths=lengths[step.members],
            sequence_ms=own_ms,
            kind_of=kind_of,
            num_stages=of_all.astype(np.int64),
            constant_ms=self._constants + dear_ms,
            # The floor of traffic is that of the whole step: `finish` of `plan_steps` knows it
            traffic_ms=np.zeros_like(self._constants),
            max_len_tokens=self._max_len,
            ratio=of_all[:, None],  # not read, as `share`: there is one stage
            share=of_all[:, None, None],
            forward_fraction=FORWARD_FRACTION,
            is_exact=True,
            is_eq2=False,
        )
        group_of = step.group_of.copy()
        least_ms = self.start_ms + float(self.work_ms(own_ms).sum())
        # Compared with times whose constants have `dear_ms`, too
        enough_ms = dear_ms + (1 + _ENOUGH_GAP) * least_ms
        improve_dispatch(problem, group_of, enough_ms, _MAX_EXCHANGES, _NUM_TARGETS)
        moved = step._replace(group_of=group_of)
        times_ms, sizes = self.groups_of(lengths, moved)
        return moved._replace(slowest_ms=float(times_ms.max()), device_ms=float(times_ms @ sizes))

    def filled(
        self, lengths: IntArray, table: FloatArray, step: GroupStep, left: IntArray
    ) -> GroupStep:
        """`step` with those of the sequences `left` (descending) that a group has room for, and
        with which it ends no later than the slowest.
        """
        kind_of = np.repeat(np.arange(self._sizes.size), step.counts)
        group_of = np.full(lengths.size, -1, dtype=np.int64)
        group_of[step.members] = step.group_of
        device_ms = fill_step(
            lengths,
            table,
            self._constants,
            self._sizes,
            self._max_len,
            kind_of,
            left,
            step.slowest_ms,
            group_of,
        )
        members = left[group_of[left] >= 0]
        return step._replace(device_ms=device_ms, members=members, group_of=group_of[members])

    def step(
        self,
        kind: int,
        lengths: IntArray,
        table: FloatArray,
        members: IntArray,
        limit: float = np.inf,
    ) -> GroupStep | None:
        """The best step of `members`, None where no cut holds them in less than `limit`.

        Where not all cuts can be tried: of the first ones, of those that meet a deadline (halved in
        between again and again), then by the best exchange of at most two groups for others, as
        long as one is better.
        """
        first, exchanges = self._cuts
        best = self._step_of(first, kind, lengths, table, members, limit)
        if best is None or not exchanges.size:
            return best
        own, costs = lengths[members], np.ascontiguousarray(table[:, members])
        # All ranks together need so long: a shorter deadline is not worth a try
        least_ms = (1 - _ROUNDING) * (self.start_ms + float(self.work_ms(costs).sum()))
        low, high = 0.0, best.slowest_ms
        for _ in range(_NUM_DEADLINES):
            deadline, tried = (low + high) / 2, np.zeros((1, self._sizes.size), dtype=np.int64)
            is_met = deadline >= least_ms and cut_for_deadline(
                own,
                costs,
                self._constants,
                self._sizes,
                self._max_len,
                deadline,
                self.num_ranks,
                tried[0],
            )
            if is_met:
                high = deadline
                # Made for the deadline; with sequences placed as in all others it may be slower
                best = self._step_of(tried, kind, lengths, table, members, best.slowest_ms) or best
            else:
                low = deadline
        while True:
            near = best.counts + exchanges
            near = np.ascontiguousarray(near[(near >= 0).all(axis=1)])
            better = self._step_of(near, kind, lengths, table, members, best.slowest_ms)
            if better is None:
                return best
            best = better

    def _step_of(
        self,
        tried: IntArray,
        kind: int,
        lengths: IntArray,
        table: FloatArray,
        members: IntArray,
        limit: float,
    ) -> GroupStep | None:
        """The same of the `tried` cuts."""
        group_of, times_ms = np.zeros(members.size, dtype=np.int64), np.zeros(2)
        cut = solve_step(
            lengths[members],
            np.ascontiguousarray(table[:, members]),
            self._constants,
            self._sizes,
            self._max_len,
            tried,
            *(self._of_first if tried is self._cuts.first else sizes_used(tried)),
            self.num_ranks,
            limit,
            times_ms,
            group_of,
        )
        if cut < 0:
            return None
        slowest_ms, device_ms = times_ms.tolist()
        return GroupStep(kind, slowest_ms, device_ms, members, group_of, tried[cut])


def sizes_used(tried: IntArray) -> tuple[IntArray, IntArray]:
    """One of the cuts `tried` for each set of sizes that some have, [case, size], and the case of
    each cut.
    """
    bits = np.packbits(tried > 0, axis=1)
    _, first, case_of = np.unique(
        bits.view(f"V{bits.shape[1]}").ravel(), return_index=True, return_inverse=True
    )
    return tried[first], case_of


@lru_cache(maxsize=64)
def find_cuts(
    num_ranks: int, sizes: tuple[int, ...], *, anywhere: bool = False, most: int = MAX_CUTS
) -> Cuts:
    """Every way to use all ranks; of more than `most` those of sizes that divide the ranks
    (`anywhere`: of powers of two) to begin with, without the smallest where these are too many,
    too.
    """
    if num_cuts(num_ranks, sizes) <= most:
        return Cuts.all(cuts(num_ranks, sizes))
    begin = [
        k for k, n in enumerate(sizes) if (is_power_of_two(n) if anywhere else num_ranks % n == 0)
    ]
    while len(begin) > 2 and num_cuts(num_ranks, tuple(sizes[k] for k in begin)) > most:
        begin = begin[1:]
    found = cuts(num_ranks, tuple(sizes[k] for k in begin))
    first = np.zeros((len(found), len(sizes)), dtype=np.int64)
    first[:, begin] = found
    few: list[tuple[int, ...]] = [(k,) for k in range(len(sizes))]
    few += combinations_with_replacement(range(len(sizes)), 2)
    counts = np.array([np.bincount(own, minlength=len(sizes)) for own in few])
    ranks = counts @ np.array(sizes)
    # Only groups of as many ranks change places: a cut uses all ranks
    pairs = np.argwhere(ranks[:, None] == ranks)
    moves: IntArray = counts[pairs[:, 1]] - counts[pairs[:, 0]]
    return Cuts(first, np.ascontiguousarray(moves[moves.any(axis=1)]))


def plan_steps(
    kinds: Sequence[MixedGroups],
    lengths: IntArray,
    finish: Callable[[FloatArray], float],
    limit: float = np.inf,
    between_ms: Callable[[GroupStep, GroupStep], float] = lambda *_: 0.0,
) -> list[GroupStep]:
    """The steps of a global batch (lengths descending), each of one of `kinds`, for which `finish`
    of the slowest groups, a convex function of their times, and `between_ms` of neighbours are
    least together; none where that is not below `limit`.
    """
    if not lengths.size:
        return []
    tables = [kind.table_ms(lengths) for kind in kinds]
    work_ms = np.min([kind.work_ms(table) for kind, table in zip(kinds, tables)], axis=0)
    start_ms = min(kind.start_ms for kind in kinds)
    fewest = [kind.fewest(int(lengths.sum())) for kind in kinds]
    best: list[GroupStep] = []
    least, num_tried = limit, 0

    def bound(slowest: FloatArray, num_known: int, left_ms: float) -> float:
        """Return the least time of all steps, of which the first ones are known."""
        # A convex function of times that add up to the same is least where all are equal.
        num_left = slowest.size - num_known
        if num_left:
            slowest[num_known:] = left_ms / num_left + start_ms
        return finish(slowest)

    everything, all_ms = np.arange(lengths.size), float(work_ms.sum())
    is_left = np.empty(lengths.size, dtype=np.bool_)
    room = _Room.of(kinds, lengths)
    # At least as many as hold all tokens, and as hold the long sequences
    count, stride, num_failed = max(min(fewest), room.fewest(everything)), 1, 0
    while count <= max(*fewest, lengths.size):
        slowest = np.empty(count)
        # More steps add constants: where so many cannot win no larger number can
        if bound(slowest, 0, all_ms) >= least:
            break
        is_found = False
        # One step takes all sequences, whatever the share
        for share in _SHARES if count > 1 else _SHARES[:1]:
            steps: list[GroupStep] = []
            left, left_ms, seen_ms = everything, all_ms, 0.0
            is_left[:] = True
            for rest in reversed(range(count)):
                own = _first_of(lengths, left, rest + 1, share)
                step = _best_step(kinds, lengths, tables, own, steps[-1:], between_ms)
                if step is None:
                    break
                # The last step has all that is left already.
                if rest:
                    step = kinds[step.kind].filled(lengths, tables[step.kind], step, left)
                slowest[len(steps)] = step.slowest_ms
                seen_ms += between_ms(steps[-1], step) if steps else 0.0
                steps.append(step)
                is_left[step.members] = False
                left = left[is_left[left]]
                left_ms -= float(work_ms[step.members].sum())
                # Too few steps are left, as if this one had found no place
                if room.fewest(left) > rest:
                    step = None
                    break
                # Steps for which nothing is left do not run
                ends = slowest if left.size else slowest[: len(steps)]
                ms = seen_ms + bound(ends, len(steps), left_ms)
                # Rounding of the sums must not decide that an equal plan is carried on.
                if ms >= least * (1 - EPSILON):
                    break
                if not left.size:  # what the step took besides may be all of the later ones
                    best, least = steps, ms
                    break
            # A search that its bound has ended did not lack room: it was too slow
            is_found |= step is not None
        num_tried += is_found
        # From `max(fewest)` steps on all kinds have room for the tokens
        if num_tried > MORE_STEPS and count >= max(fewest):
            break
        if is_found and stride > 1:  # back to the first that was passed over
            count, stride, num_failed = count - stride + 1, 1, 0
            continue
        num_failed = 0 if is_found else num_failed + 1
        stride = 1 + num_failed // _FAILED_A_STRIDE
        count += stride
    return [kinds[step.kind].improved(lengths, tables[step.kind], step) for step in best]


class _Room(NamedTuple):
    """Largest numbers of sequences, as long as some of a global batch or longer, that one step
    holds.

    Lengths are those of `places` in the global batch; a step holds `most` of each.
    """

    places: IntArray
    most: IntArray

    @classmethod
    def of(cls, kinds: Sequence[MixedGroups], lengths: IntArray) -> _Room:
        """Return the room of a step of any of `kinds`."""
        places = np.unique(np.linspace(0, lengths.size - 1, _NUM_PLACES).astype(np.int64))
        most = np.max([kind.most_sequences(lengths[places]) for kind in kinds], axis=0)
        return cls(places, np.maximum(most, 1))

    def fewest(self, left: IntArray) -> int:
        """Return a lower bound of the steps that the sequences `left` need (descending)."""
        # Positions ascend as lengths descend: up to a place all are as long or longer
        num_long = np.searchsorted(left, self.places, side="right")
        return int((-(-num_long // self.most)).max(initial=0))


def _best_step(
    kinds: Sequence[MixedGroups],
    lengths: IntArray,
    tables: Sequence[FloatArray],
    members: IntArray,
    before: Sequence[GroupStep],
    between_ms: Callable[[GroupStep, GroupStep], float],
) -> GroupStep | None:
    """Return the step of `members` that ends first after that `before` it, if there is one."""
    best, least_ms = None, np.inf
    for number, (kind, table) in enumerate(zip(kinds, tables)):
        # What is between steps is never below 0, so the limit loses no better one
        step = kind.step(number, lengths, table, members, least_ms)
        if step is None:
            continue
        ms = step.slowest_ms + sum(between_ms(other, step) for other in before)
        if ms < least_ms:
            best, least_ms = step, ms
    return best


def _first_of(lengths: IntArray, left: IntArray, count: int, share: float) -> IntArray:
    """Sequences of `left` that the next one of `count` steps takes first, by one of `_SHARES`."""
    if count == 1 or share == _EVERY:
        return left[::count]
    ends = np.cumsum(lengths[left])
    most = share * float(ends[-1]) / count
    return left[: max(1, int(np.searchsorted(ends, most, side="right")))]


@compiled
def solve_step(
    lengths: IntArray,
    table: FloatArray,
    constants: FloatArray,
    sizes: IntArray,
    max_len: IntArray,
    cuts: IntArray,
    cases: IntArray,
    case_of: IntArray,
    num_ranks: int,
    limit: float,
    times_ms: FloatArray,
    group_of: IntArray,
) -> int:
    """The best cut, -1 where none holds the sequences in less than `limit`; writes `times_ms`, of
    its slowest group and of all devices together, and the group of each sequence. `table`: ms of
    [size, sequence]; `cases`, `case_of`: `sizes_used` of the cuts. See [Note: Mixed groups].
    """
    num_sizes, num_sequences = table.shape
    start_ms = constants.min()
    # A bound for each cut, cheapest first: placing is what takes long, and a few cuts are placed.
    bounds = np.full(cuts.shape[0], np.inf)
    work_ms = np.full(cases.shape[0], -1.0)  # that of cuts with the same sizes is equal
    cheapest_ms = np.empty((cases.shape[0], num_sequences))  # of all ranks together
    total = lengths.sum()
    for row in range(cuts.shape[0]):
        room, alone, case = 0, np.inf, case_of[row]
        for k in range(num_sizes):
            if cuts[row, k] > 0:
                room += cuts[row, k] * max_len[k]
                if lengths[0] <= max_len[k]:
                    alone = min(alone, table[k, 0] + constants[k])
        if room < total or alone == np.inf:  # too little memory in all, or for the longest one
            continue
        if work_ms[case] < 0.0:
            work_ms[case] = 0.0
            cheapest_ms[case] = np.inf
            for k in range(num_sizes):
                if cases[case, k] > 0:
                    for i in range(num_sequences):
                        if lengths[i] <= max_len[k]:
                            ms = sizes[k] * table[k, i]
                            cheapest_ms[case, i] = min(cheapest_ms[case, i], ms)
            work_ms[case] = cheapest_ms[case].sum()
        # The longest sequence takes its time; all together, each where it is cheapest, theirs.
        bounds[row] = max(alone, work_ms[case] / num_ranks + start_ms)
    best, best_cut = limit, -1
    ends, filled = np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64)
    heap, placed = np.zeros_like(filled), np.zeros_like(group_of)
    # Of equal bounds this order decides the plan: another kind of sort makes other plans.
    for row in np.argsort(bounds):
        if bounds[row] >= best:  # and so are all that follow
            break
        case = case_of[row]
        # A group that starts after `best` is of no use: its ranks lose that much, and no more.
        begun_ms = (cuts[row] * sizes * np.minimum(constants, best)).sum()
        # What all ranks together have to spare, were all of them busy to the end.
        spare_ms = best * num_ranks - begun_ms - work_ms[case]
        slowest = _place(
            lengths,
            table,
            constants,
            sizes,
            max_len,
            cuts[row],
            best,
            cheapest_ms[case],
            spare_ms + _ROUNDING * best,
            ends,
            filled,
            heap,
            placed,
        )
        if slowest < best:
            best, best_cut = slowest, row
            group_of[:] = placed
            times_ms[0], times_ms[1] = slowest, 0.0
            first = 0
            for k in range(num_sizes):
                for g in heap[first : first + cuts[row, k]]:
                    if filled[g] > 0:
                        times_ms[1] += sizes[k] * ends[g]
                first += cuts[row, k]
    return best_cut


@compiled
def _place(
    lengths: IntArray,
    table: FloatArray,
    constants: FloatArray,
    sizes: IntArray,
    max_len: IntArray,
    cut: IntArray,
    limit: float,
    cheapest_ms: FloatArray,
    spare_ms: float,
    ends: FloatArray,
    filled: IntArray,
    heap: IntArray,
    placed: IntArray,
) -> float:
    """The end of the slowest group, infinite where it is not below `limit`; writes which group each
    sequence is `placed` in, the end of each group and its tokens, and for each size a `heap` of its
    groups with the earliest first.

    Each sequence goes to the earliest group of the size where it ends first and has room. It takes
    all ranks together `cheapest_ms` at least; the cut is left once more than `spare_ms` is taken
    beyond that.
    """
    # Sizes that the cut has, where their groups begin, and the state of the earliest of each
    kinds, begin = np.empty_like(cut), np.empty_like(cut)
    top_ms, top_filled = np.empty(cut.size), np.zeros_like(cut)
    num_kinds, first = 0, 0
    for k in range(cut.size):
        if cut[k] > 0:
            kinds[num_kinds], begin[num_kinds], top_ms[num_kinds] = k, first, constants[k]
            num_kinds += 1
        for g in range(first, first + cut[k]):
            # All groups of a size begin together, so any order of them is a heap.
            ends[g], filled[g], heap[g] = constants[k], 0, g
        first += cut[k]
    slowest = 0.0
    for i in range(lengths.size):
        # `end` begins at the limit: a cut that cannot win is left at its first sequence.
        end, chosen, place = limit, -1, 0
        for n in range(num_kinds):
            kind = kinds[n]
            if top_ms[n] + table[kind, i] >= end:
                continue
            if top_filled[n] + lengths[i] <= max_len[kind]:
                end, chosen, place = top_ms[n] + table[kind, i], n, 0
                continue
            for later in range(1, cut[kind]):  # the earliest is full
                group = heap[begin[n] + later]
                own_ms = ends[group] + table[kind, i]
                if own_ms < end and filled[group] + lengths[i] <= max_len[kind]:
                    end, chosen, place = own_ms, n, later
        if chosen < 0:
            return np.inf
        kind, top = kinds[chosen], begin[chosen]
        spare_ms -= sizes[kind] * table[kind, i] - cheapest_ms[i]
        if spare_ms < 0.0:
            return np.inf
        slowest = max(slowest, end)
        group = heap[top + place]
        placed[i], ends[group] = group, end
        filled[group] += lengths[i]
        sift_down(heap[top : top + cut[kind]], ends, place)
        group = heap[top]
        top_ms[chosen], top_filled[chosen] = ends[group], filled[group]
    return slowest


@compiled
def fill_step(
    lengths: IntArray,
    table: FloatArray,
    constants: FloatArray,
    sizes: IntArray,
    max_len: IntArray,
    kind_of: IntArray,
    left: IntArray,
    limit_ms: float,
    group_of: IntArray,
) -> float:
    """Writes to `group_of` (-1: none) a group for each sequence of `left` that one has room for,
    and with which it ends by `limit_ms`: where the sequence takes the least time of devices, of
    equals the one that ends last. Returns the time of all devices together.
    """
    ends, filled = constants[kind_of], np.zeros(kind_of.size, dtype=np.int64)
    # A group without sequences runs nothing, so its constant is nobody's time.
    is_used = np.zeros(kind_of.size, dtype=np.bool_)
    for i in left:
        if group_of[i] >= 0:
            ends[group_of[i]] += table[kind_of[group_of[i]], i]
            filled[group_of[i]] += lengths[i]
            is_used[group_of[i]] = True
    first = np.searchsorted(kind_of, np.arange(sizes.size + 1))
    # Of most sequences that find no place these say so, without a look at each group.
    earliest, emptiest = np.full(sizes.size, np.inf), np.full(sizes.size, np.inf)
    for g in range(kind_of.size):
        earliest[kind_of[g]] = min(earliest[kind_of[g]], ends[g])
        emptiest[kind_of[g]] = min(emptiest[kind_of[g]], filled[g])
    for i in left:
        if group_of[i] >= 0:
            continue
        best, least = -1, np.inf
        for k in range(sizes.size):
            own_ms = table[k, i]
            device_ms = sizes[k] * own_ms
            is_late = device_ms > least or earliest[k] + own_ms > limit_ms
            if is_late or emptiest[k] + lengths[i] > max_len[k]:
                continue
            for g in range(first[k], first[k + 1]):
                if ends[g] + own_ms > limit_ms or filled[g] + lengths[i] > max_len[k]:
                    continue
                # `least` is infinite as long as `best` is -1, which is then not looked up.
                if device_ms < least or ends[g] > ends[best]:
                    best, least = g, device_ms
        if best < 0:
            continue
        group_of[i], kind = best, kind_of[best]
        ends[best] += table[kind, i]
        filled[best] += lengths[i]
        is_used[best] = True
        of_kind = kind_of == kind
        earliest[kind], emptiest[kind] = ends[of_kind].min(), filled[of_kind].min()
    return float((ends * sizes[kind_of] * is_used).sum())


@compiled
def cut_for_deadline(
    lengths: IntArray,
    table: FloatArray,
    constants: FloatArray,
    sizes: IntArray,
    max_len: IntArray,
    deadline: float,
    num_ranks: int,
    counts: IntArray,
) -> bool:
    """Adds to `counts` the groups of each size, smallest first, in which all sequences (longest
    first) end before `deadline` ms; False where the ranks are too few. `table`: ms of [size,
    sequence].

    A sequence goes to the smallest open group that meets the deadline with it, of equals to the one
    that ends last, else to a new one of the smallest size that does. Ranks left over are groups,
    the largest first.
    """
    ends, filled = np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64)
    # Groups of each size, those that end last first, of equals in the order of their numbers
    open_ = np.empty((sizes.size, num_ranks), dtype=np.int64)
    num_open = np.zeros_like(sizes)
    num_groups, left = 0, num_ranks
    for i in range(lengths.size):
        best, kind, place = -1, -1, 0
        for k in range(sizes.size):
            own_ms, place, last = table[k, i], 0, num_open[k]
            while place < last:  # the first one that meets the deadline
                middle = (place + last) // 2
                if ends[open_[k, middle]] + own_ms > deadline:
                    place = middle + 1
                else:
                    last = middle
            # Those after the first end sooner, so they meet the deadline, too
            while place < num_open[k] and filled[open_[k, place]] + lengths[i] > max_len[k]:
                place += 1
            if place < num_open[k]:
                best, kind = open_[k, place], k
                break
        if best < 0:
            for k in range(sizes.size):
                fits = constants[k] + table[k, i] <= deadline and lengths[i] <= max_len[k]
                if fits and sizes[k] <= left:
                    best, kind, place, ends[num_groups] = num_groups, k, num_open[k], constants[k]
                    num_groups += 1
                    num_open[k] += 1
                    left -= sizes[k]
                    counts[k] += 1
                    break
        if best < 0:
            return False
        ends[best] += table[kind, i]
        filled[best] += lengths[i]
        # It ends later now: back to its place in the order, which the search above needs
        while place > 0:
            before = open_[kind, place - 1]
            if ends[before] > ends[best] or (ends[before] == ends[best] and before < best):
                break
            open_[kind, place] = before
            place -= 1
        open_[kind, place] = best
    for k in range(sizes.size - 1, -1, -1):
        counts[k] += left // sizes[k]
        left %= sizes[k]
    return True
