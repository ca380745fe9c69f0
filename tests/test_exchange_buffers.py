"""Exchange buffers are reused, and hold no more than what was in use at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.zero_link.buffers import ExchangeBuffers

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=20)


@given(sizes=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_window_of_two_holds_at_most_two_buffers_of_the_largest_size(sizes, dtype):
    buffers = ExchangeBuffers(torch.device("cpu"))
    before = None
    for value, numel in enumerate(sizes):
        taken = buffers.take(numel, dtype).fill_(value)
        assert taken.shape == (numel,)
        assert taken.dtype == dtype
        if before is not None:
            assert (before == value - 1).all(), "two buffers in use share memory"
            buffers.give_back(before)
        before = taken
    buffers.give_back(before)
    assert buffers.nbytes <= 2 * max(sizes) * dtype.itemsize
    held = buffers.nbytes
    buffers.give_back(buffers.take(max(sizes), dtype))
    assert buffers.nbytes == held
