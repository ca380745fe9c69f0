"""Schemes, strategies, profiles, fits and default candidates."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import shared_path

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.candidates import enumerate_strategies, load_strategies, power_of_two_schemes
from ds_hydra.strategy.fit import fit_latency, saturation_tokens
from ds_hydra.strategy.profile import LatencyModel

SCHEMES = st.builds(Scheme, st.integers(1, 16), st.integers(1, 8))


@given(st.lists(SCHEMES, min_size=1, max_size=8))
def test_text_form_round_trips_and_order_does_not_matter(schemes):
    strategy = Strategy(tuple(schemes))
    assert Strategy.parse(str(strategy)) == strategy
    assert Strategy(tuple(reversed(schemes))) == strategy


@given(st.lists(SCHEMES, min_size=1, max_size=8))
def test_pipelines_are_disjoint_blocks_of_consecutive_ranks(schemes):
    strategy = Strategy(tuple(schemes))
    blocks = strategy.place()
    assert [rank for block in blocks for rank in block] == list(range(strategy.num_devices))
    assert [len(block) for block in blocks] == [s.num_devices for s in strategy.schemes]


@pytest.mark.parametrize("text", ["", "4", "<4>", "0x<1,1>", "2x<1,1> +", "2*<1,1>", "1x<0,1>"])
def test_text_that_is_no_strategy_is_refused_with_the_form(text):
    with pytest.raises(HydraConfigError, match=r"2x<4,1>|1 or more"):
        Strategy.parse(text)


def test_heterogeneous_means_different_schemes():
    assert Strategy.parse("1x<2,1> + 2x<1,1>").is_heterogeneous
    assert not Strategy.parse("4x<1,1>").is_heterogeneous


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6])
def test_enumerated_strategies_use_every_device_and_are_all_there(num_devices):
    strategies = enumerate_strategies(power_of_two_schemes(num_devices), num_devices)
    assert len(set(strategies)) == len(strategies)
    assert all(s.num_devices == num_devices and len(set(s.schemes)) <= 2 for s in strategies)
    assert Strategy((Scheme(1, 1),) * num_devices) in strategies


def test_nine_strategies_on_four_devices():
    texts = {str(s) for s in enumerate_strategies(power_of_two_schemes(4), 4)}
    assert texts == {
        "4x<1,1>", "2x<2,1>", "2x<1,2>", "1x<4,1>", "1x<2,2>", "1x<1,4>",
        "1x<2,1> + 2x<1,1>", "1x<1,2> + 2x<1,1>", "1x<2,1> + 1x<1,2>",
    }  # fmt: skip


def test_strategies_from_a_file(tmp_path):
    path = tmp_path / "strategies.json"
    path.write_text(json.dumps({"schema": "ds_hydra.strategies/1", "strategies": ["2x<1,1>", "1x<2,1>"]}))
    assert [str(s) for s in load_strategies(str(path))] == ["2x<1,1>", "1x<2,1>"]
    path.write_text(json.dumps({"schema": "something", "strategies": []}))
    with pytest.raises(HydraConfigError, match=r"ds_hydra\.strategies/1"):
        load_strategies(str(path))
    with pytest.raises(HydraConfigError, match="cannot read"):
        load_strategies(str(tmp_path / "absent.json"))


@given(
    quadratic=st.floats(0, 1e-3),
    linear=st.floats(1e-4, 1),
    constant=st.floats(0, 100),
)
def test_fit_recovers_the_coefficients_of_exact_times(quadratic, linear, constant):
    lengths = [64, 256, 1024, 4096]
    times = [quadratic * n * n + linear * n + constant for n in lengths]
    fit = fit_latency(lengths, times)
    np.testing.assert_allclose([fit.model.row_ms([n]) for n in lengths], times, rtol=1e-6)
    assert max(abs(r) for r in fit.relative_residuals) < 1e-6
    assert min(fit.model.quadratic_ms, fit.model.linear_ms, fit.model.constant_ms) >= 0


@given(st.lists(st.floats(0.1, 1000), min_size=3, max_size=3))
def test_fit_of_any_times_is_not_negative(times):
    model = fit_latency([64, 512, 2048], times).model
    assert min(model.quadratic_ms, model.linear_ms, model.constant_ms) >= 0


@pytest.mark.parametrize(
    ("lengths", "times"), [([64], [1.0]), ([64, 64], [1.0, 2.0]), ([64, 128], [1.0, -1.0])]
)
def test_fit_refuses_what_determines_nothing(lengths, times):
    with pytest.raises(ValueError, match="positive, finite times at two lengths"):
        fit_latency(lengths, times)


def test_saturation_is_where_the_constant_stops_to_matter():
    # tokens/s = l / (0.1 l + 10) = 10 l / (l + 100), at best 9.9 in range: 85% of it is reached at l = 531
    model = LatencyModel(quadratic_ms=0.0, linear_ms=0.1, constant_ms=10.0)
    assert saturation_tokens(model, 10_000) == pytest.approx(531, rel=0.02)


def test_packed_row_costs_the_sum_of_its_sequences_and_one_constant():
    model = LatencyModel(quadratic_ms=0.01, linear_ms=1.0, constant_ms=5.0)
    assert model.row_ms([10, 20]) == pytest.approx(0.01 * 500 + 30 + 5)
    assert model.row_ms([]) == 0.0


@pytest.mark.parametrize("size", ["7b", "13b", "32b"])
def test_max_len_equals_the_published_formula(size):
    profile = Profile.load(shared_path(f"profiles/a800_llama2_{size}.json"))
    for reference in profile.document["max_len_reference"]:
        for entry in reference["schemes"]:
            got = profile.max_len_tokens(Scheme(entry["tp"], entry["pp"]), reference["num_devices"])
            if entry["max_len_paper_formula"] > 0:
                assert got == entry["max_len_paper_formula"], entry
            else:
                assert got <= 0, entry


@pytest.mark.parametrize(
    ("document", "wanted"),
    [({}, "schema is None"), ({"schema": "ds_hydra.profile/1"}, "hardware"), ({"schema": 3}, "schema is 3")],
)
def test_broken_profiles_say_what_is_wrong(document, wanted):
    with pytest.raises(HydraConfigError, match=wanted):
        Profile.from_json(document, source="p.json")


def test_scheme_that_was_not_profiled_is_named():
    profile = Profile.from_json(
        {
            "schema": "ds_hydra.profile/1",
            "hardware": {"name": "h", "memory_bytes": 1, "reserved_bytes": 0, "safety_margin_bytes": 0},
            "model": {"name": "m", "num_layers": 1, "hidden_size": 1, "vocab_size": 1},
            "memory": {
                "activation_bytes_per_token_per_layer_per_hidden": {"1": 1},
                "state_bytes_per_layer_per_hidden2": 1,
                "sharded_fraction": 0.5,
            },
            "schemes": [{"tp": 1, "pp": 1, "quadratic_ms": 0, "linear_ms": 1, "constant_ms": 0}],
        }
    )
    with pytest.raises(HydraConfigError, match=r"<2,1>.*m on h.*<1,1>"):
        profile.get_latency(Scheme(2, 1))
    with pytest.raises(HydraConfigError, match=r"TP 2.*\[1\]"):
        profile.max_len_tokens(Scheme(2, 1), 2)
