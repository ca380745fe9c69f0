"""How much of a link's time is seen? One rank of a fake world of 8 (or 32) whose all-to-alls take
as long as links of so many GB/s would; the rest is real: posts by the computing thread, streams,
kernels, pack and unpack.

    python -m benchmarks.one_gpu.exposed [--world 8] [--layers 8] [--tokens 4096,512,64] [--rates
        0,400,200,100,50] [--micro 4]

The delay is a kernel that spins on `--ctas` multiprocessors in a stream of the "communicator",
behind what was packed. For each strategy and rate: the iteration, pull and push, and what
computation waited for. `seen` is (iteration - iteration without a link) / (time of all rounds): 0
hidden, 1 serial.
"""

from __future__ import annotations

import argparse
import statistics
import time
import types

import torch
import torch.distributed as dist

from benchmarks.one_gpu import fake_world
from benchmarks.one_gpu.common import say
from benchmarks.one_gpu.device import HAS_GPU
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch
from ds_hydra.engine.profiling.profiler import probe_plan
from ds_hydra.engine.profiling.rehearsal import probe_example
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import exchange


class SlowLinks:
    """In place of `torch.distributed` in exchange.py."""

    def __init__(self, ctas: int):
        self.bytes_per_s = 0.0
        self.latency_s = 20e-6
        self.total_s, self.rounds = 0.0, 0
        self._streams = [torch.cuda.Stream(priority=-1) for _ in range(ctas)] if HAS_GPU else []
        self._cycles_per_s = _calibrate() if HAS_GPU else 0.0
        self._free_at = 0.0

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_to_all_single(self, incoming, outgoing, received, sent, group=None, async_op=False):
        del received, group, async_op
        nbytes = max(sum(sent), incoming.numel()) * outgoing.element_size()
        seconds = self.latency_s + nbytes / self.bytes_per_s if self.bytes_per_s else 0.0
        self.total_s += seconds
        self.rounds += 1
        if not HAS_GPU:
            self._free_at = max(self._free_at, time.perf_counter()) + seconds
            end = self._free_at
            return types.SimpleNamespace(
                wait=lambda: time.sleep(max(0.0, end - time.perf_counter())),
                is_completed=lambda: True,
            )
        packed = torch.cuda.Event()
        packed.record()
        ends = []
        for stream in self._streams:
            stream.wait_event(packed)
            if seconds:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(int(seconds * self._cycles_per_s))
            ends.append(stream.record_event())

        def wait():
            for end in ends:
                torch.cuda.current_stream().wait_event(end)

        return types.SimpleNamespace(wait=wait, is_completed=lambda: True)


def _calibrate() -> float:
    torch.cuda._sleep(1000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(200_000_000)
    end.record()
    torch.cuda.synchronize()
    return 200_000_000 / (begin.elapsed_time(end) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8 if HAS_GPU else 4)
    parser.add_argument("--tokens", default="4096,512,64" if HAS_GPU else "64")
    parser.add_argument("--rates", default="0,400,200,100,50" if HAS_GPU else "0,0.02")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--ctas", type=int, default=8)
    parser.add_argument("--strategies", default="")
    options = parser.parse_args()
    n = options.world
    texts = (
        options.strategies.split(";;")
        if options.strategies
        else [f"{n}x<1,1>", f"{n}x<1,1;gather>", f"1x<sp{n},1;gather>", f"{n // 4}x<2,2>"]
    )
    device = fake_world.enter(n)
    links = SlowLinks(options.ctas)
    exchange.dist = links
    if HAS_GPU:
        from ds_hydra.engine.model.meta_model import load_model_config

        config = load_model_config("llama2_7b")
    else:
        from benchmarks.one_gpu.memory import TINY as config
    config.num_hidden_layers = options.layers
    for text in texts:
        strategy = Strategy.parse(text)
        propagator = fake_world.open_rank(config, strategy, device)
        try:
            specs = propagator.stage_model.specs
            grads_P = [
                torch.zeros(s.shard_numel(n), dtype=torch.float32, device=device) for s in specs
            ]
            for tokens in map(int, options.tokens.split(",")):
                plain_ms = None
                for rate in map(float, options.rates.split(",")):
                    links.bytes_per_s = rate * 1e9
                    found = measure(propagator, strategy, n, tokens, options.micro, grads_P, links)
                    plain_ms = found["iteration_ms"] if plain_ms is None else plain_ms
                    if rate and found["rounds_ms"]:
                        found["seen"] = (found["iteration_ms"] - plain_ms) / found["rounds_ms"]
                    say(f"{text}, {options.micro} x {tokens} tokens, {rate:g} GB/s", **found)
        finally:
            propagator.close()


def measure(propagator, strategy, world, tokens, micro, grads_P, links):
    plan = probe_plan(strategy, world, ProbeMicroBatch(tokens), micro)
    example = probe_example(propagator.stage_model.vocab_size, tokens)
    times, hosts, outcomes = [], [], []
    for _ in range(5 if HAS_GPU else 2):
        links.total_s, links.rounds = 0.0, 0
        _sync()
        begin, cpu = time.perf_counter(), time.thread_time()
        outcomes.append(propagator.train(plan, lambda _: example, grads_P, 1.0))
        _sync()
        times.append((time.perf_counter() - begin) * 1e3)
        hosts.append((time.thread_time() - cpu) * 1e3)
    last = outcomes[-1].times()
    return {
        "iteration_ms": statistics.median(times[1:]),
        "own_cpu_ms": statistics.median(hosts[1:]),
        "rounds": links.rounds,
        "rounds_ms": links.total_s * 1e3,
        "pull_ms": last.pull_ms,
        "push_ms": last.push_ms,
        "visible_pull_ms": last.visible_pull_ms,
        "visible_push_ms": last.visible_push_ms,
        "busy_ms": last.busy_ms,
    }


def _sync():
    if HAS_GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
