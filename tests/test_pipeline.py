"""1F1B order: DeepSpeed's own schedule, and free of deadlock for any number of micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.engine.parallel import one_f_one_b
from ds_hydra.engine.parallel.one_f_one_b import (
    PipelineStage,
    one_forward_one_backward,
    run_1f1b,
    run_forward_only,
)
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.records.timeline import EventKind


@given(num_stages=st.integers(1, 6), num_micro_batches=st.integers(0, 9))
def test_order_is_that_of_deepspeeds_train_schedule(num_stages, num_micro_batches):
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    for stage in range(num_stages):
        theirs = []
        for step in TrainSchedule(num_micro_batches, num_stages, stage).steps():
            theirs += [
                EventKind.FORWARD if isinstance(command, ForwardPass) else EventKind.BACKWARD
                for command in step
                if isinstance(command, ForwardPass | BackwardPass)
            ]
        ours = list(one_forward_one_backward(num_stages, stage, num_micro_batches))
        for wanted in (EventKind.FORWARD, EventKind.BACKWARD):
            assert [index for pass_, index in ours if pass_ is wanted] == list(
                range(num_micro_batches)
            )
        assert [pass_ for pass_, _ in ours].count(EventKind.FORWARD) == theirs.count(
            EventKind.FORWARD
        )
        assert held_at_most(ours) <= min(num_stages - stage, num_micro_batches)


def held_at_most(order):
    """Largest number of micro-batches whose activations a stage keeps at one time."""
    held = most = 0
    for pass_, _ in order:
        held += 1 if pass_ is EventKind.FORWARD else -1
        most = max(most, held)
    return most


@given(num_stages=st.integers(1, 6), num_micro_batches=st.integers(0, 9))
def test_blocking_receives_never_deadlock(num_stages, num_micro_batches):
    orders = [
        list(one_forward_one_backward(num_stages, s, num_micro_batches)) for s in range(num_stages)
    ]
    done = set()
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while order and may_run(order[0], stage, num_stages, done):
                done.add((stage, *order.pop(0)))
                progress = True
    assert not any(orders), f"stages wait for each other: {orders}"


def may_run(step, stage, num_stages, done):
    pass_, micro_batch = step
    if pass_ is EventKind.FORWARD:
        return stage == 0 or (stage - 1, EventKind.FORWARD, micro_batch) in done
    return stage == num_stages - 1 or (stage + 1, EventKind.BACKWARD, micro_batch) in done


class Mark:
    """An event of an accelerator, which is over once the host has waited for it."""

    def __init__(self):
        self.is_over = False

    def synchronize(self):
        self.is_over = True


class DeviceRecorder(Recorder):
    """Records passes that end when the host waits for them, with those before them."""

    most_under_way = 0

    def __init__(self):
        settle = Mark.synchronize
        super().__init__(SimpleNamespace(has_streams=True, stamp=self._mark, settle=settle))

    def _mark(self):
        ends = [end.is_over for end in getattr(self, "_pass_ends", ())]
        over = len(ends) - ends[::-1].index(True) if True in ends else 0
        self.most_under_way = max(self.most_under_way, len(ends) - over + 1)
        return Mark()


def one_stage():
    return PipelineStage(
        num_stages=1, stage=0, hidden_size=4, dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.mark.parametrize("num_micro_batches", [1, 7])
def test_the_host_is_two_micro_batches_ahead_of_a_device_at_most(num_micro_batches):
    weight, recorder = torch.ones(4, requires_grad=True), DeviceRecorder()
    losses = run_1f1b(
        one_stage(), [3] * num_micro_batches, lambda _index, _: weight.sum(), recorder
    )
    assert len(losses) == num_micro_batches
    assert recorder.most_under_way == min(4, 2 * num_micro_batches)


@pytest.fixture
def done(monkeypatch):
    """Messages of a stage, which are over at once."""
    done = []

    def post(operations):
        (operation,) = operations
        done.append("receive" if operation.op is one_f_one_b.dist.irecv else "send")
        operation.tensor.zero_()
        return [SimpleNamespace(wait=lambda: None, is_completed=lambda: True)]

    monkeypatch.setattr(one_f_one_b.dist, "batch_isend_irecv", post)
    monkeypatch.setattr(
        one_f_one_b.dist, "P2POp", lambda op, tensor, *_: SimpleNamespace(op=op, tensor=tensor)
    )
    return done


def middle_stage(**more):
    return dataclasses.replace(
        one_stage(), num_stages=3, stage=1, previous_rank=0, next_rank=2, **more
    )


def test_what_others_wait_for_is_posted_before_each_message(done):
    stage = middle_stage(before_message=lambda: done.append("posted"))
    stage.receive_activation(stage.activation_memory(2), requires_grad=True)
    stage.send_activation(torch.ones(2))
    stage.receive_gradient(torch.ones(2))
    stage.send_gradient(torch.ones(2))
    stage.finish()
    assert done == ["posted", "receive", "posted", "send"] * 2


@pytest.mark.parametrize("forward_only", [False, True])
def test_memory_of_a_receive_is_taken_before_the_send_before_it(monkeypatch, done, forward_only):
    """A full allocator waits for the device, and so for a send that the neighbour has not
    received.
    """
    for name in ("activation_memory", "gradient_memory"):
        take = getattr(PipelineStage, name)
        monkeypatch.setattr(
            PipelineStage, name, lambda *args, _take=take: done.append("memory") or _take(*args)
        )
    stage = middle_stage()
    if forward_only:
        run_forward_only(stage, [2, 3], lambda _, received: 2 * received)
        assert done == ["memory", "receive", "memory", "send", "receive", "send"]
        return
    run_1f1b(stage, [2, 3, 1], lambda _, received: 2 * received, Recorder())
    assert done.count("memory") == done.count("receive") == done.count("send") == 6
    sends = [number for number, what in enumerate(done) if what == "send"]
    assert all(done[n + 1 : n + 2] in ([], ["receive"]) for n in sends), done


def test_gradients_are_complete_with_the_backward_of_the_last_micro_batch():
    weight, done = torch.ones(4, requires_grad=True), []

    def forward(index, _):
        output = weight.sum()
        output.register_hook(lambda _: done.append(index))
        return output

    run_1f1b(one_stage(), [3] * 4, forward, Recorder(), lambda: done.append("complete"))
    assert done == [0, 1, 2, "complete", 3]


def test_kept_gradients_are_complete_in_the_last_phase_in_which_a_rank_works():
    told = []
    session = contextlib.nullcontext(SimpleNamespace())
    session.begin_phase, session.finish, session.weights = (lambda _: None), (lambda: None), None
    propagator = SimpleNamespace(
        recorder=SimpleNamespace(phase=0),
        clock=SimpleNamespace(stamp=lambda: 0.0),
        links=SimpleNamespace(open=lambda *_, **__: session, keep_for_reuse=lambda _: None),
        _propagate=lambda *_, completes_gradients: told.append(completes_gradients),
    )
    phases = [SimpleNamespace(micro_batches=rows) for rows in ([1], [], [2], [3], [])]
    Propagator._run_phases(propagator, phases, SimpleNamespace(is_training=True), None, [], [])
    assert told == [False, False, True]
