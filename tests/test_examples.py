"""Every example runs: its own main() on 2 ranks, with little data; and the diff from plain
DeepSpeed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
import transformers
from distributed import run_distributed

from ds_hydra.configs.files import list_files
from ds_hydra.configs.hydra_config import ProfilingConfig

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SOURCES = {
    f"module_{index}.py": "".join(
        f'def function_{index}_{n}(x, y):\n    """Return {n} times x and y."""\n    total = x + y\n'
        + "".join(f"    total += {n} * (x - {step})\n" for step in range(n % 23))
        + "    return total\n\n\n"
        for n in range(30)
    )
    for index in range(4)
}


def load(name):
    path = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(name.replace("/", "_").removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def small_data(folder):
    """The standard library's place is taken by a few files, so that preparing takes no time."""
    for path, text in SOURCES.items():
        target = folder / "lib" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    original = sysconfig.get_path

    def get_path(name, *args, **kwargs):
        return str(folder / "lib") if name == "stdlib" else original(name, *args, **kwargs)

    sysconfig.get_path = get_path
    for module in [name for name in sys.modules if name in ("prepare", "stdlib.prepare", "common")]:
        del sys.modules[module]


def small_config(name, folder):
    """The example's own configuration, with short sequences and a short measurement."""
    config = json.loads((EXAMPLES / name / "ds_config.json").read_text())
    config["hydra"] |= {"tokens_per_iteration": 1024, "context_length": 512}
    config["hydra"]["profiling"] = {"lengths": [8, 32, 64], "repeats": 1}
    if "strategies" in config["hydra"]:  # of 4 ranks
        config["hydra"]["strategies"] = ["2x<1,1>", "1x<sp2,1;ep=2>"]
    elif name != "llama2_github":  # one proposes, and measures what it proposes
        config["hydra"]["strategies"] = ["2x<1,1>"]
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", *list_files("models")])
def test_examples_train_every_model_that_has_a_name(monkeypatch, name):
    """A cluster's own is not small enough to be started here."""
    monkeypatch.syspath_prepend(EXAMPLES)
    config = load("common.py").model_config(name.replace("_", "-"), 777, 4096)
    assert config.vocab_size == 777
    assert config.max_position_embeddings == 4096
    config.num_hidden_layers = 1
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(config)


PRETRAINING = {"llama2_github", "llama2_commoncrawl", "moe", "custom_loop"}
ALIKE = ("llama2_commoncrawl", "grpo", "distillation", "trl_dpo")
"""Examples that differ from another by their data or their loss."""


