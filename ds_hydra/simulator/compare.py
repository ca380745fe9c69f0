"""ds_hydra against other ways to train: one workload, the same mini-batches for all, error bars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.candidates import CandidateSettings, decide_candidates
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.sampler.trial import HEURISTIC, PruningSettings
from ds_hydra.simulator.baselines import (
    balanced,
    dynamic,
    fixed_length,
    heterogeneous_static,
    hotspa,
    two_stage,
)
from ds_hydra.simulator.events import Simulation
from ds_hydra.simulator.extended import extended_scenario, extended_schemes, extended_strategies
from ds_hydra.simulator.scenario import Bound, Scenario, SystemResult, bound_of
from ds_hydra.simulator.ulysses import balanced_ulysses, deepspeed_ulysses
from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import (
    ProposalSettings,
    check_context,
    propose_from_histogram,
    usable_schemes,
)
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

SIMULATION_SCHEMA = "ds_hydra.simulation/1"

DS_HYDRA = "ds_hydra"
PLAIN = "plain"
LABELS = {
    DS_HYDRA: "ds_hydra",
    PLAIN: "ds_hydra, <TP,PP> alone",
    "given": "Megatron-LM, given strategy",
    "megatron": "Megatron-LM, tuned",
    "megatron_lengths": "Megatron-LM, length tuned too",
    "deepspeed": "DeepSpeed ZeRO-3 + Ulysses",
    "deepspeed_ac": "DeepSpeed ZeRO-3 + Ulysses + AC",
    "deepspeed_balanced": "DeepSpeed + Ulysses, by time",
    "hotspa": "HotSPa",
    "balanced": "balanced DP (Karmarkar-Karp)",
    "two_stage": "homogeneous, two-stage",
    "static": "heterogeneous static",
    "full_static": "heterogeneous static, full space",
}
"""Systems in the order they are shown, with what users see."""
NEED_STATIC = ("megatron", "megatron_lengths", "hotspa", "balanced", "two_stage")
"""Systems that run <TP,PP> which fit the context, and are left out where only schemes with options
do.
"""
FULL_STATIC = "full_static"
PLANNED = (DS_HYDRA, PLAIN)
"""Systems whose plans a comparison keeps."""
STATIC_SYSTEMS = (
    "given",
    "megatron",
    "megatron_lengths",
    "deepspeed",
    "deepspeed_ac",
    "deepspeed_balanced",
    "balanced",
    "two_stage",
    "static",
)

_NUM_RESAMPLES = 1000
_HARDLY = 0.02

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is simulated. `given`: a homogeneous strategy that Megatron-LM is simulated with besides
    its best.

    `strategies`: candidates of ds_hydra, proposed from the histogram where empty.
    """

    name: str
    profile: Profile
    histogram: LengthHistogram
    num_devices: int
    context_length: int
    tokens_per_iteration: int
    given: Strategy | None = None
    strategies: tuple[Strategy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How it is simulated. `systems` other than ds_hydra; `num_proposal_batches` mini-batches,
    drawn apart from those of the comparison, decide about ds_hydra's candidates. `overlap` of pull
    and push with propagation. `num_proposal_rounds`: see `PruningSettings`. `max_communicators`:
    process groups that the candidates may need together, four for each device if None. `space` of
    ds_hydra, where the workload has no strategies: <TP,PP>, SP, streamed and checkpointed layers
    ("full"), or <TP,PP> ("plain"). `bounds_attention` of T of one rank: see `single_rank_latency`.
    """

    iterations: int = 100
    systems: tuple[str, ...] = tuple(name for name in LABELS if name != DS_HYDRA)
    overlap: bool = True
    seed: int = 1
    num_proposal_batches: int = 32
    num_proposal_rounds: int = 1
    max_communicators: int | None = None
    space: Literal["full", "plain"] = "full"
    bounds_attention: bool = True

    def __post_init__(self) -> None:
        unknown = [name for name in self.systems if name not in LABELS or name == DS_HYDRA]
        if unknown:
            raise HydraConfigError(
                f"system {unknown[0]!r} is not known; choose among {', '.join(n for n in LABELS if n != DS_HYDRA)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A mean over mini-batches and its standard error."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: FloatArray) -> Figure:
        """Mean and standard error of `values`; the error of one value is 0."""
        error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0
        return cls(mean=float(values.mean()), standard_error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as long the mean mini-batch takes, with the middle 95% of paired resamples."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, times: FloatArray, reference: FloatArray) -> Ratio:
        """Sum of `times` over sum of `reference`, mini-batch by mini-batch."""
        generator = np.random.Generator(np.random.PCG64(0))
        drawn = generator.integers(0, times.size, (_NUM_RESAMPLES, times.size))
        ratios = times[drawn].sum(axis=1) / reference[drawn].sum(axis=1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        return cls(value=float(times.sum() / reference.sum()), low=float(low), high=float(high))


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """ds_hydra on all mini-batches, its candidates and what no plan in their space of schemes can
    beat.
    """

    result: SystemResult
    profile: Profile
    strategies: tuple[Strategy, ...]
    plans: tuple[IterationPlan, ...]
    bounds: tuple[Bound, ...]

    @property
    def perfect_balance_ms(self) -> FloatArray:
        """`Bound.perfect_balance_ms` of every mini-batch."""
        return np.array([bound.perfect_balance_ms for bound in self.bounds])

    @property
    def distance_to_bound(self) -> float:
        """Propagation above the perfect-balance bound, which no plan can reach or beat: mean over
        mean, minus 1.
        """
        return float(self.result.propagation_ms.sum() / self.perfect_balance_ms.sum() - 1)

    @property
    def is_decided_by_longest(self) -> BoolArray:
        """Mini-batches that take hardly longer (2%) than their longest sequence alone.

        Nothing can shorten these, so their other pipelines wait, whatever the plan.
        """
        alone_ms = np.array([bound.longest_alone_ms for bound in self.bounds])
        is_decided: BoolArray = self.result.propagation_ms <= (1 + _HARDLY) * alone_ms
        return is_decided

    def to_json(self) -> dict[str, Any]:
        """Candidates, bounds, and how far they explain the imbalance."""
        imbalance = self.result.imbalance[~self.is_decided_by_longest]
        return {
            "strategies": [str(strategy) for strategy in self.strategies],
            "perfect_balance_ms": float(self.perfect_balance_ms.mean()),
            "distance_to_bound": self.distance_to_bound,
            "decided_by_longest": float(self.is_decided_by_longest.mean()),
            "imbalance_otherwise": float(imbalance.mean()) if imbalance.size else None,
            "imbalance_of_bound": float(np.mean([bound.imbalance for bound in self.bounds])),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Results of all systems on one workload; `results[0]` is ds_hydra, `planned` those of
    `PLANNED` that ran.
    """

    workload: Workload
    settings: Settings
    cluster: Cluster | None
    num_tokens: FloatArray
    results: tuple[SystemResult, ...]
    planned: Mapping[str, Planned]

    @property
    def ours(self) -> Planned:
        """ds_hydra in the space of the settings."""
        return self.planned[DS_HYDRA]

    @property
    def plans(self) -> tuple[IterationPlan, ...]:
        """Those of `ours`."""
        return self.ours.plans

    def get(self, name: str) -> SystemResult | None:
        """The result of one system, None where it was not simulated."""
        return next((result for result in self.results if result.name == name), None)

    def speedup(self, name: str, *, of_propagation: bool = False) -> Ratio | None:
        """How many times as fast ds_hydra is as `name`, in whole iterations or in propagation
        alone.
        """
        system, ours = self.get(name), self.results[0]
        if system is None:
            return None
        if of_propagation:
            return Ratio.of(system.propagation_ms, ours.propagation_ms)
        return Ratio.of(system.iteration_ms, ours.iteration_ms)

    def tokens_per_s(self, result: SystemResult) -> float:
        """Useful tokens per second of whole iterations."""
        return float(1e3 * self.num_tokens.sum() / result.iteration_ms.sum())

    def dollars_per_billion_tokens(self, result: SystemResult, price_per_gpu_hour: float) -> float:
        """What 10^9 tokens cost at a price for one device and hour."""
        hours = 1e9 / self.tokens_per_s(result) / 3600
        return hours * self.workload.num_devices * price_per_gpu_hour

    def simulate(self, position: int, system: str = DS_HYDRA) -> Simulation:
        """Iteration number `position` of `system`, one of `planned`, with all its events."""
        planned = self.planned[system]
        return replace(self._scenario(), profile=planned.profile).simulate(planned.plans[position])

    def replan(self, strategy: str) -> tuple[IterationPlan, ...]:
        """The same mini-batches planned with one strategy."""
        scenario = self._scenario()
        batches = (
            GlobalBatch(
                iteration=plan.iteration,
                sample_indices=plan.sample_indices,
                lengths=plan.lengths,
                num_label_tokens=plan.num_label_tokens,
            )
            for plan in self.plans
        )
        return tuple(scenario.plan(batch, [Strategy.parse(strategy)]) for batch in batches)

    def _scenario(self) -> Scenario:
        return Scenario(
            profile=self.workload.profile,
            num_devices=self.workload.num_devices,
            context_length=self.workload.context_length,
            batches=(),
            cluster=self.cluster,
            overlap=self.settings.overlap,
        )

    def to_json(self, price_per_gpu_hour: float | None = None) -> dict[str, Any]:
        """The `ds_hydra.simulation/1` document."""
        return {
            "schema": SIMULATION_SCHEMA,
            "name": self.workload.name,
            "profile": self.workload.profile.name,
            "histogram": self.workload.histogram.name,
            "num_devices": self.workload.num_devices,
            "context_length": self.workload.context_length,
            "tokens_per_iteration": self.workload.tokens_per_iteration,
            "iterations": int(self.num_tokens.size),
            "overlap": self.settings.overlap,
            "seed": self.settings.seed,
            "communication": self.cluster.hardware.name if self.cluster else None,
            **self.ours.to_json(),
            "systems": [self._system(result, price_per_gpu_hour) for result in self.results],
            "space": self.settings.space,
            "attention": "bounded" if self.settings.bounds_attention else "extrapolated",
            **({PLAIN: self.planned[PLAIN].to_json()} if PLAIN in self.planned else {}),
        }

    def _system(self, result: SystemResult, price: float | None) -> dict[str, Any]:
        iteration, propagation = Figure.of(result.iteration_ms), Figure.of(result.propagation_ms)
        document: dict[str, Any] = {
            "name": result.name,
            "label": LABELS[result.name],
            "strategy": result.strategy,
            "iteration_ms": iteration.mean,
            "iteration_ms_standard_error": iteration.standard_error,
            "propagation_ms": propagation.mean,
            "propagation_ms_standard_error": propagation.standard_error,
            "tokens_per_s": self.tokens_per_s(result),
            "imbalance": float(result.imbalance.mean()),
            "bubble": float(result.bubble.mean()),
        }
        for key, of_propagation in (("speedup", False), ("speedup_of_propagation", True)):
            ratio = self.speedup(result.name, of_propagation=of_propagation)
            assert ratio is not None
            document[key] = ratio.value
            document[f"{key}_95"] = [ratio.low, ratio.high]
        if price is not None:
            document["dollars_per_billion_tokens"] = self.dollars_per_billion_tokens(result, price)
        return document


def compare(workload: Workload, cluster: Cluster | None, settings: Settings) -> Comparison:
    """Simulate ds_hydra and `settings.systems` on the same mini-batches of `workload`.

    Raises HydraConfigError where no scheme fits the context or a given strategy does not fit.
    """
    check_workload(workload)
    histogram = workload.histogram.limit(workload.context_length)
    scenario = Scenario(
        profile=workload.profile,
        num_devices=workload.num_devices,
        context_length=workload.context_length,
        batches=draw_batches(
            histogram, workload.tokens_per_iteration, settings.iterations, settings.seed
        ),
        cluster=cluster,
        overlap=settings.overlap,
        bounds_attention=settings.bounds_attention,
    )
    strategies = workload.strategies or _propose(workload, cluster, settings)
    plain = usable_schemes(workload.profile, workload.num_devices)
    needs_proposed = {"static", FULL_STATIC} & set(settings.systems) and scenario.statics()
    proposed = _proposed_strategies(workload) if needs_proposed else ()
    full, candidates, schemes = scenario, strategies, plain
    if settings.space == "full" and not workload.strategies:
        full = extended_scenario(scenario)
        schemes = extended_schemes(full)
        candidates = extended_strategies(
            full,
            strategies,
            draw_batches(
                histogram,
                workload.tokens_per_iteration,
                settings.num_proposal_batches,
                settings.seed + 1,
            ),
            max_communicators=_max_communicators(workload, settings),
        )
    planned = {DS_HYDRA: _plan(DS_HYDRA, full, candidates, schemes)}
    results: list[SystemResult | None] = []
    for name in settings.systems:
        if name == PLAIN:
            planned[PLAIN] = _plan(PLAIN, scenario, strategies, plain)
            results.append(planned[PLAIN].result)
        elif name == FULL_STATIC:
            results.append(heterogeneous_static(full, (*candidates, *proposed), name=name))
        elif name == "static":
            results.append(heterogeneous_static(scenario, (*strategies, *proposed), name=name))
        else:
            results.append(_run(name, scenario, workload))
    return Comparison(
        workload=workload,
        settings=settings,
        cluster=cluster,
        num_tokens=np.array([batch.num_tokens for batch in scenario.batches], dtype=np.float64),
        results=(planned[DS_HYDRA].result, *(result for result in results if result is not None)),
        planned=planned,
    )


def _plan(
    name: str, scenario: Scenario, strategies: Sequence[Strategy], schemes: Collection[Scheme]
) -> Planned:
    """ds_hydra with `strategies`; the bounds are those of `schemes` and of what the strategies have
    besides.
    """
    result, plans = dynamic(scenario, strategies, name=name)
    schemes = tuple(
        dict.fromkeys((*schemes, *(s for strategy in strategies for s in strategy.schemes)))
    )
    return Planned(
        result=result,
        profile=scenario.profile,
        strategies=tuple(strategies),
        plans=tuple(plans),
        bounds=tuple(bound_of(scenario, batch, schemes) for batch in scenario.batches),
    )


def check_workload(workload: Workload) -> None:
    """Raise HydraConfigError for a context that nothing fits, or a strategy that has no place in
    the cluster.
    """
    check_context(workload.profile, workload.num_devices, workload.context_length)
    if workload.tokens_per_iteration < workload.context_length:
        raise HydraConfigError(
            f"{workload.tokens_per_iteration} tokens per iteration are fewer than one sequence of the context, "
            f"{workload.context_length}; raise --tokens to {workload.context_length} or more"
        )
    given = (workload.given,) if workload.given else ()
    for strategy in (*given, *workload.strategies):
        if strategy.num_devices > workload.num_devices:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} devices, there are {workload.num_devices}"
            )
    if workload.given is not None and workload.given.is_heterogeneous:
        raise HydraConfigError(
            f"baseline {workload.given} has several schemes; Megatron-LM runs one"
        )


