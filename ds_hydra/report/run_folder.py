"""Contents of a run's folder: metrics and traces; the missing parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hydra.configs import files
from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import RUN_FILE, TRACE_FILE, IterationMetrics
from ds_hydra.records.timeline import Timeline
from ds_hydra.report.run_report import (
    RunSummary,
    describe_damage,
    read_lines,
    read_metrics,
    summarize_records,
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured times of one iteration, and the most bytes that each rank had used until then."""

    timeline: Timeline
    peak_bytes: tuple[int, ...]
    expert_tokens: Mapping[int, tuple[int, ...]]
    """Layer -> tokens that chose each of its experts; empty without experts."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any], source: str) -> Trace:
        """The trace in one line of `trace.jsonl`; raises HydraConfigError."""
        return cls(
            Timeline.from_json(document, source=source),
            files.read_counts({"peak_bytes": [], **document}, "peak_bytes", most=1 << 62),
            _read_expert_tokens(files.check_object(document.get("experts", {}), "experts")),
        )


def _read_expert_tokens(experts: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    if not experts:
        return {}
    layers = files.read_counts(experts, "layers")
    rows = files.read_list(experts, "tokens")
    if len(rows) != len(layers):
        raise HydraConfigError(f"experts has {len(layers)} layers and tokens of {len(rows)}")
    return {
        layer: files.read_counts({"tokens": row}, "tokens", most=1 << 62)
        for layer, row in zip(layers, rows, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder. What it does not hold is empty here, and `notes` say so to the reader."""

    name: str
    num_ranks: int
    """Ranks of the run; those that worked, where it does not say."""
    records: tuple[IterationMetrics, ...]
    traces: dict[int, Trace]
    notes: tuple[str, ...]

    @property
    def summary(self) -> RunSummary:
        """The run in numbers."""
        return summarize_records(self.records)


def load_run(run_dir: str | Path) -> Run:
    """The run in `run_dir`; raises HydraConfigError where no line of `metrics.jsonl` can be read.

    Everything else may be missing or damaged: the run is read without it, with a note.
    """
    folder = Path(run_dir)
    notes: list[str] = []
    records = read_metrics(folder, notes)
    working = [rank for record in records for p in record.pipelines for rank in p.ranks]
    return Run(
        name=folder.resolve().name,
        num_ranks=_read_num_ranks(folder / RUN_FILE, notes) or 1 + max(working, default=0),
        records=tuple(records),
        traces=_read_traces(folder / TRACE_FILE, notes),
        notes=tuple(notes),
    )


def _read_num_ranks(path: Path, notes: list[str]) -> int:
    """Ranks that `run.json` names, 0 where it does not."""
    if not path.exists():
        return 0
    try:
        document = {"num_ranks": 0, **files.read_json_object(path)}
        return files.read_count(document, "num_ranks", most=files.MAX_DEVICES)
    except HydraConfigError as error:
        notes.append(f"{path.name} cannot be read ({error}).")
        return 0


def _read_traces(path: Path, notes: list[str]) -> dict[int, Trace]:
    if not path.exists():
        notes.append(
            "No trace.jsonl in the folder (hydra.trace_every is 0): measured timelines are left out."
        )
        return {}
    try:
        traces, damaged = read_lines(path, Trace.from_json)
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror}).")
        return {}
    if note := describe_damage(path.name, damaged):
        notes.append(note)
    return {trace.timeline.iteration: trace for trace in traces}
