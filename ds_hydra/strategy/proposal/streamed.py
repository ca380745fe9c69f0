"""What a profile says of schemes that stream and that it did not measure: <spN,1;stream>."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from ds_hydra.strategy.cost_models.cluster import Cluster, try_cluster
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.profiles.sequence_parallel import num_key_value_parts
from ds_hydra.strategy.schemes.options import slowest_stage_ratio
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

CanRun = Callable[[Scheme], bool]


_ROOM = (0.94, 1.0, 1.06)
"""Tokens that pipelines hold together in one micro-batch each, over those of an iteration: nearly
all, all, and with room for uneven lengths.
"""

_REFERENCE_TOKENS = 32768
"""Length for which the cheapest <1,PP> is looked for."""


def single_rank_latency(profile: Profile) -> LatencyModel | None:
    """T of the whole model on one rank, or None where the profile has no <1,PP>.

    That of <1,1> where it was measured; else the cheapest PP times T of <1,PP>, for a micro-batch
    of `_REFERENCE_TOKENS`. Its quadratic part is then at least that of the TP schemes, for each
    device: attention of a profiled <1,PP> was measured on micro-batches shorter
    than those that SP ranks hold together, from which its quadratic part does not follow well.
    """
    measured = profile.latency.get(Scheme(1, 1))
    if measured is not None and Scheme(1, 1) not in profile.assumed:
        return measured
    found = [
        latency.scaled(scheme.pp)
        for scheme, latency in profile.latency.items()
        if scheme.tp == 1 and scheme.is_plain
    ]
    single = min(found, key=lambda t: t.micro_batch_ms([_REFERENCE_TOKENS]), default=None)
    of_tp = [
        scheme.tp * latency.quadratic_ms
        for scheme, latency in profile.latency.items()
        if scheme.is_plain and scheme.tp > 1 and scheme.pp == 1
    ]
    if single is None or not of_tp:
        return single
    return replace(single, quadratic_ms=max(single.quadratic_ms, min(of_tp)))


def with_streamed_schemes(
    profile: Profile,
    *,
    num_devices: int,
    cluster: Cluster | None,
    can_run: CanRun = lambda _: True,
    tokens_per_iteration: float | None = None,
    streams: bool = True,
) -> Profile:
    """`profile` with schemes of one stage whose layers all stream (if `streams`), where it did not
    measure them, its memory model knows them, and they fit a micro-batch.

    - <SP,TP,1;stream> for each <SP,TP,1> that it has, with T of that.
    - <spN,1;stream> for each N, a power of two up to `num_devices` that divides the heads, and
      <cpN,1;stream> for each N: T is that of one rank (`single_rank_latency`), of whose micro-batch
      N ranks have a share each, with the exchanges of SP or CP by the interconnects of `cluster`.

    - <SP,TP,1;gather> with the same T for all of these, where `tokens_per_iteration` are given,
      with as many checkpointed layers as let one micro-batch for each pipeline hold them: further
      ones cost time in lockstep. 0: without checkpointed layers.

    A micro-batch takes `Cluster.stream_ms` or `Cluster.gather_ms` at least. Without a `cluster`
    only those are there that follow from a measured <SP,TP,1;gather>, by checkpointed layers. The
    entries are marked as derived or estimated.
    """
    entries = []
    single = single_rank_latency(profile)
    heads = profile.document["model"].get("num_attention_heads", num_devices)
    powers = [1 << exponent for exponent in range(num_devices.bit_length())]
    wide: list[Scheme] = []
    if single is not None:
        wide += [Scheme(1, 1, sp=n) for n in powers if heads % n == 0]
        wide += [Scheme(1, 1, cp=n) for n in powers[1:]]
    known = [s for s in profile.latency if s.pp == s.ep == 1 and s == s.without_options()]
    kinds = [False] * streams + [True] * (tokens_per_iteration is not None)
    for plain, gathers in product(dict.fromkeys([*known, *wide]), kinds):
        scheme = replace(plain, stream=not gathers, gather=gathers)
        fits = profile.memory.knows(scheme) and profile.max_len_tokens(scheme, num_devices) > 0
        if not fits or scheme.num_devices > num_devices or not can_run(scheme):
            continue
        source: dict[str, object] = {"derived_from": str(scheme)}
        if scheme in profile.latency:
            model = profile.latency[scheme]
        elif cluster is None:
            continue
        else:
            model, source = _from_plain(profile, cluster, single, plain)
            traffic_ms = cluster.gather_ms(scheme) if gathers else cluster.stream_ms(scheme)
            model = replace(model, traffic_ms=traffic_ms)
        variants = [scheme]
        if gathers and tokens_per_iteration:
            variants = _that_hold(profile, scheme, num_devices, tokens_per_iteration, can_run)
        for variant in variants:
            if variant in profile.latency:
                continue
            ratio = slowest_stage_ratio(variant, profile.memory.num_layers) if variant.ckpt else 1.0
            entries.append({**variant.to_json(), **model.scaled(ratio).to_json(), **source})
    return profile.with_more(entries)


def _from_plain(
    profile: Profile, cluster: Cluster, single: LatencyModel | None, plain: Scheme
) -> tuple[LatencyModel, dict[str, object]]:
    """T of a scheme whose layers come as they are used, without their traffic, and its source."""
    if single is None or plain.tp > 1:
        return profile.latency[plain], {"derived_from": str(plain)}
    shared, parts = single.shared(plain.num_shards), num_key_value_parts(profile, plain)
    return cluster.with_exchanges(shared, plain, parts), {"estimated": True}


def _that_hold(
    profile: Profile, scheme: Scheme, num_devices: int, tokens: float, can_run: CanRun
) -> list[Scheme]:
    """`scheme` with the fewest checkpointed layers with which all its pipelines together hold
    `tokens`, in one micro-batch each; and with room for uneven lengths.
    """
    is_checkpointed = bool(profile.document.get("activation_checkpointing"))
    counts = range(1 if is_checkpointed else profile.memory.num_layers + 1)
    variants = [replace(scheme, ckpt=ckpt) for ckpt in counts]

    def held(variant: Scheme) -> int:
        return num_devices // scheme.num_devices * profile.max_len_tokens(variant, num_devices)

    fewest = (bisect_left(variants, room * tokens, key=held) for room in _ROOM)
    return [
        variants[n] for n in dict.fromkeys(fewest) if n < len(variants) and can_run(variants[n])
    ]


def with_streams_of(profile: Profile, strategies: Sequence[Strategy]) -> Profile:
    """`profile` with what `with_streamed_schemes` says of the streamed schemes of `strategies` that
    it has no T of; as it is where nothing is known of its interconnects.
    """
    schemes = {scheme for strategy in strategies for scheme in strategy.schemes}
    wanted = {replace(s, stages=(), ckpt=0) for s in schemes if s.stream or s.gather}
    wanted -= profile.latency.keys()
    if not wanted:
        return profile
    num_devices = max(strategy.num_devices for strategy in strategies)
    cluster = try_cluster(profile, num_devices)
    if cluster is None:
        return profile
    known = with_streamed_schemes(
        profile, num_devices=num_devices, cluster=cluster, tokens_per_iteration=0
    )
    return known.only({*profile.latency, *wanted})
