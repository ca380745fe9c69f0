"""Strategies that suit a dataset: §7 of the paper, for every maximum length a global batch may
have.

t[n][l] of Eq. (4) is the least time in which n devices process all sequences of at most l tokens,
when each interval of lengths goes to d pipelines of one scheme and n and d are multiples of
`device_step` (the continuous relaxation). Since the slowest part decides, t[n][l] <= T exactly if
the intervals can be cut so that the devices each needs to end within T add up to n at most:

    f_T[l] = min over j < l and k of  f_T[j] + N(P_k) * d,   d = ceil(work_k(j, l] / T to
    device_step)

So instead of a table over devices, T is bisected. One evaluation of f_T serves every maximum length
at once and does not depend on the number of devices. The result is that of Eq. (4) up to
`PRECISION` of the time.

Left out: that a sequence cannot be split over pipelines, and the shape of single global batches.
Both are what the planner is for; a proposal only says which strategies it should consider.

`round_strategy` makes strategies of whole pipelines near a relaxed one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ds_hydra.configs.files import MAX_DEVICES
from ds_hydra.configs.hydra_config import Space
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.space import candidate_schemes, unpruned_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

MAX_ROUNDED_SCHEMES = 6
"""Schemes of one relaxed strategy that are rounded both ways; the ones with the fewest devices
beyond are rounded down. 2^6 strategies for one maximum length are more than a planner wants to look
at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedStrategy:
    """S[N][L] of Problem 1 before rounding: fractional numbers of pipelines, and the time t[N][L].

    `longest_scheme` takes the interval that holds the longest sequences.
    """

    max_length_tokens: int
    num_pipelines: tuple[tuple[Scheme, float], ...]
    longest_scheme: Scheme
    time_ms: float


def round_strategy(
    relaxed: RelaxedStrategy,
    num_devices: int,
    fillers: Sequence[Scheme],
) -> tuple[Strategy, ...]:
    """All integer strategies near `relaxed` on at most `num_devices`.

    Every number of pipelines is rounded down and up, the scheme of the longest sequences to one at
    least. What does not fit is made to fit, and what is left free is filled, by one scheme after
    the other in the role of the one that gives way; devices still free go to `fillers`, in their
    order.

    >>> counts = ((Scheme(4, 1), 0.4), (Scheme(1, 1), 6.4))
    >>> relaxed = RelaxedStrategy(max_length_tokens=9, num_pipelines=counts,
    ...                           longest_scheme=Scheme(4, 1), time_ms=1.0)
    >>> [str(s) for s in round_strategy(relaxed, 8, ())]
    ['1x<4,1> + 4x<1,1>']
    """
    counts = dict(relaxed.num_pipelines)
    by_share = sorted(counts, key=lambda s: -counts[s] * s.num_devices)
    choices = [_neighbours(x, by_share.index(s) < MAX_ROUNDED_SCHEMES) for s, x in counts.items()]
    rounded: dict[tuple[tuple[Scheme, int], ...], None] = {}
    for combination in product(*choices):
        for giving_way in by_share[:MAX_ROUNDED_SCHEMES]:
            others = {s: c for s, c in zip(counts, combination) if s != giving_way}
            if giving_way != relaxed.longest_scheme:
                others[relaxed.longest_scheme] = max(1, others[relaxed.longest_scheme])
            free = num_devices - sum(s.num_devices * c for s, c in others.items())
            count = free // giving_way.num_devices
            # The others need too much, or leave no pipeline for the longest sequences
            if free < 0 or (giving_way == relaxed.longest_scheme and count < 1):
                continue
            chosen = {**others, giving_way: count}
            filled = Counter(chosen)
            filled.update(
                _fill(num_devices - sum(s.num_devices * c for s, c in chosen.items()), fillers)
            )
            # Without schemes that have got none, so that equal strategies have equal keys.
            rounded.setdefault(tuple(sorted((+filled).items())))
    return tuple(_strategy_of(counts) for counts in rounded)


@lru_cache(maxsize=4096)
def _strategy_of(counts: tuple[tuple[Scheme, int], ...]) -> Strategy:
    """The strategy of so many pipelines of each scheme; large ones take a while to make."""
    return Strategy(tuple(scheme for scheme, count in counts for _ in range(count)))


def _neighbours(number: float, is_rounded_up: bool) -> list[int]:
    # Counts are sums of steps of a device: a whole number may be off by rounding.
    below, above = int(np.floor(number + 1e-9)), int(np.ceil(number - 1e-9))
    return [below, above] if is_rounded_up and above > below else [below]


