"""What HydraEngine adds to DeepSpeedEngine: candidates, profile, plans, and the iteration itself.

The engine (`hydra_engine.py`) overrides DeepSpeed's methods; everything else lives in this
collaborator.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.configs.files import find_profile
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.examples import (
    check_examples,
    check_same_data,
    fetch_examples,
    fingerprint_tensors,
)
from ds_hydra.engine.model.micro_batches import Example, LoadExample
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.planning import PlanFeed, broadcast_plan
from ds_hydra.engine.profiling.profile_document import fit_memory, nominal_profile
from ds_hydra.engine.profiling.profiler import measure_profile
from ds_hydra.engine.propagation import Outcome, Propagator
from ds_hydra.engine.ranks.agreement import (
    broadcast_text,
    gather_rows,
    raise_together,
    run_together,
)
from ds_hydra.engine.ranks.host_memory import to_device
from ds_hydra.engine.ranks.stop_request import StopRequest
from ds_hydra.engine.ranks.watchdog import watch
from ds_hydra.engine.telemetry.latency_tracker import LatencyTracker
from ds_hydra.engine.telemetry.metrics import IterationMetrics, RunLog, describe_run, pack_occupancy
from ds_hydra.engine.telemetry.straggler import StragglerFinder
from ds_hydra.engine.telemetry.trace import MemoryWatch, TraceChoice, gather_timeline
from ds_hydra.engine.transfer.stream_plan import check_streams
from ds_hydra.errors import (
    HydraConfigError,
    InfeasiblePlanError,
    UnsupportedModelError,
)
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.candidates import (
    Candidates,
    CandidateSettings,
    check_longest,
    decide_candidates,
    proposes,
    with_schemes_of,
)
from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.examples import to_examples
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.profiles.profile import has_re_pulls
from ds_hydra.strategy.profiles.sequence_parallel import with_estimates
from ds_hydra.strategy.proposal.candidates import load_strategies, power_of_two_schemes
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.placement import count_groups
from ds_hydra.strategy.schemes.scheme import parse_strategies

logger = logging.getLogger(__name__)

STATE_SCHEMA = "ds_hydra.state/1"

ExampleLike = Mapping[str, Any]
"""One sequence: "input_ids" and optionally "labels" (not shifted, -100 where nothing is
predicted), masks and "attention_mask" (see sampler/data/examples.py).
"""


def find_unsupported(stage_model: StageModel, schemes: Iterable[Scheme]) -> Iterator[str]:
    """One line for each thing that the model does not support, with those of `schemes` that need
    it.

    Degrees that do not divide its heads or layers are not among them.
    """
    found: dict[str, list[Scheme]] = {}
    for scheme in schemes:
        try:
            stage_model.check_scheme(scheme)
        except UnsupportedModelError as error:
            found.setdefault(str(error).removeprefix(f"scheme {scheme}: "), []).append(scheme)
        except HydraConfigError:
            pass
    for reason, refused in found.items():
        yield f"{', '.join(map(str, refused))}: {reason}"


@dataclass(frozen=True, slots=True)
class Iteration:
    """A plan that all ranks agree on, and where its sequences come from."""

    planned: PlannedIteration
    load: LoadExample

    @property
    def plan(self) -> IterationPlan:
        """The plan."""
        return self.planned.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What all ranks measured in one iteration."""

    ranks: list[Outcome]
    nonfinite_ranks: list[int]
    """Ranks with NaN or Inf among the gradients that they own."""
    is_stop_requested: bool
    """Whether any rank was told to stop (SIGTERM)."""


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
        self.config = config
        self.stage_model = stage_model
        stage_model.to_device(device)
        self._device = device
        self.propagator = Propagator(
            stage_model,
            device=device,
            max_groups=config.max_process_groups,
            link_config=config.link,
        )
        self.num_ranks = self.propagator.num_ranks
        self.is_first_rank = self.propagator.rank == 0
        self._profile: Profile | None = None
        self._data: TokenDataset | None = None
        self._given: tuple[Strategy, ...] = ()
        self._num_other_groups = 0
        """Process groups beside those of the candidates that stay when others are proposed."""
        self.strategies = self._at_start = run_together(self._read_candidates, device)
        self.propagator.prepare(self.strategies)
        self._num_other_groups = len(self.propagator.groups)
        if self._settings().is_enumerated:
            self._num_other_groups -= count_groups(self.strategies)
        self._feed: PlanFeed | None = None
        self._proposed_with: Profile | None = None
        self._reasons: tuple[str, ...] = ()
        self._tracker: LatencyTracker | None = None
        self._tracked: Mapping[str, Any] = {}
        self.sampler: TokenBudgetSampler | None = None
        self._next_iteration: int | None = None
        """The iteration that a checkpoint continues with; None where the sampler stands."""
        self.log: RunLog | None = None
        self._memory = memory or MemoryWatch()
        self._traces = TraceChoice(config.trace_every if config.run_dir is not None else 0)
        raise_together(self._open_log(), device)
        self.straggler = StragglerFinder()
        self._stop_request = StopRequest(config.faults.save_on_sigterm is not None)

    def know_profile(self) -> Profile:
        """The profile in use: the configured one, else the measured one, which is measured now if
        it is not yet. Collective then, so all ranks call it at the same places.
        """
        if self._profile is None:
            with self.section("profiling"):
                document = measure_profile(self.propagator, self.strategies, self.config)
            if self.log is not None:
                self.log.write_profile(document)
            self._use_measured(document)
        assert self._profile is not None
        return self._profile

    def _track(self, profile: Profile) -> LatencyTracker:
        """What measured times say of `profile`. Not collective."""
        if self._tracker is None or self._tracker.profiled is not profile:
            self._tracker = LatencyTracker(profile, self.config.planner, self._tracked)
        return self._tracker

    def learn(self, plan: IterationPlan, measured_ms: Sequence[float]) -> None:
        """Take in the time of each pipeline, equal on all ranks; warns on rank 0 of drift. Not
        collective.
        """
        if self._profile is None:
            return  # strategies were forced, and their plans valued by FLOP counts
        warning = self._track(self._profile).observe(plan, measured_ms)
        if warning is not None and self.is_first_rank:
            logger.warning("iteration %d: %s", plan.iteration, warning)

    def attach_data(self, data: TokenDataset) -> None:
        """Draw mini-batches from `data` from now on."""
        error: HydraConfigError | None = None
        try:
            data.check_vocabulary(self.stage_model.vocab_size, self.stage_model.num_logits)
            sampler = TokenBudgetSampler(
                data.lengths,
                data.num_label_tokens,
                self.config.tokens_per_iteration,
                seed=self.config.seed,
                shuffle=self.config.shuffle,
            )
        except HydraConfigError as caught:
            error = caught
        raise_together(error, self._device)
        check_same_data(sampler, self._device)
        self.close_feed()
        self._data, self.sampler = data, sampler

    def next_iteration(self) -> Iteration:
        """The next mini-batch of this engine's own sampler, planned."""
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
        planned = broadcast_plan(lambda: feed.get(iteration), self._device)
        plan = planned.plan
        self.sampler.advance(len(plan.lengths))
        problem: Exception | None = None
        examples: dict[int, Example] = {}
        try:
            self.stage_model.carry_over()
            examples = fetch_examples(self._data, plan, self.propagator.positions_needed(plan))
        except Exception as caught:  # whatever the user's data raise, the other ranks wait
            problem = caught
        self.propagator.check_plan(plan, problem=problem)
        return Iteration(planned, examples.__getitem__)

    def start_planning(self) -> PlanFeed:
        """Plan the mini-batches to come, on rank 0's host, if that is not under way; measures a
        missing profile.
        """
        assert self.sampler is not None
        if self._feed is None:
            self._fit_candidates_to_data()  # first: it may add schemes to the profile
            tracker = self._track(self.know_profile())
            self._feed = PlanFeed(
                self.sampler,
                strategies=self.strategies,
                profile_of=tracker.profile_for,
                num_ranks=self.num_ranks,
                config=self.config,
                plans_here=self.is_first_rank,
            )
        return self._feed

    def plan_examples(
        self, examples: Sequence[ExampleLike], strategy: str | Strategy | None, iteration: int
    ) -> Iteration:
        """A plan for a given global mini-batch, the same list on every rank, optionally of one
        strategy.
        """
        forced: Strategy | None = None
        tensors, batch, error = [], None, None
        try:
            if strategy is not None:
                forced = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
                self._check_strategy(forced)
            self.stage_model.carry_over()
            tensors = [
                (torch.from_numpy(input_ids), torch.from_numpy(labels))
                for input_ids, labels in to_examples(examples)
            ]
            batch = check_examples(
                tensors,
                iteration,
                context_length=self.config.context_length,
                vocab_size=self.stage_model.vocab_size,
                num_logits=self.stage_model.num_logits,
            )
        except HydraConfigError as caught:
            error = caught
        raise_together(error, self._device)
        assert batch is not None
        if forced is None:
            # First: measuring may leave out candidates.
            profile = self._track(self.know_profile()).profile_for(iteration)
            strategies = self.strategies
        else:
            self.prepare_forced(forced)
            # Does not wait for a measurement: any cost model can only place sequences in it.
            profile, strategies = self._profile_for_forced(forced, iteration), (forced,)
        planned = broadcast_plan(
            lambda: PlanFeed.plan_now(batch, strategies, profile, self.num_ranks, self.config),
            self._device,
        )
        self.propagator.check_plan(planned.plan, fingerprint_tensors(tensors))
        return Iteration(planned, tensors.__getitem__)

    def prepare_forced(self, strategy: Strategy) -> None:
        """Check `strategy` and create its groups."""
        self._check_strategy(strategy)
        self.propagator.prepare([strategy])

    def train(self, iteration: Iteration, grads_P: Sequence[Tensor], loss_scale: float) -> Outcome:
        """Gradients of the iteration, added into `grads_P`."""
        return self.propagator.train(iteration.plan, iteration.load, grads_P, loss_scale)

    def section(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """What all ranks do together: the loss of one of them is an error on the others. Not
        collective itself.
        """
        return watch(phase)

    def gather_outcomes(self, outcome: Outcome, grads_P: Sequence[Tensor] = ()) -> Outcomes:
        """Outcomes of all ranks, in rank order, on every rank, with what any of them has to say."""
        names = [field.name for field in fields(Outcome)]
        mine = [*(getattr(outcome, name) for name in names), 0.0, float(self._stop_request.is_set)]
        mine_N = to_device(torch.tensor(mine, dtype=torch.float64), self._device)
        if grads_P:
            mine_N[-2] = ~torch.stack([grad_P.sum() for grad_P in grads_P]).isfinite().all()
        rows = gather_rows(mine_N).tolist()
        return Outcomes(
            ranks=[Outcome(**dict(zip(names, row[:-2], strict=True))) for row in rows],
            nonfinite_ranks=[rank for rank, row in enumerate(rows) if row[-2]],
            is_stop_requested=any(row[-1] for row in rows),
        )

    def find_candidate(self, strategy: Strategy) -> int:
        """Position of `strategy` among the candidates; -1 for one that was forced. Not
        collective.
        """
        return self.strategies.index(strategy) if strategy in self.strategies else -1

    def pack_occupancy(self, plan: IterationPlan) -> float:
        """Tokens of `plan` over what its micro-batches could fit; NaN without a profile. Not
        collective.
        """
        return math.nan if self._profile is None else pack_occupancy(plan, self._profile)

    def write_log(self, metrics: IterationMetrics, plan: IterationPlan) -> None:
        """Add the iteration to the run folder; on chosen iterations with the times of all
        stages.
        """
        slowdown = metrics.measured_ms / metrics.predicted_ms if metrics.predicted_ms > 0 else 0.0
        if self._traces.wants(plan.iteration, slowdown):
            timeline = gather_timeline(self.propagator.recorder, plan, self._device)
            mine = torch.tensor([self._memory.peak_bytes()], dtype=torch.int64, device=self._device)
            peak_bytes = gather_rows(mine).flatten().tolist()
            if self.log is not None:
                self.log.write_trace(timeline, peak_bytes)
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
            "schema": STATE_SCHEMA,
            "num_ranks": self.num_ranks,
            "seed": self.config.seed,
            "config": self.config.model_dump(mode="json"),
            "config_digest": self.config.digest,
        }
        if self._profile is not None:
            state["cost_model"] = {"profile": dict(self._profile.document)}
            state["latency"] = self._track(self._profile).state_dict()
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict(self._next_iteration)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the mini-batches where `state` was taken, with the plans that would have been
        made.

        A profile that was measured is taken over on the same number of ranks, so that plans do not
        depend on a second measurement; on another number, with another
        `hydra.tp_sequence_parallel`, or where it measured re-pulls, the new measurement stands.
        """
        self._warn_of_changes(state)
        self.close_feed()
        same_ranks = state.get("num_ranks", self.num_ranks) == self.num_ranks
        was_cut = state.get("config", {}).get("tp_sequence_parallel", False)
        profile = state.get("cost_model", {}).get("profile")
        same_times = same_ranks and was_cut == self.config.tp_sequence_parallel
        same_times = same_times and not has_re_pulls(profile or {})
        self._tracker, self._tracked = None, state.get("latency", {}) if same_times else {}
        if self.sampler is not None and "sampler" in state:
            self._load_sampler(state["sampler"])
        if profile is not None and self.config.profile is None and same_times:
            self._use_measured(profile)

    def _load_sampler(self, state: Mapping[str, Any]) -> None:
        assert self.sampler is not None
        error: HydraConfigError | None = None
        try:
            self.sampler.load_state_dict(state)
        except HydraConfigError as caught:
            error = caught
        raise_together(error, self._device)
        self._next_iteration = None

    def mark_trained(self, iteration: int) -> None:
        """The weights have seen `iteration`: a checkpoint continues after it; not collective."""
        self._next_iteration = iteration + 1

    def _use_measured(self, document: Mapping[str, Any]) -> None:
        """Plan with a measured profile, and with the candidates that it knows."""
        self._profile = fit_memory(document, self.config)
        if self.config.strategies is None:  # schemes that fit no micro-batch were left out
            known = self._profile.latency
            self.strategies = tuple(s for s in self._at_start if all(x in known for x in s.schemes))

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

    def close(self) -> None:
        """Stop planning processes, close files, release process groups. Safe to call twice."""
        self.close_feed()
        self.propagator.close()
        if self.log is not None:
            self.log.close()
            self.log = None

    def describe(self) -> str:
        """Candidates and communicators, for the start of a run."""
        names = ", ".join(str(s) for s in self.strategies)
        return (
            f"ds_hydra: {len(self.strategies)} candidate strategies on {self.num_ranks} ranks ({names}); "
            f"{self.propagator.groups}" + "".join(f"\n  {line}" for line in self._reasons)
        )

    def _read_candidates(self) -> tuple[Strategy, ...]:
        """The candidates before any data, after the profile where one is configured; not
        collective.
        """
        if self.config.profile is not None:
            document = Profile.load(find_profile(self.config.profile)).document
            self._profile = fit_memory(document, self.config)
            self._profile.check_model(
                num_layers=self.stage_model.num_layers,
                hidden_size=self.stage_model.hidden_size,
                vocab_size=self.stage_model.vocab_size,
            )
            self._profile.check_tp_sequence_parallel(self.config.tp_sequence_parallel)
        self._given = self._read_strategies()
        candidates = self._decide(None)
        self._profile = candidates.profile
        return candidates.strategies

    def _read_strategies(self) -> tuple[Strategy, ...]:
        """Those of the configuration, checked; none where candidates are to be decided."""
        if self.config.strategies is None:
            if self.is_first_rank:
                schemes = power_of_two_schemes(self.num_ranks)
                for line in find_unsupported(self.stage_model, schemes):
                    logger.warning("not among the candidates: %s", line)
            return ()
        strategies = load_strategies(self.config.strategies)
        for strategy in strategies:
            self._check_strategy(strategy)
        return strategies

    def _settings(self) -> CandidateSettings:
        """What decides about candidates; the context is that of the attached data."""
        profile = self._profile
        settings = CandidateSettings.of(
            self.config,
            num_devices=self.num_ranks,
            given=self._given,
            can_run=self._model_can_run,
            cluster=None if profile is None else try_cluster(profile, self.num_ranks),
            num_other_groups=self._num_other_groups,
        )
        if self._data is None:
            return settings
        return replace(settings, context_length=int(self._data.lengths.max()))

    def _decide(self, histogram: LengthHistogram | None) -> Candidates:
        """The candidates with what is known; not collective."""
        candidates = decide_candidates(self._profile, histogram, self._settings())
        if self.is_first_rank and candidates.assumed:
            logger.warning(
                "times of %s in the candidate strategies follow from others in profile %r, nobody measured them; "
                '`ds-hydra profile --sp` measures SP, hydra.planner.space "measured" leaves out the others',
                ", ".join(map(str, candidates.assumed)),
                candidates.profile and candidates.profile.name,
            )
        return candidates

    def _fit_candidates_to_data(self) -> None:
        """Propose candidates from the lengths of the data where these decide.

        Rank 0 proposes. Raises InfeasiblePlanError on all ranks where nothing fits the longest
        sequence.
        """
        profile, settings = self.know_profile(), self._settings()
        if self._proposed_with is profile:
            settings = replace(settings, given=self.strategies)
        run_together(lambda: _check_longest(profile, settings), self._device)
        if proposes(profile, settings):
            candidates, error = None, None
            try:
                candidates = self._decide(self._histogram()) if self.is_first_rank else None
            except Exception as caught:  # whatever it is, the other ranks wait for it
                error = caught
            raise_together(error, self._device)
            reasons = [] if candidates is None else candidates.reasons
            texts = [text for kept in reasons for text in (str(kept.strategy), kept.reason)]
            texts = broadcast_text(texts, 0, self._device)
            self._use_proposed(parse_strategies(texts[::2]), texts[1::2])

    def _histogram(self) -> LengthHistogram:
        assert self._data is not None
        lengths, counts = np.unique(self._data.lengths, return_counts=True)
        return LengthHistogram.from_counts(
            dict(zip(lengths.tolist(), counts.tolist(), strict=True))
        )

    def _use_proposed(self, strategies: tuple[Strategy, ...], reasons: Sequence[str]) -> None:
        """Plan with proposed candidates from now on, and give the profile what it has to know of
        their schemes.
        """
        assert self._profile is not None
        if self._tracker is not None:
            self._tracked, self._tracker = self._tracker.state_dict(), None
        given, self._profile = self._profile, with_schemes_of(self._profile, strategies)
        self._reasons = tuple(f"{s}: {reason}" for s, reason in zip(strategies, reasons))
        self.strategies = strategies
        self.propagator.prepare(strategies)
        self._proposed_with = self._profile
        if self._profile is not given:
            raise_together(self._try_to_log_profile(), self._device)

    def _model_can_run(self, scheme: Scheme) -> bool:
        """Whether this model can run under `scheme` on these devices."""
        try:
            self.stage_model.check_scheme(scheme)
            check_streams([scheme] if scheme.stream else [], self._device.type)
        except HydraConfigError:
            return False
        return True

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
                self._log_profile(self.log)
        except OSError as error:
            return self._cannot_write(error)
        return None

    def _try_to_log_profile(self) -> Exception | None:
        """`_log_profile` on the rank that has a run folder; returns what went wrong."""
        try:
            if self.log is not None:
                self._log_profile(self.log)
        except OSError as error:
            return self._cannot_write(error)
        except HydraConfigError as error:
            return error
        return None

    def _cannot_write(self, error: OSError) -> HydraConfigError:
        """What a user is told where the run folder cannot be written."""
        return HydraConfigError(
            f"hydra.run_dir is {self.config.run_dir!r}: {error.strerror}; name a folder that can be written"
        )

    def _log_profile(self, log: RunLog) -> None:
        """Keep the profile in the run folder: as given or measured, with SP estimated for the
        candidates.
        """
        known = self._profile
        if self.config.profile is not None:  # as given: the memory limit is in run.json
            known = with_estimates(Profile.load(find_profile(self.config.profile)), self.strategies)
        assert known is not None
        log.write_profile(known.document)

    def _check_strategy(self, strategy: Strategy) -> None:
        if strategy.num_devices > self.num_ranks:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} ranks, there are {self.num_ranks}; change "
                f"hydra.strategies or start {strategy.num_devices} ranks"
            )
        for scheme in set(strategy.schemes):
            self.stage_model.check_scheme(scheme)

    def _profile_for_forced(self, strategy: Strategy, iteration: int) -> Profile:
        if self._profile is not None:
            profile = with_estimates(self._track(self._profile).profile_for(iteration), [strategy])
            if all(profile.has_latency(s) and profile.memory.knows(s) for s in strategy.schemes):
                return profile.with_schemes(strategy.schemes)
        return Profile.from_json(nominal_profile(self.stage_model, strategy.schemes))


def _check_longest(profile: Profile, settings: CandidateSettings) -> None:
    """Raise InfeasiblePlanError where nothing fits the longest sequence of the data."""
    try:
        check_longest(profile, settings)
    except HydraConfigError as error:
        raise InfeasiblePlanError(
            f"training data: {error}, or raise hydra.memory_limit_bytes"
        ) from error
