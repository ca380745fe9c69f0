"""What a rank holds between two iterations, and iterations that are drawn at random: the same on
every rank.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch
from models import VOCAB_SIZE
from single_process import random_examples
from torch import Tensor

from ds_hydra.engine import HydraEngine

STRATEGIES_OF_4 = (
    "4x<1,1>", "1x<4,1>", "1x<2,1> + 1x<1,2>", "1x<1,4>", "1x<2,2>", "1x<1,3> + 1x<1,1>", "2x<2,1>",
    "1x<2,1> + 1x<1,1>", "2x<1,2>", "1x<1,2> + 2x<1,1>",
)  # fmt: skip
"""Homogeneous and heterogeneous ones, one that leaves a rank idle included."""


class Holdings(NamedTuple):
    """Counts that must not grow with the number of iterations."""

    open_files: int
    process_groups: int
    threads: int
    """Of Python."""
    tensors: int
    """Alive, garbage that waits for the collector included; the rest is counted after a
    collection.
    """

    @classmethod
    def of(cls, engine: HydraEngine) -> Holdings:
        tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        gc.collect()
        return cls(
            open_files=psutil.Process(os.getpid()).num_fds(),
            process_groups=len(engine.propagator.groups),
            threads=threading.active_count(),
            tensors=tensors,
        )


def train_random_iteration(engine: HydraEngine, generator: random.Random, iteration: int) -> float:
    """4 to 12 sequences of 2 to 60 tokens under one of the strategies of 4 ranks; the loss."""
    lengths = [generator.randint(2, 60) for _ in range(generator.randint(4, 12))]
    examples = random_examples(lengths, VOCAB_SIZE, seed=iteration)
    return float(engine.train_batch(examples, strategy=generator.choice(STRATEGIES_OF_4)))


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes of tensors that `run` has allocated at once."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
