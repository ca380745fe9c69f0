"""Profiles that cannot be, or that belong to another model, are refused."""

from __future__ import annotations

import pytest

from ds_hydra.configs import find_file, load_model_preset
from ds_hydra.configs.files import read_json_object
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile


def shipped():
    return read_json_object(find_file("profiles", "a800_llama2_7b"))


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
@pytest.mark.parametrize("term", ["quadratic_ms", "linear_ms", "constant_ms"])
def test_coefficients_that_cannot_be_are_refused(term, value):
    document = shipped()
    document["schemes"][3][term] = value
    with pytest.raises(HydraConfigError, match=r"p\.json: (latency coefficients|.*_ms is)"):
        Profile.from_json(document, source="p.json")


@pytest.mark.parametrize("model", ["7b", "13b"])
def test_shipped_profiles_belong_to_their_presets(model):
    preset = load_model_preset(f"llama2_{model}")
    check = Profile.load(find_file("profiles", f"a800_llama2_{model}")).check_model
    sizes = {name: preset[name] for name in ("hidden_size", "vocab_size")}
    sizes["num_layers"] = preset["num_hidden_layers"]
    check(**sizes)
    for name, wrong, message in (
        ("num_layers", sizes["num_layers"] + 1, "num_layers"),
        ("vocab_size", 128256, "vocab_size 30592 instead of 128256"),
        ("hidden_size", 1, "hidden_size"),
    ):
        with pytest.raises(HydraConfigError, match=message):
            check(**{**sizes, name: wrong})


@pytest.mark.parametrize("key", ["activation_checkpointing", "compile_layers"])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_profile_of_layers_that_ran_in_another_way_is_refused(key, wanted):
    document = shipped()
    ways = dict.fromkeys(("activation_checkpointing", "compile_layers"), wanted)
    Profile.from_json(document).check_layers(**ways)  # it does not say
    Profile.from_json(document | ways).check_layers(**ways)
    with pytest.raises(HydraConfigError, match=f"measured with hydra.{key} .*, and it is "):
        Profile.from_json(document | ways | {key: not wanted}).check_layers(**ways)


@pytest.mark.parametrize("measured", [None, "rowwise"])
def test_a_profile_of_other_products_is_refused(measured):
    document = shipped()
    if measured:
        document["float8"] = measured
    profile, other = Profile.from_json(document), "tensorwise" if measured else "rowwise"
    profile.check_float8(measured)
    with pytest.raises(
        HydraConfigError,
        match=rf'measured with hydra.float8 .*, and it is "{other}".*ds-hydra profile --float8 {other}',
    ):
        profile.check_float8(other)


def test_a_profile_of_another_dtype_is_refused():
    document = shipped()
    Profile.from_json(document).check_dtype("float32")  # it does not say
    of_half = Profile.from_json(document | {"dtype": "bfloat16"})
    of_half.check_dtype("float16")
    named = "measured in bfloat16, and the model trains in float32, .* --dtype fp32"
    with pytest.raises(HydraConfigError, match=named):
        of_half.check_dtype("float32")
