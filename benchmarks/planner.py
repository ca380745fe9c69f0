"""How fast and how good the planner is: python benchmarks/planner.py --data DATA [--json OUT.json].

DATA is the folder of the reference data (profiles/, lengths/, planner/). Every figure is a median
or mean over `--batches` global batches, planned in one process on one core.
docs/benchmarks/planner.md explains them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from one_pipeline import pack_sequences
from packers import MicroBatches, balanced, batch_rebalance, fixed_length

from ds_hydra.errors import InfeasiblePlanError
from ds_hydra.sampler.background import LOOKAHEAD, BackgroundPlanner
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.dispatch import dispatch_sequences
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings, PlanningTask
from ds_hydra.sampler.planner.problem import PipelineKind, SolverLimits
from ds_hydra.sampler.schedule import one_f_one_b_ms
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION, Scheme, Strategy, parse_strategies

CONTEXT = 32768
CANDIDATES = {
    64: [
        "4x<16,1>",
        "1x<16,1> + 2x<8,3>",
        "1x<16,1> + 6x<8,1>",
        "1x<16,1> + 12x<4,1>",
        "1x<8,3> + 10x<4,1>",
        "1x<8,1> + 14x<4,1>",
        "8x<4,2>",
    ],
    1024: [
        "64x<16,1>",
        "8x<16,1> + 112x<8,1>",
        "4x<16,1> + 120x<8,1>",
        "8x<16,1> + 224x<4,1>",
        "4x<16,1> + 240x<4,1>",
        "8x<16,1> + 8x<8,1> + 208x<4,1>",
        "4x<16,1> + 8x<8,3> + 192x<4,1>",
        "2x<16,1> + 8x<8,3> + 100x<4,2>",
    ],
    16384: [
        "64x<16,1> + 1920x<8,1>",
        "64x<16,1> + 3840x<4,1>",
        "128x<16,1> + 128x<8,1> + 3328x<4,1>",
        "64x<16,1> + 256x<8,1> + 3328x<4,1>",
    ],
}
TOKENS = {1024: 3_200_000, 16384: 51_000_000}


def draw_batches(
    histogram: dict[str, int], num_tokens: int, context: int, count: int
) -> list[list[int]]:
    """Global batches of `num_tokens`, drawn from a length histogram and cut to `context`."""
    rng = np.random.default_rng(0)
    lengths = np.array([int(length) for length in histogram])
    weights = np.array(list(histogram.values()), dtype=float)
    batches = []
    for _ in range(count):
        drawn = np.minimum(
            rng.choice(lengths, size=num_tokens // 300, p=weights / weights.sum()), context
        )
        batches.append(drawn[: np.searchsorted(np.cumsum(drawn), num_tokens)].tolist())
    return batches


def time_plan(
    batch: GlobalBatch,
    strategies: Sequence[Strategy],
    profile: Profile,
    num_devices: int,
    **settings: Any,
) -> tuple[IterationPlan, float]:
    start = time.perf_counter()
    plan = plan_iteration(
        batch,
        strategies=strategies,
        profile=profile,
        num_devices=num_devices,
        settings=PlannerSettings(**settings),
    )
    return plan, (time.perf_counter() - start) * 1e3


def whole_plans(batches: list[list[int]], num_devices: int, profile: Profile) -> dict[str, Any]:
    """Time of whole plans, their distance from their own bound, and which strategies were
    chosen.
    """
    strategies = parse_strategies(CANDIDATES[num_devices])
    plan_iteration(
        GlobalBatch.of_lengths(batches[0], 0),
        strategies=strategies,
        profile=profile,
        num_devices=num_devices,
    )
    times, gaps, chosen = [], [], {}
    for iteration, lengths in enumerate(batches):
        plan, milliseconds = time_plan(
            GlobalBatch.of_lengths(lengths, iteration), strategies, profile, num_devices
        )
        times.append(milliseconds)
        gaps.append(plan.makespan_ms / plan.lower_bound_ms - 1)
        chosen[str(plan.strategy)] = chosen.get(str(plan.strategy), 0) + 1
    return {
        "batches": len(batches),
        "median_ms": float(np.median(times)),
        "p95_ms": float(np.percentile(times, 95)),
        "mean_gap": float(np.mean(gaps)),
        "worst_gap": float(max(gaps)),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "chosen": chosen,
    }


def selection(batches: list[list[int]], profile: Profile) -> dict[str, Any]:
    """The chosen strategy against every candidate planned to the end, and against each used for all
    batches.

    All times by the recurrence; `closed_form_loss` is what selection by the closed form would have
    lost.
    """
    strategies = parse_strategies(CANDIDATES[64])
    losses, closed_losses, without_plan = [], [], 0
    total, totals = 0.0, dict.fromkeys(strategies, 0.0)
    for iteration, lengths in enumerate(batches):
        batch = GlobalBatch.of_lengths(lengths, iteration)
        chosen = time_plan(batch, strategies, profile, 64)[0].makespan_ms
        closed = time_plan(batch, strategies, profile, 64, objective="closed_form")[0]
        each = []
        for strategy in strategies:
            fits = max(lengths) <= max(
                profile.max_len_tokens(scheme, 64) for scheme in strategy.schemes
            )
            try:
                milliseconds = time_plan(batch, [strategy], profile, 64)[0].makespan_ms
            except InfeasiblePlanError:
                milliseconds = np.inf
                without_plan += fits
            each.append(milliseconds)
            totals[strategy] += milliseconds
        total += chosen
        losses.append(chosen / min(each) - 1)
        closed_losses.append(exact_ms(plan_micro_batches(closed), profile) / min(each) - 1)
    best_static = min(totals, key=lambda strategy: totals[strategy])
    return {
        "mean_loss": float(np.mean(losses)),
        "worst_loss": float(max(losses)),
        "closed_form_mean_loss": float(np.mean(closed_losses)),
        "closed_form_worst_loss": float(max(closed_losses)),
        "best_static": str(best_static),
        "speedup_over_best_static": totals[best_static] / total,
        "candidates_without_plan": without_plan,
    }


def plan_micro_batches(plan: IterationPlan) -> list[tuple[Scheme, MicroBatches]]:
    return [
        (
            pipeline.scheme,
            [list(plan.micro_batch_lengths(micro_batch)) for micro_batch in pipeline.micro_batches],
        )
        for pipeline in plan.pipelines
    ]


def exact_ms(pipelines: list[tuple[Scheme, MicroBatches]], profile: Profile) -> float:
    """Slowest pipeline by the 1F1B recurrence, micro-batches in the order given."""
    times = []
    for scheme, micro_batches in pipelines:
        latency = profile.get_latency(scheme)
        times.append(
            one_f_one_b_ms(
                np.array([latency.micro_batch_ms(micro_batch) for micro_batch in micro_batches]),
                scheme.pp,
                FORWARD_FRACTION,
            )
        )
    return max(times)


def packing_references(reference: dict[str, Any]) -> dict[str, float]:
    gaps, times, gaps_without = [], [], []
    for instance in reference["instances"]:
        arguments: dict[str, Any] = {
            "latency": latency_of(instance),
            "num_stages": instance["pp"],
            "max_len_tokens": instance["max_len"],
            "is_exact": False,
        }
        start = time.perf_counter()
        packing = pack_sequences(instance["lengths"], **arguments, limits=SolverLimits())
        times.append((time.perf_counter() - start) * 1e3)
        heuristic = pack_sequences(instance["lengths"], **arguments)
        gaps.append(packing.objective_ms / instance["best_known_objective_ms"] - 1)
        gaps_without.append(heuristic.objective_ms / instance["best_known_objective_ms"] - 1)
    return {
        **summary(gaps),
        "without_programs": summary(gaps_without),
        "median_ms": float(np.median(times)),
    }


def dispatch_references(reference: dict[str, Any]) -> dict[str, float]:
    gaps, times = [], []
    for instance in reference["instances"]:
        kinds = [
            PipelineKind(1, pipeline["pp"], pipeline["max_len"], latency_of(pipeline))
            for pipeline in instance["pipelines"]
        ]
        start = time.perf_counter()
        found = dispatch_sequences(instance["lengths"], kinds)
        times.append((time.perf_counter() - start) * 1e3)
        gaps.append(found.objective_ms / instance["best_known_objective_ms"] - 1)
    return {**summary(gaps), "median_ms": float(np.median(times))}


def summary(gaps: Sequence[float]) -> dict[str, Any]:
    return {"mean_gap": float(np.mean(gaps)), "worst_gap": float(max(gaps))}


def latency_of(document: dict[str, Any]) -> LatencyModel:
    return LatencyModel(
        quadratic_ms=document["quadratic_ms"],
        linear_ms=document["linear_ms"],
        constant_ms=document["constant_ms"],
    )


def waiting(batches: list[list[int]], profile: Profile, iteration_s: float) -> dict[str, float]:
    """How long training waits for plans when each iteration takes `iteration_s`, one worker,
    lookahead 4.
    """
    waited, start = 0.0, time.perf_counter()
    strategies = parse_strategies(CANDIDATES[64])
    task = PlanningTask(strategies=tuple(strategies), profile=profile, num_devices=64)
    with BackgroundPlanner(task) as planner:
        submitted = 0
        for iteration in range(len(batches)):
            while submitted < min(len(batches), iteration + LOOKAHEAD):
                planner.submit(GlobalBatch.of_lengths(batches[submitted], submitted))
                submitted += 1
            waited += planner.get(iteration).waited_ms
            if iteration == 0:  # the start of the process is not planning
                waited, start = 0.0, time.perf_counter()
            time.sleep(iteration_s)
    return {
        "iteration_s": iteration_s,
        "waited_share": waited / 1e3 / (time.perf_counter() - start),
    }


# What people use today, for the homogeneous strategies that can fit the context


def alternatives(batches: list[list[int]], profile: Profile) -> dict[str, Any]:
    """Mean iteration time of ds_hydra and of each alternative with its best homogeneous
    strategy.
    """
    packers: dict[str, Callable[[Sequence[int], int, int], list[MicroBatches]]] = {
        "first_fit_decreasing": lambda l, m, n: fixed_length(l, m, n, is_best_fit=False),
        "best_fit_decreasing": lambda l, m, n: fixed_length(l, m, n, is_best_fit=True),
        "karmarkar_karp_tokens": lambda l, m, n: balanced(l, m, n, float),
        "karmarkar_karp_tokens_squared": lambda l, m, n: balanced(l, m, n, lambda x: float(x) ** 2),
    }
    try:
        import transformers.trainer_pt_utils

        if hasattr(transformers.trainer_pt_utils, "BatchRebalanceSampler"):
            for num_micro_batches in (1, 2, 4, 8):
                name = f"transformers_batch_rebalance_{num_micro_batches}_micro_batches"
                packers[name] = partial(batch_rebalance, num_micro_batches=num_micro_batches)
    except ImportError:
        print("transformers is not installed: batch_rebalance is left out")
    strategies = parse_strategies(CANDIDATES[64])
    homogeneous = [
        (strategy.schemes[0], len(strategy.schemes))
        for strategy in strategies
        if not strategy.is_heterogeneous
        and profile.max_len_tokens(strategy.schemes[0], 64) >= CONTEXT
    ]
    ours = [
        time_plan(GlobalBatch.of_lengths(b, i), strategies, profile, 64)[0].makespan_ms
        for i, b in enumerate(batches)
    ]
    result: dict[str, Any] = {
        "ds_hydra": {"mean_ms": float(np.mean(ours)), "speedup_of_ds_hydra": 1.0}
    }
    for name, pack in packers.items():
        means = []
        for scheme, count in homogeneous:
            max_len = profile.max_len_tokens(scheme, 64)
            times = [
                exact_ms(
                    [(scheme, micro_batches) for micro_batches in pack(b, max_len, count)], profile
                )
                for b in batches
            ]
            means.append(float(np.mean(times)))
        result[name] = {
            "mean_ms": min(means),
            "speedup_of_ds_hydra": min(means) / float(np.mean(ours)),
        }
    return result


def measure(data: Path, count: int, count_largest: int) -> dict[str, Any]:
    def load(name: str) -> Any:
        return json.loads((data / name).read_text())

    profile = Profile.load(data / "profiles/a800_llama2_32b.json")
    histogram = load("lengths/commoncrawl.json")["counts"]
    corpora = {
        "commoncrawl": load("planner/cc_200K_ctx32K.json")["batches"][:count],
        "github": load("planner/gh_100K_ctx32K.json")["batches"][:count],
    }
    warm_up()
    return {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        },
        "plans_64": {name: whole_plans(batches, 64, profile) for name, batches in corpora.items()},
        "plans_1024": {
            "context 32K": whole_plans(
                draw_batches(histogram, TOKENS[1024], CONTEXT, count), 1024, profile
            ),
            "context 8K": whole_plans(
                draw_batches(histogram, TOKENS[1024], 8192, count), 1024, profile
            ),
        },
        "plans_16384": {
            "context 32K": whole_plans(
                draw_batches(histogram, TOKENS[16384], CONTEXT, count_largest), 16384, profile
            )
        },
        "selection": {name: selection(batches, profile) for name, batches in corpora.items()},
        "packing": packing_references(load("planner/reference_packing.json")),
        "dispatch": dispatch_references(load("planner/reference_dispatch.json")),
        "waiting": waiting(corpora["commoncrawl"], profile, 0.25),
        "alternatives": {name: alternatives(batches, profile) for name, batches in corpora.items()},
    }


def print_table(result: dict[str, Any]) -> None:
    def line(what: str, *figures: str) -> None:
        print(f"{what:<48} {'   '.join(figures)}")

    for size in ("plans_64", "plans_1024", "plans_16384"):
        for name, figures in result[size].items():
            line(
                f"{size} {name}",
                f"median {figures['median_ms']:.1f} ms",
                f"p95 {figures['p95_ms']:.1f} ms",
                f"gap to bound {figures['mean_gap']:.2%} (worst {figures['worst_gap']:.2%})",
                f"{figures['peak_memory_mib']} MiB",
            )
    for name, figures in result["selection"].items():
        line(
            f"selection {name}",
            f"loss {figures['mean_loss']:.3%} (worst {figures['worst_loss']:.3%})",
            f"by closed form {figures['closed_form_mean_loss']:.2%} "
            f"(worst {figures['closed_form_worst_loss']:.1%})",
            f"{figures['speedup_over_best_static']:.3f}x over {figures['best_static']}",
            f"without plan {figures['candidates_without_plan']}",
        )
    for name in ("packing", "dispatch"):
        figures = result[name]
        line(
            f"{name} against references",
            f"mean {figures['mean_gap']:.3%}",
            f"worst {figures['worst_gap']:.3%}",
            f"{figures['median_ms']:.1f} ms",
        )
    line("waiting for plans", f"{result['waiting']['waited_share']:.3%} of the run")
    for name, packers in result["alternatives"].items():
        for packer, figures in packers.items():
            line(
                f"{name}: {packer}",
                f"{figures['mean_ms']:.0f} ms per iteration",
                f"ds_hydra is {figures['speedup_of_ds_hydra']:.2f}x as fast",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    shared = Path(os.environ.get("DS_HYDRA_SHARED", "../shared"))
    parser.add_argument("--data", type=Path, default=shared / "data")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument(
        "--largest-batches", type=int, default=20, help="global batches at 16,384 GPUs"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    result = measure(arguments.data, arguments.batches, arguments.largest_batches)
    print_table(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
