"""What runs in the ranks of the end-to-end benchmark: one contender per process group, stepped by
the driver.

Every contender trains the same model on the same global batches with the same optimizer;
each is the real thing: the Trainer of transformers with stock DeepSpeed ZeRO-3, or
`ds_hydra.initialize`. Between two of its iterations a rank blocks in `Turns.wait`, so contenders
alternate on the same cores without sharing a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import warnings
import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from stock_trainer import STOCK, run_stock
from training_setup import Task, Turns, start_engine

from ds_hydra.engine.ranks.memory import process_bytes
from ds_hydra.errors import InfeasiblePlanError

# ---- ds_hydra


def run_hydra(task: Task, turns: Turns, **keys: Any) -> None:
    """`train_batch()` on the engine's own sampler."""
    rank = dist.get_rank()
    data = datasets.Dataset.from_dict({"input_ids": task.sequences()})
    engine = start_engine(task, data, shuffle=False, profile=task.profile, **keys)
    turns.ready()
    for batch in task.batches[:-1]:
        turns.wait()
        loss = float(engine.train_batch())
        metrics = engine.last_metrics
        if metrics.num_tokens != sum(batch):
            raise RuntimeError(
                f"the engine drew {metrics.num_tokens} tokens, the others {sum(batch)}"
            )
        turns.done(loss if rank == 0 else 0.0, metrics=metrics.to_json())
    turns.wait()


def run_explored(task: Task, turns: Turns) -> None:
    """Every other iteration under a candidate drawn at random, of those that fit the global
    batch.
    """
    rank, draw = dist.get_rank(), random.Random(0)
    engine = start_engine(task, profile=task.profile, planner={"refit": "log"})
    turns.ready()
    sequences = iter(task.sequences())
    for number, batch in enumerate(task.batches[:-1]):
        rows = [{"input_ids": next(sequences)} for _ in batch]
        turns.wait()
        loss = None
        while loss is None:
            strategy = draw.choice(task.strategies) if number % 2 else None
            with contextlib.suppress(InfeasiblePlanError):
                loss = float(engine.train_batch(rows, strategy))
        turns.done(loss if rank == 0 else 0.0, metrics=engine.last_metrics.to_json())
    turns.wait()


def measure_profile(task: Task, turns: Turns) -> None:
    """Write the profile that ds_hydra measures on these ranks to `task.profile`."""
    document = start_engine(task).source.candidates.ensure_profile().document
    if dist.get_rank() == 0:
        assert task.profile is not None
        Path(task.profile).write_text(json.dumps(document, indent=1) + "\n")
    turns.ready()
    turns.wait()


# ---- the Trainer with stock DeepSpeed


TITLES = {
    "padding": "(1) Trainer, ZeRO-3, padding",
    "packing": "(2) ZeRO-3, first-fit-decreasing packing",
    "packing_compiled": "(2) the same, torch_compile",
    "packing_sdpa": "(2) the same, attention with a mask of the micro-batch (sdpa)",
    "rebalance": "(3) ZeRO-3, batch_rebalance, flattened",
    "rebalance_padding": "(3) ZeRO-3, batch_rebalance, padding",
    "kk_tokens": "(4) ZeRO-3, Karmarkar-Karp on tokens",
    "kk_flops": "(4) ZeRO-3, Karmarkar-Karp on tokens + tokens^2",
    "ulysses": "(5) ZeRO-3, Ulysses, packing",
    "autotp": "(5) ZeRO-3, AutoTP, packing",
    "checkpointing": "(5) ZeRO-3, packing, activation checkpointing",
    "hydra_static": "(6) ds_hydra, one homogeneous strategy",
    "hydra_profiled": "(7) ds_hydra, plans by the profile alone",
    "hydra_compiled": "(7) ds_hydra, hydra.compile_layers",
    "hydra": "(7) ds_hydra",
}


OWN_KEYS: dict[str, dict[str, Any]] = {
    "hydra_profiled": {"planner": {"refit": "log"}},
    "hydra_compiled": {"compile_layers": True},
}
"""What the section `hydra` of a contender has besides those of `start_engine`."""


def run_contender(name: str, task: Task, turns: Turns) -> None:
    """Run `name` until the driver says stop."""
    if name in STOCK:
        run_stock(task, turns, stock=STOCK[name])
    elif name == "profile":
        measure_profile(task, turns)
    elif name == "explored":
        run_explored(task, turns)
    elif name == "hydra_static":
        run_hydra(task, turns, strategies=[task.static_strategy])
    else:
        run_hydra(task, turns, **OWN_KEYS.get(name, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs: its core, its threads, and where it meets the others."""

    rank: int
    world: int
    core: int
    rendezvous: str


def shared_memory_key(rendezvous: str) -> str:
    """What stands in MASTER_PORT: AutoTP's ranks find each other's memory by it, and not another
    contender's.
    """
    return str(zlib.crc32(rendezvous.encode()))


def run_rank(name: str, task: Task, place: RankPlace, connection: Connection) -> None:
    """The life of one forked rank; reports an exception instead of raising it."""
    import datetime
    import traceback

    os.sched_setaffinity(0, {place.core})
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.world),
        LOCAL_SIZE=str(place.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=shared_memory_key(place.rendezvous),
    )
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    deepspeed.utils.logger.setLevel("ERROR")
    turns = Turns(connection, base_bytes=process_bytes("VmRSS"))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.rendezvous}",
            rank=place.rank,
            world_size=place.world,
            timeout=datetime.timedelta(minutes=10),
        )
        # Takes the group that exists
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        run_contender(name, task, turns)
    except BaseException:
        connection.send({"error": traceback.format_exc()})
    finally:
        os._exit(0)  # the other ranks may be gone
