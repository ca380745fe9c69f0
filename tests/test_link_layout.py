"""Mutual slices and link plans, without any rank: every element has one source and comes back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.errors import HydraConfigError
from ds_hydra.zero_link import ParamSpec, Region, SliceRef, Slicing, plan_link
from ds_hydra.zero_link.layout import BlockCopy, mutual_blocks


def shard_index(block: BlockCopy) -> np.ndarray:
    rows, cols = np.indices((block.num_rows, block.num_cols))
    return block.shard_offset + rows * block.shard_stride + cols


def slice_index(block: BlockCopy) -> np.ndarray:
    rows, cols = np.indices((block.num_rows, block.num_cols))
    return block.slice_offset + rows * block.slice_stride + cols


@st.composite
def spec_and_group(draw):
    rows, cols = draw(st.integers(1, 13)), draw(st.integers(1, 9))
    shape = draw(st.sampled_from([(rows,), (rows, cols)]))
    slicing = draw(st.sampled_from(list(Slicing)))
    if slicing is Slicing.ROWWISE:
        shape = (rows, cols)
    spec = ParamSpec(fqn="p", shape=shape, slicing=slicing)
    return spec, draw(st.integers(1, 5)), draw(st.integers(1, 7))


@given(spec_and_group())
@settings(max_examples=400, deadline=None)
def test_blocks_of_all_shards_cover_a_slice_exactly_once(case):
    spec, tp_size, num_ranks = case
    flat = np.arange(spec.numel)
    matrix = flat.reshape(spec.num_rows, spec.num_cols)
    shard_numel = spec.shard_numel(num_ranks)
    for tp_rank in range(tp_size):
        region = spec.slice_region(tp_size, tp_rank)
        expected = matrix[
            region.row : region.row + region.num_rows, region.col : region.col + region.num_cols
        ].ravel()
        slice_ = np.full(region.numel, -1)
        for owner in range(num_ranks):
            shard = flat[owner * shard_numel : (owner + 1) * shard_numel]
            blocks = mutual_blocks(spec, region, owner * shard_numel, (owner + 1) * shard_numel)
            assert len(blocks) <= 3
            for block in blocks:
                assert (slice_[slice_index(block)] == -1).all(), "two sources for one element"
                slice_[slice_index(block)] = shard[shard_index(block)]
        np.testing.assert_array_equal(slice_, expected)


@given(rows=st.integers(1, 40), tp_size=st.integers(1, 8))
def test_colwise_slices_partition_the_rows(rows, tp_size):
    spec = ParamSpec(fqn="p", shape=(rows, 3), slicing=Slicing.COLWISE)
    regions = [spec.slice_region(tp_size, t) for t in range(tp_size)]
    assert sum(r.num_rows for r in regions) == rows
    assert regions[0].row == 0
    assert all(a.row + a.num_rows == b.row for a, b in itertools.pairwise(regions))


def test_fewer_key_value_heads_than_ranks_share_whole_heads():
    spec = ParamSpec(fqn="k", shape=(2 * 8, 5), slicing=Slicing.COLWISE, num_blocks=2)
    regions = [spec.slice_region(4, t) for t in range(4)]
    assert regions == [Region(0, 8, 0, 5), Region(0, 8, 0, 5), Region(8, 8, 0, 5), Region(8, 8, 0, 5)]


def test_degree_that_cuts_a_head_is_refused_with_the_degrees_that_work():
    spec = ParamSpec(
        fqn="layers.0.self_attn.q_proj.weight", shape=(24, 5), slicing=Slicing.COLWISE, num_blocks=6
    )
    with pytest.raises(HydraConfigError, match=r"q_proj.*TP 4 and 6 heads.*hydra\.strategies"):
        spec.slice_region(4, 0)


def test_rowwise_bias_is_held_and_pushed_by_the_first_rank_only():
    spec = ParamSpec(fqn="b", shape=(7,), slicing=Slicing.FIRST_RANK)
    assert spec.slice_region(2, 0).numel == 7
    assert spec.slice_region(2, 1).numel == 0
    assert spec.slice_shape(spec.slice_region(2, 1)) == (7,)
    assert [spec.pushes_gradient(t) for t in range(2)] == [True, False]


def simulate_pull(specs, rank_buckets, full):
    """Every rank's slices, by carrying out all ranks' plans on one process."""
    num_ranks = len(rank_buckets)
    plans = [plan_link(specs, rank_buckets, rank) for rank in range(num_ranks)]

    def shard(param, rank):
        size = specs[param].shard_numel(num_ranks)
        return full[param][rank * size : (rank + 1) * size]

    slices = [
        [[np.full(ref.region.numel, -1.0) for ref in bucket] for bucket in buckets]
        for buckets in rank_buckets
    ]
    for index in range(len(plans[0].rounds)):
        packed = []
        for rank, plan in enumerate(plans):
            round_ = plan.rounds[index]
            sent = [shard(t.param, rank)[shard_index(t.block)].ravel() for t in round_.shard_side]
            packed.append(np.concatenate([*sent, np.empty(0)]))
        for rank, plan in enumerate(plans):
            round_ = plan.rounds[index]
            received = []
            for owner in range(num_ranks):
                begin = sum(plans[owner].rounds[index].shard_splits[:rank])
                received.append(packed[owner][begin : begin + round_.slice_splits[owner]])
            buffer = np.concatenate([*received, np.empty(0)])
            for t in round_.slice_side:
                block = buffer[t.buffer_offset : t.buffer_offset + t.block.numel]
                slices[rank][index][t.slot][slice_index(t.block).ravel()] = block
            for t in round_.local:
                slices[rank][index][t.slot][slice_index(t.block).ravel()] = shard(t.param, rank)[
                    shard_index(t.block)
                ].ravel()
    return plans, slices


@given(data=st.data(), num_ranks=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_plans_of_all_ranks_fit_together(data, num_ranks):
    cases = data.draw(st.lists(spec_and_group(), min_size=1, max_size=3))
    specs = [spec for spec, _, _ in cases]
    rank_buckets = []
    for _ in range(num_ranks):
        buckets = []
        for _ in range(data.draw(st.integers(0, 2))):
            chosen = data.draw(st.lists(st.integers(0, len(specs) - 1), unique=True))
            tp_size = data.draw(st.integers(1, 3))
            tp_rank = data.draw(st.integers(0, tp_size - 1))
            buckets.append(
                tuple(
                    SliceRef(p, specs[p].slice_region(tp_size, tp_rank), specs[p].pushes_gradient(tp_rank))
                    for p in chosen
                )
            )
        rank_buckets.append(tuple(buckets))
    full = [np.arange(spec.numel, dtype=float) + 1000 * p for p, spec in enumerate(specs)]
    plans, slices = simulate_pull(specs, rank_buckets, full)
    for rank, buckets in enumerate(rank_buckets):
        for bucket, got in zip(buckets, slices[rank], strict=True):
            for ref, slice_ in zip(bucket, got, strict=True):
                matrix = full[ref.param].reshape(specs[ref.param].num_rows, specs[ref.param].num_cols)
                region = ref.region
                expected = matrix[
                    region.row : region.row + region.num_rows, region.col : region.col + region.num_cols
                ]
                np.testing.assert_array_equal(slice_, expected.ravel())
    assert sum(p.sent_elements for p in plans) == sum(p.received_elements for p in plans)
    wanted = sum(ref.region.numel for buckets in rank_buckets for bucket in buckets for ref in bucket)
    assert sum(p.received_elements + p.local_elements for p in plans) == wanted


def test_pushed_elements_leave_out_replicas_with_complete_gradients():
    specs = [
        ParamSpec(fqn="norm", shape=(8,)),
        ParamSpec(fqn="q_norm", shape=(8,), slicing=Slicing.REPLICATED_PARTIAL_GRAD),
        ParamSpec(fqn="frozen", shape=(8,), requires_grad=False),
    ]
    buckets = tuple(
        (tuple(SliceRef(p, s.slice_region(2, t), s.pushes_gradient(t)) for p, s in enumerate(specs)),)
        for t in range(2)
    )
    plans = [plan_link(specs, buckets, rank, gradients=True) for rank in range(2)]
    pushed = [plan.received_elements + plan.local_elements for plan in plans]
    assert pushed == [16, 8]  # rank 0: norm and q_norm, rank 1: q_norm only