def _fill(num_free: int, fillers: Sequence[Scheme]) -> list[Scheme]:
    added: list[Scheme] = []
    for scheme in fillers:
        added += [scheme] * (num_free // scheme.num_devices)
        num_free %= scheme.num_devices
    return added


PRECISION = 1e-3
"""Relative width of the interval in which T is left by the bisection."""


FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
Charge: TypeAlias = Literal["per_sequence", "per_micro_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalSettings:
    """Steps of the dynamic program, and the charge of a sequence.

    `charge`: "per_sequence" is Eq. (4) to the letter, T(x, P) with its constant for each sequence.
    "per_micro_batch" spreads the constant over the sequences that share a packed micro-batch and
    adds the bubble of the pipeline, for global batches of `tokens_per_iteration`.
    """

    device_step: float = 0.1
    length_step: int = 128
    charge: Charge = "per_micro_batch"
    tokens_per_iteration: int | None = None


def default_tokens_per_iteration(num_devices: int, context_length: int) -> int:
    """The paper's budget, 100K tokens for 64 devices (§8.1), and four sequences of the context at
    least.
    """
    return max(100_000 * num_devices // 64, 4 * context_length)


def usable_schemes(world: World, space: Space = "plain") -> tuple[Scheme, ...]:
    """Schemes of the profile that fit the devices, fit a micro-batch of one token at least and run
    with the model, smallest first.

    `space`: <TP,PP> only ("plain"), every scheme that was measured, or all that the profile has an
    entry for ("full").
    """
    known = world.profile.latency
    left_out = world.profile.assumed if space == "measured" else frozenset()
    return tuple(
        scheme
        for scheme in sorted(known, key=lambda s: (s.num_devices, s))
        if (scheme.is_plain or space != "plain")
        and scheme not in left_out
        and world.has_room(scheme)
        and world.can_run(scheme)
    )


def check_context(
    world: World,
    schemes: Iterable[Scheme] | None = None,
    *,
    advises_full: bool = False,
    is_full: bool = False,
    tokens_per_iteration: float | None = None,
) -> None:
    """Raise HydraConfigError if none of `schemes` (None: all profiled ones) fits a micro-batch of
    the context.

    The message says what fits, or that the states alone do not, how many devices would do, and if
    `advises_full` whether a scheme of the full space would. `is_full`: `schemes` are all of that
    space, which `tokens_per_iteration` are part of.
    """
    profile, number, context_length = world.profile, world.num_devices, world.context_length
    known = [s for s in (profile.latency if schemes is None else schemes) if world.can_run(s)]
    longest, again = _longest_micro_batch(world, known), known
    if longest >= context_length:
        return
    if is_full:  # layers are checkpointed where that lets a context fit
        all_layers = 0 if profile.is_checkpointed else profile.memory.num_layers
        moved = unpruned_schemes(world, 0.0)
        again = [
            replace(s, ckpt=all_layers, stages=(), offload=world.can_offload)
            for s in (*known, *moved)
            if s.pp == 1
        ]
        longest = max(longest, _longest_micro_batch(world, filter(world.can_run, again)))
    remedies = [f"lower the context to {longest}"] if longest > 0 else []

    def longest_of_full(there: World) -> int:
        return _longest_micro_batch(there, candidate_schemes(there, "full", tokens_per_iteration))

    def longest_on(num_devices: int) -> int:
        there = world.on(num_devices)
        return longest_of_full(there) if is_full else _longest_micro_batch(there, known)

    of_full = longest_of_full(world) if advises_full else 0
    remedies += _remedies(world, longest_on, of_full, is_full)
    why = f"the longest that fits has {longest}"
    if longest <= 0:
        why = _describe_states(world, known)
    elif text := _describe_host(world, again):
        why, remedies = text, [f"lower the context to {longest}", "give the host more memory"]
    raise HydraConfigError(
        f"profile {profile.name!r}: no scheme fits a micro-batch of {context_length} tokens on {number} devices, "
        f"{why}; {', or '.join(remedies)}"
    )


def _describe_host(world: World, schemes: Iterable[Scheme]) -> str:
    """Describe the host's memory that a sequence of the context needs and that is not there; empty
    where something else is lacking.
    """
    memory, context = world.profile.memory, world.context_length
    on_devices = replace(memory, host_bytes=math.inf)
    fitting = (s for s in schemes if s.offload and s.num_devices <= world.num_devices)
    enough = (s for s in fitting if on_devices.max_len_tokens(s, world.num_devices) >= context)
    found = min(enough, key=memory.offloaded_bytes, default=None)
    if found is None:
        return ""
    needed = context * memory.offloaded_bytes(found)
    return (
        f"layers of {found} would keep {needed / 1e9:.3g} GB of each device in the host's memory, which has "
        f"{memory.host_bytes / 1e9:.3g} GB left for each"
    )


def _describe_states(world: World, schemes: Sequence[Scheme]) -> str:
    """Describe the memory that states need, and that there is, where no token fits beside them."""
    memory, num_devices = world.profile.memory, world.num_devices
    usable, sharded = memory.usable_bytes, memory.sharded_bytes
    if sharded > num_devices * usable:
        each = memory.sharded_bytes_per_param
        return (
            f"because the states alone{'' if each is None else f', {each:.3g} bytes a parameter,'} need "
            f"{sharded / 1e12:.3g} TB, and the devices have {num_devices * usable / 1e12:.3g} TB for them"
        )
    needed = [
        (memory.rank_bytes(scheme, num_devices, 0), scheme)
        for scheme in schemes
        if scheme.num_devices <= num_devices and memory.knows(scheme)
    ]
    if not schemes:
        return "because this model runs none of those that the profile has"
    if not needed:
        return "because the profile has none for so few devices"
    least, scheme = min(needed)
    return (
        f"because the states alone need {least / 1e9:.3g} GB of a device, shards and slices of {scheme}, which has "
        f"{usable / 1e9:.3g} GB for them"
    )


def _remedies(
    world: World, longest_on: Callable[[int], int], longest_of_full: int, is_full: bool
) -> list[str]:
    """Remedies by which a micro-batch of the context would fit, each as advice to the user."""
    profile, num_devices, context_length = world.profile, world.num_devices, world.context_length
    # Devices that sharded states alone would fill: with fewer nothing is worth a try
    sharded = profile.memory.sharded_bytes / max(1, profile.memory.usable_bytes)
    doublings = (num_devices << exponent for exponent in range(1, 15))
    possible = (n for n in doublings if sharded < n <= MAX_DEVICES)
    fitting = (n for n in possible if longest_on(n) >= context_length)
    enough = next(fitting, None)
    found = [] if enough is None else [f"use {enough} devices"]
    if longest_of_full >= context_length:
        found.append(
            f'set hydra.planner.space to "full" (--space full), which fits {longest_of_full}'
        )
    if sharded > num_devices:  # nothing else makes them fit
        return found or ["use more devices with more memory"]
    # The full space has that, where the profile says what a checkpointed layer keeps
    if not (is_full and profile.memory.input_bytes) and not profile.is_checkpointed:
        is_estimate = bool(profile.document.get("estimated"))
        found.append(
            "turn on activation checkpointing (hydra.activation_checkpointing; simulate: --space full)"
            if is_estimate
            else "turn on activation checkpointing and profile again"
        )
    if not profile.document.get("estimated"):
        found.append("profile schemes with a higher TP degree")
    return found or ["use more devices with more memory"]


def _longest_micro_batch(world: World, schemes: Iterable[Scheme]) -> int:
    knows, number = world.profile.memory.knows, world.num_devices
    fitting = [s for s in schemes if s.num_devices <= number and knows(s)]
    return max((world.max_len_tokens(s) for s in fitting), default=0)


def charge_ms(
    world: World, scheme: Scheme, lengths_tokens: IntArray, settings: ProposalSettings
) -> FloatArray:
    """Charge of each length on one pipeline of `scheme`, in ms.

    "per_micro_batch": a pipeline gets its share of the iteration, U = tokens * N(P) / N, in V equal
    micro-batches. Its 1F1B time (V + PP - 1) * (W / V + c) is then spread over the U tokens, W
    being the work without c:

        (a x^2 + b x) * (V + PP - 1) / V  +  x / U * c * (V + PP - 1)

    with the V that minimises it for a dataset of the mean cost b, between U / MaxLen and U /
    UtilLen.
    """
    model = world.costs.latency(scheme)
    variable = model.sequences_ms(lengths_tokens)
    if settings.charge == "per_sequence":
        return variable + model.constant_ms
    if settings.tokens_per_iteration is None:
        raise ValueError("charge 'per_micro_batch' needs tokens_per_iteration")
    share_tokens = max(1.0, settings.tokens_per_iteration * scheme.num_devices / world.num_devices)
    fewest = max(1, int(np.ceil(share_tokens / world.max_len_tokens(scheme))))
    # UtilLen is of one shard: SP and CP ranks together need so many times the tokens
    saturated = world.profile.saturation_tokens.get(scheme.tp, 1) * scheme.num_shards
    most = max(fewest, int(share_tokens // saturated))
    # Evenly by ratio: time is flat around its minimum.
    micro_batches = np.unique(np.geomspace(fewest, most, 64).astype(np.int64)).astype(np.float64)
    work = model.linear_ms * share_tokens
    slots_ms = work / micro_batches + model.constant_ms
    num_micro_batches = micro_batches[np.argmin((micro_batches + scheme.pp - 1) * slots_ms)]
    num_slots = num_micro_batches + scheme.pp - 1
    charged: FloatArray = (
        variable * (num_slots / num_micro_batches)
        + lengths_tokens / share_tokens * model.constant_ms * num_slots
    )
    return charged


class _Tables(NamedTuple):
    """Tables of the dynamic program.

    `work_ms[k, l]` is the work of all sequences up to bin l on one pipeline of scheme k,
    `least_work[l]` the device-ms they need at least, `first_closed[k]` the first bin that k cannot
    hold.
    """

    work_ms: FloatArray
    least_work: FloatArray
    scheme_devices: FloatArray
    first_closed: IntArray
    device_step: float


@compiled
def _devices_needed(
    limit_ms: float,
    tables: _Tables,
    last: int,
    devices: FloatArray,
    from_bin: IntArray,
    by_scheme: IntArray,
) -> None:
    """Fill f_T[0..last] (`devices`) for T = `limit_ms`, and how each was reached.

    Shorter intervals are tried first; since devices * work - least work only grows with the
    interval, the first that cannot beat the best ends the search exactly.
    """
    work_ms, least_work, scheme_devices, first_closed, device_step = tables
    devices[0] = 0.0
    for l in range(1, last + 1):
        best = np.inf
        for k in range(scheme_devices.size):
            if l >= first_closed[k]:
                continue
            size = scheme_devices[k]
            for j in range(l - 1, -1, -1):
                work = work_ms[k, l] - work_ms[k, j]
                # A bound, because devices[j] is least_work[j] / limit_ms at least
                if (size * work + least_work[j]) / limit_ms >= best - 1e-9:
                    break
                # Less what rounding adds: a quotient hardly above a whole number takes no step
                # more.
                steps = np.ceil(work / (limit_ms * device_step) - 1e-9)
                needed = devices[j] + size * steps * device_step
                if needed < best - 1e-9:
                    best = needed
                    from_bin[l] = j
                    by_scheme[l] = k
        devices[l] = best


@compiled
def _bisect_times(num_devices: float, tables: _Tables, times_ms: FloatArray) -> None:
    """Fill `times_ms[l]` with t[N][l] of Eq. (4) for every bin, up to `PRECISION` above it."""
    num_bins = tables.least_work.size - 1
    devices = np.empty(num_bins + 1)
    from_bin, by_scheme = (
        np.zeros(num_bins + 1, dtype=np.int64),
        np.zeros(num_bins + 1, dtype=np.int64),
    )
    # Nothing ends sooner than where all devices share the least work evenly.
    low = tables.least_work / num_devices
    times_ms[:] = np.inf
    # One limit tells of every bin whether it is enough, so later bins begin with what others found
    for l in range(num_bins, 0, -1):
        # Where nothing was enough yet, it rises from hardly above the bound, which is often near
        limit = low[l] * (1.0 + 4.0 * PRECISION)
        while times_ms[l] > low[l] * (1.0 + PRECISION):
            if times_ms[l] < np.inf:
                # The geometric mean, because the precision is relative.
                limit = np.sqrt(low[l] * times_ms[l])
            _devices_needed(limit, tables, l, devices, from_bin, by_scheme)
            for i in range(1, l + 1):
                # Devices are sums of many fractions of one.
                if devices[i] <= num_devices + 1e-6:
                    times_ms[i] = min(times_ms[i], limit)
                else:
                    low[i] = max(low[i], limit)
            if times_ms[l] == np.inf:
                limit *= 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """The dynamic program, with one entry per usable scheme and occupied bin."""

    schemes: tuple[Scheme, ...]
    edges_tokens: IntArray
    tables: _Tables


def _make_program(world: World, histogram: LengthHistogram, settings: ProposalSettings) -> _Program:
    schemes = usable_schemes(world)
    lengths, counts = histogram.lengths_tokens, histogram.counts
    bin_of = -(-lengths // settings.length_step)
    occupied, position = np.unique(bin_of, return_inverse=True)
    edges = occupied * settings.length_step
    # The last bin is held by what holds its longest sequence
    edges[-1] = min(edges[-1], lengths[-1])
    # Column 0 is the empty prefix: differences of sums are then work of intervals
    work = np.zeros((len(schemes), occupied.size + 1))
    for k, scheme in enumerate(schemes):
        charged = charge_ms(world, scheme, lengths, settings) * counts
        work[k, 1:] = np.bincount(position, weights=charged, minlength=occupied.size)
    sizes = np.array([scheme.num_devices for scheme in schemes], dtype=np.float64)
    max_len = np.array([world.max_len_tokens(scheme) for scheme in schemes])
    is_held = max_len[:, None] >= edges[None, :]
    least = np.where(is_held, work[:, 1:] * sizes[:, None], np.inf).min(axis=0)
    tables = _Tables(
        work_ms=np.cumsum(work, axis=1),
        least_work=np.concatenate([[0.0], np.cumsum(least)]),
        scheme_devices=sizes,
        # Edges ascend, so the bins that a scheme holds are the first ones.
        first_closed=1 + is_held.sum(axis=1).astype(np.int64),
        device_step=settings.device_step,
    )
    return _Program(schemes=schemes, edges_tokens=edges, tables=tables)


def relaxed_strategies(
    world: World, histogram: LengthHistogram, settings: ProposalSettings
) -> tuple[RelaxedStrategy, ...]:
    """S[N][L] for every maximum length L on the grid that a global batch can have, shortest first.

    Times are those of the whole dataset, schemes <TP,PP>. Raises HydraConfigError if none fits the
    context.
    """
    check_context(world, usable_schemes(world))
    program = _make_program(world, histogram.limit(world.context_length), settings)
    num_bins = len(program.edges_tokens)
    times = np.empty(num_bins + 1)
    _bisect_times(float(world.num_devices), program.tables, times)
    devices = np.empty(num_bins + 1)
    from_bin, by_scheme = (
        np.zeros(num_bins + 1, dtype=np.int64),
        np.zeros(num_bins + 1, dtype=np.int64),
    )
    found = []
    for l in range(1, num_bins + 1):
        # Anew for each bin: a time may have come from a limit that was tried for another one.
        _devices_needed(times[l], program.tables, l, devices, from_bin, by_scheme)
        found.append(_trace_back(program, l, times[l], devices, from_bin, by_scheme))
    return tuple(found)


def _trace_back(
    program: _Program,
    last: int,
    time_ms: float,
    devices: FloatArray,
    from_bin: IntArray,
    by_scheme: IntArray,
) -> RelaxedStrategy:
    pipelines: dict[Scheme, float] = {}
    l = last
    while l > 0:
        scheme, before = program.schemes[by_scheme[l]], int(from_bin[l])
        # By f_T, in which devices are rounded up to steps, and not by the work.
        used = (devices[l] - devices[before]) / scheme.num_devices
        # Rounded, because equal strategies are looked up as equal keys
        pipelines[scheme] = round(pipelines.get(scheme, 0.0) + used, 6)
        l = before
    return RelaxedStrategy(
        max_length_tokens=int(program.edges_tokens[last - 1]),
        num_pipelines=tuple(pipelines.items()),
        longest_scheme=program.schemes[by_scheme[last]],
        time_ms=float(time_ms),
    )


def homogeneous_strategies(world: World, space: Space = "plain") -> tuple[Strategy, ...]:
    """Strategies with as many pipelines of one scheme as fit, for every scheme that fits the
    context: the static choices.
    """
    return tuple(
        Strategy.alike(scheme, world.num_devices)
        for scheme in usable_schemes(world, space)
        if world.max_len_tokens(scheme) >= world.context_length
    )


def propose_from_histogram(
    world: World, histogram: LengthHistogram, settings: ProposalSettings
) -> dict[Strategy, tuple[int, ...]]:
    """The proposed subset of Problem 1: everything near S[N][L] for every L, and every static
    choice; and the maximum lengths L that each is near to.

    A static choice has no maximum length of its own unless the program arrives at it too.
    """
    # The largest first: smaller ones fill what it leaves free
    fillers = usable_schemes(world)[::-1]
    lengths_of: dict[Strategy, list[int]] = {}
    rounded: dict[tuple[tuple[Scheme, float], ...], tuple[Strategy, ...]] = {}
    for relaxed in relaxed_strategies(world, histogram, settings):
        # Several maximum lengths may share one relaxed strategy
        if relaxed.num_pipelines not in rounded:
            rounded[relaxed.num_pipelines] = round_strategy(relaxed, world.num_devices, fillers)
        for strategy in rounded[relaxed.num_pipelines]:
            lengths_of.setdefault(strategy, []).append(relaxed.max_length_tokens)
    for strategy in homogeneous_strategies(world):
        lengths_of.setdefault(strategy, [])
    return {strategy: tuple(lengths) for strategy, lengths in lengths_of.items()}
