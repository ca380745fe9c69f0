"""Results of `compare`: times of all systems on the same global batches, with error bars; and the
figures of the paper beside ours: what a case's `metric` names mean, and the document of all cases.

A metric is a name and systems, e.g. `imbalance.plain` or `gain.deepspeed.flexsp`;
`PAPER_BASELINES` are the systems that the paper compares with, and ours is ds_hydra with <TP,PP>
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np

from ds_hydra.lab.simulator.cases import Case, Workload
from ds_hydra.lab.simulator.events import Simulation, simulate_plan
from ds_hydra.lab.simulator.scenario import SystemResult
from ds_hydra.lab.simulator.systems import DS_HYDRA, LABELS, PAPER, Settings
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.cost_models.flops import ModelFlops, profile_flops
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Strategy

SIMULATION_SCHEMA = "ds_hydra.simulation/1"

_NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of the times of mean global batches, with the middle 95% of paired resamples."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, times: FloatArray, reference: FloatArray) -> Ratio:
        """Sum of `times` over sum of `reference`, global batch by global batch."""
        generator = np.random.Generator(np.random.PCG64(0))
        drawn = generator.integers(0, times.size, (_NUM_RESAMPLES, times.size))
        ratios = times[drawn].sum(axis=1) / reference[drawn].sum(axis=1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        return cls(value=float(times.sum() / reference.sum()), low=float(low), high=float(high))


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """ds_hydra on all global batches, its candidates and the lower bound of all plans in their
    space of schemes.
    """

    result: SystemResult
    profile: Profile
    strategies: tuple[Strategy, ...]
    plans: tuple[IterationPlan, ...]
    perfect_balance_ms: FloatArray

    @property
    def distance_to_bound(self) -> float:
        """Propagation above the perfect-balance bound, which no plan can reach or beat: mean over
        mean, minus 1.
        """
        return float(self.result.propagation_ms.sum() / self.perfect_balance_ms.sum() - 1)

    def to_json(self) -> dict[str, Any]:
        """Candidates and bounds."""
        return {
            "strategies": [str(strategy) for strategy in self.strategies],
            "perfect_balance_ms": float(self.perfect_balance_ms.mean()),
            "distance_to_bound": self.distance_to_bound,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Results of all systems on one workload; `results[0]` is ds_hydra, `planned` those of
    `OUR_SYSTEMS` that ran.
    """

    workload: Workload
    settings: Settings
    num_tokens: FloatArray
    results: tuple[SystemResult, ...]
    planned: Mapping[str, Planned]
    left_out: tuple[str, ...] = ()
    """Systems that cannot run a sequence of the context."""

    @property
    def cluster(self) -> Cluster | None:
        """The interconnects of the workload."""
        return self.workload.cluster

    @property
    def ours(self) -> Planned:
        """ds_hydra in the space of the settings."""
        return self.planned[DS_HYDRA]

    def get(self, name: str) -> SystemResult | None:
        """The result of one system, None where it was not simulated."""
        return next((result for result in self.results if result.name == name), None)

    def speedup(self, name: str, *, of_propagation: bool = False) -> Ratio | None:
        """Speedup of ds_hydra over `name`, in whole iterations or in propagation alone."""
        system, ours = self.get(name), self.results[0]
        if system is None:
            return None
        if of_propagation:
            return Ratio.of(system.propagation_ms, ours.propagation_ms)
        return Ratio.of(system.iteration_ms, ours.iteration_ms)

    def tflops_per_device(self, result: SystemResult) -> float:
        """FLOPs that the model needs, by the sequences' own lengths, over devices and time of whole
        iterations; NaN where they are not counted.
        """
        lengths = (length for plan in self.ours.plans for length in plan.lengths)
        time_ms = float(result.iteration_ms.sum())
        return self.flops.tflops(lengths, time_ms, self.workload.num_devices)

    @cached_property
    def flops(self) -> ModelFlops:
        """FLOPs of the model."""
        return profile_flops(self.workload.profile)

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of a device in 16 bit, None where its hardware is not described."""
        return self.cluster.hardware.peak_flops if self.cluster else None

    def simulate(self, position: int, system: str = DS_HYDRA) -> Simulation:
        """Iteration number `position` of `system`, one of `planned`."""
        planned = self.planned[system]
        scenario = replace(self.settings, iterations=0).scenario(self.workload)
        scenario = scenario.knowing(planned.profile).linked_by(self.cluster)
        return scenario.simulate(planned.plans[position])

    def to_json(self) -> dict[str, Any]:
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
            "peak_flops": self.peak_flops,
            "flops_unknown": self.flops.unknown or None,
            **self.ours.to_json(),
            "systems": [self._system(result) for result in self.results],
            "space": self.settings.space,
            **{n: found.to_json() for n, found in self.planned.items() if n != DS_HYDRA},
        }

    def _system(self, result: SystemResult) -> dict[str, Any]:
        tflops, peak = self.tflops_per_device(result), self.peak_flops
        document: dict[str, Any] = {
            "name": result.name,
            "label": LABELS[result.name],
            "strategy": result.strategy,
            "iteration_ms": float(result.iteration_ms.mean()),
            "iteration_ms_standard_error": _standard_error(result.iteration_ms),
            "propagation_ms": float(result.propagation_ms.mean()),
            "propagation_ms_standard_error": _standard_error(result.propagation_ms),
            "tokens_per_s": float(1e3 * self.num_tokens.sum() / result.iteration_ms.sum()),
            "tflops_per_device": None if isnan(tflops) else tflops,
            "mfu": tflops * 1e12 / peak if peak and not isnan(tflops) else None,
            "imbalance": float(result.imbalance.mean()),
            "bubble": float(result.bubble.mean()),
        }
        for key, of_propagation in (("speedup", False), ("speedup_of_propagation", True)):
            ratio = self.speedup(result.name, of_propagation=of_propagation)
            assert ratio is not None
            document[key] = ratio.value
            document[f"{key}_95"] = [ratio.low, ratio.high]
        return document


def _standard_error(values: FloatArray) -> float:
    """Standard error of the mean of `values`; that of one value is 0."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0


