"""Every script of examples/, started as its README says, on 2 ranks and without a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from distributed import free_port
from reliability_page import Records

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CACHE = "--cache_dir CACHE"
RUNS = (
    f"deepspeed stdlib/train.py --iterations 12 --run_dir RUNS/stdlib {CACHE}",
    f"deepspeed llama2_github/train.py --iterations 6 --run_dir RUNS/github {CACHE}",
    f"deepspeed llama2_commoncrawl/train.py --iterations 6 --run_dir RUNS/commoncrawl {CACHE}",
    f"deepspeed custom_loop/train.py --iterations 8 {CACHE}",
    "deepspeed custom_loop/plain_deepspeed.py",
    f"deepspeed moe/train.py --iterations 6 --run_dir RUNS/balanced {CACHE}",
    f"deepspeed moe/train.py --iterations 6 --run_dir RUNS/free --aux_loss off {CACHE}",
    "python moe/draw_experts.py RUNS/balanced RUNS/free --out RUNS/experts.png",
    f"deepspeed hf_trainer/pretrain.py --max_steps 6 --output_dir RUNS/pretrain {CACHE}",
    "deepspeed post_training/train.py --loss grpo --iterations 6",
    "deepspeed post_training/train.py --loss dpo --iterations 6",
    "deepspeed post_training/train.py --loss distillation --iterations 6",
    "torchrun post_training/trl_sft.py --lora --max_steps 6 --output_dir RUNS/trl_sft",
    "torchrun post_training/trl_dpo.py --loss_type ipo --max_steps 6 --output_dir RUNS/trl_dpo",
)
"""In an order in which each finds what it needs of those before."""
HANG_S = 1800


def measure_examples(records: Records, num_rounds: int) -> None:
    """Rounds of all scripts, each round in folders of its own; texts and tokenizers are shared."""
    for round_ in range(num_rounds):
        for run in RUNS:
            keys = {"round": round_, "run": run}
            records.measure(
                "examples", keys, lambda run=run, round_=round_: run_example(records, run, round_)
            )


def run_example(records: Records, run: str, round_: int) -> dict[str, Any]:
    """Exit code of a script, and what its log would look like in a file."""
    folder = records.folder / "examples"
    runs = folder / f"round{round_}"
    runs.mkdir(parents=True, exist_ok=True)
    launcher, script, *words = run.split()
    words = [w.replace("RUNS", str(runs)).replace("CACHE", str(folder / "cache")) for w in words]
    command = [*launched_by(launcher), str(EXAMPLES / script), *words]
    begin = time.monotonic()
    done = subprocess.run(
        command,
        cwd=runs,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_S,
    )
    text = done.stdout.decode(errors="replace")  # returns to the start of a line stay what they are
    name = re.sub(r"\W+", "_", run)[:100]
    (runs / f"{name}.log").write_text(text)
    return {
        "exit_code": done.returncode,
        "seconds": time.monotonic() - begin,
        **examine_log(text),
        "text": "" if done.returncode == 0 else text[-2000:],
    }


def launched_by(launcher: str) -> list[str]:
    """How 2 ranks are started, on a port of their own."""
    if launcher == "deepspeed":
        return ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port())]
    if launcher == "torchrun":
        return ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return [launcher]


OF_DEEPSPEEDS_LAUNCHER = re.compile(r"\[INFO\] \[(runner|launch)\.py:")
"""It logs the command of a rank, as long as it is; `--log_level error` leaves it out."""
PROGRESS = re.compile(r"\d+%\|.*?\| *(\d+/\d+) ")


def examine_log(text: str) -> dict[str, Any]:
    """Its longest line, without those of DeepSpeed's launcher, and bars that are drawn again: by a
    return to the start of the line, or a line that has got no further than the one before.
    """
    own = [line for line in text.split("\n") if not OF_DEEPSPEEDS_LAUNCHER.search(line)]
    longest = max(own, key=len)
    shown = [(line[:20], found[1]) for line in own if (found := PROGRESS.search(line))]
    return {
        "lines": len(own),
        "longest": len(longest),
        "longest_line": longest[:300] if len(longest) > 200 else "",
        "redrawn": text.count("\r") + len(shown) - len(set(shown)),
    }
