"""Schemes beside <TP,PP> that a proposal may consider: what follows from a profile for SP, CP, CKPT
and uneven stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.profiles.sequence_parallel import with_estimates
from ds_hydra.strategy.proposal.context_parallel import (
    context_parallel_schemes,
    with_context_parallelism,
)
from ds_hydra.strategy.proposal.expert_parallel import with_expert_parallelism
from ds_hydra.strategy.proposal.streamed import CanRun, with_streamed_schemes
from ds_hydra.strategy.schemes.options import FORWARD_FRACTION
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

_NUM_CKPT_STEPS = 16
"""Numbers of checkpointed layers that are tried; finer steps find schemes that fit hardly more."""

_NUM_LENGTH_CLASSES = 4
"""Lengths, each half the next and the last one the context, that a scheme is stretched to fit."""


def with_extended_schemes(
    profile: Profile,
    *,
    num_devices: int,
    context_length: int,
    can_run: CanRun = lambda _: True,
    cluster: Cluster | None = None,
    tokens_per_iteration: float | None = None,
) -> Profile:
    """`profile` with every scheme beside those it measured that may make an iteration shorter on
    `num_devices`.

    - <SP,TP,PP> where <TP,PP> and <SP x TP,PP> were measured (`with_estimates`), so that the heads
      divide; of one stage also where only <TP,1> was and `cluster` says what exchanges take.
    - <CP,TP,PP>, and <SP,CP,TP,PP> where the heads no longer divide by more SP
      (`context_parallel_schemes`).
    - <spN,PP;ep=N> of a mixture of experts, where `cluster` says how fast tokens travel.
    - <SP,TP,1;gather> for `tokens_per_iteration`, where `cluster` says how fast layers move, or the
      profile measured one (`with_streamed_schemes`). Layers stream where the profile measured that
      alone: a home on accelerators has run on a stand-in device only.
    - Checkpointed layers and uneven stages, where they let a scheme fit a class of lengths that it
      does not fit without, with less device time than every scheme that does; the fewest layers
      that are enough.

    Left out is what another scheme on as many devices dominates (`undominated`), and what `can_run`
    refuses, which is asked for nothing else. Entries that `profile` has of such schemes already are
    made anew, so a second call changes nothing.
    """
    known = with_derived_schemes(
        profile,
        num_devices=num_devices,
        can_run=can_run,
        cluster=cluster,
        tokens_per_iteration=tokens_per_iteration,
    )
    kept = stretched_schemes(
        known, num_devices=num_devices, context_length=context_length, can_run=can_run
    )
    # What one is derived from may be left out
    return known.with_schemes(kept).only({*profile.latency.keys() - profile.assumed, *kept})


def with_derived_schemes(
    profile: Profile,
    *,
    num_devices: int,
    can_run: CanRun = lambda _: True,
    cluster: Cluster | None = None,
    tokens_per_iteration: float | None = None,
) -> Profile:
    """`profile` with all of `with_extended_schemes` but for checkpointed layers and uneven stages
    of schemes that do not gather, dominated or not.
    """
    measured = profile.only(profile.latency.keys() - profile.assumed)
    known = _with_sequence_parallelism(measured, num_devices, can_run, cluster)
    known = with_context_parallelism(
        known, filter(can_run, context_parallel_schemes(measured, num_devices)), cluster
    )
    if cluster is not None:
        known = with_expert_parallelism(
            known, num_devices=num_devices, cluster=cluster, can_run=can_run
        )
    return with_streamed_schemes(
        known,
        num_devices=num_devices,
        cluster=cluster,
        can_run=can_run,
        tokens_per_iteration=tokens_per_iteration,
        streams=False,
    )


def stretched_schemes(
    profile: Profile,
    *,
    num_devices: int,
    context_length: int,
    can_run: CanRun = lambda _: True,
) -> tuple[Scheme, ...]:
    """The schemes of `profile` that fit, and those with checkpointed layers or uneven stages that
    fit more with less device time; without what another one dominates.
    """
    whole = _that_fit(profile, profile.latency, num_devices)
    # All layers of a profile measured with activation checkpointing are checkpointed already.
    stretchable = [] if profile.document.get("activation_checkpointing") else whole
    stretched = [
        extended
        for scheme in stretchable
        if not (scheme.ckpt or scheme.stages or scheme.gather)
        for extended in _stretch(profile, scheme, num_devices, context_length, can_run)
        if _is_cheapest(profile, extended, whole, num_devices, context_length)
    ]
    return undominated(profile, [*whole, *dict.fromkeys(stretched)], num_devices)


def _with_sequence_parallelism(
    profile: Profile, num_devices: int, can_run: CanRun, cluster: Cluster | None
) -> Profile:
    """`profile` with an estimate of <SP,TP,PP> for every SP that divides the heads.

    Where <SP x TP,PP> was not measured, exchanges of one stage count by the interconnects of
    `cluster`; without one such schemes are left out.
    """
    heads = profile.document["model"].get("num_attention_heads")
    found = []
    for narrow in filter(lambda scheme: scheme.is_plain, profile.latency):
        for exponent in range(1, (num_devices // narrow.num_devices).bit_length()):
            scheme = replace(narrow, sp=1 << exponent)
            is_measured = Scheme(scheme.ranks_per_stage, narrow.pp) in profile.latency
            is_known = is_measured or (cluster is not None and narrow.pp == 1)
            divides = not heads or heads % scheme.ranks_per_stage == 0
            if is_known and divides and scheme not in profile.latency and can_run(scheme):
                found.append((scheme, is_measured))
    known = with_estimates(profile, [Strategy((scheme,)) for scheme, _ in found])
    if cluster is None:
        return known
    exchanged = [scheme for scheme, is_measured in found if not is_measured]
    return known.with_latency(
        {scheme: cluster.with_exchanges(known.get_latency(scheme), scheme) for scheme in exchanged}
    )


def _that_fit(profile: Profile, schemes: Iterable[Scheme], num_devices: int) -> list[Scheme]:
    def fits(scheme: Scheme) -> bool:
        return profile.memory.knows(scheme) and profile.has_room(scheme, num_devices)

    return [scheme for scheme in schemes if fits(scheme)]


def _stretch(
    profile: Profile, scheme: Scheme, num_devices: int, context_length: int, can_run: CanRun
) -> Iterator[Scheme]:
    """`scheme` with the options that take least time for each class of lengths beyond its own
    MaxLen.
    """
    longest = profile.max_len_tokens(scheme, num_devices)
    classes = [
        context_length >> k for k in range(_NUM_LENGTH_CLASSES) if context_length >> k > longest
    ]
    if not classes:
        return
    known = filter(profile.memory.knows, _variants(scheme, profile.memory.num_layers))
    for extended in sorted(known, key=lambda variant: profile.get_latency(variant).linear_ms):
        longest = profile.max_len_tokens(extended, num_devices)
        if longest >= min(classes) and can_run(extended):
            yield extended
            classes = [length for length in classes if length > longest]
        if not classes:
            return


def _variants(scheme: Scheme, num_layers: int) -> Iterator[Scheme]:
    steps = sorted({-(-num_layers * k // _NUM_CKPT_STEPS) for k in range(1, _NUM_CKPT_STEPS + 1)})
    for ckpt in steps:
        yield replace(scheme, ckpt=ckpt)
        if 1 < scheme.pp <= num_layers:
            stages = balanced_stages(num_layers, scheme.pp, ckpt)
            yield replace(scheme, ckpt=ckpt, stages=stages)


def balanced_stages(num_layers: int, num_stages: int, ckpt: int) -> tuple[int, ...]:
    """Layers of each stage, one at least, such that work is about even: the first `ckpt` layers
    also run forward again.

    >>> balanced_stages(32, 2, 6), balanced_stages(4, 4, 1)
    ((15, 17), (1, 1, 1, 1))
    """
    work = np.cumsum(1 + FORWARD_FRACTION * (np.arange(num_layers) < ckpt))
    cuts = np.searchsorted(
        work, work[-1] * np.arange(1, num_stages) / num_stages + 1e-9, side="right"
    )
    at = np.arange(1, num_stages)
    cuts = np.maximum.accumulate(np.maximum(cuts - at, 0)) + at
    cuts = np.minimum(cuts, num_layers - num_stages + at)
    layers = np.diff([0, *cuts, num_layers])
    return tuple(layers.tolist())


def _is_cheapest(
    profile: Profile,
    scheme: Scheme,
    others: Sequence[Scheme],
    num_devices: int,
    context_length: int,
) -> bool:
    """Whether it needs less device time than each of `others` for the longest micro-batch that it
    fits of the context.
    """
    length = min(context_length, profile.max_len_tokens(scheme, num_devices))

    def device_ms(scheme: Scheme) -> float:
        return scheme.num_devices * profile.get_latency(scheme).micro_batch_ms([length])

    fitting = [s for s in others if profile.max_len_tokens(s, num_devices) >= length]
    return all(device_ms(scheme) < device_ms(other) for other in fitting)


def undominated(
    profile: Profile, schemes: Sequence[Scheme], num_devices: int
) -> tuple[Scheme, ...]:
    """`schemes` without those that another one on as many devices makes useless; the first of
    equals stays.

    That is one with at least their MaxLen, and at most their time, of any micro-batch they fit and
    any number of micro-batches: the first micro-batch leaves after PP slots of T and a further one
    after one slot. Lengths enter T / l as a l + b, so both ends of the lengths that they fit
    decide. Left out: what pull and push take.
    """
    if not schemes:
        return ()
    latencies = [profile.get_latency(scheme) for scheme in schemes]
    devices = np.array([scheme.num_devices for scheme in schemes])
    held = np.array(
        [profile.max_len_tokens(scheme, num_devices) for scheme in schemes], dtype=np.float64
    )
    a, b, c, traffic, hidden = np.array(
        [[x.quadratic_ms, x.linear_ms, x.constant_ms, x.traffic_ms, x.hidden_ms] for x in latencies]
    ).T
    slots = np.array([scheme.pp for scheme in schemes], dtype=np.float64)
    gathers = np.array([scheme.gather for scheme in schemes])  # another kind of strategy
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
