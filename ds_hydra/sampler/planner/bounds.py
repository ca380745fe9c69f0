"""Proven lower bounds: how fast a strategy can be at best for one global batch, and one pipeline,
whatever way its sequences are packed (Eq. 1, App. C; `pipeline_bound_ms`).

Suppose that an iteration ends within M. A sequence can then run on kind k only if a micro-batch of
it alone ends within M there, and a pipeline of kind k with V micro-batches holds at most
`load_k(V)` ms and `tokens_k(V)` tokens of sequences. Even if sequences may be divided freely
between pipelines, for all prices w, u >= 0 of time and tokens

    sum_i min_k (w_k cost_ik + u_k length_i)  <=  sum_pipelines max_V (w_k load_k(V) + u_k
    tokens_k(V))

so that prices which violate this prove that M is impossible. The bound is the largest M for which
such prices were found (prices by multiplicative steps, M by bisection).

The longest sequences are looked at one by one: those that run on one kind only, and of which no two
can share a pipeline, need a pipeline each, and with PP > 1 leave less room there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.planner.problem import EPSILON, DispatchProblem
from ds_hydra.sampler.schedule import (
    MAX_BALANCED_MICRO_BATCHES,
    FloatArray,
    IntArray,
    MicroBatchBalance,
)
from ds_hydra.strategy.compiled import compiled


class PipelineCost(NamedTuple):
    """Costs of a pipeline that packing has to know besides its sequences."""

    num_stages: int
    constant_ms: float
    traffic_ms: float
    max_len_tokens: int
    forward_fraction: float
    is_exact: bool
    balance: MicroBatchBalance


@compiled
def min_num_micro_batches(lengths: IntArray, max_len: int) -> int:
    """Lower bound of the micro-batches that hold `lengths` (descending), each of them at most
    `max_len`.

    Bound L2 of Martello and Toth: for a threshold k, sequences above max_len - k share their
    micro-batch with nothing of k or more, those above max_len / 2 need a micro-batch each, the rest
    fills what these leave free.
    """
    best, tried = -(-lengths.sum() // max_len), 0
    for threshold in lengths:
        # Two of more than half never share a micro-batch: counted below. Equal ones say the same.
        if 2 * threshold > max_len or threshold == tried:
            continue
        tried = threshold
        alone, half, half_tokens, rest_tokens = 0, 0, 0, 0
        for length in lengths:
            if length > max_len - threshold:
                alone += 1
            elif 2 * length > max_len:
                half += 1
                half_tokens += length
            elif length >= threshold:
                rest_tokens += length
        # Half-full micro-batches take what they have room for; what is over needs new ones.
        overflow = max(0, rest_tokens - (half * max_len - half_tokens))
        best = max(best, alone + half + -(-overflow // max_len))
    half = 0
    for length in lengths:
        half += 2 * length > max_len
    return int(max(best, half))


@compiled
def micro_batch_count_bound_ms(
    num_micro_batches: int, load_ms: float, longest_ms: float, cost: PipelineCost
) -> float:
    """Lower bound of the objective with `num_micro_batches` micro-batches; sequences cost
    `load_ms`, the longest `longest_ms`.

    Closed form: max(longest, load/V) + c, times PP-1+V. Exact, the largest of three. By either, V
    micro-batches of nothing but traffic take PP-1+V times that.

    - No division into V micro-batches beats `MicroBatchBalance.ratio`.
    - Some stage is busy with all micro-batches, while the first and the last one also pass the
      other PP-1 stages.
    - The micro-batch of the longest sequence passes all stages forward and backward. On stage 0
      meanwhile, earlier micro-batches may run backward and later ones forward, but the forward
      passes of the former come before and the backward passes of the latter after it: PP t_longest
      + min(phi, 1-phi) (all other micro-batches).
    """
    num_stages, constant = cost.num_stages, cost.constant_ms
    traffic = (num_stages - 1 + num_micro_batches) * cost.traffic_ms
    if not cost.is_exact:
        slowest = max(longest_ms, load_ms / num_micro_batches) + constant
        return float(max(traffic, slowest * (num_stages - 1 + num_micro_batches)))
    work = load_ms + num_micro_batches * constant
    if num_stages == 1:
        return float(max(traffic, work))
    ratio = (
        1.0
        if num_micro_batches > MAX_BALANCED_MICRO_BATCHES
        else cost.balance.ratio[num_micro_batches]
    )
    outside = min(cost.forward_fraction, 1.0 - cost.forward_fraction)
    around_longest = (num_stages - outside) * (longest_ms + constant) + outside * work
    return float(max(traffic, work * ratio, work + (num_stages - 1) * constant, around_longest))


@compiled
def pipeline_bound_ms(lengths: IntArray, sequence_ms: FloatArray, cost: PipelineCost) -> float:
    """Lower bound of the objective over every packing of these sequences (descending)."""
    if lengths.size == 0:
        return 0.0
    load, longest = sequence_ms.sum(), sequence_ms.max()
    best = np.inf
    for num_micro_batches in range(
        min_num_micro_batches(lengths, cost.max_len_tokens), lengths.size + 1
    ):
        best = min(best, micro_batch_count_bound_ms(num_micro_batches, load, longest, cost))
    return float(best)


_NUM_STEPS = 40
"""Prices that are tried for each M."""

_PRECISION = 2e-4
"""Relative width of the interval in which M is left by the bisection."""

_TINY = 1e-300
"""Replacement of a divisor that may be 0."""


@compiled
def _tokens_within(load_ms: float, token_ms: float, most: int) -> float:
    """Return the tokens, `most` at most, that take `load_ms` together at `token_ms` each."""
    return min(float(most), load_ms / token_ms) if token_ms > 0.0 else float(most)


@compiled
def _write_capacities(
    problem: DispatchProblem,
    kind: int,
    limit_ms: float,
    longest_allowed: int,
    long_sequence: int,
    capacities: FloatArray,
) -> int:
    """Writes (time, tokens) that a pipeline of `kind` holds within `limit_ms` for each V; pairs
    that the one before dominates are dropped. Returns how many are written: [V, (time, tokens)].

    `long_sequence` is known to be there (-1: none). No micro-batch of MaxLen tokens takes longer
    than one at the time per token of `longest_allowed`, the longest sequence that may be there, and
    none is cheaper per token than the linear part of T. How much V micro-batches can do in that
    time follows from the bounds of one pipeline (`micro_batch_count_bound_ms`).
    """
    max_len = problem.max_len_tokens[kind]
    # T is convex: a longer sequence takes more time per token, the shortest one takes the least.
    densest_token_ms = problem.sequence_ms[kind, longest_allowed] / problem.lengths[longest_allowed]
    densest_micro_batch_ms = densest_token_ms * max_len
    last = problem.lengths.size - 1
    cheapest_token_ms = problem.sequence_ms[kind, last] / problem.lengths[last]
    if problem.is_eq2:
        capacities[0, 0] = limit_ms
        capacities[0, 1] = _tokens_within(limit_ms, cheapest_token_ms, problem.lengths.sum())
        return 1
    num_stages, constant = problem.num_stages[kind], problem.constant_ms[kind]
    traffic = problem.traffic_ms[kind]
    outside = min(problem.forward_fraction, 1.0 - problem.forward_fraction)
    count, last_load, last_tokens = 0, -np.inf, -np.inf
    for num_micro_batches in range(1, problem.lengths.size + 1):
        if (num_stages - 1 + num_micro_batches) * traffic > limit_ms:
            break
        if problem.is_exact:
            ratio = (
                1.0
                if num_micro_batches > MAX_BALANCED_MICRO_BATCHES
                else problem.ratio[kind, num_micro_batches]
            )
            # Two bounds of one pipeline, solved for its work: the balance of V micro-batches, and
            # the way of the shortest micro-batch through the other stages.
            work = min(limit_ms / ratio, limit_ms - (num_stages - 1) * constant)
            # The micro-batch of a long sequence hides a part of the others' time alone.
            if long_sequence >= 0 and num_stages > 1:
                alone_ms = problem.sequence_ms[kind, long_sequence] + constant
                work = min(work, (limit_ms - (num_stages - outside) * alone_ms) / outside)
        else:
            work = limit_ms * num_micro_batches / (num_stages - 1 + num_micro_batches)
        load = min(work - num_micro_batches * constant, num_micro_batches * densest_micro_batch_ms)
        tokens = _tokens_within(load, cheapest_token_ms, num_micro_batches * max_len)
        # Both are concave in V once `ratio` is 1: what does not grow any more does not grow later.
        is_past = load <= last_load and tokens <= last_tokens
        if is_past and num_micro_batches > MAX_BALANCED_MICRO_BATCHES:
            break
        last_load, last_tokens = load, tokens
        if load < 0.0:
            continue
        # More micro-batches hold more tokens and less time; pairs that do neither are no choice.
        if not count or load > capacities[count - 1, 0] or tokens > capacities[count - 1, 1]:
            capacities[count, 0], capacities[count, 1] = load, tokens
            count += 1
    return count


@compiled
def _worth_most(capacities: FloatArray, count: int, prices: FloatArray) -> tuple[float, float]:
    """Time and tokens of the first `count` of `capacities` that are worth most."""
    best, most = -1, 0.0
    for i in range(count):
        value = prices[0] * capacities[i, 0] + prices[1] * capacities[i, 1]
        if value > most:
            best, most = i, value
    if best < 0:
        return 0.0, 0.0
    return capacities[best, 0], capacities[best, 1]


@compiled
def _longest_allowed(problem: DispatchProblem, limit_ms: float) -> IntArray:
    """Longest sequence (index) that each kind can run within `limit_ms`; the number of sequences
    for none.
    """
    longest_allowed = np.zeros(problem.num_stages.size, dtype=np.int64)
    for kind in range(longest_allowed.size):
        constant, num_stages = problem.constant_ms[kind], problem.num_stages[kind]
        first = 0
        while first < problem.lengths.size and (
            problem.lengths[first] > problem.max_len_tokens[kind]
            or num_stages
            * max(problem.sequence_ms[kind, first] + constant, problem.traffic_ms[kind])
            > limit_ms
        ):
            first += 1
        longest_allowed[kind] = first
    return longest_allowed


@compiled
def _pair_ms(problem: DispatchProblem, kind: int, a: int, b: int) -> float:
    """Lower bound of the time of a pipeline of `kind` with sequences `a` and `b`, of which `a` is
    the longer.

    In one micro-batch, if they fit, or else in two or more, by
    `micro_batch_count_bound_ms`.
    """
    num_stages, constant = problem.num_stages[kind], problem.constant_ms[kind]
    longer, shorter = problem.sequence_ms[kind, a], problem.sequence_ms[kind, b]
    if problem.is_eq2:
        return float(num_stages * longer + shorter)
    together = np.inf
    if problem.lengths[a] + problem.lengths[b] <= problem.max_len_tokens[kind]:
        together = num_stages * (longer + shorter + constant)
    if num_stages == 1:
        return float(min(together, longer + shorter + 2 * constant))
    if not problem.is_exact:
        return float(min(together, (num_stages + 1) * (longer + constant)))
    outside = min(problem.forward_fraction, 1.0 - problem.forward_fraction)
    return float(min(together, num_stages * (longer + constant) + outside * (shorter + constant)))


@compiled
def _count_apart(problem: DispatchProblem, limit_ms: float, longest_allowed: IntArray) -> IntArray:
    """Number of the longest sequences, for each kind that alone can run them, that must be on
    pipelines of their own.
    """
    num_apart = np.zeros_like(longest_allowed)
    for kind in range(num_apart.size):
        # A sequence before `longest_allowed` of a kind is too long for it: those that are too long
        # for all others are forced on this one.
        num_forced = problem.lengths.size if longest_allowed[kind] == 0 else 0
        for other in range(num_apart.size):
            if other != kind:
                num_forced = min(num_forced, longest_allowed[other])
        apart = min(num_forced, 1)
        # Neighbours are the pair that fits best; if these two do not, no longer pair does.
        while apart < num_forced and _pair_ms(problem, kind, apart - 1, apart) > limit_ms:
            apart += 1
        num_apart[kind] = apart
    return num_apart


@compiled
def _supply(
    problem: DispatchProblem,
    kind: int,
    limit_ms: float,
    longest_allowed: int,
    count: int,
    apart: int,
    prices: FloatArray,
    capacities: FloatArray,
    num_capacities: int,
) -> tuple[float, float]:
    """Time and tokens that `count` pipelines of `kind` hold, of `capacities` each, `apart` of them
    with a long sequence each.
    """
    load, tokens = _worth_most(capacities, num_capacities, prices)
    load, tokens = load * (count - apart), tokens * (count - apart)
    beside = np.empty((problem.lengths.size if apart else 0, 2))
    for long_sequence in range(apart):
        num_beside = _write_capacities(
            problem, kind, limit_ms, longest_allowed, long_sequence, beside
        )
        more = _worth_most(beside, num_beside, prices)
        load += more[0]
        tokens += more[1]
    return load, tokens


@compiled
def _write_demand(
    problem: DispatchProblem, longest_allowed: IntArray, prices: FloatArray, demand: FloatArray
) -> None:
    """Writes time and tokens of each kind, [2, kind], where every sequence runs on the cheapest."""
    num_kinds, num_sequences = longest_allowed.size, problem.lengths.size
    least_price = np.full(num_sequences, np.inf)
    cheapest = np.zeros(num_sequences, dtype=np.int64)
    tokens = problem.lengths.astype(np.float64)
    for kind in range(num_kinds):
        of_time, of_tokens = prices[0, kind], prices[1, kind]
        for i in range(longest_allowed[kind], num_sequences):
            price = of_time * problem.sequence_ms[kind, i] + of_tokens * tokens[i]
            # Without a branch, so that the loop is vectorised: this is most of the bound's time.
            is_less = price < least_price[i]
            least_price[i] = price if is_less else least_price[i]
            cheapest[i] = kind if is_less else cheapest[i]
    demand[:] = 0.0
    for i in range(num_sequences):
        demand[0, cheapest[i]] += problem.sequence_ms[cheapest[i], i]
        demand[1, cheapest[i]] += tokens[i]


@compiled
def _is_impossible(problem: DispatchProblem, limit_ms: float, prices: FloatArray) -> bool:
    """Whether it is proved that nothing ends within `limit_ms`.

    The search for prices that prove it starts at `prices` and changes them: `prices[0]` are those
    of time, `prices[1]` those of tokens, by kind.
    """
    num_kinds, num_sequences = problem.num_stages.size, problem.lengths.size
    longest_allowed = _longest_allowed(problem, limit_ms)
    if longest_allowed.min() > 0:  # the longest sequence ends in time on no kind
        return True
    counts = np.zeros(num_kinds, dtype=np.int64)
    for kind in problem.kind_of:
        counts[kind] += 1
    apart = _count_apart(problem, limit_ms, longest_allowed)
    if (apart > counts).any():
        return True
    capacities = np.empty((num_kinds, num_sequences, 2))
    num_capacities = np.zeros(num_kinds, dtype=np.int64)
    for kind in range(num_kinds):
        if longest_allowed[kind] < num_sequences:
            num_capacities[kind] = _write_capacities(
                problem, kind, limit_ms, longest_allowed[kind], -1, capacities[kind]
            )
    demand, supply = np.zeros((2, num_kinds)), np.zeros((2, num_kinds))
    # Any prices give a valid proof; wanted are those that give one soon. What is short gets dearer
    # by its relative lack, in smaller and smaller steps, as in multiplicative weights.
    for step in range(_NUM_STEPS):
        for kind in range(num_kinds):
            if longest_allowed[kind] < num_sequences:
                supply[0, kind], supply[1, kind] = _supply(
                    problem,
                    kind,
                    limit_ms,
                    longest_allowed[kind],
                    counts[kind],
                    apart[kind],
                    prices[:, kind],
                    capacities[kind],
                    num_capacities[kind],
                )
        _write_demand(problem, longest_allowed, prices, demand)
        wanted, offered = 0.0, 0.0
        for row in range(2):
            for kind in range(num_kinds):
                wanted += prices[row, kind] * demand[row, kind]
                offered += prices[row, kind] * supply[row, kind]
        if wanted > offered * (1 + EPSILON):
            return True
        rate = 0.5 / (1 + 0.2 * step)
        for row in range(2):
            for kind in range(num_kinds):
                lack = demand[row, kind] - supply[row, kind]
                scale = max(demand[row, kind], supply[row, kind], _TINY)
                prices[row, kind] *= np.exp(rate * lack / scale)
        # A proof holds for any multiple of its prices; one scale keeps exponents in range.
        prices /= prices[0].max()
    return False


@compiled
def _first_prices(problem: DispatchProblem) -> FloatArray:
    """Prices that a search for a proof begins with."""
    # Time decides more often than memory: tokens begin at a twentieth of the price of their time.
    prices = np.ones((2, problem.num_stages.size))
    for kind in range(problem.num_stages.size):
        prices[1, kind] = 0.05 * problem.sequence_ms[kind].sum() / problem.lengths.sum()
    return prices


@compiled
def is_impossible(problem: DispatchProblem, limit_ms: float) -> bool:
    """Whether it is proved that no dispatch and packing ends within `limit_ms`.

    Takes a tenth of `strategy_bound_ms`. Every sequence must fit on some pipeline.
    """
    return problem.lengths.size > 0 and _is_impossible(problem, limit_ms, _first_prices(problem))


@compiled
def strategy_bound_ms(problem: DispatchProblem, upper_ms: float) -> float:
    """Lower bound of the slowest pipeline over every dispatch and packing, searched up to
    `upper_ms`.

    Every sequence must fit on some pipeline.
    """
    if problem.lengths.size == 0:
        return 0.0
    # Each sequence alone on the kind where it ends first is a bound; bisection begins above them.
    low = 0.0
    for i in range(problem.lengths.size):
        alone = np.inf
        for kind in range(problem.num_stages.size):
            if problem.lengths[i] <= problem.max_len_tokens[kind]:
                time = problem.num_stages[kind] * max(
                    problem.sequence_ms[kind, i] + problem.constant_ms[kind],
                    problem.traffic_ms[kind],
                )
                alone = min(alone, time)
        low = max(low, alone)
    prices = _first_prices(problem)
    # Prices go from one step of the bisection to the next: near limits have near prices.
    high = upper_ms
    while low < high * (1 - _PRECISION):
        middle = (low + high) / 2
        # What is not proved impossible need not be possible: `high` only narrows the search.
        if _is_impossible(problem, middle, prices):
            low = middle
        else:
            high = middle
    return float(min(low, upper_ms))
