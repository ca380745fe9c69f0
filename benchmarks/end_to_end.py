"""ds_hydra against what people use today: same model, same global batches, same losses, in
one run.

    python benchmarks/end_to_end.py

starts the process groups of all contenders of a workload, each rank pinned to one core with one
thread, and lets them take turns, one iteration each, in a new random order every time, so that a
disturbance hits all alike. Each workload leaves a JSON file in `--out`; workloads that have one of
the same settings are not run again (`--fresh` does). At the end all files are read: table
(Markdown, also on stdout) and plot. Needs a machine that does nothing else.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import contenders
from contenders import TITLES, RankPlace
from end_to_end_tables import Settings, make_plot, make_table
from pages import processor
from tqdm import tqdm
from training_setup import ModelSize, Task
from workloads import WORKLOADS, Workload

from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy import Profile, Scheme

STRATEGIES = {
    2: ("2x<1,1>", "1x<2,1>", "1x<1,2>", "1x<sp2,1>"),
    4: (
        "4x<1,1>",
        "2x<sp2,1>",
        "1x<sp4,1>",
        "1x<sp2,1> + 2x<1,1>",
        "2x<2,1>",
        "1x<4,1>",
        "2x<1,2>",
        "1x<2,2>",
        "1x<1,4>",
        "1x<2,1> + 2x<1,1>",
        "1x<1,2> + 2x<1,1>",
        "1x<2,1> + 1x<1,2>",
    ),
}

SAVING_MEMORY = {
    2: (
        "2x<1,1;gather>",
        "2x<1,1;gather;ckpt=2>",
        "1x<1,1;gather> + 1x<1,1;gather;ckpt=4>",
        "1x<sp2,1;gather>",
    ),
    4: (),
}
"""Further candidates of workloads that limit memory."""


class ContenderError(Exception):
    """A contender does not run here; says why."""


class Group(AbstractContextManager):
    """The ranks of one contender, forked and waiting for their turn."""

    def __init__(self, name: str, task: Task, cores: Sequence[int]):
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        self._rendezvous = f"{self._folder.name}/rendezvous"
        self._pipes, self._processes = [], []
        world = task.shape.num_ranks
        for rank in range(world):
            mine, theirs = context.Pipe()
            place = RankPlace(
                rank=rank,
                world=world,
                core=cores[rank % len(cores)],
                rendezvous=self._rendezvous,
            )
            process = context.Process(
                target=contenders.run_rank, args=(name, task, place, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process of each rank."""
        return [process.pid for process in self._processes]

    def answers(self) -> list[dict[str, Any]]:
        """What every rank says next; raises with the rank's own traceback if one failed."""
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answer = pipe.recv()
            except EOFError:
                raise ContenderError(f"{self.name}: rank {rank} died") from None
            if "error" in answer:
                raise ContenderError(f"{self.name}: rank {rank} failed:\n{answer['error']}")
            answers.append(answer)
        return answers

    def step(self) -> dict[str, Any]:
        """One iteration: time of the slowest rank, loss, memory."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send("go")
            except BrokenPipeError:
                raise ContenderError(f"{self.name}: rank {rank} died") from None
        answers = self.answers()
        return {
            "seconds": max(a["seconds"] for a in answers),
            "cpu_seconds": [a["cpu_seconds"] for a in answers],
            "loss": sum(a["loss"] for a in answers),
            "peak_bytes": max(a["peak_bytes"] for a in answers),
            "metrics": answers[0].get("metrics"),
        }

    def __exit__(self, *_error: object) -> None:
        """End the ranks; safe to call twice."""
        for process in self._processes:
            process.kill()
            process.join()
        key = contenders.shared_memory_key(self._rendezvous)
        for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{key}_*"):
            file.unlink(missing_ok=True)
        self._folder.cleanup()


def make_task(
    workload: Workload, settings: Settings, profile: Path, strategies: tuple[str, ...]
) -> Task:
    """What the contenders of `workload` share."""
    num = settings.warmup + settings.iterations + 1
    return Task(
        workload=workload.name,
        batches=workload.batches(settings.context_length, settings.tokens_per_iteration, num),
        shape=settings.shape(),
        model=settings.model,
        profile=str(profile),
        strategies=strategies,
    )


def measure_profile(task: Task, cores: Sequence[int]) -> None:
    """The profile that ds_hydra measures itself on these ranks."""
    with Group("profile", task, cores) as group:
        group.answers()


def limit_memory(profile: Profile, settings: Settings) -> int:
    """Bytes with which `<2,1>` just holds a micro-batch of the context."""
    return (
        int(profile.memory.rank_bytes(Scheme(2, 1), settings.num_ranks, settings.context_length))
        + 1
    )


def run_workload(
    workload: Workload, names: Sequence[str], settings: Settings, cores: Sequence[int], out: Path
) -> None:
    """Measure all contenders of one workload and write its file."""
    profile_path = out / settings.profile_name  # kept for all workloads
    strategies = STRATEGIES[settings.num_ranks]
    saving_memory = strategies + SAVING_MEMORY[settings.num_ranks]
    task = make_task(workload, settings, profile_path, saving_memory)
    if not profile_path.exists():
        measure_profile(task, cores)
    profile = Profile.load(profile_path)
    num = settings.warmup + settings.iterations
    limit = None
    if workload.limits_memory:
        limit = limit_memory(profile, settings)
        static_strategy = f"1x<{settings.num_ranks},1>"
        task = replace(task, memory_limit_bytes=limit, static_strategy=static_strategy)
    else:
        static_strategy = f"{settings.num_ranks}x<1,1>"
        task = replace(task, strategies=strategies, static_strategy=static_strategy)
    load_before = os.getloadavg()[0]
    start = time.monotonic()
    steps, failures = take_turns(names, task, cores, num)
    seconds = time.monotonic() - start
    document = {
        "workload": workload.name,
        "settings": settings.to_json(),
        "hardware": hardware(cores),
        "load_before": load_before,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "memory_limit_bytes": limit,
        "model_bytes": {
            str(scheme): profile.memory.rank_bytes(
                scheme, settings.num_ranks, settings.context_length
            )
            for scheme in profile.latency
        },
        "batches": [list(batch) for batch in task.batches[settings.warmup : num]],
        "contenders": {name: taken[settings.warmup :] for name, taken in steps.items()},
        "failures": failures,
    }
    path = out / f"{workload.name}_{settings.num_ranks}ranks.json"
    path.write_text(json.dumps(document) + "\n")


def take_turns(
    names: Sequence[str],
    task: Task,
    cores: Sequence[int],
    num: int,
    before: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """`num` iterations of every contender, and why contenders that do not run here do not; ds_hydra
    must. `before` is called with the number of each.
    """
    steps: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    shuffle = random.Random(0).shuffle
    with ExitStack() as stack:
        groups: dict[str, Group] = {}

        def attempt(name: str, action: Callable[[], Any]) -> Any:
            try:
                return action()
            except ContenderError as error:
                if name.endswith("hydra"):
                    raise
                print(error, file=sys.stderr)
                failures[name] = str(error).strip().splitlines()[-1]
                steps.pop(name, None)
                groups.pop(name).__exit__()
                return None

        for name in names:
            groups[name] = stack.enter_context(Group(name, task, cores))
            attempt(name, groups[name].answers)
        for number in tqdm(range(num), desc=task.workload, file=sys.stderr):
            before(number)
            order = list(groups)
            shuffle(order)
            for name in order:
                step = attempt(name, groups[name].step)
                if step is not None:
                    steps.setdefault(name, []).append(step)
    return steps, failures


def hardware(cores: Sequence[int]) -> str:
    """Processor, the cores in use, and the versions of what is compared."""
    versions = ", ".join(
        f"{package} {version(package)}" for package in ("torch", "deepspeed", "transformers")
    )
    return f"{processor()}, {len(cores)} cores; {versions}"


# ---- reading the files


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--contenders", nargs="+", choices=list(TITLES), help="default: those of the workload"
    )
    parser.add_argument(
        "--ranks", type=int, choices=list(STRATEGIES), default=2, help="default %(default)s"
    )
    parser.add_argument(
        "--iterations", type=int, default=30, help="after warm-up (default %(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=3, help="default %(default)s")
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens, a power of two (default %(default)s)"
    )
    parser.add_argument("--tokens", type=int, help="per iteration (default: one context per rank)")
    parser.add_argument(
        "--layers", type=int, default=ModelSize().num_layers, help="default %(default)s"
    )
    parser.add_argument(
        "--experts", type=int, default=0, help="of a Qwen3-MoE in place of the LLaMA"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny: shows that everything runs, measures nothing"
    )
    parser.add_argument("--fresh", action="store_true", help="run workloads again that have a file")
    parser.add_argument(
        "--out", type=Path, help="default runs/end_to_end, with --quick runs/end_to_end_quick"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = replace(ModelSize(), num_layers=args.layers)
    if args.quick:
        args.context, args.iterations, args.warmup = 256, 2, 1
        model = ModelSize(hidden_size=64, intermediate_size=128, num_layers=4, vocab_size=256)
    model = replace(model, num_experts=args.experts)
    settings = Settings(
        num_ranks=args.ranks,
        context_length=args.context,
        tokens_per_iteration=args.tokens or args.ranks * args.context,
        iterations=args.iterations,
        warmup=args.warmup,
        model=model,
    )
    args.out = args.out or Path("runs/end_to_end_quick" if args.quick else "runs/end_to_end")
    args.out.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    warm_up()  # compiled code of the planner, once, before ranks are forked
    documents = []
    for name in args.workloads:
        path = args.out / f"{name}_{settings.num_ranks}ranks.json"
        names = tuple(args.contenders or WORKLOADS[name].contenders)
        names = names if "hydra" in names else (*names, "hydra")
        if args.fresh or not _is_measured(path, settings, names):
            run_workload(WORKLOADS[name], names, settings, cores, args.out)
        documents.append(json.loads(path.read_text()))
    table = make_table(documents)
    (args.out / f"end_to_end_{settings.num_ranks}ranks.md").write_text(table + "\n")
    make_plot(documents, args.out / f"end_to_end_{settings.num_ranks}ranks.png")
    print(table)


def _is_measured(path: Path, settings: Settings, names: Sequence[str]) -> bool:
    if not path.exists():
        return False
    document = json.loads(path.read_text())
    return document["settings"] == settings.to_json() and set(names) <= {
        *document["contenders"],
        *document["failures"],
    }


if __name__ == "__main__":
    main()
