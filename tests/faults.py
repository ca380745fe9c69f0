"""Ranks that may die: what became of each, what it wrote to stderr, and how long after the fault it
ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import (
    free_port,
    load_what_ranks_use,
    rank_environment,
    remove_shared_memory,
    start_forks,
)

HANG_S = 600
"""Only a run that never ends takes so long."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    exit_code: int
    stderr: str
    seconds: float
    """After the fault: from the mark that `mark_fault` left, or from when `poll` had first returned
    True; NaN without one.
    """
    value: Any
    """Result of the function; None where it did not return."""


def run_until_end(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    victim: int | None = None,
) -> list[Ended]:
    """`run_ranks` of `world_size` ranks on this machine, which meet in a file."""
    port = free_port()
    return run_ranks(
        function,
        args,
        [rank_environment(rank, world_size, port) for rank in range(world_size)],
        folder,
        init_method=f"file://{folder}/rendezvous_{time.monotonic_ns()}",
        victim=victim,
    )


def run_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    *,
    init_method: str = "env://",
    enter: Callable[[int], None] = lambda rank: None,
    victim: int | None = None,
    poll: Callable[[], bool] = lambda: False,
    limit_s: float | None = None,
) -> list[Ended]:
    """Fork gloo ranks that run `function(*args)`, and wait until every one has ended by itself.

    Rank `victim` need not: it is killed when the others have ended. Each rank comes to its
    environment, then calls `enter`. `poll` is called again and again until it returns True. Only a
    run that never ends takes `limit_s`, else HANG_S.
    """
    load_what_ranks_use()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("value_*"):
        left.unlink()
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=_run, args=(function, args, environment, str(folder), init_method, enter)
        )
        for environment in environments
    ]
    start_forks(ranks)
    ends: dict[int, float] = {}
    polled = None
    limit = time.monotonic() + (limit_s or HANG_S)
    awaited = set(range(len(ranks))) - {victim}
    while not awaited <= ends.keys() and (now := time.monotonic()) < limit:
        ends |= {i: now for i, p in enumerate(ranks) if i not in ends and p.exitcode is not None}
        if polled is None and poll():
            polled = time.monotonic()
        time.sleep(0.005)
    hanging = sorted(awaited - ends.keys())
    for process in ranks:
        process.kill()
        process.join()
    remove_shared_memory(int(environments[0]["MASTER_PORT"]))
    texts = [(folder / f"stderr_{rank}").read_text() for rank in range(len(ranks))]
    assert not hanging, f"ranks {hanging} hang:\n" + "\n".join(texts)
    mark = folder / "fault"
    fault = float(mark.read_text()) if mark.exists() else polled or float("nan")
    values = [folder / f"value_{rank}" for rank in range(len(ranks))]
    return [
        Ended(
            process.exitcode,
            text,
            ends.get(rank, float("nan")) - fault,
            json.loads(value.read_text()) if value.exists() else None,
        )
        for rank, (process, text, value) in enumerate(zip(ranks, texts, values, strict=True))
    ]


def mark_fault(folder: str | Path) -> None:
    """Note the time of the fault that follows."""
    Path(folder, "fault").write_text(repr(time.monotonic()))


def die(folder: str | Path, number: int = signal.SIGKILL) -> None:
    """A signal for this process: SIGKILL, or SIGSTOP."""
    mark_fault(folder)
    os.kill(os.getpid(), number)


START_PHASES = ("join", "copy", "partition", "groups", "tokenise", "profile", "first plan")
"""Phases of `ds_hydra.initialize`, in order."""
LATER_PHASES = (
    "plan", "pull", "forward", "backward", "push", "step", "evaluate", "save", "load", "save 16 bit", "destroy",
)  # fmt: skip


def end_at_start(where: str, folder: str | Path, number: int = signal.SIGKILL) -> None:
    """Let this rank die when it comes to one of `START_PHASES`."""
    from ds_hydra.engine import HydraEngine, hydra_engine
    from ds_hydra.engine.candidates import EngineCandidates
    from ds_hydra.engine.parallel.groups import GroupPool
    from ds_hydra.engine.profiling import profiler
    from ds_hydra.engine.ranks import watchdog
    from ds_hydra.sampler.data.dataset import TokenDataset

    owner, name = {
        "join": (watchdog, "find_hosts"),
        "copy": (hydra_engine, "StageModel"),
        "partition": (HydraEngine, "_configure_optimizer"),
        "groups": (GroupPool, "create"),
        "tokenise": (TokenDataset, "from_dataset"),
        "profile": (profiler, "measure_in_rounds"),
        "first plan": (EngineCandidates, "fit_to_data"),
    }[where]
    setattr(owner, name, lambda *_, **__: die(folder, number))


def kill_in(
    engine: Any,
    where: str,
    folder: str | Path,
    number: int | None = signal.SIGKILL,
    passes: int = 0,
) -> None:
    """Let this rank die the next time it comes to `where`, which it `passes` so many times; with
    None in place of a signal it raises a MemoryError.
    """
    import torch

    propagator = engine.propagator
    owner, name = {
        "pull": (propagator.links.pull_link, "begin_pull"),
        "forward": (engine.propagator.stage_model, "forward_stage"),
        "backward": (torch.autograd, "backward"),
        "push": (propagator.links.push_link, "begin_push"),
        "step": (engine.optimizer, "step"),
        "plan": (engine.source, "next"),
        "evaluate": (propagator, "evaluate"),
        "save": (engine.checkpoint_engine, "_save"),
        "load": (engine, "_read_checkpoint"),
        "save 16 bit": (engine, "_zero3_consolidated_16bit_state_dict"),
        "destroy": (engine.reporter, "close"),
    }[where]
    plain, times = getattr(owner, name), itertools.count()

    def come(*args: Any, **kwargs: Any) -> Any:
        if next(times) < passes:
            return plain(*args, **kwargs)
        if number is not None:
            return die(folder, number)
        mark_fault(folder)
        raise MemoryError("no room left, on purpose")

    setattr(owner, name, come)


def append_json(path: str | Path, value: Any) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps(value) + "\n")


def read_json_lines(path: str | Path) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _run(
    function: Callable[..., Any],
    args: Sequence[Any],
    environment: Mapping[str, str],
    folder: str,
    init_method: str,
    enter: Callable[[int], None],
) -> None:
    rank = int(environment["RANK"])
    with ends_as_rank(f"{folder}/stderr_{rank}"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        enter(rank)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=int(environment["WORLD_SIZE"]),
        )
        value = json.dumps(function(*args))
        Path(f"{folder}/value_{rank}").write_text(value)


@contextlib.contextmanager
def ends_as_rank(stderr: str | Path) -> Iterator[None]:
    """All that a forked process does: it ends with what runs inside, and its stderr goes to the
    file `stderr`.
    """
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    code = 1
    try:
        yield
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as in a process of its own
    finally:
        sys.stderr.flush()
        os._exit(code)
