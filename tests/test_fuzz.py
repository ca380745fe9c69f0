"""A short run of the fuzzers in `fuzzing.py`; benchmarks/reliability.py makes the long one."""

from __future__ import annotations

import json
import logging
import random
import subprocess

import pytest
from fuzzing import check, fuzz_run_folders, fuzz_with_coverage, inputs_like, mutate, targets
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.candidates import load_strategies

NAMES = (
    "configuration", "profile", "profile with options", "histogram", "strategies", "strategy", "strategy with options",
    "plan", "plan with options", "manifest",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def level_of_warnings():
    """`targets` silences warnings about odd keys; other tests look for them."""
    logger = logging.getLogger("ds_hydra.configs.ds_config")
    level = logger.level
    yield
    logger.setLevel(level)


def test_all_targets_are_run(tmp_path):
    assert tuple(targets(tmp_path)) == NAMES


@pytest.mark.parametrize("num_inputs", [150, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_mutated_input_is_read_or_refused(tmp_path, name, num_inputs):
    reader, seed = targets(tmp_path)[name]
    if name != "manifest":  # whose file does not exist
        assert check(reader, seed) == "accepted"
    generator = random.Random(1)
    outcomes = [check(reader, mutate(seed, generator)) for _ in range(num_inputs)]
    assert set(outcomes) <= {"accepted", "refused"}
    assert "refused" in outcomes


@given(st.data())
@settings(max_examples=150)
def test_any_value_in_any_place_is_read_or_refused(tmp_path_factory, data):
    name = data.draw(st.sampled_from(NAMES))
    reader, valid = targets(tmp_path_factory.getbasetemp())[name]
    check(reader, data.draw(inputs_like(valid)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["profile", "plan"])
def test_coverage_guided_input_is_read_or_refused(tmp_path, name):
    pytest.importorskip("atheris", reason="no wheel for this platform")
    assert fuzz_with_coverage(name, 4000, tmp_path)["inputs"] == 4000


def test_damaged_run_folders_are_read_or_refused(tmp_path):
    counts = fuzz_run_folders(tmp_path, 60)
    assert counts["accepted"] > counts["refused"]


@pytest.mark.slow
def test_a_reader_that_crashes_is_found(tmp_path):
    """A comparison deep inside is found by its coverage; the input that does it is kept."""
    pytest.importorskip("atheris", reason="no wheel for this platform")
    outputs = []
    for seed in (1, 2):  # once more where the machine ended the first, with both outputs shown
        with pytest.raises(subprocess.CalledProcessError) as caught:
            fuzz_with_coverage("a broken reader", 200_000, tmp_path, seed)
        outputs.append(f"{caught.value}\n{caught.value.stdout}\n{caught.value.stderr[-2000:]}")
        if "ZeroDivisionError" in outputs[-1]:
            break
    assert "ZeroDivisionError" in outputs[-1], "\n".join(outputs)
    assert list(tmp_path.glob("crash-*"))


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
    # The most there may be takes 0.2 s; a slow machine has 10.
    assert check(targets(tmp_path)["strategy"][0], "262144x<1,1>", slowest_s=10) == "accepted"
    with pytest.raises(HydraConfigError, match="cannot read"):
        load_strategies([json.dumps("9" * 5000)])
