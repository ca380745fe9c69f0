"""What becomes of speed-ups if coefficients are off."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from test_cluster import make_cluster
from test_simulator import make_workload

from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.spread import with_spread
from ds_hydra.lab.simulator.systems import Settings


def test_every_system_has_a_spread_around_its_speedup():
    settings = Settings(iterations=4, systems=("plain", "megatron", "deepspeed", "two_stage"))
    found = with_spread(compare(make_workload(cluster=make_cluster(4)), settings))
    assert found.spreads.keys() == {result.name for result in found.results}
    for name, spread in found.spreads.items():
        value = found.speedup(name).value
        assert spread.low <= value * 1.02
        assert spread.high >= value * 0.98
        assert spread.seen > 0
    assert (found.spreads["ds_hydra"].low, found.spreads["ds_hydra"].high) == (1, 1)
    document = next(s for s in found.to_json()["systems"] if s["name"] == "deepspeed")
    spread = found.spreads["deepspeed"]
    assert document["speedup_20_percent_off"] == [spread.low, spread.high]


def test_without_links_only_attention_moves_a_speedup():
    """T and interconnects that are off change all times alike."""
    settings = Settings(iterations=3, systems=("megatron",), space="plain")
    found = compare(make_workload(), settings)
    spread = with_spread(found).spreads["megatron"]
    assert spread.seen == pytest.approx(found.speedup("megatron").value)
    assert spread.low < spread.high
    linear = dataclasses.replace(
        found.workload.profile.latency[next(iter(found.workload.profile.latency))], quadratic_ms=0.0
    )
    profile = found.workload.profile.with_latency(
        {
            scheme: dataclasses.replace(linear, linear_ms=model.linear_ms)
            for scheme, model in found.workload.profile.latency.items()
        }
    )
    flat = with_spread(compare(make_workload(profile=profile), settings)).spreads["megatron"]
    assert flat.low == pytest.approx(flat.high, rel=0.02)


def test_processes_find_the_same():
    settings = Settings(iterations=3, systems=("plain", "megatron", "flexsp", "two_stage"))
    found = with_spread(compare(make_workload(cluster=make_cluster(4)), settings))
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=fork) as pool:
        again = compare(make_workload(cluster=make_cluster(4)), settings, run_each=pool.map)
        again = with_spread(again, pool.map)
    assert again.to_json() == found.to_json()


def test_more_of_the_transfers_is_seen():
    seen = [
        compare(
            make_workload(cluster=make_cluster(4)),
            Settings(iterations=3, systems=("megatron",), seen=s),
        )
        for s in (0.2, 0.9)
    ]
    for name in ("ds_hydra", "megatron"):
        few, many = (found.get(name).iteration_ms.sum() for found in seen)
        assert few < many
