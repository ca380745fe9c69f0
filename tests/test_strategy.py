"""Schemes, strategies, profiles, fits and default candidates."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import make_profile, wide_schemes

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.profile import (
    LatencyModel,
    fit_latency,
    saturation_by_tp,
    saturation_tokens,
)
from ds_hydra.strategy.schemes.enumeration import (
    enumerate_strategies,
    load_strategies,
    power_of_two_schemes,
)

SCHEMES = st.builds(Scheme, st.integers(1, 16), st.integers(1, 8)) | wide_schemes()


@given(st.lists(SCHEMES, min_size=1, max_size=8))
def test_text_form_round_trips_and_order_does_not_matter(schemes):
    strategy, backwards = Strategy(tuple(schemes)), Strategy(tuple(reversed(schemes)))
    assert Strategy.parse(str(strategy)) == strategy == backwards
    assert len({strategy, backwards, Strategy.parse(str(strategy))}) == 1, "equal hashes"


@given(st.lists(SCHEMES, min_size=1, max_size=8))
def test_pipelines_are_disjoint_blocks_of_consecutive_ranks(schemes):
    strategy = Strategy(tuple(schemes))
    blocks = strategy.place()
    assert [rank for block in blocks for rank in block] == list(range(strategy.num_devices))
    assert [len(block) for block in blocks] == [s.num_devices for s in strategy.schemes]


@given(SCHEMES)
def test_a_scheme_round_trips_as_text_and_in_a_document(scheme):
    assert Scheme.parse(str(scheme)) == scheme
    assert len({scheme, Scheme.parse(str(scheme))}) == 1, "equal hashes"
    document = json.loads(json.dumps({"other": 1, **scheme.to_json()}))
    assert Scheme.from_json(document) == scheme


def test_plain_schemes_are_written_and_ordered_as_ever():
    schemes = [Scheme(2, 1), Scheme(1, 4), Scheme(1, 2)]
    assert [str(s) for s in sorted(schemes)] == ["<1,2>", "<1,4>", "<2,1>"]
    assert Scheme(2, 1).to_json() == {"tp": 2, "pp": 1}
    assert (
        str(Strategy.parse("<1,4> + 2x<2,1> + <4,1> + <1,8>"))
        == "1x<4,1> + 2x<2,1> + 1x<1,8> + 1x<1,4>"
    )
    with_sp = Strategy.parse("<2,1> + <sp2,2,1> + <4,1> + <sp4,2>")
    assert [str(s) for s in with_sp.schemes] == ["<4,1>", "<sp2,2,1>", "<sp4,2>", "<2,1>"]


@pytest.mark.parametrize(
    ("text", "scheme", "canonical"),
    [
        ("<2,4;stages=9,8,8,7 ; ckpt=12>", Scheme(2, 4, stages=(9, 8, 8, 7), ckpt=12), "<2,4;ckpt=12;stages=9,8,8,7>"),
        ("<sp4,1>", Scheme(1, 1, sp=4), "<sp4,1>"),
        ("< sp 4 , 2 >", Scheme(1, 2, sp=4), "<sp4,2>"),
        ("<sp1,4,1>", Scheme(4, 1), "<4,1>"),
        ("<sp4,cp2,1>", Scheme(1, 1, sp=4, cp=2), "<sp4,cp2,1>"),
        ("< cp 2 , sp 4 , 2 , 1 >", Scheme(2, 1, sp=4, cp=2, context_first=True), "<cp2,sp4,2,1>"),
        ("<cp2,sp1,1>", Scheme(1, 1, cp=2), "<cp2,1>"),
        ("< sp4,1 ; gather >", Scheme(1, 1, sp=4, gather=True), "<sp4,1;gather>"),
        ("<2,1; gather;ckpt=3>", Scheme(2, 1, ckpt=3, gather=True), "<2,1;ckpt=3;gather>"),
        ("<sp4,2;ckpt=1; ep=2>", Scheme(1, 2, sp=4, ckpt=1, ep=2), "<sp4,2;ep=2;ckpt=1>"),
        ("<sp2,2,1;ep=4;gather>", Scheme(2, 1, sp=2, ep=4, gather=True), "<sp2,2,1;ep=4;gather>"),
    ],
)  # fmt: skip
def test_parts_in_text(text, scheme, canonical):
    assert Scheme.parse(text) == scheme
    assert str(scheme) == canonical
    one = Scheme(1, 1, gather=scheme.gather)
    assert Strategy.parse(f"2x{text} + {one}") == Strategy((scheme, scheme, one))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<2,1;ckpt>", "cannot read 'ckpt'.*ckpt, stages, ep, gather, hpz"),
        ("<2,1;sp=2>", "cannot read 'sp=2'"),
        ("<2,1;ckpt=1;ckpt=2>", "says ckpt twice"),
        ("<2,1;ckpt=0>", "ckpt is 0, expected one number from 1 up"),
        ("<2,2;stages=3>", "1 numbers of layers for PP 2; give one per stage"),
        ("<2,2;stages=4,0>", "1 layer or more for each of 2 stages"),
        ("<2,1;gather;gather>", "says gather twice"),
        (
            "<sp4,1;ep=3>",
            "ep of a scheme with SP 4 x TP 1 is 3, expected a divisor of 4;.*<sp4,1;ep=4>",
        ),
        ("<1,2;ep=2>", "ep of a scheme with SP 1 x TP 1 is 2.*<sp2,2;ep=2>"),
        ("<2,1; gather = all>", "cannot read 'gather = all'"),
        ("<cp2,sp2,1;ep=2>", "CP ranks are neighbours, has ep=2;.*<sp2,cp2,...;ep=2>"),
        ("<sp2,cp2,sp2,1>", "says sp twice"),
        ("<sp0,1>", "SP, TP and PP degrees must be 1 or more"),
        ("<sp2,1,1,1>", "cannot read"),
        ("<sp512,512,2>", "more than 262144 ranks"),
    ],
)
def test_parts_that_are_wrong_are_named(text, wanted):
    with pytest.raises(HydraConfigError, match=wanted):
        Strategy.parse(f"2x<1,1> + {text}")


@pytest.mark.parametrize(
    "parts",
    [
        {"stages": "2,2"}, {"stages": [2, 2.0]}, {"stages": [4]}, {"ckpt": 1.5}, {"ckpt": True},
        {"sp": "2"}, {"gather": "every"}, {"gather": None},
    ],
)  # fmt: skip
def test_parts_of_documents_that_are_wrong_are_refused(parts):
    with pytest.raises(HydraConfigError):
        Scheme.from_json({"tp": 1, "pp": 2, **parts})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<1,2;stages=3,2>", "stages have 5 layers, the model has 4; make them sum to 4"),
        ("<1,1;ckpt=5>", "ckpt=5 is above the model's 4 layers; use ckpt=4 or less"),
        ("<1,5>", "PP 5 is above the model's 4 layers"),
    ],
)
def test_parts_that_do_not_fit_the_model(text, wanted):
    with pytest.raises(HydraConfigError, match=wanted):
        Scheme.parse(text).check_layers(4)


def test_layers_of_stages():
    assert [Scheme(1, 3).stage_layers(8, stage) for stage in range(3)] == [
        range(3),
        range(3, 6),
        range(6, 8),
    ]
    uneven = Scheme(1, 3, stages=(1, 5, 2))
    assert [uneven.stage_layers(8, stage) for stage in range(3)] == [
        range(1),
        range(1, 6),
        range(6, 8),
    ]


@pytest.mark.parametrize("text", ["", "4", "<4>", "0x<1,1>", "2x<1,1> +", "2*<1,1>", "1x<0,1>"])
def test_text_that_is_no_strategy_is_refused_with_the_form(text):
    with pytest.raises(HydraConfigError, match=r"2x<4,1>|1 or more"):
        Strategy.parse(text)


def test_enumerated_strategies_use_every_device_and_are_all_there():
    found = enumerate_strategies(power_of_two_schemes(4), 4)
    assert [s.is_heterogeneous for s in found].count(True) == 3
    assert {str(s) for s in found} == {
        "4x<1,1>", "2x<2,1>", "2x<1,2>", "1x<4,1>", "1x<2,2>", "1x<1,4>",
        "1x<2,1> + 2x<1,1>", "1x<1,2> + 2x<1,1>", "1x<2,1> + 1x<1,2>",
    }  # fmt: skip
    for num_devices in (1, 2, 3, 6):
        found = enumerate_strategies(power_of_two_schemes(num_devices), num_devices)
        assert len(set(found)) == len(found) > 0
        assert all(s.num_devices == num_devices and len(set(s.schemes)) <= 2 for s in found)


def test_strategies_from_a_file(tmp_path):
    path = tmp_path / "strategies.json"
    path.write_text(
        json.dumps({"schema": "ds_hydra.strategies/1", "strategies": ["2x<1,1>", "1x<2,1>"]})
    )
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
    np.testing.assert_allclose([fit.model.micro_batch_ms([n]) for n in lengths], times, rtol=1e-6)
    assert max(abs(r) for r in fit.relative_residuals) < 1e-6
    assert min(fit.model.quadratic_ms, fit.model.linear_ms, fit.model.constant_ms) >= 0


def test_fit_of_packed_micro_batches_counts_the_constant_once():
    model = LatencyModel(quadratic_ms=1e-4, linear_ms=0.2, constant_ms=30.0)
    micro_batches = [(64, 1), (256, 1), (4096, 1), (256, 16)]
    times = [model.micro_batch_ms([length] * count) for length, count in micro_batches]
    lengths, counts = zip(*micro_batches, strict=True)
    fit = fit_latency(lengths, times, counts)
    assert max(abs(r) for r in fit.relative_residuals) < 1e-6
    assert fit.model.constant_ms == pytest.approx(30.0, rel=1e-4)


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
    # tokens/s = l / (0.1 l + 10) = 10 l / (l + 100), at best 9.9 in range: 85% of it is reached at
    # l = 531
    model = LatencyModel(quadratic_ms=0.0, linear_ms=0.1, constant_ms=10.0)
    found = saturation_tokens(model, 10_000)
    assert found == pytest.approx(531, rel=0.02)
    rows, deep = Scheme(1, 1, cp=2), Scheme(1, 2)
    latency = {Scheme(1, 1): model, deep: replace(model, constant_ms=1.0), rows: model}
    assert saturation_by_tp(latency, 10_000) == {"1": found}
    assert saturation_by_tp({rows: model}, 10_000) == {"1": found // 2}, "of the piece of a rank"


def test_packed_micro_batch_costs_the_sum_of_its_sequences_and_one_constant():
    model = LatencyModel(quadratic_ms=0.01, linear_ms=1.0, constant_ms=5.0)
    assert model.micro_batch_ms([10, 20]) == pytest.approx(0.01 * 500 + 30 + 5)
    assert model.micro_batch_ms([]) == 0.0


def test_scheme_that_was_not_profiled_is_named():
    profile = make_profile({"<1,1>": (0, 1, 0)})
    with pytest.raises(HydraConfigError, match=r"<2,1>.*test on test.*<1,1>"):
        profile.get_latency(Scheme(2, 1))
    with pytest.raises(HydraConfigError, match=r"TP 2.*\[1\]"):
        profile.max_len_tokens(Scheme(2, 1), 2)


@pytest.mark.parametrize(
    ("text", "ratio", "of_attention"),
    [
        ("<1,2;stages=4,4>", 1.0, 1.0),
        ("<1,2;stages=5,3>", 5 / 4, 5 / 4),
        ("<1,2;ckpt=3>", (4 + 3 / 3) / 4, 1.0),
        ("<1,2;ckpt=8>", 4 / 3, 4 / 3),
        ("<1,2;ckpt=3;stages=3,5>", 5 / 4, 5 / 4),
        ("<1,2;ckpt=6;stages=3,5>", (5 + 3 / 3) / 4, 5 / 4),
    ],
)
def test_latency_of_parts_follows_from_the_slowest_stage(text, ratio, of_attention):
    profile = make_profile({"<1,2>": (0.5, 2, 8)}, num_layers=8)
    model = profile.get_latency(Scheme.parse(text))
    assert (model.quadratic_ms, model.linear_ms, model.constant_ms) == pytest.approx(
        (0.5 * of_attention, 2 * ratio, 8 * ratio)
    )


def test_derived_entries_are_in_the_document_and_measured_ones_stay():
    measured = {"<1,2>": (0, 1, 0), "<1,2;ckpt=8>": (0, 1.5, 0)}
    profile = make_profile(measured, num_layers=8, input_bytes=2)
    uneven, whole = Scheme.parse("<1,2;stages=5,3>"), Scheme.parse("<1,2;ckpt=8>")
    extended = Costs(profile).extended([uneven, whole, Scheme(1, 2), uneven])
    assert [e.get("derived_from") for e in extended.document["schemes"]] == [None, None, "<1,2>"]
    assert Profile.from_json(extended.document).latency == extended.latency
    assert [extended.latency[s].linear_ms for s in (Scheme(1, 2), whole, uneven)] == [1, 1.5, 1.25]
    assert Costs(extended).extended([uneven]) is extended


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "<2,2;ckpt=2>",
            r"<2,2;ckpt=2>, and <2,2> from which it could be derived, is not in profile.*<1,2>",
        ),
        ("<1,2;stages=5,4>", "stages have 9 layers, the model has 8"),
        ("<1,2;ckpt=9>", "ckpt=9 is above the model's 8 layers"),
        ("<cp2,2>", "scheme <cp2,2> is not in profile"),
        ("<cp2,2;ckpt=1>", "and <cp2,2> from which it could be derived, is not in profile"),
        ("<2,1>", "scheme <2,1> is not in profile"),
    ],
)
def test_schemes_that_cannot_be_derived_are_named(text, wanted):
    profile = make_profile({"<1,2>": (0, 1, 0)}, num_layers=8, input_bytes=2)
    with pytest.raises(HydraConfigError, match=wanted):
        Costs(profile).extended([Scheme.parse(text)])


def test_heads_that_are_exchanged_again_are_hidden_by_no_attention():
    """Half of what they travel for forward and backward, where a third of the rest runs again."""
    known = {"quadratic_ms": 0.5, "linear_ms": 2.0, "constant_ms": 8.0, "hidden_ms": 0.3}
    model = LatencyModel(**known, traffic_ms=7.0, exchange_ms=0.6)
    wanted = {"linear_ms": 4 / 3 * 2 + 0.6 / 2, "constant_ms": 4 / 3 * 8}
    assert model.scaled(4 / 3, 1.0).to_json() == pytest.approx({**model.to_json(), **wanted})
