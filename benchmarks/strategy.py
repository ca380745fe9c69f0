"""Figures of the cost models and of the proposal: a Markdown table on stdout, all numbers in a JSON
file.

Command: python -m benchmarks.strategy --batches 6 --out strategy.json     (one core is used)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import table
from ds_hydra.configs import find_file
from ds_hydra.configs.files import read_json_object
from ds_hydra.configs.hydra_config import Space
from ds_hydra.lab.whole_iteration import (
    IterationSetup,
    MeasuredIteration,
    fit_iterations,
    predict_iteration,
)
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.propose import propose_strategies
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.analytic import Hardware, ModelShape, predict_latency
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.enumeration import full_strategies

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rubick import AUTHORS_MEAN_ERROR, fit_points, validation_points
from shared_data import shared_path

MODELS = ("7b", "13b", "32b")
HISTOGRAMS = ("commoncrawl", "github")
CONTEXT = 32768
SPACES: tuple[Space, ...] = ("plain", "full")


def profile_of(model: str) -> Profile:
    return Profile.load(find_file("profiles", f"a800_llama2_{model}"))


def histogram_of(name: str) -> LengthHistogram:
    return LengthHistogram.load(find_file("lengths", name))


def best_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Shortest of several runs after one that compiles; other work on the machine only adds."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def proposal_seconds(model: str, histogram: str, num_devices: int, space: Space = "plain") -> float:
    """The whole proposal: in the wide space with deriving its schemes and phases."""
    profile, lengths = profile_of(model), histogram_of(histogram)
    cluster = find_cluster(profile, num_devices)
    settings = CandidateSettings(
        num_devices=num_devices, context_length=CONTEXT, tokens_per_iteration=200_000 * num_devices // 64,
        space=space, cluster=cluster, max_enumerated=0,
    )  # fmt: skip
    return best_seconds(lambda: decide_candidates(profile, lengths, settings))


def against_all_strategies(histogram: str, num_batches: int) -> dict[str, float]:
    """Mean planned time of new global batches with the proposed set and with every strategy of 8
    devices.
    """
    profile, tokens = profile_of("7b"), 100_000
    lengths = histogram_of(histogram).limit(CONTEXT)
    proposal = propose_strategies(
        profile,
        lengths,
        CandidateSettings(
            num_devices=8, context_length=CONTEXT, tokens_per_iteration=tokens, num_batches=16
        ),
    )  # fmt: skip
    every = full_strategies(usable_schemes(World.of(profile, None, 8, 1)), 8, 1 << 20)
    times: dict[str, list[float]] = {"proposed": [], "every": []}
    for index, drawn in enumerate(lengths.draw_batches(tokens, num_batches, seed=1234)):
        batch = GlobalBatch.of_lengths(drawn.tolist(), index)
        for name, strategies in (("proposed", proposal.strategies), ("every", every)):
            plan = plan_iteration(batch, strategies=strategies, profile=profile, num_devices=8)
            times[name].append(plan.makespan_ms)
    return {
        "proposed_ms": float(np.mean(times["proposed"])),
        "every_ms": float(np.mean(times["every"])),
        "num_proposed": len(proposal.strategies),
        "num_every": len(every),
    }


def max_len_errors() -> dict[str, float]:
    """Largest relative difference to the published MaxLen values of 4,096 tokens or more."""
    errors: dict[str, list[float]] = {"max_len_paper_formula": [], "max_len_authors_code": []}
    for model in MODELS:
        document = read_json_object(shared_path(f"profiles/a800_llama2_{model}.json"))
        profile = Profile.from_json(document)
        for case in document["max_len_reference"]:
            for entry in case["schemes"]:
                found = profile.max_len_tokens(
                    Scheme(entry["tp"], entry["pp"]), case["num_devices"]
                )
                for name, collected in errors.items():
                    if entry[name] >= 4096:
                        collected.append(abs(found / entry[name] - 1))
    return {name: max(collected) for name, collected in errors.items()}


def analytic_errors() -> dict[str, dict[str, list[float]]]:
    """Relative errors of a, b and c per model and scheme; a published 0 is left out."""
    hardware = Hardware.from_json(read_json_object(find_file("hardware", "a800")))
    errors: dict[str, dict[str, list[float]]] = {}
    for model in MODELS:
        profile = profile_of(model)
        names = ("num_layers", "hidden_size", "intermediate_size", "vocab_size")
        shape = ModelShape(**{name: profile.document["model"][name] for name in names})
        errors[model] = {"quadratic_ms": [], "linear_ms": [], "constant_ms": []}
        for scheme, known in profile.latency.items():
            found = predict_latency(shape, hardware, scheme)
            for term, collected in errors[model].items():
                if getattr(known, term) > 0:
                    collected.append(getattr(found, term) / getattr(known, term) - 1)
    return errors


def rubick_errors() -> dict[str, float]:
    """Mean absolute error in percent over the originals' validation points, after their fit
    points.
    """
    errors = {}
    for model in (*AUTHORS_MEAN_ERROR, "llama7b", "llama30b"):
        fitted = fit_iterations(fit_points(model)).model
        errors[model] = mean_error(
            [(predict_iteration(fitted, s).total_ms, t) for _, s, t, _ in validation_points(model)]
        )
    for model in ("llama7b", "llama30b"):
        errors[f"{model}, 3D plans, leave one out"] = leave_one_out(model)
    return errors


def kind_of(setup: IterationSetup) -> str:
    """What a plan must be seen of to be known."""
    if setup.is_3d:
        return "3D"
    return "offload" if setup.is_offloaded else "ZeRO" if setup.is_sharded else "DP"


def leave_one_kind_out() -> dict[str, dict[str, float]]:
    """Mean error in percent of each kind of plan: after the originals' fit points, after all points
    but those of this kind, and the originals' own.
    """
    errors = {}
    for model in (*AUTHORS_MEAN_ERROR, "llama7b"):  # llama30b has one kind
        validation, fitted = validation_points(model), fit_iterations(fit_points(model)).model
        measured = [MeasuredIteration(setup=s, iteration_ms=t) for _, s, t, _ in validation]
        for kind in sorted({kind_of(setup) for _, setup, _, _ in validation}):
            points = [p for p in (*fit_points(model), *measured) if kind_of(p.setup) != kind]
            without = fit_iterations(points).model
            these = [(s, t, p) for _, s, t, p in validation if kind_of(s) == kind]
            errors[f"{model}, {kind}"] = {
                "fitted": mean_error(
                    [(predict_iteration(fitted, s).total_ms, t) for s, t, _ in these]
                ),
                "without": mean_error(
                    [(predict_iteration(without, s).total_ms, t) for s, t, _ in these]
                ),
                "originals": mean_error([(p, t) for _, t, p in these]),
            }
    return errors


def leave_one_out(model: str) -> float:
    """Error of each 3D plan after a fit to the other ones; their forward times are given, as in the
    data.
    """
    points = [(s, t) for _, s, t, _ in validation_points(model) if s.is_3d]
    pairs = []
    for index, (setup, measured) in enumerate(points):
        rest = [
            MeasuredIteration(setup=s, iteration_ms=t)
            for i, (s, t) in enumerate(points)
            if i != index
        ]
        pairs.append((predict_iteration(fit_iterations(rest).model, setup).total_ms, measured))
    return mean_error(pairs)


def mean_error(pairs: list[tuple[float, float]]) -> float:
    return float(100 * np.mean([abs(found / measured - 1) for found, measured in pairs]))


def measure(num_batches: int) -> dict[str, Any]:
    return {
        "max_len_errors": max_len_errors(),
        "analytic_errors": analytic_errors(),
        "rubick_mean_error_pct": rubick_errors(),
        "rubick_leave_one_kind_out_pct": leave_one_kind_out(),
        "proposal_s": {
            f"32b {name} {n} devices, {space}": proposal_seconds("32b", name, n, space)
            for space in SPACES
            for n in (64, 1024)
            for name in HISTOGRAMS
        },
        "against_all": {name: against_all_strategies(name, num_batches) for name in HISTOGRAMS}
        if num_batches
        else {},
    }


def as_tables(found: dict[str, Any]) -> str:
    """Markdown."""
    rows = [(f"proposal, {name}", f"{value:.2f} s") for name, value in found["proposal_s"].items()]
    for name, times in found["against_all"].items():
        what = f"7B on 8 devices, {name}: {times['num_proposed']:.0f} proposed against all"
        ratio = times["proposed_ms"] / times["every_ms"]
        rows.append((f"{what} {times['num_every']:.0f} strategies", f"{ratio - 1:+.2%}"))
    for name, value in found["max_len_errors"].items():
        rows.append((f"MaxLen against {name}", f"{value:.2%}"))
    for model, terms in found["analytic_errors"].items():
        for term, errors in terms.items():
            size = np.abs(errors)
            figures = f"{np.median(size):.1%}, {max(size):.1%}"
            rows.append((f"roofline, {model}, {term}: median, worst", figures))
    for model, error in found["rubick_mean_error_pct"].items():
        theirs = f" (originals {AUTHORS_MEAN_ERROR[model]})" if model in AUTHORS_MEAN_ERROR else ""
        rows.append((f"Rubick, {model}, mean error", f"{error:.2f}%{theirs}"))
    kinds = [
        (name, *(f"{row[key]:.1f}%" for key in ("fitted", "without", "originals")))
        for name, row in found["rubick_leave_one_kind_out_pct"].items()
    ]
    return "\n\n".join(
        [
            table(("figure", "measured"), rows),
            table(("Rubick, kind of plan", "fitted", "without this kind", "originals"), kinds),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batches",
        type=int,
        default=6,
        help="global batches for the exhaustive comparison, 0: none",
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file with all numbers")
    arguments = parser.parse_args()
    found = measure(arguments.batches)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(as_tables(found))


if __name__ == "__main__":
    main()
