"""A loop of one's own: the script chooses every global batch, and sometimes the strategy, and
ds_hydra the rest.

    deepspeed --num_gpus 4 examples/custom_loop/train.py

The global batches here follow a curriculum: the longest sequence allowed grows with the iterations.
Every rank passes the same global batch; the engine gives each rank its part.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import numpy as np
import torch.distributed as dist
from stdlib.prepare import prepare

import ds_hydra
from ds_hydra.sampler.data.dataset import TokenDataset

HERE = Path(__file__).parent


def draw(
    tokens: TokenDataset, generator: np.random.Generator, longest: int, budget: int
) -> list[dict[str, Any]]:
    """Random sequences of at most `longest` tokens, `budget` tokens in all."""
    allowed = generator.permutation(np.flatnonzero(tokens.lengths <= longest))
    fit = np.cumsum(tokens.lengths[allowed]) <= budget
    return [tokens[int(index)] for index in allowed[fit]]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train with a curriculum, evaluate, save a checkpoint and continue from it; returns the
    losses.
    """
    parser = common.argument_parser(__doc__, HERE / "ds_config.json", iterations=16)
    args = parser.parse_args(arguments)
    is_first_rank = common.start(args)
    data = prepare(args.cache_dir)
    config = common.read_json(args.ds_config)
    context_length, budget = (
        config["hydra"][key] for key in ("context_length", "tokens_per_iteration")
    )
    tokens = TokenDataset.from_dataset(
        data.dataset, context_length=context_length, tokenize=data.tokenizer
    )
    model = common.build_model(args.model, len(data.tokenizer), config)
    engine, *_ = ds_hydra.initialize(model=model, config=config)

    generator = np.random.default_rng(0)  # the same on every rank
    held_out = draw(tokens, generator, context_length, budget)
    losses = []
    for iteration in range(args.iterations):
        longest = context_length * (iteration + 1) // args.iterations
        batch = draw(tokens, generator, max(longest, 64), budget)
        # Every fourth iteration with a strategy of our own: one pipeline, as many stages as ranks.
        forced = f"1x<1,{min(dist.get_world_size(), 4)}>" if iteration % 4 == 3 else None
        losses.append(float(engine.train_batch(batch=batch, strategy=forced)))
        if is_first_rank:
            metrics = engine.last_metrics
            print(
                f"iteration {iteration:2}  up to {max(longest, 64):5,} tokens  {metrics.num_sequences:3} sequences  "
                f"{metrics.strategy:24} loss {losses[-1]:.3f}"
            )
        if iteration == args.iterations // 2:
            engine.save_checkpoint(str(args.run_dir), client_state={"iteration": iteration})
    held_out_loss = float(engine.eval_batch(held_out))
    path, client_state = engine.load_checkpoint(str(args.run_dir))
    restored_loss = float(engine.eval_batch(held_out))
    if is_first_rank:
        print(
            f"held-out loss {held_out_loss:.3f}; {restored_loss:.3f} at iteration {client_state['iteration']}"
        )
        print(f"checkpoint: {path}")
    engine.destroy()
    dist.barrier()
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
