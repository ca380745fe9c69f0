"""Candidate strategies of an engine, and the profile that knows them: given or measured, and
corrected by measured iterations.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.scheme_support import can_run, check_context_parallel, check_scheme
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.profiling.memory import as_the_engine_needs
from ds_hydra.engine.profiling.profile_document import (
    digest_of,
    dtype_of,
    fit_memory,
    model_facts,
    nominal_profile,
)
from ds_hydra.engine.profiling.profiler import measure_profile
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import broadcast_text, check_alike, run_together
from ds_hydra.engine.ranks.memory import available_bytes, naming_memory_limit
from ds_hydra.engine.ranks.watchdog import watch
from ds_hydra.engine.telemetry.latency_tracker import LatencyTracker, StragglerFinder
from ds_hydra.engine.telemetry.metrics import RunLog
from ds_hydra.environment import count_ranks_here
from ds_hydra.errors import HydraConfigError, InfeasiblePlanError, UnsupportedModelError
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.sampler.candidate_set import (
    Candidates,
    CandidateSpace,
    decide_candidates,
    gradient_bytes,
)
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.planner.planner_settings import PlannerSettings, PlanningTask
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.cluster import Cluster, try_cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.profile import load_profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.enumeration import (
    load_strategies,
    measured_beside,
    power_of_two_schemes,
)
from ds_hydra.strategy.schemes.scheme import parse_strategies, schemes_of

logger = logging.getLogger(__name__)

_MOST_NAMED = 4
"""Schemes in one line of the log."""
_MOST_NOMINAL = 64
"""Profiles by FLOP counts that are kept, for forced strategies that no profile knows."""


def find_unsupported(stage_model: StageModel, schemes: Iterable[Scheme]) -> Iterator[str]:
    """One line for each thing that the model does not support, with those of `schemes` that need
    it.

    Degrees that do not divide its heads or layers are not among them.
    """
    found: dict[str, list[Scheme]] = {}
    for scheme in schemes:
        try:
            check_scheme(stage_model, scheme)
        except UnsupportedModelError as error:
            found.setdefault(str(error).removeprefix(f"scheme {scheme}: "), []).append(scheme)
        # The error above is one of these, too: degrees that do not divide come here alone
        except HydraConfigError:
            pass
    for reason, refused in found.items():
        yield f"{', '.join(map(str, refused))}: {reason}"


def planner_settings(
    config: HydraConfig, strategies: Sequence[Strategy], find_links: Callable[[], Cluster | None]
) -> PlannerSettings:
    """The planner's settings out of the validated configuration, with the links that are found."""
    planner = config.planner
    # Times of links compare strategies; a single one is taken in any case
    cluster = find_links() if len(strategies) > 1 else None
    return PlannerSettings(
        seed=config.seed,
        forward_fraction=config.forward_fraction,
        solver=planner.solver,
        link_times={s: cluster.link_times(s) for s in strategies} if cluster else {},
        overlaps_links=config.link.overlap,
    )


_HOST_SHARE = 0.5
"""Share of a host's free memory that layers may offload: torch rounds each pinned tensor up to a
power of two.
"""


