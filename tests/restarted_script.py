"""A user's script under a launcher that restarts it: resumes, trains ten iterations, saves after
every second.

    torchrun --max-restarts 2 --nproc-per-node 2 tests/restarted_script.py FOLDER
    [RANK:ITERATION:PHASE ...]

Each RANK:ITERATION:PHASE is a SIGKILL, once, however often the script is started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch.distributed as dist
from engines import start_hydra
from faults import append_json, kill_in
from models import VOCAB_SIZE, tiny
from single_process import random_examples

NUM_ITERATIONS = 10
STRATEGIES = ("1x<1,2>", "2x<1,1>", "1x<2,1>")


def main(folder: Path, deaths: list[str]) -> None:
    """Losses go to `folder/losses`, the step and the time that each start resumed at to
    `folder/starts`.
    """
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")
    engine = start_hydra(tiny("llama_tied"), hydra={"faults": {"grace_s": 2}})
    engine.load_checkpoint(str(folder / "checkpoints"))
    if engine.global_rank == 0:
        append_json(folder / "starts", [engine.global_steps, time.monotonic()])
    for iteration in range(engine.global_steps, NUM_ITERATIONS):
        for death in deaths:
            rank, at, phase = death.split(":")
            once = folder / death
            if (int(rank), int(at)) == (engine.global_rank, iteration) and not once.exists():
                once.touch()
                kill_in(engine, phase, folder)
        examples = random_examples([9, 5, 14, 7], VOCAB_SIZE, seed=iteration)
        loss = float(engine.train_batch(examples, strategy=STRATEGIES[iteration % 3]))
        if engine.global_rank == 0:
            append_json(folder / "losses", [iteration, loss])
        if iteration % 2:
            engine.save_checkpoint(str(folder / "checkpoints"))
    engine.destroy()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A launcher may end the others so soon after the first that they could not say which rank was
    # lost.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "0":
        append_json(Path(sys.argv[1]) / "tries", time.monotonic())
    main(Path(sys.argv[1]), sys.argv[2:])
    dist.destroy_process_group()