PAPER_BASELINES = ("deepspeed", "hotspa")


def published_beside_ours(case: Case, comparison: Comparison) -> dict[str, Any]:
    """The figures published for a case and ours, as a part of the document of its comparison."""
    figures = [
        {"what": e.what, "paper": e.paper, "ours": our_figure(comparison, e.metric)}
        for e in case.expected
    ]
    return {"figure": case.figure, "published": figures}


def our_figure(comparison: Comparison, metric: str) -> str:
    """The value of `metric` as text, with its unit; "not simulated" where a system of it was left
    out.
    """
    name, *systems = metric.split(".")
    needed = [system for system in systems if system != "no_overlap"]
    found = [comparison.get(system) for system in needed]
    return "not simulated" if None in found else _METRICS[name](comparison, systems)


def _over_best(comparison: Comparison, systems: list[str]) -> str:
    ours, found = comparison.get(PAPER), map(comparison.get, PAPER_BASELINES)
    known = {result.name: float(result.iteration_ms.sum()) for result in found if result}
    if not known or ours is None:
        return "not simulated"
    best = min(known, key=lambda name: known[name])
    return f"{known[best] / float(ours.iteration_ms.sum()):.2f} over {best}"


def _imbalance(comparison: Comparison, systems: list[str]) -> str:
    values = _result(comparison, systems[0]).imbalance
    low, high = np.quantile(values, [0.1, 0.9])
    return f"{values.mean():.2f} on average, {low:.2f} to {high:.2f} in the middle 80% of global batches"


def _gain(comparison: Comparison, systems: list[str]) -> str:
    before, after = (_result(comparison, name).iteration_ms for name in systems)
    return f"{float(before.sum() / after.sum()):.2f} x"


def _speedup_of_propagation(comparison: Comparison, systems: list[str]) -> str:
    if comparison.get(PAPER) is None:
        return "not simulated"
    ours, other = (_result(comparison, name).propagation_ms for name in (PAPER, systems[0]))
    return f"{float(other.sum() / ours.sum()):.2f}"


def _propagation_s(comparison: Comparison, systems: list[str]) -> str:
    return f"{_result(comparison, systems[0]).propagation_ms.mean() / 1e3:.2f} s"


def _iteration_s(comparison: Comparison, systems: list[str]) -> str:
    if systems[-1] == "no_overlap":
        return f"{_serial(comparison, systems[0], lambda s: s.iteration_ms):.2f} s"
    return f"{_result(comparison, systems[0]).iteration_ms.mean() / 1e3:.2f} s"


def _link_s(comparison: Comparison, systems: list[str]) -> str:
    return f"{_serial(comparison, systems[0], lambda s: s.exposed_link_ms):.2f} s"


def _exposed_link_s(comparison: Comparison, systems: list[str]) -> str:
    count = len(comparison.planned[systems[0]].plans)
    exposed = [comparison.simulate(i, systems[0]).exposed_link_ms for i in range(count)]
    return f"{float(np.mean(exposed)) / 1e3:.2f} s"


def _step_s(comparison: Comparison, systems: list[str]) -> str:
    return f"{comparison.cluster.step_ms / 1e3:.2f} s" if comparison.cluster else "not simulated"


def _serial(comparison: Comparison, system: str, value: Callable[[Simulation], float]) -> float:
    """Mean `value` of the iterations of a planned system when nothing overlaps, in s."""
    if system in comparison.planned:
        plans = comparison.planned[system].plans
        profile = comparison.planned[system].profile
    else:
        scenario = comparison.settings.scenario(comparison.workload)
        strategy = Strategy.parse(_result(comparison, system).strategy)
        plans = tuple(scenario.plan(batch, [strategy]) for batch in scenario.batches)
        profile = scenario.profile
    found = [
        value(simulate_plan(plan, profile, comparison.cluster, overlap=False)) for plan in plans
    ]
    return float(np.mean(found)) / 1e3


def _result(comparison: Comparison, name: str) -> SystemResult:
    result = comparison.get(name)
    assert result is not None
    return result


_METRICS: dict[str, Callable[[Comparison, list[str]], str]] = {
    "speedup_over_best_paper_baseline": _over_best,
    "imbalance": _imbalance,
    "gain": _gain,
    "speedup_of_propagation": _speedup_of_propagation,
    "propagation_s": _propagation_s,
    "iteration_s": _iteration_s,
    "link_s": _link_s,
    "exposed_link_s": _exposed_link_s,
    "step_s": _step_s,
}
