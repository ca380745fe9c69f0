import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from run_folders import make_record, write_run

from ds_hydra.engine.telemetry.metrics import RunLog
from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import METRICS_FILE
from ds_hydra.report import plot_run, summarize_run
from ds_hydra.report.plots import choose_colors, paint_ranks
from ds_hydra.report.run_report import read_metrics
from ds_hydra.strategy import Scheme

RECORDS = [
    make_record(0, "4x<1,1>", (100.0, 80.0), loss=8.25),
    make_record(1, "1x<2,1> + 2x<1,1>", (90.0, 120.0), loss=7.0),
    make_record(2, "1x<4,1>", (150.0,), loss=6.0),
    make_record(3, "4x<1,1>", (100.0, 100.0), loss=6.5),
    make_record(4, "1x<2,1> + 1x<1,1>", (110.0, 100.0), loss=5.125),
]


def test_strategies_are_counted_most_used_first_under_one_name(tmp_path):
    records = [
        *RECORDS,
        make_record(5, "<2,1> + 2x<1,1>"),
        make_record(6, "2x<1,1>+1x<2,1>", (60.0,)),
    ]
    summary = summarize_run(write_run(tmp_path, records))
    assert [(str(use.strategy), use.num_iterations) for use in summary.strategies] == [
        ("1x<2,1> + 2x<1,1>", 3),
        ("4x<1,1>", 2),
        ("1x<2,1> + 1x<1,1>", 1),
        ("1x<4,1>", 1),
    ]
    assert summary.strategies[0].measured_ms == 110


def test_the_printed_summary(tmp_path):
    assert str(summarize_run(write_run(tmp_path, RECORDS))).splitlines() == [
        "strategy           iterations        tokens/s  predicted   measured",
        "4x<1,1>               2 ####            5,002     100 ms     100 ms",
        "1x<2,1> + 1x<1,1>     1 ##              5,004     100 ms     110 ms",
        "1x<2,1> + 2x<1,1>     1 ##              5,001     100 ms     120 ms",
        "1x<4,1>               1 ##              5,002     100 ms     150 ms",
        "",
        "5 iterations, 5,000 tokens in 1.0 s; 4 strategies, 2 iterations heterogeneous",
        "loss            8.250 -> 5.125",
        "tokens/s        5,002 (median)",
        "measured time   1.10 x predicted, off by 10.0% (medians)",
        "imbalance       10.0% (median)",
    ]


def test_the_printed_summary_has_what_a_device_reached(tmp_path):
    records = [{**r, "tflops_per_device": 400.0 + i} for i, r in enumerate(RECORDS)]
    assert "per device      402 TFLOP/s (median)" in str(
        summarize_run(write_run(tmp_path, records))
    )
    records = [{**r, "mfu": 0.4} for r in records]
    records[0] |= {"tflops_per_device": None, "mfu": None}
    assert "per device      402 TFLOP/s, MFU 40.0% (median)" in str(
        summarize_run(write_run(tmp_path, records))
    )


def test_a_summary_names_the_first_of_several_phases_and_twelve_strategies(tmp_path):
    phased = make_record(5, "1x<2,1;gather> then 2x<1,1;gather>", (60.0, 50.0, 40.0))
    phased["measured_ms"] = 110.0
    for pipeline, profiled in zip(phased["pipelines"], (40.0, 60.0, 55.0), strict=True):
        pipeline["profiled_ms"] = profiled
    many = [make_record(6 + n, f"1x<{n + 2},1>", (100.0,)) for n in range(20)]
    records = [*RECORDS, phased, *many]
    lines = str(summarize_run(write_run(tmp_path, records))).splitlines()
    assert len(lines[1 : lines.index("")]) == 13
    assert lines[lines.index("") - 1] == "12 others in 12 iterations"
    (record,) = [r for r in read_metrics(tmp_path) if r.iteration == 5]
    assert record.profile_error == pytest.approx(0.1)  # 40 + 60 by the profile, 110 measured
    (use,) = summarize_run(write_run(tmp_path, [phased])).strategies
    assert "1x<2,1;gather> then 1 more  " in str(summarize_run(tmp_path))
    assert use.num_iterations == 1


