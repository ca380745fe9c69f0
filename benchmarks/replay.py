"""How well the schedule explains measured iterations: a run's own pass times replayed by the
simulator.

Command: python -m benchmarks.replay RUN_DIR    (of `make demo`, or of any run with traces; seconds,
one core)

Prints a Markdown table: each traced iteration is simulated from the measured durations of its
passes, rounds and optimizer, and its time compared with the measured one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.events import PipelineWork, Simulation, simulate_iteration
from ds_hydra.records.timeline import Event, EventKind, Timeline
from ds_hydra.report import load_run
from ds_hydra.strategy.profiles.profile import LinkTimes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    run = load_run(parser.parse_args().run_dir)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for trace in run.traces.values():
        ratio = replay(trace.timeline).iteration_ms / trace.timeline.duration_ms
        ratios[trace.timeline.strategy].append(ratio)
    print("| strategy | iterations | replayed / measured, median | median error | largest error |")
    print("|---|---|---|---|---|")
    everything = [ratio for found in ratios.values() for ratio in found]
    for strategy, found in [
        *sorted(ratios.items(), key=lambda item: -len(item[1])),
        ("all", everything),
    ]:
        values = np.array(found)
        error = np.abs(values - 1)
        print(
            f"| {strategy} | {values.size} | {np.median(values):.3f} | {np.median(error):.1%} | {error.max():.1%} |"
        )


def replay(measured: Timeline) -> Simulation:
    """The iteration whose forwards and backwards last as long as in `measured`, in the order of the
    schedule.

    A pass has to be measured without the time it waits for another stage. A round of pull or push
    lasts from when its last stage begins until its last stage ends, since all ranks take part; what
    comes after the push (ranks compare notes, optimizer) as long as measured. If rounds ran beside
    passes, the first forward of a stage already contains what it waited for its slices, so only the
    time before it is added; and the push hides behind the last backward as in `simulate_iteration`.
    Left out: transfers between stages.

    Raises HydraConfigError where a stage lacks a pass of some micro-batch.
    """
    is_overlapped = _is_overlapped(measured)
    works = [_work(measured, number, is_overlapped) for number in range(len(measured.pipelines))]
    pulls, pushes = _rounds_ms(measured, EventKind.PULL), _rounds_ms(measured, EventKind.PUSH)
    links = LinkTimes(
        pull_ms=0.0 if is_overlapped else sum(pulls),
        push_ms=sum(pushes),
        step_ms=_after_push_ms(measured),
    )
    return simulate_iteration(
        works,
        num_devices=measured.num_devices,
        links=links,
        overlap=is_overlapped,
        num_layers=len(pushes),
    )


def _work(measured: Timeline, number: int, is_overlapped: bool) -> PipelineWork:
    """The passes of one pipeline as long as measured."""
    track = measured.pipelines[number]
    shape = (track.scheme.pp, track.num_micro_batches)
    times = {kind: np.full(shape, np.nan) for kind in (EventKind.FORWARD, EventKind.BACKWARD)}
    passes = [event for event in measured.passes() if event.pipeline == number]
    for event in passes:
        times[event.kind][event.stage, event.micro_batch] = event.duration_ms
    if any(np.isnan(values).any() for values in times.values()):
        raise HydraConfigError(
            f"timeline of iteration {measured.iteration}: pipeline {number} {track.scheme} has no forward or "
            f"backward for some of its {shape[0]} stages and {shape[1]} micro-batches"
        )
    begin_ms = min((event.start_ms for event in passes), default=0.0)
    return PipelineWork(
        scheme=track.scheme,
        ranks=track.ranks,
        forward_ms=times[EventKind.FORWARD],
        backward_ms=times[EventKind.BACKWARD],
        hop_ms=np.zeros(shape[1]),
        begin_ms=begin_ms if is_overlapped else 0.0,
    )


def _is_overlapped(measured: Timeline) -> bool:
    """Whether some stage had a pass begin before its pull was over, or pushed before its last pass
    was over.
    """
    pull_end: defaultdict[tuple[int, int], float] = defaultdict(float)
    push_start: dict[tuple[int, int], float] = {}
    for event in measured.events:
        stage = (event.pipeline, event.stage)
        if event.kind is EventKind.PULL:
            pull_end[stage] = max(pull_end[stage], event.end_ms)
        if event.kind is EventKind.PUSH:
            push_start[stage] = min(push_start.get(stage, event.start_ms), event.start_ms)
    return any(
        event.start_ms < pull_end[event.pipeline, event.stage]
        or event.end_ms > push_start.get((event.pipeline, event.stage), event.end_ms)
        for event in measured.passes()
    )


def _rounds_ms(measured: Timeline, kind: EventKind) -> list[float]:
    """Time of each round of pull or push: the n-th of every stage are the same round."""
    stages: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in measured.events:
        if event.kind is kind:
            stages[event.pipeline, event.stage].append(event)
    rounds = zip(*stages.values())  # ranks of a run have equally many
    return [max(0.0, max(e.end_ms for e in r) - max(e.start_ms for e in r)) for r in rounds]


def _after_push_ms(measured: Timeline) -> float:
    """From the last end of a pass or push to the last end of the optimizer step."""
    steps = [event.end_ms for event in measured.events if event.kind is EventKind.STEP]
    before = [event.end_ms for event in measured.events if event.kind is not EventKind.STEP]
    return max(0.0, max(steps, default=0.0) - max(before, default=0.0))


if __name__ == "__main__":
    main()
