"""Schemes with checkpointed layers and sequence parallelism beside <TP,PP>: planned time on the paper's cases.

    python -m benchmarks.wider_space [--iterations 30] [--out wider_space.json]

For each case of Fig. 10 (F2) and corpus: the candidates that ds_hydra proposes, and a wider set with them in it, in
which the schemes of one kind are exchanged for variants on the same devices. The planner takes the best of each set for
every mini-batch; times are those of propagation that it plans with. Nothing is measured: T is published for A800; a
checkpointed layer adds a third, T under SP is estimated from TP (docs/cost-model.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.sampler.planner import PlannerSettings, plan_iteration
from ds_hydra.sampler.propose import PruningSettings, propose_strategies
from ds_hydra.simulator.cases import list_cases, load_case
from ds_hydra.simulator.compare import Workload, draw_batches
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.sequence_parallel import with_estimates

SETTINGS = PlannerSettings(solver="none")
KINDS = ("ckpt", "sp", "both")


def variants(scheme: Scheme, num_layers: int, kind: str) -> Iterator[Scheme]:
    """Schemes on as many devices: some or all layers checkpointed, or TP exchanged for SP, or both."""
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
                found[Strategy(tuple(variant if s == scheme else s for s in strategy.schemes))] = None
    known = with_estimates(profile, found)

    def is_usable(scheme: Scheme) -> bool:
        knows = known.has_latency(scheme) and known.memory.knows(scheme)
        return knows and known.max_len_tokens(scheme, num_devices) > 0

    return tuple(s for s in found if all(map(is_usable, s.schemes)))


def measure(name: str, iterations: int) -> dict[str, Any]:
    """Planned times of one case under the proposal and under each wider set, on the same mini-batches."""
    workload: Workload = load_case(name).workload
    profile, num_devices = workload.profile, workload.num_devices
    shape = {
        "num_devices": num_devices,
        "context_length": workload.context_length,
        "tokens_per_iteration": workload.tokens_per_iteration,
    }
    pruning = PruningSettings(max_communicators=4 * num_devices)
    proposal = propose_strategies(profile, workload.histogram, **shape, pruning=pruning)
    proposed = tuple(kept.strategy for kept in proposal.kept)
    histogram = workload.histogram.limit(workload.context_length)
    batches = draw_batches(histogram, workload.tokens_per_iteration, iterations, 1)
    sets = {"plain": proposed} | {kind: widen(proposed, profile, num_devices, kind) for kind in KINDS}
    row: dict[str, Any] = {"case": name, "candidates": {kind: len(found) for kind, found in sets.items()}}
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
    for kind in KINDS:
        row[kind] = float(times["plain"].sum() / times[kind].sum())
        row[f"{kind}_worst_batch"] = float((times["plain"] / times[kind]).min())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [n for n in list_cases() if n.startswith("paper/") and n.endswith("-f2")]
    print("| case | candidates | wider | CKPT | SP | both | schemes with parts | worst mini-batch |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in names:
        row = measure(name, options.iterations)
        rows.append(row)
        print(
            f"| {name.removeprefix('paper/')} | {row['candidates']['plain']} | {row['candidates']['both']} "
            f"| {row['ckpt']:.3f} | {row['sp']:.3f} | {row['both']:.3f} | {row['both_share']:.0%} "
            f"| {row['both_worst_batch']:.3f} |",
            flush=True,
        )
    means = {kind: prod(row[kind] for row in rows) ** (1 / len(rows)) for kind in KINDS}
    print("| geometric mean | | | " + " | ".join(f"{means[kind]:.3f}" for kind in KINDS) + " | | |")
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, "means": means}, indent=1) + "\n")


if __name__ == "__main__":
    main()
