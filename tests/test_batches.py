import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data import batches as batches_module
from ds_hydra.sampler.data.batches import (
    NUM_REMEMBERED_STATES,
    SamplerState,
    TokenBudgetSampler,
    epoch_order,
)

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=40)
budgets = st.integers(1, 120)
seeds = st.integers(0, 5)


def make_sampler(lengths, budget, seed=0, shuffle=True):
    return TokenBudgetSampler(lengths, np.asarray(lengths) - 1, budget, seed=seed, shuffle=shuffle)


@settings(deadline=None)
@given(lengths_lists, budgets, seeds, st.booleans())
def test_every_epoch_holds_every_sequence_once_in_batches_as_full_as_may_be(
    lengths, budget, seed, shuffle
):
    sampler = make_sampler(lengths, budget, seed, shuffle)
    batches = []
    while sum(len(batch.sample_indices) for batch in batches) < 3 * len(lengths):
        before = sampler.state_dict()
        sampler.draw(SamplerState(epoch=1, position=len(lengths) - 1))
        assert sampler.state_dict() == before, "looking ahead leaves it where it is"
        batches.append(next(sampler))
    stream = [i for batch in batches for i in batch.sample_indices]
    for epoch in range(3):
        indices = stream[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(indices) == list(range(len(lengths)))
    for iteration, batch in enumerate(batches):
        assert batch.iteration == iteration
        assert batch.lengths == tuple(lengths[i] for i in batch.sample_indices)
        assert batch.num_label_tokens == sum(batch.lengths) - len(batch.lengths)
    for batch, following in pairwise(batches):
        assert batch.num_tokens <= budget or len(batch.lengths) == 1
        assert batch.num_tokens + following.lengths[0] > budget


@settings(deadline=None)
@given(lengths_lists, budgets, seeds, st.booleans(), st.integers(0, 12), st.integers(0, 12))
def test_resume_equals_the_uninterrupted_stream(lengths, budget, seed, shuffle, executed, ahead):
    """Planning has drawn `ahead` batches more than were executed when the checkpoint is taken."""
    sampler = make_sampler(lengths, budget, seed, shuffle)
    for _ in range(executed + ahead):
        next(sampler)
    state = json.loads(json.dumps(sampler.state_dict(executed)))

    resumed = make_sampler(lengths, budget, seed, shuffle)
    resumed.load_state_dict(state)

    uninterrupted = make_sampler(lengths, budget, seed, shuffle)
    expected = [next(uninterrupted) for _ in range(executed + 5)][executed:]
    assert [next(resumed) for _ in range(5)] == expected


def test_order_is_pinned():
    """A change of the order would break the resume of every checkpoint that exists."""
    sampler = make_sampler([5, 3, 8, 2, 7, 4], 11, seed=42)
    assert [next(sampler).sample_indices for _ in range(4)] == [(3, 2), (5, 4), (1, 0), (4,)]


@settings(deadline=None)
@given(lengths_lists, budgets, seeds, st.booleans(), st.integers(1, 7))
def test_batches_do_not_depend_on_how_many_are_looked_at_together(
    lengths, budget, seed, shuffle, block
):
    whole = make_sampler(lengths, budget, seed, shuffle)
    expected = [next(whole) for _ in range(12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "_BLOCK", block)
        sampler = make_sampler(lengths, budget, seed, shuffle)
        assert [next(sampler) for _ in range(12)] == expected


@pytest.mark.parametrize("num_sequences", [1, 2, 256, 257, 65_537])
def test_orders_are_numpys_whatever_their_bytes(num_sequences):
    generator = np.random.Generator(np.random.PCG64([42, 3]))
    expected = generator.permutation(np.arange(num_sequences, dtype=np.int64))
    np.testing.assert_array_equal(epoch_order(num_sequences, 42, 3), expected)


def test_an_order_is_computed_once_where_epochs_meet():
    """Planning draws from the next epoch while training is in the one before."""
    epoch_order.cache_clear()
    training, ahead = make_sampler([1] * 60, 5), make_sampler([1] * 60, 5)
    for _ in range(3):
        next(ahead)
    for _ in range(24):
        assert next(training) != next(ahead)
    assert epoch_order.cache_info().misses == 3


def test_a_rank_that_does_not_draw_stands_where_the_others_do():
    drawing, following = make_sampler([3, 5, 2, 9], 12), make_sampler([3, 5, 2, 9], 12)
    for _ in range(9):
        following.advance(len(next(drawing).lengths))
        assert following.state == drawing.state
        assert following.state_dict(1) == drawing.state_dict(1)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (make_sampler([2, 3, 4], 5), "num_sequences"),
        (make_sampler([2, 3], 5, seed=9), "seed"),
        (make_sampler([2, 3], 5, shuffle=False), "shuffle"),
        (make_sampler([2, 4], 5), r"num_tokens 6 \(now 5\)"),
        (make_sampler([3, 2], 5), r"data_digest \w{16} \(now \w{16}\)"),
        (TokenBudgetSampler([2, 3], [0, 2], 5, seed=0), r"num_label_tokens 2 \(now 3\)"),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(other, key):
    state = other.state_dict()
    with pytest.raises(HydraConfigError, match=f"taken with {key}"):
        make_sampler([2, 3], 5).load_state_dict(state)


def test_the_advice_for_other_data_names_what_begins_it_anew():
    sampler = make_sampler([2, 3, 4], 5, shuffle=False)
    for _ in range(4):
        next(sampler)
    with pytest.raises(HydraConfigError, match=r"load_data_position=False.*ignore_data_skip=True"):
        make_sampler([2, 3], 5).load_state_dict(sampler.state_dict())
    sampler.begin_at(4)
    batch = next(sampler)
    assert (batch.iteration, batch.sample_indices) == (4, (0, 1))
    assert sampler.state_dict(4) == {**sampler.state_dict(), "iteration": 4, "position": 0}


def test_a_checkpoint_without_a_digest_is_continued():
    sampler = make_sampler([2, 3, 4], 5)
    next(sampler)
    state = sampler.state_dict()
    for key in ("num_tokens", "num_label_tokens", "data_digest"):
        del state[key]
    resumed = make_sampler([2, 3, 4], 5)
    resumed.load_state_dict(state)
    assert next(resumed) == next(sampler)


def test_another_budget_may_continue_a_checkpoint():
    sampler = make_sampler([2, 3, 4], 5, shuffle=False)
    next(sampler)
    extended = make_sampler([2, 3, 4], 9, shuffle=False)
    extended.load_state_dict(sampler.state_dict())
    assert next(extended).sample_indices == (2, 0, 1)


def test_states_of_the_far_past_are_forgotten():
    sampler = make_sampler([1], 1)
    for _ in range(NUM_REMEMBERED_STATES + 2):
        next(sampler)
    assert sampler.state_dict(2)["iteration"] == 2
    with pytest.raises(ValueError, match="no state for iteration 1"):
        sampler.state_dict(1)
