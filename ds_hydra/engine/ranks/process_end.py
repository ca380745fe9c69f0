"""How the process of a rank ends: asked to by SIGTERM, with an error that nobody catches, or with
its work done.

[Note: The sentence comes last]
An error of ds_hydra says in one sentence what to change. Raised on 64 ranks it would stand among 64
tracebacks, through libraries in which its reader has nothing to look for. So one rank prints the
lines of the user's own code and the sentence, and ends; the others end after it without a word, or
by their launcher. Only a rank that cannot know whether the others fail alike speaks after a pause.
Who has lost a rank says so on every rank, after its lines of the user's code: hosts have logs of
their own.

[Note: Work that outlives its wait]
torch's gloo threads drop the tensors of a collective after its `wait` has returned, and need
Python's lock for that. In an interpreter that is already finalizing they cannot have it: the
process aborts ("terminate called without an active exception"), though all its work is done. A
script that ends right after `save_checkpoint` may meet this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist

from ds_hydra.engine.ranks.agreement import is_raised_on_all, rank_that_says
from ds_hydra.engine.ranks.watchdog import find_loss_behind
from ds_hydra.errors import HydraError, RankLostError


class StopRequest:
    """Whether SIGTERM has arrived. Installs its handler if `enabled`, in the main thread; else
    SIGTERM ends.
    """

    def __init__(self, enabled: bool) -> None:
        self.is_set = False
        if enabled and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True


_PATIENCE_S = 5.0
"""Until a rank speaks itself; launchers end the others within a second of the first that failed."""

_LIBRARIES = tuple(
    str(path)
    for path in (
        Path(__file__).parents[2],
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@functools.cache
def end_with_the_sentence() -> None:
    """From now on an error of ds_hydra that nobody catches, or a rank that is lost, ends this
    process as the note above says. Repeating it changes nothing.
    """
    sys.excepthook = functools.partial(_end, sys.excepthook)


def _end(
    otherwise: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if (loss := find_loss_behind(error)) is not None:
        error = loss.with_traceback(trace)
    if not isinstance(error, HydraError):
        otherwise(kind, error, trace)
        return
    speaker = own_rank() if isinstance(error, RankLostError) else rank_that_says(error)
    if own_rank() != speaker:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE_S)
        if is_raised_on_all(error):
            return
        speaker = own_rank()
    names_itself = not speaker or isinstance(error, RankLostError)
    text = describe_error(error, "" if names_itself else f"rank {speaker}: ")
    print(text, file=sys.stderr, flush=True)
    _tell_torchrun(text.splitlines()[-1])


def own_rank() -> int:
    """Of the process group, before there is one of the launcher."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def describe_error(error: HydraError, who: str = "") -> str:
    """The user's own lines that led to `error`, also those of what caused it; then its sentence."""
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None and not isinstance(error, RankLostError):
        causes.append(causes[-1].__cause__)
    parts = []
    for one in reversed(causes):
        lines = [
            frame
            for frame in traceback.extract_tb(one.__traceback__)
            if not frame.filename.startswith((*_LIBRARIES, "<frozen"))
        ]
        if lines:
            parts += ["Traceback (most recent call last, lines of libraries left out):\n"]
            parts += traceback.format_list(lines)
        if lines and one is not error:
            parts += [*traceback.format_exception_only(one), "\n"]
    return "".join([*parts, f"{type(error).__name__}: {who}{error}"])


def _tell_torchrun(sentence: str) -> None:
    """torchrun ends with a table in which this file of its own takes the place of "enable
    traceback".
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": sentence, "extraInfo": extra}})
            )


_PAUSE_S = 0.2
"""Threads that only wait for Python's lock get it within milliseconds."""


@functools.cache
def let_collectives_end_at_exit() -> None:
    """From now on this process gives its other threads time before it ends. Repeating it changes
    nothing.
    """
    atexit.register(time.sleep, _PAUSE_S)