def _propose(
    workload: Workload, cluster: Cluster | None, settings: Settings
) -> tuple[Strategy, ...]:
    found = decide_candidates(
        workload.profile,
        workload.histogram,
        CandidateSettings(
            num_devices=workload.num_devices,
            context_length=workload.context_length,
            tokens_per_iteration=workload.tokens_per_iteration,
            space="plain",
            cluster=cluster,
            max_groups=_max_communicators(workload, settings),
            max_enumerated=0,
            pruning=PruningSettings(
                num_batches=settings.num_proposal_batches,
                num_rounds=settings.num_proposal_rounds,
                seed=settings.seed + 1,
                planner=replace(HEURISTIC, overlaps_links=settings.overlap),
            ),
        ),
    )
    return found.strategies


def _max_communicators(workload: Workload, settings: Settings) -> int:
    return settings.max_communicators or 4 * workload.num_devices


def _run(name: str, scenario: Scenario, workload: Workload) -> SystemResult | None:
    """The system called `name`; None where it does not apply."""
    if name == "given":
        return fixed_length(scenario, [workload.given], name=name) if workload.given else None
    if name in NEED_STATIC and not scenario.statics():
        return None
    if name in ("megatron", "megatron_lengths"):
        return fixed_length(scenario, tunes_micro_batches=name == "megatron_lengths", name=name)
    if name == "deepspeed_balanced":
        return balanced_ulysses(scenario, name=name)
    if name in ("deepspeed", "deepspeed_ac"):
        return deepspeed_ulysses(scenario, is_checkpointed=name == "deepspeed_ac", name=name)
    if name == "hotspa":
        return hotspa(scenario, name=name)
    if name == "balanced":
        return balanced(scenario, name=name)
    return two_stage(scenario, scenario.statics(), name=name)


def _proposed_strategies(workload: Workload) -> tuple[Strategy, ...]:
    """What the program of Eq. (4) finds, all of it."""
    proposed = propose_from_histogram(
        workload.profile,
        workload.histogram.limit(workload.context_length),
        num_devices=workload.num_devices,
        context_length=workload.context_length,
        settings=ProposalSettings(tokens_per_iteration=workload.tokens_per_iteration),
    )
    return tuple(p.strategy for p in proposed)


def draw_batches(
    histogram: LengthHistogram, tokens_per_iteration: int, count: int, seed: int
) -> tuple[GlobalBatch, ...]:
    """`count` mini-batches drawn from `histogram`, the same for the same arguments."""
    return tuple(
        GlobalBatch(
            iteration=iteration,
            sample_indices=tuple(range(lengths.size)),
            lengths=tuple(lengths.tolist()),
            num_label_tokens=int((lengths - 1).sum()),
        )
        for iteration, lengths in enumerate(
            histogram.draw_batches(tokens_per_iteration, count, seed)
        )
    )
