"""Times of one simulated iteration on a cluster: 1F1B of every pipeline, pull, push, optimizer.

Times are milliseconds from the start of the pull. The order of passes is that of
`engine/parallel/one_f_one_b.py`; a stage sends without waiting, so a transfer delays the receiver
only.

Without overlap the whole pull comes first, and the push once every pipeline has finished. With
overlap (Hydraulis, Fig. 8) a stage's first forward takes its layers as they arrive, and its last
backward gives gradients away as they are complete: of K layers that arrive evenly over `pull` and
take `f` together, the last is done at max(pull + f / K, pull / K + f); the push is the mirror
image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from ds_hydra.sampler.plan import IterationPlan, imbalance_of
from ds_hydra.sampler.schedule import (
    FloatArray,
    ends_ms,
    forward_beside_pull_ms,
    one_f_one_b_ms,
    run_passes,
    steps_ms,
)
from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.profiles.profile import NO_LINKS, LinkTimes, Profile
from ds_hydra.strategy.schemes.placement import ends_of_phases
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION, Scheme, Strategy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineWork:
    """Work of one pipeline: `forward_ms[stage, micro_batch]`, `backward_ms[stage, micro_batch]`,
    micro-batches in 1F1B order.

    `hop_ms[micro_batch]` is the time of one activation or gradient between neighbouring stages.
    Nothing begins before `begin_ms`, counted from the start of the pull.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    forward_ms: FloatArray
    backward_ms: FloatArray
    hop_ms: FloatArray
    begin_ms: float = 0.0

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches."""
        return int(self.hop_ms.size)

    def passes_ms(self, pull_ms: float = 0.0, num_buckets: int = 0) -> FloatArray:
        """Start and end of each forward, then of each backward: [4, stage, micro-batch]."""
        times = np.zeros((4, *self.forward_ms.shape))
        run_passes(
            self.forward_ms,
            self.backward_ms,
            self.hop_ms,
            self.begin_ms,
            pull_ms,
            num_buckets,
            *times,
        )
        return times


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """One simulated iteration, of one phase or several one after another."""

    strategy: Strategy
    num_devices: int
    links: LinkTimes
    overlap: bool
    works: tuple[PipelineWork, ...]
    push_end_ms: float
    """Milliseconds until every gradient has arrived."""

    @property
    def iteration_ms(self) -> float:
        """Milliseconds from the start of the pull to the end of the optimizer step."""
        return self.push_end_ms + self.links.step_ms

    @cached_property
    def pipeline_ms(self) -> tuple[float, ...]:
        """Time of each pipeline with every parameter in place; 0.0 without micro-batches."""
        ends = (work.passes_ms()[3] for work in self.works)
        return tuple(
            float(own.max()) - work.begin_ms if own.size else 0.0
            for work, own in zip(self.works, ends)
        )

    @property
    def propagation_ms(self) -> float:
        """Sum of the slowest of `pipeline_ms` of each phase, which the planner minimises."""
        times = iter(self.pipeline_ms)
        phases = self.strategy.in_turn
        return sum(max(islice(times, len(phase.schemes)), default=0.0) for phase in phases)

    @property
    def exposed_link_ms(self) -> float:
        """Milliseconds that pull and push add to propagation."""
        return self.push_end_ms - self.propagation_ms

    @property
    def imbalance(self) -> float:
        """Slowest over fastest rank by `pipeline_ms`, minus 1; empty pipelines do not count."""
        return imbalance_of((w.ranks, ms) for w, ms in zip(self.works, self.pipeline_ms) if ms > 0)

    @property
    def bubble(self) -> float:
        """Share of rank time in propagation without a forward or backward; idle ranks count."""
        busy = sum(
            float(work.forward_ms.sum() + work.backward_ms.sum()) * work.scheme.ranks_per_stage
            for work in self.works
        )
        available = self.propagation_ms * self.num_devices
        return max(0.0, 1 - busy / available) if available > 0 else 0.0


def simulate_iteration(
    pipelines: Sequence[PipelineWork],
    *,
    num_devices: int,
    links: LinkTimes = NO_LINKS,
    overlap: bool = False,
    num_layers: int = 1,
) -> Simulation:
    """The iteration that runs `pipelines` side by side.

    Without `overlap` pushes start together when the slowest pipeline is done. `num_layers` of the
    model are what is pulled and pushed one by one with it.
    """
    ends = [
        _end_ms(work, links, max(1, num_layers // work.scheme.pp) if overlap else 0)
        for work in pipelines
        if work.num_micro_batches
    ]
    push_end_ms = max(ends, default=links.pull_ms + links.push_ms)
    return Simulation(
        strategy=Strategy(tuple(work.scheme for work in pipelines)),
        num_devices=num_devices,
        links=links,
        overlap=overlap,
        works=tuple(pipelines),
        push_end_ms=push_end_ms,
    )


def _end_ms(work: PipelineWork, links: LinkTimes, num_buckets: int) -> float:
    """End of the last push of a pipeline with micro-batches."""
    _, _, starts, ends = work.passes_ms(links.pull_ms, num_buckets)
    if not num_buckets:
        return float(max(ends.max(), links.pull_ms)) + links.push_ms
    first_gradient = starts[:, -1] + work.backward_ms[:, -1] / num_buckets
    last_gradient = ends[:, -1] + links.push_ms / num_buckets
    return float(np.maximum(first_gradient + links.push_ms, last_gradient).max())


def simulate_plan(
    plan: IterationPlan,
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    links_of: Callable[[Strategy], LinkTimes] | None = None,
    overlap: bool = True,
) -> Simulation:
    """`plan` on `cluster`, times by the profile's T, its phases one after another: one pulls where
    it has other slices than the one before, and pushes where the next one has. Without a cluster
    communication counts nothing.

    `links_of` a strategy replaces what the cluster says about pull, push and step.
    """
    if links_of is None:
        links_of = cluster.link_times if cluster else lambda _: NO_LINKS
    phases = plan.in_turn
    links = [links_of(phase.strategy) for phase in phases]
    slowest = max(links, key=lambda of: of.pull_ms + of.push_ms)
    if not plan.strategy.gathers:
        links = [slowest] * len(phases)
    ends = ends_of_phases([phase.strategy for phase in phases])
    links = [of.at_ends(*own) for of, own in zip(links, ends)]
    found = [
        simulate_iteration(
            plan_work(phase, profile, cluster, of.pull_ms),
            num_devices=plan.num_devices,
            links=of,
            overlap=overlap,
            num_layers=profile.memory.num_layers,
        )
        for phase, of in zip(phases, links)
    ]
    if len(found) == 1:
        return found[0]
    return replace(
        found[0],
        strategy=plan.strategy,
        links=slowest,
        works=tuple(work for each in found for work in each.works),
        push_end_ms=sum(each.push_end_ms for each in found),
    )


def plan_work(
    plan: IterationPlan, profile: Profile, cluster: Cluster | None, pull_ms: float
) -> list[PipelineWork]:
    """The work of every pipeline of a `plan` of one phase: all stages of a pipeline take T of the
    micro-batch, where ranks share cores as much of it as they do on average (`schedule.ends_ms`).
    Where layers are gathered, the first forward may wait for them (`forward_beside_pull_ms`).
    """
    lengths = [
        [plan.micro_batch_lengths(micro_batch) for micro_batch in pipeline.micro_batches]
        for pipeline in plan.pipelines
    ]
    times = [
        np.array([profile.get_latency(p.scheme).micro_batch_ms(m) for m in micro_batches])
        for p, micro_batches in zip(plan.pipelines, lengths)
    ]
    if plan.strategy.gathers:
        steps = steps_ms(times)  # each waits for the slowest in every step but its last
        times = [np.append(steps[: own.size - 1], own[-1:]) if own.size else own for own in times]
    alone_ms = np.array(
        [one_f_one_b_ms(t, p.scheme.pp, FORWARD_FRACTION) for t, p in zip(times, plan.pipelines)]
    )
    num_ranks = [p.scheme.num_devices for p in plan.pipelines]
    shared_ms = ends_ms(alone_ms, num_ranks, plan.num_devices, profile.ranks_per_core)
    shares = np.divide(shared_ms, alone_ms, out=np.ones_like(alone_ms), where=alone_ms > 0)
    times = [share * t for share, t in zip(shares, times)]
    works = []
    for pipeline, micro_batches, micro_batch_ms in zip(plan.pipelines, lengths, times):
        scheme, first_forward_ms = pipeline.scheme, None
        if scheme.gather and micro_batches:
            latency = profile.get_latency(scheme)
            computed_ms = latency.computed_ms(micro_batches[0])
            if computed_ms < latency.traffic_ms:  # a step may also wait for other groups
                first_forward_ms = forward_beside_pull_ms(
                    micro_batch_ms[0], computed_ms, FORWARD_FRACTION, pull_ms
                )
        tokens = [sum(micro_batch) for micro_batch in micro_batches]
        works.append(
            pipeline_work(scheme, pipeline.ranks, micro_batch_ms, tokens, cluster, first_forward_ms)
        )
    return works


def pipeline_work(
    scheme: Scheme,
    ranks: tuple[int, ...],
    micro_batch_ms: FloatArray,
    tokens: Sequence[int],
    cluster: Cluster | None,
    first_forward_ms: float | None = None,
) -> PipelineWork:
    """Work of a pipeline each of whose stages takes `micro_batch_ms` of micro-batches of so many
    `tokens`, and `first_forward_ms` of that for the first forward, if it is given.
    """
    forward_ms = micro_batch_ms * FORWARD_FRACTION
    backward_ms = micro_batch_ms * (1 - FORWARD_FRACTION)
    if first_forward_ms is not None:
        forward_ms[0], backward_ms[0] = first_forward_ms, micro_batch_ms[0] - first_forward_ms
    linked = cluster if scheme.pp > 1 else None
    return PipelineWork(
        scheme=scheme,
        ranks=ranks,
        forward_ms=np.tile(forward_ms, (scheme.pp, 1)),
        backward_ms=np.tile(backward_ms, (scheme.pp, 1)),
        hop_ms=np.array([linked.hop_ms(scheme, n) if linked else 0.0 for n in tokens]),
    )
