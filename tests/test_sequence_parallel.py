"""Sequence shards of a micro-batch on several ranks compute what the whole micro-batch does on one:
attention, gradients, training.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed, wait_until
from spaces import priced
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ds_hydra.engine.model.attention import hydra_varlen
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, running
from ds_hydra.engine.parallel import recomputation, token_cuts
from ds_hydra.engine.parallel.tensor_parallel import TokenShards
from ds_hydra.engine.parallel.token_cuts import TokenLayout
from ds_hydra.lab.simulator.ulysses import ShardedGroup
from ds_hydra.sampler.cuts import cut_micro_batch
from ds_hydra.strategy import LatencyModel, Profile, Scheme
from ds_hydra.strategy.cost_models.analytic import (
    Hardware,
    ModelShape,
    predict_latency,
    sequence_parallel_latency,
)
from ds_hydra.strategy.cost_models.cluster import Cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.memory_model import SP_ACTIVATIONS
from ds_hydra.strategy.profiles.profile import PROFILE_SCHEMA, load_profile

CPU = torch.device("cpu")
MODULE = torch.nn.Identity()

MICRO_BATCHES = ((33, 5, 17, 8), (1,), (4,), (3, 2), (1, 1, 1, 1), (64,))
"""Cut inside sequences, a multiple of the ranks or not, one token per sequence shard, fewer tokens
than ranks.
"""
HEADS = ((4, 4), (4, 2), (4, 1), (12, 3), (12, 6))
"""Query and key-value heads: the latter divide by 4 ranks, the ranks by them, or neither."""


def attend(packed, tensors, options):
    """The output, and leaves that hold the `tensors`."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with running(packed):
        out, _ = hydra_varlen(MODULE, *leaves, None, **options)
    if packed.keys is not None:  # as a layer does with its output
        packed.keys.before_backward(out)
    return out, leaves


def lay_out(packed, there, tensors, weight):
    """What a rank that has the tokens `there` gets of `tensors`, with noise as padding, and of the
    `weight` of the output, which is 0 there.
    """
    mine = [torch.randn(*t.shape[:2], packed.num_tokens, t.shape[3]) for t in tensors]
    for one, tensor in zip(mine, tensors):
        one[:, :, : len(there)] = tensor[:, :, there]
    own_weight = torch.zeros(1, packed.num_tokens, *weight.shape[2:])
    own_weight[:, : len(there)] = weight[:, there]
    return mine, own_weight


