"""What each kind of candidate is worth: the shipped cases, planned without it.

Command: python -m benchmarks.ablation --page docs/benchmarks/planner.md    (some minutes)

The candidates are those of docs/benchmarks/simulate.json, and nothing is proposed in the place of
what is left out, so a figure is an upper bound of what the kind is worth.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks.pages import put_section
from ds_hydra.errors import HydraError
from ds_hydra.lab.simulator import compare
from ds_hydra.lab.simulator.cases import Workload, load_case
from ds_hydra.lab.simulator.systems import Settings
from ds_hydra.sampler.planner import candidate
from ds_hydra.sampler.planner import iteration as planner
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

CASES = Path(__file__).resolve().parent.parent / "docs/benchmarks/simulate.json"
TITLE = "What each kind of candidate is worth"

Uses = Callable[[Scheme], bool]


class Kind(NamedTuple):
    """A kind of candidate. `uses`: whether a scheme is of it; None for phases, which are no
    scheme's. `leaves_out`: a function of the planner that does nothing then.
    """

    name: str
    uses: Uses | None
    leaves_out: tuple[Any, str] | None = None


KINDS = (
    Kind("gathered layers", lambda scheme: scheme.gather),
    Kind("slices that stay (all `<TP,PP>`)", lambda scheme: not scheme.gather),
    Kind("phases and mixed steps", None, (candidate.Phases, "plan")),
    Kind("SP", lambda scheme: scheme.sp > 1),
    Kind("CP", lambda scheme: scheme.cp > 1),
    Kind("TP", lambda scheme: scheme.tp > 1),
    Kind("checkpointed layers", lambda scheme: scheme.ckpt > 0),
    Kind("weights that stay on the node", lambda scheme: scheme.hpz, (candidate, "_worth_keeping")),
)


class Run(NamedTuple):
    """Mean time of an iteration, and the strategy of each."""

    mean_ms: float
    strategies: tuple[Strategy, ...]


def run(workload: Workload, settings: Settings, strategies: Sequence[Strategy]) -> Run | None:
    """Plan and simulate with `strategies` alone; None where a sequence does not fit."""
    try:
        with mock.patch.object(compare, "_propose", return_value=tuple(strategies)):
            found = compare.compare(workload, settings).ours
    except HydraError:
        return None
    plans = tuple(plan.strategy for plan in found.plans)
    return Run(float(found.result.iteration_ms.mean()), plans)


def is_used(kind: Kind, strategy: Strategy) -> bool:
    """Whether an iteration under `strategy` uses the kind."""
    phases = strategy.phases or (strategy,)
    if kind.uses is None:
        return len(phases) > 1
    return any(kind.uses(scheme) for phase in phases for scheme in phase.schemes)


def without(
    kind: Kind, workload: Workload, settings: Settings, strategies: Sequence[Strategy]
) -> Run | None:
    """Plan without the kind."""
    left = [s for s in strategies if kind.uses is None or not any(map(kind.uses, s.schemes))]
    if not left:
        return None
    if kind.leaves_out is None:
        return run(workload, settings, left)
    with mock.patch.object(*kind.leaves_out, lambda *_: []):
        return run(workload, settings, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=8, help="global batches of a case")
    parser.add_argument("--cases", default="^paper/", help="regular expression of their names")
    parser.add_argument("--page", type=Path, help="page whose section is replaced")
    options = parser.parse_args()
    assert planner.Phases is candidate.Phases
    warm_up()
    cases = json.loads(CASES.read_text())["cases"]
    cases = [case for case in cases if re.search(options.cases, case["name"])]
    settings = Settings(iterations=options.iterations, systems=[])
    ratios: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    impossible, used = dict.fromkeys(ratios, 0), dict.fromkeys(ratios, 0)
    num_iterations = 0
    for number, case in enumerate(cases, start=1):
        workload = load_case(case["name"]).workload
        workload = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
        strategies = parse_strategies(case["strategies"])
        whole = run(workload, settings, strategies)
        assert whole is not None
        num_iterations += len(whole.strategies)
        for kind in KINDS:
            used[kind.name] += sum(is_used(kind, strategy) for strategy in whole.strategies)
            less = without(kind, workload, settings, strategies)
            if less is None:
                impossible[kind.name] += 1
            else:
                ratios[kind.name].append(less.mean_ms / whole.mean_ms)
        print(f"{number}/{len(cases)} {case['name']}", file=sys.stderr, flush=True)
    lines = [
        f"{len(cases)} cases of {options.iterations} global batches with the candidates proposed for them; time "
        "without a kind over time with it. Nothing is proposed in its place, so each figure is an upper bound.",
        "",
        "| left out | geometric mean | worst case | cases that cannot run | iterations that use it |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, values in ratios.items():
        mean = f"{np.exp(np.log(values).mean()):.4f}" if values else "-"
        worst = f"{max(values):.3f}" if values else "-"
        share = used[name] / num_iterations
        lines.append(f"| {name} | {mean} | {worst} | {impossible[name]} | {share:.0%} |")
    command = f"python -m benchmarks.ablation --iterations {options.iterations}"
    if options.cases != parser.get_default("cases"):
        command += f" --cases '{options.cases}'"
    lines += ["", f"Command: `{command} --page docs/benchmarks/planner.md`."]
    print("\n".join(lines))
    if options.page:
        put_section(options.page, TITLE, "\n".join(lines))


if __name__ == "__main__":
    main()
