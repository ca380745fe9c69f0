"""Train a small LLaMA from scratch on the source files of the interpreter's standard library.

    deepspeed --num_gpus 4 examples/stdlib/train.py

runs on a CPU or a GPU box. Everything that is special to ds_hydra is the import, the "hydra"
section of ds_config.json, and `engine.train_batch()`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import deepspeed
import torch
import torch.distributed as dist
from stdlib.prepare import DEFAULT_CACHE_DIR, prepare
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra
from ds_hydra.progress import Progress

HERE = Path(__file__).parent


def parse_arguments() -> argparse.Namespace:
    """Command line; `--local_rank` and `--deepspeed_config` as DeepSpeed's launcher and users
    expect.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--iterations", type=int, default=48, help="optimizer steps (default %(default)s)"
    )
    parser.add_argument(
        "--run_dir", type=Path, help="default: a folder in runs/ that is named by the time"
    )
    parser.add_argument(
        "--cache_dir", type=Path, default=DEFAULT_CACHE_DIR, help="tokenizer and tokens"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "ds_config.json"))
    return parser.parse_args()


def build_model(vocab_size: int, context_length: int) -> LlamaForCausalLM:
    """A LLaMA of about 3 million parameters, equal on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=context_length,
            bos_token_id=None,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )


def main() -> None:
    """Train, then show what ran."""
    args = parse_arguments()
    with contextlib.redirect_stdout(io.StringIO()):  # which DeepSpeed tells what it has loaded
        is_first_rank = common.start(args)
    deepspeed.utils.logger.setLevel("ERROR")
    data = prepare(args.cache_dir, unit="definition")
    config = json.loads(Path(args.deepspeed_config).read_text())
    config["hydra"] |= {"tokenizer": str(data.tokenizer_dir), "run_dir": str(args.run_dir)}
    # The limit of the file is for 4 ranks; of fewer each holds more of the states.
    config["hydra"]["memory_limit_bytes"] *= max(1, 4 // dist.get_world_size())
    model = build_model(len(data.tokenizer), config["hydra"]["context_length"])
    if is_first_rank:
        print(
            f"{model.num_parameters() / 1e6:.1f} million parameters, {dist.get_world_size()} ranks"
        )
    engine, *_ = ds_hydra.initialize(model=model, training_data=data.dataset, config=config)
    with Progress(total=args.iterations, disable=not is_first_rank, unit="it") as progress:
        for _ in range(args.iterations):
            engine.train_batch()
            metrics = engine.last_metrics
            progress.set_description_str(
                f"loss {metrics.loss:.3f} | {metrics.tokens_per_s:,.0f} tokens/s | {metrics.strategy} | "
                f"imbalance {metrics.imbalance:.2f}"
            )
            progress.update()
    engine.destroy()
    if is_first_rank:
        # Only one rank pays for matplotlib
        from ds_hydra.report import plot_run, summarize_run

        print(summarize_run(args.run_dir))
        plot_run(args.run_dir, args.run_dir / "report.png")
        print(f"run folder: {args.run_dir} (metrics.jsonl, plans/, trace.jsonl, report.png)")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
