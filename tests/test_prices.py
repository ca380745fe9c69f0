"""T, MaxLen, pull and push of every scheme that a proposal considers: prices that can be."""

from __future__ import annotations

import pytest

from ds_hydra.configs import list_files
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.profiles.profile import load_profile
from ds_hydra.strategy.proposal.space import unpruned_schemes
from ds_hydra.strategy.schemes.scheme import Strategy

CONTEXT = 32_768
LENGTHS = (1, 100, 1000, 8192, CONTEXT)
PROFILES = [*((name, None) for name in list_files("profiles")), ("llama2_7b", "h100")]
PROFILES += [("qwen3_30b_a3b", "b200"), ("a800_llama2_13b", "h100")]


@pytest.mark.parametrize(("name", "hardware"), PROFILES)
@pytest.mark.parametrize("num_devices", [8, 64])
def test_time_and_memory_grow_with_tokens_and_maxlen_is_tight(name, hardware, num_devices):
    if name in list_files("profiles"):
        profile = load_profile(name)
    else:
        profile, _ = estimate_from_config(name, hardware, num_devices, CONTEXT)
    cluster = find_cluster(profile, num_devices, hardware)
    world = World.of(profile, cluster, num_devices, CONTEXT)
    known = world.costs.measured.table(unpruned_schemes(world, 0.0))
    memory = known.memory
    assert len(known.latency) > 20
    for scheme, latency in known.latency.items():
        times = [latency.micro_batch_ms([length]) for length in LENGTHS]
        assert times[0] > 0, scheme
        assert times == sorted(times), scheme
        halves_ms = latency.micro_batch_ms([CONTEXT // 2] * 2)
        assert halves_ms <= times[-1] * (1 + 1e-9), f"{scheme}: two halves see less of each other"
        if scheme.num_devices > num_devices or not memory.knows(scheme):
            continue
        held = known.max_len_tokens(scheme, num_devices)
        fits = [memory.rank_bytes(scheme, num_devices, n) <= memory.usable_bytes for n in LENGTHS]
        assert fits == sorted(fits, reverse=True), scheme
        if held > 0 and not scheme.offload:
            around = [memory.rank_bytes(scheme, num_devices, held + more) for more in (0, 1)]
            assert around[0] <= memory.usable_bytes < around[1], scheme
        links = cluster.link_times(Strategy.alike(scheme, num_devices))
        assert 0 < links.pull_ms <= links.push_ms * (1 + 1e-9), scheme
