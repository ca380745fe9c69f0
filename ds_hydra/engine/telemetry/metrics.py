"""Metrics of an iteration, for `metrics.jsonl` and DeepSpeed's monitors."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.records.metrics import (
    METRICS_FILE,
    PROFILE_FILE,
    RUN_FILE,
    TRACE_FILE,
    IterationMetrics,
    PipelineMetrics,
)
from ds_hydra.records.timeline import Timeline
from ds_hydra.sampler.plan import IterationPlan, imbalance_of
from ds_hydra.strategy import Profile
from ds_hydra.strategy.cost_models.flops import ModelFlops
from ds_hydra.version import __version__

if TYPE_CHECKING:
    import torch

    from ds_hydra.engine.model.stage_model import StageModel
    from ds_hydra.engine.propagation import RankTimes

_TAIL_BYTES = 1 << 22
_RUN_SCHEMA = "ds_hydra.run/1"

logger = logging.getLogger(__name__)


def measure_passes(
    plan: IterationPlan,
    outcomes: Sequence[RankTimes],
    *,
    find_straggler: Callable[[Sequence[PipelineMetrics]], int | None],
    profiled_ms: Sequence[float | None],
    **given: Any,
) -> IterationMetrics:
    """Metrics of `plan` out of the times of each rank's passes; `given` are the fields that the
    engine knows itself. Those of the whole iteration and of its step are NaN (`with_times`).
    """
    known_ms = iter(profiled_ms)
    phases = [
        _measure_pipelines(phase, [o.phase_ms[number] for o in outcomes], known_ms)
        for number, phase in enumerate(plan.in_turn)
    ]
    pipelines = tuple(pipeline for phase in phases for pipeline in phase)
    measured_ms = sum(max(p.measured_ms for p in phase) for phase in phases)
    available_ms = measured_ms * len(outcomes)
    return IterationMetrics(
        iteration=plan.iteration,
        strategy=str(plan.strategy),
        num_tokens=plan.num_tokens,
        num_sequences=len(plan.lengths),
        longest_tokens=max(plan.lengths),
        iteration_ms=nan,
        step_ms=nan,
        grad_norm=nan,
        tokens_per_s=nan,
        predicted_ms=plan.makespan_ms,
        measured_ms=measured_ms,
        imbalance=imbalance_of((p.ranks, p.measured_ms) for p in pipelines if p.num_micro_batches),
        bubble=1 - sum(o.busy_ms for o in outcomes) / available_ms if available_ms > 0 else 0.0,
        pull_ms=max(o.pull_ms for o in outcomes),
        push_ms=min(o.push_ms for o in outcomes),
        visible_pull_ms=max(o.visible_pull_ms for o in outcomes),
        visible_push_ms=min(o.visible_push_ms for o in outcomes),
        straggler=find_straggler(pipelines),
        pipelines=pipelines,
        **given,
    )


_OF_THE_STEP = frozenset(
    ("iteration_ms", "step_ms", "grad_norm", "tokens_per_s", "tflops_per_device", "mfu")
)
"""Fields that are known at the end of the step."""
_KNOWN_BEFORE = frozenset(field.name for field in fields(IterationMetrics)) - _OF_THE_STEP


class LateMetrics:
    """Metrics of an iteration whose step a device may still run. What the passes say is there at
    once; for `_OF_THE_STEP`, and for what is made of all fields, the host waits.
    """

    def __init__(self, known: IterationMetrics, complete: Callable[[IterationMetrics], Any]):
        self._known, self._complete = known, complete

    @functools.cached_property
    def whole(self) -> IterationMetrics:
        """All of them, at the end of the step."""
        return self._complete(self._known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known if name in _KNOWN_BEFORE else self.whole, name)


def with_times(
    metrics: IterationMetrics,
    plan: IterationPlan,
    *,
    iteration_ms: float,
    flops: ModelFlops,
    peak_flops: float | None,
    **given: float,
) -> IterationMetrics:
    """Metrics with the time of the whole iteration, and what follows from it; `given` are other
    fields that are known at the end of the step.
    """
    tflops = flops.tflops(plan.lengths, iteration_ms, plan.num_devices)
    return replace(
        metrics,
        iteration_ms=iteration_ms,
        tokens_per_s=metrics.num_tokens / iteration_ms * 1e3,
        tflops_per_device=tflops,
        mfu=tflops * 1e12 / peak_flops if peak_flops else nan,
        **given,
    )


def pack_occupancy(plan: IterationPlan, profile: Profile) -> float:
    """Tokens of `plan` over the tokens that its micro-batches could fit; NaN for a scheme without
    a memory model.
    """
    capacity = 0
    for pipeline in plan.pipelines:
        if not profile.memory.knows(pipeline.scheme):
            return nan
        micro_batch = profile.max_len_tokens(pipeline.scheme, plan.num_devices)
        capacity += max(0, micro_batch) * len(pipeline.micro_batches)
    return plan.num_tokens / capacity if capacity else nan


def expert_imbalance(tokens_LE: torch.Tensor | None) -> float:
    """`IterationMetrics.expert_imbalance` of the tokens of each expert [layers, E]."""
    if tokens_LE is None:
        return nan
    tokens_LE = tokens_LE.double()
    return float((tokens_LE.amax(dim=1) / tokens_LE.mean(dim=1)).max()) - 1


def describe_run(
    config: HydraConfig, stage_model: StageModel, num_ranks: int, device: torch.device
) -> dict[str, Any]:
    """Describe the whole run, for `run.json`."""
    return {
        "schema": _RUN_SCHEMA,
        "version": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "num_ranks": num_ranks,
        "device": device.type,
        "model": {
            "type": stage_model.config.model_type,
            "num_layers": stage_model.num_layers,
            "hidden_size": stage_model.hidden_size,
            "vocab_size": stage_model.vocab_size,
            "num_parameters": sum(spec.numel for spec in stage_model.specs),
        },
        "hydra": config.model_dump(mode="json"),
    }


def _measure_pipelines(
    phase: IterationPlan, propagate_ms: Sequence[float], profiled_ms: Iterator[float | None]
) -> tuple[PipelineMetrics, ...]:
    """Pipelines of a phase with the slowest of their ranks' times; `propagate_ms[rank]`, the next
    of `profiled_ms` for each.
    """
    return tuple(
        PipelineMetrics(
            scheme=p.scheme,
            ranks=p.ranks,
            num_micro_batches=len(p.micro_batches),
            num_tokens=sum(
                sum(phase.micro_batch_lengths(micro_batch)) for micro_batch in p.micro_batches
            ),
            predicted_ms=p.makespan_ms,
            measured_ms=max(propagate_ms[rank] for rank in p.ranks) if p.micro_batches else 0.0,
            profiled_ms=nan if profiled is None else profiled,
        )
        for p, profiled in zip(phase.pipelines, profiled_ms)
    )


def _end_last_line(path: Path) -> None:
    """End the half line that a killed run left, so that it stays the only one that is lost."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _last_iteration(path: Path) -> int | None:
    """Iteration of the last readable line near the end of a `metrics.jsonl`; None without one."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["iteration"])
    return None


class RunLog:
    """Writer of `metrics.jsonl` and, if wanted, one JSON file per executed plan into a run folder;
    a resumed run appends.

    What another run has left there, which this one does not continue, is moved to `earlier-N` in
    the folder before the first iteration is written.
    """

    def __init__(self, run_dir: Path, *, save_plans: bool):
        self.num_lost = 0
        self._run_dir = run_dir = run_dir.absolute()  # a callback may change the working folder
        replaced = [run_dir / name for name in (RUN_FILE, PROFILE_FILE)]
        self._earlier: dict[str, bytes] | None = {
            path.name: path.read_bytes() for path in replaced if path.is_file()
        }
        """Files that this run replaces before its first iteration; None from then on."""
        self._plans = run_dir / "plans" if save_plans else None
        run_dir.mkdir(parents=True, exist_ok=True)
        if self._plans is not None:
            self._plans.mkdir(exist_ok=True)
        for name in (METRICS_FILE, TRACE_FILE):
            _end_last_line(run_dir / name)
        self._file = self._open()

    def _open(self) -> TextIO:
        file = (self._run_dir / METRICS_FILE).open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning(
                "%s: another run writes to this folder at this moment, and what both write will be mixed; name "
                "another hydra.run_dir in one of them",
                self._run_dir,
            )
        except OSError:  # a file system without locks
            pass
        return file

    def write(self, metrics: IterationMetrics, plan: IterationPlan) -> None:
        """Append one iteration. Lines that cannot be written are lost: training matters more."""
        with self._adding(plan.iteration):
            self._file.write(json.dumps(metrics.to_json()) + "\n")
            self._file.flush()
            if self._plans is not None:
                path = self._plans / f"iteration_{plan.iteration:06d}.json"
                path.write_text(json.dumps(plan.to_json()), encoding="utf-8")

    def write_trace(
        self,
        timeline: Timeline,
        peak_bytes: Sequence[int],
        experts: Mapping[str, Any] | None = None,
    ) -> None:
        """Append the times of all stages, the most memory each rank has used, and the tokens of
        each expert to `trace.jsonl`; may be lost too.
        """
        document = {**timeline.to_json(), "peak_bytes": list(peak_bytes)}
        if experts is not None:
            document["experts"] = dict(experts)
        with (
            self._adding(timeline.iteration),
            (self._run_dir / TRACE_FILE).open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(document) + "\n")

    def _begin(self, iteration: int) -> None:
        """Make room before the first `iteration` of this process, where it continues nothing."""
        if self._earlier is None:
            return
        earlier, self._earlier = self._earlier, None
        last = _last_iteration(self._run_dir / METRICS_FILE)
        if last is None or 0 < iteration <= last + 1:
            return
        numbers = (n for n in itertools.count(1) if not (self._run_dir / f"earlier-{n}").exists())
        aside = self._run_dir / f"earlier-{next(numbers)}"
        aside.mkdir()
        before = self._file
        for name in (METRICS_FILE, TRACE_FILE, *(["plans"] if self._plans else [])):
            if (self._run_dir / name).exists():
                (self._run_dir / name).rename(aside / name)
        for name, content in earlier.items():
            (aside / name).write_bytes(content)
        if self._plans is not None:
            self._plans.mkdir()
        self._file = self._open()
        before.close()
        logger.warning(
            "%s holds a run that ended at iteration %d, which iteration %d does not continue: it is now in %s",
            self._run_dir, last, iteration, aside,
        )  # fmt: skip

    @contextlib.contextmanager
    def _adding(self, iteration: int) -> Iterator[None]:
        """Warn of metrics of `iteration` that cannot be written, which are lost."""
        try:
            self._begin(iteration)
            yield
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.warning(
                    "metrics of iteration %d are lost (and maybe later ones): %s", iteration, error
                )

    def write_run(self, document: Mapping[str, Any]) -> None:
        """Describe this run in `run.json`; a resumed run does it again."""
        (self._run_dir / RUN_FILE).write_text(
            json.dumps(document, indent=1) + "\n", encoding="utf-8"
        )

    def write_profile(self, document: Mapping[str, Any]) -> None:
        """Keep the profile of this run; `hydra.profile` can name the file in the next run."""
        (self._run_dir / PROFILE_FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError, ValueError):  # no locks there, or closed before
            fcntl.flock(self._file, fcntl.LOCK_UN)  # forked processes have the file, too
        with contextlib.suppress(OSError):  # what a full disk did not take
            self._file.close()
