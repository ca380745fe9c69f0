"""What a user starts on every host: resumes, trains, saves every second iteration; one rank may
die, once.

python tests/nodes_script.py FOLDER NUM_ITERATIONS [RANK ITERATION]
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
from faults import append_json
from models import VOCAB_SIZE, tiny
from single_process import random_examples

STRATEGIES = ("1x<1,2>", "1x<2,1>", "2x<1,1>")


def train(folder: str, num_iterations: int, victim: int = -1, at: int = -1) -> None:
    """Append (iteration, loss, when this was called) to FOLDER/losses on rank 0."""
    called = time.time_ns()
    engine = start_hydra(tiny("llama_tied", num_hidden_layers=2))
    engine.load_checkpoint(f"{folder}/checkpoints")
    for iteration in range(engine.global_steps, num_iterations):
        died = Path(folder, "died")
        if (dist.get_rank(), iteration) == (victim, at) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        batch = random_examples([9, 5, 14, 7], VOCAB_SIZE, seed=iteration)
        loss = float(engine.train_batch(batch, strategy=STRATEGIES[iteration % len(STRATEGIES)]))
        if dist.get_rank() == 0:
            append_json(f"{folder}/losses", [iteration, loss, called])
        if iteration % 2:
            engine.save_checkpoint(f"{folder}/checkpoints")


if __name__ == "__main__":
    deepspeed.init_distributed()
    train(sys.argv[1], *map(int, sys.argv[2:]))
