"""Plans that are ready when the engine asks for them: planning processes some iterations ahead of
training.

Workers are started with `python -m ds_hydra.sampler._worker` and not forked or spawned through
multiprocessing: a fork of a process that holds CUDA and NCCL is not safe, and `spawn` imports the
user's script, and with it torch, once more in every worker.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, TimeoutError  # not the builtin one before Python 3.11
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import ds_hydra
from ds_hydra import errors
from ds_hydra.sampler._worker import read_message, write_message
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.iteration import plan_task
from ds_hydra.sampler.planner.planner_settings import PlanningTask
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS, Corrections

logger = logging.getLogger(__name__)

LOOKAHEAD = 4
"""Iterations planned ahead of training: they absorb a slow plan now and then, and cost some KB."""
_MAX_ATTEMPTS = 3
"""Workers that one iteration may lose before it is planned in line (where an exception has a
traceback), and iterations in a row that may lose as many before all that come are.
"""
_CLOSE_TIMEOUT_S = 2.0
_START_S = 60.0
"""Longest that a planning process may take to start and to plan for the first time before it counts
as hung.
"""


class _Job(NamedTuple):
    """A batch, the corrections that it is planned with, and the worker's future reply, empty where
    it kept dying.
    """

    batch: GlobalBatch
    corrections: Corrections
    reply: Future[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The request to a planning process."""
        return self.batch.to_json() | {"corrections": self.corrections.to_json()}

    def planned(self, reply: Mapping[str, Any], waited_ms: float) -> dict[str, Any]:
        """The `PlannedIteration` that a planning process has made, as a document."""
        return {
            **reply,
            "waited_ms": waited_ms,
            "source": "worker",
            "corrections": self.corrections.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedIteration:
    """A plan, its cost, and the time that the caller waited for it.

    `source`: "worker", "inline" (no workers, or they died of this iteration), or "deadline" (the
    worker was late, so this is the heuristic plan).
    """

    plan: IterationPlan
    planning_ms: float
    waited_ms: float
    source: Literal["worker", "inline", "deadline"]
    corrections: Corrections = NO_CORRECTIONS
    """Corrections that the plan was made with."""

    def to_json(self) -> dict[str, Any]:
        """The planned iteration as a JSON document; `from_json` restores an equal one."""
        return {
            "plan": self.plan.to_json(),
            "planning_ms": self.planning_ms,
            "waited_ms": self.waited_ms,
            "source": self.source,
            "corrections": self.corrections.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PlannedIteration:
        """The planned iteration in a document written by `to_json`."""
        plan = IterationPlan.from_json(document["plan"])
        corrections = Corrections.from_json(document["corrections"])
        return cls(**{**document, "plan": plan, "corrections": corrections})


class BackgroundPlanner:
    """Plans submitted iterations in `num_workers` processes; only rank 0 has one.

    `submit` iterations, then `get` each once, in any order. Plans do not depend on the
    number of workers, unless one is later than `deadline_s`, counted from the call of `get`: then
    the heuristic plan (no refinement) is made in line and a warning logged. A worker that dies is
    replaced, what it worked on is planned again, and a warning logged; one that hangs over a late
    plan is ended. `close` ends all workers; it is called at exit as well.
    """

    def __init__(
        self,
        task: PlanningTask,
        *,
        num_workers: int = 1,
        deadline_s: float = 30.0,
    ) -> None:
        self.task = task
        self.deadline_s = deadline_s
        self.num_restarts = 0
        self.num_late = 0
        self._num_lost = 0
        """Iterations in a row that lost all their workers."""
        self._pending: dict[int, _Job] = {}
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_closed = False
        self._owner = os.getpid()
        self._workers = [_Worker(self.task) for _ in range(num_workers)]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(worker,), name=f"ds_hydra-planner-{i}", daemon=True
            )
            for i, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run now."""
        return tuple(pid for worker in self._workers if (pid := worker.pid) is not None)

    def submit(self, batch: GlobalBatch, corrections: Corrections = NO_CORRECTIONS) -> None:
        """Hands `batch` to the next free worker; returns at once."""
        if self._is_closed:
            raise RuntimeError("the background planner is closed")
        job = self._pending[batch.iteration] = _Job(batch, corrections, Future())
        if self._workers:
            self._queue.put(job)

    def get(self, iteration: int) -> PlannedIteration:
        """The plan of a submitted iteration, once. Raises the error that planning raised, in this
        process.
        """
        start = time.perf_counter()
        job = self._pending[iteration]
        reply, is_late = {}, False
        if self._workers:
            try:
                reply = job.reply.result(self.deadline_s)
            except TimeoutError:
                is_late = True
        del self._pending[iteration]
        if "error" in reply:
            raise getattr(errors, reply["error"]["type"])(reply["error"]["message"])
        if "plan" not in reply:
            return self._plan_inline(job, start, is_late=is_late)
        return PlannedIteration.from_json(job.planned(reply, _elapsed_ms(start)))

    def peek(self, iteration: int) -> dict[str, Any] | None:
        """The result of `get` as a document, where a worker has made it. None where `get` would
        wait, plan in line or raise.
        """
        job = self._pending.get(iteration)
        if job is None or not job.reply.done() or "plan" not in (reply := job.reply.result()):
            return None
        return job.planned(reply, waited_ms=0.0)

    def _plan_inline(self, job: _Job, start: float, *, is_late: bool) -> PlannedIteration:
        task = self.task
        if is_late:
            self.num_late += 1
            self._end_hung_workers()
            logger.warning(
                "iteration %d: no plan after %.1f s, training with the heuristic plan; raise "
                "hydra.planner.num_workers",
                job.batch.iteration,
                self.deadline_s,
            )
            task = replace(task, settings=task.settings.heuristic())
        planning_start = time.perf_counter()
        plan = plan_task(task, job.batch, job.corrections)
        return PlannedIteration(
            plan=plan,
            planning_ms=_elapsed_ms(planning_start),
            waited_ms=_elapsed_ms(start),
            source="deadline" if is_late else "inline",
            corrections=job.corrections,
        )

    def _end_hung_workers(self) -> None:
        """End workers that are busy with a plan nobody waits for any more; the next plan starts
        others.

        A worker that has not answered yet has `_START_S` for its start, compilation included.
        """
        for worker in self._workers:
            iteration, seconds = worker.busy
            is_awaited = iteration is None or iteration in self._pending
            if not is_awaited and (worker.has_answered or seconds > _START_S):
                worker.kill()

    def _serve(self, worker: _Worker) -> None:
        """Feeds one worker until the queue hands out None."""
        while (job := self._queue.get()) is not None:
            if job.batch.iteration in self._pending:  # else fetched by its deadline already
                job.reply.set_result(self._ask(worker, job))

    def _ask(self, worker: _Worker, job: _Job) -> dict[str, Any]:
        """The reply of `worker`, started again when it dies; an empty one if it keeps dying."""
        if self._num_lost >= _MAX_ATTEMPTS:
            return {}
        for _ in range(_MAX_ATTEMPTS):
            reply = worker.plan(job)
            if reply is not None or self._is_closed:
                self._num_lost = 0
                return reply or {}
            self.num_restarts += 1
            logger.warning(
                "a planning process ended (%s) while planning iteration %d; starting another one",
                worker.exit_text,
                job.batch.iteration,
            )
            if job.batch.iteration not in self._pending:
                return {}  # fetched by its deadline
        self._num_lost += 1
        if self._num_lost == _MAX_ATTEMPTS:
            logger.warning(
                "planning processes end again and again: plans are made in line from now on"
            )
        return {}

    def close(self) -> None:
        """Ends all workers; submitted batches are forgotten. May be called more than once."""
        # A fork inherits what runs at exit, and may not end its parent's workers.
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        # The registry would keep this planner, and its profile, until the process ends.
        atexit.unregister(self.close)
        for _ in self._threads:
            self._queue.put(None)
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> BackgroundPlanner:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _Worker:
    """One planning process, started at the first batch and again whenever it has died."""

    def __init__(self, task: PlanningTask) -> None:
        self._task = task
        self._is_told = False
        """Whether the running process has the task."""
        self.has_answered = False
        """Whether the running process has made a plan."""
        self._busy: tuple[int, float] | None = None
        """Iteration that is being planned, and since when."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id, None while it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def exit_text(self) -> str:
        """Reason of the process's end."""
        process = self._process
        return "could not be started" if process is None else f"exit code {process.wait()}"

    def plan(self, job: _Job) -> dict[str, Any] | None:
        """The worker's reply; None if it died or could not be started."""
        self._busy = job.batch.iteration, time.monotonic()
        try:
            process = self._start()
            if process is None or process.stdin is None or process.stdout is None:
                return None
            if not self._is_told:
                write_message(process.stdin, {"task": self._task.to_json()})  # type: ignore[arg-type]
                self._is_told = True
            write_message(process.stdin, job.to_json())  # type: ignore[arg-type]
            reply = read_message(process.stdout)  # type: ignore[arg-type]
            self.has_answered = reply is not None
            return reply
        except (OSError, ValueError):  # ValueError: the pipe was closed by `close`
            return None
        finally:
            self._busy = None

    @property
    def busy(self) -> tuple[int | None, float]:
        """Iteration that is being planned, if any, and for how many seconds."""
        busy = self._busy
        return (None, 0.0) if busy is None else (busy[0], time.monotonic() - busy[1])

    def kill(self) -> None:
        """Ends the process at once; `plan` notices, and starts another one next time."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._is_closed or self.pid is not None:
                return self._process
            root = str(Path(ds_hydra.__file__).parent.parent)
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ds_hydra.sampler._worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
            self._is_told = False
            self.has_answered = False
            return self._process

    def close(self) -> None:
        """Ends the process: closes its stdin, and kills it if it is busy for longer than a
        moment.
        """
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # what was buffered for a dead process


def _elapsed_ms(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
