"""Iterations over random lengths that change their strategy: most products come at a length that is
new, so that launches wait for an idle device while collectives are under way.

    python -m benchmarks.one_gpu.ranks 2 -m benchmarks.one_gpu.lengths
"""

from __future__ import annotations

import random
import statistics
import time

import torch
import torch.distributed as dist
from engines import start_hydra
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join
from benchmarks.one_gpu.telling import tell

STRATEGIES = {
    2: ("2x<1,1;gather>", "1x<1,2>", "1x<sp2,1;gather>", "1x<2,1>", "1x<cp2,1;gather>", "2x<1,1>"),
    4: ("4x<1,1;gather>", "1x<2,1> + 1x<1,2>", "2x<1,2>", "1x<sp4,1;gather>", "1x<cp2,2,1>",
        "1x<sp2,1;gather> + 2x<1,1;gather>", "1x<1,4>", "1x<sp2,cp2,1>"),
}  # fmt: skip
SIZES = (1024, 2816, 16) if HAS_GPU else (64, 160, 4)
LONGEST, NUM_ITERATIONS = (4096, 32) if HAS_GPU else (128, 12)


def main() -> None:
    device = join()
    strategies = STRATEGIES[dist.get_world_size()]
    hidden, intermediate, heads = SIZES
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=4, num_hidden_layers=8, vocab_size=256, tie_word_embeddings=False,
        max_position_embeddings=LONGEST, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(DTYPE)
    hydra = {
        "context_length": LONGEST,
        "tokens_per_iteration": 4 * LONGEST,
        "planner": {"solver": "none", "num_workers": 0},
    }
    engine = start_hydra(model, hydra=hydra, **SECTIONS)
    draw, losses, times_ms, begin = random.Random(7), [], [], time.perf_counter()
    for number in range(NUM_ITERATIONS):
        lengths = [int(LONGEST ** draw.uniform(0.5, 1)) for _ in range(draw.randint(4, 14))]
        starts = [draw.randrange(50) for _ in lengths]
        # What comes next follows from what there is: losses fall.
        rows = [
            (torch.arange(n) * 3 + start) % 200 + 1
            for n, start in zip(lengths, starts, strict=True)
        ]
        examples = [{"input_ids": row, "labels": row} for row in rows]
        start = time.perf_counter()
        strategy = strategies[number % len(strategies)]
        losses.append(float(engine.train_batch(examples, strategy=strategy)))
        times_ms.append((time.perf_counter() - start) * 1e3)
    engine.destroy()
    found = {
        "s": time.perf_counter() - begin, "first_loss": losses[0], "last_loss": losses[-1],
        "median_ms": statistics.median(times_ms),
        "most_ms_after_the_first_round": max(times_ms[len(strategies) :]),
    }  # fmt: skip
    name = f"{NUM_ITERATIONS} iterations of {len(strategies)} strategies"
    tell(name, found, wanted="an end, and a lower loss", is_well=losses[-1] < losses[0])
    dist.barrier()


if __name__ == "__main__":
    main()
