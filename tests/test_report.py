"""The report without a browser: what is read, computed and written."""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from colors import VISION, contrast, difference
from command_line import accepted, document_of, invoke, refused
from hypothesis import given
from hypothesis import strategies as st
from run_folders import (
    NUM_RANKS,
    PROFILE,
    learn_from,
    make_plan,
    measure,
    trace_experts,
    write_run_folder,
)
from test_run_report import make_record, write_run

from ds_hydra import report
from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import METRICS_FILE, IterationMetrics
from ds_hydra.records.timeline import EventKind
from ds_hydra.report import svg
from ds_hydra.report.charts import scheme_errors
from ds_hydra.report.page import describe_runs, render_runs, render_simulation
from ds_hydra.report.run_folder import load_run, predict_timeline, rank_memory
from ds_hydra.report.run_report import divide_time, find_slowest
from ds_hydra.report.timelines import align, draw_gantt, trace_run, trace_timelines
from ds_hydra.sampler.schedule import one_f_one_b_ms
from ds_hydra.strategy import Scheme


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run_folder(tmp_path_factory.mktemp("runs") / "full")


# Axes


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6), num_ticks=st.integers(2, 9))
def test_ticks_are_round_within_the_axis_and_neither_few_nor_many(low, span, num_ticks):
    axis = svg.linear_axis(low, low + span, num_ticks=num_ticks)
    places = [tick for tick, _ in axis.ticks]
    slack = 1e-6 * max(span, abs(low))
    assert all(low - slack <= place <= low + span + slack for place in places)
    assert num_ticks / 2 - 1 <= len(places) <= 2 * num_ticks + 1
    assert len({text for _, text in axis.ticks}) == len(places)


def test_places_on_axes():
    axis = svg.linear_axis(0.0, 50.0)
    assert [axis.percent(value) for value in (-5, 0, 20, 50, 60)] == [0, 0, 40, 100, 100]
    assert [text for _, text in axis.ticks] == ["0", "10", "20", "30", "40", "50"]
    assert [text for _, text in svg.linear_axis(0, 1).ticks] == [
        "0.0", "0.2", "0.4", "0.6", "0.8", "1.0",
    ]  # fmt: skip
    logarithmic = svg.log_axis(16, 1024)
    assert [logarithmic.percent(value) for value in (4, 16, 128, 1024)] == [0, 0, 50, 100]
    assert [text for _, text in logarithmic.ticks] == [
        "16", "32", "64", "128", "256", "512", "1,024",
    ]  # fmt: skip
    assert svg.linear_axis(3.0, 3.0).percent(3.0) == 50


