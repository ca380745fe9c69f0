"""How the hot loops of planner and proposal are compiled: numba where it is installed, plain Python
otherwise.

A function marked `compiled` uses only scalars, numpy arrays and loops, so both ways give the same
numbers (no fast-math, no threads). Compiled code is cached beside the source; numba checks only the
file of the function itself, so remove `__pycache__/*.nb?` after editing a compiled function that
another file calls.
See [Note: A cache that heals].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

try:
    from numba import njit

    from ds_hydra.strategy.compiled_cache import HealingCache, say_uncached

    HAS_NUMBA = True
except ImportError:  # the planner is then slow, and still right
    HAS_NUMBA = False

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function`, compiled at its first call."""
    if not HAS_NUMBA:
        return function
    dispatcher = njit(nogil=True)(function)
    try:
        dispatcher._cache = HealingCache(function)  # type: ignore[attr-defined]
    except RuntimeError:
        say_uncached()
    return cast(Callable[Parameters, Result], dispatcher)
