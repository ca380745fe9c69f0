"""`ds-hydra plan`: the JSON contract, the table, errors, and what it must not import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from command_line import accepted, document_of, invoke, refused
from reference import make_profile

from ds_hydra.strategy.cost_models.estimate import estimate_from_config

LENGTHS = [17, 40, 3, 60, 22, 9, 31, 8, 8, 25]


@pytest.fixture
def files(tmp_path):
    profile = make_profile(
        {"<1,1>": (0.01, 1.0, 3.0), "<2,1>": (0.006, 0.6, 4.0), "<1,2>": (0.005, 0.5, 2.0)}
    )
    documents = {
        "profile": profile.document,
        "strategies": {
            "schema": "ds_hydra.strategies/1",
            "num_devices": 4,
            "context_length": 100,
            "strategies": ["4x<1,1>", "1x<2,1> + 1x<1,2>"],
        },
        "lengths": LENGTHS,
    }
    for name, document in documents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    return tmp_path


def arguments(files, *more):
    paths = [f"--{name}={files / name}.json" for name in ("profile", "strategies", "lengths")]
    return ["plan", *paths, *more]


@pytest.mark.parametrize(
    "option", ["--objective=exact", "--objective=closed_form", "--dispatch=ideal"]
)
def test_json_is_one_document_with_the_agreed_keys(files, option):
    plan = document_of(*arguments(files, "--json", option))
    assert {"strategy", "makespan_ms", "lower_bound_ms", "planning_ms", "pipelines"} <= set(plan)
    assert 0 < plan["lower_bound_ms"] <= plan["makespan_ms"]
    assert plan["makespan_ms"] == max(p["makespan_ms"] for p in plan["pipelines"])
    for pipeline in plan["pipelines"]:
        assert {"tp", "pp", "ranks", "makespan_ms", "lower_bound_ms", "micro_batches"} <= set(
            pipeline
        )
        assert len(pipeline["ranks"]) == pipeline["tp"] * pipeline["pp"]
    placed = [i for p in plan["pipelines"] for row in p["micro_batches"] for i in row]
    assert sorted(placed) == list(range(len(LENGTHS)))


def test_table_names_every_pipeline(files):
    result = accepted(*arguments(files))
    assert result.stdout.startswith("iteration 0: ")
    header, *pipelines = result.stdout.splitlines()[1:-1]
    assert header.split() == ["ranks", "scheme", "micro-batches", "tokens", "longest", "ms"]
    assert sum(int(line.split()[3]) for line in pipelines) == sum(LENGTHS)
    assert "planned in" in result.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "lengths",
            "[1, 101]",
            "sequence 1 has 101 tokens, the largest MaxLen over all candidate strategies is 100",
        ),
        ("lengths", "[1, 0]", "length 1 is 0, expected an integer from 1 to"),
        ("lengths", "{}", "expected a JSON list of lengths"),
        ("lengths", "[1,", "is not JSON"),
        ("strategies", '{"schema": "x"}', "schema is 'x', expected 'ds_hydra.strategies/1'"),
        (
            "strategies",
            '{"schema": "ds_hydra.strategies/1", "num_devices": 2, "strategies": ["4x<1,1>"]}',
            "strategy 4x<1,1> needs 4 ranks, there are 2",
        ),
        (
            "strategies",
            '{"schema": "ds_hydra.strategies/1", "num_devices": 4, "strategies": ["4x<1>"]}',
            "cannot read '<1>'",
        ),
        ("profile", '{"schema": "y"}', "schema is 'y', expected 'ds_hydra.profile/1'"),
    ],
)
def test_errors_go_to_stderr_without_traceback(files, name, content, message):
    (files / f"{name}.json").write_text(content)
    said = refused(*arguments(files, "--json"))
    assert said.startswith("error: ")
    assert message in said


def test_more_devices_are_advised_where_the_states_do_not_fit(files):
    found = []
    for num_devices in (2, 4):
        strategies = {
            "schema": "ds_hydra.strategies/1",
            "num_devices": num_devices,
            "strategies": ["1x<2,1>"],
        }
        (files / "strategies.json").write_text(json.dumps(strategies))
        (files / "lengths.json").write_text("[300, 77]")
        words = arguments(files)
        words[1] = "--profile=a800_llama2_7b"
        found.append(invoke(*words))
    assert "fill the memory of 2 devices; take more of them" in found[0].stderr
    assert found[1].exit_code == 0, found[1].stderr


def test_a_model_and_hardware_take_the_place_of_a_profile(files):
    instead = ["--model=llama2_7b", "--hardware=h100"]
    found = files / "found.json"
    proposed = accepted(
        "propose", *instead, "--histogram=github", "--devices=4", "--context=8192",
        "--batches=2", "--space=plain", f"--out={found}",
    )  # fmt: skip
    assert "assumed: T: roofline of H100-80GB" in proposed.stderr
    (files / "batch.json").write_text("[8000, 300, 4000, 77]")
    given = [f"--strategies={found}", f"--lengths={files / 'batch.json'}", "--json"]
    estimated, _ = estimate_from_config("llama2_7b", "h100", 4, 8000)
    (files / "estimated.json").write_text(json.dumps(dict(estimated.document)))
    plans = [
        document_of("plan", *words, *given)
        for words in (instead, [f"--profile={files / 'estimated.json'}"])
    ]
    assert plans[0]["strategy"] in json.loads(found.read_text())["strategies"]
    assert plans[0]["makespan_ms"] == plans[1]["makespan_ms"] > 0
    for words in ([], instead[:1], instead[1:], [*instead, "--profile=a800_llama2_7b"]):
        assert "--hardware" in refused("plan", *words, *given), words


@pytest.mark.parametrize("is_joined", [True, False])
def test_words_may_begin_with_the_home_folder(files, monkeypatch, is_joined):
    monkeypatch.setenv("HOME", str(files))
    path = "~/lengths.json"
    words = [f"--lengths={path}"] if is_joined else ["--lengths", path]
    assert accepted(*arguments(files), *words).stdout


def test_the_command_imports_neither_torch_nor_deepspeed(files):
    code = (
        "import sys; from ds_hydra.cli import app;"
        f"app({arguments(files, '--json')!r}, standalone_mode=False);"
        "assert not {'torch', 'deepspeed', 'transformers', 'mip'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
