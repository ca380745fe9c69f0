"""The report: what is read, computed and written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import accepted, refused
from run_folders import (
    NUM_RANKS,
    learn_from,
    make_record,
    trace_experts,
    write_run,
    write_run_folder,
)

from ds_hydra.records.metrics import METRICS_FILE, IterationMetrics
from ds_hydra.records.timeline import EventKind
from ds_hydra.report.documents import describe_runs
from ds_hydra.report.run_folder import load_run
from ds_hydra.report.run_report import divide_time, scheme_errors
from ds_hydra.report.timelines import trace_run
from ds_hydra.strategy import Scheme


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run_folder(tmp_path_factory.mktemp("runs") / "full")


def test_time_is_divided_without_rest():
    line = make_record(0, "1x<1,1>", (150.0,)) | {
        "iteration_ms": 200.0, "bubble": 0.2, "waited_ms": 5.0, "pull_ms": 10.0, "push_ms": 15.0,
        "step_ms": 12.0,
    }  # fmt: skip
    shares = divide_time([IterationMetrics.from_json(line)] * 2)
    assert (shares.plan_wait, shares.pull, shares.push, shares.step) == (10, 20, 30, 24)
    assert (shares.compute, shares.idle) == pytest.approx((240, 60))
    assert shares.other == pytest.approx(2 * (200 - 192))
    hidden = line | {"visible_pull_ms": 9.0, "visible_push_ms": 8.0}
    shares = divide_time([IterationMetrics.from_json(hidden)])
    assert (shares.pull, shares.push) == (9, 8), "what is hidden beside computation is no time"


# The folder


def test_a_whole_folder(run_dir):
    run = load_run(run_dir)
    assert run.notes == ()
    assert (run.num_ranks, len(run.records), len(run.traces)) == (NUM_RANKS, 14, 14)
    (described,) = describe_runs([run])["runs"]
    assert described["peak_bytes"] == [int(3e10 + 1e9 * rank) for rank in range(NUM_RANKS)]


def damage(folder, **files):
    """Replace files by a text, or remove them where it is None."""
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        if text is None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            path.write_text(text)


@pytest.mark.parametrize(
    ("files", "note"),
    [
        ({"trace__jsonl": None}, "No trace.jsonl in the folder"),
        (
            {"trace__jsonl": '{"schema": "ds_hydra.timeline/9"}\n'},
            "1 line of trace.jsonl cannot be read",
        ),
        ({"run__json": "{"}, "run.json cannot be read"),
        (
            {"run__json": '{"num_ranks": 1000000000000000000}'},
            "run.json cannot be read (num_ranks is 1",
        ),
        ({"run__json": "[" * 100_000}, "run.json is not JSON"),
    ],
)
def test_a_run_without_a_part_has_a_report_that_says_so(run_dir, tmp_path, files, note):
    folder = shutil.copytree(run_dir, tmp_path / "damaged")
    damage(folder, **files)
    run = load_run(folder)
    assert any(note in told for told in run.notes)
    assert "14 iterations" in str(run.summary)


def test_a_run_with_metrics_only_has_a_report(tmp_path):
    folder = write_run(
        tmp_path / "old", [make_record(0, "2x<1,1>", loss=3.0)], tail='{"iteration": 1, "lo'
    )
    result = accepted("report", folder, "--json")
    assert "old: No trace.jsonl in the folder" in result.stderr
    (run,) = json.loads(result.stdout)["runs"]
    assert (run["num_iterations"], run["bubble"], run["peak_bytes"]) == (1, None, [])
    assert (run["num_ranks"], len(run["notes"])) == (2, 1)
    assert Path(run["picture"]).stat().st_size > 10_000


def test_a_killed_run_loses_its_last_line_only(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "killed")
    for name in (METRICS_FILE, "trace.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) - 200])
    run = load_run(folder)
    assert (len(run.records), len(run.traces), run.notes) == (13, 13, ())
    assert describe_runs([run])


def test_a_bad_byte_loses_its_line_only(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "bad byte")
    for name in (METRICS_FILE, "trace.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        lines[4] = b"\xff" + lines[4][1:]
        (folder / name).write_bytes(b"".join(lines))
    run = load_run(folder)
    assert (len(run.records), len(run.traces)) == (13, 13)
    for note, name in zip(run.notes, (METRICS_FILE, "trace.jsonl"), strict=True):
        assert f"1 line of {name} cannot be read and is left out" in note
        assert "line 5 is not JSON" in note


def test_a_loss_that_is_no_number(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "nan")
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    for line in lines[6:]:
        line["loss"] = None
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(folder)
    document = describe_runs([run])
    assert document["runs"][0]["last_loss"] is None
    json.dumps(document, allow_nan=False)
    assert "-> nan" in str(run.summary)


def test_a_run_of_another_format_is_refused_by_name(tmp_path):
    folder = write_run(
        tmp_path / "new", [make_record(0, "1x<1,1>") | {"schema": "ds_hydra.metrics/2"}]
    )
    said = refused("report", folder)
    assert "line 1 is not the record of an iteration: its schema is 'ds_hydra.metrics/2'" in said
    assert "this version reads 'ds_hydra.metrics/1'" in said


def test_two_runs_follow_each_other(run_dir, tmp_path):
    said = refused("report", run_dir, "--out", run_dir / "none")
    assert "cannot write" in said
    assert "name a folder with --out" in said
    folder = shutil.copytree(run_dir, tmp_path / "other")
    printed = accepted("report", run_dir, folder).stdout
    assert "learned   " not in printed
    assert "the profile alone by" not in printed
    first, second = printed.split("\n\nrun other\n")
    assert first.startswith("run full\n")
    assert str(folder / "report.png") in second
    assert f"time            plan_wait {14 / 1e3 / load_run(folder).summary.total_s:.1%}" in second


# Perfetto


def check_trace_events(document):
    """The rules of the trace-event format for the phases that are used: X, M and C."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["displayTimeUnit"] in ("ms", "ns")
    open_slices, threads, named = {}, set(), set()
    # Perfetto takes thread 0, and threads of one id in two processes, for the same thread.
    pairs = {(e["pid"], e["tid"]) for e in document["traceEvents"]}
    assert len({tid for _, tid in pairs}) == len(pairs)
    assert all(pid > 0 and tid > 0 for pid, tid in pairs)
    for event in sorted(
        document["traceEvents"], key=lambda e: (e["pid"], e["tid"], e["ts"], -e.get("dur", 0))
    ):
        assert event["ph"] in "XMC"
        assert all(type(event[key]) is int for key in ("pid", "tid", "ts"))
        assert event["ts"] >= 0
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            )
            key, kind = ("name", str) if event["name"].endswith("_name") else ("sort_index", int)
            assert type(event["args"][key]) is kind
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            threads.add((event["pid"], event["tid"]))
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            # Slices of one thread must nest: here they follow each other.
            end = open_slices.get((event["pid"], event["tid"]), 0)
            assert event["ts"] >= end, f"{event} begins before {end}"
            open_slices[event["pid"], event["tid"]] = event["ts"] + event["dur"]
    assert threads <= named


