"""200 iterations of random lengths: what grows? Memory that torch has and reserves, memory outside
of torch, the host's; compilations, plans of cuDNN, times.

    python -m benchmarks.one_gpu.ranks --way hostid 1 -m benchmarks.one_gpu.growth [--compile]
        [--iterations 200] [--attention cudnn]
    python -m benchmarks.one_gpu.ranks --way hostid 2 -m benchmarks.one_gpu.growth --strategies
        "2x<1,1;;1x<sp2,1;gather>"
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.one_gpu.common import engine_of, llama, rows_of, say
from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--iterations", type=int, default=200 if HAS_GPU else 12)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--strategies", default="")
    options = parser.parse_args()
    device = join()
    world = dist.get_world_size()
    texts = (
        options.strategies.split(";;")
        if options.strategies
        else [f"{world}x<1,1>", f"{world}x<1,1;gather>"]
    )
    sizes = (
        {"hidden": 2048, "inner": 5632, "layers": 8, "heads": 16, "kv": 4}
        if HAS_GPU
        else {"hidden": 64, "inner": 160, "layers": 2, "heads": 4, "kv": 2}
    )
    context, vocab = (16_384, 32_000) if HAS_GPU else (256, 256)
    model = llama(device, DTYPE, **sizes, vocab=vocab, context=context)
    engine = engine_of(
        model,
        lr=1e-5,
        context=context,
        tokens=2 * context * world,
        hydra={"compile_layers": options.compile, "attention": options.attention},
        **SECTIONS,
    )
    from ds_hydra.engine.ranks.memory import outside_bytes, process_bytes

    draw, times, all_rows = random.Random(3), [], []
    begin_all = time.perf_counter()
    for number in range(options.iterations):
        out_of_time = torch.tensor(
            [float(time.perf_counter() - begin_all > options.seconds)], device=device
        )
        dist.broadcast(out_of_time, 0)
        if out_of_time.item():
            break
        lengths = []
        while sum(lengths) < context * world:  # a long tail: most are short
            lengths.append(min(int(64 * draw.paretovariate(0.9)), context))
        examples = rows_of(lengths, vocab, number)
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        engine.train_batch(examples, strategy=texts[number % len(texts)])
        ms = (time.perf_counter() - begin) * 1e3
        times.append(ms)
        row = {
            "iteration": number,
            "ms": ms,
            "tokens": sum(lengths),
            "host_rss_gb": process_bytes("VmRSS") / 1e9,
        }
        if HAS_GPU:
            stats = torch.cuda.memory_stats()
            row |= {
                "allocated_gb": torch.cuda.memory_allocated() / 1e9,
                "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
                "reserved_gb": torch.cuda.memory_reserved() / 1e9,
                "outside_gb": outside_bytes() / 1e9,
                "retries": stats.get("num_alloc_retries", 0),
                "segments": stats.get("segment.all.current", 0),
            }
        counters = torch._dynamo.utils.counters if options.compile else {}
        if counters:
            row["graphs"] = counters["stats"].get("unique_graphs", 0)
            row["recompiles"] = (
                sum(counters.get("recompiles", {}).values()) if "recompiles" in counters else 0
            )
        all_rows.append(row)
        if number % 20 == 0:
            say(f"iteration {number}", **row)
    half = len(all_rows) // 2
    first, last = all_rows[min(10, half)], all_rows[-1]
    rates = [r["ms"] / r["tokens"] * 1e3 for r in all_rows]
    say(
        "growth",
        iterations=len(all_rows),
        us_per_token_first_half=statistics.median(rates[3:half] or rates),
        us_per_token_last_half=statistics.median(rates[half:]),
        slowest_ms=max(times[3:] or times),
        **{
            f"{k}_grown": last[k] - first[k]
            for k in first
            if k not in ("iteration", "ms", "tokens")
        },
        **(
            {
                "reserved_over_highest_peak": last["reserved_gb"]
                / max(r["peak_gb"] for r in all_rows)
            }
            if HAS_GPU
            else {}
        ),
    )
    try:
        from ds_hydra.engine.model import attention_cudnn

        caches = {
            n: len(v)
            for n, v in vars(attention_cudnn).items()
            if isinstance(v, (dict, set, list)) and not n.startswith("__")
        }
        say("caches of attention_cudnn", **caches)
    except ImportError:
        pass
    engine.destroy()


if __name__ == "__main__":
    main()
