"""MaxLen against the published values, and activations against what autograd keeps."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from shared_data import shared_json
from transformers import LlamaConfig, Qwen3Config
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.meta_model import build_random_stage_model, make_model
from ds_hydra.engine.model.stage_forward import compile_each
from ds_hydra.engine.model.tp_plan import module_sides
from ds_hydra.engine.parallel.tensor_parallel import (
    ROW,
    TensorParallel,
    TokenShards,
    find_blocks,
    hook_block,
    hook_linear,
    hook_rowwise,
)
from ds_hydra.engine.profiling.memory import as_the_engine_needs, count_activation
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.profile import engine_states, exchange_bytes

MODELS = ("7b", "13b", "32b")


def slice_config(config, tp):
    """The layer that one rank of a TP group computes: its share of heads and MLP."""
    sliced = copy.deepcopy(config)
    sliced.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    sliced.num_attention_heads //= tp
    sliced.num_key_value_heads = max(1, config.num_key_value_heads // tp)
    sliced.intermediate_size //= tp
    sliced.num_hidden_layers, sliced.vocab_size, sliced.pad_token_id = 1, 8, None
    return sliced


@pytest.mark.parametrize("model", MODELS)
def test_max_len_is_the_published_formula(model):
    document = shared_json(f"profiles/a800_llama2_{model}.json")
    profile = Profile.from_json(document)
    for case in document["max_len_reference"]:
        for entry in case["schemes"]:
            found = profile.max_len_tokens(Scheme(entry["tp"], entry["pp"]), case["num_devices"])
            if entry["max_len_paper_formula"] > 0:
                assert found == entry["max_len_paper_formula"], entry
            else:
                assert found <= 0, entry


@pytest.mark.parametrize("model", MODELS)
def test_max_len_is_within_five_percent_of_the_authors_code_where_micro_batches_are_useful(model):
    """From 4,096 tokens on; below, the few tokens left beside the states make any difference a
    large one.
    """
    document = shared_json(f"profiles/a800_llama2_{model}.json")
    profile = Profile.from_json(document)
    compared = 0
    for case in document["max_len_reference"]:
        for entry in case["schemes"]:
            if entry["max_len_authors_code"] >= 4096:
                found = profile.max_len_tokens(
                    Scheme(entry["tp"], entry["pp"]), case["num_devices"]
                )
                assert found == pytest.approx(entry["max_len_authors_code"], rel=0.05)
                compared += 1
    assert compared >= 20


@pytest.mark.parametrize("model", MODELS)
def test_forward_alone_holds_a_layer_hidden_states_and_logits(model):
    profile = Profile.from_json(shared_json(f"profiles/a800_llama2_{model}.json"))
    forward = profile.forward_only(1 / 3, holds_longer=True)
    memory = profile.memory
    for scheme in [*profile.latency, Scheme.parse("<cp2,4,1>")]:
        longest = forward.max_len_tokens(scheme, 64)
        in_training = profile.max_len_tokens(scheme, 64)
        assert longest > 3 * in_training or in_training <= 0
        if scheme in profile.latency:
            whole_ms = profile.get_latency(scheme).micro_batch_ms([999])
            forward_ms = forward.get_latency(scheme).micro_batch_ms([999])
            assert forward_ms == pytest.approx(whole_ms / 3)
        per_token = forward.memory.rank_bytes(scheme, 64, 1) - forward.memory.rank_bytes(
            scheme, 64, 0
        )
        layer = memory.hidden_size / scheme.ranks_per_stage * memory.activation_bytes[scheme.tp]
        logits = 2 * 2 * memory.vocab_size / scheme.ranks_per_stage
        whole = layer + 2 * 2 * memory.hidden_size / scheme.num_shards + logits
        if scheme.cp > 1:  # rows are a little longer, and all keys and values are gathered
            assert 1.1 * whole < per_token < 2 * whole
        else:
            assert per_token == pytest.approx(whole)
    scheme = Scheme(8, 1)
    shorter = profile.forward_only(1 / 4, holds_longer=False)
    assert shorter.max_len_tokens(scheme, 64) == profile.max_len_tokens(scheme, 64)
    assert profile.forward_only(1 / 3, holds_longer=True).document == profile.document


FAMILIES = [
    LlamaConfig(hidden_size=256, intermediate_size=688, num_attention_heads=8),
    Qwen3Config(
        hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=2, head_dim=32
    ),
]  # fmt: skip


class LoneShard(TokenShards):
    """Group of one rank that computes as a rank of a group of `size` does, with copies in place of
    data from others.
    """

    def post_gather(self, shard_BtH):
        return torch.cat([shard_BtH] * self.size, dim=-2), lambda: None

    def post_reduce_scatter(self, partial_BTH):
        return partial_BTH.narrow(-2, 0, partial_BTH.shape[-2] // self.size).clone(), lambda: None


def kept_by(config, compiled, num_shards):
    """A of App. B.1 of a layer in bf16, on one of `num_shards` ranks that have shards of a
    micro-batch between products: storages that autograd keeps of real CPU tensors, by address.

    It is compiled as the engine does, with attention outside of graphs, as where ranks share a
    sequence.
    """
    num_tokens, sliced = 64, slice_config(config, num_shards)
    model = make_model(sliced, dtype=torch.bfloat16, attn_implementation="sdpa").base_model
    layer = model.layers[0]
    if num_shards > 1:
        tp = TensorParallel(cuts_micro_batches=True)
        with mock.patch.object(tp, "_shards", LoneShard):
            tp.enter(None, num_shards, 0)
        sides = module_sides(model)
        for block in find_blocks(layer, sides):
            hook_block(block, tp)
        for module in layer.modules():
            hook_linear(module, tp)
            if sides.get(module) == ROW:
                hook_rowwise(module, tp)
    shape = (1, num_tokens // num_shards, config.hidden_size)
    hidden = torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
    positions = model.rotary_emb(hidden, torch.arange(num_tokens)[None])
    if compiled:
        partitioned = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
        with mock.patch("torch.compile", partitioned):  # cut as by the compiler, run as it is
            compile_each([layer])
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    outside = torch.compiler.disable(ALL_ATTENTION_FUNCTIONS["sdpa"])
    with (
        mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, sdpa=outside),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        layer(hidden, position_embeddings=positions)
    for tensor in (*model.parameters(), *positions):  # of all layers
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    total = sum(size for size, _ in kept.values())
    return total * num_shards / (num_tokens * config.hidden_size)


def stage_model_of(config, dtype=torch.bfloat16, *, cuts_micro_batches=True):
    tp = SimpleNamespace(cuts_micro_batches=cuts_micro_batches)
    return SimpleNamespace(config=config, params=[torch.zeros(1, dtype=dtype)], tp=tp)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
@pytest.mark.parametrize(
    ("compiled", "num_shards"),
    [(False, 1), (False, 2), *(pytest.param(True, n, marks=pytest.mark.nightly) for n in (1, 2))],
)
def test_a_layer_keeps_what_is_counted(config, compiled, num_shards):
    hydra = HydraConfig(context_length=64, tokens_per_iteration=64, compile_layers=compiled)
    counted = count_activation(stage_model_of(config), num_shards, hydra)
    kept = kept_by(config, compiled, num_shards)
    assert 0.95 * kept < counted < 1.05 * kept


def test_what_is_counted_goes_by_copies_dtypes_and_checkpoints():
    def count(tp=1, dtype=torch.bfloat16, *, cut=True, **hydra):
        config = HydraConfig(context_length=64, tokens_per_iteration=64, **hydra)
        stage_model = stage_model_of(FAMILIES[0], dtype, cuts_micro_batches=cut)
        return count_activation(stage_model, tp, config)

    assert count(dtype=torch.float32) == 2 * count()
    assert count(4, cut=False) == count(4) + 3 * 16  # inputs and fp32 copies of both norms
    for tp, copies in ((1, 1), (4, 4)):
        assert count(tp, cut=False, activation_checkpointing=True) == 2 * copies
    assert count(4, activation_checkpointing=True) == 2
    headless = SimpleNamespace(
        model_type="x", attribute_map={}, to_dict=lambda: {"model_type": "x"}
    )
    hydra = HydraConfig(context_length=64, tokens_per_iteration=64)
    assert count_activation(stage_model_of(headless), 1, hydra) is None


def test_a_layer_is_whole_while_transformers_partitions_models() -> None:
    """As during HydraTrainer.train, where a profile is measured, too."""
    of_training = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
    stage_model = build_random_stage_model(
        FAMILIES[0], dtype=torch.float32, device=torch.device("meta"), num_ranks=2
    )
    assert all(spec.numel for spec in stage_model.specs)
    assert is_deepspeed_zero3_enabled()  # for models of the training
    del of_training


def of_7b(**changes):
    document = shared_json("profiles/a800_llama2_7b.json")
    asked = {
        "slice_bytes_per_layer_per_hidden2": 24.125,
        "input_bytes_per_token_per_layer_per_hidden": 2,
    }
    memory = {k: v for k, v in {**document["memory"], **asked, **changes}.items() if v is not None}
    return Profile.from_json({**document, "memory": memory})


LAYER = 4096 * 38
"""Bytes that one token costs one layer of 7B without TP."""
KEPT = 4096 * 2 + 4096 * 2 + 4 * 32
"""The same where it is checkpointed: its input, attention's output, a number of each head."""
LAYER_7B = 24.125 / 2 * 4096**2
"""Its parameters."""