def test_a_long_line_keeps_its_peaks():
    points = [(float(x), math.sin(x)) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[77_777] = (77_777.0, math.nan)
    thinned = svg.thin_line(points)
    assert len(thinned) <= 1200
    assert (54_321.0, 99.0) in thinned
    assert thinned == sorted(thinned)


def test_a_line_is_interrupted_where_there_is_no_value():
    x, y = svg.linear_axis(0, 4), svg.linear_axis(0, 1)
    drawn = svg.line([(0, 0.5), (1, 0.5), (2, math.nan), (3, 0.5), (4, 0.5)], x, y, "f0")
    assert drawn.count("M") == 2
    assert "nan" not in drawn
    alone = svg.line([(0, 0.5), (1, math.nan)], x, y, "f0")
    assert "<use" in alone


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


def test_several_causes_come_largest_first():
    causes = find_slowest(records({"waited_ms": 100.0, "push_ms": 201.0}))[0].causes
    assert [round(cause.excess_ms) for cause in causes] == [200, 100]


def test_an_iteration_like_all_others_needs_no_reason():
    assert find_slowest(records())[1].causes[0].text == "no slower than usual"


def test_time_is_divided_without_rest():
    line = make_record(0, "1x<1,1>", (150.0,)) | {
        "iteration_ms": 200.0, "bubble": 0.2, "waited_ms": 5.0, "pull_ms": 10.0, "push_ms": 15.0,
        "step_ms": 12.0,
    }  # fmt: skip
    shares = divide_time([IterationMetrics.from_json(line)] * 2)
    assert (shares.plan_wait, shares.pull, shares.push, shares.step) == (10, 20, 30, 24)
    assert (shares.compute, shares.idle) == pytest.approx((240, 60))
    assert shares.other == pytest.approx(2 * (200 - 192))


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
    assert sorted(run.lengths()) == sorted(
        length for plan in run.plans.values() for length in plan.lengths
    )
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
def test_a_run_without_a_part_has_a_page_that_says_so(run_dir, tmp_path, files, note):
    folder = shutil.copytree(run_dir, tmp_path / "damaged")
    damage(folder, **files)
    result = accepted("report", folder)
    assert note in result.stderr
    page = (folder / "report.html").read_text()
    assert note.split("'")[0] in page
    assert "Loss" in page


def test_a_run_with_metrics_only_has_a_page(tmp_path):
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
    assert Path(document["page"]).read_text().count("<section") == 10


def test_a_killed_run_loses_its_last_line_only(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "killed")
    for name in (METRICS_FILE, "trace.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) - 200])
    run = load_run(folder)
    assert (len(run.records), len(run.traces), run.notes) == (13, 13, ())
    assert render_runs([run])


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
    page = render_runs([run])
    assert "8 of 14 iterations have a loss that is not a number" in page
    assert "nan%" not in page
    document = describe_runs([run])
    assert document["runs"][0]["last_loss"] is None
    json.dumps(document, allow_nan=False)


def test_a_run_of_another_format_is_refused_by_name(tmp_path):
    folder = write_run(
        tmp_path / "new", [make_record(0, "1x<1,1>") | {"schema": "ds_hydra.metrics/2"}]
    )
    said = refused("report", folder)
    assert "line 1 is not the record of an iteration: its schema is 'ds_hydra.metrics/2'" in said
    assert "this version reads 'ds_hydra.metrics/1'" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "cannot read none/metrics.jsonl: No such file or directory"),
        (["one", "two"], "2 run folders were given, expected 1; give one, or two with --compare"),
        (["--compare", "one"], "1 run folders were given, expected 2; give two runs"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused("report", *arguments)


def test_a_page_that_cannot_be_written(run_dir):
    said = refused("report", run_dir, "--out", run_dir / "none" / "page.html")
    assert "cannot write" in said
    assert "name a file with --out" in said


# The page


def test_the_page_needs_nothing_else(run_dir):
    page = render_runs([load_run(run_dir)])
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"<(link|img|iframe|script)[^>]*(src|href)=\"(?!data:)", page)
    assert "@import" not in page
    assert "nan" not in re.sub(r"[A-Za-z]*nan[a-z]+", "", page.lower())


def test_names_of_folders_are_text_and_not_markup(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "<b>run & co")
    page = render_runs([load_run(folder)])
    assert "&lt;b&gt;run &amp; co" in page
    assert "<b>run" not in page


def test_two_runs_share_their_axes(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "other")
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    for line in lines:
        line["loss"] += 100
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = document_of(
        "report", "--compare", run_dir, folder, "--out", tmp_path / "compare.html", "--json"
    )
    assert [run["name"] for run in document["runs"]] == ["full", "other"]
    page = (tmp_path / "compare.html").read_text()
    (loss,) = re.findall(r'<section id="loss">.*?</section>', page, re.DOTALL)
    first, second = re.findall(r'<div class="ys">(.*?)</div>', loss)
    assert first == second
    assert "1.00 x" in page


def test_ten_thousand_iterations_make_a_page_of_readable_size(tmp_path):
    lines = [
        make_record(
            i, ["4x<1,1>", "2x<2,1>", "1x<4,1>"][i % 3], (100.0 + i % 7,), loss=5 - i / 3000
        )
        for i in range(10_000)
    ]
    page = render_runs([load_run(write_run(tmp_path / "long", lines))])
    assert len(page) < 1_500_000


def test_a_simulated_case_has_strip_and_gantt():
    plans = [make_plan(iteration) for iteration in range(15)]
    timelines = [predict_timeline(plan, PROFILE, forward_fraction=1 / 3) for plan in plans]
    page = render_simulation(timelines, title="paper/case", subtitle="8 devices")
    assert page.count("<option") == 12
    assert page.count('class="gantt"') == 12
    assert 'class="strip over"' in page
    with pytest.raises(HydraConfigError, match="no timelines"):
        render_simulation([], title="none")


def test_a_file_of_timelines_becomes_a_page_and_a_trace(tmp_path):
    plans = [make_plan(iteration) for iteration in range(3)]
    timelines = [predict_timeline(plan, PROFILE, forward_fraction=1 / 3) for plan in plans]
    path = tmp_path / "case.jsonl"
    path.write_text("".join(json.dumps(timeline.to_json()) + "\n" for timeline in timelines))
    document = document_of("report", path, "--perfetto", "--json")
    assert [line["duration_ms"] for line in document["iterations"]] == [
        t.duration_ms for t in timelines
    ]
    assert (tmp_path / "case.html").read_text().count('class="gantt"') == 3
    check_trace_events(json.loads((tmp_path / "case.perfetto.json").read_text()))
    assert "3 timelines of 3 iterations" in invoke("report", path).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected a ds_hydra.timeline/1 document on each line"),
        ("{\n", "line 1 is not JSON"),
        ("[]\n", "line 1 holds a JSON list, expected an object"),
        (
            '{"schema": "ds_hydra.plan/1"}\n',
            "line 1: schema is 'ds_hydra.plan/1', expected 'ds_hydra.timeline/1'",
        ),
    ],
)
def test_a_file_of_something_else(tmp_path, text, message):
    (tmp_path / "case.jsonl").write_text(text)
    assert message in refused("report", tmp_path / "case.jsonl")