def test_an_error_in_both_directions_does_not_cancel(tmp_path):
    records = [make_record(0, "1x<1,1>", (50.0,)), make_record(1, "1x<1,1>", (150.0,))]
    summary = summarize_run(write_run(tmp_path, records))
    assert summary.measured_over_predicted == pytest.approx(1.0)
    assert summary.absolute_error == pytest.approx(0.5)


def test_a_run_without_predictions_has_no_ratio(tmp_path):
    summary = summarize_run(write_run(tmp_path, [make_record(0, "1x<1,1>", predicted=0.0)]))
    assert np.isnan(summary.measured_over_predicted)


@pytest.mark.parametrize(
    ("again", "kept"), [({3: 1.0, 4: 0.5}, [(3, 1.0), (4, 0.5)]), ({2: 1.0}, [(2, 1.0)])]
)
def test_what_a_resumed_run_repeats_or_went_back_over_counts_once(tmp_path, again, kept):
    records = [*RECORDS, *(make_record(i, "4x<1,1>", loss=loss) for i, loss in again.items())]
    read = read_metrics(write_run(tmp_path, records))
    assert [(record.iteration, record.loss) for record in read][min(again) :] == kept


def log_iterations(folder, iterations, name, *, save_plans=True):
    """What a run of this `name` writes; its run.json says so."""
    log = RunLog(folder, save_plans=save_plans)
    log.write_run({"schema": "ds_hydra.run/1", "version": name})
    for iteration in iterations:
        record = make_record(iteration, "1x<1,1>", loss=float(len(name)))
        log.write(
            SimpleNamespace(to_json=lambda record=record: record),
            SimpleNamespace(iteration=iteration, to_json=lambda: {"run": name}),
        )
    log.close()
    return json.loads((folder / "run.json").read_text())["version"]


def iterations_of(folder):
    return [record.iteration for record in read_metrics(folder)]


def test_a_run_that_continues_no_other_gets_the_folder_for_itself(tmp_path, caplog):
    log_iterations(tmp_path, range(6), "first")
    (tmp_path / "trace.jsonl").write_text("{}\n")
    assert log_iterations(tmp_path, range(4, 6), "first again") == "first again"
    assert iterations_of(tmp_path) == list(range(6)), "a resumed run adds"
    assert not list(tmp_path.glob("earlier*")), caplog.text
    log_iterations(tmp_path, range(2), "second")
    assert iterations_of(tmp_path) == [0, 1]
    assert iterations_of(tmp_path / "earlier-1") == list(range(6))
    assert json.loads((tmp_path / "earlier-1/run.json").read_text())["version"] == "first again"
    assert sorted(p.name for p in (tmp_path / "earlier-1").iterdir()) == [
        *("metrics.jsonl", "plans", "run.json", "trace.jsonl")
    ]
    assert len(list((tmp_path / "plans").iterdir())) == 2
    assert (
        f"ended at iteration 5, which iteration 0 does not continue: it is now in {tmp_path}"
        in (caplog.text)
    )
    log_iterations(tmp_path, [100], "resumed from elsewhere", save_plans=False)
    assert iterations_of(tmp_path) == [100]
    assert iterations_of(tmp_path / "earlier-2") == [0, 1]


def test_two_runs_at_once_in_a_folder_are_announced(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = RunLog(Path("run"), save_plans=False)
    assert not caplog.text
    second = RunLog(Path("run"), save_plans=False)
    assert f"{tmp_path}/run: another run writes to this folder" in caplog.text
    first.close()
    second.close()
    caplog.clear()
    third = RunLog(Path("run"), save_plans=False)
    monkeypatch.chdir("/")
    third.write_run({})
    third.close()
    third.close()
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(95, "Not supported")))
    without_locks = RunLog(tmp_path / "run", save_plans=False)
    without_locks.close()
    assert without_locks._file.closed
    assert not caplog.text
    assert (tmp_path / "run/run.json").exists()


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path):
    assert len(read_metrics(write_run(tmp_path, RECORDS, tail='{"iteration": 5, "lo'))) == 5
    assert (
        len(read_metrics(write_run(tmp_path, RECORDS, tail=json.dumps(make_record(5, "1x<1,1>")))))
        == 6
    )


