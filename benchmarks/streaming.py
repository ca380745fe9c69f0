"""What streaming costs in time and saves in memory: iterations with and without it, in one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/streaming.py

One engine; iterations of both sides alternate on the same mini-batches (see overlap.py for model
and lengths). Medians. Bytes are those of the rank that holds most, as each strategy's plan states
them. The pull of a streamed strategy (every rank's shards into the home, and a barrier) is compared
with ZeRO-3's own all-gather of all layers, alternated too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from link_memory import link_memory
from overlap import MODELS, begin, draw_batch, make_parser, report, start

import ds_hydra
from ds_hydra.strategy import Strategy

PAIRS = {
    2: (("2x<1,1>", "2x<1,1;stream>"), ("1x<2,1>", "1x<2,1;stream>")),
    4: (
        ("4x<1,1>", "4x<1,1;stream>"),
        ("2x<2,1>", "2x<2,1;stream>"),
        ("1x<sp2,1> + 2x<1,1>", "1x<sp2,1;stream> + 2x<1,1;stream>"),
        ("2x<1,2>", "2x<1,2;stream>"),
    ),
}


def held_bytes(engine: ds_hydra.HydraEngine, strategy: str) -> dict[str, int]:
    """Slices, gradients and exchange buffers of the rank that holds most."""
    propagator = engine.hydra.propagator
    memory = link_memory(propagator.links, Strategy.parse(strategy))
    return {
        "slice_bytes": int(propagator.max_over_ranks(memory.slice_bytes)),
        "gradient_bytes": int(propagator.max_over_ranks(memory.gradient_bytes)),
        "exchange_bytes": int(
            propagator.max_over_ranks(memory.exchange_bytes + memory.relayed_bytes)
        ),
    }


def timed(action: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    action()
    dist.barrier()
    return (time.perf_counter() - begun) * 1e3


def measure_pull(engine: ds_hydra.HydraEngine, rounds: int) -> dict[str, float]:
    """Milliseconds in which a home is filled, and of ZeRO-3's all-gather of the same parameters."""
    propagator = engine.hydra.propagator
    units = [
        [propagator.stage_model.params[b.param] for b in unit.bindings]
        for unit in propagator.stage_model.units
    ]

    def all_gather() -> None:
        for params in units:
            params[0].all_gather_coalesced(params).wait()
            for param in params:
                param.partition()

    assert propagator.links.home is not None
    home, shards_P = propagator.links.home, propagator.links.shards_P()
    sides = {"pull_ms": lambda: home.fill(shards_P), "all_gather_ms": all_gather}
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(2 * rounds + 1):
        for name, action in sides.items():
            elapsed = timed(action)
            if round_:
                seen[name].append(elapsed)
    found = {name: round(statistics.median(values), 2) for name, values in seen.items()}
    return {**found, "ratio": round(found["pull_ms"] / found["all_gather_ms"], 3)}


def measure(
    engine: ds_hydra.HydraEngine,
    pairs: Sequence[tuple[str, str]],
    vocab_size: int,
    rounds: int,
    tokens: int,
) -> Iterator[dict]:
    for pair in pairs:
        seen: dict[str, list[float]] = {strategy: [] for strategy in pair}
        for round_ in range(rounds + 1):
            batch = draw_batch(vocab_size, tokens, seed=round_)
            for strategy in pair if round_ % 2 else reversed(pair):
                dist.barrier()
                engine.train_batch(batch, strategy=strategy)
                if round_:  # the first round warms up
                    seen[strategy].append(engine.last_metrics.iteration_ms)
        without, with_ = pair
        ratios = [on / off for on, off in zip(seen[with_], seen[without], strict=True)]
        held = {strategy: held_bytes(engine, strategy) for strategy in pair}
        kept = [held[s]["slice_bytes"] + held[s]["gradient_bytes"] for s in pair]
        yield {
            "strategy": with_,
            "against": without,
            "iteration_ms": {s: round(statistics.median(seen[s]), 1) for s in pair},
            "iteration_ratio": round(statistics.median(ratios), 3),
            "iteration_ratios": [round(ratio, 3) for ratio in ratios],
            "bytes": held,
            "memory_ratio": round(kept[1] / kept[0], 3),
        }


HEAD = f"{'strategy':<36} {'without, ms':>12} {'with, ms':>10} {'ratio':>7} {'slices + gradients, MB':>24} {'ratio':>7}"


def format_row(row: dict) -> str:
    if "pull_ms" in row:
        return (
            f"pull {row['pull_ms']} ms, all-gather {row['all_gather_ms']} ms, ratio {row['ratio']}"
        )
    times = row["iteration_ms"].values()
    megabytes = [
        (held["slice_bytes"] + held["gradient_bytes"]) / 1e6 for held in row["bytes"].values()
    ]
    without, with_ = times
    return (
        f"{row['strategy']:<36} {without:>12.0f} {with_:>10.0f} {row['iteration_ratio']:>7.2f} "
        f"{megabytes[0]:>15.1f} {megabytes[1]:>8.1f} {row['memory_ratio']:>7.2f}"
    )


def main() -> None:
    parser = make_parser(__doc__, model="50M", rounds=6)
    parser.add_argument("--pairs", type=int, default=9, help="how many of the comparisons")
    args = parser.parse_args()
    begin()
    pairs = PAIRS[dist.get_world_size()][: args.pairs]
    strategies = [strategy for pair in pairs for strategy in pair]
    engine = start(args.model, args.dtype, strategies, {})

    def rows() -> Iterator[dict]:
        vocab_size = MODELS[args.model]["vocab_size"]
        yield from measure(engine, pairs, vocab_size, args.rounds, args.tokens)
        yield measure_pull(engine, args.rounds)

    report(args, HEAD, rows(), format_row)
    engine.destroy()


if __name__ == "__main__":
    main()
