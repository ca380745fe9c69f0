"""The device of a step, its ranks, its times and its memory."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch

from ds_hydra.engine.profiling.profile_run import join_ranks, use_device

HAS_GPU = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
SECTIONS = {"bf16": {"enabled": True}} if HAS_GPU else {}
"""Of ds_config, for a model in DTYPE."""


def join() -> torch.device:
    """This rank's device after joining the others, by the way that `ranks.py` was told."""
    use_device()
    if os.environ.get("DS_HYDRA_ONE_GPU") == "staged":
        from benchmarks.one_gpu.staged import init_staged

        init_staged()
    return join_ranks()


def median_ms(run: Callable[[], object], repeats: int = 5, warmup: int = 2) -> float:
    """Median milliseconds of `run` by the device's own clock."""
    from ds_hydra.engine.telemetry.trace import DeviceClock

    clock = DeviceClock(DEVICE)
    times = []
    for _ in range(warmup + repeats):
        begin = clock.stamp()
        run()
        end = clock.stamp()
        clock.settle(end)
        times.append(clock.ms_between(begin, end))
    return statistics.median(times[warmup:])


def peak_gb(run: Callable[[], object]) -> float:
    """GB by which allocated memory grows at most while `run` runs; 0 on a CPU, which does not
    tell.
    """
    if not HAS_GPU:
        run()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9
