"""A short run of the fuzzers in `fuzzing.py`; benchmarks/reliability.py makes the long one."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from command_documents import (
    COMMANDS,
    MODEL,
    ODD_OBJECTS,
    fuzz_command,
    fuzz_configurations,
    run_command,
)
from fuzzing import check, fuzz_run_folders, inputs_like, targets
from hypothesis import given, settings

from ds_hydra.configs.ds_config import read_ds_config
from ds_hydra.configs.files import json_text, parse_json
from ds_hydra.engine.model.meta_model import load_stage_model
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.length_stats import load_data
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.enumeration import load_strategies
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


def outcomes_of(reader, valid):
    """Outcomes of inputs that are like the `valid` one."""
    outcomes = set()

    @settings(max_examples=150)
    @given(inputs_like(valid))
    def read(value):
        outcomes.add(check(reader, value))

    read()
    return outcomes


def test_damaged_input_is_read_or_refused(tmp_path, caplog):
    caplog.set_level(logging.ERROR, "ds_hydra.configs.ds_config")  # else it warns of odd keys
    for name, (reader, valid) in targets(tmp_path).items():
        if name != "manifest":  # whose file does not exist
            assert check(reader, valid) == "accepted"
        assert {"refused"} <= outcomes_of(reader, valid) <= {"accepted", "refused"}, name


def test_damaged_run_folders_are_read_or_refused(tmp_path):
    counts = fuzz_run_folders(tmp_path, 60)
    assert counts["accepted"] > counts["refused"]


@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 200_000, b"\xff\xfe", b"1" * 5000, b'{"a": 1', b"null", b"\x80\x04K\x01."],
)
def test_files_that_are_not_json_objects_are_refused_by_name(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for read in (Profile.load, lambda path: load_strategies(str(path))):
        with pytest.raises(HydraConfigError, match=r"file\.json"):
            read(path)


def test_a_huge_count_takes_no_memory_and_no_time(tmp_path):
    for text in ("999999999x<1,1>", "1x<99999,99999>", " + ".join(["99999x<4,4>"] * 3)):
        with pytest.raises(HydraConfigError, match="more than 262144 ranks"):
            load_strategies([text])
    assert check(targets(tmp_path)["strategy"][0], "262144x<1,1>") == "accepted"
    with pytest.raises(HydraConfigError, match="cannot read"):
        load_strategies([json.dumps("9" * 5000)])


@pytest.mark.slow
@pytest.mark.parametrize("num_inputs", [8, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("command", COMMANDS)
def test_damaged_documents_of_commands_are_carried_out_or_refused(tmp_path, command, num_inputs):
    assert fuzz_command(command, tmp_path, num_inputs, seed=5)["failures"] == []


@pytest.mark.parametrize("num_inputs", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_hostile_configurations_are_carried_out_or_refused(tmp_path, num_inputs):
    counts = fuzz_configurations(tmp_path, num_inputs, seed=2001)
    assert counts["failures"] == []
    assert counts["carried_out"] > 0


@pytest.mark.parametrize("place", ["top", "hydra", "zero_optimization"])
def test_objects_of_python_in_a_configuration_are_refused_with_their_place(place):
    stage = {"stage": 3}
    hydra = {"context_length": 64, "tokens_per_iteration": 256}
    plain = (7, 0.5, 2**63, 2**31, 10**9, 1e30)
    for value in ODD_OBJECTS:
        if isinstance(value, int | float | np.number) and value in plain:
            continue
        sections = {"zero_optimization": dict(stage), "hydra": dict(hydra)}
        (sections if place == "top" else sections[place])["notes"] = value
        where = "notes" if place == "top" else f"{place}.notes"
        with pytest.raises(HydraConfigError, match=rf"the DeepSpeed config.*\.{where}"):
            read_ds_config(sections)


def test_keys_that_are_not_text_are_refused():
    for key in (1, None, ("a",), 2.0):
        with pytest.raises(HydraConfigError, match="the DeepSpeed config has a key of type"):
            read_ds_config({key: 1})
    with pytest.raises(HydraConfigError, match="is of type list"):
        read_ds_config([])


def test_numbers_of_numpy_are_read_as_numbers():
    hydra = {"context_length": np.int64(64), "tokens_per_iteration": 256}
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": np.float32(0.5)}
    document, section = read_ds_config({**config, "hydra": hydra})
    assert section.context_length == 64
    assert type(document["gradient_clipping"]) is float


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"a": [1e999]}', r"a\.0 is inf"),
        ('{"a": NaN}', "a is nan"),
        ('{"a": -Infinity}', "a is -inf"),
        ('{"a": "\\ud800"}', "half of a character"),
        ('{"a": "b\\u0000"}', "NUL"),
        ('{"a": ' + "9" * 400 + "}", "of 1329 bits"),
    ],
)
def test_numbers_and_text_that_nothing_can_hold_are_refused_where_documents_enter(text, shown):
    with pytest.raises(HydraConfigError, match=rf"file\.json.*{shown}"):
        parse_json(text, "file.json")
    assert parse_json('{"a": ["\\ud83d\\ude00", 1e-999, 1e300]}', "f")["a"] == ["😀", 0.0, 1e300]


def test_results_that_are_no_json_are_refused_by_their_place():
    assert json.loads(json_text({"a": [1, None]})) == {"a": [1, None]}
    with pytest.raises(HydraConfigError, match=r"the result\.a\.0 is nan"):
        json_text({"a": [float("nan")]})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<1,1>" + " " * 500_000 + "<1,1>", "cannot read"),
        ("<1,1>" + " " * 600_000, "600005 characters"),
        (" then ".join(["262144x<1,1>"] * 64), "1310720 pipelines"),
        (7, "expected text"),
    ],
)
def test_a_long_strategy_takes_no_time_and_no_memory(text, shown):
    # Quadratic, the first would take minutes
    with pytest.raises(HydraConfigError, match=shown):
        Strategy.parse(text)


@pytest.mark.parametrize("ep", ["2", None, [2], 2.0, {}, True])
def test_ep_of_another_type_is_refused_whatever_else_is_wrong(ep):
    for tp in (2, 10**6):
        with pytest.raises(HydraConfigError, match=r"ep of a scheme|more than 262144 ranks"):
            Scheme.from_json({"tp": tp, "pp": 1, "ep": ep})


def test_paths_that_no_file_can_have_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("report", "fit --points", "check"):
        for name in ("x" * 300, "é" * 5000):
            code, _ = run_command([*command.split(), name], tmp_path)
            assert code == 1


def test_a_folder_in_place_of_a_file_to_write_is_refused(tmp_path):
    line = (
        "propose --profile a800_llama2_7b --histogram github --devices 4 --context 32 --batches 1"
    )
    assert run_command([*line.split(), "--out", "/"], tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 2**31), ("num_attention_heads", -32), ("head_dim", 10**12)],
)
def test_sizes_that_no_model_has_are_refused_by_name(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, key: value}))
    with pytest.raises(HydraConfigError, match=f"{key} is {value}, expected 1 to"):
        load_stage_model(str(tmp_path))


def test_a_data_file_that_begins_with_null_is_refused(tmp_path):
    """pyarrow ends the process with a segmentation fault."""
    (tmp_path / "data.jsonl").write_text('null\n{"text": "a"}\n')
    with pytest.raises(HydraConfigError, match="row 0 is null"):
        load_data(str(tmp_path), split="train")
