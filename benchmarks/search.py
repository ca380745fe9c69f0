"""Figures of the layer-by-layer search: a Markdown table on stdout, all numbers in a JSON file.

Command: python -m benchmarks.search --out search.json     (one core is used)
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.galvatron_originals import (
    DUMMY_LAYERS,
    SLOWER,
    OriginalModel,
    SeveralNodes,
    activation_mb,
    later_repository_cases,
    parse_strategy,
    rtx_titan,
)
from benchmarks.pages import table
from ds_hydra.lab.search import (
    GalvatronSearch,
    LayerStrategy,
    SearchInput,
    SearchSettings,
    layer_strategies,
)
from ds_hydra.lab.search.galvatron import StagePlan, pipeline_ms
from ds_hydra.lab.search.layers import CostEstimator, LayerProfile
from tests.shared_data import shared_path


def counts() -> dict[str, int]:
    """Sizes of the decision trees on 8 devices."""
    ordered = strategies_of_space("dp_tp6")
    return {
        "before Takeaway #3": len(layer_strategies(8, mixes_dp_and_sdp=True)),
        "after": len(layer_strategies(8)),
        "without checkpointing": len(layer_strategies(8, checkpoints=False)),
        "DP+PP": len(strategies_of_space("dp_pp4")),
        "DP+TP": len(ordered),
        "DP+TP unordered": len({(s.tp, s.dp) for s in ordered}),
        **later_releases()["counts"],
    }


def later_releases() -> dict[str, Any]:
    """What our search found under the cost models of later releases, which are not rebuilt here any
    more.
    """
    return json.loads(Path("docs/benchmarks/galvatron_releases.json").read_text())


def strategies_of_space(space: str, num_devices: int = 8) -> list[LayerStrategy]:
    """The restricted spaces of Table II, or the full one of 2022."""
    full = layer_strategies(num_devices, checkpoints=False)
    single = {"DP": "1-1-8", "SDP": "1-1-8f", "TP": "1-8-1", "PP": "8-1-1"}
    if space in single:
        return [parse_strategy(single[space])]
    if space == "dp_tp6":
        return [s for s in full if s.pp == 1 and s.sdp == 1]
    if space == "dp_pp4":
        return [s for s in full if s.tp == 1 and s.sdp == 1]
    return full


def compare(ratios: Iterable[float | None]) -> dict[str, int]:
    """How often our plan costs the same as theirs, less, or more; None: one of the two has no
    plan.
    """
    found = list(ratios)
    return {
        "cases": len(found),
        "same": sum(r is not None and abs(r - 1) <= 1e-9 for r in found),
        "cheaper": sum(r is not None and r < 1 - 1e-9 for r in found),
        "dearer": sum(r is None or r > 1 + 1e-9 for r in found),
    }


def ratio(
    original: OriginalModel, space: str, memory_gb: float, result: dict[str, Any]
) -> float | None:
    """Our cost over theirs under their cost model; 1 where both find that nothing fits."""
    strategies = strategies_of_space(space, original.num_devices)
    found = original.search(strategies, result["bsz"], 1024 * memory_gb)
    if (found is None) != (result["time_s"] is None):
        return None
    return 1.0 if found is None else found[0] / 1e3 / result["time_s"]


def reference_cases(data: Path) -> dict[str, dict[str, int]]:
    """Search results of the originals, reached under their costs."""
    table = {}
    rtx = json.loads((data / "cases_rtx_titan.json").read_text())["models"]
    for model, cases in rtx.items():
        original = rtx_titan(data, model)
        table[f"{model}, 8 RTX TITAN, 7 spaces, all batch sizes"] = compare(
            ratio(original, space, result["max_mem_MB"] / 1024, result)
            for space, searched in cases["search"].items()
            for result in searched["results"]
        )
    for name, original, published in later_repository_cases(data):
        table[f"{name}, later repository"] = compare(
            ratio(original, "full", run["memory_GB"], result)
            for run in published["runs"]
            for result in run["all"]
        )
    table.update(later_releases()["cases"])
    return table


OTHER_RULES = {
    "Eq. 9: what synchronisation is left is added up over the stages": {"adds_up": True},
    "the longest counts, for a single micro-batch too": {"takes_longest": True},
    "sharded weights are gathered for every micro-batch": {"gathers": True},
}
"""What the estimates below would be with other rules than ours."""


def own_input(original: OriginalModel, *, gathers: bool = False) -> SearchInput:
    """The originals' profile for the package's own cost model."""
    layers = []
    for layer, count in zip(original.layers, original.counts, strict=True):
        timing = layer["time"]
        kept = {
            int(tp): float(size)
            for tp, size in layer["memory"]["tp_activation_per_bsz_dict"].items()
        }
        layers.append(
            LayerProfile(
                name=layer["name"],
                count=count,
                forward_ms=timing["forward_computation_time"] * SLOWER,
                weight_mb=timing["parameter_size"],
                states_mb=4 * timing["parameter_size"],
                activation_mb=kept,
                message_mb=activation_mb(layer, 1),
            )
        )
    links = {
        int(pp): {
            (int(group.split("_")[0]), not group.endswith("_0")): cost * SLOWER
            for group, cost in groups.items()
        }
        for pp, groups in original.links.items()
    }
    hops = original.point_to_point if isinstance(original, SeveralNodes) else {}
    return SearchInput(
        layers=layers,
        num_devices=original.num_devices,
        all_reduce_ms_per_mb=links,
        point_to_point_ms_per_mb={
            pp: hops.get(f"pp_deg_{pp}", 0.0) * SLOWER for pp in (2, 4, 8, 16)
        },
        overlap_slowdown=original.layers[0]["time"]["dp_overlap_coe"],
        gathers_each_micro_batch=gathers,
    )


def predicted_ms(
    original: OriginalModel,
    stages: Sequence[Sequence[LayerStrategy]],
    batch: int,
    *,
    adds_up: bool = False,
    takes_longest: bool = False,
    gathers: bool = False,
) -> float:
    """Our model's time of a plan, with the originals' number of micro-batches and fixed
    overhead.
    """
    given = own_input(original, gathers=gathers)
    costs, types = CostEstimator(given), iter(original.layer_types)
    pp, last = len(stages), stages[-1][-1]
    m = max(1.0, original.micro_batches(last, batch)) if pp > 1 else 1.0
    plans = []
    for index, strategies in enumerate(stages):
        layers = [given.layers[next(types)] for _ in strategies]
        found = [
            costs.layer_cost(*pair, batch / m) for pair in zip(layers, strategies, strict=True)
        ]
        sends = index + 1 < pp
        hop_ms = costs.hop_ms(layers[-1], pp, batch / m / strategies[-1].dp) if sends else 0.0
        plans.append(
            StagePlan(
                strategies=tuple(strategies),
                compute_ms=sum(cost.compute_ms for cost in found) + hop_ms,
                slowdown_ms=sum(cost.slowdown_ms for cost in found),
                tail_ms=sum(cost.tail_ms for cost in found),
                peak_mb=0.0,
            )
        )
    overhead_ms = (
        original.layers[0]["time"]["extra_overhead"] * sum(original.counts) / DUMMY_LAYERS * SLOWER
    )
    synchronises = any(strategy.dp > 1 for strategies in stages for strategy in strategies)
    tails = [plan.tail_ms for plan in plans]
    others_ms = sum(tails) - max(tails)
    left_ms = others_ms * (adds_up and m > 1) - others_ms * (takes_longest and m == 1)
    return pipeline_ms(plans, m) + left_ms + overhead_ms * synchronises


def read_stages(result: dict[str, Any]) -> list[list[LayerStrategy]]:
    """A published plan; one without `pp_division` is that of every stage."""
    stages = result["plan"] if result.get("pp_division") else [result["plan"]] * result["pp"]
    return [
        [parse_strategy(name) for name, count in stage for _ in range(count)] for stage in stages
    ]


def measured_plans(data: Path) -> Iterator[tuple[str, OriginalModel, dict[str, Any], float]]:
    """(row, model, published plan, measured samples/s): Table II, and Table III from 16 GPUs on."""
    cases = json.loads((data / "cases_rtx_titan.json").read_text())["models"]
    with (data / "table2_estimate_vs_measured.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["est_vs_measured_pct"]]
    for row in rows:
        model, batch, memory_mb = row["model"], int(row["paper_bsz"]), 1024 * int(row["memory_GB"])
        for result in cases[model]["search"][row["search_space"]]["results"]:
            if (result["bsz"], result["max_mem_MB"]) == (batch, memory_mb) and result["plan"]:
                measured = float(row["paper_measured_throughput"])
                yield f"Table II, {model}", rtx_titan(data, model), result, measured
    for name, original, published in later_repository_cases(data):
        if name.startswith("BERT-Huge-32, 8"):
            continue  # the same cells of Table II as above
        table = f"Table II, {name.split(',')[0]}" if original.num_devices == 8 else "Table III"
        for run in published["runs"]:
            if found := re.fullmatch(r"([\d.]+) \((\d+)\)", run["paper_measured_Galvatron_row"]):
                yield from (
                    (table, original, result, float(found[1]))
                    for result in run["all"]
                    if result["bsz"] == int(found[2])
                )


def estimation_errors(data: Path, **rules: bool) -> dict[str, dict[str, float]]:
    """Mean |predicted / measured - 1| in percent of the published plans: ours, with `rules`, and
    the originals'.
    """
    errors: dict[str, list[tuple[float, float]]] = {}
    for row, original, result, measured in measured_plans(data):
        time_ms = predicted_ms(original, read_stages(result), result["bsz"], **rules)
        ours, theirs = 1e3 * result["bsz"] / time_ms, result["bsz"] / result["time_s"]
        pair = (100 * abs(ours / measured - 1), 100 * abs(theirs / measured - 1))
        for name in dict.fromkeys((row, row.split(",")[0])):
            errors.setdefault(name, []).append(pair)
    return {
        name: {
            "points": len(pairs),
            "ours": mean(ours for ours, _ in pairs),
            "originals": mean(theirs for _, theirs in pairs),
            "worst ours": max(ours for ours, _ in pairs),
            "worst originals": max(theirs for _, theirs in pairs),
        }
        for name, pairs in sorted(errors.items())
    }


def search_seconds(num_layers: int = 96, memory_gb: float = 16) -> dict[str, float]:
    """CPU seconds for one batch size, and for all of them to 128 samples, on 8 devices with 44
    strategies.
    """
    kept = {1: 150.0, 2: 80.0, 4: 45.0, 8: 30.0}
    layer = LayerProfile(
        name="decoder",
        count=num_layers,
        forward_ms=1.2,
        weight_mb=100.0,
        states_mb=400.0,
        activation_mb=kept,
        message_mb=8.0,
    )
    degrees = (1, 2, 4, 8)
    given = SearchInput(
        layers=(layer,),
        num_devices=8,
        all_reduce_ms_per_mb={
            pp: {
                (n, c): 0.01 + 0.002 * (not c)
                for n in degrees[1:]
                for c in (True, False)
                if n * pp <= 8
            }
            for pp in degrees
        },
        point_to_point_ms_per_mb=dict.fromkeys(degrees, 0.01),
    )
    settings = SearchSettings(memory_mb=1024 * memory_gb, max_batch=128)
    GalvatronSearch(given, settings).best_of_batch(8)  # compiles
    seconds = {}
    for name, call in (
        ("one batch size (64)", lambda: GalvatronSearch(given, settings).best_of_batch(64)),
        ("batch sizes 8, 16, .., 128", lambda: GalvatronSearch(given, settings).best()),
    ):
        start = time.process_time()
        plan = call()
        seconds[name] = time.process_time() - start
        assert plan is not None
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    arguments = parser.parse_args()
    data = shared_path("galvatron")
    figures = {
        "counts": counts(),
        "reference_cases": reference_cases(data),
        "estimation_errors_percent": estimation_errors(data),
        "estimation_errors_percent_of_other_rules": {
            name: estimation_errors(data, **rules) for name, rules in OTHER_RULES.items()
        },
        "search_seconds": search_seconds(),
    }
    counted = figures["counts"]
    print(table(("strategies of one layer, 8 devices", "count"), counted.items()), end="\n\n")
    for what, key, columns, form in (
        ("reference cases", "reference_cases", ("cases", "same", "cheaper", "dearer"), "{}"),
        (
            "predicted against measured, %",
            "estimation_errors_percent",
            ("points", "ours", "originals", "worst ours", "worst originals"),
            "{:.3g}",
        ),
    ):
        rows = [
            (name, *(form.format(row[column]) for column in columns))
            for name, row in figures[key].items()
        ]
        print(table((what, *columns), rows), end="\n\n")
    rows = [
        (name, *(f"{errors[paper]['ours']:.1f}%" for paper in ("Table II", "Table III")))
        for name, errors in figures["estimation_errors_percent_of_other_rules"].items()
    ]
    print(table(("ours with another rule", "Table II", "Table III"), rows), end="\n\n")
    rows = [(name, f"{seconds:.2f}") for name, seconds in figures["search_seconds"].items()]
    print(table(("search, 96 layers, 8 devices, 16 GB, 44 strategies", "CPU seconds"), rows))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
