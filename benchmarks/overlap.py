"""What overlap hides, and what streaming costs and saves: iterations with and without, in one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/overlap.py [--streaming]

Iterations of both sides alternate on the same engine and mini-batches; medians. Model and token
budget are the demo's; lengths are drawn from a log-normal with the demo's median of 145 tokens, cut
at 4,096. `--model 50M` takes a larger model, of which a link has more to move.

Without an option: visible pull and push as a share of the iteration, with and without overlap.
`--streaming`: time and memory of strategies whose layers stream against the same without. Bytes are
those of the rank that holds most, as each strategy's plan states them. The pull of a streamed
strategy (every rank's shards into the home, and a barrier) is compared with ZeRO-3's own all-gather
of all layers, alternated too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra
from ds_hydra.engine.telemetry.metrics import IterationMetrics
from ds_hydra.engine.transfer.link_session import LinkThread
from ds_hydra.strategy import Strategy

STRATEGIES = {
    2: ("2x<1,1>", "1x<2,1>", "1x<1,2>"),
    4: (
        "4x<1,1>",
        "2x<2,1>",
        "1x<4,1>",
        "1x<2,2>",
        "1x<1,4>",
        "1x<2,1> + 2x<1,1>",
        "1x<1,2> + 2x<1,1>",
    ),
}

MODELS = {
    "demo": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    },
    "50M": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 13,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 8192,
    },
}

FIELDS = ("iteration_ms", "pull_ms", "push_ms", "visible_pull_ms", "visible_push_ms")


def start(args: argparse.Namespace, strategies: Sequence[str]) -> ds_hydra.HydraEngine:
    """An engine for `strategies`; equal weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **MODELS[args.model], max_position_embeddings=4096, tie_word_embeddings=False
    )
    engine, *_ = ds_hydra.initialize(
        model=LlamaForCausalLM(config),
        config={
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": args.dtype == "bf16"},
            "steps_per_print": 10**6,
            "hydra": {
                "context_length": 4096,
                "tokens_per_iteration": 6144,
                "strategies": list(strategies),
            },
        },
    )
    return engine


