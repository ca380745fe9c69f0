"""What-if: the same comparison for several numbers of devices, contexts and token budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.comparison import Comparison
from ds_hydra.lab.simulator.systems import Settings
from ds_hydra.lab.simulator.workload import Workload, check_workload
from ds_hydra.strategy.cost_models.cluster import find_cluster
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
    """`settings` with as many mini-batches as a point of this size gets, and <TP,PP> alone: on
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
