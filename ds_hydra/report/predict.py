"""The timeline that a plan and its profile promise: 1F1B, pass by pass, before anything has run."""

from __future__ import annotations

from dataclasses import replace

from ds_hydra.records.events import simulate_plan
from ds_hydra.records.timeline import Timeline
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Profile


def predict_timeline(plan: IterationPlan, profile: Profile, *, forward_fraction: float) -> Timeline:
    """Forwards and backwards of every stage under T(l, P) of `profile`; time 0 is the first
    forward.

    The plan may have been made with coefficients that were re-fitted since: each pipeline is
    stretched to the time that the plan says. Left out, as in the planner: pull, push, step, and P2P
    between stages.
    """
    simulation = simulate_plan(plan, profile, overlap=False, forward_fraction=forward_fraction)
    stretch = [
        pipeline.makespan_ms / end_ms if end_ms > 0 else 1.0
        for pipeline, end_ms in zip(plan.pipelines, simulation.pipeline_ms, strict=True)
    ]
    timeline = simulation.timeline()
    events = tuple(
        replace(e, start_ms=e.start_ms * stretch[e.pipeline], end_ms=e.end_ms * stretch[e.pipeline])
        for e in timeline.events
    )
    return replace(
        timeline, events=events, duration_ms=max((e.end_ms for e in events), default=0.0)
    )
