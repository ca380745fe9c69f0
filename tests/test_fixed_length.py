"""Micro-batches and groups that other systems make, by hand and for random lengths."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.lab.simulator.fixed_length import (
    first_fit_decreasing,
    pack_fixed_length,
)


def test_first_fit_takes_the_first_micro_batch_with_room():
    micro_batches = np.zeros(5, dtype=np.int64)
    assert first_fit_decreasing(np.array([6, 5, 4, 3, 1]), 9, micro_batches) == 3
    assert micro_batches.tolist() == [0, 1, 1, 0, 2]


def test_micro_batches_are_dealt_out_in_turn():
    lengths = np.array([9, 8, 7, 6, 5])
    pipelines = pack_fixed_length(lengths, 10, 2)
    assert [
        [lengths[micro_batch].tolist() for micro_batch in micro_batches]
        for micro_batches in pipelines
    ] == [
        [[9], [7], [5]],
        [[8], [6]],
    ]


lengths_strategy = st.lists(st.integers(1, 50), min_size=0, max_size=40).map(
    lambda found: np.array(sorted(found, reverse=True), dtype=np.int64)
)


@settings(max_examples=80, deadline=None)
@given(lengths_strategy, st.integers(1, 6), st.integers(50, 120))
def test_every_sequence_once_and_no_micro_batch_too_long(
    lengths, num_pipelines, micro_batch_tokens
):
    pipelines = pack_fixed_length(lengths, micro_batch_tokens, num_pipelines)
    assert len(pipelines) == num_pipelines
    micro_batches = list(itertools.chain(*pipelines))
    assert sorted(
        itertools.chain(*(micro_batch.tolist() for micro_batch in micro_batches))
    ) == list(range(lengths.size))
    assert all(
        0 < lengths[micro_batch].sum() <= micro_batch_tokens for micro_batch in micro_batches
    )
