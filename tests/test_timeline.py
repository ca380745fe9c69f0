"""The value that Gantt charts and traces are drawn from."""

from __future__ import annotations

import json

import pytest

from ds_hydra.errors import HydraConfigError
from ds_hydra.records.timeline import Event, EventKind, Timeline, Track
from ds_hydra.strategy.schemes.scheme import Scheme


def make_timeline(**changes):
    """<2,1> runs one micro-batch in 6 ms, <1,2> one micro-batch in 2 x 2 ms, one device is in no
    pipeline.
    """
    passes = [
        (0, 0, EventKind.FORWARD, 1, 3), (0, 0, EventKind.BACKWARD, 3, 7),
        (1, 0, EventKind.FORWARD, 1, 2), (1, 1, EventKind.FORWARD, 2, 3),
        (1, 1, EventKind.BACKWARD, 3, 4), (1, 0, EventKind.BACKWARD, 4, 5),
    ]  # fmt: skip
    events = [
        Event(pipeline=p, stage=s, kind=kind, micro_batch=0, start_ms=a, end_ms=b)
        for p, s, kind, a, b in passes
    ]
    events.append(Event(pipeline=-1, stage=0, kind=EventKind.PULL, start_ms=0, end_ms=1))
    arguments = {
        "iteration": 3,
        "source": "predicted",
        "strategy": "1x<2,1> + 1x<1,2>",
        "num_devices": 5,
        "duration_ms": 8.0,
        "pipelines": (
            Track(scheme=Scheme(2, 1), ranks=(0, 1), num_micro_batches=1),
            Track(scheme=Scheme(1, 2), ranks=(2, 3), num_micro_batches=1),
        ),
        "events": tuple(events),
    }
    return Timeline(**{**arguments, **changes})


def test_round_trip():
    timeline = make_timeline()
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_events_are_ordered_whatever_their_order_was():
    timeline = make_timeline()
    assert make_timeline(events=timeline.events[::-1]) == timeline
    assert [e.pipeline for e in timeline.events] == [-1, 0, 0, 1, 1, 1, 1]


def test_bubble_counts_every_device():
    timeline = make_timeline()
    assert timeline.propagation_ms == 6
    assert timeline.bubble == pytest.approx(1 - (2 * 6 + 1 * 4) / (5 * 6))
    empty = make_timeline(events=())
    assert (empty.propagation_ms, empty.bubble) == (0.0, 0.0)


def test_shift_moves_every_event():
    moved = make_timeline().shift(1.0)
    assert (moved.duration_ms, moved.propagation_ms) == (7.0, 6.0)
    assert moved.passes()[0].start_ms == 0


@pytest.mark.parametrize(
    "misplaced",
    [
        {"pipeline": 2, "stage": 0},
        {"pipeline": 0, "stage": 1},
        {"pipeline": 0, "stage": 0, "end_ms": -1.0},
    ],
)
def test_an_event_outside_the_strategy_is_refused(misplaced):
    event = {"kind": EventKind.FORWARD, "start_ms": 0.0, "end_ms": 1.0, **misplaced}
    with pytest.raises(HydraConfigError, match="has no place in 1x<2,1> \\+ 1x<1,2>"):
        make_timeline(events=(Event(**event),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/1"}, "schema is 'other/1'"),
        ({"columns": ["pipeline"]}, "not a valid"),
        ({"pipelines": []}, "has no place"),
    ],
)
def test_documents_that_are_none(change, message):
    with pytest.raises(HydraConfigError, match=f"run.json.*{message}"):
        Timeline.from_json({**make_timeline().to_json(), **change}, source="run.json")