@pytest.mark.parametrize(
    ("text", "per_token"),
    [
        ("<1,1;ckpt=32>", 32 * 4096 * 2 + LAYER + 30592 * 4),
        ("<1,1;ckpt=20>", 12 * LAYER + 20 * KEPT + LAYER + 30592 * 4),
        ("<1,2;stages=20,12>", 2 * 20 * LAYER),
        ("<1,2;stages=8,24>", 24 * LAYER + 30592 * 4),
        ("<1,4;ckpt=10>", 3 * (6 * LAYER + 2 * KEPT) + LAYER),
        ("<2,2;ckpt=32>", max(2 * 16 * 4096 * 2, 16 * 4096 * 2 + 30592 * 2) + 4096 * 39 / 2),
    ],
)
def test_a_token_of_stages_and_checkpoints_by_hand(text, per_token):
    """The tightest stage: where micro-batches in flight, whole layers, inputs with attention's
    outputs, one layer run again and logits are most.
    """
    memory, scheme = of_7b().memory, Scheme.parse(text)
    long, longer = memory.rank_bytes(scheme, 8, 1 << 20), memory.rank_bytes(scheme, 8, 1 << 21)
    assert (longer - long) / (1 << 20) == pytest.approx(per_token)


@pytest.mark.parametrize(
    ("more", "width"),
    [({}, 4096), ({"attention_width": 8192}, 8192), ({"layer": {"attention_width": 1024.0}}, 1024)],
)
def test_a_checkpointed_layer_keeps_as_many_features_as_heads_have(more, width):
    document = of_7b().document
    memory = Profile.from_json({**document, "model": {**document["model"], **more}}).memory
    assert memory.attention_bytes == 2 * width + 4 * 32


