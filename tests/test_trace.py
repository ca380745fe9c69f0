"""What a rank records, which iterations are traced, and how the ranks' clocks meet."""

from __future__ import annotations

import itertools
import mmap
import socket
import time
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed

from ds_hydra.engine.telemetry import trace
from ds_hydra.engine.telemetry.metrics import LateMetrics
from ds_hydra.engine.telemetry.trace import (
    DeviceClock,
    MemoryWatch,
    Recorder,
    TraceChoice,
    gather_timeline,
)
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.records.timeline import EventKind
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.strategy import Strategy

REQUIRED_OF_METRICS = [
    field.name
    for field in fields(IterationMetrics)
    if field.default is MISSING and field.default_factory is MISSING and field.name != "num_tokens"
]


def test_spans_of_a_cpu_rank():
    recorder = Recorder()
    with recorder.span(EventKind.PULL):
        time.sleep(0.002)
    recorder.begin()
    with recorder.span(EventKind.FORWARD, 3):
        time.sleep(0.004)
    with recorder.span(EventKind.STEP):
        pass
    (kind, micro_batch, start, end), step = recorder.read()
    assert (kind, micro_batch, step[:2]) == (EventKind.FORWARD, 3, (EventKind.STEP, -1))
    assert start >= 0
    assert start + 4 <= end <= step[2] <= step[3]
    assert recorder.busy_ms() == pytest.approx(end - start)


def test_metrics_of_a_step_that_a_device_still_runs_wait_only_where_its_times_are_read():
    waits = []
    known = IterationMetrics(**dict.fromkeys(REQUIRED_OF_METRICS, 1.0), num_tokens=8)

    def complete(metrics):
        waits.append(metrics.num_tokens)
        return replace(metrics, iteration_ms=5.0)

    late = LateMetrics(known, complete)
    assert (late.loss, late.num_tokens, late.strategy, late.measured_ms) == (1.0, 8, 1.0, 1.0)
    assert not waits
    assert (late.iteration_ms, late.step_ms) == (5.0, 0.0)
    assert waits == [8], "the end is waited for once"


def test_a_block_that_raises_is_not_recorded():
    recorder = Recorder()
    with pytest.raises(ValueError, match="lost"), recorder.span(EventKind.FORWARD, 0):
        raise ValueError("lost")
    assert recorder.read() == []


def test_what_a_pass_waited_for_is_not_computation():
    recorder = Recorder()
    zero = recorder._zero
    for phase, kind, index, start, end in (
        (0, EventKind.FORWARD, 0, 0.0, 0.010),
        (0, EventKind.BACKWARD, 0, 0.010, 0.030),
        (1, EventKind.FORWARD, 0, 0.040, 0.050),
    ):
        recorder.add(kind, zero + start, zero + end, phase, index)
    recorder.add(EventKind.PULL, zero, zero + 0.045, 0)
    for start, end in ((0.001, 0.004), (0.010, 0.011), (0.028, 0.029), (0.030, 0.040)):
        recorder.add_wait(zero + start, zero + end)
    # Waits before a pass, as for the first layer of a home, are none of its time either way.
    assert recorder.busy_ms() == pytest.approx(35.0)
    recorder.begin()
    assert recorder.busy_ms() == 0


class FakeDevice:
    """An accelerator whose stream does 10 ms of work between any two events, and where the host
    never waits.
    """

    now_ms = 0.0
    num_synchronized = 0

    def is_synchronized_device(self):
        return False

    def Event(self, *, enable_timing):  # the accelerator's name
        assert enable_timing
        device = self

        class Event:
            def record(self, stream):
                device.now_ms += 10
                self.time_ms = device.now_ms

            def elapsed_time(self, end):
                return end.time_ms - self.time_ms

        return Event()

    def current_stream(self):
        return None

    def synchronize(self):
        raise AssertionError("recording must not wait for the device")


