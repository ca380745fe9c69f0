"""Replaying a timeline gives the timeline back, and notices what is missing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_events import LINKS, make_work

from ds_hydra.errors import HydraConfigError
from ds_hydra.simulator.events import simulate_iteration
from ds_hydra.simulator.replay import replay
from ds_hydra.simulator.timeline import EventKind


def make_timeline():
    """Three pipelines, one without rows, every pass of another length; one device is in none."""
    random = np.random.default_rng(3)
    works = [
        make_work(random.uniform(1, 9, (3, 5)), random.uniform(1, 9, (3, 5))),
        make_work(random.uniform(1, 9, (1, 4)), random.uniform(1, 9, (1, 4)), first_rank=3),
        make_work(np.zeros((1, 0)), np.zeros((1, 0)), first_rank=4),
    ]
    return simulate_iteration(works, num_devices=6, links=LINKS, iteration=9).timeline()


def test_a_replay_has_the_same_events():
    timeline = make_timeline()
    again = replay(timeline).timeline()
    assert again.iteration == 9
    assert again.duration_ms == pytest.approx(timeline.duration_ms)
    assert [(e.pipeline, e.stage, e.kind, e.micro_batch) for e in again.events] == [
        (e.pipeline, e.stage, e.kind, e.micro_batch) for e in timeline.events
    ]
    assert [e.start_ms for e in again.events] == pytest.approx([e.start_ms for e in timeline.events])


def test_waiting_between_passes_is_not_replayed():
    """Passes of the same length that a run began later: the replay shows what the schedule alone would take."""
    timeline = make_timeline()
    late = [
        dataclasses.replace(e, start_ms=e.start_ms + 100, end_ms=e.end_ms + 100)
        if e.kind is EventKind.BACKWARD
        else e
        for e in timeline.events
    ]
    delayed = dataclasses.replace(timeline, events=tuple(late))
    assert replay(delayed).iteration_ms == pytest.approx(timeline.duration_ms)


def test_a_missing_pass_is_refused():
    timeline = make_timeline()
    events = tuple(e for e in timeline.events if (e.stage, e.micro_batch) != (1, 2))
    with pytest.raises(
        HydraConfigError, match="pipeline 0 <1,3> has no forward or backward for some of its 3 stages"
    ):
        replay(dataclasses.replace(timeline, events=events))
