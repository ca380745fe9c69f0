"""The timeline that a plan and its profile promise: 1F1B, pass by pass, before anything has run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.simulator.timeline import Event, EventKind, Timeline, Track
from ds_hydra.strategy import Profile


def predict_timeline(plan: IterationPlan, profile: Profile, *, forward_fraction: float) -> Timeline:
    """Forwards and backwards of every stage under T(l, P) of `profile`; time 0 is the first forward.

    The plan may have been made with coefficients that were re-fitted since: each pipeline is stretched to the
    time that the plan says. Left out, as in the planner: pull, push, step, and P2P between stages.
    """
    events = [
        event
        for index, pipeline in enumerate(plan.pipelines)
        for event in _pipeline_events(index, pipeline, _row_times(plan, pipeline, profile), forward_fraction)
    ]
    return Timeline(
        iteration=plan.iteration,
        source="predicted",
        strategy=str(plan.strategy),
        num_devices=plan.num_devices,
        pipelines=tuple(
            Track(scheme=p.scheme, ranks=p.ranks, num_micro_batches=len(p.micro_batches))
            for p in plan.pipelines
        ),
        events=tuple(events),
        duration_ms=max((event.end_ms for event in events), default=0.0),
    )


def _row_times(plan: IterationPlan, pipeline: PipelinePlan, profile: Profile) -> list[float]:
    model = profile.get_latency(pipeline.scheme)
    return [model.row_ms(plan.row_lengths(row)) for row in pipeline.micro_batches]


def _pipeline_events(
    index: int, pipeline: PipelinePlan, row_ms: Sequence[float], forward_fraction: float
) -> Iterator[Event]:
    passes = list(_one_forward_one_backward(row_ms, pipeline.scheme.pp, forward_fraction))
    end_ms = max((end for *_, end in passes), default=0.0)
    stretch = pipeline.makespan_ms / end_ms if end_ms > 0 else 1.0
    for stage, kind, row, start, end in passes:
        yield Event(
            pipeline=index,
            stage=stage,
            kind=kind,
            micro_batch=row,
            start_ms=start * stretch,
            end_ms=end * stretch,
        )


def _one_forward_one_backward(
    row_ms: Sequence[float], num_stages: int, forward_fraction: float
) -> Iterator[tuple[int, EventKind, int, float, float]]:
    """(stage, kind, row, start, end) by the recurrence of `sampler.schedule.one_f_one_b_ms`, in waves."""
    stage_end = [0.0] * num_stages
    backward_end = [0.0] * (num_stages + 1)
    for wave in range(len(row_ms) + num_stages - 1 if row_ms else 0):
        forward_end = 0.0
        for stage in range(num_stages):
            if wave < len(row_ms):
                start = max(stage_end[stage], forward_end)
                forward_end = stage_end[stage] = start + forward_fraction * row_ms[wave]
                yield stage, EventKind.FORWARD, wave, start, forward_end
            row = wave - (num_stages - 1 - stage)
            if 0 <= row < len(row_ms):
                start = max(stage_end[stage], backward_end[stage + 1])
                backward_end[stage] = stage_end[stage] = start + (1 - forward_fraction) * row_ms[row]
                yield stage, EventKind.BACKWARD, row, start, stage_end[stage]
