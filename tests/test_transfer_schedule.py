"""The list of transfers of an iteration: what is used is there, and no rank waits for itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.engine.transfer.schedule import AT_ONCE, GATHER_WINDOW, Window, plan_transfers
from ds_hydra.records.timeline import EventKind

num_micro_batches, num_layers = st.integers(0, 6), st.integers(2, 9)
first_trained, num_kept = st.integers(0, 3), st.integers(0, 1)


def window_of(num_kept, num_layers, first_trained):
    return Window(
        buckets=tuple(range(num_kept, num_kept + num_layers)),
        has_backward=tuple(position >= first_trained for position in range(num_layers)),
    )


def plan_gathered(window, num_buckets, counts):
    return plan_transfers(window, num_buckets, num_buckets, counts, training=True, pushes=True)


@given(num_micro_batches, num_layers, first_trained, num_kept)
def test_gathered_layers_are_there_when_they_are_used(micro_batches, layers, trained, kept):
    window = window_of(kept, layers, trained)
    schedule = plan_gathered(window, kept + layers, [micro_batches])
    uses = window.uses([EventKind.FORWARD, EventKind.BACKWARD] * micro_batches)
    assert list(schedule.uses) == [window.buckets[use.position] for use in uses]
    with_gradients = [b for b, t in zip(window.buckets, window.has_backward, strict=True) if t]
    for is_early in (False, True):
        pushed = carry_out(schedule, is_early=is_early)
        assert sorted(pushed) == sorted(with_gradients * micro_batches)
    of_kept = [t for t in schedule.transfers if t.bucket not in window.buckets]
    assert [(t.kind, t.bucket, t.after) for t in of_kept] == [
        *((EventKind.PULL, bucket, AT_ONCE) for bucket in range(kept)),
        *((EventKind.PUSH, bucket, schedule.end) for bucket in range(kept)),
    ]


@given(st.lists(num_micro_batches, min_size=1, max_size=4), num_layers, first_trained)
def test_phases_of_gathered_layers_begin_where_all_ranks_meet(counts, layers, trained):
    """Whatever a rank has done of the phase before; and their layers come as in one phase."""
    window = window_of(0, layers, trained)
    schedule = plan_gathered(window, layers, counts)
    in_one = plan_gathered(window, layers, [sum(counts)])
    assert schedule == replace(in_one, phases=schedule.phases)
    assert schedule.phases[0] == 0
    of_one = [EventKind.FORWARD, EventKind.BACKWARD]
    for number, begin in enumerate(schedule.phases):
        if not sum(counts[number:]):
            continue  # nobody computes from here on
        assert schedule.uses[begin] == window.buckets[0]
        after_all = len(window.uses(of_one * sum(counts[:number])))
        assert begin in (after_all, after_all - 1)
        # Ranks that leave out the rest of a phase come to the same use as those that had it all
        before = sum(counts[:number])
        assert begin >= len(window.uses(of_one * max(0, before - 1)))


@given(num_micro_batches, num_layers, first_trained)
def test_the_next_layer_comes_while_one_computes_and_no_third_is_there(count, layers, trained):
    window = window_of(0, layers, trained)
    schedule = plan_gathered(window, layers, [count])
    slots = [window.slot_of[bucket] for bucket in schedule.uses]
    for transfer in schedule.transfers:
        if transfer.kind is not EventKind.PULL:
            continue
        own = window.slot_of[transfer.bucket]
        left = [use for use in range(transfer.needed_by) if slots[use] == own]
        # As soon as the layer before it in its slot is left: a whole use before it is needed, but
        # where backward ends above the first layer, in the first one's slot
        assert transfer.after == max(left, default=AT_ONCE)
        begins_anew = trained and transfer.bucket == 0
        assert transfer.after <= max(AT_ONCE, transfer.needed_by - (1 if begins_anew else 2))
    # Where forward turns into backward, and back, the layers used last are there
    if not trained and count:
        num_pulls = sum(t.kind is EventKind.PULL for t in schedule.transfers)
        assert num_pulls == layers + (2 * count - 1) * (layers - GATHER_WINDOW)


def carry_out(schedule, *, is_early):
    """Every transfer of the window as soon as it may be, or as late; what is used has to be there.
    The buckets that were pushed.
    """
    buckets, transfers = schedule.window.buckets, schedule.transfers
    assert list(transfers) == sorted(transfers, key=lambda t: t.after)
    slots, grads, pushed = {}, {}, []
    left = [t for t in transfers if t.bucket in buckets]

    def post(transfer):
        left.remove(transfer)
        slot = buckets.index(transfer.bucket) % GATHER_WINDOW
        if transfer.kind is EventKind.PUSH:
            assert grads.pop(slot) == transfer.bucket
            pushed.append(transfer.bucket)
        else:
            slots[slot] = transfer.bucket

    for use, bucket in enumerate(schedule.uses):
        numbers = [n for n, t in enumerate(transfers) if t.needed_by == use]
        needed = transfers[: max(numbers, default=-1) + 1]
        assert all(t.after < use for t in needed), "waits for itself"
        for transfer in list(left):
            if transfer in needed or (is_early and transfer.after < use):
                post(transfer)
        slot = buckets.index(bucket) % GATHER_WINDOW
        assert slots[slot] == bucket
        if any(
            t.kind is EventKind.PUSH and t.after == use and t.bucket == bucket for t in transfers
        ):
            assert slot not in grads, "a gradient that was not pushed"
            grads[slot] = bucket
    for transfer in list(left):
        post(transfer)
    return pushed


@given(st.integers(1, 9), st.data())
def test_kept_weights_are_pulled_first_and_pushed_when_their_gradients_are_there(num_rounds, data):
    num_buckets = data.draw(st.integers(0, num_rounds))

    def plan_kept(*, pushes):
        return plan_transfers(Window(), num_buckets, num_rounds, [1], training=True, pushes=pushes)

    schedule = plan_kept(pushes=True)
    pulls, pushes = schedule.transfers[:num_rounds], schedule.transfers[num_rounds:]
    assert [(t.kind, t.bucket, t.after) for t in pulls] == [
        (EventKind.PULL, bucket, AT_ONCE) for bucket in range(num_rounds)
    ]
    # The same rounds in the same order on every rank, whatever it has
    assert [(t.kind, t.bucket) for t in pushes] == [
        (EventKind.PUSH, bucket) for bucket in reversed(range(num_rounds))
    ]
    for push in pushes:
        if not num_buckets:
            assert push.after == schedule.end
        else:
            assert push.after == min(push.bucket, num_buckets - 1)
    assert plan_kept(pushes=False).transfers == pulls