def test_a_resumed_run_ends_the_half_line_that_a_killed_one_left(tmp_path, caplog):
    folder = write_run(tmp_path, RECORDS[:3], tail='{"iteration": 3, "lo')
    (folder / "trace.jsonl").write_text("{")
    for _ in range(2):  # and adds nothing to whole lines
        RunLog(folder, save_plans=False).close()
    assert (folder / "trace.jsonl").read_text() == "{\n"
    with (folder / METRICS_FILE).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in RECORDS[3:])
    assert len(read_metrics(folder)) == 5
    assert "1 line of metrics.jsonl cannot be read and is left out" in caplog.text
    assert "metrics.jsonl, line 4 is not JSON" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: no iteration was finished"),
        ('{"iter', "is empty: no iteration was finished"),
        ("nonsense\n", "line 1 is not JSON"),
        ("[]\n", "line 1 holds a JSON list, expected an object"),
        ('{"iteration": 0, "loss": 1.0}\n', "line 1 has no 'strategy'"),
        ('{"iteration": 1e3, "loss": 1.0}\n', "line 1 is not the record .* iteration is 1000.0"),
        (
            json.dumps(RECORDS[0] | {"strategy": "fast"}) + "\n",
            "line 1 is not the record .* cannot read 'fast'",
        ),
    ],
)
def test_a_bad_file_is_named_with_the_line(tmp_path, content, message):
    (tmp_path / METRICS_FILE).write_text(content)
    with pytest.raises(HydraConfigError, match=message) as caught:
        summarize_run(tmp_path)
    assert str(tmp_path / METRICS_FILE) in str(caught.value)


@pytest.mark.parametrize(
    "use", [summarize_run, lambda run_dir: plot_run(run_dir, run_dir / "run.png")]
)
def test_a_folder_without_a_run(tmp_path, use):
    with pytest.raises(
        HydraConfigError, match=r"cannot read .*metrics.jsonl: No such file.*hydra.run_dir"
    ):
        use(tmp_path / "none")


def test_ranks_are_painted_by_the_scheme_of_their_pipeline(tmp_path):
    records = read_metrics(write_run(tmp_path, [RECORDS[1], RECORDS[4]]))
    colors = {Scheme(1, 1): (1.0, 0.0, 0.0), Scheme(2, 1): (0.0, 0.0, 1.0)}
    image = paint_ranks(records, colors)
    red, blue, white, idle = (1, 0, 0), (0, 0, 1), (1, 1, 1), to_rgb("#ececec")
    np.testing.assert_allclose(image[:, 0], [blue, blue, red, red])
    np.testing.assert_allclose(
        image[:, 1:3], np.broadcast_to(white, (4, 2, 3)), err_msg="not in the file"
    )
    np.testing.assert_allclose(image[:, 3], [blue, blue, red, idle])


def test_the_picture_is_written(tmp_path):
    plot_run(write_run(tmp_path, RECORDS), tmp_path / "run.png")
    pixels = (imread(tmp_path / "run.png")[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[0] > 800
    assert pixels.shape[1] > 1200
    shown = set(map(tuple, pixels.reshape(-1, 3)))
    for color in choose_colors([Scheme(1, 1), Scheme(2, 1), Scheme(4, 1)]).values():
        assert tuple(round(channel * 255) for channel in color) in shown


@pytest.mark.parametrize("num_iterations", [1, 300])
def test_pictures_of_other_sizes(tmp_path, num_iterations):
    records = [make_record(i, "1x<2,2> + 1x<1,1>", (5.0, 0.0)) for i in range(num_iterations)]
    plot_run(write_run(tmp_path, records), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_schemes_are_told_apart():
    schemes = [Scheme(tp, pp) for tp in (1, 2, 4, 8, 16, 32) for pp in (1, 2, 4)]
    assert len(set(choose_colors(schemes).values())) == len(schemes)
