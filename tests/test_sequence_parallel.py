"""Pieces of a row on several ranks compute what the whole row does on one: attention, gradients, training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from test_engine_parity import LENGTHS, assert_parity, check_gradients

from ds_hydra.engine.attention import PackedRow, hydra_varlen
from ds_hydra.engine.sequence_parallel import Piece

CPU = torch.device("cpu")
MODULE = torch.nn.Identity()

ROWS = ((33, 5, 17, 8), (1,), (4,), (3, 2), (1, 1, 1, 1), (64,))
"""Cut inside sequences, a multiple of the ranks or not, one token per piece, fewer tokens than ranks."""
HEADS = ((4, 4), (4, 2), (4, 1), (12, 3), (12, 6))
"""Query and key-value heads: the latter divide by 4 ranks, the ranks by them, or neither."""


def attend(row, query, key, value, **options):
    """Output and gradients of a loss that weighs every token differently."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out, _ = hydra_varlen(MODULE, *leaves, None, packed_row=row, **options)
    return out, leaves


def check_attention():
    size, rank = dist.get_world_size(), dist.get_rank()
    piece = Piece(dist.new_group(list(range(size))), size, rank)
    worst = 0.0
    for options in ({}, {"sliding_window": 3}, {"softcap": 2.0, "sliding_window": 7, "scaling": 0.3}):
        for lengths in ROWS:
            for num_heads, num_kv_heads in HEADS:
                torch.manual_seed(num_heads)
                padded = -(-sum(lengths) // size) * size
                # Value heads may be wider; what padding holds must not matter.
                query, key = (torch.randn(1, n, padded, 8) for n in (num_heads, num_kv_heads))
                value = torch.randn(1, num_kv_heads, padded, 6)
                weight = torch.randn(1, padded, num_heads, 6)
                weight[:, sum(lengths) :] = 0
                whole = PackedRow.build(lengths, CPU)
                tokens = whole.num_tokens
                wanted, leaves = attend(whole, *(x[:, :, :tokens] for x in (query, key, value)), **options)
                (wanted * weight[:, :tokens]).sum().backward()
                mine = slice(rank * padded // size, (rank + 1) * padded // size)
                row = PackedRow.build(lengths, CPU, piece)
                assert row.num_tokens == padded // size
                got, got_leaves = attend(row, *(x[:, :, mine] for x in (query, key, value)), **options)
                (got * weight[:, mine]).sum().backward()
                real = len(range(tokens)[mine])
                pairs = [(got[:, :real], wanted[:, mine])]
                pairs += [
                    (g.grad[:, :, :real], w.grad[:, :, mine]) for g, w in zip(got_leaves, leaves, strict=True)
                ]
                assert all(g.shape == w.shape for g, w in pairs)
                assert not any(g.grad[:, :, real:].any() for g in got_leaves), "padding has a gradient"
                errors = [float((g - w).abs().max()) if g.numel() else 0.0 for g, w in pairs]
                worst = max(worst, *errors)
    return worst


def check_pieces():
    """Positions and cuts of a row of 5 + 2 tokens on 4 ranks; 16-bit heads travel as they are."""
    size, rank = dist.get_world_size(), dist.get_rank()
    piece = Piece(dist.new_group(list(range(size))), size, rank)
    row = PackedRow.build([5, 2], CPU, piece)
    cut = piece.cut(torch.arange(7), fill=-100).tolist()
    query, key = (torch.randn(1, heads, 2, 8, dtype=torch.bfloat16) for heads in (4, 2))
    out, _ = hydra_varlen(MODULE, query, key, key, None, packed_row=row)
    return row.position_ids[0].tolist(), cut, row.lengths, row.cu_seqlens.tolist(), str(out.dtype)


@pytest.mark.distributed
def test_attention_over_pieces_equals_attention_over_the_row():
    assert max(run_distributed(check_attention, 4)) < 1e-5


@pytest.mark.distributed
def test_a_row_is_cut_into_equal_pieces():
    positions, cuts, lengths, begins, dtypes = zip(*run_distributed(check_pieces, 4), strict=True)
    assert positions == ([0, 1], [2, 3], [4, 0], [1, 0])
    assert cuts == ([0, 1], [2, 3], [4, 5], [6, -100])
    assert set(lengths) == {(5, 2, 1)}
    assert begins[0] == [0, 5, 7, 8]
    assert set(dtypes) == {"torch.bfloat16"}


STRATEGIES = (
    "1x<sp2,1>",
    "1x<sp4,1>",
    "1x<sp2,2,1>",
    "1x<sp2,2>",
    "1x<sp2,1> + 2x<1,1>",
    "1x<sp2,1> + 1x<2,1>",
)
SHORT_ROWS = (2, 2, 3, 1, 1, 2, 1)
"""Rows of 2 to 5 tokens: one for each piece, or less."""
LAYER_BY_LAYER = {"activation_checkpointing": True, "link": {"repull_layers": "all"}}

PARITY = {
    "what a link has to know": [
        ("llama_tied", STRATEGIES, {}, LENGTHS),
        ("llama_bias", ("1x<sp2,2,1>", "1x<sp4,1>"), LAYER_BY_LAYER, LENGTHS),
        ("llama_tied", ("1x<sp4,1>", "1x<sp2,2>"), {"link": {"devices_per_node": 2}}, SHORT_ROWS),
    ],
    "what attention has to know": [
        ("gemma2", ("1x<sp4,1>", "1x<sp2,2,1>"), {}, LENGTHS),
        ("gemma3", ("1x<sp4,1>", "1x<sp2,2>"), {}, LENGTHS),
        ("qwen2", ("1x<sp2,2,1>", "1x<sp4,1>"), {}, LENGTHS),
        ("phi3", ("1x<sp2,1> + 1x<1,2>",), {}, LENGTHS),
    ],
}
"""(family, strategies, hydra section, lengths); a phi3 has fused projections, which TP cannot slice."""


def check_families(cases):
    """Several models one after the other: starting processes is what costs."""
    return {
        (family, *key): value
        for family, strategies, hydra, lengths in cases
        for key, value in check_gradients(family, strategies, hydra, lengths=lengths).items()
    }


@pytest.mark.distributed
@pytest.mark.parametrize("what", PARITY)
def test_gradients_equal_one_process(what):
    assert_parity(run_distributed(check_families, 4, PARITY[what])[0])
