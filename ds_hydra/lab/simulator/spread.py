"""Spread of a comparison: the same with coefficients that nobody measured here 20% off, or with
transfers that the overlap hides worse than it could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat

from ds_hydra.lab.simulator.cases import Workload
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.results import Comparison, Spread
from ds_hydra.lab.simulator.systems import Settings
from ds_hydra.strategy.profiles.profile import Profile

OFF = 0.2
"""Share by which T, interconnects and attention are each off."""
SEEN = 0.69
"""Share of pull and push that the paper still sees with overlap: 1.18 s of 1.71 s (Table 1)."""
NUM_VARIANTS = 8
"""Times that all systems run again, of known interconnects."""
NUM_BATCHES, MAX_TOKENS = 4, 3_200_000
"""Global batches of each variant, and their tokens; one global batch at least."""


def with_spread(
    found: Comparison, run_each: Callable[..., Iterable[dict[str, float]]] = map
) -> Comparison:
    """`found` with the change of each speed-up of whole iterations.

    All systems run the first global batches again, with T, the rates of the interconnect, and the
    efficiency of attention 20% lower and higher, one at a time, and with `SEEN` of all transfers on
    top of propagation. Systems are tuned anew for each, but keep the strategies that they may
    choose from. What a variant changes here is applied to the speed-up over all global batches.
    `run_each`: see `compare`.
    """
    affordable = max(1, MAX_TOKENS // found.workload.tokens_per_iteration)
    iterations = min(NUM_BATCHES, affordable, found.settings.iterations)
    settings = replace(found.settings, iterations=iterations)
    start = found.workload
    variants = [
        (start, settings),
        (start, replace(settings, seen=SEEN)),
        *((workload, settings) for workload in _variants(start)),
    ]
    same, seen, *off = run_each(_speedups, *zip(*variants, strict=True), repeat(found))
    spreads = {}
    for result in found.results:
        name, ratio = result.name, found.speedup(result.name)
        if ratio is None or name not in same:
            continue
        changed = [ratio.value * each[name] / same[name] for each in off if name in each]
        spreads[name] = Spread(
            low=min(changed, default=ratio.value),
            high=max(changed, default=ratio.value),
            seen=ratio.value * seen.get(name, same[name]) / same[name],
        )
    return replace(found, spreads=spreads)


def _speedups(workload: Workload, settings: Settings, known: Comparison) -> dict[str, float]:
    found = compare(workload, settings, known)
    ratios = {result.name: found.speedup(result.name) for result in found.results}
    return {name: ratio.value for name, ratio in ratios.items() if ratio is not None}


def _variants(start: Workload) -> Iterator[Workload]:
    profile, cluster = start.profile, start.cluster
    for factor in (1 - OFF, 1 + OFF):
        for changed in (_slower(profile, factor), _attention(profile, factor)):
            yield start.knowing(changed)
        if cluster is not None:
            hardware = replace(
                cluster.hardware,
                intra_node_rate=factor * cluster.hardware.intra_node_rate,
                inter_node_rate=factor * cluster.hardware.inter_node_rate,
            )
            yield start.linked_by(replace(cluster, hardware=hardware))


def _slower(profile: Profile, factor: float) -> Profile:
    """T of every scheme times `factor`."""
    slower = {scheme: model.scaled(factor) for scheme, model in profile.latency.items()}
    return profile.with_latency(slower)


def _attention(profile: Profile, efficiency: float) -> Profile:
    """Attention, the quadratic part of T, at `efficiency` times its rate."""
    return profile.with_latency(
        {
            scheme: replace(model, quadratic_ms=model.quadratic_ms / efficiency)
            for scheme, model in profile.latency.items()
        }
    )