def worst_error(got, own_leaves, wanted, leaves, there):
    """Of output and gradients of the tokens `there`; padding has no gradient."""
    num_real = len(there)
    assert not any(own.grad[:, :, num_real:].any() for own in own_leaves), "padding has a gradient"
    pairs = [(got[:, :num_real], wanted[:, there])]
    pairs += [(o.grad[:, :, :num_real], w.grad[:, :, there]) for o, w in zip(own_leaves, leaves)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max([0.0, *(float((a - b).abs().max()) for a, b in pairs if a.numel())])


def check_attention():
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = TokenLayout(dist.new_group(list(range(size))), size, rank)
    worst = 0.0
    for options in (
        {},
        {"sliding_window": 3},
        {"softcap": 2.0, "sliding_window": 7, "scaling": 0.3},
    ):
        for lengths in MICRO_BATCHES:
            for num_heads, num_kv_heads in HEADS:
                torch.manual_seed(num_heads)
                num_tokens = sum(lengths)
                # Value heads may have another width.
                shapes = (num_heads, 8), (num_kv_heads, 8), (num_kv_heads, 6)
                tensors = [torch.randn(1, n, num_tokens, width) for n, width in shapes]
                weight = torch.randn(1, num_tokens, num_heads, 6)
                wanted, leaves = attend(PackedMicroBatch.build(lengths, CPU), tensors, options)
                (wanted * weight).sum().backward()
                micro_batch = PackedMicroBatch.build(lengths, CPU, layout)
                assert micro_batch.num_tokens == -(-num_tokens // size)
                begin = rank * micro_batch.num_tokens
                there = torch.arange(num_tokens)[begin : begin + micro_batch.num_tokens]
                mine, own_weight = lay_out(micro_batch, there, tensors, weight)
                found = []
                for token_cuts.LEAST_PART_BYTES in (1 << 20, 1):
                    got, own_leaves = attend(micro_batch, mine, options)
                    (got * own_weight).sum().backward()
                    found.append([got, *(leaf.grad for leaf in own_leaves)])
                for in_one, in_parts in zip(*found, strict=True):
                    assert torch.allclose(in_one, in_parts, atol=1e-6)
                worst = max(worst, worst_error(got, own_leaves, wanted, leaves, there))
    return worst


@pytest.mark.distributed
def test_attention_over_pieces_equals_attention_over_the_micro_batch():
    assert max(run_distributed(check_attention, 4)) < 1e-5


PROFILE = {
    "schema": PROFILE_SCHEMA,
    "hardware": {
        "name": "test",
        "memory_bytes": 10**9,
        "reserved_bytes": 0,
        "safety_margin_bytes": 0,
    },
    "model": {"name": "tiny", "num_layers": 2, "hidden_size": 32, "vocab_size": 97},
    "memory": {
        "activation_bytes_per_token_per_layer_per_hidden": {"1": 100, "2": 120},
        "state_bytes_per_layer_per_hidden2": 16,
        "sharded_fraction": 0.9,
    },
    "schemes": [
        {"tp": 1, "pp": 1, "quadratic_ms": 8e-4, "linear_ms": 0.8, "constant_ms": 1.0},
        {"tp": 2, "pp": 1, "quadratic_ms": 4e-4, "linear_ms": 0.5, "constant_ms": 2.0},
    ],
}


def test_what_was_not_profiled_is_estimated_between_perfect_scaling_and_tp():
    profile = Profile.from_json(PROFILE)
    found = priced(profile, "1x<sp2,1> + 1x<2,1>", "1x<sp4,1>")
    assert found.latency[Scheme(1, 1, sp=2)] == LatencyModel(
        quadratic_ms=4e-4, linear_ms=0.45, constant_ms=2.0
    )
    assert found.latency[Scheme(1, 1, sp=4)] == LatencyModel(
        quadratic_ms=2e-4, linear_ms=0.2, constant_ms=1.0
    )
    assert Costs(profile).find(Scheme(1, 2, sp=2)) is None, "there is no <1,2> to start from"
    assert Costs(profile).find(Scheme(1, 1, sp=2)).sources == (Scheme(1, 1), Scheme(2, 1))
    assert [e["sp"] for e in found.document["schemes"] if e.get("estimated")] == [2, 4]
    measured = {
        "tp": 1, "pp": 1, "sp": 2, "quadratic_ms": 3e-4, "linear_ms": 0.3, "constant_ms": 3.0,
    }  # fmt: skip
    known = Profile.from_json({**PROFILE, "schemes": [*PROFILE["schemes"], measured]})
    assert priced(known, "1x<sp2,1>") is known
    assert Costs(known).find(Scheme(1, 1, sp=2)).origin == "measured"
    assert Costs(profile).find(Scheme(1, 1, sp=2, ep=2)) is None


def test_memory_of_a_micro_batch_is_shared_and_that_of_states_is_not():
    memory = Profile.from_json(PROFILE).memory
    for tp in (1, 2):
        states, micro_batch = (memory.rank_bytes(Scheme(tp, 1), 8, tokens) for tokens in (0, 1000))
        cut_states, cut_micro_batch = (
            memory.rank_bytes(Scheme(tp, 1, sp=4), 8, tokens) for tokens in (0, 1000)
        )
        assert cut_states == states
        assert cut_micro_batch - states == pytest.approx(
            (micro_batch - states) / 4 * SP_ACTIVATIONS
        )


def test_roofline_of_sp_shares_work_and_adds_exchanges():
    hardware = Hardware.load("a800")
    shape = ModelShape(num_layers=32, hidden_size=4096, intermediate_size=11008, vocab_size=32000)
    one, both, tp = (
        predict_latency(shape, hardware, s)
        for s in (Scheme(1, 1), Scheme(1, 1, sp=2), Scheme(2, 1))
    )
    assert both.quadratic_ms == pytest.approx(one.quadratic_ms / 2)
    assert one.linear_ms / 2 < both.linear_ms < tp.linear_ms
    assert one.constant_ms < both.constant_ms <= tp.constant_ms


@pytest.mark.parametrize("sp", [2, 8, 16, 32])
def test_exchanges_have_one_price(sp):
    """In the roofline, for groups nobody measured, and for the rivals of a simulation."""
    hardware = Hardware.load("h100")
    grouped = ModelShape(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        vocab_size=32000,
        key_value_share=0.25,
    )
    scheme, single = Scheme(1, 1, sp=sp), predict_latency(grouped, hardware, Scheme(1, 1))
    priced = sequence_parallel_latency(grouped, hardware, scheme)
    cluster = Cluster(shape=grouped, hardware=hardware, num_devices=64)
    rival = ShardedGroup(
        scenario=SimpleNamespace(cluster=cluster),
        single=single,
        size=sp,
        num_heads=32,
        checkpointed=0.0,
        max_len=1 << 20,
    )
    expected = single.shared(sp).plus(priced).micro_batch_ms([4096])
    assert predict_latency(grouped, hardware, scheme).micro_batch_ms([4096]) == pytest.approx(
        expected
    )
    document = {**PROFILE, "schemes": [{"tp": 1, "pp": 1, **single.to_json()}]}
    costs = Costs(Profile.from_json(document), cluster)
    assert costs.latency(scheme).micro_batch_ms([4096]) == pytest.approx(expected)
    assert rival.latency.micro_batch_ms([4096]) == pytest.approx(expected)
    # What goes to other nodes shares the interconnect with that of the node's eight ranks
    rate = hardware.intra_node_rate if sp <= 8 else hardware.inter_node_rate / 8
    sent = (sp - 1 if sp <= 8 else sp - 8) / sp
    per_token = 32 * 2 * 2 * (2 + 2 / 4) * 4096 / sp * sent
    assert priced.linear_ms == pytest.approx(1e3 * per_token / rate)


def test_what_attention_hides_of_exchanges():
    """16 key-value heads of a rank in parts of 1, 2, 4 and 9, one in one part."""
    profile = load_profile("a800_llama2_7b")
    costs = Costs.of(profile, 16)
    cluster = costs.cluster
    single = costs.single_rank
    for sp, parts in ((2, [1, 2, 4, 9]), (8, [1, 1, 1, 1]), (32, [1])):
        scheme = Scheme(1, 1, sp=sp)
        more = sequence_parallel_latency(cluster.shape, cluster.hardware, scheme)
        found = costs.latency(replace(scheme, gather=True))
        # Queries, keys and values of the first part, the output of the last one
        seen = (3 * parts[0] + parts[-1]) / (4 * sum(parts))
        linear_ms = single.linear_ms / sp + seen * more.linear_ms
        assert found.linear_ms == pytest.approx(linear_ms)
        assert found.constant_ms == pytest.approx(single.constant_ms + more.constant_ms)
        starts_ms = (len(parts) - 1) * more.constant_ms / (sp * 8192)
        hidden_ms = (1 + (parts[-1] - parts[0]) / sum(parts)) * (1 - seen) * more.linear_ms
        assert found.exchange_ms == pytest.approx(hidden_ms + starts_ms)
        # Short sequences, whose attention hides nothing, take all of it
        least_ms = max(found.exchange_ms, found.quadratic_ms)
        assert found.sequence_ms(1) == pytest.approx(linear_ms + least_ms)
        attention_ms = found.quadratic_ms * (1 << 20) ** 2
        assert found.sequence_ms(1 << 20) == pytest.approx((1 << 20) * linear_ms + attention_ms)
        assert LatencyModel(**found.to_json()) == found
        rows = costs.latency(replace(scheme, cp=2, gather=True))
        assert rows.exchange_ms <= found.exchange_ms / 2 + 1e-12
        assert found.scaled(2.0).exchange_ms == 2 * found.exchange_ms


class Noted(torch.autograd.Function):
    """Attention that says when it runs, forward and backward."""

    @staticmethod
    def forward(ctx, query, key, value, events):
        ctx.events = events
        events.append("attend")
        return (query + key + value).transpose(1, 2).clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("attend back")
        return *[grad.transpose(1, 2).clone() for _ in range(3)], None


@pytest.mark.distributed
def test_a_checkpointed_layer_keeps_nothing_that_was_exchanged():
    run_distributed(check_what_stays, 2)


def check_what_stays():
    """Return once no buffer of an exchange and no row of keys is alive: when a checkpointed layer
    has run, and once gradients of a layer are there.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group([*range(size)])
    buffers, post, init = [], token_cuts._post_all_to_all, token_cuts._Part.__init__
    token_cuts.LEAST_PART_BYTES = 1

    def watched(sent, group):
        received, wait = post(sent, group)
        buffers.extend(StorageWeakRef(one.untyped_storage()) for one in (sent, received))
        return received, wait

    def watched_part(self, row, *rest):
        init(self, row, *rest)
        buffers.append(StorageWeakRef(row.untyped_storage()))

    def attend_to(query, key, value, _):
        return Noted.apply(query, key[:, :, : query.shape[2]], value[:, :, : query.shape[2]], [])

    layout = TokenLayout(group, size, rank)
    rows = cut_micro_batch([0], [64], size)
    in_rows = TokenLayout(rows=TokenShards(group, size), row=rank)
    keys = token_cuts.KeysOfRow.find(rows, in_rows, CPU)
    token_cuts._post_all_to_all, token_cuts._Part.__init__ = watched, watched_part
    for layer, is_checkpointed in (
        (lambda *heads: token_cuts.attend_to_all_tokens(*heads, layout, attend_to), True),
        (lambda *heads: token_cuts.attend_to_all_rows(*heads, keys, attend_to), True),
        (lambda *heads: token_cuts.attend_to_all_tokens(*heads, layout, attend_to), False),
    ):
        heads = [torch.randn(1, 8, keys.row_tokens, 8, requires_grad=True) for _ in range(3)]
        buffers.clear()
        if is_checkpointed:
            options = {"use_reentrant": False, "context_fn": recomputation.contexts}
            loss = checkpoint(layer, *heads, **options).sum()
        else:
            loss = layer(*heads).sum()
            loss.backward()
            for one in heads:
                one.grad = None
        assert buffers
        # Gloo's threads hold what has just ended a little longer
        wait_until(lambda: all(one.expired() for one in buffers), limit_s=60)
        if is_checkpointed:
            loss.backward()


def test_heads_travel_beside_attention_to_those_before(monkeypatch):
    events, num_posted = [], itertools.count()

    def exchange(sent, _group):
        number = next(num_posted)
        events.append(f"post {number}")
        return sent.clone(), lambda: events.append(f"wait {number}")

    monkeypatch.setattr(token_cuts, "_post_all_to_all", exchange)
    monkeypatch.setattr(token_cuts, "LEAST_PART_BYTES", 1)
    heads = [torch.randn(1, 4, 3, 8, requires_grad=True) for _ in range(3)]
    out = token_cuts.attend_to_all_tokens(
        *heads, TokenLayout(None, 2, 0), lambda q, k, v, _: Noted.apply(q, k, v, events)
    )
    assert events == [
        *("post 0", "post 1"),
        *("wait 0", "attend", "post 2"),
        *("wait 1", "attend", "post 3"),
        *("wait 2", "wait 3"),
    ]
    events.clear()
    out.sum().backward()
    assert events == [
        # Of the part whose attention comes first in backward
        *("post 4", "post 5"),
        *("wait 4", "attend back", "post 6"),
        *("wait 5", "attend back", "post 7"),
        *("wait 6", "wait 7"),
    ]
    for one in heads:
        assert one.grad.eq(1).all()


def test_a_layer_exchanges_as_often_as_its_price_says(monkeypatch):
    sizes = []

    def exchange(sent, group):
        sizes.append(sent.numel())
        return sent.clone(), token_cuts.nothing

    monkeypatch.setattr(token_cuts, "_post_all_to_all", exchange)
    shard = TokenLayout(None, 2, 0)
    query = torch.randn(1, 4, 3, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(2))

    def attend(query, key, value, _):
        return (query + (key + value).repeat_interleave(2, dim=1)).transpose(1, 2)

    token_cuts.attend_to_all_tokens(query, key, value, shard, attend).sum().backward()
    hardware = Hardware.load("a800")
    shape = ModelShape(
        num_layers=1, hidden_size=32, intermediate_size=1, vocab_size=1, key_value_share=0.5
    )
    priced = sequence_parallel_latency(shape, hardware, Scheme(1, 1, sp=2))
    assert len(sizes) == priced.constant_ms / hardware.collective_overhead_ms
    sent_bytes = 2 * sum(sizes) / 2  # half of it stays
    assert sent_bytes == pytest.approx(priced.linear_ms / 1e3 * hardware.intra_node_rate * 2 * 3)
