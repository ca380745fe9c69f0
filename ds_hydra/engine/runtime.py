"""Additions of HydraEngine to DeepSpeedEngine: candidates, profile, plans, and the iteration
itself.

The engine (`hydra_engine.py`) overrides DeepSpeed's methods; everything else lives in this
collaborator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.candidates import naming_run_dir
from ds_hydra.engine.iteration import Iteration, Outcomes
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.planning import IterationSource
from ds_hydra.engine.profiling.profile_document import count_flops
from ds_hydra.engine.propagation import Propagator, RankOutcome
from ds_hydra.engine.ranks.agreement import (
    check_alike,
    gather_rows,
    raise_together,
    run_together,
)
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.engine.ranks.process import overlap_where_safe, use_deterministic_kernels
from ds_hydra.engine.ranks.settings import (
    SAME_TO,
    comparable,
    digest_of_numbers,
    numbers_in,
    settings_of_groups,
    warn_of_other_kernels,
)
from ds_hydra.engine.ranks.sigterm import SIGTERM
from ds_hydra.engine.telemetry.metrics import (
    RunLog,
    describe_run,
    expert_imbalance,
    measure_iteration,
    pack_occupancy,
)
from ds_hydra.engine.telemetry.trace import MemoryWatch, TraceChoice, gather_timeline
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy.cost_models.flops import find_peak_flops
from ds_hydra.strategy.schemes.placement import group_limit

logger = logging.getLogger(__name__)

_STATE_SCHEMA = "ds_hydra.state/1"


class _Row(NamedTuple):
    """Numbers that a rank tells the others of an iteration, in one collective; flags are 0 or 1."""

    has_nonfinite: float
    """Whether a gradient that the rank owns is NaN or Inf."""
    has_problem: float
    """Whether a given loss has failed on the rank."""
    is_stop_requested: float
    """Whether the rank was told to stop."""
    settings: float
    """Digest of the numbers of its optimizer's groups; 0 in evaluation."""
    outcome: RankOutcome

    def to_row(self) -> list[float]:
        """Return the numbers one after another, those of phases, which differ in number, last."""
        measured = [getattr(self.outcome, name) for name in _MEASURED]
        return [*self[:_NUM_FLAGS], *measured, *self.outcome.phase_ms]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> _Row:
        """Read a row of `to_row`."""
        told = _NUM_FLAGS + len(_MEASURED)
        measured = dict(zip(_MEASURED, row[_NUM_FLAGS:told], strict=True))
        outcome = RankOutcome(**measured, phase_ms=tuple(row[told:]))
        return cls._make([*row[:_NUM_FLAGS], outcome])


_MEASURED = [field.name for field in fields(RankOutcome) if field.type == "float"]
_NUM_FLAGS = _Row._fields.index("outcome")


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
        warn_of_other_kernels([choice.name for choice in stage_model.attention_choices], device)
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
        self._memory = memory
        self._traces = TraceChoice(config.trace_every if config.run_dir is not None else 0)
        run_together(self._open_log, device)

    def gather_outcomes(
        self,
        outcome: RankOutcome,
        norms: Tensor | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> Outcomes:
        """Gather the outcomes of all ranks, in rank order, on every rank. `norms` are those of this
        rank's gradients where it trains, with the `groups` of its optimizer. Raises, on all ranks,
        the error of a given loss on one of them, and PlanMismatchError where numbers of groups
        differ.
        """
        problem = self.propagator.problem
        settings = dict(numbers_in(settings_of_groups(groups), "optimizer.param_groups"))
        mine = _Row(
            has_nonfinite=0.0,
            has_problem=float(problem is not None),
            is_stop_requested=float(SIGTERM.is_asked(self)),
            settings=digest_of_numbers(settings.items()) if groups else 0.0,
            outcome=outcome,
        )
        mine_N = to_device(torch.tensor(mine.to_row(), dtype=torch.float64), self._device)
        if norms is not None:
            # Written on the device: the host waits for the gradients once, with the row.
            mine_N[_Row._fields.index("has_nonfinite")] = ~norms.isfinite().all()
        rows = [_Row.from_row(row) for row in gather_rows(mine_N).tolist()]
        if any(row.has_problem for row in rows):
            raise_together(problem, self._device)
        if len({row.settings for row in rows}) > 1:
            check_alike(settings, self._device, rel_tol=SAME_TO)
        balance, expert_tokens_LE = self.stage_model.balance, None
        if norms is not None and balance.layers:
            dist.all_reduce(balance.counts_LE)
            expert_tokens_LE = balance.counts_LE.cpu()
        return Outcomes(
            ranks=[row.outcome for row in rows],
            nonfinite_ranks=[rank for rank, row in enumerate(rows) if row.has_nonfinite],
            is_stop_requested=any(row.is_stop_requested for row in rows),
            expert_tokens_LE=expert_tokens_LE,
        )

    def report(
        self, iteration: Iteration, outcomes: Outcomes, **measured: float
    ) -> IterationMetrics:
        """Metrics of an iteration with what the engine has `measured` of it (`measure_iteration`);
        the candidates learn from them, and the run folder gets them.
        """
        plan, planned, candidates = iteration.plan, iteration.planned, self.source.candidates
        profile, tracker = candidates.profile, candidates.find_tracker()
        strategies = candidates.strategies
        metrics = measure_iteration(
            plan,
            outcomes.ranks,
            balance_loss=outcomes.balance_loss,
            expert_imbalance=expert_imbalance(outcomes.expert_tokens_LE),
            strategy_index=strategies.index(plan.strategy) if plan.strategy in strategies else -1,
            flops=self.flops,
            peak_flops=self.peak_flops,
            planning_ms=planned.planning_ms,
            waited_ms=planned.waited_ms,
            pack_occupancy=math.nan if profile is None else pack_occupancy(plan, profile),
            find_straggler=partial(
                candidates.straggler.observe,
                expected_ms=tracker.expected_ms(plan) if tracker else None,
            ),
            profiled_ms=tracker.profiled_ms(plan) if tracker else [None] * len(plan.pipelines),
            learned=tracker.learned.factors() if tracker else {},
            **measured,
        )
        candidates.learn(metrics, plan)
        self._write_log(metrics, plan, outcomes.expert_tokens_LE)
        return metrics

    def _write_log(
        self, metrics: IterationMetrics, plan: IterationPlan, expert_tokens_LE: Tensor | None
    ) -> None:
        """Add the iteration to the run folder; on chosen iterations with the times of all
        stages.
        """
        # What no profile knows is planned by FLOP counts, and would be the slowest for ever
        is_known = metrics.predicted_ms > 0 and math.isfinite(metrics.profile_error)
        slowdown = metrics.measured_ms / metrics.predicted_ms if is_known else 0.0
        if self._traces.wants(plan.iteration, slowdown):
            timeline = gather_timeline(self.propagator.recorder, plan, self._device)
            mine = torch.tensor([self._memory.peak_bytes()], dtype=torch.int64, device=self._device)
            peak_bytes = gather_rows(mine).flatten().tolist()
            if self.log is not None:
                experts = self.stage_model.balance.describe_tokens(expert_tokens_LE)
                self.log.write_trace(timeline, peak_bytes, experts)
        if self.log is not None:
            self.log.write(metrics, plan)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: position in the data, cost model, and the configuration of
        both.
        """
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

    def close(self) -> None:
        """Stop planning processes, close files, release process groups. Safe to call twice."""
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
