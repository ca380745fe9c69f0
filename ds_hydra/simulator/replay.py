"""A measured iteration again, from the durations of its passes alone: does the schedule explain the time?"""

from __future__ import annotations

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.simulator.cluster import LinkTimes
from ds_hydra.simulator.events import PipelineWork, Simulation, simulate_iteration
from ds_hydra.simulator.timeline import EventKind, Timeline


def replay(measured: Timeline) -> Simulation:
    """The iteration whose forwards and backwards last as long as in `measured`, without overlap of pull and push.

    A pass has to be measured without the time it waits for another stage. Pull, push and step last as long as
    on the slowest stage. Raises HydraConfigError where a stage lacks a pass of some micro-batch.
    """
    works = []
    for number, track in enumerate(measured.pipelines):
        shape = (track.scheme.pp, track.num_micro_batches)
        times = {kind: np.full(shape, np.nan) for kind in (EventKind.FORWARD, EventKind.BACKWARD)}
        for event in measured.passes():
            if event.pipeline == number:
                times[event.kind][event.stage, event.micro_batch] = event.duration_ms
        if any(np.isnan(values).any() for values in times.values()):
            raise HydraConfigError(
                f"timeline of iteration {measured.iteration}: pipeline {number} {track.scheme} has no forward or "
                f"backward for some of its {shape[0]} stages and {shape[1]} micro-batches"
            )
        works.append(
            PipelineWork(
                scheme=track.scheme,
                ranks=track.ranks,
                forward_ms=times[EventKind.FORWARD],
                backward_ms=times[EventKind.BACKWARD],
                hop_ms=np.zeros(shape[1]),
                tp_ms=np.zeros(shape[1]),
            )
        )
    links = LinkTimes(
        pull_ms=_longest(measured, EventKind.PULL),
        push_ms=_longest(measured, EventKind.PUSH),
        step_ms=_longest(measured, EventKind.STEP),
    )
    return simulate_iteration(
        works, num_devices=measured.num_devices, links=links, iteration=measured.iteration
    )


def _longest(timeline: Timeline, kind: EventKind) -> float:
    return max((e.duration_ms for e in timeline.events if e.kind is kind), default=0.0)
