"""Events of one iteration on a cluster: 1F1B of every pipeline, pull, push, optimizer.

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
from itertools import accumulate, islice

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.records.timeline import Event, EventKind, Timeline, Track
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

Scatter = Callable[[Sequence[FloatArray], Sequence[Sequence[int]]], list[FloatArray]]
"""Times of the micro-batches of each pipeline, and its ranks -> times as they turn out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineWork:
    """Work of one pipeline: `forward_ms[stage, micro_batch]`, `backward_ms[stage, micro_batch]`,
    micro-batches in 1F1B order.

    `hop_ms[micro_batch]` is the time of one activation or gradient between neighbouring stages;
    `tp_ms[micro_batch]` the part of one forward, and of one backward, that is TP collectives
    (contained in them). Nothing begins before `begin_ms`, counted from the start of the pull.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    forward_ms: FloatArray
    backward_ms: FloatArray
    hop_ms: FloatArray
    tp_ms: FloatArray
    begin_ms: float = 0.0

    def __post_init__(self) -> None:
        shape = (self.scheme.pp, self.num_micro_batches)
        if (
            self.forward_ms.shape != shape
            or self.backward_ms.shape != shape
            or self.tp_ms.shape != shape[1:]
        ):
            raise HydraConfigError(
                f"pipeline {self.scheme}: forward times have shape {self.forward_ms.shape}, backward times "
                f"{self.backward_ms.shape}, TP times {self.tp_ms.shape}; expected [stages, micro-batches] = {shape} "
                "twice, and [micro-batches]"
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches."""
        return int(self.hop_ms.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineRun:
    """Start and end of every pass of one pipeline: arrays [stage, micro-batch]; pushes of the
    stages [stage].
    """

    work: PipelineWork
    links: LinkTimes
    forward_start: FloatArray
    forward_end: FloatArray
    backward_start: FloatArray
    backward_end: FloatArray
    push_start: FloatArray
    push_end: FloatArray

    @property
    def end_ms(self) -> float:
        """End of the last backward; 0.0 without micro-batches."""
        return float(self.backward_end.max()) if self.work.num_micro_batches else 0.0

    @property
    def passes_ms(self) -> float:
        """Milliseconds from the earliest begin of a pass to `end_ms`; 0.0 without micro-batches."""
        return self.end_ms - self.work.begin_ms if self.work.num_micro_batches else 0.0

    def later(self, ms: float) -> PipelineRun:
        """The same, so much later."""
        times = {f: getattr(self, f) + ms for f in self.__slots__ if f not in ("work", "links")}
        work = replace(self.work, begin_ms=self.work.begin_ms + ms)
        return PipelineRun(work=work, links=self.links, **times)

    @property
    def busy_ms(self) -> float:
        """Time of all passes of all stages together, without waiting for parameters."""
        return float(self.work.forward_ms.sum() + self.work.backward_ms.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """One simulated iteration."""

    iteration: int
    strategy: Strategy
    num_devices: int
    links: LinkTimes
    overlap: bool
    runs: tuple[PipelineRun, ...]

    @cached_property
    def propagation_end_ms(self) -> float:
        """End of the last backward of any pipeline, counted from the start of the pull."""
        return max((run.end_ms for run in self.runs), default=0.0)

    @cached_property
    def push_end_ms(self) -> float:
        """Milliseconds until every gradient has arrived."""
        ends = [float(run.push_end.max()) for run in self.runs if run.work.num_micro_batches]
        return max(ends, default=self.links.pull_ms + self.links.push_ms)

    @property
    def iteration_ms(self) -> float:
        """Milliseconds from the start of the pull to the end of the optimizer step."""
        return self.push_end_ms + self.links.step_ms

    @cached_property
    def pipeline_ms(self) -> tuple[float, ...]:
        """Time of each pipeline with every parameter in place; 0.0 without micro-batches."""
        if self.links.pull_ms == 0.0:
            return tuple(run.passes_ms for run in self.runs)
        alone = (_passes(run.work, 0.0, 0)[3] for run in self.runs)  # backward_end
        return tuple(
            float(ends.max()) - run.work.begin_ms if ends.size else 0.0
            for run, ends in zip(self.runs, alone)
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
        busy = ((run.work.ranks, ms) for run, ms in zip(self.runs, self.pipeline_ms) if ms > 0)
        return imbalance_of(busy)

    @property
    def bubble(self) -> float:
        """Share of rank time in propagation without a forward or backward; idle ranks count."""
        busy = sum(run.busy_ms * run.work.scheme.ranks_per_stage for run in self.runs)
        available = self.propagation_ms * self.num_devices
        return max(0.0, 1 - busy / available) if available > 0 else 0.0

    def timeline(self) -> Timeline:
        """All events; those of ranks outside every pipeline have pipeline -1."""
        events: list[Event] = []
        step_start = self.push_end_ms
        for number, run in enumerate(self.runs):
            events += _pass_events(number, run)
            for stage in range(run.work.scheme.pp):
                push = (float(run.push_start[stage]), float(run.push_end[stage]))
                begin, links = run.work.begin_ms, run.links
                events += self._link_events(number, stage, links, push, step_start, begin)
        if self.strategy.num_devices < self.num_devices:
            push = (self.propagation_end_ms, step_start)
            events += self._link_events(-1, 0, self.links, push, step_start)
        return Timeline(
            iteration=self.iteration,
            source="predicted",
            strategy=str(self.strategy),
            num_devices=self.num_devices,
            pipelines=tuple(
                Track(
                    scheme=run.work.scheme,
                    ranks=run.work.ranks,
                    num_micro_batches=run.work.num_micro_batches,
                )
                for run in self.runs
            ),
            events=tuple(events),
            duration_ms=self.iteration_ms,
        )

    def _link_events(
        self,
        pipeline: int,
        stage: int,
        links: LinkTimes,
        push: tuple[float, float],
        step_start: float,
        start: float = 0.0,
    ) -> list[Event]:
        spans = [
            (EventKind.PULL, start, start + links.pull_ms),
            (EventKind.PUSH, *push),
            (EventKind.STEP, step_start, step_start + self.links.step_ms),
        ]
        return [
            Event(pipeline=pipeline, stage=stage, kind=kind, start_ms=start, end_ms=end)
            for kind, start, end in spans
            if end > start
        ]


def _pass_events(number: int, run: PipelineRun) -> list[Event]:
    events = []
    last = run.work.scheme.pp - 1
    for stage in range(last + 1):
        for micro_batch in range(run.work.num_micro_batches):
            hop, tp_ms = float(run.work.hop_ms[micro_batch]), float(run.work.tp_ms[micro_batch])
            forward = (
                float(run.forward_start[stage, micro_batch]),
                float(run.forward_end[stage, micro_batch]),
            )
            backward = (
                float(run.backward_start[stage, micro_batch]),
                float(run.backward_end[stage, micro_batch]),
            )
            spans = [(EventKind.FORWARD, *forward, tp_ms), (EventKind.BACKWARD, *backward, tp_ms)]
            if hop > 0 and stage < last:
                spans.append((EventKind.P2P, forward[1], forward[1] + hop, 0.0))
            if hop > 0 and stage > 0:
                spans.append((EventKind.P2P, backward[1], backward[1] + hop, 0.0))
            events += [
                Event(
                    pipeline=number, stage=stage, kind=kind, micro_batch=micro_batch, start_ms=start, end_ms=end,
                    tp_ms=min(tp, end - start),
                )
                for kind, start, end, tp in spans
            ]  # fmt: skip
    return events


def simulate_iteration(
    pipelines: Sequence[PipelineWork],
    *,
    num_devices: int,
    links: LinkTimes = NO_LINKS,
    overlap: bool = False,
    num_layers: int = 1,
    iteration: int = 0,
) -> Simulation:
    """The iteration that runs `pipelines` side by side.

    Without `overlap` pushes start together when the slowest pipeline is done. `num_layers` of the
    model are what is pulled and pushed one by one with it.
    """
    runs = [
        _run(work, links, max(1, num_layers // work.scheme.pp) if overlap else 0)
        for work in pipelines
    ]
    end = max((run.end_ms for run in runs), default=0.0)
    if not overlap:
        for run in runs:
            run.push_start[:] = max(end, links.pull_ms)
            run.push_end[:] = run.push_start + links.push_ms
    return Simulation(
        iteration=iteration,
        strategy=Strategy(tuple(work.scheme for work in pipelines)),
        num_devices=num_devices,
        links=links,
        overlap=overlap,
        runs=tuple(runs),
    )


def _passes(work: PipelineWork, pull_ms: float, num_buckets: int) -> FloatArray:
    """Start and end of each forward, then of each backward: [4, stage, micro-batch]."""
    times = np.zeros((4, *work.forward_ms.shape))
    run_passes(
        work.forward_ms,
        work.backward_ms,
        work.hop_ms,
        work.begin_ms,
        pull_ms,
        num_buckets,
        *times,
    )
    return times


def _run(work: PipelineWork, links: LinkTimes, num_buckets: int) -> PipelineRun:
    shape = work.forward_ms.shape
    times = _passes(work, links.pull_ms, num_buckets)
    push_start, push_end = (
        np.full(shape[0], links.pull_ms),
        np.full(shape[0], links.pull_ms + links.push_ms),
    )
    if num_buckets and work.num_micro_batches:
        first_gradient = times[2][:, -1] + work.backward_ms[:, -1] / num_buckets
        push_start[:] = first_gradient
        push_end[:] = np.maximum(
            first_gradient + links.push_ms, times[3][:, -1] + links.push_ms / num_buckets
        )
    return PipelineRun(
        work=work, links=links,
        forward_start=times[0], forward_end=times[1], backward_start=times[2], backward_end=times[3],
        push_start=push_start, push_end=push_end,
    )  # fmt: skip


def simulate_plan(
    plan: IterationPlan,
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    links_of: Callable[[Strategy], LinkTimes] | None = None,
    overlap: bool = True,
    forward_fraction: float = FORWARD_FRACTION,
    scatter: Scatter | None = None,
) -> Simulation:
    """`plan` on `cluster`, times by the profile's T, its phases one after another: one pulls where
    it has other slices than the one before, and pushes where the next one has. Without a cluster
    communication counts nothing.

    `links_of` a strategy replaces what the cluster says about pull, push and step, `scatter` the
    times of micro-batches.
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
            plan_work(phase, profile, cluster, forward_fraction, scatter, of.pull_ms),
            num_devices=plan.num_devices,
            links=of,
            overlap=overlap,
            num_layers=profile.memory.num_layers,
            iteration=plan.iteration,
        )
        for phase, of in zip(phases, links)
    ]
    if len(found) == 1:
        return found[0]
    for run in (run for each in found[:-1] for run in each.runs if not plan.strategy.gathers):
        run.push_start[:] = run.push_end  # nothing is pushed yet
    starts = accumulate((each.push_end_ms for each in found[:-1]), initial=0.0)
    runs = [run.later(start) for each, start in zip(found, starts) for run in each.runs]
    return replace(found[0], strategy=plan.strategy, links=slowest, runs=tuple(runs))


def plan_work(
    plan: IterationPlan,
    profile: Profile,
    cluster: Cluster | None,
    forward_fraction: float = FORWARD_FRACTION,
    scatter: Scatter | None = None,
    pull_ms: float = 0.0,
) -> list[PipelineWork]:
    """The work of every pipeline of a `plan` of one phase: all stages of a pipeline take T of the
    micro-batch, where ranks share cores as much of it as they do on average (`schedule.ends_ms`).
    Where layers are gathered, the first forward may wait for them (`forward_beside_pull_ms`).
    """
    works = []
    lengths = [
        [plan.micro_batch_lengths(micro_batch) for micro_batch in pipeline.micro_batches]
        for pipeline in plan.pipelines
    ]
    times = [
        np.array([profile.get_latency(p.scheme).micro_batch_ms(m) for m in micro_batches])
        for p, micro_batches in zip(plan.pipelines, lengths)
    ]
    if scatter is not None:
        times = scatter(times, [p.ranks for p in plan.pipelines])
    if plan.strategy.gathers:
        steps = steps_ms(times)  # each waits for the slowest in every step but its last
        times = [np.append(steps[: own.size - 1], own[-1:]) if own.size else own for own in times]
    alone_ms = np.array(
        [one_f_one_b_ms(t, p.scheme.pp, forward_fraction) for t, p in zip(times, plan.pipelines)]
    )
    num_ranks = [p.scheme.num_devices for p in plan.pipelines]
    shared_ms = ends_ms(alone_ms, num_ranks, plan.num_devices, profile.ranks_per_core)
    shares = np.divide(shared_ms, alone_ms, out=np.ones_like(alone_ms), where=alone_ms > 0)
    times = [share * t for share, t in zip(shares, times)]
    for pipeline, micro_batches, micro_batch_ms in zip(plan.pipelines, lengths, times):
        scheme = pipeline.scheme
        tokens = [sum(micro_batch) for micro_batch in micro_batches]
        is_linked = cluster is not None and scheme.pp > 1
        hop_ms = [cluster.hop_ms(scheme, n) if cluster and is_linked else 0.0 for n in tokens]
        tp_ms = [cluster.tp_ms(scheme, n) if cluster else 0.0 for n in tokens]
        forward_ms = micro_batch_ms * forward_fraction
        backward_ms = micro_batch_ms * (1 - forward_fraction)
        if scheme.gather and micro_batches:
            latency = profile.get_latency(scheme)
            computed_ms = latency.computed_ms(micro_batches[0])
            if computed_ms < latency.traffic_ms:  # a step may also wait for other groups
                forward_ms[0] = forward_beside_pull_ms(
                    micro_batch_ms[0], computed_ms, forward_fraction, pull_ms
                )
                backward_ms[0] = micro_batch_ms[0] - forward_ms[0]
        works.append(
            PipelineWork(
                scheme=scheme,
                ranks=pipeline.ranks,
                forward_ms=of_stages(forward_ms, scheme),
                backward_ms=of_stages(backward_ms, scheme),
                hop_ms=np.array(hop_ms, dtype=np.float64),
                tp_ms=np.array(tp_ms, dtype=np.float64),
            )
        )
    return works


def of_stages(times_ms: FloatArray, scheme: Scheme) -> FloatArray:
    """`times_ms` [micro-batch] for each stage: [stage, micro-batch]."""
    return np.repeat(times_ms[None], scheme.pp, axis=0)
