"""MaxLen against the published values, and activation memory traced without a device."""

from __future__ import annotations

import pytest
import torch
from shared_data import shared_json
from transformers import LlamaConfig, Qwen3Config

from ds_hydra.engine.memory_trace import trace_layer_memory
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Profile, Scheme

MODELS = ("7b", "13b", "32b")


@pytest.mark.parametrize("model", MODELS)
def test_max_len_is_the_published_formula(model):
    document = shared_json(f"profiles/a800_llama2_{model}.json")
    profile = Profile.from_json(document)
    for case in document["max_len_reference"]:
        for entry in case["schemes"]:
            found = profile.max_len_tokens(Scheme(entry["tp"], entry["pp"]), case["num_devices"])
            assert found == pytest.approx(entry["max_len_paper_formula"], abs=1.5)


@pytest.mark.parametrize("model", MODELS)
def test_max_len_is_within_five_percent_of_the_authors_code_where_rows_are_useful(model):
    """From 4,096 tokens on; below, the few tokens left beside the states make any difference a large one."""
    document = shared_json(f"profiles/a800_llama2_{model}.json")
    profile = Profile.from_json(document)
    compared = 0
    for case in document["max_len_reference"]:
        for entry in case["schemes"]:
            if entry["max_len_authors_code"] >= 4096:
                found = profile.max_len_tokens(Scheme(entry["tp"], entry["pp"]), case["num_devices"])
                assert found == pytest.approx(entry["max_len_authors_code"], rel=0.05)
                compared += 1
    assert compared >= 20


def test_a_profile_without_room_for_slices_gives_up_no_more_than_it_counts():
    document = shared_json("profiles/a800_llama2_7b.json")
    schemes = (Scheme(1, 2), Scheme(2, 1), Scheme(8, 1), Scheme(2, 8))
    before = Profile.from_json(document).memory

    def with_repulls(layers, slice_bytes):
        memory = {
            **document["memory"],
            "repull_layers": layers,
            "slice_bytes_per_layer_per_hidden2": slice_bytes,
        }
        return Profile.from_json({**document, "memory": memory}).memory

    for scheme in schemes:
        saved = [
            before.rank_bytes(scheme, 8, 0) - with_repulls(layers, 24.0).rank_bytes(scheme, 8, 0)
            for layers in (0, 3, 32)
        ]
        one = 4096**2 / scheme.tp * 24.0
        wanted = [0, one, (32 / scheme.pp - 2) * one]
        assert saved == pytest.approx(wanted, rel=1e-6, abs=1.0)
        held = 210 * 0.25 * 4096**2 / scheme.tp  # of one layer, gradients too
        assert with_repulls(32, 1e6).dropped_bytes(scheme) == pytest.approx((32 / scheme.pp - 2) * held)
    for layers in (-1, True, "all", 2.5):
        with pytest.raises(HydraConfigError, match=r"repull_layers is .* expected a count from 0 up"):
            with_repulls(layers, 24.0)


def small_llama(**more) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=64,
        **more,
    )


def test_activations_grow_with_tokens_and_width_of_the_type():
    memory = trace_layer_memory(small_llama(), num_tokens=512)
    twice = trace_layer_memory(small_llama(), num_tokens=1024)
    assert twice.kept_bytes == pytest.approx(2 * memory.kept_bytes, rel=0.01)
    wide = trace_layer_memory(small_llama(), num_tokens=512, dtype=torch.float32)
    assert 1.5 < wide.kept_bytes / memory.kept_bytes <= 2.0
    assert memory.peak_bytes >= memory.kept_bytes


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_checkpointing_keeps_the_input_only(dtype, size):
    memory = trace_layer_memory(small_llama(), num_tokens=512, dtype=dtype, checkpointing=True)
    assert memory.kept_bytes == 512 * 256 * size
    assert memory.activation_bytes == size


def test_trace_counts_what_autograd_really_keeps():
    """The same layer on real CPU tensors, storages counted by address."""
    config = small_llama()
    traced = trace_layer_memory(config, num_tokens=64, dtype=torch.float32)
    from transformers import AutoModelForCausalLM

    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").base_model
    hidden = torch.randn(1, 64, 256, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        positions = model.rotary_emb(hidden, torch.arange(64)[None])
        kept.clear()
        model.layers[0](hidden, position_embeddings=positions)
    assert traced.kept_bytes == pytest.approx(sum(size for size, _ in kept.values()), rel=0.02)


def test_a_slice_keeps_less_and_the_whole_stream_stays():
    whole, half = (trace_layer_memory(small_llama(), num_tokens=512, tp=tp) for tp in (1, 2))
    assert 0.5 * whole.kept_bytes < half.kept_bytes < whole.kept_bytes
    assert half.activation_bytes > whole.activation_bytes


def test_grouped_query_heads_and_other_models_are_traced():
    qwen = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=32
    )
    assert trace_layer_memory(qwen, num_tokens=128, tp=2).kept_bytes > 0
    with pytest.raises(UnsupportedModelError, match="8 attention heads do not divide into TP 3"):
        trace_layer_memory(small_llama(), tp=3)
