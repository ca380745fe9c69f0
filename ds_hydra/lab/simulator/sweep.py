"""What-if: the same comparison for several numbers of devices, contexts and token budgets; and with
coefficients that nobody measured here 20% off, or transfers that the overlap hides worse than it
could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, repeat

from ds_hydra.lab.simulator.cases import Workload, check_workload
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.results import Comparison, Spread
from ds_hydra.lab.simulator.systems import Settings
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.program import default_tokens_per_iteration

SWEEP_SYSTEMS = ("megatron",)
PROPOSAL_TOKENS_PER_POINT = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values of a sweep. `tokens` empty: 100K for every 64 devices, four contexts at least."""

    devices: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...] = ()

    @property
    def is_sweep(self) -> bool:
        """Whether there is more than one point."""
        return max(len(self.devices), len(self.contexts), len(self.tokens)) > 1

    def points(self) -> Iterator[tuple[int, int, int]]:
        """(devices, context, tokens) of every point."""
        for devices, context in product(self.devices, self.contexts):
            for tokens in self.tokens or (default_tokens_per_iteration(devices, context),):
                yield devices, context, tokens


def sweep(
    workload: Workload,
    axes: Axes,
    settings: Settings,
    hardware: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Comparison]:
    """`workload` at every point of `axes`; all points are checked before the first is simulated."""
    workloads: list[Workload] = [
        replace(workload, num_devices=devices, context_length=context, tokens_per_iteration=tokens)
        for devices, context, tokens in axes.points()
    ]
    for point in workloads:
        check_workload(point)
    found = []
    for done, point in enumerate(workloads, start=1):
        cluster = find_cluster(point.profile, point.num_devices, hardware)
        found.append(compare(point.linked_by(cluster), _settings_of(point, settings)))
        if progress is not None:
            progress(done, len(workloads))
    return found


def _settings_of(point: Workload, settings: Settings) -> Settings:
    """`settings` with as many global batches as a point of this size gets, and <TP,PP> alone: on
    thousands of devices a search among all schemes takes long.
    """
    most_proposal = max(1, PROPOSAL_TOKENS_PER_POINT // point.tokens_per_iteration)
    return replace(
        settings,
        space="plain",
        iterations=settings.sized(point.tokens_per_iteration).iterations,
        num_proposal_batches=min(settings.num_proposal_batches, most_proposal),
        num_proposal_rounds=settings.num_proposal_rounds if most_proposal > 1 else 0,
    )


def swept_axis(comparisons: Sequence[Comparison]) -> str:
    """The field of `Workload` that a plot should have on its x axis: the one with most different
    values.
    """
    fields = ("num_devices", "context_length", "tokens_per_iteration")
    return max(fields, key=lambda name: len({getattr(c.workload, name) for c in comparisons}))


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
