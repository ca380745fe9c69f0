"""What pulling layers again costs in time and saves in memory: iterations with and without it, in one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/repull.py

One engine for each value of `hydra.link.repull_layers`, with equal weights; their iterations alternate on the same
mini-batches and strategies (see overlap.py for model and lengths). Medians. Losses must be equal to the last bit. Bytes
are those of the rank that holds most: slices, and packed buffers of exchanges, as each strategy's plan states them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch.distributed as dist
from overlap import MODELS, begin, draw_batch, make_parser, report, start

import ds_hydra
from ds_hydra.strategy import Strategy

STRATEGIES = {
    2: ("2x<1,1>", "1x<2,1>", "1x<1,2>"),
    4: ("4x<1,1>", "2x<2,1>", "1x<2,2>", "2x<1,2>", "1x<1,2> + 2x<1,1>"),
}
FIELDS = ("iteration_ms", "measured_ms", "repull_ms", "visible_repull_ms")


def held_bytes(engine: ds_hydra.HydraEngine, strategy: str) -> dict[str, int]:
    """Slices and exchange buffers of the rank that holds most."""
    propagator = engine.hydra.propagator
    memory = propagator.link_memory(Strategy.parse(strategy))
    exchanged = memory.window_bytes + memory.staged_bytes + memory.serving_bytes
    return {
        "slice_bytes": int(propagator.max_over_ranks(memory.slice_bytes)),
        "gradient_bytes": int(propagator.max_over_ranks(memory.gradient_bytes)),
        "exchange_bytes": int(propagator.max_over_ranks(exchanged)),
    }


def measure(
    engines: dict[int | str, ds_hydra.HydraEngine], vocab_size: int, rounds: int, tokens: int
) -> Iterator[dict]:
    order = list(engines)
    for strategy in STRATEGIES[dist.get_world_size()]:
        seen: dict[int | str, list[list[float]]] = {wanted: [] for wanted in order}
        for round_ in range(rounds + 1):
            batch = draw_batch(vocab_size, tokens, seed=round_)
            losses = set()
            for wanted in order if round_ % 2 else reversed(order):
                dist.barrier()
                losses.add(float(engines[wanted].train_batch(batch, strategy=strategy)))
                if round_:  # the first round warms up
                    metrics = engines[wanted].last_metrics
                    seen[wanted].append([getattr(metrics, name) for name in FIELDS])
            assert len(losses) == 1, f"losses differ: {losses}"
        row: dict = {"strategy": strategy, "values": {}}
        for wanted in order:
            medians = [statistics.median(column) for column in zip(*seen[wanted], strict=True)]
            pairs = zip(seen[wanted], seen[order[0]], strict=True)
            row["values"][str(wanted)] = {
                **{name: round(value, 1) for name, value in zip(FIELDS, medians, strict=True)},
                "iteration_ratio": round(statistics.median(on[0] / off[0] for on, off in pairs), 3),
                **held_bytes(engines[wanted], strategy),
            }
        yield row


HEAD = f"{'strategy':<20} {'again':>6} {'slices, MB':>10} {'wire, MB':>10} {'ms':>10} {'waited, ms':>10} {'ratio':>8}"


def format_row(row: dict) -> str:
    return "\n".join(
        f"{row['strategy']:<20} {wanted:>6} {found['slice_bytes'] / 1e6:>10.1f} "
        f"{found['exchange_bytes'] / 1e6:>10.1f} {found['iteration_ms']:>10.0f} "
        f"{found['visible_repull_ms']:>10.0f} {found['iteration_ratio']:>8.2f}"
        for wanted, found in row["values"].items()
    )


def main() -> None:
    parser = make_parser(__doc__, model="50M", rounds=6)
    parser.add_argument("--repull-layers", nargs="+", default=["6", "all"], help="values beside 0")
    args = parser.parse_args()
    begin()
    values: list[int | str] = [0, *(v if v == "all" else int(v) for v in args.repull_layers)]
    strategies = STRATEGIES[dist.get_world_size()]
    engines = {v: start(args.model, args.dtype, strategies, {"repull_layers": v}) for v in values}
    rows = measure(engines, MODELS[args.model]["vocab_size"], args.rounds, args.tokens)
    report(args, HEAD, rows, format_row)
    for engine in engines.values():
        engine.destroy()


if __name__ == "__main__":
    main()
