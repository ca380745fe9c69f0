"""Communicators: what one costs in memory and time by its first use, and those of the engine.

    python -m benchmarks.one_gpu.ranks --way hostid 4 -m benchmarks.one_gpu.communicators
        [--groups 12]

1. MB of the device and ms for each group of all ranks: new_group + all_reduce (as
   GroupPool.create), new_group + a tiny all-to-all, new_group + a message to the next rank; each
   with and without max_ctas 8.
2. GroupPool: which options the groups have, right sums, messages, all-
   to-alls.
3. One iteration of two strategies on such groups (see soak.py for the model).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time

os.environ.pop("NCCL_MAX_CTAS", None)  # of ranks.py; it stands above what a group asks for

import torch
import torch.distributed as dist

from benchmarks.one_gpu.common import engine_of, llama, rows_of, say
from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join


def used() -> float:
    if not HAS_GPU:
        return 0.0
    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 1e6


def options_with(ctas: int):
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None or not HAS_GPU or dist.get_backend() != "nccl":
        return None
    options = nccl.Options()
    options.is_high_priority_stream = True
    if ctas and hasattr(options.config, "max_ctas"):
        options.config.max_ctas = ctas
    return options


def first_use(how: str, group, device: torch.device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    if how == "all_reduce":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    elif how == "all_to_all":
        dist.all_to_all_single(
            torch.empty(world, device=device), torch.zeros(world, device=device), group=group
        )
    elif how == "message":
        a, b = torch.zeros(1, device=device), torch.zeros(1, device=device)
        ops = [
            dist.P2POp(dist.isend, a, (rank + 1) % world, group),
            dist.P2POp(dist.irecv, b, (rank - 1) % world, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    if HAS_GPU:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=6)
    options = parser.parse_args()
    device = join()
    world = dist.get_world_size()
    first_use("all_reduce", None, device)
    say(
        "start",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if HAS_GPU else "none",
        torch=torch.__version__,
        nccl_config=[n for n in dir(dist.ProcessGroupNCCL.NCCLConfig()) if not n.startswith("_")]
        if HAS_GPU
        else [],
    )
    for ctas in (0, 8):
        for how in ("all_reduce", "all_to_all", "message"):
            before, times, groups = used(), [], []
            for _ in range(options.groups):
                begin = time.perf_counter()
                groups.append(dist.new_group(list(range(world)), pg_options=options_with(ctas)))
                first_use(how, groups[-1], device)
                times.append((time.perf_counter() - begin) * 1e3)
            mid = used()
            for group in groups:  # what the first use left out comes at the first of these
                first_use("all_to_all", group, device)
            say(
                f"{how}, max_ctas {ctas or 'default'}",
                ms_each=statistics.median(times),
                mb_each_all_ranks=(mid - before) / options.groups,
                mb_after_an_all_to_all=(used() - before) / options.groups,
            )
            for group in groups:
                dist.destroy_process_group(group)
            gc.collect()
    from ds_hydra.engine.parallel.groups import GroupPool
    from ds_hydra.strategy import Strategy

    pool = GroupPool(None, device)
    texts = {
        2: ["2x<1,1>", "1x<2,1>", "1x<1,2>", "1x<sp2,1>"],
        4: ["1x<2,2>", "1x<sp2,2,1>", "1x<1,4>", "1x<sp4,1>", "1x<cp2,2,1>", "1x<2,1> + 2x<1,1>"],
    }[world]
    begin = time.perf_counter()
    pool.ensure([Strategy.parse(t) for t in texts])
    say("GroupPool", groups=len(pool), s=time.perf_counter() - begin)
    for (purpose, ranks), group in pool._groups.items():
        if group is None:
            continue
        own = group._get_backend(device) if HAS_GPU else group
        chosen = getattr(own, "options", None)
        x = torch.ones(1 << 20, device=device)
        dist.all_reduce(x, group=group)
        wrong = (x != len(ranks)).sum().item()
        config = getattr(chosen, "config", None)
        say(
            f"group {purpose} {list(ranks)}",
            size=dist.get_world_size(group),
            wrong=wrong,
            high_priority=getattr(chosen, "is_high_priority_stream", None),
            max_ctas=getattr(config, "max_ctas", None),
            timeout=str(getattr(chosen, "_timeout", "")),
        )
    pool.destroy()
    sizes = (
        {"hidden": 1024, "inner": 2816, "layers": 8, "heads": 16, "kv": 8}
        if HAS_GPU
        else {"hidden": 64, "inner": 160, "layers": 4, "heads": 8, "kv": 8}
    )
    model = llama(device, DTYPE, **sizes, vocab=512, context=256)
    engine = engine_of(model, lr=0.0, context=256, tokens=1024, **SECTIONS)
    examples = rows_of([200, 100, 64, 250, 30, 120], 512, 1)
    for text in texts:
        loss = float(engine.train_batch(examples, strategy=text))
        say(
            f"iteration on such groups, {text}",
            loss=loss,
            norm=float(engine.last_metrics.grad_norm),
        )
    engine.destroy()


if __name__ == "__main__":
    main()
