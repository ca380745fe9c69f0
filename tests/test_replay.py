"""Replaying a timeline gives the timeline back, and notices what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from run_folders import timeline_of
from test_events import LINKS, make_work

from benchmarks.replay import replay
from ds_hydra.lab.simulator.events import simulate_iteration
from ds_hydra.records.timeline import Event, EventKind, Timeline, Track
from ds_hydra.strategy.schemes.scheme import Scheme


def make_timeline():
    """Three pipelines, one without micro-batches, every pass of another length; one device is in
    none.
    """
    random = np.random.default_rng(3)
    works = [
        make_work(random.uniform(1, 9, (3, 5)), random.uniform(1, 9, (3, 5))),
        make_work(random.uniform(1, 9, (1, 4)), random.uniform(1, 9, (1, 4)), first_rank=3),
        make_work(np.zeros((1, 0)), np.zeros((1, 0)), first_rank=4),
    ]
    return timeline_of(simulate_iteration(works, num_devices=6, links=LINKS), iteration=9)


def test_a_replay_takes_as_long():
    timeline = make_timeline()
    again = replay(timeline)
    assert again.iteration_ms == pytest.approx(timeline.duration_ms)
    assert again.links == LINKS


RECORDED = [
    Timeline.from_json(json.loads(line))
    for line in (Path(__file__).parent / "data" / "demo_trace.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("measured", RECORDED, ids=lambda t: f"{t.iteration}: {t.strategy}")
def test_a_recorded_run_of_the_demo_takes_as_long_as_its_replay(measured):
    """Each stage's measured passes in the order of the schedule, rounds beside them: within 10% of
    the clock.
    """
    again = replay(measured)
    assert again.iteration_ms == pytest.approx(measured.duration_ms, rel=0.1)
    passes = measured.passes()
    taken = max(e.end_ms for e in passes) - min(e.start_ms for e in passes)
    assert again.propagation_ms == pytest.approx(taken, rel=0.1)
    assert again.overlap


def test_rounds_beside_passes_are_not_counted_twice():
    """Two rounds of pull, F 1-7 (the second round inside), B 7-19, four rounds of push of which the
    last is seen.
    """
    spans = [
        (EventKind.PULL, 0, 1), (EventKind.PULL, 1, 2),
        (EventKind.FORWARD, 1, 7), (EventKind.BACKWARD, 7, 19),
        *((EventKind.PUSH, start, start + 2) for start in (10, 13, 16, 19)),
        (EventKind.STEP, 22, 26),
    ]  # fmt: skip
    is_pass = {EventKind.FORWARD, EventKind.BACKWARD}
    measured = Timeline(
        iteration=0, strategy="1x<1,1>", num_devices=1, duration_ms=26,
        pipelines=(Track(scheme=Scheme(1, 1), ranks=(0,), num_micro_batches=1),),
        events=tuple(
            Event(pipeline=0, stage=0, kind=kind, start_ms=start, end_ms=end,
                  micro_batch=0 if kind in is_pass else -1)
            for kind, start, end in spans
        ),
    )  # fmt: skip
    again = replay(measured)
    assert (again.iteration_ms, again.propagation_ms) == (26, 18)
    assert (again.links.push_ms, again.links.step_ms) == (8, 5)
