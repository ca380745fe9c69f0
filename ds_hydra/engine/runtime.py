"""What HydraEngine adds to DeepSpeedEngine: candidates, profile, plans, and the iteration itself.

The engine (`hydra_engine.py`) overrides DeepSpeed's methods; everything else lives in this collaborator.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.configs.files import find_profile
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.agreement import broadcast_text, gather_rows, raise_together
from ds_hydra.engine.groups import within_groups
from ds_hydra.engine.latency_tracker import LatencyTracker
from ds_hydra.engine.metrics import IterationMetrics, RunLog, describe_run, pack_occupancy
from ds_hydra.engine.planning import PlanFeed, broadcast_plan, find_link_times
from ds_hydra.engine.profile_document import fit_memory, nominal_profile
from ds_hydra.engine.profiler import measure_profile
from ds_hydra.engine.propagation import Example, LoadExample, Outcome, Propagator
from ds_hydra.engine.repull_plan import check_scheme_repulls
from ds_hydra.engine.skeleton import Skeleton
from ds_hydra.engine.stop_request import StopRequest
from ds_hydra.engine.straggler import StragglerFinder
from ds_hydra.engine.tensor_parallel import IGNORED_LABEL
from ds_hydra.engine.trace import MemoryWatch, TraceChoice, gather_timeline
from ds_hydra.engine.watchdog import Watchdog, find_restart_problem, start_watchdog
from ds_hydra.errors import (
    HydraConfigError,
    HydraDataError,
    InfeasiblePlanError,
    PlanMismatchError,
    UnsupportedModelError,
)
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.batches import TokenBudgetSampler
from ds_hydra.sampler.dataset import TokenDataset
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.propose import (
    HEURISTIC,
    Proposal,
    PruningSettings,
    count_communicators,
    propose_strategies,
)
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.candidates import enumerate_strategies, load_strategies, power_of_two_schemes
from ds_hydra.strategy.histogram import LengthHistogram
from ds_hydra.strategy.proposal import check_context, usable_schemes
from ds_hydra.strategy.scheme import parse_strategies
from ds_hydra.strategy.sequence_parallel import with_estimates
from ds_hydra.strategy.wider import with_wider_schemes

logger = logging.getLogger(__name__)

MAX_ENUMERATED_RANKS = 8
"""Ranks up to which every strategy of two schemes is a candidate; for more, the lengths of the data decide."""

STATE_SCHEMA = "ds_hydra.state/1"

ExampleLike = Mapping[str, Any]
"""One sequence: "input_ids" and optionally "labels" (not shifted, -100 where nothing is predicted)."""


def candidates_without_data(
    schemes: Iterable[Scheme], num_ranks: int, max_process_groups: int
) -> tuple[Strategy, ...]:
    """Candidates before the lengths of the data are known: up to `MAX_ENUMERATED_RANKS` all, else homogeneous ones.

    They need half of the groups at most: the rest is for forced strategies, or for what the lengths suggest.
    """
    if num_ranks > MAX_ENUMERATED_RANKS:
        wanted = [Strategy((scheme,) * (num_ranks // scheme.num_devices)) for scheme in schemes]
    else:
        wanted = list(enumerate_strategies(schemes, num_ranks))
    return within_groups(wanted, max_process_groups // 2)


def find_unsupported(skeleton: Skeleton, schemes: Iterable[Scheme]) -> Iterator[str]:
    """One line for each thing that the model does not support, with those of `schemes` that need it.

    Degrees that do not divide its heads or layers are not among them.
    """
    found: dict[str, list[Scheme]] = {}
    for scheme in schemes:
        try:
            skeleton.check_scheme(scheme)
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
    """Everything of ds_hydra on one rank. Methods are collective over all ranks unless they say otherwise."""

    def __init__(
        self, config: HydraConfig, skeleton: Skeleton, device: torch.device, memory: MemoryWatch | None = None
    ):
        self.config = config
        self.skeleton = skeleton
        skeleton.to_device(device)
        self._device = device
        self.propagator = Propagator(
            skeleton, device=device, max_groups=config.max_process_groups, link_config=config.link
        )
        self.num_ranks = self.propagator.num_ranks
        self.is_first_rank = self.propagator.rank == 0
        self._profile: Profile | None = None
        if config.profile is not None:
            document = Profile.load(find_profile(config.profile)).document
            self._profile = fit_memory(document, config, skeleton)
            self._profile.check_model(
                num_layers=skeleton.num_layers,
                hidden_size=skeleton.hidden_size,
                vocab_size=skeleton.vocab_size,
            )
            self._profile.check_tp_sequence_parallel(config.tp_sequence_parallel)
        self.strategies = self._at_start = self._candidates()
        self.propagator.prepare(self.strategies)
        self._num_first_groups = len(self.propagator.groups)
        """Process groups before any proposal: those of an abandoned one do not make the next smaller."""
        self._feed: PlanFeed | None = None
        self._proposed_with: Profile | None = None
        self._reasons: list[str] = []
        self._tracker: LatencyTracker | None = None
        self._tracked: Mapping[str, Any] = {}
        self._data: TokenDataset | None = None
        self.sampler: TokenBudgetSampler | None = None
        self._next_iteration: int | None = None
        """The iteration that a checkpoint continues with; None where the sampler stands."""
        self.log: RunLog | None = None
        self._memory = memory or MemoryWatch()
        self._traces = TraceChoice(config.trace_every if config.run_dir is not None else 0)
        raise_together(self._open_log(), device)
        self.straggler = StragglerFinder()
        self._watchdog = self._start_watchdog()
        self._stop_request = StopRequest(config.faults.save_on_sigterm is not None)

    @property
    def profile(self) -> Profile:
        """The profile in use: the configured one, else measured now (which is collective)."""
        if self._profile is None:
            document = measure_profile(self.propagator, self.strategies, self.config)
            if self.log is not None:
                self.log.write_profile(document)
            self._use_measured(document)
        assert self._profile is not None
        return self._profile

    @property
    def tracker(self) -> LatencyTracker:
        """What measured times say of the profile; measures a missing profile, which is collective."""
        profile = self.profile
        if self._tracker is None or self._tracker.profiled is not profile:
            self._tracker = LatencyTracker(profile, self.config.planner, self._tracked)
        return self._tracker

    def learn(self, plan: IterationPlan, measured_ms: Sequence[float]) -> None:
        """Take in the time of each pipeline, equal on all ranks; warns on rank 0 of drift. Not collective."""
        if self._profile is None:
            return  # strategies were forced, and their plans valued by FLOP counts
        warning = self.tracker.observe(plan, measured_ms)
        if warning is not None and self.is_first_rank:
            logger.warning("iteration %d: %s", plan.iteration, warning)

    def attach_data(self, data: TokenDataset) -> None:
        """Draw mini-batches from `data` from now on."""
        if data.max_token_id >= self.skeleton.vocab_size:
            raise HydraConfigError(
                f"the dataset holds token id {data.max_token_id}, the model's vocabulary has "
                f"{self.skeleton.vocab_size}; use the model's tokenizer (hydra.tokenizer) or call "
                "model.resize_token_embeddings"
            )
        self.close_feed()
        self._data = data
        self.sampler = TokenBudgetSampler(
            data.lengths,
            data.num_label_tokens,
            self.config.tokens_per_iteration,
            seed=self.config.seed,
            shuffle=self.config.shuffle,
        )

    def next_iteration(self) -> Iteration:
        """The next mini-batch of this engine's own sampler, planned."""
        if self.sampler is None or self._data is None:
            raise HydraConfigError(
                "train_batch() without a batch needs training data: pass training_data=dataset to "
                "ds_hydra.initialize, or call train_batch(batch=examples)"
            )
        feed = self.start_planning()
        if self._next_iteration is None:
            self._next_iteration = self.sampler.state.iteration
        batch = next(self.sampler)
        planned = broadcast_plan(lambda: feed.get(batch), self._device)
        plan = planned.plan
        problem: Exception | None = _compare_batch(plan, batch)
        examples: dict[int, Example] = {}
        if problem is None:
            try:
                examples = self._fetch(self._data, plan)
            except Exception as caught:  # whatever the user's data raise, the other ranks wait
                problem = caught
        self.propagator.check_plan(plan, problem=problem)
        return Iteration(planned, examples.__getitem__)

    def start_planning(self) -> PlanFeed:
        """Plan the mini-batches to come, on rank 0's host, if that is not under way; measures a missing profile."""
        assert self.sampler is not None
        if self._feed is None:
            self._fit_candidates_to_data()  # first: it may add schemes to the profile
            tracker = self.tracker
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
        self, examples: Sequence[ExampleLike], strategy: Strategy | None, iteration: int
    ) -> Iteration:
        """A plan for a given global mini-batch, the same list on every rank, optionally of one strategy."""
        tensors, batch, error = [], None, None
        try:
            tensors = [_to_example(example, index) for index, example in enumerate(examples)]
            batch = self._check_examples(tensors, iteration)
        except HydraConfigError as caught:
            error = caught
        raise_together(error, self._device)
        assert batch is not None
        if strategy is None:
            profile = self.tracker.profile_for(iteration)  # first: measuring may leave out candidates
            strategies = self.strategies
        else:
            self.prepare_forced(strategy)
            # Does not wait for a measurement: any cost model can only place sequences in it.
            profile, strategies = self._profile_for_forced(strategy, iteration), (strategy,)
        planned = broadcast_plan(
            lambda: PlanFeed.plan_now(batch, strategies, profile, self.num_ranks, self.config), self._device
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
        """What all ranks do together: the loss of one of them is an error on the others. Not collective itself."""
        return contextlib.nullcontext() if self._watchdog is None else self._watchdog.section(phase)

    def gather_outcomes(self, outcome: Outcome, grads_P: Sequence[Tensor] = ()) -> Outcomes:
        """Outcomes of all ranks, in rank order, on every rank, with what any of them has to say."""
        is_finite = not grads_P or bool(torch.stack([grad_P.sum() for grad_P in grads_P]).isfinite().all())
        names = [field.name for field in fields(Outcome)]
        mine = [getattr(outcome, name) for name in names]
        mine += [float(not is_finite), float(self._stop_request.is_set)]
        rows = gather_rows(torch.tensor(mine, dtype=torch.float64, device=self._device)).tolist()
        return Outcomes(
            ranks=[Outcome(**dict(zip(names, row[:-2], strict=True))) for row in rows],
            nonfinite_ranks=[rank for rank, row in enumerate(rows) if row[-2]],
            is_stop_requested=any(row[-1] for row in rows),
        )

    def find_candidate(self, strategy: Strategy) -> int:
        """Position of `strategy` among the candidates; -1 for one that was forced. Not collective."""
        return self.strategies.index(strategy) if strategy in self.strategies else -1

    def pack_occupancy(self, plan: IterationPlan) -> float:
        """Tokens of `plan` over what its rows could hold; NaN without a profile. Not collective."""
        return math.nan if self._profile is None else pack_occupancy(plan, self._profile)

    def write_log(self, metrics: IterationMetrics, plan: IterationPlan) -> None:
        """Add the iteration to the run folder; on chosen iterations with the times of all stages."""
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
        """Mini-batches from where training is, as lists of examples, without drawing them; not collective."""
        assert self.sampler is not None
        assert self._data is not None
        state = self.sampler.state
        while True:
            batch, state = self.sampler.draw(state)
            yield [self._data[index] for index in batch.sample_indices]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: position in the data, cost model, and the configuration of both."""
        state: dict[str, Any] = {
            "schema": STATE_SCHEMA,
            "num_ranks": self.num_ranks,
            "seed": self.config.seed,
            "config": self.config.model_dump(mode="json"),
            "config_digest": self.config.digest,
        }
        if self._profile is not None:
            state["cost_model"] = {"profile": dict(self._profile.document)}
            state["latency"] = self.tracker.state_dict()
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict(self._next_iteration)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the mini-batches where `state` was taken, with the plans that would have been made.

        A profile that was measured is taken over on the same number of ranks, so that plans do not depend on
        a second measurement; on another number, or with another `hydra.tp_sequence_parallel`, the new measurement
        stands.
        """
        self._warn_of_changes(state)
        self.close_feed()
        same_ranks = state.get("num_ranks", self.num_ranks) == self.num_ranks
        cut_rows = state.get("config", {}).get("tp_sequence_parallel", False)
        same_times = same_ranks and cut_rows == self.config.tp_sequence_parallel
        self._tracker, self._tracked = None, state.get("latency", {}) if same_times else {}
        if self.sampler is not None and "sampler" in state:
            self.sampler.load_state_dict(state["sampler"])
            self._next_iteration = None
        profile = state.get("cost_model", {}).get("profile")
        if profile is not None and self.config.profile is None and same_times:
            self._use_measured(profile)

    def mark_trained(self, iteration: int) -> None:
        """The weights have seen `iteration`: a checkpoint continues after it; not collective."""
        self._next_iteration = iteration + 1

    def _use_measured(self, document: Mapping[str, Any]) -> None:
        """Plan with a measured profile, and with the candidates that it knows."""
        self._profile = fit_memory(document, self.config, self.skeleton)
        if self.config.strategies is None:  # schemes that hold no row were left out
            known = self._profile.latency
            self.strategies = tuple(s for s in self._at_start if all(x in known for x in s.schemes))

    def _warn_of_changes(self, state: Mapping[str, Any]) -> None:
        saved = state.get("config", {})
        if not self.is_first_rank or state.get("config_digest", self.config.digest) == self.config.digest:
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

    def _candidates(self) -> tuple[Strategy, ...]:
        if self.config.strategies is not None:
            strategies = load_strategies(self.config.strategies)
            self._estimate_sequence_parallel(strategies)
            for strategy in strategies:
                self._check_strategy(strategy)
            if self._profile is not None:
                self._profile = self._profile.with_schemes(s for x in strategies for s in x.schemes)
            return strategies
        if self.is_first_rank:
            for line in find_unsupported(self.skeleton, power_of_two_schemes(self.num_ranks)):
                logger.warning("not among the candidates: %s", line)
        schemes = [scheme for scheme in power_of_two_schemes(self.num_ranks) if self._can_run(scheme)]
        if not schemes:
            raise HydraConfigError(
                f"profile {self.config.profile!r} has no scheme that this model can run on {self.num_ranks} ranks; "
                "set hydra.strategies, or hydra.profile to another one"
            )
        return candidates_without_data(schemes, self.num_ranks, self.config.max_process_groups)

    def _estimate_sequence_parallel(self, strategies: Iterable[Strategy]) -> None:
        """Give the configured profile times for schemes with SP that it does not know."""
        if self._profile is None:
            return
        known, self._profile = self._profile.latency, with_estimates(self._profile, strategies)
        added = self._profile.latency.keys() - known.keys()
        if added and self.is_first_rank:
            logger.warning(
                "profile %r was measured without %s: their times are estimated from TP; `ds-hydra profile --sp` "
                "measures them",
                self._profile.name,
                ", ".join(map(str, sorted(added))),
            )

    def _fit_candidates_to_data(self) -> None:
        """Propose candidates from the lengths of the data where they are too many to try all.

        Rank 0 proposes. Raises InfeasiblePlanError on all ranks where nothing holds the longest sequence.
        """
        assert self._data is not None
        profile = self.profile
        longest = int(self._data.lengths.max())
        number, schemes = self.num_ranks, {scheme for x in self.strategies for scheme in x.schemes}
        is_open = self.config.strategies is None and self._proposed_with is not profile
        proposable = [scheme for scheme in profile.latency if self._can_run(scheme)]
        known = self._widen(profile.only(proposable), longest)
        allowed = usable_schemes(known, number, self.config.planner.space)
        proposes = is_open and (number > MAX_ENUMERATED_RANKS or not all(s.is_plain for s in allowed))
        if proposes:
            schemes = schemes.union(allowed) if number <= MAX_ENUMERATED_RANKS else set(allowed)
        try:
            check_context(
                known if proposes else profile,
                number,
                longest,
                schemes=schemes,
                can_run=self._model_can_run if is_open else None,
            )
        except HydraConfigError as error:
            raise InfeasiblePlanError(f"training data: {error}, or raise hydra.memory_limit_bytes") from error
        if proposes:
            proposal, error = None, None
            try:
                proposal = self._propose(profile, longest) if self.is_first_rank else None
            except Exception as caught:  # whatever it is, the other ranks wait for it
                error = caught
            raise_together(error, self._device)
            lines = [] if proposal is None else [f"{kept.strategy}: {kept.reason}" for kept in proposal.kept]
            self._reasons = broadcast_text(lines, 0, self._device)
            self._use_proposed(parse_strategies(line.split(":")[0] for line in self._reasons))

    def _widen(self, profile: Profile, longest_tokens: int) -> Profile:
        """`profile` with all that a proposal may derive from it."""
        if self.config.strategies is not None or self.config.planner.space != "wide":
            return profile
        return with_wider_schemes(
            profile,
            num_devices=self.num_ranks,
            context_length=longest_tokens,
            can_run=self._model_can_run,
        )

    def _use_proposed(self, strategies: tuple[Strategy, ...]) -> None:
        """Plan with proposed candidates from now on, and give the profile what it has to know of their schemes."""
        assert self._profile is not None
        if self._tracker is not None:
            self._tracked, self._tracker = self._tracker.state_dict(), None
        given, self._profile = self._profile, _with_parts(self._profile, strategies)
        used = {scheme for strategy in strategies for scheme in strategy.schemes}
        if self.is_first_rank and (assumed := sorted(used & self._profile.assumed)):
            logger.warning(
                "times of %s in the proposed strategies follow from those of <TP,PP> in profile %r, nobody measured "
                'them; `ds-hydra profile --sp` measures SP, hydra.planner.space "measured" leaves out the others',
                ", ".join(map(str, assumed)),
                self._profile.name,
            )
        self.strategies = strategies
        self.propagator.prepare(strategies)
        self._proposed_with = self._profile
        if self._profile is not given:
            raise_together(self._try_to_log_profile(), self._device)

    def _propose(self, profile: Profile, longest_tokens: int) -> Proposal:
        """Candidates for the attached data, within the process groups that are left; not collective.

        Where all strategies of two schemes are candidates already: these, and those of wider schemes on top.
        """
        assert self._data is not None
        lengths, counts = np.unique(self._data.lengths, return_counts=True)
        given = self.strategies if self.num_ranks <= MAX_ENUMERATED_RANKS else ()
        groups_left = self.config.max_process_groups - self._num_first_groups + count_communicators(given)
        return propose_strategies(
            profile.only(scheme for scheme in profile.latency if self._can_run(scheme)),
            LengthHistogram.from_counts(dict(zip(lengths.tolist(), counts.tolist(), strict=True))),
            num_devices=self.num_ranks,
            context_length=longest_tokens,
            tokens_per_iteration=self.config.tokens_per_iteration,
            space=self.config.planner.space,
            can_run=self._model_can_run,
            given=given,
            pruning=PruningSettings(
                max_communicators=groups_left,
                seed=self.config.seed,
                planner=replace(HEURISTIC, overlaps_links=self.config.link.overlap),
                links_of=find_link_times(self.config, profile, self.num_ranks),
            ),
        )

    def _can_run(self, scheme: Scheme) -> bool:
        """Whether a proposal may contain `scheme`: space, model, profile and memory allow it."""
        is_in_space = scheme.is_plain or self.config.planner.space != "plain"
        if not is_in_space or not self._model_can_run(scheme):
            return False
        if self._profile is None:
            return True
        return scheme in self._profile.latency and self._profile.max_len_tokens(scheme, self.num_ranks) > 0

    def _model_can_run(self, scheme: Scheme) -> bool:
        """Whether this model can run under `scheme` on these devices."""
        try:
            self.skeleton.check_scheme(scheme)
            check_scheme_repulls([scheme] if scheme.repull else [], self._device.type)
        except HydraConfigError:
            return False
        return True

    def _start_watchdog(self) -> Watchdog | None:
        faults = self.config.faults
        if self.is_first_rank and (problem := find_restart_problem(os.environ)):
            logger.warning("%s", problem)
        if self.num_ranks == 1 or not faults.watchdog:
            return None
        return start_watchdog(
            self.propagator.rank,
            self.num_ranks,
            lambda text: broadcast_text([text], 0, self._device)[0],
            places=[self.propagator.hosts.describe_place(rank) for rank in range(self.num_ranks)],
            silence_s=faults.silence_s,
            grace_s=faults.grace_s,
        )

    def _open_log(self) -> Exception | None:
        """Open the run folder on rank 0; returns what went wrong."""
        if self.config.run_dir is None or not self.is_first_rank:
            return None
        try:
            self.log = RunLog(Path(self.config.run_dir), save_plans=self.config.save_plans)
            self.log.write_run(describe_run(self.config, self.skeleton, self.num_ranks, self._device))
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
        """Keep the profile in the run folder: as given or measured, with SP estimated for the candidates."""
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
            self.skeleton.check_scheme(scheme)

    def _profile_for_forced(self, strategy: Strategy, iteration: int) -> Profile:
        if self._profile is not None:
            profile = with_estimates(self.tracker.profile_for(iteration), [strategy])
            if all(profile.has_latency(s) and profile.memory.knows(s) for s in strategy.schemes):
                return profile.with_schemes(strategy.schemes)
        return Profile.from_json(nominal_profile(self.skeleton, strategy.schemes))

    def _check_examples(self, tensors: Sequence[Example], iteration: int) -> GlobalBatch:
        if not tensors:
            raise HydraConfigError(
                "the global mini-batch is empty: train_batch(batch=examples) got 0 examples; give every rank the "
                "whole list of {'input_ids': [...]}, at least one with 2 tokens"
            )
        lengths = tuple(len(input_ids) for input_ids, _ in tensors)
        if max(lengths) > self.config.context_length:
            index = int(np.argmax(lengths))
            raise HydraConfigError(
                f"example {index} of the mini-batch has {lengths[index]} tokens, more than "
                f"hydra.context_length {self.config.context_length}; cut it, or set hydra.context_length to "
                f"{lengths[index]}"
            )
        for index, (input_ids, labels) in enumerate(tensors):
            self._check_ids(index, "input_ids", input_ids)
            self._check_ids(index, "labels", labels[labels != IGNORED_LABEL])
        num_label_tokens = sum(int((labels[1:] != IGNORED_LABEL).sum()) for _, labels in tensors)
        if not num_label_tokens:
            raise HydraConfigError(
                "no example of the mini-batch has a token to predict (labels are all -100)"
            )
        return GlobalBatch(
            iteration=iteration,
            sample_indices=tuple(range(len(tensors))),
            lengths=lengths,
            num_label_tokens=num_label_tokens,
        )

    def _check_ids(self, index: int, key: str, ids: Tensor) -> None:
        vocab_size = self.skeleton.vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            outside = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise HydraConfigError(
                f"example {index} of the mini-batch has {outside} in its {key}, the model's vocabulary has "
                f"{vocab_size} tokens; use the model's tokenizer or call model.resize_token_embeddings"
            )

    def _fetch(self, data: TokenDataset, plan: IterationPlan) -> dict[int, Example]:
        """The sequences that this rank needs, by position in the plan. Raises HydraDataError naming the row."""
        examples = {}
        for position in self.propagator.positions_needed(plan):
            index = plan.sample_indices[position]
            try:
                example = data[index]
            except Exception as error:
                raise HydraDataError(
                    f"iteration {plan.iteration}: example {index} of the training data raised "
                    f"{type(error).__name__}: {error}; mend or remove it, and resume from the last checkpoint"
                ) from error
            examples[position] = torch.from_numpy(example["input_ids"]), torch.from_numpy(example["labels"])
        return examples


def _with_parts(profile: Profile, strategies: Sequence[Strategy]) -> Profile:
    """`profile` with what follows from it for the schemes of `strategies` that it has no entry for."""
    return with_estimates(profile, strategies).with_schemes(s for x in strategies for s in x.schemes)


def _compare_batch(plan: IterationPlan, batch: GlobalBatch) -> PlanMismatchError | None:
    """What is wrong if `plan` is not one of `batch`, which this rank has drawn itself."""
    if (plan.sample_indices, plan.lengths) == (batch.sample_indices, batch.lengths):
        return None
    return PlanMismatchError(
        f"iteration {batch.iteration}: the plan is for {len(plan.lengths)} sequences from row "
        f"{plan.sample_indices[0]} on, this rank drew {len(batch.lengths)} from row {batch.sample_indices[0]} on; "
        "give every rank the same dataset and configuration"
    )


def fingerprint_tensors(tensors: Sequence[Example]) -> int:
    """63-bit fingerprint of a mini-batch's tokens and labels."""
    digest = hashlib.blake2b(digest_size=8)
    for example in tensors:
        for tensor in example:
            digest.update(tensor.cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _to_example(example: ExampleLike, index: int) -> Example:
    if "input_ids" not in example:
        raise HydraConfigError(
            f"example {index} of the mini-batch has keys {sorted(example)}, expected 'input_ids' (and 'labels')"
        )
    input_ids = torch.as_tensor(example["input_ids"], dtype=torch.int64).reshape(-1)
    labels = torch.as_tensor(example.get("labels", input_ids), dtype=torch.int64).reshape(-1)
    if labels.shape != input_ids.shape or not len(input_ids):
        raise HydraConfigError(
            f"example {index} of the mini-batch has {len(input_ids)} input_ids and {len(labels)} labels, "
            "expected the same number, at least one (labels not shifted)"
        )
    return input_ids, labels
