"""What HydraEngine adds to DeepSpeedEngine: candidates, profile, plans, and the iteration itself.

The engine (`hydra_engine.py`) overrides DeepSpeed's methods; everything else lives in this
collaborator.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.ahead import Ahead
from ds_hydra.engine.candidates import EngineCandidates, cannot_write
from ds_hydra.engine.examples import (
    check_examples,
    check_same_data,
    fetch_examples,
    fingerprint_tensors,
)
from ds_hydra.engine.iteration import Iteration, Outcomes
from ds_hydra.engine.losses.loss import CrossEntropy, Fields, Loss
from ds_hydra.engine.losses.objective import Objective, read_by
from ds_hydra.engine.model.micro_batches import Example
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.planning import PlanFeed, broadcast_plan
from ds_hydra.engine.profiling.profile_document import count_flops
from ds_hydra.engine.propagation import Propagator, RankOutcome
from ds_hydra.engine.ranks.agreement import (
    gather_rows,
    raise_together,
    run_together,
)
from ds_hydra.engine.ranks.memory import naming_memory_limit, to_device
from ds_hydra.engine.ranks.process_end import StopRequest
from ds_hydra.engine.ranks.process_start import (
    overlap_where_safe,
    use_deterministic_kernels,
)
from ds_hydra.engine.ranks.watchdog import watch
from ds_hydra.engine.telemetry.metrics import RunLog, describe_run, pack_occupancy
from ds_hydra.engine.telemetry.trace import MemoryWatch, TraceChoice, gather_timeline
from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.examples import to_examples
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.cost_models.flops import find_peak_flops
from ds_hydra.strategy.profiles.corrections import NO_CORRECTIONS

logger = logging.getLogger(__name__)

_STATE_SCHEMA = "ds_hydra.state/1"

ExampleLike = Mapping[str, Any]
"""One sequence: "input_ids" and optionally "labels" (not shifted, -100 where nothing is
predicted), masks and "attention_mask" (see sampler/data/examples.py).
"""


class HydraRuntime:
    """Everything of ds_hydra on one rank. Methods are collective over all ranks unless they say
    otherwise.
    """

    def __init__(
        self,
        config: HydraConfig,
        stage_model: StageModel,
        device: torch.device,
        memory: MemoryWatch | None = None,
    ):
        self.config = config = overlap_where_safe(config, device)
        self.stage_model = stage_model
        if config.deterministic:
            use_deterministic_kernels(device)
        run_together(lambda: stage_model.to_device(device), device)
        self._device = device
        self.propagator = Propagator(
            stage_model,
            device=device,
            max_groups=config.max_process_groups,
            link_config=config.link,
            seed=config.seed,
        )
        self.num_ranks = self.propagator.num_ranks
        self.is_first_rank = self.propagator.rank == 0
        self.candidates = EngineCandidates(config, self.propagator, device)
        self._data: TokenDataset | None = None
        self._feed: PlanFeed | None = None
        self._ahead = None if device.type == "cpu" else Ahead(self._fetch, device)
        """None where the host computes: it would only take its time from the iteration."""
        self.sampler: TokenBudgetSampler | None = None
        self._next_iteration: int | None = None
        """The iteration that a checkpoint continues with; None where the sampler stands."""
        self.flops = count_flops(stage_model)
        self.peak_flops = None
        """Of a device in 16 bit; None where ranks compute on CPUs or in fp32."""
        if device.type == "cuda" and stage_model.params[0].dtype.itemsize == 2:
            self.peak_flops = find_peak_flops(torch.cuda.get_device_name(device))
        self._loaded_position: tuple[Mapping[str, Any] | None, int, bool] | None = None
        """Position in the data, iteration and whether a position is wanted, of a checkpoint, until
        there is data.
        """
        self.log: RunLog | None = None
        self._memory = memory or MemoryWatch()
        self._traces = TraceChoice(config.trace_every if config.run_dir is not None else 0)
        raise_together(self._open_log(), device)
        self.candidates.log = self.log
        self._stop_request = StopRequest(config.faults.save_on_sigterm is not None)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The candidates."""
        return self.candidates.strategies

    def know_profile(self) -> Profile:
        """As `EngineCandidates.know_profile`."""
        return self.candidates.know_profile()

    def attach_data(self, data: TokenDataset) -> None:
        """Draw mini-batches from `data` from now on."""

        def make_sampler() -> TokenBudgetSampler:
            data.check_vocabulary(self.stage_model.vocab_size, self.stage_model.num_logits)
            return TokenBudgetSampler(
                data.lengths,
                data.num_label_tokens,
                self.config.tokens_per_iteration,
                seed=self.config.seed,
                shuffle=self.config.shuffle,
            )

        sampler = run_together(make_sampler, self._device)
        check_same_data(sampler, self._device)
        self.close_feed()
        self._data, self.sampler = data, sampler
        self.candidates.lengths = data.lengths
        self._take_position()

    def next_iteration(
        self, problem: Exception | None = None, loss: Loss | None = None
    ) -> Iteration:
        """The next mini-batch of this engine's own sampler, planned, for a `loss` of tokens that
        reads no fields; `problem`, what this rank has found wrong before, is raised on all.
        """
        if self.sampler is None or self._data is None:
            error = HydraConfigError(
                "train_batch() without a batch needs training data: pass training_data=dataset to "
                "ds_hydra.initialize, or call train_batch(batch=examples)"
            )
            raise_together(error, self._device)  # what plan_examples begins with, too
        assert self.sampler is not None
        assert self._data is not None
        feed = self.start_planning()
        if self._next_iteration is None:
            self._next_iteration = self.sampler.state.iteration
        iteration = self.sampler.state.iteration
        fetch: Callable[[], dict[int, Example]]
        if self._ahead is None:
            planned = broadcast_plan(lambda: feed.get(iteration), self._device)
            fetch = partial(self._fetch, planned.plan)
        else:
            planned, fetch = self._ahead.begin(feed, iteration)
        plan = planned.plan
        self.sampler.advance(len(plan.lengths))
        examples: dict[int, Example] = {}
        try:
            self.stage_model.carry_over()
            examples = fetch()
        except Exception as caught:  # whatever the user's data raise, the other ranks wait
            problem = problem or caught
        self.propagator.check_plan(plan, problem=problem)
        if self._ahead is not None:
            self._ahead.go_on()
        objective = None
        if loss is not None and not _is_plain(loss):
            fields: list[Fields] = [{}] * len(plan.lengths)
            objective = Objective(loss=loss, normaliser=plan.num_label_tokens, fields=fields)
        return Iteration(planned, examples.__getitem__, objective)

    def _fetch(self, plan: IterationPlan) -> dict[int, Example]:
        """The rows of `plan` that this rank needs; not collective."""
        assert self._data is not None
        return fetch_examples(self._data, plan, self.propagator.positions_needed(plan))

    def start_planning(self) -> PlanFeed:
        """Plan the mini-batches to come, on rank 0's host, if that is not under way; measures a
        missing profile.
        """
        assert self.sampler is not None
        if self._feed is None:
            self.candidates.fit_to_data()  # first: it may add schemes to the profile
            self._feed = PlanFeed(
                self.sampler,
                strategies=self.strategies,
                profile=self.know_profile(),
                corrections_for=self.candidates.track().corrections_for,
                num_ranks=self.num_ranks,
                config=self.config,
                plans_here=self.is_first_rank,
            )
        return self._feed

    def plan_examples(
        self,
        examples: Sequence[ExampleLike],
        strategy: str | Strategy | None,
        iteration: int,
        problem: Exception | None = None,
        loss: Loss | None = None,
        *,
        may_try: bool = False,
        forward_only: bool = False,
        only_scored: bool = False,
    ) -> Iteration:
        """A plan for a given global mini-batch, the same list on every rank, optionally of one
        strategy and for one loss; `problem` as in `next_iteration`, `may_try` as in
        `LatencyTracker.corrections_now`, `forward_only` as in `plan_forward`, `only_scored` as in
        `check_examples`.
        """
        forced: Strategy | None = None
        tensors, batch, objective = [], None, None
        try:
            if strategy is not None:
                forced = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
                if not isinstance(forced, Strategy):
                    raise HydraConfigError(
                        f'strategy is {strategy!r:.80}, expected text such as "2x<1,1>", or a Strategy'
                    )
                self.candidates.check_strategy(forced)
            self.stage_model.carry_over()
            tensors = [
                (torch.from_numpy(input_ids), torch.from_numpy(labels))
                for input_ids, labels in to_examples(examples, read_by(loss))
            ]
            batch = check_examples(
                tensors,
                iteration,
                context_length=self.config.context_length,
                vocab_size=self.stage_model.vocab_size,
                num_logits=self.stage_model.num_logits,
                only_scored=only_scored,
            )
            if loss is not None and not _is_plain(loss):
                labels = [labels for _, labels in tensors]
                objective = Objective.read(loss, examples, labels, self.stage_model.num_logits)
        except Exception as caught:  # whatever the examples raise, the other ranks wait
            problem = problem or caught
        raise_together(problem, self._device)
        assert batch is not None
        if forced is None:
            # First: measuring may leave out candidates.
            profile = self.candidates.know_profile()
            strategies = self.strategies
        else:
            self.prepare_forced(forced)
            # Does not wait for a measurement: any cost model can only place sequences in it.
            profile, strategies = self.candidates.profile_for_forced(forced), (forced,)
        tracker = self.candidates.find_tracker()
        corrections = (
            tracker.corrections_now(strategies, may_try=may_try) if tracker else NO_CORRECTIONS
        )
        planned = broadcast_plan(
            lambda: PlanFeed.plan_now(
                batch,
                strategies,
                profile,
                self.num_ranks,
                self.config,
                corrections,
                forward_only=forward_only,
            ),
            self._device,
        )
        self.propagator.check_plan(planned.plan, fingerprint_tensors(tensors), objective=objective)
        return Iteration(planned, tensors.__getitem__, objective, [labels for _, labels in tensors])

    def plan_forward(
        self,
        examples: Sequence[ExampleLike],
        strategy: str | Strategy | None,
        iteration: int,
        loss: Loss | None = None,
        *,
        only_scored: bool = False,
    ) -> Iteration:
        """As `plan_examples`, of passes without backward: they hold longer micro-batches."""
        return self.plan_examples(
            examples, strategy, iteration, loss=loss, forward_only=True, only_scored=only_scored
        )

    def prepare_forced(self, strategy: Strategy) -> None:
        """Check `strategy` and create its groups."""
        self.candidates.check_strategy(strategy)
        self.propagator.prepare([strategy])

    def train(
        self, iteration: Iteration, grads_P: Sequence[Tensor], loss_scale: float
    ) -> RankOutcome:
        """Gradients of the iteration, added into `grads_P`."""
        with naming_memory_limit(self.config.memory_limit_bytes):
            return self.propagator.train(
                iteration.plan, iteration.load, grads_P, loss_scale, iteration.objective
            )

    def section(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """What all ranks do together: the loss of one of them is an error on the others. Not
        collective itself.
        """
        return watch(phase)

    def gather_outcomes(self, outcome: RankOutcome, norms: Tensor | None = None) -> Outcomes:
        """Outcomes of all ranks, in rank order, on every rank, with what any of them has to say;
        `norms` of this rank's gradients where it trains. Raises, on all ranks, what a given loss
        has done wrong on one of them.
        """
        names = [field.name for field in fields(RankOutcome) if field.name != "phase_ms"]
        values = [getattr(outcome, name) for name in names]
        problem = self.propagator.problem
        mine = [*values, *outcome.phase_ms, problem is not None]
        mine += [0.0, float(self._stop_request.is_set)]
        mine_N = to_device(torch.tensor(mine, dtype=torch.float64), self._device)
        if norms is not None:
            mine_N[-2] = ~norms.isfinite().all()
        rows = gather_rows(mine_N).tolist()
        if any(row[-3] for row in rows):
            raise_together(problem, self._device)
        balance, expert_tokens_LE = self.stage_model.balance, None
        if norms is not None and balance.layers:
            dist.all_reduce(balance.counts_LE)
            expert_tokens_LE = balance.counts_LE.cpu()
        return Outcomes(
            ranks=[
                RankOutcome(**dict(zip(names, row)), phase_ms=tuple(row[len(names) : -3]))
                for row in rows
            ],
            nonfinite_ranks=[rank for rank, row in enumerate(rows) if row[-2]],
            is_stop_requested=any(row[-1] for row in rows),
            expert_tokens_LE=expert_tokens_LE,
        )

    def describe_plan(self, planned: PlannedIteration) -> dict[str, Any]:
        """What `measure_iteration` asks about a plan, before anything is learned from it. Not
        collective.
        """
        plan, profile = planned.plan, self.candidates.profile
        tracker = self.candidates.find_tracker()
        is_candidate = plan.strategy in self.strategies
        return {
            "strategy_index": self.strategies.index(plan.strategy) if is_candidate else -1,
            "flops": self.flops,
            "peak_flops": self.peak_flops,
            "planning_ms": planned.planning_ms,
            "waited_ms": planned.waited_ms,
            "pack_occupancy": math.nan if profile is None else pack_occupancy(plan, profile),
            "find_straggler": partial(
                self.candidates.straggler.observe,
                expected_ms=tracker.expected_ms(plan) if tracker else None,
            ),
            "profiled_ms": tracker.profiled_ms(plan) if tracker else [None] * len(plan.pipelines),
            "trials_share": tracker.trials_share if tracker else 0.0,
            "learned": tracker.learned.factors() if tracker else {},
        }

    def write_log(
        self, metrics: IterationMetrics, plan: IterationPlan, expert_tokens_LE: Tensor | None
    ) -> None:
        """Add the iteration to the run folder; on chosen iterations with the times of all
        stages.
        """
        slowdown = metrics.measured_ms / metrics.predicted_ms if metrics.predicted_ms > 0 else 0.0
        if self._traces.wants(plan.iteration, slowdown):
            timeline = gather_timeline(self.propagator.recorder, plan, self._device)
            mine = torch.tensor([self._memory.peak_bytes()], dtype=torch.int64, device=self._device)
            peak_bytes = gather_rows(mine).flatten().tolist()
            if self.log is not None:
                experts = self.stage_model.balance.describe_tokens(expert_tokens_LE)
                self.log.write_trace(timeline, peak_bytes, experts)
        if self.log is not None:
            self.log.write(metrics, plan)

    def iterate_examples(self) -> Iterator[list[dict[str, Any]]]:
        """Mini-batches from where training is, as lists of examples, without drawing them; not
        collective.
        """
        assert self.sampler is not None
        assert self._data is not None
        state = self.sampler.state
        while True:
            batch, state = self.sampler.draw(state)
            yield [self._data[index] for index in batch.sample_indices]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: position in the data, cost model, and the configuration of
        both.
        """
        state: dict[str, Any] = {
            "schema": _STATE_SCHEMA,
            "num_ranks": self.num_ranks,
            "seed": self.config.seed,
            "config": self.config.model_dump(mode="json"),
            "config_digest": self.config.digest,
        }
        state |= self.candidates.state_dict()
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict(self._next_iteration)
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], iteration: int = 0, *, position: bool = True
    ) -> None:
        """Continue the mini-batches where `state` was taken, with the plans that would have been
        made; without `position`, or where `state` has none, the data from its beginning, as
        `iteration` and those after it.
        """
        self._warn_of_changes(state)
        self.close_feed()
        self._loaded_position = state.get("sampler") if position else None, iteration, position
        self._take_position()
        self.candidates.load_state_dict(state)

    def _take_position(self) -> None:
        """Let the data that is attached begin where a checkpoint that was loaded says."""
        sampler = self.sampler
        if sampler is None or self._loaded_position is None:
            return
        state, iteration, is_wanted = self._loaded_position
        if state is not None:
            run_together(lambda: sampler.load_state_dict(state), self._device)
        else:
            sampler.begin_at(iteration)
            if is_wanted and self.is_first_rank:
                logger.warning(
                    "the checkpoint has no position in the data (another trainer saved it, or it was trained with "
                    "given mini-batches): the data begins at its first sequence again; leave out what was seen, for "
                    "example with dataset.skip(n)"
                )
        self._next_iteration = self._loaded_position = None

    def mark_trained(self, iteration: int) -> None:
        """The weights have seen `iteration`: a checkpoint continues after it; not collective."""
        self._next_iteration = iteration + 1

    def _warn_of_changes(self, state: Mapping[str, Any]) -> None:
        saved = state.get("config", {})
        if (
            not self.is_first_rank
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

    def close_feed(self) -> None:
        """Stop planning ahead; not collective."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if self._ahead is not None:
            self._ahead.forget()

    def close(self) -> None:
        """Stop planning processes, close files, release process groups. Safe to call twice."""
        self.close_feed()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None  # they hold each other
        self.propagator.close()
        if self.log is not None:
            self.log.close()
            self.log = None

    def describe(self) -> str:
        """Candidates and communicators, for the start of a run."""
        names = ", ".join(str(s) for s in self.strategies)
        loss = self.stage_model.balance.loss
        notes = [*self.candidates.reasons, *([] if loss is None else [str(loss)])]
        if self.flops.unknown:
            notes.append(f"TFLOP/s and MFU are left out: {self.flops.unknown}")
        return (
            f"ds_hydra: {len(self.strategies)} candidate strategies on {self.num_ranks} ranks ({names}); "
            f"{self.propagator.groups}" + "".join(f"\n  {line}" for line in notes)
        )

    def _open_log(self) -> Exception | None:
        """Open the run folder on rank 0; returns what went wrong."""
        if self.config.run_dir is None or not self.is_first_rank:
            return None
        try:
            self.log = RunLog(Path(self.config.run_dir), save_plans=self.config.save_plans)
            self.log.write_run(
                describe_run(self.config, self.stage_model, self.num_ranks, self._device)
            )
            if self.config.profile is not None:
                self.candidates.write_profile(self.log)
        except OSError as error:
            return cannot_write(self.config, error)
        return None


def _is_plain(loss: Loss) -> bool:
    """Whether `loss` is what the engine computes without one."""
    return isinstance(loss, CrossEntropy) and loss.is_plain
