"""`ds-hydra check` and `ds-hydra init` as a user calls them, mistakes included."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
from command_line import accepted, document_of, invoke, refused
from flash_standin import installed
from reference import make_profile

from ds_hydra.configs import load_model_preset
from ds_hydra.engine.checks.config_check import CheckRequest, check_config
from ds_hydra.engine.ranks.process import compiles_adam
from ds_hydra.strategy.proposal.histogram import LengthHistogram

BASE = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "hydra": {
        "context_length": 32768,
        "tokens_per_iteration": 200_000,
        "profile": "a800_llama2_7b",
    },
}


def changed(**parts):
    """BASE with sections merged, "hydra" too."""
    config = json.loads(json.dumps(BASE))
    for key, value in parts.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def report_on(config, **request):
    return check_config(CheckRequest(config=config, **{"num_devices": 8} | request))


def problems_of(config, **request):
    return report_on(config, **request).problems


def longest(report):
    """MaxLen of every scheme in tokens."""
    return {row["scheme"]: row["max_len_tokens"] for row in report.schemes}


def test_a_good_configuration_shows_memory_communicators_and_what_is_assumed(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE))
    result = accepted("check", path, "--model", "llama2_7b", "--devices", 8)
    assert "no problem found" in result.stdout
    rows = {
        line.split()[0]: line.split()[1]
        for line in result.stdout.splitlines()
        if line.strip()[0] == "<"
    }
    # With the engine's states and all else that it holds; 9,669 and 75,238 by App. B.1
    for scheme, published in (("<1,2>", 9669), ("<8,1>", 75238)):
        assert published / 2 < int(rows[scheme].replace(",", "")) < published
    assert "communicators: " in result.stdout
    assert "max_position_embeddings of 4096" in result.stdout


def test_json_is_one_document_and_the_sizes_add_up(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE))
    document = document_of("check", path, "--devices", 8, "--json")
    assert document["schema"] == "ds_hydra.check/1"
    assert document["ok"] is True
    for row in document["schemes"]:
        assert row["states_bytes"] < row["total_bytes"] <= document["memory_bytes"]
        assert row["micro_batch_tokens"] == min(row["max_len_tokens"], 32768)
    assert document["communicators"]["most_on_one_rank"] >= 2  # pull and push
    assert document["communicators"]["most_on_one_rank"] <= document["communicators"]["total"]
    assert any("zero_optimization.contiguous_gradients" in text for text in document["filled_in"])


def test_a_problem_is_exit_code_1_with_the_document_on_stdout(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(changed(hydra={"context_lenght": 5})))
    result = invoke("check", path, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False
    assert "did you mean hydra.context_length?" in result.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(bf16={"enable": True}), "bf16.enable is not a key of DeepSpeed; did you mean 'enabled'?"),
        (changed(hydra={"profile": "a800_llama_7b"}), "did you mean 'a800_llama2_7b'?"),
        (
            changed(hydra={"context_length": 100_000, "planner": {"space": "plain"}}),
            "lower the context to 69889, or set hydra.planner.space",
        ),
        (changed(hydra={"strategies": ["3x<4,1>"]}), "strategy 3x<4,1> needs 12 devices, there are 8"),
        (changed(hydra={"strategies": ["8x<1,1>"]}), "scheme <1,1> is not in profile"),
        (changed(hydra={"strategies": ["4x<2,1>"]}), "no scheme fits a micro-batch of 32768 tokens on 8 devices"),
        (
            changed(hydra={"strategies": ["4x<2,1>", "1x<8,1>"], "max_process_groups": 6}),
            "the strategies need 7 process groups, more than hydra.max_process_groups = 6; raise it to 7",
        ),
        (changed(hydra={"tokenizer": "./no/such/folder"}), "hydra.tokenizer is './no/such/folder', which does not"),
    ],
)  # fmt: skip
def test_mistakes_are_found_and_explained(config, message):
    found = problems_of(config)
    assert any(message in problem for problem in found), found


def test_problems_do_not_hide_each_other(tmp_path):
    (tmp_path / "runs").write_text("")
    hydra = {"strategies": ["3x<4,1>"], "run_dir": str(tmp_path / "runs")}
    report = report_on(changed(bf16={"enable": True}, bf17={"enabled": True}, hydra=hydra))
    assert len(report.problems) == 3
    assert any("which is a file" in problem for problem in report.problems)
    assert 'did you mean "bf16"?' in " ".join(report.warnings)


def test_a_model_is_compared_with_the_profile_and_asked_for_its_schemes(tmp_path):
    found = problems_of(BASE, model="llama2_13b")
    assert (
        "of another model: num_layers 32 instead of 40, hidden_size 4096 instead of 5120"
        in found[0]
    )
    narrow = {**load_model_preset("llama2_7b"), "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**narrow, "num_hidden_layers": 32}))
    found = problems_of(changed(hydra={"strategies": ["2x<4,1>"]}), model=str(tmp_path))
    assert "TP 4 does not divide the model's 2 attention heads" in found[0]
    report = report_on(BASE, model=str(tmp_path))
    assert {row["scheme"][1] for row in report.schemes} <= {"1", "2"}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_softcapped_attention_is_refused_on_gpus_as_by_the_engine(tmp_path, dtype):
    config = transformers.Gemma2Config(num_hidden_layers=2, hidden_size=64, head_dim=16)
    config.save_pretrained(tmp_path)
    asked = changed(hydra={"profile": None}, bf16={"enabled": dtype == "bf16"})

    with installed():
        warnings = " ".join(report_on(asked, model=str(tmp_path)).warnings)
    assert "refuses this model: attn_logit_softcapping is 50.0" in warnings
    with installed("flash_attention_2"):
        warnings = " ".join(report_on(asked, model=str(tmp_path)).warnings)
    assert ("attn_logit_softcapping" in warnings) == (dtype == "fp32")


def test_the_kernel_of_attention_is_named_and_why_faster_ones_are_not():
    def check(**hydra):
        return report_on(changed(hydra=hydra), model="llama2_7b")

    with installed("flash_attention_2"):
        assumed = " ".join(check().assumed)
        assert "by the packages here: flash_attention_2 (flash-attn" in assumed
        assert "for heads of 128 in bfloat16; not flash_attention_3: flash-attn-3 is not" in assumed
        report = check(attention="flash_attention_3")
        assert report.problems == []  # another host may have it
        assert 'hydra.attention is "flash_attention_3"' in " ".join(report.warnings)
        assert 'set it to "flash_attention_2" or "per_sequence"' in " ".join(report.warnings)
        of_hub = " ".join(check(attention="kernels-community/flash-attn3").assumed)
        assert "the hub has kernels-community/flash-attn3" in of_hub


def test_the_compiler_of_deepspeeds_own_optimizer_is_told():
    said = "an nvcc of torch's CUDA on every host"
    assert said in " ".join(report_on(BASE).assumed)
    params = {"lr": 3e-4, "torch_adam": True, "fused": True}
    report = report_on(changed(optimizer={"params": params}))
    assert report.problems == []
    assert said not in " ".join(report.assumed)


def test_auto_values_are_for_the_trainer_and_no_problem():
    """The batch size among them, which DeepSpeed wants a number for."""
    config = changed(optimizer={"params": {"lr": "auto"}}, gradient_clipping="auto")
    report = report_on(config)
    assert report.problems == []
    assert any("optimizer.params.lr" in text and "HydraTrainer" in text for text in report.assumed)
    example = Path(__file__).parents[1] / "examples" / "hf_trainer" / "ds_config.json"
    assert problems_of(example, num_devices=4) == []


def test_without_a_profile_it_says_what_will_be_measured_and_estimates_for_a_device():
    config = changed(hydra={"profile": None, "context_length": 8192})
    unknown = report_on(config, num_devices=4)
    assert unknown.problems == []
    assert "hpz" not in unknown.profiled[0]
    (nodes,) = report_on(config, num_devices=16, model="llama2_7b").profiled
    assert "<1,1;gather>, <1,1;hpz>, " in nodes
    (many,) = report_on(config, num_devices=64).profiled  # the start has groups of one scheme
    assert ": 12 schemes are measured" in many
    assert "<2,32>" not in many
    assert "measured at the start" in unknown.profiled[0]
    assert unknown.schemes == []
    estimate = report_on(config, model="llama2_7b", device="a800")
    assert estimate.problems == []
    measured = report_on(changed(hydra={"context_length": 8192}))
    assert (
        0.6 < longest(estimate)["<4,1>"] / longest(measured)["<4,1>"] < 1.4
    )  # states and activations are counted, not measured


def test_options_without_effect_are_pointed_out():
    config = changed(hydra={"planner": {"space": "plain"}})
    report = report_on(config, device="h100", histogram="github")
    assert [text.split(" is not used")[0] for text in report.warnings] == [
        "--hardware h100",
        "--histogram github",
    ]


def test_extended_candidates_are_shown_with_what_is_estimated(tmp_path):
    profile = make_profile({"<1,1>": (0.01, 1.0, 1.0), "<2,1>": (0.006, 0.6, 1.0)}, max_len=60)
    (tmp_path / "profile.json").write_text(json.dumps(dict(profile.document)))
    (tmp_path / "lengths.json").write_text(
        json.dumps(LengthHistogram.from_counts({5: 20, 50: 20}).to_json())
    )
    known = {"profile": f"{tmp_path}/profile.json", "num_devices": 2}

    def check(space, context=50, **more):
        hydra = {"context_length": context, "tokens_per_iteration": 60, "planner": {"space": space}}
        return report_on(changed(hydra={"profile": None, **hydra}), **known, **more)

    full = check("full", histogram=f"{tmp_path}/lengths.json")
    assert full.problems == []
    assert full.strategies_source.startswith("proposed for the lengths of")
    assert "1x<sp2,1>" in full.strategies
    assert any("<sp2,1>" in text and "hydra.planner.space is full" in text for text in full.assumed)
    assert "<TP,PP> until" in check("full").strategies_source
    measured = check("measured", histogram=f"{tmp_path}/lengths.json")
    assert any("is not used" in text for text in measured.warnings)
    assert not any("sp" in text for text in measured.strategies)
    assert any(
        'set hydra.planner.space to "full"' in text for text in check("measured", 61).problems
    )
    assert check("full", 61).problems == []


def test_only_schemes_that_fit_the_devices_are_shown():
    longer = {"context_length": 131_072, "tokens_per_iteration": 200_000}
    report = report_on(BASE | {"hydra": BASE["hydra"] | longer}, num_devices=2)
    assert {row["scheme"] for row in report.schemes} == {"<1,2>", "<2,1>"}
    assert any(
        "no scheme fits a micro-batch of 131072 tokens on 2 devices" in problem
        for problem in report.problems
    )


def test_init_leaves_to_a_trainer_what_its_arguments_fill_in(tmp_path):
    out = tmp_path / "ds_config.json"
    request = ("init", "--model", "llama2_7b", "--hardware", "h100", "--devices", 8)
    accepted(*request, "--context", 8192, "--trainer", "--out", out)
    config = json.loads(out.read_text())
    assert "scheduler" not in config
    assert config["train_micro_batch_size_per_gpu"] == config["gradient_clipping"] == "auto"
    assert config["bf16"] == {"enabled": "auto"}
    params = config["optimizer"]["params"]
    assert {key for key, value in params.items() if value == "auto"} == {
        "lr", "betas", "eps", "weight_decay",
    }  # fmt: skip
    assert problems_of(out, model="llama2_7b") == []
    reasons = out.with_suffix(".md").read_text()
    assert "0.0003, [0.9, 0.95], 1e-05, 0.1 are LLaMA 2's" in reasons
    assert "scheduler.params" not in reasons


@pytest.mark.parametrize(
    ("model", "devices"),
    [("llama2_7b", 16), pytest.param("llama2_32b", 64, marks=pytest.mark.nightly)],
)
def test_init_writes_what_check_accepts(tmp_path, model, devices):
    out = tmp_path / "ds_config.json"
    request = ("init", "--model", model, "--device", "a800", "--devices", devices)
    accepted(*request, "--context", 32768, "--out", out)
    config = json.loads(out.read_text())
    assert config["hydra"]["profile"] == f"a800_{model}"
    assert config["hydra"]["tokens_per_iteration"] == max(100_000 * devices // 64, 4 * 32768)
    assert problems_of(out, model=model, num_devices=devices) == []
    assert not compiles_adam(config)
    assert config["hydra"]["compile_layers"] is True
    assert config["optimizer"]["params"]["fused"]
    reasons = (tmp_path / "ds_config.md").read_text()
    for key in ("hydra.context_length", "hydra.profile", "optimizer.params", "hydra.over_length"):
        assert f"| `{key}` |" in reasons
    assert "--force" in refused(*request, "--context", 32768, "--out", out)


def test_init_without_a_shipped_profile_measures_at_the_start_and_recomputes_nothing():
    """Schemes checkpoint as many layers as they need."""
    request = ("init", "--model", "llama2_7b", "--hardware", "h100", "--devices", 8)
    started = accepted(*request, "--context", 131072)
    assert "activation_checkpointing" not in json.loads(started.stdout)["hydra"]
    assert "every start measures it" in started.stderr


def test_schemes_with_sp_are_estimated_where_the_profile_lacks_them_and_refused_by_heads():
    config = changed(hydra={"strategies": ["1x<sp2,2,1> + 2x<2,1>", "1x<sp2,4,1>"]})
    report = report_on(config, model="llama2_7b")
    assert report.problems == []
    assert any(
        "times of <sp2,2,1>, <sp2,4,1>" in text and "estimated from those" in text
        for text in report.assumed
    )
    tokens = longest(report)
    assert tokens["<sp2,4,1>"] == pytest.approx(2 / 1.05 * tokens["<4,1>"], rel=1e-3)
    for profile in ({}, {"profile": None}):  # one that is measured at the start fits heads no more
        config = changed(hydra={"strategies": ["1x<sp3,1>"], **profile})
        (problem,) = problems_of(config, model="llama2_7b")
        assert (
            "SP 3 x TP 1 = 3 does not divide the model's 32 attention heads; use SP 1, 2, 4, 8"
            in problem
        )


def test_gathered_schemes_are_estimated_where_the_interconnects_are_known():
    config = changed(hydra={"strategies": ["16x<1,1;gather>"], "context_length": 4096})
    report = report_on(config, num_devices=16, model="llama2_7b")
    assert report.problems == []
    assert any("times of <1,1;gather>, which the" in assumed for assumed in report.assumed)
    assert {row["scheme"] for row in report.schemes} >= {"<1,1;gather>"}


def test_schemes_that_checkpoint_are_refused_where_all_layers_do():
    hydra = {"strategies": ["4x<1,2;ckpt=8>"], "activation_checkpointing": True}
    (problem,) = problems_of(changed(hydra=hydra), model="llama2_7b")
    assert "hydra.activation_checkpointing" in problem


def test_schemes_with_parts_are_checked_and_derived():
    given = ["1x<1,2;ckpt=8> + 3x<1,2>"]
    config = changed(hydra={"strategies": given, "context_length": 6000})
    report = report_on(config, model="llama2_7b")
    assert report.problems == []
    tokens = longest(report)
    assert tokens["<1,2>"] < 6000 < tokens["<1,2;ckpt=8>"]
    config = changed(hydra={"strategies": ["16x<1,1;stream>"]})
    (problem,) = problems_of(config, model="llama2_7b", num_devices=16)
    assert "cannot read 'stream'; its options are ckpt, stages" in problem
    for texts, words in (
        (["4x<1,2;stages=14,17>"], "stages have 31 layers, the model has 32; make them sum to 32"),
        (
            ["8x<1,1;ckpt=4>"],
            "<1,1;ckpt=4>, and <1,1> from which it could be derived, is not in profile",
        ),
    ):
        (problem,) = problems_of(changed(hydra={"strategies": texts}), model="llama2_7b")
        assert words in problem


def test_tp_groups_wider_than_a_node_are_pointed_out(tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 16384, "intermediate_size": 53248,
        "vocab_size": 32000, "num_attention_heads": 128, "num_key_value_heads": 32,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    hydra = {"profile": None, "context_length": 131072, "planner": {"space": "plain"}}
    report = report_on(changed(hydra=hydra), model=str(tmp_path), num_devices=32, device="h100")
    (warning,) = [text for text in report.warnings if "TP groups" in text]
    assert "only <16,2>, <32,1> fit hydra.context_length = 131072" in warning
    assert "wider than a node of 8" in warning


def test_what_could_not_be_judged_is_said_and_init_names_the_command_that_judges(tmp_path):
    path = tmp_path / "ds_config.json"
    sizes = ("--model", "qwen3_8b", "--devices", 8)
    started = accepted("init", *sizes, "--hardware", "h100", "--context", 32768, "--out", path)
    (command,) = [line for line in started.stderr.splitlines() if line.startswith("check it: ")]
    unjudged = accepted("check", path, *sizes)
    assert "memory and time were not judged: give --hardware" in unjudged.stdout
    judged = accepted(*command.removeprefix("check it: ds-hydra ").split())
    assert "memory of one rank: " in judged.stdout
    assert judged.stdout.rstrip().endswith("no problem found")


@pytest.mark.slow
def test_the_longest_context_that_is_advised_is_accepted(tmp_path):
    request = ("init", "--model", "qwen3_8b", "--hardware", "h100", "--devices", 8, "--context")
    (advised,) = re.findall(r"lower the context to (\d+)", refused(*request, 1 << 24))
    # Layers that run again, and keep on the host what they need; logits of some tokens at a time
    assert int(advised) > 1 << 20
    accepted(*request, advised, "--out", tmp_path / "ds_config.json")
