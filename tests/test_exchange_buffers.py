"""Exchange buffers: as many as are in use at once, each kept for the rounds to come."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.zero_link.buffers import ALIGNMENT_BYTES, ExchangeBuffers

ROUNDS = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=4), min_size=1, max_size=12)


def run_window(buffers, rounds, dtype):
    """Every round takes its buffers before the round before gives its own back; the most that are
    in use at once.
    """
    before, most = [], 0
    for number, sizes in enumerate([*rounds, []]):
        taken = [buffers.take(numel, dtype).fill_(number) for numel in sizes]
        most = max(most, sum(t.numel() > 0 for t in before + taken))
        for tensor in before:
            assert (tensor == number - 1).all(), "two buffers in use share memory"
            buffers.give_back(tensor)
        before = taken
    return most


@given(rounds=ROUNDS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_repeated_window_of_rounds_settles_on_as_many_buffers_as_are_in_use(rounds, dtype):
    buffers = ExchangeBuffers(torch.device("cpu"))
    sizes = {-(-n * dtype.itemsize // ALIGNMENT_BYTES) for numels in rounds for n in numels}
    # Each run that makes a buffer makes one larger
    for _ in range(run_window(buffers, rounds, dtype) * len(sizes) + 1):
        held = {memory.data_ptr() for memory in buffers._free}
        most = run_window(buffers, rounds, dtype)
        if {memory.data_ptr() for memory in buffers._free} == held:
            break
    else:
        pytest.fail("it never settles")
    assert len(buffers._free) <= most
    assert buffers.nbytes <= most * max(sizes) * ALIGNMENT_BYTES


def test_buffers_of_one_round_are_not_handed_out_twice():
    buffers = ExchangeBuffers(torch.device("cpu"))
    taken = [buffers.take(numel, torch.float32) for numel in (5, 17, 1, 40)]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in taken)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert buffers.take(0, torch.float32).shape == (0,)


def test_memory_that_a_failed_round_kept_is_not_handed_out_again():
    buffers = ExchangeBuffers(torch.device("cpu"))
    lost = buffers.take(100, torch.float32).fill_(1)
    buffers.forget_failed()
    buffers.take(100, torch.float32).fill_(2)
    assert (lost == 1).all()
    assert buffers.nbytes == 448  # 400 bytes in steps of 64, of the second one alone
