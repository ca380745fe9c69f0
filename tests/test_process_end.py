"""Processes that end right after a collective.

As a script (python tests/test_process_end.py NUM_RUNS) it runs two ranks at a time that end so, and
prints their exit codes. Without the call of `let_collectives_end_at_exit` about every fourth one is
-6 (torch 2.13).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from distributed import free_port, rank_environment

from ds_hydra.engine.ranks import process  # before the fork, so that it is loaded once

NUM_RANKS = 2


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_process_whose_last_collective_has_just_ended_does_not_abort():
    command = [sys.executable, __file__, "3"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [0] * 6, found.stderr


def end_after_a_collective() -> None:
    process.let_collectives_end_at_exit()
    dist.init_process_group("gloo")
    sys.setswitchinterval(100)  # other threads get Python's lock only where this one gives it away
    gathered = [torch.zeros(1) for _ in range(NUM_RANKS)]
    for _ in range(200):
        dist.all_gather(gathered, torch.ones(1))


def main(num_runs: int) -> None:
    codes = []
    for _ in range(num_runs):
        port, children = free_port(), []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                os.environ.update(rank_environment(rank, NUM_RANKS, port))
                return end_after_a_collective()
            children.append(child)
        codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(codes)


if __name__ == "__main__":
    main(int(sys.argv[1]))
