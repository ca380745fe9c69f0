"""What a profile says of schemes with expert parallelism that it did not measure: <spN,PP;ep=N>."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ds_hydra.strategy.cost_models.cluster import Cluster, try_cluster
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.profiles.sequence_parallel import with_estimates
from ds_hydra.strategy.proposal.streamed import CanRun
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


def with_expert_parallelism(
    profile: Profile,
    *,
    num_devices: int,
    cluster: Cluster,
    can_run: CanRun = lambda _: True,
) -> Profile:
    """`profile` with <spN,PP;ep=N> for each <spN,PP> that it has and whose N divides the experts,
    with T of that and tokens that travel evenly, by the interconnects of `cluster`.
    """
    experts = cluster.shape.experts
    if experts is None:
        return profile
    found = [
        replace(scheme, ep=scheme.sp)
        for scheme in profile.latency
        if scheme == Scheme(1, scheme.pp, sp=scheme.sp)
        and scheme.sp > 1
        and scheme.num_devices <= num_devices
        and experts.num % scheme.sp == 0
    ]
    return _with_entries(profile, cluster, [s for s in found if can_run(s)])


def with_expert_parallelism_of(profile: Profile, strategies: Sequence[Strategy]) -> Profile:
    """`profile` with an estimate for the schemes of `strategies` with ep that it has no T of; as it
    is where nothing is known of its experts, its interconnects or of the scheme without ep.
    """
    wanted = {s.without_options() for strategy in strategies for s in strategy.schemes if s.ep > 1}
    wanted -= profile.latency.keys()
    if not wanted:
        return profile
    cluster = try_cluster(profile, max(strategy.num_devices for strategy in strategies))
    if cluster is None or cluster.shape.experts is None:
        return profile
    known = with_estimates(profile, [Strategy((replace(s, ep=1),)) for s in wanted])
    found = _with_entries(known, cluster, sorted(wanted))
    return found.only({*profile.latency, *wanted})


def _with_entries(profile: Profile, cluster: Cluster, schemes: Iterable[Scheme]) -> Profile:
    entries = []
    for scheme in schemes:
        plain = profile.latency.get(replace(scheme, ep=1))
        if plain is not None and scheme not in profile.latency:
            model = cluster.with_experts(plain, scheme)
            entries.append({**scheme.to_json(), **model.to_json(), "estimated": True})
    return profile.with_more(entries)
