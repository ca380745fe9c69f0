"""What a long sequence costs under context parallelism with few key-value heads, against sequence
parallelism with as many key-value heads as ranks, in one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/context_parallel.py

Forward and backward of one micro-batch of one sequence of `--tokens` tokens, without link and
optimizer: `1x<spN,1>` of all N ranks on a LLaMA with N key-value heads, `1x<cpN,1>` on one with
N / 2. Both alternate on random weights, medians.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.distributed as dist
from overlap import MODELS, begin, make_parser, report
from transformers import LlamaConfig

from ds_hydra.engine.model.random_model import build_random_stage_model
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch
from ds_hydra.engine.profiling.profile_run import DTYPES
from ds_hydra.engine.profiling.profiler import stage_ms
from ds_hydra.engine.propagation import Propagator
from ds_hydra.strategy import Scheme, Strategy


def start(model: str, dtype: str, num_kv_heads: int) -> Propagator:
    sizes = {**MODELS[model], "num_key_value_heads": num_kv_heads}
    stage_model = build_random_stage_model(
        LlamaConfig(**sizes, max_position_embeddings=1 << 20),
        dtype=DTYPES[dtype],
        device=torch.device("cpu"),
        num_ranks=dist.get_world_size(),
    )
    return Propagator(stage_model, device=torch.device("cpu"), max_groups=16)


def measure(model: str, dtype: str, rounds: int, tokens: int) -> Iterator[dict]:
    ranks = dist.get_world_size()
    cases = [
        (Strategy((Scheme(1, 1, sp=ranks),)), start(model, dtype, ranks)),
        (Strategy((Scheme(1, 1, cp=ranks),)), start(model, dtype, max(1, ranks // 2))),
    ]
    times_ms: list[list[float]] = [[] for _ in cases]
    for round_ in range(rounds + 1):
        for index in (0, 1) if round_ % 2 else (1, 0):
            strategy, propagator = cases[index]
            propagator.prepare([strategy])
            time_ms = stage_ms(propagator, strategy, ProbeMicroBatch(tokens))
            if round_:  # the first round warms up
                times_ms[index].append(time_ms)
    ratios = [cp / sp for sp, cp in zip(*times_ms, strict=True)]
    yield {
        "strategies": [str(strategy) for strategy, _ in cases],
        "tokens": tokens,
        "time_ms": [round(statistics.median(times), 1) for times in times_ms],
        "time_ratio": round(statistics.median(ratios), 3),
        "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    for _, propagator in cases:
        propagator.close()


HEAD = f"{'strategies':<24} {'tokens':>8} {'SP, ms':>9} {'CP, ms':>9} {'ratio':>7}"


def format_row(row: dict) -> str:
    sp_ms, cp_ms = row["time_ms"]
    return f"{' '.join(row['strategies']):<24} {row['tokens']:>8} {sp_ms:>9.0f} {cp_ms:>9.0f} {row['time_ratio']:>7.2f}"


def main() -> None:
    parser = make_parser(__doc__, model="demo", rounds=5)
    parser.set_defaults(tokens=16384)
    args = parser.parse_args()
    begin()
    report(args, HEAD, measure(args.model, args.dtype, args.rounds, args.tokens), format_row)


if __name__ == "__main__":
    main()
