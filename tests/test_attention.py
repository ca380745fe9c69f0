"""Packed attention equals each sequence alone, at the cost of each sequence alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.engine.model import attention_operator
from ds_hydra.engine.model.attention import hydra_varlen
from ds_hydra.engine.model.attention_contract import Scoring
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, running
from ds_hydra.errors import UnsupportedModelError

MODULE = torch.nn.Identity()


def dense_reference(query, key, value, window, softcap, sinks):
    """One sequence, every score computed and masked."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(query.shape[2])
    distance = position.unsqueeze(1) - position.unsqueeze(0)
    hidden = (distance < 0) | (distance >= (window or query.shape[2]))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ value
    total = scores.exp().sum(-1, keepdim=True) + sinks.exp().view(1, -1, 1, 1)
    return scores.exp() / total @ value


SCORINGS = st.tuples(
    st.sampled_from([None, 1, 3, 8]), st.sampled_from([None, 2.0]), st.booleans()
).map(lambda x: (*x[:2], torch.linspace(-1, 1, 4).requires_grad_() if x[2] else None))
"""Window, cap and sinks."""


def draw_heads(num_queries, num_keys, groups, value_width=8):
    torch.manual_seed(num_queries)
    shapes = (4, num_queries, 8), (4 // groups, num_keys, 8), (4 // groups, num_keys, value_width)
    return [torch.randn(1, *shape, requires_grad=True) for shape in shapes]


def assert_equal(out, heads, spans, scoring):
    """Output [1, 4, T, D] of `heads` and its gradients are those of each sequence alone, of which
    the `spans` are there.
    """
    lengths, ends = [end - begin for begin, end in spans], [end for _, end in spans]
    parts = zip(*(t.split(of, 2) for t, of in zip(heads, (lengths, ends, ends))), spans)
    wanted = [
        dense_reference(torch.cat([q.new_zeros(1, 4, begin, 8), q], 2), k, v, *scoring)[
            :, :, begin:
        ]
        for q, k, v, (begin, _) in parts
    ]
    wanted = torch.cat(wanted, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(wanted)
    inputs = heads if scoring[2] is None else [*heads, scoring[2]]
    gradients = (torch.autograd.grad((x * weight).sum(), inputs) for x in (out, wanted))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    groups=st.sampled_from([1, 2, 4]),
    scoring=SCORINGS,
    block=st.sampled_from([4, 1024]),
)
def test_packed_micro_batch_equals_its_sequences(lengths, groups, scoring, block):
    heads = draw_heads(sum(lengths), sum(lengths), groups)
    micro_batch = PackedMicroBatch.build(lengths, torch.device("cpu"))
    options = dict(zip(("sliding_window", "softcap", "s_aux"), scoring, strict=True))
    with patch.object(attention_operator, "_QUERY_BLOCK", block), running(micro_batch):
        out, _ = hydra_varlen(MODULE, *heads, None, **options)
    assert_equal(out.transpose(1, 2), heads, [(0, length) for length in lengths], scoring)


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda x: (x[0], sum(x))),
        min_size=1,
        max_size=4,
    ),
    groups=st.sampled_from([1, 2, 4]),
    scoring=SCORINGS,
    value_width=st.sampled_from([8, 6]),
)
def test_pieces_see_the_keys_before_them(spans, groups, scoring, value_width):
    """Each piece is the end of a sequence of which all keys are there."""
    lengths, ends = [end - begin for begin, end in spans], [end for _, end in spans]
    heads = draw_heads(sum(lengths), sum(ends), groups, value_width)
    with patch.object(attention_operator, "_QUERY_BLOCK", 4):
        out = attention_operator.attention_per_sequence(
            *heads, Scoring(8**-0.5, *scoring), lengths, ends
        )
    assert_equal(out, heads, spans, scoring)


def scores_computed(monkeypatch, lengths, window=None):
    """Query-key pairs that reach the attention kernel for a micro-batch of `lengths`."""
    pairs = []

    def counting(query, key, value, **_kwargs):
        pairs.append(query.shape[2] * key.shape[2])
        return torch.zeros(*query.shape[:-1], value.shape[-1])

    monkeypatch.setattr(attention_operator.F, "scaled_dot_product_attention", counting)
    micro_batch = PackedMicroBatch.build(lengths, torch.device("cpu"))
    shape = (1, 2, micro_batch.num_tokens, 4)
    heads = [torch.zeros(shape) for _ in range(3)]
    with running(micro_batch):
        hydra_varlen(MODULE, *heads, None, sliding_window=window)
    return sum(pairs)


def test_cost_of_a_packed_micro_batch_is_the_sum_over_its_sequences(monkeypatch):
    assert scores_computed(monkeypatch, [4096]) == 4096**2
    assert scores_computed(monkeypatch, [128] * 32) == 4096**2 / 32


def test_cost_of_a_window_is_linear_in_the_length(monkeypatch):
    assert scores_computed(monkeypatch, [4096], window=128) < 2 * 128 * 4096


def test_positions_restart_in_every_sequence():
    micro_batch = PackedMicroBatch.build([3, 1, 2], torch.device("cpu"))
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 4, 6]


def test_what_the_kernels_cannot_do_is_refused():
    micro_batch = PackedMicroBatch.build([2], torch.device("cpu"))
    heads = torch.zeros(1, 1, 2, 4)
    with running(micro_batch):
        with pytest.raises(UnsupportedModelError, match="attention_dropout"):
            hydra_varlen(MODULE, heads, heads, heads, None, dropout=0.1)
        with pytest.raises(UnsupportedModelError, match="a mask of its own"):
            hydra_varlen(MODULE, heads, heads, heads, torch.ones(2, 2))