def test_a_gantt_of_a_large_cluster_shows_slowest_and_fastest_pipelines():
    timeline = predict_timeline(make_plan(2, "1x<4,1> + 1x<2,2>"), PROFILE, forward_fraction=1 / 3)
    many = 50
    large = replace(
        timeline,
        pipelines=timeline.pipelines * many,
        events=tuple(
            replace(
                event,
                pipeline=event.pipeline + 2 * copy,
                start_ms=event.start_ms * (1 + copy),
                end_ms=event.end_ms * (1 + copy),
            )
            for event in timeline.events
            for copy in range(many)
        ),
        duration_ms=timeline.duration_ms * many,
    )
    drawn = draw_gantt([large])
    assert drawn.count("<b>") <= 64
    left_out = int(re.search(r"(\d+) more pipelines are not drawn", drawn)[1])
    assert 2 * many - left_out == len(re.findall(r"<b>&lt;[^s]*(?: s0)?</b>", drawn))
    slowest = max(event.end_ms for event in large.events)
    assert f"{slowest:,.1f} ms" in drawn


def test_an_overlapped_link_is_drawn_beside_the_passes():
    timeline = measure(make_plan(1, "1x<4,1> + 2x<2,1>"))
    overlapped = replace(
        timeline,
        events=tuple(
            replace(e, start_ms=0.0) if e.kind is EventKind.PUSH and e.pipeline == 0 else e
            for e in timeline.events
        ),
    )
    assert draw_gantt([timeline]).count("narrow") == 0
    assert draw_gantt([overlapped]).count('class="push narrow"') == 1


def test_only_the_visible_part_of_an_overlapped_link_counts():
    line = make_record(0, "1x<1,1>", (150.0,)) | {"pull_ms": 90.0, "push_ms": 80.0}
    hidden = line | {"visible_pull_ms": 9.0, "visible_push_ms": 8.0}
    assert (divide_time([IterationMetrics.from_json(line)]).pull) == 90
    shares = divide_time([IterationMetrics.from_json(hidden)])
    assert (shares.pull, shares.push) == (9, 8)


def test_blocks_say_what_they_are():
    plan = make_plan(1, "1x<4,1> + 2x<2,1>")
    drawn = draw_gantt([measure(plan)], plan)
    row = plan.micro_batch_lengths(plan.pipelines[0].micro_batches[0])
    assert f"{sum(row):,} tokens in {len(row)} sequences, longest {max(row):,}" in drawn
    for text in ("forward", "backward", "pull", "push", "optimizer step", "idle"):
        assert f"<span>{text}</span>" in drawn


# Colours