def run_examples(folder, left_out):
    # Only the data: they are the same on all ranks
    folder = Path(folder) / f"rank{os.environ['RANK']}"
    folder.mkdir()
    small_data(folder)
    shared = Path(folder).parent
    cache = ["--cache_dir", str(folder / "cache")]
    results = {}
    for name in sorted(PRETRAINING.difference(left_out)):
        printed = io.StringIO()
        example = load(f"{name}/train.py")
        sys.modules["common"].TINY_MOE["num_hidden_layers"] = 2  # of 8, all alike
        with contextlib.redirect_stdout(printed):
            losses = example.main(
                [
                    *cache,
                    "--ds_config",
                    small_config(name, folder),
                    "--iterations",
                    "4",
                    "--run_dir",
                    f"{shared}/{name}",
                ]
            )
        results[name] = losses, printed.getvalue()
    for loss in [x for x in ("grpo", "dpo", "distillation") if x not in left_out]:
        with contextlib.redirect_stdout(io.StringIO()):
            results[loss] = load("post_training/train.py").main(
                ["--loss", loss, "--iterations", "4"]
            )
    of_trl = {"trl_sft": ["--lora"], "trl_dpo": []}
    ProfilingConfig.repeats = property(lambda _: 1)  # these give no JSON
    for name, more in [item for item in of_trl.items() if item[0] not in left_out]:
        with contextlib.redirect_stdout(io.StringIO()):
            results[name] = load(f"post_training/{name}.py").main(
                [*more, "--max_steps", "2", "--output_dir", f"{shared}/{name}"]
            )
    config = ["--deepspeed", small_config("hf_trainer", folder)]
    few = [*cache, *config, "--max_steps", "3", "--logging_steps", "1", "--disable_tqdm", "true"]
    pretrain = [
        *few,
        "--output_dir",
        f"{shared}/pretrain",
        "--num_eval_texts",
        "4",
        "--save_steps",
        "2",
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        results["pretrain"] = load("hf_trainer/pretrain.py").main(pretrain)
    return results


@pytest.mark.distributed
@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(ALIKE, marks=pytest.mark.slow, id="one of each kind"),
        pytest.param((), marks=pytest.mark.nightly, id="all"),
    ],
)
def test_every_example_runs(tmp_path, left_out):
    pytest.importorskip("peft", reason="the extra ds_hydra[peft] is not installed")
    results = run_distributed(run_examples, 2, str(tmp_path), left_out)
    first = results[0]
    assert len(first) == 10 - len(left_out)
    for name in PRETRAINING & first.keys():
        losses, _ = first[name]
        assert losses == results[1][name][0]
        assert len(losses) == 4
        assert losses[-1] < losses[0]
        assert (tmp_path / name).is_dir()
    assert "held-out loss" in first["custom_loop"][1]
    for name in {"grpo", "dpo", "distillation", "trl_sft", "trl_dpo"} & first.keys():
        assert first[name] == results[1][name]
    assert first["dpo"][-1] < 0.6931 < first["dpo"][0] + 1e-3
    assert 3 < first["trl_sft"] < 5.6  # ln 258 at the start
    if not left_out:
        said = first["llama2_commoncrawl"][1]
        assert "lengths are those of web pages, contents and loss are not" in said
        assert first["distillation"][-1] < first["distillation"][0]
        assert 0 < first["trl_dpo"] < 0.75
    assert first["pretrain"]["eval_perplexity"] > 1
    assert (tmp_path / "pretrain/model.safetensors").exists()
    assert (tmp_path / "pretrain/checkpoint-2/latest").exists()


def run_folder_of_a_rank():
    """The folder that each rank uses whose clock is a minute after the one of the rank before."""
    sys.path.insert(0, str(EXAMPLES))
    common = load("common.py")
    strftime = common.time.strftime
    common.time.strftime = lambda form: strftime(form, time.gmtime(60 * int(os.environ["RANK"])))
    args = common.argument_parser("one line", Path("config"), iterations=1).parse_args([])
    common.start(args, quiet=False)
    return str(args.run_dir)


@pytest.mark.distributed
def test_ranks_with_different_clocks_use_one_run_folder():
    assert run_distributed(run_folder_of_a_rank, 2) == ["runs/19700101-000000"] * 2


def changed_lines(diff):
    """Lines that a reader has to touch: a removed line and the one that replaces it count once."""
    count = removed = 0
    for line in [*diff.splitlines()[2:], " "]:
        if line.startswith("-"):
            removed += 1
            count += 1
        elif line.startswith("+"):
            count += removed == 0
            removed = max(0, removed - 1)
        else:
            removed = 0
    return count


def run_both(plain, patched):
    """Lines that the plain script and its patched copy print."""
    printed = []
    for script in (plain, patched):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            runpy.run_path(script)
        printed.append([line for line in output.getvalue().splitlines() if line.startswith("step")])
    return printed


@pytest.mark.slow
@pytest.mark.distributed
def test_five_lines_turn_a_plain_deepspeed_script_into_one_of_ds_hydra(tmp_path):
    folder = EXAMPLES / "custom_loop"
    diff = (folder / "plain_to_hydra.diff").read_text()
    assert changed_lines(diff) <= 5
    patched = tmp_path / "plain_deepspeed.py"
    patched.write_text((folder / "plain_deepspeed.py").read_text())
    subprocess.run(
        ["git", "apply", "-p0"],
        input=diff,
        text=True,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    plain, hydra = run_distributed(run_both, 2, str(folder / "plain_deepspeed.py"), str(patched))[0]
    assert len(plain) == len(hydra) == 8
    for lines in (plain, hydra):
        losses = [float(line.split()[-1]) for line in lines]
        assert losses[0] == pytest.approx(5.55, abs=0.1)  # log(256): untrained
        assert losses[-1] < losses[0] - 0.1


def test_changed_lines_are_counted():
    assert changed_lines("---\n+++\n@@\n-a\n+b\n c\n+d\n e\n-f\n-g\n-h\n+i\n") == 5
