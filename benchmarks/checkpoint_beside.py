"""How long training stands still for a checkpoint that it waits for, and for one beside it; kills.

    python -m benchmarks.checkpoint_beside [--gb 1] [--saves 3] [--kills 40]

Ranks are CPU processes on one machine (gloo). Checkpoints of both kinds alternate in one run, so
that what else the machine does meets both; each is given as the longest time of any rank.
Iterations beside a write are those from `save_checkpoint` to the first that finds it complete.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from faults import append_json, read_json_lines, run_until_end
from models import tiny
from test_checkpoint import start
from test_checkpoint_beside import BESIDE
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hydra.configs.hydra_config import CheckpointConfig
from ds_hydra.engine.checkpointing.beside import SavingBeside
from ds_hydra.engine.ranks.agreement import max_over_ranks

HIDDEN, NUM_TOKENS = 1024, 32


def model_of(num_params: float) -> LlamaForCausalLM:
    """A LLaMA of about so many parameters."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=8,
        num_hidden_layers=max(1, round(num_params / (10 * HIDDEN**2))), tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def measure(folder: str, gb: float, num_saves: int) -> dict[str, Any]:
    """Seconds of both kinds of checkpoints and of iterations; equal on all ranks."""
    ranks = dist.get_world_size()
    model = model_of(gb * 1e9 * ranks / 12)
    engine = start_hydra(model, hydra={"checkpoint": {"asynchronous": True}})
    batch = [{"input_ids": torch.arange(NUM_TOKENS) + rank} for rank in range(ranks)]
    config, device = engine._hydra_config, engine.device
    found: dict[str, Any] = {"waiting": [], "beside": [], "iteration": [], "iteration beside": []}

    def seconds_of(action: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        action()
        return max_over_ranks(time.perf_counter() - start, device)

    def train(kind: str) -> None:
        found[kind].append(seconds_of(lambda: engine.train_batch(batch, strategy=f"{ranks}x<1,1>")))

    for _ in range(3):
        train("iteration")
    found["iteration"].clear()
    states = engine.optimizer.optimizer.state.values()
    tensors = [v for state in states for v in state.values()]
    tensors += engine.optimizer.fp32_partitioned_groups_flat
    found["bytes"] = sum(tensor.nbytes for tensor in tensors)
    for number in range(num_saves):
        for kind in ("waiting", "beside"):
            checkpoint = CheckpointConfig(asynchronous=kind == "beside")
            engine._hydra_config = config.model_copy(update={"checkpoint": checkpoint})
            for _ in range(3):
                train("iteration")
            save = seconds_of(
                lambda k=kind, n=number: engine.save_checkpoint(f"{folder}/{k}", f"{n}")
            )
            found[kind].append(save)
            while engine._beside is not None:
                train("iteration beside")
            engine.wait_for_checkpoint()
            if dist.get_rank() == 0:  # so that an interrupted run has measured something
                print(json.dumps(found), flush=True)
            shutil.rmtree(f"{folder}/{kind}", ignore_errors=True) if dist.get_rank() == 0 else None
    engine.destroy()
    return found


def save_until_killed(folder: str, save_dir: str, victim: int | None, share: float) -> None:
    """Train and save without end; rank `victim`, or each where that is None, is killed after that
    share of the time that an iteration, a copy and its writing take.
    """
    engine = start(folder, tiny("llama_tied"), hydra=BESIDE)
    if Path(save_dir, "latest").exists():
        engine.load_checkpoint(save_dir)
    if dist.get_rank() == 0:
        append_json(f"{folder}/resumed", engine.global_steps)
    plain = SavingBeside._write

    def write(saving: SavingBeside) -> None:
        plain(saving)
        if saving._commit is not None:
            append_json(f"{folder}/complete", int(saving._saving.target.name[4:]))

    SavingBeside._write = write
    engine.train_batch()
    start_s = time.monotonic()
    for step in itertools.count():
        engine.save_checkpoint(save_dir, tag=f"step{engine.global_steps}")
        if step == 0:
            engine.train_batch()
            engine.wait_for_checkpoint()
        elif step == 1 and victim in (None, dist.get_rank()):
            seconds = share * (time.monotonic() - start_s)
            threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        engine.train_batch()


def kill_at_random(folder: Path, num_kills: int, seed: int = 5) -> tuple[int, int]:
    """Kill two ranks that train and save, together or one, again and again. Number of kills after
    which the newest complete checkpoint was loaded, and of checkpoints.
    """
    generator = random.Random(seed)
    save_dir, complete, num_good, latest = folder / "saved", folder / "complete", 0, 0
    complete.touch()
    for attempt in range(num_kills + 1):
        victim = (None, 0, 1)[attempt % 3]
        share = generator.uniform(0, 2)
        newest = max([0, *read_json_lines(complete)])
        ended = run_until_end(
            save_until_killed, 2, folder, str(folder), str(save_dir), victim, share
        )
        assert ended[victim or 0].exit_code == -signal.SIGKILL, ended
        resumed = read_json_lines(folder / "resumed")
        assert len(resumed) == attempt + 1
        # Later than the last line where the process was killed before that was written
        num_good += attempt > 0 and resumed[-1] == latest >= newest
        latest = int((save_dir / "latest").read_text()[4:]) if (save_dir / "latest").exists() else 0
    return num_good, len(read_json_lines(complete))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gb", type=float, default=1.0, help="states of each rank")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=40)
    args = parser.parse_args()
    if args.saves:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (args.ranks, folder, args.gb, args.saves)
            found = run_distributed(measure, *arguments, timeout_s=3600)[0]
        print(json.dumps(found))
        waiting, beside = (statistics.median(found[kind]) for kind in ("waiting", "beside"))
        plain, slow = (statistics.median(found[k]) for k in ("iteration", "iteration beside"))
        print(
            f"{found['bytes'] / 1e9:.2f} GB a rank: stands still {waiting:.2f} s where it waits, {beside:.2f} s beside "
            f"({beside / waiting:.0%}); iteration {plain:.2f} s, beside a write {slow:.2f} s ({slow / plain:.2f} x)"
        )
    if args.kills:
        with tempfile.TemporaryDirectory() as folder:
            num_good, num_complete = kill_at_random(Path(folder), args.kills)
        print(
            f"{num_good} of {args.kills} kills left the newest of {num_complete} complete checkpoints, which loaded"
        )


if __name__ == "__main__":
    main()
