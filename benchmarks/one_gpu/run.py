"""Everything that one GPU can show, in nine minutes; without a GPU the same steps on CPU ranks.

    python3 -m benchmarks.one_gpu.run --out runs/one_gpu             # a GPU, no network
    python3 -m benchmarks.one_gpu.run --out runs/one_gpu --dry-run   # tiny models, CPU ranks
    python3 -m benchmarks.one_gpu.run --out runs/call_1 --call 1     # of three, in half an hour

Wheels of `prepare.py` are installed beside what the machine has. Every step is a process with a
limit of its own; one that fails or hangs is ended with its processes, its last words are kept, and
the next begins. Steps that time nothing run side by side, the others alone. Findings are written as
they come, to results.jsonl, steps' output to log.txt, and one_gpu.md is made of them at the end.
A question that docs/benchmarks/one_gpu.jsonl has an answer to is left out as long as the files that
it rests on are as they were; `--again` asks anew.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.one_gpu import page
from benchmarks.one_gpu.prepare import FOLDER, NCCL_FILE, ROOT
from benchmarks.one_gpu.telling import START

ANSWERS = ROOT / "docs" / "benchmarks" / "one_gpu.jsonl"
MOST_S = 530.0
"""Of ten minutes, in which the machine also starts and sends its files."""
_LAST_WORDS = 4000
_SLACK = 6
"""A dry run has so many times the limits: its machine is small and does other things, too."""
DESIGN = {  # what ds_hydra sets where it is imported before the device is used
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_SCALE_LAUNCH_QUEUES": "4x",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """`arguments` of python; `ranks` on the one device, 0 for a process without a launcher."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    ranks: int = 0
    gpu_only: str = ""
    """Why there is nothing to do without a GPU."""
    environment: Mapping[str, str] = field(default_factory=lambda: DESIGN)
    rests_on: tuple[str, ...] = ()
    """Patterns of the files that decide what is found; of no file where it is found anew each
    time.
    """

    def digest(self) -> str:
        """Equal as long as those files are, the step's own, what it is called with, and torch."""
        if not self.rests_on:
            return ""
        of_arguments = [f"{name.replace('.', '/')}.py" for name in self.arguments]
        paths = {path for text in (*self.rests_on, *of_arguments) for path in ROOT.glob(text)}
        digest = hashlib.sha256(importlib.metadata.version("torch").encode())
        digest.update(repr((self.arguments, self.ranks, sorted(self.environment.items()))).encode())
        for path in sorted(paths):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def _step(name: str, module: str, *arguments: str, **options: Any) -> Step:
    words = ("-m", f"benchmarks.one_gpu.{module}", *arguments)
    return Step(name=name, arguments=words, **options)


