"""Progress on a terminal: a bar. In a file, where a bar would be drawn again and again: a line for
every tenth.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

_LONGEST_LINE = 160


class _WhereNobodyListens(logging.StreamHandler[Any]):
    """Writes to stderr as long as the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


def show_notes(level: int | None) -> None:
    """Let what the package notes be read where the program has set up no logging: from INFO on at
    the first rank (what is proposed, and which times are estimates), warnings at the others. With
    `level`, from there on at every rank. Not collective.
    """
    package = logging.getLogger("ds_hydra")
    if level is not None:
        package.setLevel(level)
    elif package.level == logging.NOTSET and not logging.root.handlers:
        is_first = os.environ.get("RANK", "0") == "0"
        package.setLevel(logging.INFO if is_first else logging.WARNING)
    if not package.handlers:
        handler = _WhereNobodyListens(sys.stderr)
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] ds_hydra: %(message)s")
        )
        package.addHandler(handler)


def is_terminal(stream: Any) -> bool:
    """Return whether `stream` is a terminal. It may be any object that programs put in place of
    `sys.stderr`, also None, a closed file or one without `isatty`.
    """
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class Progress(tqdm):
    """tqdm on stderr; without a terminal it prints a line whenever another tenth is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("file", sys.stderr)
        self._is_looked_at = is_terminal(kwargs["file"])
        self._tenths = 0
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Override of tqdm: a line where nobody looks on."""
        if self._is_looked_at:
            super().display(msg, pos)
        elif self.total and 10 * self.n // self.total > self._tenths:
            self._tenths = 10 * self.n // self.total
            # A full disk, a pipe whose reader is gone; a file that is closed; None
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self.fp.write(f"{str(self)[:_LONGEST_LINE]}\n")
                self.fp.flush()

    def update(self, n: float | None = 1) -> bool | None:
        """Override of tqdm: no tenth is left out because it came soon after the last."""
        drawn = super().update(n)
        if not self.disable and not self._is_looked_at:
            self.display()
        return drawn

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """Override of tqdm: there is no bar to take away where nobody looks on."""
        if self._is_looked_at:
            super().clear(*args, **kwargs)

    def close(self) -> None:
        """Override of tqdm, without its last line where nobody looks on."""
        if self._is_looked_at or self.disable:
            super().close()
        else:
            self.disable = True
            self._decr_instances(self)


@contextlib.contextmanager
def no_bars_in_files() -> Iterator[None]:
    """The bars of the libraries datasets and, where it is loaded, transformers are drawn only where
    there is a terminal.
    """
    import datasets

    turn_on: list[Callable[[], None]] = []
    if not is_terminal(sys.stderr):
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            turn_on.append(datasets.enable_progress_bars)
        of_transformers = sys.modules.get("transformers.utils.logging")
        if of_transformers is not None and of_transformers.is_progress_bar_enabled():
            of_transformers.disable_progress_bar()
            turn_on.append(of_transformers.enable_progress_bar)
    try:
        yield
    finally:
        for turn in turn_on:
            turn()


@functools.cache
def say_once(note: str) -> None:
    """Log `note` on the first rank, once in a process."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(note)
