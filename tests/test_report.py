"""The report: what is read, computed and written."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import accepted, document_of, invoke, refused
from run_folders import (
    NUM_RANKS,
    PROFILE,
    learn_from,
    make_plan,
    make_record,
    measure,
    trace_experts,
    write_run,
    write_run_folder,
)

from ds_hydra.records.metrics import METRICS_FILE, IterationMetrics
from ds_hydra.records.timeline import EventKind
from ds_hydra.report.documents import describe_runs
from ds_hydra.report.run_folder import load_run, predict_timeline, rank_memory
from ds_hydra.report.run_report import divide_time, find_slowest, scheme_errors
from ds_hydra.report.timelines import align, describe_timelines, trace_run
from ds_hydra.sampler.schedule import one_f_one_b_ms
from ds_hydra.strategy import Scheme


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run_folder(tmp_path_factory.mktemp("runs") / "full")


# Predicted timelines


@pytest.mark.parametrize("strategy", ["1x<4,1> + 2x<2,1>", "2x<2,2>", "1x<1,8>"])
def test_the_predicted_timeline_is_that_of_the_planner(strategy):
    plan = make_plan(3, strategy)
    timeline = predict_timeline(plan, PROFILE, forward_fraction=1 / 3)
    assert timeline.duration_ms == pytest.approx(plan.makespan_ms)
    for index, pipeline in enumerate(plan.pipelines):
        model = PROFILE.latency[pipeline.scheme]
        rows = np.array(
            [model.micro_batch_ms(plan.micro_batch_lengths(row)) for row in pipeline.micro_batches]
        )
        wanted = one_f_one_b_ms(rows, pipeline.scheme.pp, 1 / 3)
        events = [e for e in timeline.events if e.pipeline == index]
        assert (
            max(e.end_ms for e in events)
            == pytest.approx(wanted)
            == pytest.approx(pipeline.makespan_ms)
        )
        assert len(events) == 2 * len(rows) * pipeline.scheme.pp
        for event in events:
            share = 1 / 3 if event.kind is EventKind.FORWARD else 2 / 3
            assert event.duration_ms == pytest.approx(share * rows[event.micro_batch])
        check_order(events, pipeline.scheme.pp)


def test_a_plan_of_other_coefficients_is_stretched_to_what_it_says():
    plan = make_plan(3, "2x<2,2>")
    slower = [replace(p, makespan_ms=2 * p.makespan_ms) for p in plan.pipelines]
    refitted = replace(plan, pipelines=tuple(slower), makespan_ms=2 * plan.makespan_ms)
    usual = predict_timeline(plan, PROFILE, forward_fraction=1 / 4)
    timeline = predict_timeline(refitted, PROFILE, forward_fraction=1 / 4)
    for one, other in zip(usual.events, timeline.events, strict=True):
        assert other.end_ms == pytest.approx(2 * one.end_ms)


def check_order(events, num_stages):
    """Passes wait for their neighbours, and no stage does two things at a time."""
    ends = {(e.kind, e.stage, e.micro_batch): e.end_ms for e in events}
    for event in events:
        before = None
        if event.kind is EventKind.FORWARD and event.stage > 0:
            before = (EventKind.FORWARD, event.stage - 1, event.micro_batch)
        if event.kind is EventKind.BACKWARD and event.stage < num_stages - 1:
            before = (EventKind.BACKWARD, event.stage + 1, event.micro_batch)
        assert before is None or ends[before] <= event.start_ms + 1e-9
    for one, two in itertools.pairwise(events):
        assert one.stage != two.stage or one.end_ms <= two.start_ms + 1e-9


def test_a_prediction_without_pull_begins_with_the_first_measured_forward():
    plan = make_plan(1)
    measured = measure(plan, 1.5)
    promised = predict_timeline(plan, PROFILE, forward_fraction=1 / 3)
    assert min(e.start_ms for e in align(promised, measured).events) == pytest.approx(40.0)
    with_pull = replace(measured, source="predicted")
    assert align(with_pull, measured) is with_pull


# Why iterations were slow


def records(*changes):
    """Twenty usual iterations, and one that is changed."""
    usual = [make_record(i, "2x<1,1>", (100.0, 90.0)) | {"longest_tokens": 400} for i in range(20)]
    slow = usual[0] | {"iteration": 20, "iteration_ms": 500.0}
    for change in changes:
        slow |= change
    return [IterationMetrics.from_json(line) for line in [*usual, slow]]


def pipelines(*measured):
    return [make_record(20, "2x<1,1>", measured)["pipelines"][i] for i in range(2)]


@pytest.mark.parametrize(
    ("change", "text", "excess"),
    [
        ({"waited_ms": 300.0}, "waited 300 ms for its plan", 300),
        ({"push_ms": 301.0}, "push took 301 ms, usual 1", 300),
        ({"pull_ms": 301.0}, "pull took 301 ms, usual 1", 300),
        ({"step_ms": 301.0}, "optimizer step took 301 ms, usual 1", 300),
        (
            {"predicted_ms": 400.0, "measured_ms": 400.0, "longest_tokens": 4000},
            "planned to take 400 ms, usual 100 (its longest sequence has 4,000 tokens, usual 400)",
            300,
        ),
        (
            {"predicted_ms": 400.0, "measured_ms": 400.0, "num_tokens": 3000},
            "planned to take 400 ms, usual 100 (it has 3,000 tokens, usual 1,000)",
            300,
        ),
        (
            {"measured_ms": 400.0, "pipelines": pipelines(100.0, 400.0)},
            "<1,1> on rank 1 took longer than planned (4.00 x, usual 1.00 x)",
            300,
        ),
        (
            {"measured_ms": 400.0, "pipelines": pipelines(390.0, 400.0)},
            "every pipeline took longer than planned (4.00 x, usual 1.00 x)",
            300,
        ),
        ({}, "outside of what is measured: data loading, logging, other processes", 300),
    ],
)
def test_the_cause_of_a_slow_iteration(change, text, excess):
    slowest = find_slowest(records(change), count=3)
    assert slowest[0].record.iteration == 20
    assert slowest[0].times_median == pytest.approx(2.5)
    assert slowest[0].causes[0].text == text
    assert slowest[0].causes[0].excess_ms == pytest.approx(excess)
    assert [slow.record.iteration for slow in slowest[1:]] == [0, 1]
    assert slowest[1].causes[0].text == "no slower than usual"
    several = find_slowest(records(change, {"waited_ms": 50.0, "push_ms": 101.0}))[0].causes
    excesses = [cause.excess_ms for cause in several]
    assert excesses == sorted(excesses, reverse=True)


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
    assert (run.num_ranks, len(run.records), len(run.plans), len(run.traces)) == (
        NUM_RANKS,
        14,
        14,
        14,
    )
    assert replace(run, records=None).num_ranks == NUM_RANKS  # all of them for each rank took long
    assert run.max_len()[Scheme(4, 1)] == PROFILE.max_len_tokens(Scheme(4, 1), NUM_RANKS)
    memory = rank_memory(run)
    assert [m.measured_bytes for m in memory] == [
        int(3e10 + 1e9 * rank) for rank in range(NUM_RANKS)
    ]
    longest = max(
        PROFILE.memory.rank_bytes(
            p.scheme, NUM_RANKS, max(sum(plan.micro_batch_lengths(r)) for r in p.micro_batches)
        )
        for plan in run.plans.values()
        for p in plan.pipelines
        if 0 in p.ranks
    )
    assert memory[0].model_bytes == pytest.approx(longest)


def test_the_memory_limit_of_the_run_counts(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "limited")
    facts = json.loads((folder / "run.json").read_text())
    facts["hydra"]["memory_limit_bytes"] = 30 * 2**30
    (folder / "run.json").write_text(json.dumps(facts))
    limited, free = load_run(folder).max_len(), load_run(run_dir).max_len()
    assert all(limited[scheme] < free[scheme] for scheme in free)


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
        ({"plans": None}, "No plans in the folder"),
        ({"profile__json": None}, "No profile.json in the folder"),
        ({"profile__json": '{"schema": "ds_hydra.profile/9"}'}, "schema is 'ds_hydra.profile/9'"),
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
        (
            {"run__json": '{"hydra": {"memory_limit_bytes": "80GB"}}'},
            "memory_limit_bytes is '80GB'",
        ),
        ({"run__json": "[" * 100_000}, "run.json is not JSON"),
        (
            {"plans/iteration_000003__json": "{}"},
            "1 plans cannot be read, the first is iteration_000003.json",
        ),
    ],
)
def test_a_run_without_a_part_has_a_report_that_says_so(run_dir, tmp_path, files, note):
    folder = shutil.copytree(run_dir, tmp_path / "damaged")
    damage(folder, **files)
    result = accepted("report", folder)
    assert note in result.stderr
    assert "14 iterations" in result.stdout


def test_a_run_with_metrics_only_has_a_report(tmp_path):
    folder = write_run(
        tmp_path / "old", [make_record(0, "2x<1,1>", loss=3.0)], tail='{"iteration": 1, "lo'
    )
    document = document_of("report", folder, "--json")
    (run,) = document["runs"]
    assert (run["num_iterations"], run["bubble"], run["max_len_tokens"]) == (1, None, {})
    assert len(run["notes"]) == 3
    assert run["slowest"][0]["causes"] == [
        {"excess_ms": 0.0, "text": "too few iterations to say what is usual (1)"}
    ]
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
    document = describe_runs([load_run(folder)])
    assert document["runs"][0]["last_loss"] is None
    json.dumps(document, allow_nan=False)
    assert "-> nan" in accepted("report", folder).stdout


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
    first, second = printed.split("\n\nrun other\n")
    assert first.startswith("run full\n")
    assert str(folder / "report.png") in second
    assert f"time            plan_wait {14 / 1e3 / load_run(folder).summary.total_s:.1%}" in second
    lines = [line for line in second.splitlines() if line.startswith("slow ")]
    assert "iteration 5 (" in lines[0]
    assert len(lines) == 3, "of those that were slower than usual"
    usual = write_run(tmp_path / "usual", [make_record(i, "1x<1,1>") for i in range(3)])
    assert "slow " not in accepted("report", usual).stdout


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
    assert names == {1: "iterations", 2: "predicted", 3: "measured"}
    first = json.loads((run_dir / "trace.jsonl").read_text().splitlines()[0])
    passes = [row for row in first["events"] if row[2] in ("fwd", "bwd")]
    for process in (2, 3):
        mine = [e for e in slices if e["pid"] == process and e["ts"] < first["duration_ms"] * 1000]
        assert sum(e["cat"] in ("fwd", "bwd") for e in mine) == len(passes)
    busy_us = sum(
        e["dur"]
        for e in slices
        if e["pid"] == 3 and e["cat"] in ("fwd", "bwd") and e["ts"] < 1e3 * first["duration_ms"]
    )
    assert busy_us == pytest.approx(
        1e3 * sum(row[5] - row[4] for row in passes), abs=2 * len(passes)
    )
    assert sum(e["cat"] == "iteration" for e in slices) == 14
    assert any(e["args"].get("lengths") for e in slices)


def test_the_command_writes_the_trace(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "run")
    result = accepted("report", folder, "--perfetto")
    assert "perfetto.json" in result.stdout
    check_trace_events(json.loads((folder / "perfetto.json").read_text()))
    damage(folder, trace__jsonl=None)
    assert "set hydra.trace_every to 1 or more" in refused("report", folder, "--perfetto")


def test_the_trace_of_overlapping_links_follows_the_format():
    timelines = [measure(make_plan(iteration)) for iteration in range(3)]
    overlapping = [
        replace(
            timeline,
            events=tuple(
                replace(e, start_ms=0.0) if e.kind is EventKind.PUSH else e
                for e in timeline.events
                if e.kind is not EventKind.PULL
            ),
        )
        for timeline in timelines
    ]
    predicted = [replace(timeline, source="predicted") for timeline in timelines]
    for found in (
        zip(timelines, predicted, strict=True),
        zip(overlapping),
    ):
        check_trace_events(describe_timelines([(list(group), None, None) for group in found]))


def test_tokens_of_experts_are_read_where_there_are_experts(tmp_path):
    folder = write_run_folder(tmp_path / "run", 3)
    trace_experts(folder, {"layers": [1, 3], "tokens": [[20, 20], [30, 10]]})
    assert load_run(folder).traces[2].expert_tokens == {1: (20, 20), 3: (30, 10)}
    trace_experts(folder, {"layers": [1, 3], "tokens": [[20, 20]]})
    assert any("2 layers and tokens of 1" in note for note in load_run(folder).notes)


def test_what_was_learned_is_told_where_something_was(tmp_path):
    folder = write_run_folder(tmp_path / "run", 14)
    printed = accepted("report", folder).stdout
    assert "learned   " not in printed
    assert "the profile alone by" not in printed
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


def test_of_two_iterations_none_is_usual(tmp_path):
    records = [make_record(0, "1x<1,1>", (100.0,)), make_record(1, "1x<1,1>", (150.0,))]
    for slow in find_slowest([IterationMetrics.from_json(record) for record in records]):
        assert [cause.text for cause in slow.causes] == [
            "too few iterations to say what is usual (2)"
        ]
    printed = invoke("report", write_run(tmp_path / "two", records)).stdout
    assert "slow " not in printed
    assert "most wrong" not in printed
