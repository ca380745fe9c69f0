"""Micro-batches and groups that other systems make, by hand and for random lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.lab.simulator.fixed_length import (
    karmarkar_karp,
    pack_fixed_length,
)


def kk_sums(weights, num_groups):
    groups = np.zeros(len(weights), dtype=np.int64)
    karmarkar_karp(np.array(weights, dtype=float), num_groups, groups)
    return sorted(np.bincount(groups, weights=weights, minlength=num_groups).tolist())


def test_differencing_by_hand():
    """8 7 6 5 4 in two groups: 8-7=1, 6-5=1, 4-1=3, 3-1=2: the sums differ by 2, the best division
    by 0.
    """
    assert kk_sums([8, 7, 6, 5, 4], 2) == [14, 16]
    assert kk_sums([5, 5, 4, 4, 3, 3], 3) == [8, 8, 8]
    assert kk_sums([3, 1], 1) == [4]
    assert kk_sums([3, 1], 4) == [0, 0, 1, 3]


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 3))
def test_differencing_is_near_the_best_division(weights, num_groups):
    """Largest sum within 4/3 of the optimum (largest differencing keeps the bound of
    longest-first).
    """
    best = min(
        max(np.bincount(choice, weights=weights, minlength=num_groups))
        for choice in itertools.product(range(num_groups), repeat=len(weights))
    ) if len(weights) <= 7 else max(sum(weights) / num_groups, max(weights))  # fmt: skip
    found = kk_sums(weights, num_groups)
    assert sum(found) == pytest.approx(sum(weights))
    if len(weights) <= 7:
        assert found[-1] <= best * 4 / 3 + 1e-9