_THREADS = ("ds_hydra/environment.py",)
_ATTENTION = ("ds_hydra/engine/model/attention*.py",)
_ORDERS = (
    "ds_hydra/engine/propagation.py", "ds_hydra/engine/transfer/*.py", "ds_hydra/engine/parallel/*.py",
    "ds_hydra/zero_link/*.py",
)  # fmt: skip
_QUEUES, _FOUR = "a CPU has no queues", "gloo is the same for two"
_SHOWN = "tests run the examples on CPU ranks"
_TESTED, _NO_KERNELS = "tests have them on CPU ranks", "a CPU loads no kernels"
DEMO, TRAINER = "examples/stdlib/train.py", "examples/hf_trainer/pretrain.py"
_BF16 = ("--bf16", "--max_steps", "12", "--save_steps", "6")
PROBE = _step("probe of 2 ranks", "probe", ranks=2, limit_s=45)
STEPS: tuple[tuple[float, tuple[tuple[Step, ...], ...]], ...] = (
    (
        0.17,
        (
            (
                _step("queues as designed", "queues", limit_s=25, gpu_only=_QUEUES, rests_on=_THREADS),
                _step("queues by default", "queues", limit_s=25, gpu_only=_QUEUES, environment={}, rests_on=_THREADS),
                _step("queues set late", "queues", "--late", limit_s=25, gpu_only=_QUEUES, environment={},
                      rests_on=_THREADS),
                PROBE,
            ),
        ),
    ),
    (
        0.6,
        (
            (
                _step("parity of 2 ranks", "parity", ranks=2, limit_s=110),
                _step("lengths of 2 ranks", "lengths", ranks=2, limit_s=75, gpu_only=_NO_KERNELS),
                Step(name="Trainer of 2 ranks", arguments=(TRAINER, *_BF16), ranks=2, limit_s=90,
                     gpu_only=_SHOWN),
                _step("doctor of 2 ranks", "examine", ranks=2, limit_s=110),
                _step("states of 2 ranks", "states", ranks=2, limit_s=100, gpu_only=_TESTED),
                _step("parity of 4 ranks", "parity", ranks=4, limit_s=120),
                _step("lengths of 4 ranks", "lengths", ranks=4, limit_s=60, gpu_only=_NO_KERNELS),
                Step(name="demo of 4 ranks", arguments=(DEMO, "--iterations", "12"), ranks=4, limit_s=120,
                     gpu_only=_SHOWN),
                _step(
                    "races", "parity", "--races", ranks=2, limit_s=90,
                    gpu_only="the sanitizer of torch sees CUDA streams alone",
                    environment={**DESIGN, "TORCH_CUDA_SANITIZER": "1"}, rests_on=_ORDERS,
                ),
                _step("probe of 4 ranks", "probe", ranks=4, limit_s=45, gpu_only=_FOUR),
            ),
            (
                _step("attention", "attention", limit_s=60, rests_on=_ATTENTION),
                _step("parity of 1 rank", "parity", ranks=1, limit_s=110),
            ),
        ),
    ),
    (
        1.0,
        (
            (
                _step("speed", "speed", limit_s=150),
                _step("times of a profile", "times", limit_s=90),
                _step("loss and optimizer", "parts", limit_s=60),
                _step("first uses", "first_uses", limit_s=70, gpu_only=_NO_KERNELS,
                      rests_on=(*_ATTENTION, "ds_hydra/engine/parallel/linear.py")),
                _step("planner beside", "planner", ranks=1, limit_s=60),
                _step("memory of one of 8", "memory", "8", limit_s=110),
                _step("memory of one of 8, large vocabulary", "memory", "8", "128K", limit_s=80,
                      gpu_only="on a CPU every model is the tiny one"),
                _step("memory of one of 64", "memory", "64", limit_s=60),
            ),
        ),
    ),
)  # fmt: skip
"""Each phase ends at this share of the time, and has lanes of steps that run side by side. What
finds faults comes first. One lane alone has several ranks: where more than four share a device,
each waits for its turn behind the others' kernels that wait for messages. What measures memory runs
alone, as what takes times does.
"""

CALLS: tuple[tuple[Step, ...], ...] = (
    (
        _step("soak of 4 ranks", "soak", "--seconds", "120", "--late", "0.08", ranks=4, limit_s=170),
        _step("communicators of 4 ranks", "communicators", "--groups", "6", ranks=4, limit_s=80),
        _step("soak of 2 nodes", "soak", "--seconds", "60", "--nodes", "2", "--seed", "2", ranks=4, limit_s=100),
        _step("soak of experts", "soak", "--seconds", "60", "--moe", "--seed", "3", ranks=4, limit_s=100),
    ),
    (
        _step("launches", "launches", ranks=1, limit_s=60),
        _step("launches, compiled", "launches", "--compile", ranks=1, limit_s=75),
        _step("exposed link of one of 8", "exposed", limit_s=90),
        _step("beside FSDP2, torch.compile and Liger", "versus", "--limit", "75", ranks=1, limit_s=300),
        _step("TP, SP and CP of one of 8", "one_of_eight", limit_s=75, rests_on=_ORDERS),
    ),
    (
        _step("iteration of 7B", "speed", "--iteration", limit_s=110),
        _step("attention of short rows", "short_rows", limit_s=45, rests_on=_ATTENTION),
        _step("growth", "growth", "--compile", ranks=1, limit_s=150),
        _step("growth of 2 ranks", "growth", ranks=2, limit_s=150),
        _step(
            "soak of a full device", "soak", "--seconds", "50", "--full", "--between", ranks=2, limit_s=90,
            environment={**DESIGN, "PYTORCH_ALLOC_CONF": "expandable_segments:False"},
        ),
    ),
)  # fmt: skip
"""Half an hour of a machine, a call of nine minutes each: whether anything hangs or is wrong, then
times, each step alone, then what grows.
"""


