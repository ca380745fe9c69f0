"""Two questions that decide whether a second thread that posts collectives can hang.

1. How many streams run beside each other (CUDA_DEVICE_MAX_CONNECTIONS)?
2. Does a thread that fills the launch queue of its stream, which waits, keep other threads from
   launching on theirs?

Also what the settings cost: seconds of the first use, bytes outside of torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import torch

from benchmarks.one_gpu.run import DESIGN
from benchmarks.one_gpu.telling import tell, trying

CYCLES, STREAMS, SLEEP_S = 10**8, (4, 8, 16, 24, 31), 0.05
FULL_S, LAUNCHES, SLOW_S = 3.0, 20_000, 0.2


def main() -> None:
    if (
        "--late" in sys.argv
    ):  # as where something has asked for a device before ds_hydra is imported
        torch.cuda.is_available()
        os.environ.update(DESIGN)
    tell("settings", {name: os.environ.get(name, "not set") for name in DESIGN})
    torch.cuda.set_device(0)
    begin = time.perf_counter()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    tell("first use, s", time.perf_counter() - begin)
    free, total = torch.cuda.mem_get_info()
    outside = (total - free - torch.cuda.memory_reserved()) / 1e9
    tell("memory outside of torch, GB", outside, wanted="1.07, which profiles reserve")
    with trying("module loading in force"):
        tell("module loading in force", _loading_mode())
    rate = _cycles_per_s()
    for count in STREAMS:
        tell(f"{count} streams of 50 ms take, ms", _side_by_side_ms(count, rate))
    _fill(rate)


def _loading_mode() -> str:
    mode = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuModuleGetLoadingMode(ctypes.byref(mode))
    return {1: "EAGER", 2: "LAZY"}.get(mode.value, f"{mode.value}, code {code}")


def _cycles_per_s() -> float:
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    return CYCLES / (time.perf_counter() - begin)


def _side_by_side_ms(count: int, rate: float) -> float:
    streams = [torch.cuda.Stream() for _ in range(count)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(SLEEP_S * rate))
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _fill(rate: float) -> None:
    """One thread launches behind a kernel that waits, as behind a receive; another one launches on
    a stream of its own.
    """
    x, y = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for stream, tensor in ((one, x), (two, y)):
        with torch.cuda.stream(stream):
            tensor.add_(1)
    torch.cuda.synchronize()
    slow: list[int] = []
    is_over = threading.Event()

    def fill() -> None:
        torch.cuda.set_device(0)
        with torch.cuda.stream(one):
            torch.cuda._sleep(int(FULL_S * rate))
            for number in range(LAUNCHES):
                begin = time.perf_counter()
                x.add_(1)
                if time.perf_counter() - begin > SLOW_S:
                    slow.append(number)
        is_over.set()

    thread = threading.Thread(target=fill)
    thread.start()
    time.sleep(0.05)
    latencies = []
    while not is_over.is_set():
        begin = time.perf_counter()
        with torch.cuda.stream(two):
            y.add_(1)
        latencies.append(time.perf_counter() - begin)
        time.sleep(0.002)
    thread.join()
    torch.cuda.synchronize()
    tell("launches until a stream that waits is full", slow[0] if slow else f"more than {LAUNCHES}")
    longest_ms = max(latencies) * 1e3
    tell(
        "longest launch of another thread meanwhile, ms", longest_ms,
        wanted="at most 100: else threads must be bounded", is_well=longest_ms <= 100,
    )  # fmt: skip


if __name__ == "__main__":
    main()