def test_an_accelerator_is_asked_by_events_and_never_waited_for(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(trace, "get_accelerator", lambda: device)
    recorder = Recorder(DeviceClock(torch.device("cuda")))
    recorder.begin()
    with recorder.span(EventKind.FORWARD, 0):
        pass
    with recorder.span(EventKind.BACKWARD, 0):
        pass
    assert recorder.read() == [(EventKind.FORWARD, 0, 10, 20), (EventKind.BACKWARD, 0, 30, 40)]
    assert recorder.busy_ms() == 20


def test_the_distance_between_traces_doubles():
    choice = TraceChoice(10)
    traced = [i for i in range(100_000) if choice.wants(i, 1.0 if i else 2.0)]
    assert traced[:4] == [0, 1, 10, 20]  # 1: the first that can be slower than the ones before
    assert {b - a for a, b in itertools.pairwise(traced[2:]) if a < 1990} == {10}
    assert {b - a for a, b in itertools.pairwise(traced) if 2000 <= a < 3980} == {20}
    assert len(traced) < 100 * (2 + np.log2(100_000 / 1000))


def test_an_iteration_slower_than_all_before_is_traced():
    choice = TraceChoice(1000)
    slowdowns = [9.0, 1.0, 1.1, 1.0, 1.05, 3.0, 2.9, 3.1]
    assert [choice.wants(i, s) for i, s in enumerate(slowdowns)] == [
        True, True, True, False, False, True, False, True
    ]  # fmt: skip


def test_nothing_is_traced_where_nobody_wants_it():
    choice = TraceChoice(0)
    assert not any(choice.wants(i, float(i)) for i in range(20))


def test_memory_that_is_given_back_still_counts():
    watch = MemoryWatch()
    before = watch.peak_bytes()
    # Not torch's or numpy's memory: the process may have some left from tests before, and count it.
    with mmap.mmap(-1, 64 * 2**20) as block:
        block[:: mmap.PAGESIZE] = bytes(64 * 2**20 // mmap.PAGESIZE)
    assert watch.peak_bytes() - before > 32 * 2**20
    assert MemoryWatch().peak_bytes() < 32 * 2**20, "a new watch begins from what is in use"


def plan_of(strategy, num_devices):
    parsed = Strategy.parse(strategy)
    return IterationPlan(
        iteration=7,
        num_devices=num_devices,
        strategy=parsed,
        sample_indices=tuple(range(len(parsed.schemes))),
        lengths=(5,) * len(parsed.schemes),
        num_label_tokens=4 * len(parsed.schemes),
        pipelines=tuple(
            PipelinePlan(
                scheme=s, ranks=r, micro_batches=((i,),), makespan_ms=1.0, lower_bound_ms=1.0
            )
            for i, (s, r) in enumerate(zip(parsed.schemes, parsed.place(), strict=True))
        ),
        makespan_ms=1.0,
        lower_bound_ms=1.0,
    )


def gather_with_clocks():
    """Rank r records r + 1 rounds of a pull, which idle ranks have too; ranks 0 and 1 are on one
    host, rank 2 on another with another clock.
    """
    rank = dist.get_rank()
    zeros_s = (100.0, 100.005, 5000.0)
    socket.gethostname = lambda: "far" if rank == 2 else "near"
    recorder = Recorder()
    recorder.begin()
    for _ in range(rank + 1):
        with recorder.span(EventKind.PULL):
            pass
    recorder.zero_s = zeros_s[rank]
    own = recorder.read()
    shared = gather_timeline(recorder, plan_of("2x<1,1>", 3), torch.device("cpu"))
    tp = gather_timeline(recorder, plan_of("1x<2,1>", 3), torch.device("cpu"))
    return own, shared, tp


@pytest.mark.distributed
def test_ranks_of_a_host_share_their_clock_and_hosts_are_aligned():
    results = run_distributed(gather_with_clocks, 3)
    timeline = results[0][1]
    assert all(result[1] == timeline for result in results)
    assert (timeline.iteration, timeline.num_devices) == (7, 3)
    shifts_ms = {0: 0.0, 1: 5.0, -1: 0.0}
    for pipeline, rank in ((0, 0), (1, 1), (-1, 2)):
        mine = [e for e in timeline.events if e.pipeline == pipeline]
        assert len(mine) == rank + 1
        for event, (_, _, start, end) in zip(mine, results[rank][0], strict=True):
            assert event.start_ms == pytest.approx(start + shifts_ms[pipeline], abs=2e-3)
            assert event.end_ms == pytest.approx(end + shifts_ms[pipeline], abs=2e-3)
    # A TP group is represented by its first rank, idle ranks by the first of them.
    counts = [sum(e.pipeline == p for e in results[0][2].events) for p in (0, -1)]
    assert counts == [1, 3]
