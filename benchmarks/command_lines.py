"""Hostile command lines: each is carried out, or refused by an error of ds_hydra or the parser.

Command: python -m benchmarks.command_lines --count 1000 --seed 1

Valid command lines of every command but `profile`, with one to three words replaced, removed or
added: numbers out of bounds, text of strategies, files that are damaged, empty, nested too deeply
or not there. Ends with 1 where one ends in any other exception, or would take more than
`MOST_BYTES` of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # names that no file has are not looked up for long
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from run_folders import write_run_folder
from typer.testing import CliRunner

from ds_hydra.cli import app

VALID = (
    "plan --profile a800_llama2_7b --strategies good.json --lengths lengths.json",
    "propose --profile a800_llama2_7b --histogram hist.json --devices 4 --context 32 --batches 2",
    "simulate --profile a800_llama2_7b --histogram github --devices 8 --context 2048 --tokens 4096 "
    "--iterations 1 --systems two_stage",
    "check ds.json --model llama2_7b --devices 8",
    "init --model llama2_7b --device a800 --devices 8 --context 4096 --out out.json",
    "search --profile a800_llama2_7b --devices 4 --memory-gb 80 --max-batch 4",
    "report run",
    "fit --points points.json",
    "lengths --dataset . --tokenizer . --out out.json",  # reaches the tokenizer
)

ODD = (
    "", "0", "-1", "1", "2", "3", "8", "0.5", "4096", "1000000", "1" + "0" * 12, "1" + "0" * 30, "9" * 30, "nan", "inf",
    "-inf", "1e308", "x", "é", "\0", "1,2", "0,1", "64,128", "<1,1>", "2x<1,1>", "999999999x<1,1>", "1x<sp4,1;gather>",
    "1x<2,1;repull=3>", "[]", "{}", "true", "nothing.json", ".", "/dev/null", "a800_llama2_7b", "github", "llama2_7b",
)  # fmt: skip


POINTS = [
    {"setup": {"forward_ms": forward, "params_mi": 7e3, "dp": dp}, "iteration_ms": 4 * forward + dp}
    for dp in (1, 2, 8)
    for forward in (10.0, 70.0, 90.0)
]
"""Of `ds-hydra fit`."""

MOST_BYTES = 4 << 30


def write_files(folder: Path) -> tuple[str, ...]:
    """Good and bad files; returns their names."""
    strategies = {"schema": "ds_hydra.strategies/1", "num_devices": 4, "strategies": ["1x<2,1>"]}
    hydra = {"context_length": 4096, "tokens_per_iteration": 8192}
    contents = {
        "good.json": json.dumps(strategies),
        "lengths.json": "[300, 77, 31]",
        "hist.json": '{"schema": "ds_hydra.lengths/1", "name": "a", "counts": {"3": 4, "17": 1}}',
        "ds.json": json.dumps({"zero_optimization": {"stage": 3}, "hydra": hydra}),
        "object.json": "{}",
        "points.json": json.dumps({"points": POINTS}),
        "deep.json": "[" * 50_000 + "]" * 50_000,
        "empty.json": "",
        "null.json": "null",
        "large.json": f"[{2**63}]",
        "bytes.json": "\udcff\udcfe",
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    write_run_folder(folder / "run", num_iterations=2)
    return *contents, "run"


def draw(generator: random.Random, words: list[str], odd: tuple[str, ...]) -> list[str]:
    """`words` with one to three of them changed; the command itself stays."""
    for _ in range(generator.randint(1, 3)):
        place = generator.randrange(1, len(words) + 1)
        kind = generator.random()
        if kind < 0.7 and place < len(words):
            is_option = words[place].startswith("--") and place + 1 < len(words)
            words[place + is_option] = generator.choice(odd)
        elif kind < 0.8 and place < len(words):
            del words[place]
        elif kind < 0.9:
            words.insert(place, generator.choice(odd))
        else:
            words.append(generator.choice(("--json", "--help", "--bogus")))
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    codes: Counter[int] = Counter()
    foreign, slowest = 0, (0.0, "")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        odd = (*ODD, *write_files(Path(folder)))
        for command in VALID:  # modules are imported once
            code = CliRunner().invoke(app, command.split()).exit_code
            if code and not command.startswith("lengths"):
                sys.exit(f"ds-hydra {command}: exit code {code}, expected 0")
        for _ in range(arguments.count):
            words = draw(generator, generator.choice(VALID).split(), odd)
            start = time.process_time()
            result = CliRunner().invoke(app, words)
            slowest = max(slowest, (time.process_time() - start, " ".join(words)))
            codes[result.exit_code] += 1
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                foreign += 1
                print(f"ds-hydra {' '.join(words)!r}", file=sys.stderr)
                traceback.print_exception(*result.exc_info, limit=-8)
        os.chdir("/")
    print(f"{arguments.count} command lines: exit codes {dict(codes)}, {foreign} foreign errors")
    print(f"slowest: {slowest[0]:.1f} s of CPU time, ds-hydra {slowest[1][:160]}")
    sys.exit(foreign > 0)


if __name__ == "__main__":
    main()