def test_logits_in_chunks_cost_a_rank_one_chunk_at_most():
    whole, chunked = of_7b(), of_7b(logit_chunk_bytes=2**29)
    single, short, long = Scheme(1, 1), 100, 1 << 20
    for num_tokens, logits in ((short, short * 30592 * 2), (long, 2**29)):
        each = [p.memory.rank_bytes(single, 8, num_tokens) for p in (whole, chunked)]
        assert each[1] - each[0] == pytest.approx(logits)
    for text in ("<1,1>", "<2,1>", "<sp2,1>", "<1,1;ckpt=32>", "<1,2;stages=14,18>"):
        for chunk in (2**20, 2**29, 2**36):
            memory, scheme = of_7b(logit_chunk_bytes=chunk).memory, Scheme.parse(text)
            most = memory.max_len_tokens(scheme, 8)
            fits = [
                memory.rank_bytes(scheme, 8, n) <= memory.usable_bytes for n in (most, most + 1)
            ]
            assert fits == [True, False]
    for text, logits in (("<1,1;ckpt=32>", 30592 * 4), ("<1,1>", 0)):
        scheme = Scheme.parse(text)
        grown = [
            profile.memory.rank_bytes(scheme, 8, long + 1)
            - profile.memory.rank_bytes(scheme, 8, long)
            for profile in (whole, chunked)
        ]
        assert grown[0] - grown[1] == pytest.approx(logits)
    forward = [p.forward_only(1 / 3, holds_longer=True).memory for p in (whole, chunked)]
    scheme = Scheme(1, 1)
    grown = [m.rank_bytes(scheme, 8, long + 1) - m.rank_bytes(scheme, 8, long) for m in forward]
    assert grown[0] - grown[1] == pytest.approx(30592 * 4, rel=0.1)


