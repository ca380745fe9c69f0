"""Additions of HydraEngine to DeepSpeedEngine: candidates, profile, plans, and the iteration
itself.

The engine (`hydra_engine.py`) overrides DeepSpeed's methods; everything else lives in this
collaborator.
"""

from __future__ import annotations

import atexit
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.candidates import naming_run_dir
from ds_hydra.engine.iteration import Outcomes, RankReport
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.planning import IterationSource
from ds_hydra.engine.profiling.profile_document import count_flops
from ds_hydra.engine.propagation import Propagator, RankOutcome, RankTimes
from ds_hydra.engine.ranks.agreement import (
    check_alike,
    gather_by_hosts,
    gather_rows,
    raise_together,
    run_together,
)
from ds_hydra.engine.ranks.process import overlap_where_safe, use_deterministic_kernels
from ds_hydra.engine.ranks.settings import (
    SAME_TO,
    comparable,
    digest_of_numbers,
    numbers_in,
    settings_of_groups,
)
from ds_hydra.engine.ranks.sigterm import SIGTERM
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
from ds_hydra.strategy.schemes.placement import group_limit

logger = logging.getLogger(__name__)

_STATE_SCHEMA = "ds_hydra.state/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """Points of an iteration in the work of the device, or of the host where that computes."""

    begin: Any
    step: Any
    end: Any


class HydraRuntime:
    """Everything of ds_hydra on one rank. Methods are collective over all ranks unless they say
    otherwise.
    """

    def __init__(
        self,
        config: HydraConfig,
        stage_model: StageModel,
        device: torch.device,
        memory: MemoryWatch,
    ):
        check_alike(comparable(config), device)
        self.config = config = overlap_where_safe(config, device)
        self.stage_model = stage_model
        if config.deterministic:
            use_deterministic_kernels(device)
        run_together(lambda: stage_model.to_device(device), device)
        self._device = device
        self.propagator = Propagator(
            stage_model,
            device=device,
            max_groups=group_limit(dist.get_world_size(), config.max_process_groups),
            link_config=config.link,
            seed=config.seed,
            memory_limit_bytes=config.memory_limit_bytes,
        )
        self.source = IterationSource(config, self.propagator)
        self.flops = count_flops(stage_model)
        self.peak_flops = None
        """Peak FLOP/s of a device in 16 bit; None where ranks compute on CPUs or in fp32."""
        if device.type == "cuda" and stage_model.params[0].dtype.itemsize == 2:
            self.peak_flops = find_peak_flops(torch.cuda.get_device_name(device))
        self.log: RunLog | None = None
        self._unfinished: tuple[LateMetrics, Stamps, Callable[[IterationMetrics], None]] | None = (
            None
        )
        """Metrics of an iteration whose step the device may still run, its points, and what is
        done with all of them.
        """
        self._memory = memory
        self._traces = TraceChoice(config.trace_every if config.run_dir is not None else 0)
        run_together(self._open_log, device)
        atexit.register(_report_last, weakref.ref(self))

    def gather_outcomes(
        self,
        outcome: RankOutcome,
        squares: Tensor | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> Outcomes:
        """Gather what all ranks report, in rank order, on every rank; the one time in an iteration
        that the host waits for the device. `squares` are those of this rank's gradients where it
        trains, with the `groups` of its optimizer. Raises, on all ranks, the error of a given loss
        on one of them, and PlanMismatchError where numbers of groups differ.
        """
        problem = self.propagator.problem
        settings = dict(numbers_in(settings_of_groups(groups), "optimizer.param_groups"))
        trains, has_streams = squares is not None, self.propagator.clock.has_streams
        if squares is None:
            squares = torch.zeros(0, dtype=torch.float64, device=self._device)
        mine_N = RankReport.row_of(
            outcome,
            squares,
            has_problem=problem is not None,
            is_stop_requested=SIGTERM.is_asked(self),
            settings=digest_of_numbers(settings.items()) if groups else 0.0,
            times=outcome.times().to_row() if trains and not has_streams else (),
        )
        rows = gather_rows(mine_N)
        balance, read = self.stage_model.balance, [rows]
        if trains and balance.layers:
            dist.all_reduce(balance.counts_LE)
            read.append(balance.counts_LE.double())
        told = torch.cat([x.flatten() for x in read]).cpu()
        table, counts = told[: rows.numel()].view_as(rows), told[rows.numel() :]
        ranks = [RankReport.from_row(row, len(squares)) for row in table.tolist()]
        if any(rank.has_problem for rank in ranks):
            raise_together(problem, self._device)
        if len({rank.settings for rank in ranks}) > 1:
            check_alike(settings, self._device, rel_tol=SAME_TO)
        positions = [-1]
        if not all(math.isfinite(rank.loss_sum) for rank in ranks):
            mine = torch.tensor([outcome.find_nonfinite()])
            positions = gather_by_hosts(mine, self._device).flatten().tolist()
        return Outcomes(
            own=outcome,
            ranks=ranks,
            nonfinite_position=next((p for p in positions if p >= 0), -1),
            expert_tokens_LE=counts.view_as(balance.counts_LE).long() if len(read) > 1 else None,
        )

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
        self.end_report()
        plan, candidates = planned.plan, self.source.candidates
        clock = self.propagator.clock
        profile, tracker = candidates.profile, candidates.find_tracker()
        strategies = candidates.strategies
        rows: Sequence[Sequence[float]] = [rank.times for rank in outcomes.ranks]
        if clock.has_streams:
            # All ranks' passes are over on their devices; their steps run beside this.
            row = torch.tensor(outcomes.own.times().to_row(), dtype=torch.float64)
            rows = gather_by_hosts(row, self._device).tolist()
        times = [RankTimes.from_row(row) for row in rows]
        metrics = measure_passes(
            plan,
            times,
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
                peak_flops=self.peak_flops,
            )

        def end(whole: IterationMetrics) -> None:
            candidates.learn(whole, plan)
            if self.log is not None:
                self.log.write(whole, plan)
            take(whole)

        late = LateMetrics(metrics, complete)
        self._unfinished = late, stamps, end
        self._trace(metrics, plan, outcomes.expert_tokens_LE)
        if not clock.has_streams:
            self.end_report()
        return cast(IterationMetrics, late if clock.has_streams else late.whole)

    def end_report(self) -> None:
        """Complete the report of the last iteration, if a device still ran its step. Not
        collective.
        """
        if self._unfinished is not None:
            (late, _, end), self._unfinished = self._unfinished, None
            end(late.whole)

    def _trace(
        self, metrics: IterationMetrics, plan: IterationPlan, expert_tokens_LE: Tensor | None
    ) -> None:
        """Add the times of all stages to the run folder, on chosen iterations."""
        # What no profile knows is planned by FLOP counts, and would be the slowest for ever
        is_known = metrics.predicted_ms > 0 and math.isfinite(metrics.profile_error)
        slowdown = metrics.measured_ms / metrics.predicted_ms if is_known else 0.0
        if self._traces.wants(plan.iteration, slowdown):
            timeline = gather_timeline(self.propagator.recorder, plan, self._device)
            mine = torch.tensor([self._memory.peak_bytes()], dtype=torch.int64)
            peak_bytes = gather_by_hosts(mine, self._device).flatten().tolist()
            if self.log is not None:
                experts = self.stage_model.balance.describe_tokens(expert_tokens_LE)
                self.log.write_trace(timeline, peak_bytes, experts)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: position in the data, cost model, and the configuration of
        both.
        """
        self.end_report()
        state: dict[str, Any] = {
            "schema": _STATE_SCHEMA,
            "num_ranks": self.propagator.num_ranks,
            "seed": self.config.seed,
            "config": self.config.model_dump(mode="json"),
            "config_digest": self.config.digest,
        }
        return state | self.source.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], iteration: int = 0, *, position: bool = True
    ) -> None:
        """Continue the global batches where `state` was taken, with the plans that would have been
        made; without `position`, or where `state` has none, the data from its beginning, as
        `iteration` and those after it.
        """
        self._warn_of_changes(state)
        self.source.load_state_dict(state, iteration, position=position)

    def _warn_of_changes(self, state: Mapping[str, Any]) -> None:
        saved = state.get("config", {})
        if (
            self.propagator.rank != 0
            or state.get("config_digest", self.config.digest) == self.config.digest
        ):
            return
        now = self.config.model_dump(mode="json")
        changes = [
            f"hydra.{key} was {saved.get(key)!r}, now {now.get(key)!r}"
            for key in sorted(now.keys() | saved.keys())
            if saved.get(key) != now.get(key)
        ]
        logger.warning("resumed with another configuration: %s", "; ".join(changes))

    def close(self, *, waits: bool = True) -> None:
        """Stop planning processes, close files, release process groups. Safe to call twice. A step
        that a device still runs is reported if this `waits`.
        """
        late, clock = self._unfinished, self.propagator.clock
        if late is not None and (waits or clock.is_reached(late[1].end)):
            self.end_report()
        self._unfinished = None
        self.source.close()
        self.propagator.close()
        if self.log is not None:
            self.log.close()
            self.log = None

    def describe(self) -> str:
        """Candidates and communicators, for the start of a run."""
        strategies = self.source.candidates.strategies
        kind = "strategy" if len(strategies) == 1 else "strategies"
        # Those that the data decide were named when they were found, with reasons
        names = "" if self.source.candidates.reasons else f" ({', '.join(map(str, strategies))})"
        loss = self.stage_model.balance.loss
        notes = [] if loss is None else [str(loss)]
        notes += [
            f"attention: {choice.describe()}" for choice in self.stage_model.attention_choices
        ]
        if self.stage_model.float8:
            notes.append(self.stage_model.float8.describe())
        if self.flops.unknown:
            notes.append(f"TFLOP/s and MFU are left out: {self.flops.unknown}")
        return (
            f"{len(strategies)} candidate {kind} on {self.propagator.num_ranks} ranks{names}; "
            f"{self.propagator.groups}" + "".join(f"\n  {line}" for line in notes)
        )

    def _open_log(self) -> None:
        """Open the run folder on rank 0."""
        if self.config.run_dir is None or self.propagator.rank != 0:
            return
        with naming_run_dir(self.config):
            self.log = RunLog(Path(self.config.run_dir), save_plans=self.config.save_plans)
            run = describe_run(
                self.config, self.stage_model, self.propagator.num_ranks, self._device
            )
            self.log.write_run(run)
        self.source.candidates.log = self.log
        if self.config.profile is not None:
            self.source.candidates.write_profile()


def _report_last(runtime: weakref.ref[HydraRuntime]) -> None:
    """Report the last iteration of a script that ends without `destroy`."""
    found = runtime()
    if found is not None and found._unfinished is not None:
        found.close(waits=False)
