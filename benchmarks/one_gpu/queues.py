"""Three questions that decide whether a second thread that posts collectives can hang.

1. How many streams run beside each other (CUDA_DEVICE_MAX_CONNECTIONS)?
2. Does a thread that fills the launch queue of its stream, which waits, keep other threads from
   launching on theirs?
3. Does the first use of a kernel wait for kernels of other streams, and who waits with it?

Also what the settings cost: seconds of the first use, bytes outside of torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

from benchmarks.one_gpu.run import DESIGN
from benchmarks.one_gpu.telling import tell, trying

CYCLES, STREAMS, SLEEP_S, DEPTH = 10**8, (4, 8, 16, 24, 31), 0.025, 2
FULL_S, LAUNCHES, SLOW_S, LONG_S = 3.0, 20_000, 0.2, 1.0


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
    tell("memory outside of torch, GB", outside, wanted="1.61, which profiles of others reserve")
    with trying("module loading in force"):
        tell("module loading in force", _loading_mode())
    rate = _cycles_per_s()
    for count in STREAMS:
        ms = _side_by_side_ms(count, rate)
        tell(f"{count} streams with {DEPTH} kernels of 25 ms each take, ms", ms)
    _fill(rate)
    with trying("first use of a kernel"):
        _load(rate)


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
            # Streams that share a queue wait for each other from the second kernel on
            for _ in range(DEPTH):
                torch.cuda._sleep(int(SLEEP_S * rate))
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _fill(rate: float) -> None:
    """One thread launches behind a kernel that waits, as behind a receive; another one launches on
    a stream of its own.
    """
    x = torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    slow: list[int] = []

    def fill() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(FULL_S * rate))
            for number in range(LAUNCHES):
                begin = time.perf_counter()
                x.add_(1)
                if time.perf_counter() - begin > SLOW_S:
                    slow.append(number)

    longest_ms = _longest_launch_beside_ms(fill)
    tell("launches until a stream that waits is full", slow[0] if slow else f"more than {LAUNCHES}")
    tell(
        "longest launch of another thread meanwhile, ms", longest_ms,
        wanted="at most 100: else threads must be bounded", is_well=longest_ms <= 100,
    )  # fmt: skip


def _load(rate: float) -> None:
    """A product of a kind that nobody has used yet, beside a kernel that runs for a second, as
    beside an exchange that waits for another rank.
    """
    for name, dtype in (("library", torch.float32), ("kind of product", torch.bfloat16)):
        x = torch.ones(64, 64, device="cuda", dtype=dtype)
        took_s: list[float] = []

        def multiply(x: torch.Tensor = x, took_s: list[float] = took_s) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(int(LONG_S * rate))
            begin = time.perf_counter()
            with torch.cuda.stream(torch.cuda.Stream()):
                x @ x
            took_s.append(time.perf_counter() - begin)

        longest_ms = _longest_launch_beside_ms(multiply)
        tell(
            f"first product of a {name} beside a kernel of 1 s: its launch takes, ms",
            took_s[0] * 1e3,
        )
        tell(f"longest launch of another thread meanwhile ({name}), ms", longest_ms)


def _longest_launch_beside_ms(run: Callable[[], None]) -> float:
    """Of small kernels that this thread launches on a stream of its own while another one is in
    `run`.
    """
    y, stream, is_over = torch.zeros(1, device="cuda"), torch.cuda.Stream(), threading.Event()

    def body() -> None:
        torch.cuda.set_device(0)
        run()
        is_over.set()

    with torch.cuda.stream(stream):
        y.add_(1)
    torch.cuda.synchronize()
    thread = threading.Thread(target=body)
    thread.start()
    latencies = []
    while not is_over.is_set():
        time.sleep(0.002)
        begin = time.perf_counter()
        with torch.cuda.stream(stream):
            y.add_(1)
        latencies.append(time.perf_counter() - begin)
    thread.join()
    torch.cuda.synchronize()
    return max(latencies) * 1e3


if __name__ == "__main__":
    main()
