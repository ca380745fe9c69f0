"""The documents that each command reads, damaged: each is carried out, or refused by an error of
ds_hydra or the parser, in time; what is printed or written as JSON is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import SLOWEST_S, damaged_copy, mutate
from run_folders import write_run_folder
from typer.testing import CliRunner

from ds_hydra.cli import app
from ds_hydra.configs.files import find_file
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.checks.config_check import CheckRequest, check_config

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip

HISTOGRAM = {"schema": "ds_hydra.lengths/1", "name": "a", "counts": {"3": 4, "17": 1, "64": 2}}
STRATEGIES = {
    "schema": "ds_hydra.strategies/1", "num_devices": 4, "strategies": ["1x<4,1>", "2x<2,1>"],
}  # fmt: skip
DS_CONFIG = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "hydra": {"context_length": 64, "tokens_per_iteration": 256, "strategies": "strategies.json"},
}
POINTS = [
    {"setup": {"forward_ms": forward, "params_mi": 7e3, "dp": dp}, "iteration_ms": 4 * forward + dp}
    for dp in (1, 2, 8)
    for forward in (10.0, 70.0, 90.0)
]
_TRY = "--devices 4 --context 64 --tokens 256"
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plan": (
        ("profile.json", "strategies.json", "lengths.json", "hardware.json", "model.json"),
        (
            "--profile profile.json --strategies strategies.json --lengths lengths.json --json",
            "--model model.json --hardware hardware.json --strategies strategies.json --lengths lengths.json --json",
        ),
    ),
    "propose": (
        ("profile.json", "hist.json", "hardware.json", "model.json"),
        (
            f"--profile profile.json --histogram hist.json {_TRY} --batches 2 --out out.json --json",
            f"--model model.json --hardware hardware.json --histogram hist.json {_TRY} --batches 2 --json",
        ),
    ),
    "simulate": (
        ("profile.json", "hist.json", "strategies.json", "hardware.json", "model.json"),
        (
            f"--profile profile.json --histogram hist.json {_TRY} --iterations 1 --systems two_stage "
            "--strategies strategies.json --hardware hardware.json --out out.json --json",
            f"--model model.json --hardware hardware.json --histogram hist.json {_TRY} --iterations 1 "
            "--systems megatron --json",
        ),
    ),
    "check": (
        ("ds.json", "strategies.json", "profile.json", "hardware.json", "hist.json", "model/config.json"),
        (
            "ds.json --model model --devices 4 --device hardware.json --json",
            "ds.json --devices 4 --profile profile.json --histogram hist.json --json",
        ),
    ),
    "init": (
        ("hardware.json", "model/config.json"),
        ("--model model --device hardware.json --devices 4 --context 64 --out out.json --force",),
    ),
    "search": (
        ("profile.json", "hardware.json"),
        (
            "--profile profile.json --hardware hardware.json --devices 4 --memory-gb 80 --max-batch 4 "
            "--out out.json --json",
        ),
    ),
    "report": (("run",), ("run --perfetto --json",)),
    "fit": (("points.json",), ("--points points.json --out out.json --json",)),
    "lengths": (
        ("data.jsonl", "tokenizer.json"),
        ("--dataset data.jsonl --tokenizer tokenizer.json --out out.json --json",),
    ),
    "profile": (
        ("model/config.json",),
        ("--model model --context 16 --lengths 4,8,16 --repeats 1 --tp 1 --pp 1 --out out.json --json",),
    ),
}  # fmt: skip
"""Command -> its documents, and lines that read them. `doctor` reads hardware, as `init` does."""


def _shipped(kind: Any, name: str) -> Any:
    return json.loads(find_file(kind, name).read_text())


def _contents() -> dict[str, Any]:
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    }  # fmt: skip
    return {
        "profile.json": _shipped("profiles", "a800_llama2_7b"),
        "hardware.json": _shipped("hardware", "a800"),
        "hist.json": HISTOGRAM,
        "strategies.json": STRATEGIES,
        "lengths.json": [300, 77, 31],
        "model.json": MODEL,
        "model/config.json": MODEL,
        "ds.json": DS_CONFIG,
        "points.json": {"points": POINTS},
        "tokenizer.json": tokenizer,
    }


def write_documents_of(command: str, folder: Path) -> Path:
    """A folder with the documents that `command` reads, all of them valid."""
    contents = _contents()
    folder.mkdir(parents=True)
    for name in COMMANDS[command][0]:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name == "run":
            write_run_folder(path, num_iterations=2)
        elif name == "data.jsonl":
            path.write_text("".join(json.dumps({"text": "a b " * n}) + "\n" for n in (1, 2, 9)))
        else:
            path.write_text(json.dumps(contents[name]))
    return folder


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _cpu_s() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def run_command(words: list[str], folder: Path) -> tuple[int, float]:
    """Exit code and seconds of CPU time of `ds-hydra words` in `folder`; raises AssertionError for
    an error that is not one of ds_hydra or the parser, and for a result that is not JSON.
    """
    with _inside(folder):
        start = _cpu_s()
        result = CliRunner().invoke(app, words)
        seconds = _cpu_s() - start
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            lines = "".join(traceback.format_exception(*result.exc_info, limit=-8))
            raise AssertionError(f"ds-hydra {' '.join(words)}:\n{lines}")
        texts = [result.stdout] if "--json" in words and result.exit_code == 0 else []
        if Path("out.json").is_file() and result.exit_code == 0 and "--out" in words:
            texts.append(Path("out.json").read_text())
        for text in texts:
            try:
                json.loads(text, parse_constant=_refuse_constant)
            except ValueError as error:
                raise AssertionError(f"ds-hydra {' '.join(words)}: {error}") from error
    return result.exit_code, seconds


def fuzz_command(command: str, folder: Path, num_inputs: int, seed: int = 1) -> dict[str, Any]:
    """`num_inputs` damaged documents of `command`; what came of them, and each failure with the
    damage that shows it.
    """
    intact = write_documents_of(command, folder / f"intact {command} {seed}")
    lines = COMMANDS[command][1]
    failures: list[str] = []
    codes: Counter[int] = Counter()
    slowest = 0.0
    for line in lines:  # modules are imported once
        code, _ = run_command([command, *line.split()], intact)
        assert code == 0, f"ds-hydra {command} {line}: exit code {code}"
    for number in range(num_inputs):
        generator = random.Random(f"{command}-{seed}-{number}")
        damage = damaged_copy(intact, folder / "damaged", generator)
        words = [command, *generator.choice(lines).split()]
        try:
            code, seconds = run_command(words, folder / "damaged")
            assert seconds < SLOWEST_S, f"{seconds:.1f} s for ds-hydra {' '.join(words)}"
            slowest = max(slowest, seconds)
            codes[code] += 1
        except AssertionError as error:
            failures.append(f"{command}-{seed}-{number}, {damage}: {error}")
    shutil.rmtree(folder / "damaged", ignore_errors=True)
    return {
        "inputs": num_inputs,
        "carried_out": codes[0],
        "refused": num_inputs - codes[0] - len(failures),
        "slowest_ms": 1e3 * slowest,
        "failures": failures,
    }


def _cyclic() -> dict[str, Any]:
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    return cycle


def _deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("it cannot be shown")


ODD_OBJECTS: tuple[Any, ...] = (
    object(), _Unprintable(), {1, 2}, b"bytes", {1: 2}, {None: 1}, {("a",): 1}, _cyclic(), _deep(3000), np.zeros(3),
    np.float32("nan"), np.int64(7), np.float32(0.5), Path("a"), len, int, complex(1, 2), range(3), 10**400, 1e999,
    "\ud800", "a\0b", Ellipsis, 2**63, 2**31, 10**9, 1e30,
)  # fmt: skip
"""What Python dictionaries may hold and JSON does not, and numbers beyond what any key may be."""


def full_configuration() -> dict[str, Any]:
    """A DeepSpeed configuration with every key of the "hydra" section."""
    section = {**DS_CONFIG["hydra"], "strategies": ["4x<1,1>", "1x<2,1> + 2x<1,1>"]}
    return {**DS_CONFIG, "hydra": HydraConfig.parse(section).model_dump(mode="json")}


def hostile_configuration(generator: random.Random) -> dict[str, Any]:
    """`full_configuration` with one to three places changed, half of the time to an object."""
    document: dict[str, Any] = mutate(full_configuration(), generator)
    if generator.random() < 0.5 and isinstance(document, dict):
        place = document
        while generator.random() < 0.6:
            inner = [value for value in place.values() if isinstance(value, dict) and value]
            if not inner:
                break
            place = generator.choice(inner)
        if place:
            place[generator.choice(list(place))] = generator.choice(ODD_OBJECTS)
    return document if isinstance(document, dict) else {"hydra": document}


def fuzz_configurations(folder: Path, num_inputs: int, seed: int = 1) -> dict[str, Any]:
    """`num_inputs` hostile configurations, examined as `ds-hydra check` does; what came of them."""
    with _inside(write_documents_of("check", folder / f"configurations {seed}")):

        def examine(document: dict[str, Any]) -> tuple[bool, float]:
            start = _cpu_s()
            request = CheckRequest(config=document, model="model", num_devices=4, device="a800")
            report = check_config(request)
            json.dumps(report.to_json(), allow_nan=False)
            return not report.problems, _cpu_s() - start

        assert examine(full_configuration())[0]
        failures: list[str] = []
        carried_out, slowest = 0, 0.0
        for number in range(num_inputs):
            document = hostile_configuration(random.Random(f"{seed}-{number}"))
            try:
                is_well, seconds = examine(document)
                assert seconds < SLOWEST_S, f"{seconds:.1f} s"
                carried_out += is_well
                slowest = max(slowest, seconds)
            except Exception as error:
                lines = "".join(traceback.format_exception(error, limit=-8))
                failures.append(f"configuration {seed}-{number}:\n{lines}")
    return {
        "inputs": num_inputs,
        "carried_out": carried_out,
        "refused": num_inputs - carried_out - len(failures),
        "slowest_ms": 1e3 * slowest,
        "failures": failures,
    }
