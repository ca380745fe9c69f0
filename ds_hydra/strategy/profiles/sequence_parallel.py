"""What a profile says of schemes with sequence parallelism that it did not measure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


def estimate_latency(profile: Profile, scheme: Scheme) -> LatencyModel | None:
    """T of `scheme` from those of the same PP without SP, or None where <TP,PP> was not measured.

    SP ranks share what a micro-batch computes, its tokens and in attention its heads: a / SP and b
    / SP of <TP,PP>. What <SP x TP,PP> takes beyond that for each token is communication, of which n
    = SP ranks need 1 / n: a layer exchanges four tensors of S H / n elements, where TP reduces two
    of S H in rings, which sends twice as much. The constant is the larger one of both, because
    neither launches nor collectives get fewer. Where <SP x TP,PP> was not measured, communication
    counts nothing.
    """
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


def with_estimates(profile: Profile, strategies: Iterable[Strategy]) -> Profile:
    """`profile` with an estimate for each scheme with SP in `strategies` that it did not measure
    and can estimate.

    Of even stages without other options, from which `Profile.with_schemes` derives those with
    options. Such entries of its document are marked by "estimated". Without any the profile itself.
    """
    wanted = {
        scheme.without_options()
        for strategy in strategies
        for scheme in strategy.schemes
        if scheme.sp > 1
    }
    entries = []
    for scheme in sorted(wanted - profile.latency.keys()):
        model = estimate_latency(profile, scheme)
        if model is not None:
            entries.append({**scheme.to_json(), **model.to_json(), "estimated": True})
    if not entries:
        return profile
    return Profile.from_json(
        {**profile.document, "schemes": [*profile.document["schemes"], *entries]}
    )
