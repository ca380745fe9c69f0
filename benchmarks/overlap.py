"""What overlap hides on accelerators: visible pull and push as a share of the iteration, with and
without it, in one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/overlap.py

Model and token budget are the demo's; lengths are drawn from a log-normal with the demo's median of
145 tokens, cut at 4,096. Iterations with and without overlap alternate on the same engine,
global batch and strategy; medians. `--model 50M` takes a larger model, of which a link has more to
move.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra

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


def start(
    model: str, dtype: str, strategies: Sequence[str], link: dict[str, Any]
) -> ds_hydra.HydraEngine:
    """An engine for `strategies` with the `hydra.link` section `link`; equal weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(**MODELS[model], max_position_embeddings=4096, tie_word_embeddings=False)
    engine, *_ = ds_hydra.initialize(
        model=LlamaForCausalLM(config),
        config={
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-4, "torch_adam": True, "fused": True},
            },
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": dtype == "bf16"},
            "steps_per_print": 10**6,
            "hydra": {
                "context_length": 4096,
                "tokens_per_iteration": 6144,
                "strategies": list(strategies),
                "link": link,
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


def measure(engine: ds_hydra.HydraEngine, model: str, rounds: int, tokens: int) -> Iterator[dict]:
    links = engine.propagator.links
    for strategy in STRATEGIES[dist.get_world_size()]:
        seen: dict[bool, list[list[float]]] = {False: [], True: []}
        for round_ in range(rounds + 1):
            batch = draw_batch(MODELS[model]["vocab_size"], tokens, seed=round_)
            for overlap in (False, True) if round_ % 2 else (True, False):
                links.overlap = overlap
                dist.barrier()
                engine.train_batch(batch, strategy=strategy)
                if round_:  # the first round warms up
                    metrics = engine.last_metrics
                    seen[overlap].append([getattr(metrics, name) for name in FIELDS])
        row: dict = {"strategy": strategy}
        for overlap, values in seen.items():
            medians = [statistics.median(column) for column in zip(*values, strict=True)]
            visible = [(v[3] + v[4]) / v[0] for v in values]
            row["with" if overlap else "without"] = {
                **{name: round(value, 1) for name, value in zip(FIELDS, medians, strict=True)},
                "visible_share": round(statistics.median(visible), 4),
            }
        pairs = zip(seen[True], seen[False], strict=True)
        row["iteration_ratio"] = round(statistics.median(on[0] / off[0] for on, off in pairs), 3)
        yield row


HEAD = (
    f"{'':<20} {'visible link time / iteration':>30}   {'iteration':>24}\n"
    f"{'strategy':<20} {'without':>15} {'with overlap':>14}   {'without, ms':>12} {'with / without':>15}"
)


def format_row(row: dict) -> str:
    off, on = row["without"], row["with"]
    return (
        f"{row['strategy']:<20} {off['visible_share']:>15.1%} {on['visible_share']:>14.1%}   "
        f"{off['iteration_ms']:>12.0f} {row['iteration_ratio']:>15.2f}"
    )


def make_parser(description: str | None, *, model: str, rounds: int) -> argparse.ArgumentParser:
    """The options that benchmarks of whole iterations share, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default=model)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path)
    return parser


def begin() -> None:
    """Start the process group, and keep libraries silent."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed()


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
    args = make_parser(__doc__, model="demo", rounds=8).parse_args()
    begin()
    engine = start(args.model, args.dtype, STRATEGIES[dist.get_world_size()], link={})
    report(args, HEAD, measure(engine, args.model, args.rounds, args.tokens), format_row)
    engine.destroy()


if __name__ == "__main__":
    main()
