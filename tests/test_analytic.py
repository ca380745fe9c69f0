"""The roofline: its terms by hand, its errors against the published coefficients, and what is
refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_hydra.configs import find_file
from ds_hydra.configs.files import find_profile, read_json_object
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.analytic import (
    Experts,
    Hardware,
    ModelShape,
    predict_latency,
)
from ds_hydra.strategy.cost_models.decoder import read_decoder
from ds_hydra.strategy.cost_models.flops import (
    Attention,
    ModelFlops,
    find_peak_flops,
    profile_flops,
)

PLAIN = Hardware(
    name="plain", devices_per_node=2, memory_bytes=1, matmul_flops=1e9, attention_flops=1e9, memory_rate=1e9,
    intra_node_rate=1e6, inter_node_rate=1e5, layer_overhead_ms=1.0, collective_overhead_ms=0.5,
)  # fmt: skip
SHAPE = ModelShape(num_layers=2, hidden_size=10, intermediate_size=20, vocab_size=30)


def shape_of(profile: Profile) -> ModelShape:
    model = profile.document["model"]
    names = ("num_layers", "hidden_size", "intermediate_size", "vocab_size")
    return ModelShape(**{name: model[name] for name in names})


def a800() -> Hardware:
    return Hardware.from_json(read_json_object(find_file("hardware", "a800")))


def test_terms_by_hand():
    """One rank: 6 (2 (4*100 + 3*200) + 10*30) FLOP and 3*36*10*2 bytes a token, 7*10*2 FLOP a
    pair.
    """
    model = predict_latency(SHAPE, PLAIN, Scheme(1, 1))
    assert model.linear_ms == pytest.approx(1e3 * (6 * 2300 + 2160) / 1e9)
    assert model.quadratic_ms == pytest.approx(1e3 * 140 / 1e9)
    assert model.constant_ms == 2.0


def test_products_in_8_bits_by_hand():
    """All of the layers' 2 (4*100 + 3*200) elements, and the casts of 16*10 + 3*30 features a token
    and layer; on two ranks half of each.
    """
    fast = replace(PLAIN, float8_flops=2e9)
    for tp in (1, 2):
        plain, eight = (
            predict_latency(SHAPE, fast, Scheme(tp, 1), float8=is_on) for is_on in (False, True)
        )
        saved, casts = 6 * 2000 / tp * (1 / 1e9 - 1 / 2e9), 8 * 2 * (80 + 90) / tp / 1e9
        assert plain.linear_ms - eight.linear_ms == pytest.approx(1e3 * (saved - casts))
        assert eight.constant_ms - plain.constant_ms == pytest.approx(1e3 * 8 * 2000 / tp / 1e9)
        assert eight.quadratic_ms == plain.quadratic_ms
    with pytest.raises(HydraConfigError, match=r"plain has no 8-bit products.*as h100"):
        predict_latency(SHAPE, PLAIN, Scheme(1, 1), float8=True)


def test_experts_that_tokens_choose_from_multiply_in_16_bits():
    fast = replace(PLAIN, float8_flops=2e9, memory_rate=1e30)
    experts = Experts(num=4, chosen=2, size=20, layer_share=1.0)
    sparse = replace(SHAPE, experts=experts)
    times = [predict_latency(sparse, fast, Scheme(1, 1), float8=f).linear_ms for f in (False, True)]
    assert times[0] - times[1] == pytest.approx(1e3 * 6 * 2 * 400 * (1 / 1e9 - 1 / 2e9))


def test_collectives_take_the_link_of_the_group():
    """Two ranks exchange 4 * 2 * 1/2 * 2 * 10 bytes a token and layer; four ranks leave the
    node.
    """
    two, four = (predict_latency(SHAPE, PLAIN, Scheme(tp, 1)) for tp in (2, 4))
    one = predict_latency(SHAPE, PLAIN, Scheme(1, 1))
    assert two.linear_ms == pytest.approx(one.linear_ms / 2 + 1e3 * 160 / 1e6)
    assert four.linear_ms == pytest.approx(one.linear_ms / 4 + 1e3 * 240 / 1e5)
    assert two.constant_ms == pytest.approx(2 * (1 + 4 * 0.5))


@pytest.mark.parametrize(("model", "median"), [("7b", 0.05), ("13b", 0.05), ("32b", 0.06)])
def test_linear_term_is_near_the_published_one(model, median):
    profile = Profile.load(find_file("profiles", f"a800_llama2_{model}"))
    errors = [
        abs(predict_latency(shape_of(profile), a800(), scheme).linear_ms / known.linear_ms - 1)
        for scheme, known in profile.latency.items()
    ]
    assert np.median(errors) < median
    assert max(errors) < 0.20


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema": "x"}, "expected 'ds_hydra.hardware/1'"), ({"peak_flops": -1.0}, "peak_flops is"),
     ({"peak_flops": float("nan")}, "peak_flops is"), ({"efficiency": {}}, "matmul")],
)  # fmt: skip
def test_bad_hardware_is_refused(change, message):
    with pytest.raises(HydraConfigError, match=message):
        Hardware.from_json(read_json_object(find_file("hardware", "a800")) | change)


def test_flops_by_hand():
    """6 (2 (4*100 + 3*200) + 10*30) FLOP a token, 12 * 10 * l^2 / 2 a layer; two sequences cost
    less than one of all tokens.
    """
    flops = ModelFlops.of_shape(SHAPE)
    assert flops.of([7]) == pytest.approx(6 * 2300 * 7 + 2 * 6 * 10 * 49)
    assert flops.of([3, 4]) == pytest.approx(6 * 2300 * 7 + 2 * 6 * 10 * (9 + 16))
    assert flops.tflops([7], time_ms=2.0, num_devices=3) == pytest.approx(
        flops.of([7]) / 0.002 / 3 / 1e12
    )
    assert np.isnan(flops.tflops([7], time_ms=0.0, num_devices=3))


def test_a_window_sees_what_it_sees():
    """Of 5 tokens under a window of 2: half of 2 x 2, then 2 for each of 3."""
    flops = ModelFlops(attention=(Attention(width=1.0, window=2),))
    assert flops.of([5]) == pytest.approx(12 * (2 * 2 / 2 + 2 * 3))
    assert flops.of([2]) == ModelFlops(attention=(Attention(width=1.0),)).of([2])


MIXED = ["sliding_attention", "full_attention"]
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 10, "intermediate_size": 20, "vocab_size": 30, "num_attention_heads": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, [None, None]),
        ({"sliding_window": 4}, [4, 4]),
        ({"sliding_window": 4, "use_sliding_window": False}, [None, None]),
        ({"sliding_window": 4, "layer_types": MIXED}, [4, None]),
        ({"layer_types": ["attention", "full_attention"]}, [None, None]),
        ({"layer_types": ["mamba", "attention"]}, "layers of mamba"),
        ({"layer_types": ["linear_attention"] * 2}, "layers of linear_attention"),
        ({"layer_types": MIXED}, "without sliding_window"),
        ({"mamba_d_ssm": 16}, "layers that do not attend (mamba_d_ssm)"),
        ({"hybrid_override_pattern": "M-M*"}, "layers that do not attend"),
        ({"sliding_window": 4, "sliding_window_pattern": 6}, "which of its layers"),
        ({"sliding_window": 4, "model_type": "gemma2"}, "which of its layers"),
    ],
)
def test_what_layers_attend_to_is_read_or_said_not_to_be_known(config, windows):
    flops = ModelFlops.of_decoder(read_decoder({**SIZES, **config}, "x"))
    if isinstance(windows, str):
        assert windows in flops.unknown
        assert np.isnan(flops.of([3]))
    else:
        seen = [min(5, window or 5) for window in windows]
        assert flops.of([5]) == pytest.approx(
            6 * 2300 * 5 + 12 * 10 * sum(w * 5 - w**2 / 2 for w in seen)
        )
    assert ModelFlops.from_json(flops.to_json()) == flops


def test_a_profile_says_its_flops_or_its_sizes():
    profile = Profile.load(find_profile("a800_llama2_7b"))
    flops = profile_flops(profile)
    assert flops.of([1]) == pytest.approx(6 * 6.61e9, rel=2e-3)  # without the embedding
    told = {**profile.document, "model": {**profile.document["model"], "flops": {"unknown": "x"}}}
    assert profile_flops(Profile.from_json(told)).unknown == "x"
    less = {**profile.document, "model": {**profile.document["model"], "intermediate_size": None}}
    assert "intermediate_size is missing" in profile_flops(Profile.from_json(less)).unknown
    for wrong in ({}, {"per_token": -1, "attention": []}, {"per_token": 1, "attention": [3]}, []):
        bad = {**profile.document, "model": {**profile.document["model"], "flops": wrong}}
        with pytest.raises(HydraConfigError):
            profile_flops(Profile.from_json(bad))


def test_the_peak_is_that_of_the_device():
    assert find_peak_flops("NVIDIA H100 80GB HBM3") == find_peak_flops("H100-80GB") == 989e12
    assert find_peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert find_peak_flops("NVIDIA H100 PCIe") is None  # 756e12, which no file says
    assert find_peak_flops("cpu") is None
    assert find_peak_flops(None) is None
