"""`ds-hydra simulate` as a user calls it, mistakes included."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from command_line import accepted, document_of, invoke
from test_simulator import HISTOGRAM, checkpointing_document, small_profile

from ds_hydra.cli import main
from ds_hydra.lab.commands.simulate import describe_simulation
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.scheme import Strategy, schemes_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulate")
    (folder / "profile.json").write_text(json.dumps(dict(small_profile().document)))
    (folder / "lengths.json").write_text(json.dumps(HISTOGRAM.to_json()))
    return folder


def arguments(files, *, devices=4, context=100, tokens=400):
    return [
        "--profile", files / "profile.json", "--histogram", files / "lengths.json", "--devices", devices,
        "--context", context, "--tokens", tokens, "--iterations", 4,
    ]  # fmt: skip


def test_one_document_on_stdout_and_the_same_in_the_file(files):
    out = files / "out.json"
    options = ("--json", "--out", out)
    result = accepted("simulate", *arguments(files), *options)
    document = json.loads(result.stdout)
    assert document == json.loads(out.read_text())
    text = describe_simulation(document)
    for part in ("above the perfect-balance bound", "Megatron-LM, tuned", "speed-up"):
        assert part in text
    assert document["schema"] == "ds_hydra.simulation/1"
    assert document["systems"][0]["name"] == "ds_hydra"
    assert "communication counts nothing" in result.stderr


def test_results_are_spelled_out_where_stdout_knows_ascii_alone(files, monkeypatch):
    lengths = files / "längen.json"
    lengths.write_text((files / "lengths.json").read_text())
    words = [*arguments(files), "--histogram", lengths, "--systems", "ds_hydra"]
    written = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["ds-hydra", "simulate", *map(str, words)])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as end:
        main()
    sys.stdout.flush()
    text = written.getvalue().decode("ascii")
    assert end.value.code == 0, text
    assert re.search(r"ds_hydra +[\d,]+ \+- \d", text), text
    assert r"l\xe4ngen.json" in text


def test_strategies_with_checkpointed_layers_fit_what_no_other_scheme_does(files):
    (files / "ckpt.json").write_text(json.dumps(checkpointing_document()))
    candidates = {
        "schema": "ds_hydra.strategies/1", "num_devices": 4, "context_length": 300,
        "strategies": ["1x<4,1;ckpt=4>"],
    }  # fmt: skip
    (files / "candidates.json").write_text(json.dumps(candidates))
    lengths = files / "longer.json"
    lengths.write_text(
        json.dumps(LengthHistogram.from_counts({5: 40, 300: 5}, name="longer").to_json())
    )
    options = [
        *arguments(files, context=300),
        "--profile",
        files / "ckpt.json",
        "--histogram",
        lengths,
    ]
    plain = invoke("simulate", *options, "--space", "plain")
    assert "no scheme fits a micro-batch of 300 tokens" in plain.stderr
    result = accepted("simulate", *options, "--strategies", files / "candidates.json", "--json")
    assert json.loads(result.stdout)["systems"][0]["strategy"] == "1x<4,1;ckpt=4> (100%)"
    said = "left out: ZeRO-3 / FSDP, packed cannot run a sequence of 300 tokens on 4 devices"
    assert said in result.stderr


def test_ds_hydra_runs_what_the_engine_runs_of_a_model(files):
    """There is no tp plan for gpt-oss."""
    model = {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 4096, "layer_types": ["full_attention"] * 4,
        "architectures": ["GptOssForCausalLM"],
    }  # fmt: skip
    (files / "config.json").write_text(json.dumps(model))
    options = [
        "--model", files / "config.json", "--hardware", "h100", "--devices", 4, "--context", 100, "--tokens", 400,
        "--histogram", files / "lengths.json", "--iterations", 2, "--systems", "plain",
    ]  # fmt: skip
    result = accepted("simulate", *options, "--json")
    assert "left out of what ds_hydra runs: <2,1>: transformers ships no" in result.stderr
    chosen = [Strategy.parse(text) for text in json.loads(result.stdout)["strategies"]]
    assert {scheme.tp for scheme in schemes_of(chosen)} == {1}


def test_list_cases():
    assert "paper/link-overhead" in invoke("simulate", "--list-cases").stdout.split()
    assert "paper/case-study" in document_of("simulate", "--list-cases", "--json")["cases"]


def test_ds_hydra_alone_and_beside_named_systems(files):
    def names(*more):
        document = json.loads(invoke("simulate", *arguments(files), "--json", *more).stdout)
        return [system["name"] for system in document["systems"]]

    assert names("--systems", "ds_hydra") == ["ds_hydra"]
    assert names("--systems", "megatron") == ["ds_hydra", "megatron"]
