"""Contents of a run's folder: metrics, plans, traces, profile; the missing parts, and the timelines
that its plans and profile promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_hydra.configs import files
from ds_hydra.errors import HydraConfigError, HydraError
from ds_hydra.records.events import simulate_plan
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.records.timeline import Timeline
from ds_hydra.report.run_report import RunSummary, describe_damage, read_metrics, summarize_records
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Profile, Scheme

_MAX_PLANS = 2000
"""Plans that are read of a long run, evenly spread; memory needs no more."""


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
class RunFacts:
    """Facts of `run.json` about the run as a whole; None where it does not have them."""

    num_ranks: int | None = None
    recomputes: bool = False
    """Whether every layer runs forward again in backward."""
    memory_limit_bytes: int | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunFacts:
        """The facts in the document; raises HydraConfigError for values of another kind."""
        hydra = files.check_object(document.get("hydra", {}), "hydra")
        given: dict[str, Any] = {"recomputes": hydra.get("activation_checkpointing") is True}
        if "num_ranks" in document:
            given["num_ranks"] = files.read_count(
                document, "num_ranks", least=1, most=files.MAX_DEVICES
            )
        if hydra.get("memory_limit_bytes") is not None:
            given["memory_limit_bytes"] = files.read_count(
                hydra, "memory_limit_bytes", most=1 << 62
            )
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder. What it does not hold is empty or None here, and `notes` say so to the
    reader.
    """

    name: str
    records: tuple[IterationMetrics, ...]
    plans: dict[int, IterationPlan]
    traces: dict[int, Trace]
    profile: Profile | None
    facts: RunFacts
    notes: tuple[str, ...]

    @property
    def summary(self) -> RunSummary:
        """The run in numbers."""
        return summarize_records(self.records)

    @property
    def num_ranks(self) -> int:
        """Ranks of the run, idle ones included where that is known."""
        if self.facts.num_ranks:
            return self.facts.num_ranks
        for plan in self.plans.values():
            return plan.num_devices
        return 1 + max(
            (rank for record in self.records for p in record.pipelines for rank in p.ranks),
            default=0,
        )

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
        """Predicted timeline of `iteration`, as far as plan and profile are at hand."""
        plan = self.plans.get(iteration)
        if plan is None or self.profile is None:
            return None
        if not all(self.profile.has_latency(scheme) for scheme in plan.strategy.schemes):
            return None
        fraction = 1 / 4 if self.facts.recomputes else 1 / 3
        return predict_timeline(plan, self.profile, forward_fraction=fraction)


def load_run(run_dir: str | Path) -> Run:
    """The run in `run_dir`; raises HydraConfigError where no line of `metrics.jsonl` can be read.

    Everything else may be missing or damaged: the run is read without it, with a note.
    """
    folder = Path(run_dir)
    notes: list[str] = []
    records = read_metrics(folder, notes)
    facts = _read_facts(folder / "run.json", notes)
    plans = _read_plans(folder / "plans", records, notes)
    return Run(
        name=folder.resolve().name,
        records=tuple(records),
        plans=plans,
        traces=_read_traces(folder / "trace.jsonl", plans, notes),
        profile=_read_profile(folder / "profile.json", facts, notes),
        facts=facts,
        notes=tuple(notes),
    )


def _read_facts(path: Path, notes: list[str]) -> RunFacts:
    if not path.exists():
        return RunFacts()
    try:
        return RunFacts.from_json(files.read_json_object(path))
    except HydraConfigError as error:
        notes.append(f"run.json cannot be read ({error}).")
        return RunFacts()


def _read_plans(
    folder: Path, records: Sequence[IterationMetrics], notes: list[str]
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
            plans[record.iteration] = IterationPlan.from_json(files.read_json_object(path))
        except HydraError:
            damaged.append(path.name)
    if damaged:
        notes.append(f"{len(damaged)} plans cannot be read, the first is {damaged[0]}.")
    if not plans:
        notes.append(
            "No plans in the folder (hydra.save_plans was off, or they were removed): predicted timelines and "
            "the memory model are left out."
        )
    return plans


def _read_traces(
    path: Path, plans: Mapping[int, IterationPlan], notes: list[str]
) -> dict[int, Trace]:
    if not path.exists():
        notes.append(
            "No trace.jsonl in the folder (hydra.trace_every is 0): measured timelines are left out."
        )
        return {}
    traces: dict[int, Trace] = {}
    damaged: list[HydraConfigError] = []
    try:
        for number, line in files.read_json_lines(path):
            try:
                if isinstance(line, HydraConfigError):
                    raise line
                trace = Trace.from_json(line, f"line {number}")
                plan = plans.get(trace.timeline.iteration)
                if plan is not None and not trace.timeline.follows(plan):
                    raise HydraConfigError(
                        f"line {number}: it does not follow the iteration's plan"
                    )
                traces[trace.timeline.iteration] = trace
            except HydraConfigError as error:
                damaged.append(error)
    except OSError as error:
        notes.append(f"trace.jsonl cannot be read ({error.strerror}).")
    if note := describe_damage(path.name, damaged):
        notes.append(note)
    return traces


def _read_profile(path: Path, facts: RunFacts, notes: list[str]) -> Profile | None:
    """The profile under the memory limit of the run."""
    try:
        profile = Profile.load(path)
    except HydraError as error:
        missing = "No profile.json in the folder" if not path.exists() else f"{error}"
        notes.append(f"{missing}: MaxLen, predicted timelines and the memory model are left out.")
        return None
    if facts.memory_limit_bytes is None:
        return profile
    memory = replace(
        profile.memory,
        memory_bytes=facts.memory_limit_bytes,
        reserved_bytes=0,
        safety_margin_bytes=0,
    )
    return replace(profile, memory=memory)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most bytes that a rank used (None: not traced) and that the memory model expects (None:
    unknown).
    """

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
    """(rank, bytes of App. B.1) of the longest micro-batch of each rank in each scheme."""
    if run.profile is None:
        return
    longest: dict[int, dict[Scheme, int]] = {}
    for iteration, plan in run.plans.items():
        if last is not None and iteration > last:
            continue
        for pipeline in plan.pipelines:
            tokens = max(
                (
                    sum(plan.micro_batch_lengths(micro_batch))
                    for micro_batch in pipeline.micro_batches
                ),
                default=0,
            )
            for rank in pipeline.ranks:
                tokens_of = longest.setdefault(rank, {})
                tokens_of[pipeline.scheme] = max(tokens, tokens_of.get(pipeline.scheme, 0))
    for rank, tokens_of in longest.items():
        sizes = [
            run.profile.memory.rank_bytes(scheme, run.num_ranks, tokens)
            for scheme, tokens in tokens_of.items()
            if run.profile.memory.knows(scheme)
        ]
        if sizes:
            yield rank, max(sizes)


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