def palettes():
    css = (Path(report.__file__).parent / "templates/report.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    return [
        dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in (light, dark.split("* {")[0])
    ]


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_colours_can_be_told_apart_by_everyone(palette):
    for vision in VISION:
        for one, other in itertools.combinations([palette[f"c{i}"] for i in range(8)], 2):
            assert difference(one, other, vision) > 12, f"{one} and {other} under {vision}"
        drawn_together = [palette[name] for name in ("c0", "c1", "idle-ground")]
        for one, other in itertools.combinations(drawn_together, 2):
            assert difference(one, other, vision) > 25, f"{one} and {other} under {vision}"
    for ground in (palette["paper"], palette["card"]):
        assert min(contrast(palette[name], ground) for name in ("ink", "soft", "warn")) > 4.5
    assert min(contrast(palette[f"c{i}"], palette["paper"]) for i in range(8)) > 2
    assert contrast(palette["on-fwd"], palette["c0"]) > 4.5
    assert contrast(palette["on-bwd"], palette["c1"]) > 4.5


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


def test_the_trace_of_simulated_iterations_with_overlapping_links_follows_the_format():
    timelines = [measure(make_plan(iteration)) for iteration in range(3)]
    overlapping = [
        replace(
            timeline,
            events=tuple(
                replace(e, start_ms=0.0) if e.kind is EventKind.PUSH else e for e in timeline.events
            ),
        )
        for timeline in timelines
    ]
    predicted = [replace(timeline, source="predicted") for timeline in timelines]
    for events in (
        timelines + predicted,
        [
            replace(t, events=tuple(e for e in t.events if e.kind is not EventKind.PULL))
            for t in overlapping
        ],
    ):
        check_trace_events(trace_timelines(events))


def test_tokens_of_experts_are_drawn_where_there_are_experts(tmp_path):
    folder = write_run_folder(tmp_path / "run", 3)
    assert "Tokens of each expert" not in render_runs([load_run(folder)])
    trace_experts(folder, {"layers": [1, 3], "tokens": [[20, 20], [30, 10]]})
    html = render_runs([load_run(folder)])
    assert "layer 3, expert 0: 30 tokens, 1.50 of the mean" in html
    assert "layer 1, expert 1: 20 tokens, 1.00 of the mean" in html
    trace_experts(folder, {"layers": [1, 3], "tokens": [[20, 20]]})
    assert any("2 layers and tokens of 1" in note for note in load_run(folder).notes)


def test_what_was_learned_is_drawn_where_something_was(tmp_path):
    folder = write_run_folder(tmp_path / "run", 14)
    assert "What was learned" not in render_runs([load_run(folder)])
    assert "error of the profile alone" not in render_runs([load_run(folder)])
    learn_from(folder)
    run = load_run(folder)
    html = render_runs([run])
    assert "scheme &lt;2,1&gt;: 0.90" in html
    assert "machine: 1.13" in html
    assert "by the profile alone, not corrected" in html
    assert "error of the profile alone" in html
    # Twice as long as a profile says that has <4,1> half of what the planner knew
    worst, *others = scheme_errors(run.records)
    assert worst.scheme == Scheme(4, 1)
    assert 2.0 < worst.measured_over_profiled < 2.2
    assert max(e.measured_over_profiled for e in others if e.num_pipelines > 2) < 1.5
    (described,) = describe_runs([run])["runs"]
    assert described["schemes"][0]["scheme"] == "<4,1>"
    assert described["profile_error"] > described["absolute_error"]
    result = invoke("report", folder)
    assert "the profile is most wrong about <4,1>, whose pipelines took 2.0" in result.stdout


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
    assert "too few iterations" in printed
    assert "most wrong" not in printed


def test_memory_of_processes_is_not_compared_with_that_of_tensors(run_dir, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "on_cpu")
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "device": "cuda"}))
    assert "memory model (App. B.1)" in render_runs([load_run(folder)])
    (folder / "run.json").write_text(json.dumps({**facts, "device": "cpu"}))
    page = render_runs([load_run(folder)])
    assert "memory model (App. B.1)" not in page
    assert "On CPU ranks a process grows by more than its tensors" in page


@pytest.mark.parametrize(("profiled", "paid"), [(100.0, False), (50.0, True)])
def test_the_page_says_what_both_errors_are(tmp_path, profiled, paid):
    records = [make_record(i, "1x<1,1>", (104.0,), predicted=100 if paid else 90) for i in range(4)]
    for record in records:
        record["pipelines"][0]["profiled_ms"] = profiled
        record["learned"] = {"machine": 1.1}
    page = render_runs([load_run(write_run(tmp_path, records))])
    assert "Plans use the profile" in page
    assert ("The corrections did not pay here" in page) is not paid