def _without_phases() -> tuple[tuple[float, tuple[tuple[Step, ...], ...]], ...]:
    """All steps in two lanes: where no time is measured, none needs to run alone."""
    lanes = [lane for _, lanes in STEPS for lane in lanes]
    return ((1.0, tuple(tuple(itertools.chain(*lanes[n::2])) for n in (0, 1))),)


class Run:
    """The steps of one run, on what machine this is."""

    def __init__(
        self,
        out: Path,
        *,
        has_gpu: bool,
        seconds: float,
        site: Path | None,
        nccl: str,
        answered: Mapping[str, str] | None = None,
    ):
        """`answered`: digests of steps that have run before."""
        self._answered = answered or {}
        self._out, self._has_gpu = out, has_gpu
        self._slack = 1 if has_gpu else _SLACK
        self._seconds = seconds * self._slack
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._site, self._nccl = site, nccl
        self._way = "hostid" if has_gpu else "cpu"
        self._temporary = tempfile.TemporaryDirectory()
        self._running: set[subprocess.Popen[Any]] = set()
        self._is_over = False
        (out / "results.jsonl").write_text("")
        (out / "log.txt").write_text("")

    def note(self, step: str, **line: Any) -> None:
        """One line of results.jsonl."""
        with self._lock, (self._out / "results.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **line}) + "\n")

    def run(self, only: Sequence[str], call: int | None = None) -> None:
        """All phases, or the steps that begin with one of `only`; those of one of `CALLS`."""
        phases = STEPS if self._has_gpu else _without_phases()
        for share, lanes in phases if call is None else ((1.0, (CALLS[call - 1],)),):
            until = self._begin + share * self._seconds
            threads = [
                threading.Thread(target=self._run_lane, args=(lane, until, only)) for lane in lanes
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _run_lane(self, lane: Sequence[Step], until: float, only: Sequence[str]) -> None:
        for step in lane:
            if self._is_over:
                return
            if only and not step.name.startswith(tuple(only)):
                continue
            if step.gpu_only and not self._has_gpu:
                self.note(step.name, skipped=step.gpu_only)
                continue
            if (digest := step.digest()) and self._answered.get(step.name) == digest:
                self.note(step.name, skipped="answered before, and its files are as they were")
                continue
            if step is PROBE and self._has_gpu:
                self._choose_way(step, until)
            else:
                self.try_step(step, until, self._way)

    def _choose_way(self, step: Step, until: float) -> None:
        """The first way in which two ranks can talk; the last is kept where none does."""
        for way in ("hostid", *(("multirank",) if self._nccl else ()), "staged"):
            self._way = way
            if self.try_step(step, until, way):
                break
        self.note(step.name, case="way", found=self._way, wanted="hostid", is_well=None)

    def try_step(self, step: Step, until: float, way: str) -> bool:
        """Whether the step has ended by itself and found nothing wrong."""
        limit_s = min(step.limit_s * self._slack, until - time.monotonic())
        if limit_s < min(10.0, step.limit_s):
            self.note(step.name, skipped="no time was left")
            return False
        command = [sys.executable, "-u", *step.arguments]
        if step.ranks:
            ranks = [
                "-m",
                "benchmarks.one_gpu.ranks",
                "--way",
                way,
                "--limit",
                f"{limit_s + 60:.0f}",  # never: what hangs is looked at before it is ended
            ]
            ranks += ["--nccl", self._nccl] if self._nccl else []
            command[2:] = [*ranks, str(step.ranks), *step.arguments]
        begin = time.monotonic()
        lines, words, code = self._execute(command, step, limit_s)
        for line in lines:
            self.note(step.name, **line)
        seconds = round(time.monotonic() - begin, 1)
        end = "hung" if code is None else f"exit code {code}" if code else "ended"
        more = {"way": way} if step.ranks else {}
        more |= {"digest": step.digest()} if step.rests_on else {}
        last_words = words[-_LAST_WORDS:] if code != 0 else ""
        self.note(step.name, end=end, seconds=seconds, last_words=last_words, **more)
        print(
            f"{time.monotonic() - self._begin:5.0f} s  {step.name}: {end} after {seconds} s",
            flush=True,
        )
        return code == 0 and all(line.get("is_well", True) is not False for line in lines)

    def _execute(
        self, command: Sequence[str], step: Step, limit_s: float
    ) -> tuple[list[dict[str, Any]], str, int | None]:
        """Findings, the rest of the output, and the exit code; None where it had to be ended."""
        folder = Path(self._temporary.name)
        base = folder / step.name.replace(" ", "_")
        with base.with_suffix(".out").open("w") as out, base.with_suffix(".err").open("w") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment(step.environment), stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                err.write(self._native_stacks(process, step))
                err.flush()
                _ask_where(process)
            finally:
                _end(process)
                self._running.discard(process)
        output = base.with_suffix(".out").read_text(errors="replace").splitlines()
        findings = [found for line in output if (found := _read(line))]
        rest = [line for line in output if not line.startswith(START)]
        words = "\n".join([*rest, base.with_suffix(".err").read_text(errors="replace")]).strip()
        with self._lock, (self._out / "log.txt").open("a") as file:
            file.write(f"==== {step.name}\n{words[-200_000:]}\n")
        return findings, words, code if code != 124 else None

    def _native_stacks(self, process: subprocess.Popen[Any], step: Step) -> str:
        """Where processes that hang, ranks or the one process, are in libraries, by py-spy, where
        that is here: it showed that cuBLAS loads kernels.
        """
        found = (self._site / "bin" / "py-spy") if self._site else None
        if found is None or not found.exists():
            return ""
        texts = []
        for number in sorted(_children(process.pid)) if step.ranks else [process.pid]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = [str(found), "dump", "--native", "--pid", str(number)]
                done = subprocess.run(
                    command, check=False, capture_output=True, text=True, timeout=10
                )
                texts.append(done.stdout)
        return "\n".join(texts)

    def stop(self) -> None:
        """End the steps under way, and begin no other."""
        self._is_over = True
        for process in list(self._running):
            _end(process)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of a step, with `more` of its own."""
        path = [str(self._site)] if self._site else []
        path += [str(ROOT), str(ROOT / "tests")]
        if before := os.environ.get("PYTHONPATH"):
            path.append(before)
        own = {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}
        # Wheels are installed without bytecode, which the first process that imports them writes.
        own |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONFAULTHANDLER": "1"}
        own["DS_ACCELERATOR"] = "cuda" if self._has_gpu else "cpu"
        if architectures := os.environ.get("TORCH_CUDA_ARCH_LIST"):
            # DeepSpeed takes what follows the point for a number, and fails at "9.0a"
            own["TORCH_CUDA_ARCH_LIST"] = re.sub("[a-z]", "", architectures)
        if not self._has_gpu:
            own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, **own, **(more or {})}


def _read(line: str) -> dict[str, Any] | None:
    """A finding; None of any other line, and of one that its writer did not finish."""
    with contextlib.suppress(json.JSONDecodeError):
        if line.startswith(START):
            return dict(json.loads(line))
    return None


def _ask_where(process: subprocess.Popen[Any]) -> None:
    """Let a process that hangs, and those that it has started, say in which lines, and end.

    One after another, the youngest first: they write to one file, a few bytes at a time.
    """
    for number in sorted(_of_session(process.pid), reverse=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGABRT)
        end = time.monotonic() + 1
        while number in _of_session(process.pid) and time.monotonic() < end:
            time.sleep(0.02)


def _of_session(leader: int) -> set[int]:
    """The processes of a session that have not ended."""
    return {number for number, (_, session) in _processes().items() if session == leader}


def _children(parent: int) -> set[int]:
    """The processes that a process has started itself, and that have not ended."""
    return {number for number, (started_by, _) in _processes().items() if started_by == parent}


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and session of each process that has not ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name of a command, in parentheses, may hold blanks.
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                found[int(path.parent.name)] = (int(parent), int(session))
    return found


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it has started: first by a word, so that it can end others."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if number == signal.SIGTERM:
            time.sleep(0.3)
    process.wait()


def read_answers(path: Path) -> dict[str, str]:
    """Digests of the steps in a results file that ended by themselves and found nothing wrong."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    wrong = {record["step"] for record in records if record.get("is_well") is False}
    return {
        record["step"]: record["digest"]
        for record in records
        if record.get("digest") and record["end"] == "ended" and record["step"] not in wrong
    }


def has_gpu() -> bool:
    """Whether torch sees a CUDA device; in a process of its own."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return (
        subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode
        == 0
    )


def install(wheels: Path, site: Path) -> None:
    """The wheels of `prepare.py` into a folder of their own."""
    found = sorted(map(str, wheels.glob("*.whl")))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
    ]
    pip += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([*pip, *found], check=True)


def unpack_nccl(wheels: Path, folder: Path) -> str:
    """Path of the carried NCCL; "" where none was prepared."""
    if not (wheels / NCCL_FILE).exists():
        return ""
    library = folder / NCCL_FILE.removesuffix(".xz")
    with lzma.open(wheels / NCCL_FILE) as packed, library.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return str(library)


def compile_beside(environment: Mapping[str, str], *, has_gpu: bool) -> list[subprocess.Popen[Any]]:
    """What takes a minute of one core the first time, in the background: the planner, and
    DeepSpeed's optimizer for GPUs.
    """
    codes = ["from ds_hydra.sampler.warm_up import warm_up; warm_up()"]
    if has_gpu:
        codes.append(
            "from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load()"
        )
    return [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=dict(environment), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for code in codes
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "one_gpu")
    parser.add_argument("--wheels", type=Path, default=FOLDER)
    parser.add_argument("--no-install", action="store_true", help="everything is here already")
    parser.add_argument("--dry-run", action="store_true", help="CPU ranks, also where a GPU is")
    parser.add_argument("--seconds", type=float, default=MOST_S, help="for all steps")
    parser.add_argument("--only", nargs="+", default=(), help="steps that begin so")
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="one of three in half an hour")
    parser.add_argument("--again", action="store_true", help="also what is answered")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, too
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        site = None
        if not options.no_install:
            site = Path(temporary) / "site"
            if not list(options.wheels.glob("*.whl")):
                raise SystemExit(
                    f"there are no wheels in {options.wheels}: run python -m benchmarks.one_gpu.prepare where there "
                    "is a network and carry them, or say --no-install where deepspeed is installed"
                )
            install(options.wheels, site)
        is_gpu = not options.dry_run and has_gpu()
        nccl = unpack_nccl(options.wheels, Path(temporary)) if is_gpu else ""
        left_s = options.seconds - (time.monotonic() - begin)
        answered = {} if options.again or not is_gpu else read_answers(ANSWERS)
        run = Run(
            options.out, has_gpu=is_gpu, seconds=left_s, site=site, nccl=nccl, answered=answered
        )
        compiling = compile_beside(run.environment(), has_gpu=is_gpu)
        try:
            run.try_step(_step("machine", "machine", limit_s=60), begin + options.seconds, "")
            run.run(options.only, options.call)
        finally:
            run.stop()
            for process in compiling:
                _end(process)
    text = page.make((options.out / "results.jsonl").read_text().splitlines())
    (options.out / "one_gpu.md").write_text(text)
    print(f"{time.monotonic() - begin:.0f} s; {options.out}/results.jsonl, log.txt and one_gpu.md")


if __name__ == "__main__":
    main()
