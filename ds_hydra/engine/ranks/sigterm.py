"""SIGTERM as a request to save a checkpoint, while an engine wants that.

[Note: SIGTERM]
A process has one handler of SIGTERM, and it is not ours alone: submitit requeues the job in its
own. The first engine that saves on SIGTERM takes the handler's place, and the last one to end gives
it back. Meanwhile a signal is only noted, and all ranks look at the notes together: after each
iteration and each batch of an evaluation, and at the end of training. The handler that was there is
called once the checkpoint is written, because it may end the process or hand the job back to its
scheduler. It also gets a signal that no engine has answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ds_hydra.engine.ranks.agreement import gather_flags

logger = logging.getLogger(__name__)


class Sigterm:
    """The handler of SIGTERM while any watcher is there; one of each process, `SIGTERM`."""

    def __init__(self) -> None:
        self._watchers: weakref.WeakSet[object] = weakref.WeakSet()
        self._before: Any = signal.SIG_DFL
        self._is_installed = self._is_set = self._is_answered = False

    def watch(self, watcher: object, device: torch.device) -> None:
        """Note SIGTERM for `watcher` from now on. Warns where no handler can be set, which Python
        allows in the main thread alone. Collective over all ranks.
        """
        # A signal that earlier watchers have dealt with asks nothing of new ones
        if not self._watchers:
            self._is_set = self._is_answered = False
        if not self._is_installed and _is_main_thread():
            # None: a handler that was not set from Python, which cannot be called from here
            self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL
            self._is_installed = True
        self._watchers.add(watcher)
        # One rank speaks for all that lack a handler
        flags = gather_flags(not self._is_installed, device)
        ranks = [rank for rank, is_missing in enumerate(flags) if is_missing]
        if ranks and ranks[0] == dist.get_rank():
            logger.warning(
                "SIGTERM will not be noticed on rank %s, and hydra.faults.save_on_sigterm saves nothing there: the "
                "engine starts in thread %r, and Python sets handlers of signals in the main thread alone; start it "
                "there",
                ", ".join(map(str, ranks)),
                threading.current_thread().name,
            )

    def is_watching(self, watcher: object) -> bool:
        """Whether SIGTERM is noted for `watcher`."""
        return watcher in self._watchers

    def is_asked(self, watcher: object) -> bool:
        """Whether SIGTERM has arrived while `watcher` watched."""
        return self._is_set and self.is_watching(watcher)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count SIGTERM as answered from now on; at the end call the handler that was there, if
        this rank got the signal.
        """
        self._is_answered = True
        try:
            yield
        finally:
            # SIG_DFL and SIG_IGN are no functions: the process ends by itself after its checkpoint
            if self._is_set and callable(self._before):
                self._before(signal.SIGTERM, None)

    def leave(self, watcher: object) -> None:
        """Forget `watcher`. After the last one SIGTERM has its former handler again; an unanswered
        one is raised anew.
        """
        self._watchers.discard(watcher)
        if self._watchers or not self._is_installed:
            return
        if _is_main_thread():
            self._restore()
        if self._is_set and not self._is_answered:
            self._is_set = False
            signal.raise_signal(signal.SIGTERM)

    def forget(self) -> None:
        """Forget all watchers, in a process that was forked from theirs."""
        self._watchers.clear()
        if self._is_installed:
            self._restore()

    def _restore(self) -> None:
        # One that was set since then may call this one
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
        self._is_installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._watchers:
            self._is_set = True
        elif not callable(self._before):
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)
        else:
            before, self._before = self._before, signal.SIG_IGN  # which may call this one
            try:
                before(number, frame)
            finally:
                self._before = before


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


SIGTERM = Sigterm()
os.register_at_fork(after_in_child=SIGTERM.forget)
