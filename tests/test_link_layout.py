"""Slices and mutual slices: every element of a slice lies in exactly one shard."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.errors import HydraConfigError
from ds_hydra.zero_link import ParamSpec, Region, Slicing
from ds_hydra.zero_link.layout import Regions, ShardTable


@st.composite
def spec_and_group(draw):
    rows, cols = draw(st.integers(1, 13)), draw(st.integers(1, 9))
    shape = draw(st.sampled_from([(rows,), (rows, cols)]))
    slicing = draw(st.sampled_from(list(Slicing)))
    if slicing is Slicing.ROWWISE:
        shape = (rows, cols)
    spec = ParamSpec(fqn="p", shape=shape, slicing=slicing)
    return spec, draw(st.integers(1, 5))


@given(st.lists(spec_and_group(), min_size=1, max_size=3), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_blocks_of_all_shards_cover_a_slice_exactly_once(cases, num_ranks):
    specs = [spec for spec, _ in cases]
    table = ShardTable(specs, num_ranks)
    asked = [(p, spec.slice_region(tp, t)) for p, (spec, tp) in enumerate(cases) for t in range(tp)]
    owners = np.arange(num_ranks)
    blocks = table.mutual_blocks(Regions.of(asked), owners)
    covered = [np.zeros((specs[p].num_rows, specs[p].num_cols), dtype=int) for p, _ in asked]
    for item, start, rows, cols in zip(
        blocks.item, blocks.start, blocks.rows, blocks.cols, strict=True
    ):
        owner, ask = divmod(int(item), len(asked))
        spec = specs[asked[ask][0]]
        flat = start + np.arange(rows)[:, None] * spec.num_cols + np.arange(cols)
        shard = spec.shard_numel(num_ranks)
        assert (flat // shard == owner).all()
        np.add.at(covered[ask].reshape(-1), flat.ravel(), 1)
    for (_, region), got in zip(asked, covered, strict=True):
        wanted = np.zeros_like(got)
        wanted[
            region.row : region.row + region.num_rows, region.col : region.col + region.num_cols
        ] = 1
        np.testing.assert_array_equal(got, wanted)
    assert (np.diff(blocks.item) >= 0).all()
    assert np.bincount(blocks.item).max(initial=0) <= 3


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
    assert regions == [
        Region(0, 8, 0, 5),
        Region(0, 8, 0, 5),
        Region(8, 8, 0, 5),
        Region(8, 8, 0, 5),
    ]


def test_degree_that_cuts_a_head_is_refused_with_the_degrees_that_work():
    spec = ParamSpec(
        fqn="layers.0.self_attn.q_proj.weight", shape=(24, 5), slicing=Slicing.COLWISE, num_blocks=6
    )
    with pytest.raises(HydraConfigError, match=r"q_proj.*TP 4 and 6 heads.*hydra\.strategies"):
        spec.slice_region(4, 0)


def test_rowwise_bias_is_held_by_the_first_rank_only():
    spec = ParamSpec(fqn="b", shape=(7,), slicing=Slicing.FIRST_RANK)
    assert spec.slice_region(2, 0).numel == 7
    assert spec.slice_region(2, 1).numel == 0
    assert spec.slice_shape(spec.slice_region(2, 1)) == (7,)


def test_replicas_with_complete_gradients_are_pushed_once():
    alone = {Slicing.REPLICATED, Slicing.FIRST_RANK}
    for slicing in Slicing:
        spec = ParamSpec(fqn="p", shape=(8, 8), slicing=slicing)
        assert [spec.pushes_gradient(t) for t in range(3)] == [True] + [slicing not in alone] * 2
        assert not dataclasses.replace(spec, requires_grad=False).pushes_gradient(0)
