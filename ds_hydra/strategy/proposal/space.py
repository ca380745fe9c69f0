"""Schemes that a proposal considers; `Costs` has the cost of each.

Beside <TP,PP> that was measured these have SP or CP, share experts, gather their layers, or
checkpoint layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from ds_hydra.configs.hydra_config import Space
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.schemes.scheme import Scheme

_NUM_CKPT_STEPS = 16
"""Numbers of checkpointed layers that are tried; finer steps find schemes that fit hardly more."""

_NUM_LENGTH_CLASSES = 4
"""Lengths, each half the next and the last one the context, that a scheme is stretched to fit."""

_ROOM = (0.94, 1.0, 1.06)
"""Tokens that pipelines hold together in one micro-batch each, over those of an iteration: nearly
all, all, and with room for uneven lengths.
"""


def candidate_schemes(
    world: World, space: Space, tokens_per_iteration: float | None = None
) -> tuple[Scheme, ...]:
    """Every scheme of `space` that may make an iteration shorter: measured <TP,PP> ("plain"), all
    that was measured, or all that may win ("full").

    The full space is `unpruned_schemes` and, where they let a scheme fit a class of lengths that it
    does not fit without, with less device time than every scheme that does, the fewest checkpointed
    layers that are enough. Left out is what another scheme on as many devices
    dominates (`undominated`), unless it was measured. Entries that the profile has derived before
    are made anew, so a second call changes nothing. Where all of that holds no sequence of the
    context, layers are gathered for the tokens of one; and where none does then, what checkpointed
    layers keep is kept by the host (`World.offloads`), if the rate of its link is known.
    """
    if space != "full":
        known = (scheme for scheme in world.profile.latency if not scheme.hpz)
        return tuple(scheme for scheme in known if scheme.is_plain or space != "plain")
    world = world.measured
    measured, unpruned = world.profile.latency, unpruned_schemes(world, tokens_per_iteration)
    kept = dict.fromkeys(pruned_schemes(world, unpruned))
    first = [scheme for scheme in unpruned if scheme in measured or scheme in kept]
    # Sorted: a set has no order, and the order of schemes decides between equals
    found = (*first, *sorted(kept.keys() - {*unpruned}))
    context = world.context_length
    holds = any(_can_move(world, s) and world.max_len_tokens(s) >= context for s in found)
    if holds or world.offloads:
        return found
    if (tokens_per_iteration or 0) > context:
        return candidate_schemes(world, space, context)
    if not world.can_offload:
        return found
    return candidate_schemes(replace(world, offloads=True), space, tokens_per_iteration)


def unpruned_schemes(world: World, tokens_per_iteration: float | None = None) -> tuple[Scheme, ...]:
    """All of the full space but for checkpointed layers of schemes that do not gather, dominated
    or not, whether they fit or not: what has a price and `world.can_run`.

    - What was measured, but for `hpz`.
    - <SP,TP,PP> where <TP,PP> was measured, SP is a power of two that divides the heads, and what
      exchanges take is known: <SP x TP,PP> was measured, or of one stage the interconnects are.
    - <CP,TP,PP>, and <SP,CP,TP,PP> where the heads no longer divide by more SP.
    - <spN,PP;ep=N> of a mixture of experts, where the interconnects are known.
    - <SP,TP,1;gather> for `tokens_per_iteration`, where the interconnects are known, or the profile
      measured one.
    - <cpN,spM,1;gather> of M nodes of N devices, where SP M divides the heads.
    """
    world = world.measured
    # The planner makes `hpz` of gathered schemes itself
    found = dict.fromkeys(scheme for scheme in world.profile.latency if not scheme.hpz)
    found |= dict.fromkeys(_with_sequence_parallelism(world))
    found |= dict.fromkeys(_with_context_parallelism(world))
    found |= dict.fromkeys(_with_expert_parallelism(world, tuple(found)))
    if tokens_per_iteration is not None:
        found |= dict.fromkeys(_with_moving_weights(world, tuple(found), tokens_per_iteration))
    return tuple(found)


def _with_sequence_parallelism(world: World) -> list[Scheme]:
    measured = world.profile.latency
    heads = world.profile.memory.num_heads
    found = []
    for narrow in (scheme for scheme in measured if scheme.is_plain):
        for exponent in range(1, (world.num_devices // narrow.num_devices).bit_length()):
            scheme = replace(narrow, sp=1 << exponent)
            is_measured = Scheme(scheme.ranks_per_stage, narrow.pp) in measured
            # Several stages would count no exchanges without a measured TP group as wide
            is_known = is_measured or (world.cluster is not None and narrow.pp == 1)
            divides = not heads or heads % scheme.ranks_per_stage == 0
            if is_known and divides and world.can_run(scheme):
                found.append(scheme)
    return sorted(found)


def _with_context_parallelism(world: World) -> list[Scheme]:
    measured = world.profile.latency
    found = [s for s in context_parallel_schemes(world) if world.can_run(s)]
    # Of equals the first one stays: one whose exchanges follow from a measured TP group as wide
    found.sort(key=lambda s: (Scheme(s.ranks_per_stage, s.pp) not in measured, s))
    return [scheme for scheme in found if world.costs.find(scheme) is not None]


def context_parallel_schemes(world: World) -> Iterator[Scheme]:
    """CP, powers of two, of each measured <TP,PP>: in place of SP, and on top of the SP with which
    the heads no longer divide by more while there are devices for it; none where the profile does
    not say how many heads there are.
    """
    heads = world.profile.memory.num_heads
    for scheme in world.profile.latency:
        if not scheme.is_plain or not heads or heads % scheme.tp:
            continue
        most = 1
        while heads % (2 * most * scheme.tp) == 0:
            most *= 2
        for sp in sorted({1, most}):
            cp = 2
            while cp * sp * scheme.num_devices <= world.num_devices:
                yield replace(scheme, sp=sp, cp=cp)
                cp *= 2


def _with_expert_parallelism(world: World, known: Sequence[Scheme]) -> list[Scheme]:
    experts = None if world.cluster is None else world.cluster.shape.experts
    if experts is None:
        return []
    return [
        shared
        for scheme in known
        # TP cuts experts by width, so SP ranks alone share whole ones
        if scheme == Scheme(1, scheme.pp, sp=scheme.sp)
        and scheme.sp > 1
        and scheme.num_devices <= world.num_devices
        and experts.num % scheme.sp == 0
        and world.can_run(shared := replace(scheme, ep=scheme.sp))
    ]


def _with_moving_weights(
    world: World, known: Sequence[Scheme], tokens_per_iteration: float
) -> Iterator[Scheme]:
    """Schemes with moving weights: each <SP,TP,1> of `known`, and <spN,1> and <cpN,1> for each N, a
    power of two or all devices, that divides the heads or that the devices allow. Several nodes of
    N ranks add <cpN,spM,1>. Devices that are no power of two add <spM,cpN,1> on all of them.
    """
    costs, number = world.costs, world.num_devices
    heads = world.profile.memory.num_heads or number
    powers = [1 << exponent for exponent in range(number.bit_length())]
    sizes = [*dict.fromkeys((*powers, number))]
    wide = [Scheme(1, 1, sp=n) for n in sizes if heads % n == 0]
    # sizes[0] is one rank, which is there as SP 1
    wide += [Scheme(1, 1, cp=n) for n in sizes[1:]]
    node = world.cluster.hardware.devices_per_node if world.cluster is not None else 1
    wide += [
        Scheme(1, 1, sp=n // node, cp=node, context_first=True)
        for n in sizes
        if n > node > 1 and n % node == 0 and heads % (n // node) == 0
    ]
    if number not in powers:
        sp = max(n for n in powers if gcd(heads, number) % n == 0)
        wide += [Scheme(1, 1, sp=sp, cp=number // sp)] * (sp > 1)
    whole = [s for s in known if s.pp == s.ep == 1 and s == s.without_options()]
    # T of the wide ones is a share of that of one rank
    for plain in dict.fromkeys([*whole, *wide] if costs.single_rank is not None else whole):
        scheme = replace(plain, gather=True)
        if not _can_move(world, scheme):
            continue
        if world.cluster is None and scheme not in world.profile.latency:
            continue  # how long its weights travel is not known
        if tokens_per_iteration:
            yield from _that_hold(world, scheme, tokens_per_iteration)
        else:
            yield scheme


def _can_move(world: World, scheme: Scheme) -> bool:
    """Whether `scheme`, whose layers move, has the devices and holds a token."""
    is_small = scheme.num_devices <= world.num_devices and world.profile.memory.knows(scheme)
    return is_small and world.max_len_tokens(scheme) > 0 and world.can_run(scheme)


def _that_hold(world: World, scheme: Scheme, tokens: float) -> list[Scheme]:
    """`scheme` with the fewest checkpointed layers with which all its pipelines together hold
    `tokens`, in one micro-batch each, because further ones cost time in lockstep; with room for
    uneven lengths; and, where `tokens` are of one sequence, with which one pipeline holds it.
    """
    counts = range(1 if world.profile.is_checkpointed else world.profile.memory.num_layers + 1)
    variants = [replace(scheme, ckpt=ckpt, offload=world.offloads) for ckpt in counts]

    def held(variant: Scheme) -> int:
        return world.num_devices // scheme.num_devices * world.max_len_tokens(variant)

    # More checkpointed layers hold more tokens, so counts need not be tried one by one
    fewest = [bisect_left(variants, room * tokens, key=held) for room in _ROOM]
    if tokens <= world.context_length:
        fewest.append(bisect_left(variants, world.context_length, key=world.max_len_tokens))
    return [
        variants[n]
        for n in dict.fromkeys(fewest)
        if n < len(variants) and world.can_run(variants[n])
    ]


def pruned_schemes(world: World, schemes: Iterable[Scheme]) -> tuple[Scheme, ...]:
    """Return those of `schemes` that fit, and with checkpointed layers those that fit more
    with less device time; without what another one dominates.
    """
    memory = world.profile.memory
    whole = [scheme for scheme in schemes if memory.knows(scheme) and world.has_room(scheme)]
    # All layers of a profile measured with activation checkpointing are checkpointed already.
    stretchable = [] if world.profile.is_checkpointed else whole
    stretched = [
        extended
        for scheme in stretchable
        if not (scheme.ckpt or scheme.stages or scheme.gather)
        for extended in _stretch(world, scheme)
        if _is_cheapest(world, extended, whole)
    ]
    return undominated(world, [*whole, *dict.fromkeys(stretched)])


def _stretch(world: World, scheme: Scheme) -> Iterator[Scheme]:
    """Yield `scheme` with the checkpointed layers that take least time for each class of lengths
    beyond its own MaxLen.
    """
    costs, context_length = world.costs, world.context_length
    longest = world.max_len_tokens(scheme)
    classes = [
        context_length >> k for k in range(_NUM_LENGTH_CLASSES) if context_length >> k > longest
    ]
    if not classes:
        return
    memory = world.profile.memory
    layers = memory.num_layers
    counts = {-(-layers * k // _NUM_CKPT_STEPS) for k in range(1, _NUM_CKPT_STEPS + 1)}
    variants = (replace(scheme, ckpt=ckpt, offload=world.offloads) for ckpt in sorted(counts))
    known = filter(memory.knows, variants)
    # Cheapest first: the first that holds a class is the one for it
    for extended in sorted(known, key=lambda variant: costs.latency(variant).linear_ms):
        longest = world.max_len_tokens(extended)
        if longest >= min(classes) and world.can_run(extended):
            yield extended
            classes = [length for length in classes if length > longest]
        if not classes:
            return


def _is_cheapest(world: World, scheme: Scheme, others: Sequence[Scheme]) -> bool:
    """Whether it needs less device time than each of `others` for the longest micro-batch that it
    fits of the context.
    """
    costs = world.costs
    length = min(world.context_length, world.max_len_tokens(scheme))

    def device_ms(scheme: Scheme) -> float:
        return scheme.num_devices * costs.latency(scheme).micro_batch_ms([length])

    fitting = [s for s in others if world.max_len_tokens(s) >= length]
    return all(device_ms(scheme) < device_ms(other) for other in fitting)


def undominated(world: World, schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
    """`schemes` without those that another one on as many devices makes useless; the first of
    equals stays.

    That is one with at least their MaxLen, and at most their time, of any micro-batch they fit and
    any number of micro-batches: the first micro-batch leaves after PP slots of T and a further one
    after one slot. Lengths enter T / l as a l + b, so both ends of the lengths that they fit
    decide. Left out: what pull and push take.
    """
    if not schemes:
        return ()
    latencies = [world.costs.latency(scheme) for scheme in schemes]
    devices = np.array([scheme.num_devices for scheme in schemes])
    held = np.array([world.max_len_tokens(scheme) for scheme in schemes], dtype=np.float64)
    a, b, c, traffic, hidden = np.array(
        [
            [x.quadratic_ms, x.linear_ms, x.constant_ms, x.traffic_ms, x.hidden_ms + x.exchange_ms]
            for x in latencies
        ]
    ).T
    slots = np.array([scheme.pp for scheme in schemes], dtype=np.float64)
    gathers = np.array([sum(s.gathering) for s in schemes])  # another kind of strategy
    is_better = (devices[:, None] == devices) & (held[:, None] >= held)
    is_better &= gathers[:, None] == gathers
    same_hidden = hidden[:, None] == hidden  # else what the other does not hide is left out
    for weight in (np.ones_like(slots), slots):
        # Time per token of the longest sequence that the other holds
        at_end = weight[:, None] * (np.maximum(a[:, None] * held, hidden[:, None]) + b[:, None])
        is_better &= at_end <= weight * (a * held + b)
        # The same of the shortest, whose attention hides nothing
        is_better &= (weight * (b + hidden))[:, None] <= weight * (b + same_hidden * hidden)
        # What a micro-batch takes whatever is in it
        is_better &= (weight * c)[:, None] <= weight * c
        is_better &= (weight * traffic)[:, None] <= weight * traffic
    is_tied = is_better & is_better.T
    earlier = np.arange(len(schemes))[:, None] < np.arange(len(schemes))
    loses = (is_better & ~is_tied) | (is_tied & earlier)
    return tuple(scheme for scheme, is_out in zip(schemes, loses.any(axis=0)) if not is_out)
