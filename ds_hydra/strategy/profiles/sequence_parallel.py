"""What a profile says of schemes with sequence or context parallelism that it did not measure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

MOST_KEY_VALUE_PARTS = 4
"""Parts of some heads in which keys and values travel, each beside attention of the one before."""


def estimate_latency(profile: Profile, scheme: Scheme) -> LatencyModel | None:
    """T of `scheme` from those of the same PP without SP, or None where <TP,PP> was not measured.

    SP ranks share what a micro-batch computes, its tokens and in attention its heads: a / SP and b
    / SP of <TP,PP>. What <SP x TP,PP> takes beyond that for each token is communication, of which n
    = SP ranks need 1 / n: a layer exchanges four tensors of S H / n elements, where TP reduces two
    of S H in rings, which sends twice as much. The constant is the larger one of both, because
    neither launches nor collectives get fewer. Where <SP x TP,PP> was not measured, communication
    counts nothing.
    """
    if scheme.cp > 1:
        return _estimate_context_parallel(profile, scheme)
    if scheme.ep > 1:  # tokens that travel to experts are measured, not estimated
        return None
    base = profile.latency.get(replace(scheme, sp=1))
    wide = profile.latency.get(replace(scheme, sp=1, tp=scheme.ranks_per_stage))
    if base is None:
        return None
    linear_ms, constant_ms = base.linear_ms / scheme.sp, base.constant_ms
    if wide is not None:
        linear_ms += max(0.0, wide.linear_ms - linear_ms) / scheme.sp
        constant_ms = max(constant_ms, wide.constant_ms)
    return LatencyModel(
        quadratic_ms=base.quadratic_ms / scheme.sp, linear_ms=linear_ms, constant_ms=constant_ms
    )


def _estimate_context_parallel(profile: Profile, scheme: Scheme) -> LatencyModel | None:
    """T of `scheme` with CP from that without, which CP ranks share, and from <CP x SP x TP,PP>.

    CP ranks gather keys and values of a micro-batch, in backward again, and give away their
    gradients: 6 numbers a token and layer of K H / (SP x TP), K key-value heads a query head, where
    each of n = CP x SP x TP ranks of a TP group sends 8 H (n - 1) / n in its all-reduces. What
    <n,PP> takes beyond its share of <TP,PP> is 8 H (n - TP) / n. None where <n,PP> was not
    measured, because nothing else tells how fast numbers travel.
    """
    uncut = replace(scheme, cp=1)
    base = profile.latency.get(uncut) or estimate_latency(profile, uncut)
    narrow = profile.latency.get(Scheme(scheme.tp, scheme.pp))
    num_ranks, group = scheme.ranks_per_stage, scheme.sp * scheme.tp
    wide = profile.latency.get(Scheme(num_ranks, scheme.pp))
    if scheme.ep > 1 or base is None or narrow is None or wide is None:
        return None
    excess_ms = max(0.0, wide.linear_ms - narrow.linear_ms * scheme.tp / num_ranks)
    gathered = 6 * profile.memory.key_value_share / group * (1 - 1 / scheme.cp)
    reduced = 8 * (1 - scheme.tp / num_ranks)
    travels_ms, num_parts = excess_ms * gathered / reduced, num_key_value_parts(profile, scheme)
    return LatencyModel(
        quadratic_ms=base.quadratic_ms / scheme.cp,
        linear_ms=base.linear_ms / scheme.cp + travels_ms / num_parts,
        constant_ms=max(base.constant_ms, wide.constant_ms),
        hidden_ms=travels_ms * (1 - 1 / num_parts),
    )


def num_key_value_parts(profile: Profile, scheme: Scheme) -> int:
    """In how many parts keys and values travel in the engine, where micro-batches are large."""
    heads = profile.document["model"].get("num_attention_heads")
    if not heads:
        return 1
    own = heads * profile.memory.key_value_share / (scheme.sp * scheme.tp)
    return max(1, min(MOST_KEY_VALUE_PARTS, int(own)))


def with_estimates(profile: Profile, strategies: Iterable[Strategy]) -> Profile:
    """`profile` with an estimate for each scheme with SP or CP in `strategies` that it did not
    measure and can estimate.

    Of even stages without other options, from which `Profile.with_schemes` derives those with
    options. Such entries of its document are marked by "estimated". Without any the profile itself.
    """
    wanted = {
        scheme.without_options()
        for strategy in strategies
        for scheme in strategy.schemes
        if scheme.num_shards > 1
    }
    entries = []
    for scheme in sorted(wanted - profile.latency.keys()):
        model = estimate_latency(profile, scheme)
        if model is not None:
            entries.append({**scheme.to_json(), **model.to_json(), "estimated": True})
    return profile.with_more(entries)
