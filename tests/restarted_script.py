"""A user's script under a launcher that restarts it: resumes, trains ten iterations, saves after
every second.

    torchrun --max-restarts 2 --nproc-per-node 2 tests/restarted_script.py FOLDER
    [RANK:ITERATION:PHASE[:PASSES] ...]

Each RANK:ITERATION:PHASE is a SIGKILL when the rank has passed the phase so many times, once,
however often the script is started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch.distributed as dist
from engines import start_hydra
from faults import append_json, kill_in
from models import VOCAB_SIZE, tiny
from single_process import Examples, random_examples

NUM_ITERATIONS = 10
STRATEGIES = ("1x<1,2>", "2x<1,1>", "1x<2,1>")


def main(
    folder: Path, deaths: Sequence[str], strategies: Sequence[str] = STRATEGIES, **sizes: int
) -> None:
    """Losses go to `folder/losses`; the step that each start resumed at, when that was and how long
    it took to `folder/starts`.
    """
    begin = time.monotonic()
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")
    engine = start_hydra(tiny("llama_tied", **sizes), hydra={"faults": {"grace_s": 2}})
    engine.load_checkpoint(str(folder / "checkpoints"))
    if engine.global_rank == 0:
        now = time.monotonic()
        append_json(folder / "starts", [engine.global_steps, now, now - begin])
    for iteration in range(engine.global_steps, NUM_ITERATIONS):
        for death in deaths:
            rank, at, phase, *passes = death.split(":")
            once = folder / death
            if (int(rank), int(at)) == (engine.global_rank, iteration) and not once.exists():
                once.touch()
                kill_in(engine, phase, folder, passes=sum(map(int, passes)))
        loss = float(engine.train_batch(data_of(iteration), strategy=strategies[iteration % 3]))
        if engine.global_rank == 0:
            append_json(folder / "losses", [iteration, loss])
        if iteration % 2:
            engine.save_checkpoint(str(folder / "checkpoints"))
    engine.destroy()


def data_of(iteration: int) -> Examples:
    return random_examples([9, 5, 14, 7], VOCAB_SIZE, seed=iteration)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A launcher may end the others so soon after the first that they could not say which rank was
    # lost.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "0":
        append_json(Path(sys.argv[1]) / "tries", time.monotonic())
    main(Path(sys.argv[1]), sys.argv[2:])
    dist.destroy_process_group()
