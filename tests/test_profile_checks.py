"""Profiles that cannot be, or that belong to another model, are refused."""

from __future__ import annotations

import pytest

from ds_hydra.configs import find_file, load_model_preset
from ds_hydra.configs.files import read_json_object
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile


def shipped():
    return read_json_object(find_file("profiles", "a800_llama2_7b"))


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
@pytest.mark.parametrize("term", ["quadratic_ms", "linear_ms", "constant_ms", "traffic_ms"])
def test_coefficients_that_cannot_be_are_refused(term, value):
    document = shipped()
    document["schemes"][3][term] = value
    with pytest.raises(HydraConfigError, match=rf"p\.json: {term} is"):
        Profile.from_json(document, source="p.json")


@pytest.mark.parametrize("model", ["7b", "13b"])
def test_shipped_profiles_belong_to_their_presets(model):
    preset = load_model_preset(f"llama2_{model}")
    check_model = Profile.load(find_file("profiles", f"a800_llama2_{model}")).check_model
    sizes = {name: preset[name] for name in ("hidden_size", "vocab_size")}
    sizes["num_layers"] = preset["num_hidden_layers"]
    check_model(**sizes)
    for other, named in (
        ({"num_layers": preset["num_hidden_layers"] + 1}, "num_layers"),
        ({"vocab_size": 128256}, "vocab_size 30592 instead of 128256"),
        ({"hidden_size": 1}, "hidden_size"),
    ):
        with pytest.raises(HydraConfigError, match=named):
            check_model(**(sizes | other))


def check(measured=None, dtype="bfloat16", **wanted):
    document = read_json_object(find_file("profiles", "a800_llama2_7b")) | (measured or {})
    hydra = HydraConfig(context_length=1024, tokens_per_iteration=4096, **wanted)
    Profile.from_json(document).check_config(hydra, dtype, cuts_micro_batches=True)


@pytest.mark.parametrize("key", ["activation_checkpointing", "compile_layers"])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_profile_of_layers_that_ran_in_another_way_is_refused(key, wanted):
    check(**{key: wanted})  # it does not say
    check({key: wanted}, **{key: wanted})
    with pytest.raises(HydraConfigError, match=f"measured with hydra.{key} .*, and it is "):
        check({key: not wanted}, **{key: wanted})


@pytest.mark.parametrize("measured", [None, "rowwise"])
def test_a_profile_of_other_products_is_refused(measured):
    said, other = {"float8": measured} if measured else {}, "tensorwise" if measured else "rowwise"
    check(said, float8=measured)
    with pytest.raises(
        HydraConfigError,
        match=rf'measured with hydra.float8 .*, and it is "{other}".*ds-hydra profile --float8 {other}',
    ):
        check(said, float8=other)


def test_a_profile_of_another_dtype_is_refused():
    check(dtype="float32")  # it does not say
    check({"dtype": "bfloat16"}, dtype="float16")
    named = "measured in bfloat16, and the model trains in float32, .* --dtype fp32"
    with pytest.raises(HydraConfigError, match=named):
        check({"dtype": "bfloat16"}, dtype="float32")
