"""Everything that a run left in its folder: metrics, plans, traces, profile; and what is missing there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_hydra.errors import HydraError
from ds_hydra.report.predict import predict_timeline
from ds_hydra.report.run_report import IterationRecord, RunSummary, read_metrics, summarize_records
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.simulator.timeline import Timeline
from ds_hydra.strategy import Profile, Scheme

_MAX_PLANS = 2000
"""Plans that are read of a long run, evenly spread; lengths and memory need no more."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured times of one iteration, and the most bytes that each rank had used until then."""

    timeline: Timeline
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder. What it does not hold is empty or None here, and `notes` say so to the reader."""

    name: str
    records: tuple[IterationRecord, ...]
    plans: dict[int, IterationPlan]
    traces: dict[int, Trace]
    profile: Profile | None
    facts: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def summary(self) -> RunSummary:
        """The run in numbers."""
        return summarize_records(self.records)

    @property
    def num_ranks(self) -> int:
        """Ranks of the run, idle ones included where that is known."""
        known = [plan.num_devices for plan in self.plans.values()][:1]
        used = 1 + max(rank for record in self.records for p in record.pipelines for rank in p.ranks)
        return int(self.facts.get("num_ranks", 0)) or (known[0] if known else used)

    def lengths(self) -> list[int]:
        """Tokens of all sequences in the plans at hand."""
        return [length for plan in self.plans.values() for length in plan.lengths]

    def max_len(self) -> dict[Scheme, int]:
        """MaxLen of every scheme that the run used and the profile knows."""
        if self.profile is None:
            return {}
        used = {p.scheme for record in self.records for p in record.pipelines}
        return {
            scheme: self.profile.max_len_tokens(scheme, self.num_ranks)
            for scheme in sorted(used)
            if self.profile.memory.knows(scheme)
        }

    def predicted(self, iteration: int) -> Timeline | None:
        """What was planned for `iteration`, as far as plan and profile are at hand."""
        plan = self.plans.get(iteration)
        if plan is None or self.profile is None:
            return None
        if not all(self.profile.has_latency(scheme) for scheme in plan.strategy.schemes):
            return None
        recomputes = self.facts.get("hydra", {}).get("activation_checkpointing", False)
        return predict_timeline(plan, self.profile, forward_fraction=1 / 4 if recomputes else 1 / 3)


def load_run(run_dir: str | Path) -> Run:
    """The run in `run_dir`; raises HydraConfigError where `metrics.jsonl` cannot be read.

    Everything else may be missing or damaged: the run is read without it, with a note.
    """
    folder = Path(run_dir)
    records = read_metrics(folder)
    notes: list[str] = []
    facts = _read_facts(folder / "run.json", notes)
    return Run(
        name=folder.resolve().name,
        records=tuple(records),
        plans=_read_plans(folder / "plans", records, notes),
        traces=_read_traces(folder / "trace.jsonl", notes),
        profile=_read_profile(folder / "profile.json", facts, notes),
        facts=facts,
        notes=tuple(notes),
    )


def _read_facts(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"run.json cannot be read ({error}).")
        return {}
    return facts if isinstance(facts, dict) else {}


def _read_plans(
    folder: Path, records: Sequence[IterationRecord], notes: list[str]
) -> dict[int, IterationPlan]:
    """Plans by iteration; of a long run only some."""
    plans, damaged = {}, []
    step = -(-len(records) // _MAX_PLANS)
    slowest = {r.iteration for r in sorted(records, key=lambda r: -r.iteration_ms)[:10]}
    for index, record in enumerate(records):
        path = folder / f"iteration_{record.iteration:06d}.json"
        if (index % step and record.iteration not in slowest) or not path.exists():
            continue
        try:
            plans[record.iteration] = IterationPlan.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, HydraError):
            damaged.append(path.name)
    if damaged:
        notes.append(f"{len(damaged)} plans cannot be read, the first is {damaged[0]}.")
    if not plans:
        notes.append(
            "No plans in the folder (hydra.save_plans was off, or they were removed): lengths, predicted "
            "timelines and the memory model are left out."
        )
    return plans


def _read_traces(path: Path, notes: list[str]) -> dict[int, Trace]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        notes.append(
            "No trace.jsonl in the folder (hydra.trace_every is 0): measured timelines are left out."
        )
        return {}
    traces: dict[int, Trace] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
            timeline = Timeline.from_json(document)
            traces[timeline.iteration] = Trace(timeline, tuple(document.get("peak_bytes", ())))
        except (ValueError, AttributeError, HydraError) as error:
            if number < len(lines) or text.endswith("\n"):  # else the run was killed while it wrote
                notes.append(f"trace.jsonl, line {number} cannot be read ({error}).")
    return traces


def _read_profile(path: Path, facts: dict[str, Any], notes: list[str]) -> Profile | None:
    """The profile under the memory limit of the run."""
    try:
        profile = Profile.load(path)
    except HydraError as error:
        missing = "No profile.json in the folder" if not path.exists() else f"{error}"
        notes.append(f"{missing}: MaxLen, predicted timelines and the memory model are left out.")
        return None
    limit = facts.get("hydra", {}).get("memory_limit_bytes")
    if limit is None:
        return profile
    memory = replace(profile.memory, memory_bytes=limit, reserved_bytes=0, safety_margin_bytes=0)
    return replace(profile, memory=memory)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most bytes that a rank used (None: not traced) and that the memory model expects (None: unknown)."""

    rank: int
    measured_bytes: int | None
    model_bytes: float | None


def rank_memory(run: Run) -> list[RankMemory]:
    """Measured and expected peak of every rank, over the plans up to the last trace."""
    last = max(run.traces, default=None)
    measured = run.traces[last].peak_bytes if last is not None else ()
    expected = dict(_expected_bytes(run, last))
    return [
        RankMemory(
            rank=rank,
            measured_bytes=measured[rank] if rank < len(measured) and measured[rank] > 0 else None,
            model_bytes=expected.get(rank),
        )
        for rank in range(run.num_ranks)
    ]


def _expected_bytes(run: Run, last: int | None) -> Iterator[tuple[int, float]]:
    """(rank, bytes of App. B.1) of the longest row that each rank has run in each scheme."""
    if run.profile is None:
        return
    longest: dict[int, dict[Scheme, int]] = {}
    for iteration, plan in run.plans.items():
        if last is not None and iteration > last:
            continue
        for pipeline in plan.pipelines:
            tokens = max((sum(plan.row_lengths(row)) for row in pipeline.micro_batches), default=0)
            for rank in pipeline.ranks:
                rows = longest.setdefault(rank, {})
                rows[pipeline.scheme] = max(tokens, rows.get(pipeline.scheme, 0))
    for rank, rows in longest.items():
        sizes = [
            run.profile.memory.rank_bytes(scheme, run.num_ranks, tokens)
            for scheme, tokens in rows.items()
            if run.profile.memory.knows(scheme)
        ]
        if sizes:
            yield rank, max(sizes)