def test_the_trace_of_a_run_follows_the_format(run_dir):
    document = trace_run(load_run(run_dir))
    check_trace_events(document)
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    names = {
        e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {1: "iterations", 2: "measured"}
    first = json.loads((run_dir / "trace.jsonl").read_text().splitlines()[0])
    passes = [row for row in first["events"] if row[2] in ("fwd", "bwd")]
    mine = [e for e in slices if e["pid"] == 2 and e["ts"] < first["duration_ms"] * 1000]
    assert sum(e["cat"] in ("fwd", "bwd") for e in mine) == len(passes)
    busy_us = sum(
        e["dur"]
        for e in slices
        if e["pid"] == 2 and e["cat"] in ("fwd", "bwd") and e["ts"] < 1e3 * first["duration_ms"]
    )
    assert busy_us == pytest.approx(
        1e3 * sum(row[5] - row[4] for row in passes), abs=2 * len(passes)
    )
    assert sum(e["cat"] == "iteration" for e in slices) == 14


def test_the_command_writes_the_trace(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    result = accepted("report", folder, "--perfetto")
    assert "perfetto.json" in result.stdout
    check_trace_events(json.loads((folder / "perfetto.json").read_text()))
    damage(folder, trace__jsonl=None)
    assert "set hydra.trace_every to 1 or more" in refused("report", folder, "--perfetto")


def test_the_trace_of_overlapping_links_follows_the_format(run_dir):
    run = load_run(run_dir)
    overlapping = {
        iteration: replace(
            trace,
            timeline=replace(
                trace.timeline,
                events=tuple(
                    replace(e, start_ms=0.0) if e.kind is EventKind.PUSH else e
                    for e in trace.timeline.events
                    if e.kind is not EventKind.PULL
                ),
            ),
        )
        for iteration, trace in run.traces.items()
    }
    check_trace_events(trace_run(replace(run, traces=overlapping)))


def test_tokens_of_experts_are_read_where_there_are_experts(tmp_path):
    folder = write_run_folder(tmp_path / "run", 3)
    trace_experts(folder, {"layers": [1, 3], "tokens": [[20, 20], [30, 10]]})
    assert load_run(folder).traces[2].expert_tokens == {1: (20, 20), 3: (30, 10)}
    trace_experts(folder, {"layers": [1, 3], "tokens": [[20, 20]]})
    assert any("2 layers and tokens of 1" in note for note in load_run(folder).notes)


def test_what_was_learned_is_told_where_something_was(tmp_path):
    folder = write_run_folder(tmp_path / "run", 14)
    learn_from(folder)
    run = load_run(folder)
    printed = accepted("report", folder).stdout
    assert "learned         machine 1.13, scheme <2,1> 0.90" in printed
    assert "the profile alone by" in printed
    # Twice as long as a profile says that has <4,1> half of what the planner knew
    worst, *others = scheme_errors(run.records)
    assert worst.scheme == Scheme(4, 1)
    assert 2.0 < worst.measured_over_profiled < 2.2
    assert max(e.measured_over_profiled for e in others if e.num_pipelines > 2) < 1.5
    (described,) = describe_runs([run])["runs"]
    assert described["schemes"][0]["scheme"] == "<4,1>"
    assert described["profile_error"] > described["absolute_error"]
    assert "most wrong about <4,1>, whose pipelines took 2.0" in printed


@pytest.mark.parametrize("factor", [0, -1, float("inf"), "x"])
def test_a_factor_that_cannot_be_is_left_out_with_its_line(tmp_path, factor):
    folder = write_run_folder(tmp_path / "run", 3)
    path = folder / "metrics.jsonl"
    first, *rest = path.read_text().splitlines()
    line = json.loads(first) | {"learned": {"machine": factor}}
    path.write_text("\n".join([json.dumps(line), *rest]) + "\n")
    run = load_run(folder)
    assert len(run.records) == 2
    assert any("1 line of metrics.jsonl" in note for note in run.notes)
