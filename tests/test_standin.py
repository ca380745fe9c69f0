"""What a stand-in accelerator tells: races, host waits, wrong devices, collectives out of order."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to build the device"),
]

CHECKS = (
    "parity_llama", "parity_tied_with_shards", "parity_checkpointed", "parity_streamed",
    "iteration", "iteration_streamed", "evaluation", "collectives",
    "without_the_wait_for_slices", "mixed_devices", "a_block_freed_early", "items", "a_tensor_of_the_cpu",
    "device_wide_synchronise", "swapped_collectives", "swapped_messages", "times_of_the_step",
)  # fmt: skip

MAX_HOST_WAITS = 8
"""Of ds_hydra in an iteration, whatever its micro-batches, layers and parameters."""


def run_checks(*checks):
    """What both ranks found; starting them is the cost."""
    script = Path(__file__).parent / "standin" / "run.py"
    command = [sys.executable, str(script), "2", *checks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not any("error" in rank for rank in found.values()), "\n".join(
        rank.get("error", "") for rank in found.values()
    )
    assert len(found) == 2, done.stderr[-3000:]
    return list(found.values())


@pytest.fixture(scope="module")
def results():
    return run_checks(*CHECKS)


@pytest.mark.parametrize("check", [name for name in CHECKS if name.startswith("parity")])
def test_gradients_are_those_of_one_process_and_nothing_races(results, check):
    for rank in results:
        for text, found in rank[check].items():
            assert found["error"] <= 1e-5, text
            assert found["loss_error"] <= 1e-5, text
            assert found["num_races"] == 0, (text, found["races"])
            assert found["num_kernels"] > 100 or text == "1x<1,1>"


def test_a_whole_iteration_does_not_race(results):
    for rank in results:
        for text, found in (rank["iteration"] | rank["iteration_streamed"]).items():
            assert found["num_races"] == 0, (text, found["races"])
        assert rank["evaluation"]["num_races"] == 0


def test_the_host_waits_for_the_device_a_few_times_in_an_iteration(results):
    for rank in results:
        for text, found in (rank["iteration"] | rank["iteration_streamed"]).items():
            own = {
                place: n
                for place, n in found["waits"].items()
                if "at ds_hydra" in place and "inbox.py" not in place  # threads that only add
            }
            assert 0 < sum(own.values()) <= MAX_HOST_WAITS, (text, own)


def test_ranks_call_the_same_collectives(results):
    first, second = (rank["collectives"] for rank in results)
    assert first == second
    assert sum(map(len, first)) > 20


def test_faults_are_seen(results):
    for rank in results:
        assert rank["without_the_wait_for_slices"] > 0
        assert rank["a_block_freed_early"] > 0
        assert "same device" in rank["mixed_devices"]
        assert rank["items"]["with"] == rank["items"]["without"] + rank["items"]["read"]
        assert rank["items"]["read"] > 0
        assert "tensor on cpu" in rank["a_tensor_of_the_cpu"]


def test_times_include_what_the_host_waits_for_after_the_step(results):
    for rank in results:
        step_ms, iteration_ms = rank["times_of_the_step"]
        assert 200 <= step_ms < iteration_ms


def test_orders_that_differ_between_ranks_are_seen(results):
    for check in ("swapped_collectives", "swapped_messages"):
        found = [rank[check] for rank in results]
        assert any("on another rank" in text for text in found), found


def test_a_synchronise_of_the_device_does_not_hang(results):
    first, second = (rank["device_wide_synchronise"] for rank in results)
    assert first == second
    assert all(loss > 0 for loss in first)
