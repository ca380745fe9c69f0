"""Reports of iterations: metrics, the run folder, and the times that correct the plans to come."""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ds_hydra.engine.candidates import EngineCandidates, naming_run_dir
from ds_hydra.engine.iteration import Outcomes
from ds_hydra.engine.profiling.profile_document import count_flops
from ds_hydra.engine.propagation import RankTimes
from ds_hydra.engine.ranks.agreement import gather_by_hosts, run_together
from ds_hydra.engine.telemetry.metrics import (
    LateMetrics,
    RunLog,
    describe_run,
    expert_imbalance,
    measure_passes,
    pack_occupancy,
    with_times,
)
from ds_hydra.engine.telemetry.trace import MemoryWatch, TraceChoice, gather_timeline
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy.cost_models.flops import find_peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """Points of an iteration in the work of the device, or of the host where that computes."""

    begin: Any
    step: Any
    end: Any


class IterationReporter:
    """Reports this engine's iterations. Methods are collective over all ranks unless they say
    otherwise.
    """

    def __init__(self, candidates: EngineCandidates, memory: MemoryWatch):
        self.log: RunLog | None = None
        self._candidates = candidates
        self._propagator, self._config = candidates.propagator, candidates.config
        self._memory = memory
        self._device = self._propagator.device
        stage_model = self._propagator.stage_model
        self.flops = count_flops(stage_model)
        self._peak_flops = None
        """Peak FLOP/s of a device in 16 bit; None where ranks compute on CPUs or in fp32."""
        if self._device.type == "cuda" and stage_model.params[0].dtype.itemsize == 2:
            self._peak_flops = find_peak_flops(torch.cuda.get_device_name(self._device))
        self._unfinished: tuple[LateMetrics, Any, Callable[[IterationMetrics], None]] | None = None
        """Metrics of an iteration whose step the device may still run, its end, and what is done
        with all of them.
        """
        writes = self._config.run_dir is not None
        self._traces = TraceChoice(self._config.trace_every if writes else 0)
        run_together(self._open_log, self._device)
        atexit.register(_report_last, weakref.ref(self))

    def report(
        self,
        planned: PlannedIteration,
        outcomes: Outcomes,
        stamps: Stamps,
        *,
        grad_norm: Any,
        take: Callable[[IterationMetrics], None],
        **given: Any,
    ) -> IterationMetrics:
        """Measure an iteration and return its metrics. The candidates learn from them, the run
        folder gets them, and `take`: now where the host computes; where a device may still run the
        step, in the next iteration, or before a checkpoint or the end. `given` are metrics that the
        engine knows.
        """
        self.finish()
        plan, candidates = planned.plan, self._candidates
        clock = self._propagator.clock
        profile, tracker = candidates.profile, candidates.find_tracker()
        strategies = candidates.strategies
        rows: Sequence[Sequence[float]] = [rank.times for rank in outcomes.ranks]
        if clock.has_streams:
            # All ranks' passes are over on their devices; their steps run beside this.
            row = torch.tensor(outcomes.own.times().to_row(), dtype=torch.float64)
            rows = gather_by_hosts(row, self._device).tolist()
        metrics = measure_passes(
            plan,
            [RankTimes.from_row(row) for row in rows],
            **given,
            balance_loss=outcomes.balance_loss,
            expert_imbalance=expert_imbalance(outcomes.expert_tokens_LE),
            strategy_index=strategies.index(plan.strategy) if plan.strategy in strategies else -1,
            planning_ms=planned.planning_ms,
            waited_ms=planned.waited_ms,
            pack_occupancy=math.nan if profile is None else pack_occupancy(plan, profile),
            find_straggler=partial(
                candidates.straggler.observe,
                expected_ms=tracker.expected_ms(plan) if tracker else None,
            ),
            profiled_ms=tracker.profiled_ms(plan) if tracker else [None] * len(plan.pipelines),
            learned=tracker.learned.factors() if tracker else {},
        )

        def complete(known: IterationMetrics) -> IterationMetrics:
            clock.settle(stamps.end)
            return with_times(
                known,
                plan,
                iteration_ms=clock.ms_between(stamps.begin, stamps.end),
                step_ms=clock.ms_between(stamps.step, stamps.end),
                grad_norm=math.nan if grad_norm is None else float(grad_norm),
                flops=self.flops,
                peak_flops=self._peak_flops,
            )

        def end(whole: IterationMetrics) -> None:
            candidates.learn(whole, plan)
            if self.log is not None:
                self.log.write(whole, plan)
            take(whole)

        late = LateMetrics(metrics, complete)
        self._unfinished = late, stamps.end, end
        self._trace(metrics, plan, outcomes.expert_tokens_LE)
        if clock.has_streams:
            return cast(IterationMetrics, late)
        self.finish()
        return late.whole

    def finish(self) -> None:
        """Complete the report of the last iteration, if a device still ran its step. Not
        collective.
        """
        if self._unfinished is not None:
            (late, _, end), self._unfinished = self._unfinished, None
            end(late.whole)

    def close(self, *, waits: bool = True) -> None:
        """Close the run folder. Safe to call twice. A step that a device still runs is reported if
        this `waits`. Not collective.
        """
        late = self._unfinished
        if late is not None and (waits or self._propagator.clock.is_reached(late[1])):
            self.finish()
        self._unfinished = None
        if self.log is not None:
            self.log.close()
            self.log = None

    def describe(self) -> str:
        """Candidates, communicators and kernels, for the start of a run. Not collective."""
        stage_model, candidates = self._propagator.stage_model, self._candidates
        strategies = candidates.strategies
        kind = "strategy" if len(strategies) == 1 else "strategies"
        # Those that the data decide were named when they were found, with reasons
        names = "" if candidates.reasons else f" ({', '.join(map(str, strategies))})"
        loss = stage_model.balance.loss
        notes = [] if loss is None else [str(loss)]
        notes += [f"attention: {choice.describe()}" for choice in stage_model.attention_choices]
        if stage_model.float8:
            notes.append(stage_model.float8.describe())
        if self.flops.unknown:
            notes.append(f"TFLOP/s and MFU are left out: {self.flops.unknown}")
        return (
            f"{len(strategies)} candidate {kind} on {self._propagator.num_ranks} ranks{names}; "
            f"{self._propagator.groups}" + "".join(f"\n  {line}" for line in notes)
        )

    def _trace(
        self, metrics: IterationMetrics, plan: IterationPlan, expert_tokens_LE: Tensor | None
    ) -> None:
        """Add the times of all stages to the run folder, on chosen iterations."""
        # What no profile knows is planned by FLOP counts, and would be the slowest for ever
        is_known = metrics.predicted_ms > 0 and math.isfinite(metrics.profile_error)
        slowdown = metrics.measured_ms / metrics.predicted_ms if is_known else 0.0
        if self._traces.wants(plan.iteration, slowdown):
            timeline = gather_timeline(self._propagator.recorder, plan, self._device)
            mine = torch.tensor([self._memory.peak_bytes()], dtype=torch.int64)
            peak_bytes = gather_by_hosts(mine, self._device).flatten().tolist()
            if self.log is not None:
                balance = self._propagator.stage_model.balance
                experts = balance.describe_tokens(expert_tokens_LE)
                self.log.write_trace(timeline, peak_bytes, experts)

    def _open_log(self) -> None:
        """Open the run folder on rank 0."""
        config, propagator = self._config, self._propagator
        if config.run_dir is None or propagator.rank != 0:
            return
        with naming_run_dir(config):
            self.log = RunLog(Path(config.run_dir), save_plans=config.save_plans)
            stage_model, num_ranks = propagator.stage_model, propagator.num_ranks
            self.log.write_run(describe_run(config, stage_model, num_ranks, self._device))
        self._candidates.log = self.log
        if config.profile is not None:
            self._candidates.write_profile()


def _report_last(reporter: weakref.ref[IterationReporter]) -> None:
    """Report the last iteration of a script that ends without `destroy`."""
    found = reporter()
    if found is not None:
        found.close(waits=False)