def test_what_a_profile_lacks_for_a_part_is_named():
    wanted, text = "input_bytes_per_token_per_layer_per_hidden", "<1,2;ckpt=2>"
    profile, scheme = of_7b(**{wanted: None}), Scheme.parse(text)
    with pytest.raises(HydraConfigError, match=f"{text}.*add {wanted} to its memory"):
        profile.max_len_tokens(scheme, 8)
    with pytest.raises(HydraConfigError, match=f"{text}.*add {wanted} to its memory"):
        Costs(profile).extended([scheme])
    assert not profile.memory.knows(scheme)
    assert profile.memory.knows(Scheme(1, 2))
    with pytest.raises(HydraConfigError, match="input_bytes_per_token_per_layer_per_hidden is -1"):
        of_7b(input_bytes_per_token_per_layer_per_hidden=-1)


@pytest.mark.parametrize(("text", "wanted"), [("<2,1>", 1 << 29), ("<2,1;gather>", 5 << 26)])
def test_exchange_buffers_count_with_slices_that_stay_and_that_pass(text, wanted):
    """1 GiB of two rounds, of TP 2 half; gathered layers have one round on the wire, and a quarter
    more.
    """
    scheme = Scheme.parse(text)
    without, counted = (of_7b(exchange_bytes=n).memory for n in (0, 1 << 30))
    assert counted.rank_bytes(scheme, 8, 9) - without.rank_bytes(scheme, 8, 9) == wanted


def test_exchange_buffers_are_those_of_a_table_that_is_larger_than_a_layer():
    assert exchange_bytes(10, 4, 2.0) == 2 * 2 * (2 * 10) * 2 / 2
    assert exchange_bytes(10, 30, 2.0) == 2 * 2 * (10 + 30) * 2 / 2
    large = replace(of_7b(exchange_bytes=4 << 20).memory, vocab_size=int(3 * LAYER_7B / 4096))
    without = replace(large, exchange_bytes=0.0)
    one = Scheme(1, 1, gather=True)
    added = large.rank_bytes(one, 8, 9) - without.rank_bytes(one, 8, 9)
    assert added == pytest.approx(1.25 * 3 / 4 * (4 << 20), rel=1e-3)


@pytest.mark.parametrize(
    ("num_layers", "tables", "slots_and_kept"),
    [
        (32, 2, 4 * (3 + 3)),  # embedding in one slot, head in the other
        (31, 2, 4 * (3 + 1)),  # both in the first
        (32, 1, 4 * (1 + 1) + 6 * 3),  # stays, in 16 bit, with sums of gradients in 32
        (31, 1, 4 * (1 + 1) + 6 * 3),
    ],
)
def test_gathered_layers_take_turns_with_embedding_and_head(num_layers, tables, slots_and_kept):
    """A table as large as three layers: bytes of what passes, in layers."""
    memory = replace(
        of_7b(vocabulary_tables=tables, exchange_bytes=0).memory,
        num_layers=num_layers,
        vocab_size=int(3 * LAYER_7B / 4096),
    )
    sharded = memory._all_state_bytes() / 8 * memory.sharded_fraction
    passing = memory.rank_bytes(Scheme(1, 1, gather=True), 8, 0) - sharded
    assert passing == pytest.approx(slots_and_kept * LAYER_7B, rel=1e-3)


