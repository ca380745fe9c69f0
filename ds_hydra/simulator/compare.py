"""ds_hydra against other ways to train: one workload, the same mini-batches for all, error bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.propose import HEURISTIC, PruningSettings, propose_strategies
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.simulator.baselines import (
    balanced,
    dynamic,
    fixed_length,
    heterogeneous_static,
    hotspa,
    two_stage,
)
from ds_hydra.simulator.cluster import Cluster
from ds_hydra.simulator.events import Simulation
from ds_hydra.simulator.scenario import Scenario, SystemResult, longest_alone_ms, perfect_balance_ms
from ds_hydra.simulator.ulysses import deepspeed_ulysses
from ds_hydra.strategy.histogram import LengthHistogram
from ds_hydra.strategy.profile import Profile
from ds_hydra.strategy.proposal import ProposalSettings, check_context, propose_from_histogram
from ds_hydra.strategy.scheme import Strategy

SIMULATION_SCHEMA = "ds_hydra.simulation/1"

DS_HYDRA = "ds_hydra"
LABELS = {
    DS_HYDRA: "ds_hydra",
    "given": "Megatron-LM, given strategy",
    "megatron": "Megatron-LM, tuned",
    "megatron_rows": "Megatron-LM, row length tuned too",
    "deepspeed": "DeepSpeed ZeRO-3 + Ulysses",
    "deepspeed_ac": "DeepSpeed ZeRO-3 + Ulysses + AC",
    "hotspa": "HotSPa",
    "balanced": "balanced DP (Karmarkar-Karp)",
    "two_stage": "homogeneous, two-stage",
    "static": "heterogeneous static",
}
"""Systems in the order they are shown, with what users see."""
STATIC_SYSTEMS = (
    "given",
    "megatron",
    "megatron_rows",
    "deepspeed",
    "deepspeed_ac",
    "balanced",
    "two_stage",
    "static",
)

_NUM_RESAMPLES = 1000
_HARDLY = 0.02

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is simulated. `given`: a homogeneous strategy that Megatron-LM is simulated with besides its best.

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
    """How it is simulated. `systems` other than ds_hydra; `num_proposal_batches` mini-batches, drawn apart from
    those of the comparison, decide about ds_hydra's candidates. `overlap` of pull and push with propagation.
    `num_proposal_rounds`: see `PruningSettings`. `max_communicators`: process groups that the candidates may
    need together, four for each device if None.
    """

    iterations: int = 100
    systems: tuple[str, ...] = tuple(name for name in LABELS if name != DS_HYDRA)
    overlap: bool = True
    seed: int = 1
    num_proposal_batches: int = 32
    num_proposal_rounds: int = 1
    max_communicators: int | None = None

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
class Comparison:
    """Results of all systems on one workload; `results[0]` is ds_hydra."""

    workload: Workload
    settings: Settings
    cluster: Cluster | None
    num_tokens: FloatArray
    perfect_balance_ms: FloatArray
    longest_alone_ms: FloatArray
    results: tuple[SystemResult, ...]
    strategies: tuple[Strategy, ...]
    plans: tuple[IterationPlan, ...]

    def get(self, name: str) -> SystemResult | None:
        """The result of one system, None where it was not simulated."""
        return next((result for result in self.results if result.name == name), None)

    def speedup(self, name: str, *, of_propagation: bool = False) -> Ratio | None:
        """How many times as fast ds_hydra is as `name`, in whole iterations or in propagation alone."""
        system, ours = self.get(name), self.results[0]
        if system is None:
            return None
        if of_propagation:
            return Ratio.of(system.propagation_ms, ours.propagation_ms)
        return Ratio.of(system.iteration_ms, ours.iteration_ms)

    @property
    def distance_to_bound(self) -> float:
        """Propagation above the perfect-balance bound, which no plan can reach or beat: mean over mean, minus 1."""
        return float(self.results[0].propagation_ms.sum() / self.perfect_balance_ms.sum() - 1)

    @property
    def is_decided_by_longest(self) -> BoolArray:
        """Mini-batches of ds_hydra that take hardly longer (2%) than their longest sequence alone.

        Nothing can shorten these, so their other pipelines wait, whatever the plan.
        """
        return self.results[0].propagation_ms <= (1 + _HARDLY) * self.longest_alone_ms

    def tokens_per_s(self, result: SystemResult) -> float:
        """Useful tokens per second of whole iterations."""
        return float(1e3 * self.num_tokens.sum() / result.iteration_ms.sum())

    def dollars_per_billion_tokens(self, result: SystemResult, price_per_gpu_hour: float) -> float:
        """What 10^9 tokens cost at a price for one device and hour."""
        hours = 1e9 / self.tokens_per_s(result) / 3600
        return hours * self.workload.num_devices * price_per_gpu_hour

    def simulate(self, position: int) -> Simulation:
        """ds_hydra's iteration number `position` of the comparison, with all its events."""
        return self._scenario().simulate(self.plans[position])

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
            "strategies": [str(strategy) for strategy in self.strategies],
            "perfect_balance_ms": float(self.perfect_balance_ms.mean()),
            "distance_to_bound": self.distance_to_bound,
            "decided_by_longest": float(self.is_decided_by_longest.mean()),
            "imbalance_otherwise": self._imbalance_otherwise(),
            "systems": [self._system(result, price_per_gpu_hour) for result in self.results],
        }

    def _imbalance_otherwise(self) -> float | None:
        """Mean imbalance of the mini-batches that no single sequence decides; None if there is none."""
        imbalance = self.results[0].imbalance[~self.is_decided_by_longest]
        return float(imbalance.mean()) if imbalance.size else None

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

    Raises HydraConfigError where no scheme holds the context or a given strategy does not fit.
    """
    check_workload(workload)
    histogram = workload.histogram.limit(workload.context_length)
    scenario = Scenario(
        profile=workload.profile,
        num_devices=workload.num_devices,
        context_length=workload.context_length,
        batches=draw_batches(histogram, workload.tokens_per_iteration, settings.iterations, settings.seed),
        cluster=cluster,
        overlap=settings.overlap,
    )
    strategies = workload.strategies or _propose(workload, cluster, settings)
    ours, plans = dynamic(scenario, strategies, name=DS_HYDRA)
    others = (_run(name, scenario, workload, strategies) for name in settings.systems)
    return Comparison(
        workload=workload,
        settings=settings,
        cluster=cluster,
        num_tokens=np.array([batch.num_tokens for batch in scenario.batches], dtype=np.float64),
        perfect_balance_ms=np.array([perfect_balance_ms(scenario, batch) for batch in scenario.batches]),
        longest_alone_ms=np.array([longest_alone_ms(scenario, batch) for batch in scenario.batches]),
        results=(ours, *(result for result in others if result is not None)),
        strategies=tuple(strategies),
        plans=tuple(plans),
    )


def check_workload(workload: Workload) -> None:
    """Raise HydraConfigError for a context that nothing holds, or a strategy that has no place in the cluster."""
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
        raise HydraConfigError(f"baseline {workload.given} has several schemes; Megatron-LM runs one")


def _propose(workload: Workload, cluster: Cluster | None, settings: Settings) -> tuple[Strategy, ...]:
    return propose_strategies(
        workload.profile,
        workload.histogram,
        num_devices=workload.num_devices,
        context_length=workload.context_length,
        tokens_per_iteration=workload.tokens_per_iteration,
        pruning=PruningSettings(
            num_batches=settings.num_proposal_batches,
            num_rounds=settings.num_proposal_rounds,
            max_communicators=settings.max_communicators or 4 * workload.num_devices,
            seed=settings.seed + 1,
            planner=replace(HEURISTIC, overlaps_links=settings.overlap),
            links_of=cluster.link_times if cluster else None,
        ),
    ).strategies


def _run(
    name: str, scenario: Scenario, workload: Workload, strategies: Sequence[Strategy]
) -> SystemResult | None:
    """The system called `name`; None where it does not apply."""
    if name == "given":
        return fixed_length(scenario, [workload.given], name=name) if workload.given else None
    if name in ("megatron", "megatron_rows"):
        return fixed_length(scenario, tunes_rows=name == "megatron_rows", name=name)
    if name in ("deepspeed", "deepspeed_ac"):
        return deepspeed_ulysses(scenario, is_checkpointed=name == "deepspeed_ac", name=name)
    if name == "hotspa":
        return hotspa(scenario, name=name)
    if name == "balanced":
        return balanced(scenario, name=name)
    if name == "two_stage":
        return two_stage(scenario, scenario.statics(), name=name)
    proposed = propose_from_histogram(
        workload.profile,
        workload.histogram.limit(workload.context_length),
        num_devices=workload.num_devices,
        context_length=workload.context_length,
        settings=ProposalSettings(tokens_per_iteration=workload.tokens_per_iteration),
    )
    return heterogeneous_static(scenario, (*strategies, *(p.strategy for p in proposed)), name=name)


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
        for iteration, lengths in enumerate(histogram.draw_batches(tokens_per_iteration, count, seed))
    )
