"""Where an iteration's time goes on one rank: launches, host, idle device, by phase; without nsys.

    python -m benchmarks.one_gpu.launches [--compile] [--layers 16] [--rows 64] [--rows 4096x4]
        [--gather] [--micro 8]

For each row of tokens: kernels launched in an iteration, by layer and micro-batch; milliseconds in
which the device ran nothing (gaps between kernels, by where the host was); what of the time is
passes, pull, push, norms, step, zeroing; the host's functions by their own time (cProfile, of
another iteration), and operators by host time. `--micro n` sends n micro-batches of the row (as on
8 GPUs: a rank of <1,1> has many short ones).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import re
import statistics
import time
from collections import Counter, defaultdict

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.one_gpu.common import engine_of, llama, prepare_kernels, rows_of, say
from benchmarks.one_gpu.device import DTYPE, HAS_GPU, SECTIONS, join


def mark(owner: object, name: str, label: str) -> None:
    """Give calls a span of their own in the trace."""
    plain = getattr(owner, name)

    def marked(*arguments, **options):
        with record_function(f"## {label}"):
            return plain(*arguments, **options)

    setattr(owner, name, marked)


def mark_phases(engine) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Zero

    from ds_hydra.engine import hydra_engine
    from ds_hydra.engine.gradient_shards import GradientShards
    from ds_hydra.engine.planning import IterationSource
    from ds_hydra.engine.propagation import Propagator
    from ds_hydra.engine.reporting import IterationReporter
    from ds_hydra.engine.transfer.session import LinkCarrier, TransferSession

    mark(IterationSource, "plan", "plan")
    mark(Propagator, "check_plan", "check plan")
    mark(GradientShards, "zeroed", "zero gradients")
    mark(GradientShards, "squares", "squares")
    mark(GradientShards, "deposit", "deposit")
    mark(Propagator, "_propagate", "passes")
    mark(LinkCarrier, "begin", "link begins a round")
    mark(TransferSession, "finish", "finish of the session")
    mark(hydra_engine, "gather_outcomes", "gather outcomes")
    mark(IterationReporter, "report", "report")
    mark(hydra_engine.HydraEngine, "_step", "step")
    for name in (
        "_get_norm_groups",
        "_prepare_sub_group",
        "unscale_and_clip_grads",
        "_optimizer_step",
        "_reassign_or_swap_out_partitioned_parameters",
        "_release_sub_group",
        "_post_step",
        "_partition_all_parameters",
        "zero_grad",
    ):
        if hasattr(Zero, name):
            mark(Zero, name, f"step: {name}")


def device_events(prof):
    kernels = []
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("##"):
            kernels.append((event.time_range.start, event.time_range.end, event.name))
    return sorted(kernels)


def spans(prof):
    return [
        (e.time_range.start, e.time_range.end, e.name[3:])
        for e in prof.events()
        if e.name.startswith("## ") and e.device_type == torch.autograd.DeviceType.CPU
    ]


def innermost(at, found):
    inside = [(end - begin, name) for begin, end, name in found if begin <= at <= end]
    return min(inside)[1] if inside else "(outside)"


def look(engine, examples, name: str, layers: int, strategy: str) -> None:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if HAS_GPU else [])
    with profile(activities=activities) as prof:
        engine.train_batch(examples, strategy=strategy)
        if HAS_GPU:
            torch.cuda.synchronize()
    where = spans(prof)
    host = defaultdict(float)
    for begin, end, label in where:
        host[label] += (end - begin) / 1e3
    say(
        f"{name}: host ms by phase (nested ones counted in their outer ones, too)",
        **{k: round(v, 2) for k, v in sorted(host.items(), key=lambda kv: -kv[1])},
    )
    launch = re.compile("cudaLaunch|cuLaunch|cudaMemcpyAsync|cudaMemsetAsync")
    calls, by_phase, waits = Counter(), Counter(), defaultdict(float)
    for event in prof.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        if launch.match(event.name) or (
            not HAS_GPU and event.name.startswith("aten::") and not event.cpu_children
        ):
            calls[event.name] += 1
            by_phase[innermost(event.time_range.start, where)] += 1
        if re.match(
            "cudaStreamSynchronize|cudaEventSynchronize|cudaDeviceSynchronize|cudaMalloc|cudaFree|cuMem|cudaHost",
            event.name,
        ):
            waits[event.name] += (event.time_range.end - event.time_range.start) / 1e3
            waits[f"{event.name} (calls)"] += 1
    micro = max(
        1,
        len(engine.last_metrics.plan.pipelines[0].micro_batches)
        if hasattr(engine.last_metrics, "plan")
        else 1,
    )
    say(
        f"{name}: launches",
        total=sum(calls.values()),
        micro_batches=micro,
        by_kind=dict(calls.most_common(6)),
        by_phase=dict(by_phase.most_common(12)),
        passes_per_layer=by_phase["passes"] / layers,
        host_waits=dict(waits),
    )
    if HAS_GPU:
        kernels = device_events(prof)
        if kernels:
            end, idle, idle_by, busy_by = kernels[0][0], 0.0, defaultdict(float), defaultdict(float)
            for begin, finish, kernel in kernels:
                if begin > end:
                    idle += begin - end
                    idle_by[innermost(end, where)] += (begin - end) / 1e3
                end = max(end, finish)
                busy_by[re.sub(r"[<(].*", "", kernel)[:60]] += (finish - begin) / 1e3
            say(
                f"{name}: device",
                first_to_last_ms=(end - kernels[0][0]) / 1e3,
                idle_ms=idle / 1e3,
                idle_ms_by_host_phase={
                    k: round(v, 2) for k, v in sorted(idle_by.items(), key=lambda kv: -kv[1])[:10]
                },
                busiest_ms={
                    k: round(v, 2) for k, v in sorted(busy_by.items(), key=lambda kv: -kv[1])[:16]
                },
            )
    operators = sorted(prof.key_averages(), key=lambda e: -e.self_cpu_time_total)[:14]
    say(
        f"{name}: operators by own host ms",
        **{f"{e.key[:50]} x {e.count}": round(e.self_cpu_time_total / 1e3, 2) for e in operators},
    )
    if out := os.environ.get("OUT"):
        prof.export_chrome_trace(f"{out}/{re.sub('[^a-z0-9]+', '_', name.lower())}.json")


def profile_host(engine, examples, name: str, strategy: str) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    engine.train_batch(examples, strategy=strategy)
    profiler.disable()
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).sort_stats("tottime")
    rows = sorted(stats.stats.items(), key=lambda kv: -kv[1][2])[:25]
    say(
        f"{name}: Python's functions by own ms (with cProfile's overhead)",
        **{
            f"{'/'.join(where[0].split('/')[-2:])}:{where[1]} {where[2]} x {value[0]}": round(
                value[2] * 1e3, 2
            )
            for where, value in rows
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gather", action="store_true")
    parser.add_argument("--layers", type=int, default=16 if HAS_GPU else 2)
    parser.add_argument("--rows", action="append", default=[])
    parser.add_argument("--micro", type=int, default=1)
    options = parser.parse_args()
    device = join()
    sizes = (
        {"hidden": 2048, "inner": 8192, "heads": 32, "kv": 8, "vocab": 32_000}
        if HAS_GPU
        else {"hidden": 64, "inner": 160, "heads": 4, "kv": 2, "vocab": 512}
    )
    context = 16_384 if HAS_GPU else 256
    rows = options.rows or (["64", "4096x4"] if HAS_GPU else ["64", "32x4"])
    model = llama(device, DTYPE, **sizes, layers=options.layers, context=context)
    engine = engine_of(
        model,
        lr=1e-4,
        context=context,
        tokens=context,
        hydra={"compile_layers": options.compile},
        **SECTIONS,
    )
    strategy = "1x<1,1;gather>" if options.gather else "1x<1,1>"
    prepared = []
    for text in rows:
        length, _, count = text.partition("x")
        prepared.append(
            (text, rows_of([int(length)] * int(count or 1) * options.micro, sizes["vocab"], 1))
        )
    for text, examples in prepared:
        for _ in range(3):
            engine.train_batch(examples, strategy=strategy)
            prepare_kernels([len(row["input_ids"]) for row in examples])
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            engine.train_batch(examples, strategy=strategy)
            times.append((time.perf_counter() - begin) * 1e3)
        m = engine.last_metrics
        say(
            f"{text}: without a profiler",
            iteration_ms=statistics.median(times),
            passes_ms=m.measured_ms,
            step_ms=m.step_ms,
            pull_ms=m.pull_ms,
            push_ms=m.push_ms,
            visible_pull_ms=m.visible_pull_ms,
            visible_push_ms=m.visible_push_ms,
            rest_ms=statistics.median(times) - m.measured_ms - m.step_ms,
        )
    for text, examples in prepared:
        profile_host(engine, examples, text, strategy)
    mark_phases(engine)
    for text, examples in prepared:
        look(engine, examples, text, options.layers, strategy)
    engine.destroy()


if __name__ == "__main__":
    main()
