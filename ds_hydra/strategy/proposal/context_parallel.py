"""What a profile says of schemes with context parallelism that it did not measure: <cpN,TP,PP> and
<spM,cpN,TP,PP>.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ds_hydra.strategy.cost_models.cluster import Cluster, try_cluster
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.profiles.sequence_parallel import (
    estimate_latency,
    num_key_value_parts,
    with_estimates,
)
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


def context_parallel_schemes(profile: Profile, num_devices: int) -> Iterator[Scheme]:
    """CP, powers of two, of each measured <TP,PP>: in place of SP, and on top of the SP with which
    the heads no longer divide by more while there are devices for it; none where the profile does
    not say how many heads there are.
    """
    heads = profile.document["model"].get("num_attention_heads")
    plain = [s for s in profile.latency if s.is_plain and heads and heads % s.tp == 0]
    for scheme in plain:
        most = 1
        while heads % (2 * most * scheme.tp) == 0:
            most *= 2
        for sp in sorted({1, most}):
            cp = 2
            while cp * sp * scheme.num_devices <= num_devices:
                yield replace(scheme, sp=sp, cp=cp)
                cp *= 2


def with_context_parallelism(
    profile: Profile, schemes: Iterable[Scheme], cluster: Cluster | None
) -> Profile:
    """`profile` with an estimate for those of `schemes`, which have CP, that it did not measure: by
    what measured schemes say (`with_estimates`), else by what it knows of the same scheme without
    CP and the interconnects of `cluster`. As it is where neither says anything.
    """
    wanted = sorted({scheme.without_options() for scheme in schemes} - profile.latency.keys())
    known = with_estimates(profile, (Strategy((scheme,)) for scheme in wanted))
    entries = []
    for scheme in wanted:
        uncut = replace(scheme, cp=1)
        base = profile.latency.get(uncut) or estimate_latency(profile, uncut)
        if scheme not in known.latency and base is not None and cluster is not None:
            model = cluster.with_key_values(
                base.shared(scheme.cp), scheme, num_key_value_parts(profile, scheme)
            )
            entries.append({**scheme.to_json(), **model.to_json(), "estimated": True})
    return known.with_more(entries)


def with_context_parallelism_of(profile: Profile, strategies: Sequence[Strategy]) -> Profile:
    """`with_context_parallelism` for the schemes of `strategies` that have CP, on the interconnects
    that belong to the profile's hardware.
    """
    schemes = {s.without_options() for strategy in strategies for s in strategy.schemes if s.cp > 1}
    if not schemes - profile.latency.keys():
        return profile
    num_devices = max(strategy.num_devices for strategy in strategies)
    return with_context_parallelism(profile, schemes, try_cluster(profile, num_devices))
