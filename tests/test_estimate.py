"""Profiles of models that nobody measured, from a config.json and a description of hardware."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from command_line import accepted
from spaces import full_space

from ds_hydra.configs import list_files
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Hardware
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.cost_models.decoder import describe_config
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.cost_models.flops import profile_peak_flops
from ds_hydra.strategy.profiles.memory_model import GRADIENT_BYTES, OPTIMIZER_BYTES
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, schemes_of

CONFIG = {
    "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 160,
    "vocab_size": 1000, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


MIXTURE = {**CONFIG, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    ("changes", "share", "shared"),
    [
        ({}, 1.0, 0),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, 0.25, 0),
        ({"first_k_dense_replace": 1, "n_shared_experts": 2}, 0.75, 80),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, 0.75, 0),
        ({"shared_expert_intermediate_size": 96}, 1.0, 96),
    ],
)
def test_a_mixture_by_hand(changes, share, shared):
    shape, heads = describe_config({**MIXTURE, **changes}, "x")
    assert heads == 8
    attention, dense, router = (2 + 2 / 4) * 64**2, 3 * 64 * 160, 64 * 8
    router += 64 * ("shared_expert_intermediate_size" in changes)  # its gate
    active = (1 - share) * dense + share * (3 * 64 * (shared + 2 * 40) + router)
    assert shape.means.active_params == pytest.approx(attention + active)
    assert shape.means.params == pytest.approx(attention + active + share * 3 * 64 * 6 * 40)


def test_ranks_that_share_experts_hold_fewer_and_wait_for_the_busiest():
    even, skewed = (
        estimate_from_config("mixtral_8x7b", "h100", 16, 8192, skew)[0] for skew in (1.0, 2.0)
    )
    shared, alone = Scheme(1, 1, sp=8, ep=8), Scheme(8, 1)
    held = even.memory.rank_bytes(shared, 64, 0)
    fraction = even.document["memory"]["expert_fraction"]
    rest = 4096**2 * 2.5 + 8 * 4096
    assert fraction == pytest.approx(1 - rest / (rest + 3 * 8 * 4096 * 14336))
    every = even.memory.rank_bytes(Scheme(1, 1, sp=8), 64, 0)
    of_experts = 32 * 3 * 8 * 4096 * 14336 * (2 + GRADIENT_BYTES)
    assert every - held == pytest.approx(of_experts * 7 / 8)
    assert even.get_latency(shared).linear_ms < skewed.get_latency(shared).linear_ms
    assert even.get_latency(alone) == skewed.get_latency(alone)
    cluster = find_cluster(even, 8)
    pulls = [
        cluster.link_times(Strategy((scheme,))).pull_ms for scheme in (shared, Scheme(1, 1, sp=8))
    ]
    assert pulls[0] < 0.5 * pulls[1]


def test_whole_experts_of_a_tp_group_are_as_many_bytes_as_cut_ones():
    profile, _ = estimate_from_config("mixtral_8x7b", "h100", 16, 8192)
    for wide in (Scheme(4, 1), Scheme(4, 1, gather=True)):
        cut, whole, fewer = (
            profile.memory.rank_bytes(s, 16, 0)
            for s in (wide, replace(wide, ep=4), replace(wide, sp=2, ep=8))
        )
        assert whole == pytest.approx(cut, rel=1e-9)
        assert fewer < 0.99 * cut
    cluster = find_cluster(profile, 16)
    cut, whole = (cluster.link_times(Strategy((Scheme(4, 1, ep=ep),) * 4)) for ep in (1, 4))
    assert whole.pull_ms == pytest.approx(cut.pull_ms)


def test_ep_of_a_measured_profile_is_estimated_from_sp():
    profile, _ = estimate_from_config("mixtral_8x7b", "h100", 8, 8192)
    strategies = [Strategy.parse("1x<sp8,1;ep=8>"), Strategy.parse("2x<sp4,1;ep=2>")]
    measured = Costs(profile).table(s for s in profile.latency if s.sp == 1)
    costs = Costs.of(measured, 8)
    known = costs.extended(schemes_of(strategies))
    assert set(known.latency) - set(measured.latency) == {s.schemes[0] for s in strategies}
    assert known.assumed == {s.schemes[0] for s in strategies}
    for shared in known.assumed:  # tokens travel to experts
        shared_ms, alone_ms = known.get_latency(shared), costs.find(replace(shared, ep=1)).latency
        assert shared_ms.linear_ms > alone_ms.linear_ms
        assert shared_ms.constant_ms > alone_ms.constant_ms
    dense, _ = estimate_from_config("llama2_7b", "h100", 8, 8192)
    assert Costs.of(dense, 8).find(strategies[0].schemes[0]) is None


def test_a_wide_proposal_has_schemes_that_share_experts_where_they_can_run():
    profile, _ = estimate_from_config("gpt_oss_20b", "h100", 16, 8192)
    measured = Costs(profile).table(s for s in profile.latency if s.sp == 1)
    around = {
        "num_devices": 16,
        "context_length": 8192,
        "cluster": find_cluster(measured, 16),
    }
    known = full_space(measured, **around)
    assert Scheme(1, 1, sp=8, ep=8) in known.latency
    known = full_space(measured, **around, can_run=lambda s: s.ep == 1)
    assert all(scheme.ep == 1 for scheme in known.latency)


def test_8_bit_products_are_an_estimate_that_is_called_one():
    scheme = Scheme(1, 1)
    for name in ("h100", "h200", "h20", "b200"):
        (plain, _), (eight, assumed) = (
            estimate_from_config("llama2_7b", name, 8, 8192, float8=f) for f in (False, True)
        )
        ratio = eight.latency[scheme].micro_batch_ms([8192])
        ratio /= plain.latency[scheme].micro_batch_ms([8192])
        assert 0.5 < ratio < 0.95
        (said,) = (text for text in assumed if "8-bit products: an estimate" in text)
        assert f"under <1,1> is {ratio:.2f} of" in said
        assert "with 8-bit products" in eight.document["source"]
    with pytest.raises(HydraConfigError, match=r"A800-80GB has no 8-bit products"):
        estimate_from_config("llama2_7b", "a800", 8, 8192, float8=True)


def test_every_hardware_runs_a_preset_and_says_what_is_assumed():
    times = {}
    for name in set(list_files("hardware")) - {"cpu"}:
        profile, assumed = estimate_from_config("llama2_7b", name, 8, 16384)
        times[name] = profile.get_latency(Scheme(8, 1)).micro_batch_ms([16384])
        assert any("roofline" in sentence for sentence in assumed)
        assert profile.max_len_tokens(Scheme(8, 1), 64) > 8192
        assert profile_peak_flops(profile) == Hardware.load(name).peak_flops
        assert profile.saturation_tokens.keys() == {1, 2, 4, 8}
    assert times["b200"] < times["h100"] < times["a100"] < times["h20"]
    states = profile.document["memory"]["sharded_fraction"]
    assert states == (2 + OPTIMIZER_BYTES) / (4 + OPTIMIZER_BYTES + GRADIENT_BYTES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "qwen2 has no hidden_size, so it cannot be described"),
        ({"num_hidden_layers": None, "text_config": {}}, "its text_config may be one"),
        (
            {"num_experts": 8},
            "qwen2 has 8 experts, and a token chooses 0 of them (num_experts_per_tok",
        ),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"vocab_size": "many"}, "vocab_size is 'many', expected a whole number"),
        ({"num_key_value_heads": 9}, "num_key_value_heads is 9"),
    ],
)
def test_models_that_cannot_be_described(changes, words):
    with pytest.raises(HydraConfigError) as caught:
        describe_config({**CONFIG, **changes}, "config.json")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({}, ""),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, "qwen2 has layers of linear"),
    ],
)
def test_simulate_counts_flops_or_says_why_not(tmp_path, changes, unknown):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    options = ["--hardware", "h100", "--devices", 2, "--iterations", 1]
    options += ["--systems", "ds_hydra", "--space", "plain", "--context", 1024, "--out"]
    result = accepted("simulate", "--model", path, *options, tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    (ours,) = document["systems"]
    if unknown:
        assert unknown in document["flops_unknown"]
        assert f"TFLOP/s and MFU are left out: {unknown}" in result.stdout
        assert (ours["tflops_per_device"], ours["mfu"]) == (None, None)
        return
    assert ours["mfu"] == pytest.approx(ours["tflops_per_device"] * 1e12 / 989e12)
    shape, _ = describe_config(CONFIG, "x")
    per_token = 6 * (4 * shape.means.params + 1000 * 64)
    least = per_token * ours["tokens_per_s"] / 2 / 1e12
    assert least < ours["tflops_per_device"] < 3 * least  # attention on top
    assert f"{ours['tflops_per_device']:.3g}, {ours['mfu']:.0%}" in result.stdout


def test_simulate_answers_for_a_mixture():
    options = ["--hardware", "h100", "--devices", 16, "--iterations", 1]
    options += ["--systems", "megatron", "--context", 8192, "--tokens", 50000]
    result = accepted(
        "simulate", "--model", "gpt_oss_20b", *options, "--expert-skew", 1.5, "--json"
    )
    assert "busiest rank's get 1.5 times the mean" in result.stderr
    assert json.loads(result.stdout)["num_devices"] == 16
