"""Rows of a micro-batch on several ranks compute what the whole micro-batch does on one: attention,
gradients, training.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from test_engine_parity import assert_parity, check_gradients
from test_sequence_parallel import (
    CPU,
    MODULE,
    attend,
    lay_out,
    worst_error,
)
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks import families
from ds_hydra.engine.model.attention import hydra_varlen
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, Segment, running
from ds_hydra.engine.parallel import token_cuts
from ds_hydra.engine.parallel.tensor_parallel import TokenShards
from ds_hydra.engine.parallel.token_cuts import KeysOfRow, TokenLayout
from ds_hydra.sampler.cuts import cut_micro_batch

MICRO_BATCHES = ((33, 5, 17, 8), (1,), (3, 2), (64,), (2, 40, 1, 1, 9))
"""Cut or whole, fewer tokens than rows, one token."""


def own_row(rows_group, row, lengths, **shard):
    """This rank's row of a micro-batch of `lengths`, or a sequence `shard` of it, and which tokens
    are in the row.
    """
    rows = cut_micro_batch(range(len(lengths)), lengths, rows_group.size)
    begins = torch.tensor([0, *lengths]).cumsum(0).tolist()
    there = [
        torch.arange(begins[p.position] + p.begin, begins[p.position] + p.end) for p in rows[row]
    ]
    segments = [Segment(p.position, lengths[p.position], p.begin, p.end) for p in rows[row]]
    layout = TokenLayout(rows=rows_group, row=row, **shard)
    keys = KeysOfRow.find(rows, layout, CPU)
    packed = PackedMicroBatch.of_segments(segments, lengths, CPU, layout, keys)
    return packed, torch.cat([torch.arange(0), *there])


def check_attention():
    """Outputs and gradients are those of the whole micro-batch; no gathered keys outlive a pass."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = TokenShards(dist.new_group(list(range(size))), size)
    gathered, post = [], KeysOfRow.post

    def watched(self, *row_and_widths):
        select = post(self, *row_and_widths)

        def select_watched():
            selected = select()
            gathered.append([StorageWeakRef(one.untyped_storage()) for one in selected])
            return selected

        return select_watched

    KeysOfRow.post = watched
    alive, num_gathered = [], []
    for options in ({}, {"sliding_window": 7, "softcap": 2.0}, {"s_aux": torch.ones(4)}):
        for lengths in MICRO_BATCHES:
            torch.manual_seed(0)
            heads, width = (4, 2, 2), (8, 8, 8 if options else 6)
            tensors = [torch.randn(1, n, sum(lengths), d) for n, d in zip(heads, width)]
            weight = torch.randn(1, sum(lengths), 4, width[2])
            wanted, leaves = attend(PackedMicroBatch.build(lengths, CPU), tensors, options)
            (wanted * weight).sum().backward()
            packed, there = own_row(group, rank, lengths)
            rows, own_weight = lay_out(packed, there, tensors, weight)
            whole = []
            for token_cuts.LEAST_PART_BYTES in (1 << 20, 1):
                gathered.clear()
                got, own_leaves = attend(packed, rows, options)
                alive.append(sum(not one.expired() for keys in gathered for one in keys))
                (got * own_weight).sum().backward()
                alive.append(sum(not one.expired() for keys in gathered for one in keys))
                num_gathered.append(len(gathered))
                whole.append([got, *(leaf.grad for leaf in own_leaves)])
            torch.testing.assert_close(*whole, rtol=1e-5, atol=1e-6)
            assert worst_error(got, own_leaves, wanted, leaves, there) < 1e-5
    KeysOfRow.post = post
    assert max(num_gathered[::2]) == 2, "once in forward, once in backward"
    assert max(num_gathered[1::2]) == 4, "the same for each of two heads"
    assert max(alive) == 0, "keys of other rows stay between forward and backward"
    # In forward and backward two parts of the long sequence alone, asked for before the MLP
    assert travels(group, rank) == [0, 8, 8, 8, 8, "gather", 0, "MLP"]


def travels(group, rank):
    """Tokens that each rank sends of a long sequence and short ones, and of short ones alone; and
    what happens first in backward: a layer's MLP, or a gather of its keys.
    """
    num_tokens, events = [], []

    class Watched(TokenShards):
        def post_gather(self, shard):
            events.append("gather")
            num_tokens.append(shard.shape[1])
            return super().post_gather(shard)

    for lengths in ([32, 3, 3, 3, 3], [4, 4, 4, 4]):
        num_tokens.append(0)
        packed, _ = own_row(Watched(group.group, group.size), rank, lengths)
        tensors = [torch.randn(1, 2, packed.num_tokens, 4, requires_grad=True) for _ in range(3)]
        with running(packed):
            out, _ = hydra_varlen(MODULE, *tensors, None)
        hidden = 2 * out
        out.register_hook(lambda _: events.append("MLP"))
        packed.keys.before_backward(hidden)
        events.clear()
        hidden.sum().backward()
        num_tokens.append(events[0] if events else None)
    return num_tokens


@pytest.mark.distributed
def test_attention_over_rows_equals_attention_over_the_micro_batch():
    run_distributed(check_attention, 4)


@pytest.fixture(autouse=True)
def keys_in_parts(monkeypatch):
    """Let keys of small micro-batches travel as those of large ones."""
    monkeypatch.setattr(token_cuts, "LEAST_PART_BYTES", 1)


def layers_in_two_lists():
    lengths = families.LENGTHS
    model = families.build("hrm_text")
    return check_gradients(model, ("1x<cp2,1>",), families.HYDRA, lengths=lengths)


def on_six_ranks():
    strategies = (
        "1x<cp3,sp2,1;gather>",
        "1x<sp2,cp3,1;gather>",
        "1x<cp6,1;gather>",
        "1x<cp4,1;gather> + 1x<cp2,1;gather>",
    )
    return check_gradients("llama", strategies, families.HYDRA, lengths=families.LENGTHS)


@pytest.mark.slow
@pytest.mark.distributed
def test_groups_of_all_ranks_where_these_are_no_power_of_two():
    assert_parity(run_distributed(on_six_ranks, 6)[0])


@pytest.mark.nightly
@pytest.mark.distributed
def test_layers_of_several_lists_gather_their_keys_again():
    """HRM-text runs some layers without gradient, and ends with one of its other list."""
    assert_parity(run_distributed(layers_in_two_lists, 2)[0])
