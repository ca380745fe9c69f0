"""The roofline: its terms by hand, its errors against the published coefficients, and what is
refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from ds_hydra.configs import find_file, list_files
from ds_hydra.configs.files import read_json_object
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.analytic import (
    Hardware,
    ModelShape,
    predict_latency,
    predict_profile,
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


@pytest.mark.parametrize("name", ["a100", "a800", "h100", "h200", "cpu"])
def test_shipped_hardware_gives_a_profile(name):
    assert name in list_files("hardware")
    hardware = Hardware.from_json(read_json_object(find_file("hardware", name)))
    known = Profile.load(find_file("profiles", "a800_llama2_7b"))
    document = predict_profile(
        shape_of(known),
        hardware,
        known.latency,
        name="7b",
        memory=known.document["memory"],
        context_length=4096,
    )
    profile = Profile.from_json(document)
    assert profile.latency.keys() == known.latency.keys()
    assert profile.saturation_tokens.keys() == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema": "x"}, "expected 'ds_hydra.hardware/1'"), ({"peak_flops": -1.0}, "peak_flops is"),
     ({"peak_flops": float("nan")}, "peak_flops is"), ({"efficiency": {}}, "matmul")],
)  # fmt: skip
def test_bad_hardware_is_refused(change, message):
    with pytest.raises(HydraConfigError, match=message):
        Hardware.from_json(read_json_object(find_file("hardware", "a800")) | change)
