"""Compilation of the hot loops of planner and proposal by numba.

A function marked `compiled` uses only scalars, numpy arrays and loops, so plain Python would give
the same numbers (no fast-math, no threads). Compiled code is cached beside the source. It is
compiled anew where a file of what it calls or a constant that it reads has changed; numba alone
checks only the file of the function itself.

[Note: A cache that heals]
numba unpickles whatever its cache holds, and would run garbled machine code. So every cached file
ends with its digest here; one that is damaged, cannot be read or written, or names a module that
has moved, is compiled anew.
"""

from __future__ import annotations

# mypy: allow-untyped-calls
import contextlib
import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

from ds_hydra.environment import is_first_on_host

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


@functools.cache
def _say_once(name: str) -> None:
    """Log the first compilation; on one rank of a host, as all wait for the same files."""
    level = logging.WARNING if is_first_on_host() and not _has_said else logging.DEBUG
    _has_said.append(name)
    text = (
        "compiling %s and what it calls, once after an installation (the planner: up to a minute)"
    )
    logger.log(level, text, name)


_has_said: list[str] = []


_SAID_UNCACHED = "DS_HYDRA_SAID_UNCACHED"
"""Name of an environment variable, which planning processes inherit."""


def say_uncached() -> None:
    """Warn once that every start compiles anew; on one rank of a host."""
    if is_first_on_host() and _SAID_UNCACHED not in os.environ:
        os.environ[_SAID_UNCACHED] = "1"
        logger.warning(
            "no folder for compiled code can be written, so every process compiles the planner anew (up to a minute); "
            "set NUMBA_CACHE_DIR to one that can"
        )


class HealingCache(FunctionCache):
    """Cache of the code of one `compiled` function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._function = function
        del self._cache_file  # which does not know what the function calls

    @functools.cached_property
    def _cache_file(self) -> CheckedFiles:  # type: ignore[override]
        """Index and code, from the first call on: all that is called is imported by then."""
        stamp = _source_stamp(self._function)
        return CheckedFiles(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Compiled code of the cache; None, and a word to the user, where there is none yet."""
        found = super().load_overload(sig, target_context)
        if found is None:
            _say_once(self._name)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save compiled code, unless the disk is full or the folder gone."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


class CheckedFiles(IndexDataCacheFile):
    """Index and code of one function; content that does not end with its digest is not there."""

    def _dump(self, obj: Any) -> bytes:
        body: bytes = super()._dump(obj)
        return body + hashlib.sha256(body).digest()

    def _load_index(self) -> dict[Any, str]:
        version = pickle.dumps(self._version, protocol=-1)  # as numba begins the file
        try:
            content = Path(self._index_path).read_bytes()
        except OSError:
            return {}
        if not content.startswith(version) or not _is_whole(content[len(version) :]):
            return {}
        try:
            index: dict[Any, str] = super()._load_index()
        except ImportError:  # it names types of a module that has moved since
            return {}
        return index

    def _load_data(self, name: str) -> Any:
        if not _is_whole(Path(self._data_path(name)).read_bytes()):
            raise OSError(f"{name} is damaged")  # for numba as if it had been removed
        try:
            return super()._load_data(name)
        except ImportError as error:  # code of a callee whose module has moved since
            raise OSError(f"{name} is out of date: {error}") from error


def _source_stamp(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return time and size of the files of `function` and of what it calls, and the constants that
    they read: numba compiles all of them into one.
    """
    files: set[str] = set()
    constants: set[str] = set()
    reached, open_ = {function}, [function]
    while open_:
        own = open_.pop()
        files.add(own.__code__.co_filename)
        for name in own.__code__.co_names:
            value = own.__globals__.get(name)
            callee = getattr(value, "py_func", None)
            if callee is not None and callee not in reached:
                reached.add(callee)
                open_.append(callee)
            elif isinstance(value, int | float | str | tuple):
                constants.add(f"{name} = {value!r}")
    stats = [Path(file).stat() for file in sorted(files)]
    return *((stat.st_mtime, stat.st_size) for stat in stats), *sorted(constants)


def _is_whole(content: bytes) -> bool:
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function`, compiled at its first call."""
    dispatcher = njit(nogil=True)(function)
    try:
        dispatcher._cache = HealingCache(function)  # type: ignore[attr-defined]
    except RuntimeError:
        say_uncached()
    return cast(Callable[Parameters, Result], dispatcher)
