"""The figures of the paper beside ours: what a case's `metric` names mean, and the document of all
cases.

A metric is a name and systems, e.g. `imbalance.plain` or `gain.two_stage.static`;
`PAPER_BASELINES` are the systems that the paper compares with, and ours is ds_hydra with <TP,PP>
alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.results import Comparison
from ds_hydra.lab.simulator.scenario import SystemResult
from ds_hydra.lab.simulator.systems import PAPER
from ds_hydra.records.events import Simulation, simulate_plan

PAPER_BASELINES = ("given", "deepspeed", "deepspeed_ac", "hotspa")


def our_figure(comparison: Comparison, metric: str) -> str:
    """The value of `metric` as text, with its unit; "not simulated" where a system of it was left
    out.
    """
    name, *systems = metric.split(".")
    compute = _METRICS.get(name)
    if compute is None:
        raise HydraConfigError(
            f"metric {metric!r} is not known; there are {', '.join(sorted(_METRICS))}"
        )
    needed = [system for system in systems if system != "no_overlap"]
    found = [comparison.get(system) for system in needed]
    return "not simulated" if None in found else compute(comparison, systems)


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
    return (
        f"{values.mean():.2f} on average, {low:.2f} to {high:.2f} in the middle 80% of mini-batches"
    )


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
    planned = comparison.planned.get(system)
    if planned:
        plans, profile = planned.plans, planned.profile
    else:
        plans = comparison.replan(_result(comparison, system).strategy)
        profile = comparison.workload.profile
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