def draw_batch(vocab_size: int, budget: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of up to `budget` tokens in all, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    batch: list[dict[str, torch.Tensor]] = []
    left = budget
    while left > 1:
        length = int(145 * float(torch.randn((), generator=generator).exp()))
        length = max(2, min(length, 4096, left))
        batch.append({"input_ids": torch.randint(0, vocab_size, (length,), generator=generator)})
        left -= length
    return batch


def run_sides(
    engine: ds_hydra.HydraEngine,
    sides: Mapping[str, Callable[[list], object]],
    args: argparse.Namespace,
) -> dict[str, list[IterationMetrics]]:
    """Metrics of `--rounds` iterations of each side, alternated on the same mini-batches; one more,
    the first, warms up.
    """
    seen: dict[str, list[IterationMetrics]] = {side: [] for side in sides}
    for round_ in range(args.rounds + 1):
        batch = draw_batch(MODELS[args.model]["vocab_size"], args.tokens, seed=round_)
        for side in sides if round_ % 2 else reversed(sides):
            dist.barrier()
            sides[side](batch)
            if round_:
                seen[side].append(engine.last_metrics)
    return seen


def iteration_ratios(seen: Mapping[str, list[IterationMetrics]]) -> list[float]:
    """Time with over time without, of each pair of iterations."""
    without, with_ = seen.values()
    return [on.iteration_ms / off.iteration_ms for off, on in zip(without, with_, strict=True)]


# Overlap: one strategy, with the link's thread and without.


def measure_overlap(engine: ds_hydra.HydraEngine, args: argparse.Namespace) -> Iterator[dict]:
    links = engine.hydra.propagator.links
    threads = {
        side: LinkThread(engine.device, overlap=side == "with") for side in ("without", "with")
    }
    for strategy in STRATEGIES[dist.get_world_size()]:

        def train(batch: list, side: str, strategy: str = strategy) -> None:
            links.thread = threads[side]
            engine.train_batch(batch, strategy=strategy)

        seen = run_sides(engine, {side: partial(train, side=side) for side in threads}, args)
        row: dict = {"strategy": strategy}
        for side, metrics in seen.items():
            shares = [(m.visible_pull_ms + m.visible_push_ms) / m.iteration_ms for m in metrics]
            row[side] = {
                **{
                    name: round(statistics.median(getattr(m, name) for m in metrics), 1)
                    for name in FIELDS
                },
                "visible_share": round(statistics.median(shares), 4),
            }
        row["iteration_ratio"] = round(statistics.median(iteration_ratios(seen)), 3)
        yield row


OVERLAP_HEAD = (
    f"{'':<20} {'visible link time / iteration':>30}   {'iteration':>24}\n"
    f"{'strategy':<20} {'without':>15} {'with overlap':>14}   {'without, ms':>12} {'with / without':>15}"
)


def format_overlap(row: dict) -> str:
    off, on = row["without"], row["with"]
    return (
        f"{row['strategy']:<20} {off['visible_share']:>15.1%} {on['visible_share']:>14.1%}   "
        f"{off['iteration_ms']:>12.0f} {row['iteration_ratio']:>15.2f}"
    )


# Streaming: a strategy whose layers stream, and the same without.

PAIRS = {
    2: (("2x<1,1>", "2x<1,1;stream>"), ("1x<2,1>", "1x<2,1;stream>")),
    4: (
        ("4x<1,1>", "4x<1,1;stream>"),
        ("2x<2,1>", "2x<2,1;stream>"),
        ("1x<sp2,1> + 2x<1,1>", "1x<sp2,1;stream> + 2x<1,1;stream>"),
        ("2x<1,2>", "2x<1,2;stream=3>"),
    ),
}


def held_bytes(engine: ds_hydra.HydraEngine, strategy: str) -> dict[str, int]:
    """Slices, gradients and exchange buffers of the rank that holds most."""
    propagator = engine.hydra.propagator
    memory = propagator.links.link_memory(Strategy.parse(strategy))
    return {
        "slice_bytes": int(propagator.max_over_ranks(memory.slice_bytes)),
        "gradient_bytes": int(propagator.max_over_ranks(memory.gradient_bytes)),
        "exchange_bytes": int(
            propagator.max_over_ranks(memory.window_bytes + memory.relayed_bytes)
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


def measure_streaming(engine: ds_hydra.HydraEngine, args: argparse.Namespace) -> Iterator[dict]:
    for pair in PAIRS[dist.get_world_size()][: args.pairs]:
        sides = {text: partial(engine.train_batch, strategy=text) for text in pair}
        seen = run_sides(engine, sides, args)
        ratios = iteration_ratios(seen)
        held = {strategy: held_bytes(engine, strategy) for strategy in pair}
        kept = [held[s]["slice_bytes"] + held[s]["gradient_bytes"] for s in pair]
        yield {
            "strategy": pair[1],
            "against": pair[0],
            "iteration_ms": {
                s: round(statistics.median(m.iteration_ms for m in seen[s]), 1) for s in pair
            },
            "iteration_ratio": round(statistics.median(ratios), 3),
            "iteration_ratios": [round(ratio, 3) for ratio in ratios],
            "bytes": held,
            "memory_ratio": round(kept[1] / kept[0], 3),
        }
    yield measure_pull(engine, args.rounds)


STREAMING_HEAD = (
    f"{'strategy':<36} {'without, ms':>12} {'with, ms':>10} {'ratio':>7} "
    f"{'slices + gradients, MB':>24} {'ratio':>7}"
)


def format_streaming(row: dict) -> str:
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


def report(
    args: argparse.Namespace, head: str, rows: Iterable[dict], format_row: Callable[[dict], str]
) -> None:
    """Measure `rows` on all ranks; print them on the first one, and write them to `--out`."""
    is_first_rank = dist.get_rank() == 0
    if is_first_rank:
        device = get_accelerator().device_name()
        print(
            f"{args.model}, {args.dtype}, {dist.get_world_size()} ranks ({device}), {args.rounds} rounds"
        )
        print(head)
    measured = []
    for row in rows:
        measured.append(row)
        if is_first_rank:
            print(format_row(row), flush=True)
    if is_first_rank and args.out:
        document = {
            "model": args.model,
            "dtype": args.dtype,
            "num_ranks": dist.get_world_size(),
            "rows": measured,
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9, help="comparisons of --streaming")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed()
    if args.streaming:
        pairs = PAIRS[dist.get_world_size()][: args.pairs]
        engine = start(args, [strategy for pair in pairs for strategy in pair])
        report(args, STREAMING_HEAD, measure_streaming(engine, args), format_streaming)
    else:
        engine = start(args, STRATEGIES[dist.get_world_size()])
        report(args, OVERLAP_HEAD, measure_overlap(engine, args), format_overlap)
    engine.destroy()


if __name__ == "__main__":
    main()