class EngineCandidates:
    """Candidates and profile on one rank. Methods are collective over all ranks where they say
    so.
    """

    def __init__(self, config: HydraConfig, propagator: Propagator):
        """Reads candidates and a configured profile, and creates the groups. Collective over all
        ranks.
        """
        self.config = config
        self.stage_model = propagator.stage_model
        self.propagator = propagator
        self.num_ranks = propagator.num_ranks
        self.is_first_rank = propagator.rank == 0
        self._device = propagator.device
        self.profile: Profile | None = None
        self.log: RunLog | None = None
        """Log that keeps profiles, on the rank that has a run folder."""
        self.lengths: NDArray[np.int64] | None = None
        """Lengths of the attached data."""
        self._checked: set[Strategy] = set()
        """Strategies that can run."""
        # Made anew in each iteration that forces a strategy it would cost thousands of calls
        self._nominal = lru_cache(_MOST_NOMINAL)(
            lambda schemes: Profile.from_json(nominal_profile(self.stage_model, schemes))
        )
        self._given: tuple[Strategy, ...] = ()
        self._host: dict[str, float] = {}
        """Bytes of the host that each of its ranks may fill, where that is not the device."""
        if propagator.device.type != "cpu":
            # The ranks of a host fill the same memory
            num_ranks = count_ranks_here(propagator.num_ranks)
            share = _HOST_SHARE * available_bytes() / num_ranks
            # A maximum of negatives: all ranks plan with the least that any of them has
            if (least := -propagator.max_over_ranks(-share)) < math.inf:
                self._host = {"host_bytes": least}
        self._num_link_groups = len(propagator.groups)
        self._at_start: tuple[Strategy, ...] = ()
        self._given_document: Mapping[str, Any] | None = None
        """Document of `hydra.profile`, as it was at the start."""
        self.strategies = self._at_start = run_together(self._read_candidates, self._device)
        given = self._given_document
        files = {
            "the checksum of hydra.profile": given and digest_of(given),
            "hydra.strategies": [*map(str, self.strategies)],
        }
        check_alike(files, self._device)  # else groups are made of which some know nothing
        propagator.prepare(self.strategies)
        self._proposed_with: Profile | None = None
        self.reasons: tuple[str, ...] = ()
        self.straggler = StragglerFinder()
        self._tracker: LatencyTracker | None = None
        self._tracked: Mapping[str, Any] = {}

    def ensure_profile(self) -> Profile:
        """The profile in use: the configured one, else the measured one, which is measured now if
        it is not yet. Collective then, so all ranks call it at the same places.
        """
        if self.profile is None:
            names_limit = naming_memory_limit(self.config.memory_limit_bytes)
            # Scores may be asked for without gradients
            with watch("profiling"), torch.enable_grad(), names_limit:
                # Measured in the same rounds: what disturbs the machine then hits no scheme alone
                self._at_start += self._measured_beside()
                document = measure_profile(
                    self.propagator, self._at_start, self.config, probes_every_pp=False
                )
            # Before it is used: a measurement takes long, and a run that fails next can be given it
            run_together(lambda: self._keep(document), self._device)
            self._use_measured(document)
        assert self.profile is not None
        return self.profile

    def task(
        self, strategies: Sequence[Strategy], profile: Profile, *, forward_only: bool = False
    ) -> PlanningTask:
        """Inputs of the planner besides global batches and corrections. `forward_only` is for
        passes without backward. Not collective.
        """
        settings = planner_settings(self.config, strategies, partial(self._cluster, profile))
        if forward_only:
            # What a checkpointed layer takes while it runs is in no profile
            holds_longer = not self.config.activation_checkpointing
            profile = profile.forward_only(settings.forward_fraction, holds_longer=holds_longer)
            # Without backward there are no gradients to push
            pulls = {s: replace(links, push_ms=0.0) for s, links in settings.link_times.items()}
            settings = replace(settings, link_times=pulls)
        return PlanningTask(
            strategies=tuple(strategies),
            profile=profile,
            num_devices=self.num_ranks,
            settings=settings,
        )

    def track(self) -> LatencyTracker:
        """The tracker of measured times for the profile, which is known. Not collective."""
        profile = self.profile
        assert profile is not None
        # Corrections are factors on one profile's times: another profile has its own
        if self._tracker is None or self._tracker.profiled is not profile:
            find_links = partial(self._cluster, profile)
            settings = planner_settings(self.config, self.strategies, find_links)
            self._tracker = LatencyTracker(
                profile,
                self.strategies,
                self.config.planner,
                settings,
                self.straggler,
                self._tracked,
                # With streams the times of an iteration are known in the next one
                is_late=self.propagator.clock.has_streams,
            )
        return self._tracker

    def find_tracker(self) -> LatencyTracker | None:
        """`track()`; None while strategies are forced, and their plans valued by FLOP counts."""
        return None if self.profile is None else self.track()

    def learn(self, metrics: IterationMetrics, plan: IterationPlan) -> None:
        """Take in the time of each pipeline, equal on all ranks. Not collective."""
        if (tracker := self.find_tracker()) is not None:
            measured_ms = [pipeline.measured_ms for pipeline in metrics.pipelines]
            # Waiting for a plan is no time of the strategy
            tracker.observe(plan, measured_ms, metrics.iteration_ms - metrics.waited_ms)

    def state_dict(self) -> dict[str, Any]:
        """The cost model, as a checkpoint keeps it; not collective."""
        if self.profile is None:
            return {}
        return {
            "cost_model": {"profile": dict(self.profile.document)},
            "latency": self.track().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a profile that was measured on the same number of ranks, so that plans do not
        depend on a second measurement; on another number, with another `hydra.float8` or another
        way of TP, or where it does not know the candidates, the new measurement stands.
        """
        # Stock DeepSpeed's checkpoints do not say it, and keep no times either
        same_ranks = state.get("num_ranks", self.num_ranks) == self.num_ranks
        was = {"float8": None, **state.get("config", {})}
        profile = state.get("cost_model", {}).get("profile")
        cut = self.stage_model.tp.cuts_micro_batches
        same_times = (
            same_ranks
            and was["float8"] == self.config.float8
            and (profile or {}).get("tp_sequence_parallel", cut) == cut
        )
        # The tracker is made anew from this when the profile is known
        self._tracker, self._tracked = None, state.get("latency", {}) if same_times else {}
        if state.get("latency") and not same_times and self.is_first_rank:
            logger.warning(
                "what the checkpoint has learned of measured times is ignored: it is of %s ranks, of another "
                "hydra.float8, or of TP ranks with whole micro-batches",
                state.get("num_ranks"),
            )
        # A configured profile goes before one that a checkpoint keeps
        if profile is None or self.config.profile is not None or not same_times:
            return
        if lacking := self._find_lacking(profile, was.get("strategies")):
            # Learned for the profile that is not taken over
            self._tracked = {}
            if self.is_first_rank:
                logger.warning(
                    "the profile that the checkpoint keeps has no times of %s, which hydra.strategies has now; the "
                    "machine is measured anew",
                    ", ".join(map(str, lacking)),
                )
            return
        self._use_measured(profile)
        if self.profile is not None and self._given:  # whose times may follow from others'
            self.profile = self._costs(self.profile).extended(schemes_of(self._given))

    def _find_lacking(self, document: Mapping[str, Any], strategies: Any) -> list[Scheme]:
        """Schemes of the candidates that do not follow from a profile, which was measured for those
        that `hydra.strategies` had then; where it was and is null, the profile decides.
        """
        if self.config.strategies is None and strategies is None:
            return []
        profile = self._fitted(document)
        costs = self._costs(profile)
        schemes = sorted(schemes_of(self._given or self._at_start))
        return [s for s in schemes if costs.find(s) is None or not profile.memory.knows(s)]

    def _measured_beside(self) -> tuple[Strategy, ...]:
        """Strategies of more schemes that are measured at the start."""
        if self.config.strategies is not None:
            return ()
        space = self.config.planner.space
        wanted = measured_beside(self.num_ranks, space, are_nodes=self._are_nodes)
        schemes = filter(partial(can_run, self.stage_model), wanted)
        return tuple(Strategy.alike(scheme, self.num_ranks) for scheme in schemes)

    def _use_measured(self, document: Mapping[str, Any]) -> None:
        """Plan with a measured profile, and with the candidates that it knows."""
        self.profile = self._fitted(document)
        if self.config.strategies is None:  # schemes that fit no micro-batch were left out
            known = self.profile.latency
            kept = tuple(s for s in self._at_start if all(x in known for x in s.schemes))
            if not kept:
                candidates = self._decide(None)
                kept, self.profile = candidates.strategies, candidates.profile
                self.propagator.prepare(kept)
            self.strategies = kept

    def _read_candidates(self) -> tuple[Strategy, ...]:
        """The candidates before any data, after the profile where one is configured; not
        collective.
        """
        if self.config.profile is not None:
            self._given_document = load_profile(
                self.config.profile, compiled=self.config.compile_layers
            ).document
            self.profile = self._fitted(self._given_document)
            self.profile.check_model(**model_facts(self.stage_model))
            self.profile.check_config(
                self.config,
                dtype_of(self.stage_model),
                cuts_micro_batches=self.stage_model.tp.cuts_micro_batches,
            )
            if self.profile.document.get("offload_optimizer") and not (
                self.stage_model.offloads_optimizer
            ):
                raise HydraConfigError(
                    f"profile {self.profile.name!r} was measured with zero_optimization.offload_optimizer, without "
                    "which less memory is left for micro-batches; set it, or measure anew (remove hydra.profile)"
                )
            self.profile = as_the_engine_needs(
                self.profile, self.stage_model, self.config, self.num_ranks
            )
        self._given = self._read_strategies()
        candidates = self._decide(None)
        self.profile = candidates.profile
        return candidates.strategies

    def _read_strategies(self) -> tuple[Strategy, ...]:
        """Read and check the configured strategies; none where candidates are to be decided."""
        if self.config.strategies is None:
            if self.is_first_rank:
                schemes = power_of_two_schemes(self.num_ranks)
                for line in find_unsupported(self.stage_model, schemes):
                    logger.info("not among the candidates: %s", line)
            return ()
        strategies = load_strategies(self.config.strategies)
        for strategy in strategies:
            self.check_strategy(strategy)
            if strategy.num_devices < self.num_ranks and self.is_first_rank:
                logger.warning(
                    "hydra.strategies: %s has work for %d of %d ranks; the others wait",
                    strategy,
                    strategy.num_devices,
                    self.num_ranks,
                )
        return strategies

    def _settings(self) -> CandidateSettings:
        """Settings for the choice of candidates; the context is that of the attached data."""
        profile = self.profile
        settings = CandidateSettings.of(
            self.config,
            num_devices=self.num_ranks,
            given=self._given,
            staying=self._at_start,
            can_run=partial(can_run, self.stage_model),
            cluster=None if profile is None else self._cluster(profile),
            num_link_groups=self._num_link_groups,
        )
        if self.lengths is None:
            return settings
        return replace(settings, context_length=int(self.lengths.max()))

    def _fitted(self, document: Mapping[str, Any]) -> Profile:
        return fit_memory(self._on_these_hosts(document), self.config)

    def _on_these_hosts(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """`document` of a profile, which may have seen one node or others, with those of here."""
        nodes = {"devices_per_node": self.propagator.links.devices_per_node} | self._host
        return {**document, "hardware": {**document["hardware"], **nodes}}

    def _cluster(self, profile: Profile) -> Cluster | None:
        nodes = self.propagator.links.devices_per_node
        return try_cluster(profile, self.num_ranks, gradient_bytes(self.config), nodes)

    @property
    def _are_nodes(self) -> bool:
        """Whether ranks relay data from other nodes."""
        return self.propagator.links.ranks_per_node is not None

    def _costs(self, profile: Profile) -> Costs:
        return Costs(profile, self._cluster(profile))

    def _decide(self, histogram: LengthHistogram | None) -> Candidates:
        """The candidates with their profile; not collective."""
        candidates = decide_candidates(self.profile, histogram, self._settings())
        if self.is_first_rank and candidates.assumed:
            named = [str(scheme) for scheme in candidates.assumed[:_MOST_NAMED]]
            if (more := len(candidates.assumed) - len(named)) > 0:
                named.append(f"{more} more")
            logger.info(
                "times of %s in the candidate strategies follow from others in profile %r, nobody measured them;\n"
                '`ds-hydra profile --sp` measures SP, hydra.planner.space "measured" leaves out the others',
                ", ".join(named),
                candidates.profile and candidates.profile.name,
            )
        return candidates

    def fit_to_data(self) -> None:
        """Propose candidates from the lengths of the data where these decide.

        Rank 0 proposes. Raises InfeasiblePlanError on all ranks where nothing fits the longest
        sequence.
        """
        profile, settings = self.ensure_profile(), self._settings()
        if self._proposed_with is profile:
            settings = replace(settings, given=self.strategies)
        space = CandidateSpace(profile, settings)
        run_together(lambda: _check_longest(space), self._device)
        if space.proposes:
            reasons = run_together(
                lambda: self._decide(self._histogram()).reasons if self.is_first_rank else (),
                self._device,
            )
            texts = [text for kept in reasons for text in (str(kept.strategy), kept.reason)]
            texts = broadcast_text(texts, 0, self._device)
            self._use_proposed(parse_strategies(texts[::2]), texts[1::2])

    def _histogram(self) -> LengthHistogram:
        assert self.lengths is not None
        lengths, counts = np.unique(self.lengths, return_counts=True)
        return LengthHistogram.from_counts(
            dict(zip(lengths.tolist(), counts.tolist(), strict=True))
        )

    def _use_proposed(self, strategies: tuple[Strategy, ...], reasons: Sequence[str]) -> None:
        """Plan with proposed candidates from now on, and add their schemes to the profile."""
        assert self.profile is not None
        if self._tracker is not None:
            self._tracked, self._tracker = self._tracker.state_dict(), None
        given = self.profile
        self.profile = self._costs(given).extended(schemes_of(strategies))
        self.reasons = tuple(f"{s}: {reason}" for s, reason in zip(strategies, reasons))
        self.strategies = strategies
        self.propagator.prepare(strategies)
        self._proposed_with = self.profile
        if self.is_first_rank:
            lines = "".join(f"\n  {line}" for line in self.reasons)
            logger.info(f"candidate strategies for the lengths of the data:{lines}")
        if self.profile is not given:
            run_together(self.write_profile, self._device)

    def write_profile(self) -> None:
        """Keep the profile in the run folder, on the rank that has one: as given or measured, and
        with entries for the candidates that follow from it, marked as derived or estimated.
        """
        if self.log is None:
            return
        known, as_it_was = self.profile, {}
        if (given := self._given_document) is not None:  # the memory limit is in run.json
            known = Profile.from_json(self._on_these_hosts(given))
            known = self._costs(known).extended(schemes_of(self.strategies))
            as_it_was = {"hardware": given["hardware"]}
        assert known is not None
        self._keep({**known.document, **as_it_was})

    def _keep(self, document: Mapping[str, Any]) -> None:
        if self.log is not None:
            with naming_run_dir(self.config):
                self.log.write_profile(document)

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise HydraConfigError where the ranks or the model cannot run `strategy`."""
        if strategy in self._checked:  # walks through all modules, where each iteration forces one
            return
        for scheme in set(strategy.schemes):
            check_context_parallel(scheme, self.config.context_length)
            check_scheme(self.stage_model, scheme)
        if strategy.num_devices > self.num_ranks:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} ranks, there are {self.num_ranks}; name fewer in "
                f"hydra.strategies, or start {strategy.num_devices} ranks"
            )
        self._checked.add(strategy)

    def profile_for_forced(self, strategy: Strategy) -> Profile:
        """The profile for the plans of a forced strategy: FLOP counts where its times are
        unknown.
        """
        if self.profile is not None:
            costs, memory = self._costs(self.profile), self.profile.memory
            if all(costs.find(s) is not None and memory.knows(s) for s in strategy.schemes):
                return costs.extended(strategy.schemes)
        return self._nominal(strategy.schemes)


@contextlib.contextmanager
def naming_run_dir(config: HydraConfig) -> Iterator[None]:
    """Raise HydraConfigError where the run folder cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise HydraConfigError(
            f"hydra.run_dir is {config.run_dir!r}: {error.strerror}; name a folder that can be written"
        ) from error


def _check_longest(space: CandidateSpace) -> None:
    """Raise InfeasiblePlanError where nothing fits the longest sequence of the data."""
    try:
        space.check_longest()
    except HydraConfigError as error:
        raise InfeasiblePlanError(
            f"training data: {error}, or raise hydra.memory_limit_bytes"
        ) from error
