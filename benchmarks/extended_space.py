"""Schemes with checkpointed layers and sequence parallelism beside <TP,PP>: planned time on the
paper's cases.

    python -m benchmarks.extended_space [--iterations 30] [--cases github-32b] [--out
    extended_space.json]

For each case of Fig. 10 (F2) and corpus: the candidates that ds_hydra proposes in the plain space,
those that it proposes in the wide one ("proposed"), and sets made by hand with the first ones in
them, in which the schemes of one kind are exchanged for variants on the same devices. The planner
takes the best of each set for every mini-batch, other ones than those of the proposal; times are
those of propagation that it plans with. Nothing is measured: T is published for A800; a
checkpointed layer adds a third, T under SP is estimated from TP (docs/cost-model.md).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.sampler.planner import plan_iteration
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.sampler.propose import propose_strategies
from ds_hydra.sampler.trial import PruningSettings
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.simulator.cases import list_cases, load_case
from ds_hydra.simulator.workload import Workload, draw_batches
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.profiles.sequence_parallel import with_estimates

SETTINGS = PlannerSettings(solver="none")
KINDS = ("ckpt", "sp", "both")
SETS = (*KINDS, "proposed")


def variants(scheme: Scheme, num_layers: int, kind: str) -> Iterator[Scheme]:
    """Schemes on as many devices: some or all layers checkpointed, or TP exchanged for SP, or
    both.
    """
    ckpts = sorted({num_layers // 4, num_layers // 2, num_layers})
    if kind in ("ckpt", "both"):
        yield from (Scheme(scheme.tp, scheme.pp, ckpt=ckpt) for ckpt in ckpts)
    for sp in (2, 4, 8):
        if kind != "ckpt" and scheme.tp % sp == 0:
            yield Scheme(scheme.tp // sp, scheme.pp, sp=sp)
            if kind == "both":
                yield from (Scheme(scheme.tp // sp, scheme.pp, sp=sp, ckpt=ckpt) for ckpt in ckpts)


def widen(
    strategies: Sequence[Strategy], profile: Profile, num_devices: int, kind: str
) -> tuple[Strategy, ...]:
    """`strategies`, and each with the schemes of one kind exchanged."""
    found = dict.fromkeys(strategies)
    for strategy in strategies:
        for scheme in dict.fromkeys(strategy.schemes):
            for variant in variants(scheme, profile.memory.num_layers, kind):
                found[Strategy(tuple(variant if s == scheme else s for s in strategy.schemes))] = (
                    None
                )
    known = with_estimates(profile, found)

    def is_usable(scheme: Scheme) -> bool:
        knows = known.has_latency(scheme) and known.memory.knows(scheme)
        return knows and known.max_len_tokens(scheme, num_devices) > 0

    return tuple(s for s in found if all(map(is_usable, s.schemes)))


def measure(name: str, iterations: int) -> dict[str, Any]:
    """Planned times of one case under the proposal and under each extended set, on the same
    mini-batches.
    """
    workload: Workload = load_case(name).workload
    profile, num_devices = workload.profile, workload.num_devices
    shape = {
        "num_devices": num_devices,
        "context_length": workload.context_length,
        "tokens_per_iteration": workload.tokens_per_iteration,
    }
    pruning = PruningSettings(max_communicators=4 * num_devices)
    start = time.process_time()
    plain = propose_strategies(
        profile, workload.histogram, **shape, pruning=pruning, space="plain"
    ).strategies
    plain_s, start = time.process_time() - start, time.process_time()
    wide = propose_strategies(
        profile, workload.histogram, **shape, pruning=pruning, space="wide"
    ).strategies
    wide_s = time.process_time() - start
    histogram = workload.histogram.limit(workload.context_length)
    batches = draw_batches(histogram, workload.tokens_per_iteration, iterations, 1)
    sets = {"plain": plain} | {kind: widen(plain, profile, num_devices, kind) for kind in KINDS}
    sets["proposed"] = wide
    row: dict[str, Any] = {
        "case": name,
        "candidates": {kind: len(found) for kind, found in sets.items()},
    }
    row |= {"plain_proposal_cpu_s": plain_s, "wide_proposal_cpu_s": wide_s}
    times: dict[str, np.ndarray] = {}
    for kind, strategies in sets.items():
        known = with_estimates(profile, strategies)
        plans = [
            plan_iteration(
                b, strategies=strategies, profile=known, num_devices=num_devices, settings=SETTINGS
            )
            for b in batches
        ]
        times[kind] = np.array([plan.makespan_ms for plan in plans])
        chosen = [s for plan in plans for s in plan.strategy.schemes]
        row[f"{kind}_share"] = float(np.mean([not s.is_plain for s in chosen]))
    for kind in SETS:
        row[kind] = float(times["plain"].sum() / times[kind].sum())
        row[f"{kind}_worst_batch"] = float((times["plain"] / times[kind]).min())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--cases", default="", help="part of the names of the cases to run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [n for n in list_cases() if n.startswith("paper/") and n.endswith("-f2")]
    names = [n for n in cases if options.cases in n]
    if not names:
        parser.error(f"--cases {options.cases}: none of {', '.join(cases)}")
    warm_up()
    print(
        "| case | candidates: plain, by hand, proposed | CKPT | SP | both | proposed | with options "
        "| worst mini-batch | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for name in names:
        row = measure(name, options.iterations)
        rows.append(row)
        counts = ", ".join(str(row["candidates"][kind]) for kind in ("plain", "both", "proposed"))
        print(
            f"| {name.removeprefix('paper/')} | {counts} "
            f"| {row['ckpt']:.3f} | {row['sp']:.3f} | {row['both']:.3f} | {row['proposed']:.3f} "
            f"| {row['proposed_share']:.0%} | {row['proposed_worst_batch']:.3f} "
            f"| {row['plain_proposal_cpu_s']:.1f}, {row['wide_proposal_cpu_s']:.1f} |",
            flush=True,
        )
    means = {kind: prod(row[kind] for row in rows) ** (1 / len(rows)) for kind in SETS}
    print("| geometric mean | | " + " | ".join(f"{means[kind]:.3f}" for kind in SETS) + " | | | |")
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, "means": means}, indent=1) + "\n")


if __name__ == "__main__":
    main()
