"""What shards of a micro-batch inside TP groups save in memory and cost in time: one micro-batch
with and without them, in one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/tp_sequence_parallel.py

Forward and backward of one micro-batch of `--tokens` tokens under `1x<TP,1>` of all ranks, without
link and optimizer; both settings alternate on the same random weights, medians. Bytes are those of
the rank that holds most: tensors kept for backward, and the most that was allocated at once, slices
left out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.distributed as dist
from holdings import peak_bytes
from overlap import MODELS, begin, make_parser, report
from transformers import LlamaConfig

from ds_hydra.engine.model.random_model import build_random_stage_model
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch
from ds_hydra.engine.profiling.profile_run import DTYPES
from ds_hydra.engine.profiling.profiler import stage_ms, token_bytes
from ds_hydra.engine.propagation import Propagator
from ds_hydra.strategy import Scheme, Strategy

SETTINGS = (False, True)
"""Of `hydra.tp_sequence_parallel`."""


def start(model: str, dtype: str, *, checkpointing: bool, is_cut: bool) -> Propagator:
    stage_model = build_random_stage_model(
        LlamaConfig(**MODELS[model], max_position_embeddings=4096),
        dtype=DTYPES[dtype],
        device=torch.device("cpu"),
        num_ranks=dist.get_world_size(),
        activation_checkpointing=checkpointing,
        tp_sequence_parallel=is_cut,
    )
    return Propagator(stage_model, device=torch.device("cpu"), max_groups=8)


def measure(model: str, dtype: str, rounds: int, tokens: int) -> Iterator[dict]:
    strategy = Strategy((Scheme(dist.get_world_size(), 1),))
    micro_batch = ProbeMicroBatch(tokens)
    for checkpointing in (False, True):
        propagators = [
            start(model, dtype, checkpointing=checkpointing, is_cut=is_cut) for is_cut in SETTINGS
        ]
        times_ms: list[list[float]] = [[], []]
        for round_ in range(rounds + 1):
            for is_cut in SETTINGS if round_ % 2 else reversed(SETTINGS):
                propagators[is_cut].prepare([strategy])
                time_ms = stage_ms(propagators[is_cut], strategy, micro_batch)
                if round_:  # the first round warms up
                    times_ms[is_cut].append(time_ms)
        kept, peak = [], []
        for propagator in propagators:
            kept.append(token_bytes(propagator, strategy, tokens) * tokens)
            mine = peak_bytes(lambda p=propagator: stage_ms(p, strategy, micro_batch))  # type: ignore[misc]
            peak.append(propagator.max_over_ranks(mine))
        ratios = [on / off for off, on in zip(*times_ms, strict=True)]
        yield {
            "strategy": str(strategy) + (" recomputed" if checkpointing else ""),
            "kept_bytes": kept,
            "peak_bytes": peak,
            "time_ms": [round(statistics.median(times), 1) for times in times_ms],
            "time_ratio": round(statistics.median(ratios), 3),
            "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
        for propagator in propagators:
            propagator.close()


HEAD = (
    f"{'':<20} {'kept, MB':>17} {'peak, MB':>17} {'time':>21}\n"
    f"{'strategy':<20} {'without':>8} {'with':>8} {'without':>8} {'with':>8} {'without, ms':>12} {'ratio':>8}"
)


def format_row(row: dict) -> str:
    megabytes = [f"{value / 1e6:>8.1f}" for value in (*row["kept_bytes"], *row["peak_bytes"])]
    return f"{row['strategy']:<20} {' '.join(megabytes)} {row['time_ms'][0]:>12.0f} {row['time_ratio']:>8.2f}"


def main() -> None:
    parser = make_parser(__doc__, model="50M", rounds=6)
    parser.set_defaults(tokens=2048)
    args = parser.parse_args()
    begin()
    report(args, HEAD, measure(args.model, args.dtype, args.rounds, args.tokens), format_row)


if __name__ == "__main__":
    main()
