"""Timeline of one iteration as measured: the events of every stage of every pipeline, which traces
are drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_hydra.configs.files import (
    MAX_DEVICES,
    check_object,
    read_count,
    read_list,
    read_number,
    read_text,
    read_time,
    reading,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.schemes.placement import read_ranks
from ds_hydra.strategy.schemes.scheme import Scheme

TIMELINE_SCHEMA = "ds_hydra.timeline/1"


class EventKind(str, Enum):
    """Kind of a stage's event."""

    PULL = "pull"
    FORWARD = "fwd"
    BACKWARD = "bwd"
    PUSH = "push"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that all ranks of one stage do together, from `start_ms` to `end_ms` of the
    iteration.

    `pipeline` and `stage` are positions in `Timeline.pipelines` and in that pipeline; `pipeline` -1
    stands for the ranks in no pipeline, which take part in pull, push and step. `micro_batch` is
    the packed micro-batch of forward and backward events, -1 for the others. A pull or push may
    overlap forwards and backwards.
    """

    pipeline: int
    stage: int
    kind: EventKind
    start_ms: float
    end_ms: float
    micro_batch: int = -1

    @property
    def duration_ms(self) -> float:
        """Milliseconds from start to end."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One pipeline of a timeline: its scheme, its ranks as `Strategy.place` orders them, its number
    of packed micro-batches.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All events of one iteration in order of (pipeline, stage, start); time 0 is the start of the
    pull.

    `duration_ms` is the time of the whole iteration, which is the last end of any event or later.
    """

    iteration: int
    strategy: str
    num_devices: int
    pipelines: tuple[Track, ...]
    events: tuple[Event, ...]
    duration_ms: float

    def __post_init__(self) -> None:
        ordered = tuple(
            sorted(self.events, key=lambda e: (e.pipeline, e.stage, e.start_ms, e.end_ms))
        )
        object.__setattr__(self, "events", ordered)
        for event in ordered:
            if not self._has_place(event) or not event.start_ms <= event.end_ms:
                raise HydraConfigError(
                    f"timeline of iteration {self.iteration}: {event} has no place in {self.strategy}"
                )

    def _has_place(self, event: Event) -> bool:
        if event.pipeline == -1:
            return event.stage == 0 and event.kind in _OF_ALL_RANKS
        if not 0 <= event.pipeline < len(self.pipelines):
            return False
        track = self.pipelines[event.pipeline]
        return (
            0 <= event.stage < track.scheme.pp and -1 <= event.micro_batch < track.num_micro_batches
        )

    def passes(self) -> tuple[Event, ...]:
        """Forward and backward events only."""
        return tuple(e for e in self.events if e.kind in (EventKind.FORWARD, EventKind.BACKWARD))

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.timeline/1` document; an event is a list in the order of `columns`."""
        return {
            "schema": TIMELINE_SCHEMA,
            "iteration": self.iteration,
            "source": "measured",
            "strategy": self.strategy,
            "num_devices": self.num_devices,
            "duration_ms": self.duration_ms,
            "pipelines": [
                {
                    **track.scheme.to_json(),
                    "ranks": list(track.ranks),
                    "num_micro_batches": track.num_micro_batches,
                }
                for track in self.pipelines
            ],
            "columns": list(_COLUMNS),
            "events": [_event_row(event) for event in self.events],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, source: str = "timeline") -> Timeline:
        """The timeline in a document written by `to_json`; raises HydraConfigError naming the
        error.
        """
        with reading(document, TIMELINE_SCHEMA, source):
            return cls(
                iteration=read_count(document, "iteration"),
                strategy=read_text(document, "strategy"),
                num_devices=read_count(document, "num_devices", least=1, most=MAX_DEVICES),
                duration_ms=read_time(document, "duration_ms"),
                pipelines=tuple(
                    _read_track(check_object(track, "a pipeline"))
                    for track in read_list(document, "pipelines")
                ),
                events=tuple(
                    _events_from_rows(
                        read_list(document, "columns"),
                        read_list(document, "events"),
                    )
                ),
            )


_COLUMNS = ("pipeline", "stage", "kind", "micro_batch", "start_ms", "end_ms")


def _event_row(event: Event) -> list[Any]:
    return [event.kind.value if name == "kind" else getattr(event, name) for name in _COLUMNS]


_OF_ALL_RANKS = (EventKind.PULL, EventKind.PUSH, EventKind.STEP)
"""Events of all ranks, also of those in no pipeline."""


def _read_track(document: Mapping[str, Any]) -> Track:
    scheme = Scheme.from_json(document)
    return Track(
        scheme=scheme,
        ranks=read_ranks(document, scheme),
        num_micro_batches=read_count(document, "num_micro_batches"),
    )


def _events_from_rows(columns: Iterable[Any], rows: Iterable[Any]) -> Iterable[Event]:
    for row in rows:
        fields = {"micro_batch": -1, **dict(zip(columns, row, strict=True))}
        yield Event(
            pipeline=read_count(fields, "pipeline", least=-1),
            stage=read_count(fields, "stage"),
            kind=EventKind(fields["kind"]),
            start_ms=read_number(fields, "start_ms"),
            end_ms=read_number(fields, "end_ms"),
            micro_batch=read_count(fields, "micro_batch", least=-1),
        )
