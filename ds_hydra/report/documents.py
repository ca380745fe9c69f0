"""Numbers of runs as one JSON document, `ds_hydra.report/1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite, isnan
from statistics import median
from typing import Any

from ds_hydra.report.run_folder import Run
from ds_hydra.report.run_report import divide_time, scheme_errors

REPORT_SCHEMA = "ds_hydra.report/1"


def describe_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Describe each run. What is unknown is null."""
    return {"schema": REPORT_SCHEMA, "runs": [_describe(run) for run in runs]}


def _describe(run: Run) -> dict[str, Any]:
    summary = run.summary
    document = {
        "name": run.name,
        "num_ranks": run.num_ranks,
        **_fields(summary),
        "bubble": _median([r.bubble for r in run.records]),
        "pack_occupancy": _median([r.pack_occupancy for r in run.records]),
        "time_ms": asdict(divide_time(run.records)),
        "strategies": [{**_fields(u), "strategy": str(u.strategy)} for u in summary.strategies],
        "schemes": [{**_fields(e), "scheme": str(e.scheme)} for e in scheme_errors(run.records)],
        "learned": run.records[-1].learned,
        "peak_bytes": list(run.traces[max(run.traces)].peak_bytes) if run.traces else [],
        "traced_iterations": sorted(run.traces),
        "notes": list(run.notes),
    }
    return {key: _known(value) for key, value in document.items()}


def _known(value: Any) -> Any:
    """`value` with null for every number in it that is not known."""
    if isinstance(value, dict):
        return {key: _known(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_known(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a dataclass with slots, by name."""
    return {name: getattr(value, name) for name in value.__slots__}


def _median(values: Sequence[float]) -> float | None:
    known = [value for value in values if not isnan(value)]
    return median(known) if known else None
