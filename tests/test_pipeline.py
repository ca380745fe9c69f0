"""1F1B order: DeepSpeed's own schedule, and free of deadlock for any number of micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.engine.parallel.one_f_one_b import Pass, one_forward_one_backward


@given(num_stages=st.integers(1, 6), num_micro_batches=st.integers(0, 9))
def test_order_is_that_of_deepspeeds_train_schedule(num_stages, num_micro_batches):
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    for stage in range(num_stages):
        theirs = []
        for step in TrainSchedule(num_micro_batches, num_stages, stage).steps():
            theirs += [
                Pass.FORWARD if isinstance(command, ForwardPass) else Pass.BACKWARD
                for command in step
                if isinstance(command, ForwardPass | BackwardPass)
            ]
        ours = list(one_forward_one_backward(num_stages, stage, num_micro_batches))
        for wanted in Pass:
            assert [index for pass_, index in ours if pass_ is wanted] == list(
                range(num_micro_batches)
            )
        assert [pass_ for pass_, _ in ours].count(Pass.FORWARD) == theirs.count(Pass.FORWARD)
        assert held_at_most(ours) <= min(num_stages - stage, num_micro_batches)


def held_at_most(order):
    """Largest number of micro-batches whose activations a stage keeps at one time."""
    held = most = 0
    for pass_, _ in order:
        held += 1 if pass_ is Pass.FORWARD else -1
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
    if pass_ is Pass.FORWARD:
        return stage == 0 or (stage - 1, Pass.FORWARD, micro_batch) in done
    return stage == num_stages - 1 or (stage + 1, Pass.BACKWARD, micro_batch) in done


def test_hand_worked_order():
    order = [f"{p.value[0]}{i}" for p, i in one_forward_one_backward(3, 0, 4)]
    assert order == ["f0", "f1", "f2", "b0", "f3", "b1", "b2", "b3"]
    assert [f"{p.value[0]}{i}" for p, i in one_forward_one_backward(3, 2, 2)] == [
        "f0",
        "b0",
        "f1",
        "b1",
    ]


@pytest.mark.parametrize("num_micro_batches", [0, 1])
def test_fewer_micro_batches_than_stages(num_micro_batches):
    assert len(list(one_forward_one_backward(4, 0, num_micro_batches))) == 2 * num_micro_batches