@pytest.mark.parametrize("tables", [1, 2])
def test_tables_of_the_vocabulary_take_what_other_parameters_take(tables):
    """24 bytes a parameter of LLaMA-2 7B with 128K tokens: 18 in shards, 6 held; a stage holds one
    table.
    """
    document = shared_json("profiles/a800_llama2_7b.json")
    states = engine_states(12.0, 2.0)
    document["model"]["vocab_size"] = 128_256
    document["memory"] |= {**states, "vocabulary_tables": tables}
    memory = Profile.from_json(document).memory
    layers, table = 32 * 12 * 4096**2, 128_256 * 4096
    for text, held in (("<1,1>", layers + tables * table), ("<2,2>", (layers / 2 + table) / 2)):
        found = memory.rank_bytes(Scheme.parse(text), 8, 0)
        assert found == pytest.approx((layers + tables * table) * 18 / 8 + held * 6)


@pytest.mark.parametrize(("text", "copies", "share"), [
    ("<1,1>", 5, 1), ("<8,1>", 33, 8), ("<sp4,1>", 17, 4), ("<2,2>", 9, 2), ("<cp2,1;ckpt=4>", 5, 2),
])  # fmt: skip
def test_sums_in_one_order_take_copies_of_the_gradient_of_queries(text, copies, share):
    """32 heads of 128, 132 multiprocessors."""
    document = shared_json("profiles/a800_llama2_7b.json")
    document["model"] |= {"num_attention_heads": 32, "num_key_value_heads": 32}
    document["memory"] |= engine_states(12.0, 2.0)
    scheme, memory = Scheme.parse(text), Profile.from_json(document).memory
    ordered = replace(memory, ordered_multiprocessors=132)
    more = ordered.rank_bytes(scheme, 8, 32768) - memory.rank_bytes(scheme, 8, 32768)
    assert more == pytest.approx(copies * 4096 / share * 4 * 32768)
    alone = replace(memory, forward_only=True), replace(ordered, forward_only=True)
    assert alone[0].rank_bytes(scheme, 8, 32768) == alone[1].rank_bytes(scheme, 8, 32768)


def test_keys_of_all_rows_and_what_a_row_sends_of_them():
    """32 heads in parts of 2, 4, 9 and 17 in place of one: all parts are there, and one has its
    gradient; half as much again of a row is sent, comes back and is its own.
    """
    memory = replace(of_7b().memory, num_heads=32)
    assert memory.key_value_parts(Scheme(1, 1, cp=2)) == [2, 4, 9, 17]
    in_one = replace(memory, num_heads=1)
    for cp in (2, 4):
        found = (m.rank_bytes(Scheme(1, 1, cp=cp), 8, 1000) for m in (in_one, memory))
        more = next(found) - next(found)
        assert more == pytest.approx(1000 * 2 * 4096 * 2 * (1 - 17 / 32) * (1 + 1.5 / cp))


@pytest.mark.parametrize(("measured", "name", "asked", "counted"), [
    (False, "A800", True, 132), (True, "A800", True, 0), (False, "cpu", True, 0),
    (False, "A800", False, 0),
])  # fmt: skip
def test_they_are_added_to_profiles_that_were_measured_without(measured, name, asked, counted):
    document = shared_json("profiles/a800_llama2_7b.json")
    document.pop("measured_with", None)
    document = {**document, "deterministic": measured}
    document["hardware"]["name"] = name
    config = HydraConfig(context_length=64, tokens_per_iteration=64, deterministic=asked)
    found = as_the_engine_needs(Profile.from_json(document), None, config, 8)
    assert found.memory.ordered_multiprocessors == counted
