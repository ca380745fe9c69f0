"""The end-to-end benchmark places every sequence once, and a tiny run of it goes through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from parity_rows import DENSE, EXPERTS

from benchmarks import mutants

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import global_batches  # noqa: E402
import learned_times  # noqa: E402
import workloads as w  # noqa: E402

CONTEXT, TOKENS = 1024, 4096
PLACES = (
    w.place_evenly, w.place_first_fit, w.place_rebalanced, w.place_balanced_tokens,
    w.place_balanced_flops,
)  # fmt: skip


def shape(num_ranks=2):
    return w.Shape(
        num_ranks=num_ranks,
        context_length=CONTEXT,
        tokens_per_iteration=TOKENS,
        linear_flops=100.0,
        quadratic_flops=0.1,
    )


@pytest.mark.parametrize("name", global_batches.LENGTHS)
def test_lengths_of_today_fit_the_context(name):
    found = global_batches.histogram(name).limit(global_batches.CONTEXT)
    assert found.lengths_tokens.max() <= global_batches.CONTEXT
    if name in global_batches.LOGNORMAL:
        seen = np.cumsum(found.counts) / found.counts.sum()
        median = found.lengths_tokens[np.searchsorted(seen, 0.5)]
        assert median == pytest.approx(global_batches.LOGNORMAL[name][0], rel=0.02)


@pytest.mark.parametrize("name", w.WORKLOADS)
def test_batches_keep_the_budget_and_the_context(name):
    batches = w.WORKLOADS[name].batches(CONTEXT, TOKENS, 12)
    assert len(batches) == 12
    for batch in batches:
        assert sum(batch) <= TOKENS
        assert 2 <= min(batch) <= max(batch) <= CONTEXT
    assert batches == w.WORKLOADS[name].batches(CONTEXT, TOKENS, 12)
    if name in ("equal", "one_long"):
        assert {sum(batch) for batch in batches} == {TOKENS}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["github", "one_long"])
def test_every_sequence_is_placed_once(place, name):
    for num_ranks in (2, 3):
        for batch in [*w.WORKLOADS[name].batches(CONTEXT, TOKENS, 6), (700,), (5, 9)]:
            placement = place(batch, shape(num_ranks))
            assert len(placement) == shape(num_ranks).num_slots
            assert all(len(slot) == num_ranks for slot in placement)
            placed = sorted(i for slot in placement for part in slot for i in part)
            assert placed == list(range(len(batch)))


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_tiny_run_measures_valid_micro_batches(tmp_path):
    """Stock ZeRO-3, AutoTP, Ulysses and ds_hydra see the same global batches and report the same
    losses.
    """
    names = ["packing", "autotp", "ulysses", "hydra"]
    command = [
        sys.executable,
        str(BENCHMARKS / "end_to_end.py"),
        "--quick",
        "--workloads",
        "memory",
    ]
    done = subprocess.run(
        [*command, "--contenders", *names, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((tmp_path / "memory_2ranks.json").read_text())
    assert document["failures"] == {}
    assert set(document["contenders"]) == set(names)
    assert "invalid" not in done.stdout
    assert (tmp_path / "end_to_end_2ranks.png").stat().st_size > 10_000


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_fault_can_be_put_in(mutant):
    assert mutants.file_of(mutant).suffix == ".py", "its text occurs once"
    assert mutant.new != mutant.old
    assert {*mutant.families} <= {*DENSE, *EXPERTS}
    for file, _, name in (test.partition("[")[0].partition("::") for test in mutant.tests):
        assert f"def {name}" in (mutants.ROOT / "tests" / file).read_text()


def test_the_record_is_of_faults_that_are_there_and_its_page_shows_it():
    """Faults that are new are put in by python -m benchmarks.mutants --new."""
    record = json.loads(mutants.RECORD.read_text())
    assert record.keys() <= {mutant.name for mutant in mutants.MUTANTS}
    assert mutants.RECORD.with_suffix(".md").read_text() == mutants.page_of(record)


def test_recorded_runs_are_predicted_better_by_what_is_learned_most_with_half_of_the_error():
    recordings = learned_times.read_recordings(learned_times.RECORDED)
    left = {}
    for name, document in recordings.items():
        profiled, corrected, _ = learned_times.replay(document).medians
        left[name] = corrected / profiled
    # Without factors of strategies the straggler of this run is told from its schemes less well
    assert left.pop("2_memory_straggler") < 0.9
    assert max(left.values()) < 0.8, left
    assert len(left) >= 11
    assert sum(share <= 0.5 for share in left.values()) >= 8
