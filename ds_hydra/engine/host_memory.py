"""Keeps memory that a CPU rank frees: an iteration allocates the same tensors again and again."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h

_USER_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tell glibc not to give freed blocks back to the system, nor to map large ones one by one.

    A tensor of some MB is otherwise mapped, touched page by page, and unmapped in every layer. Returns whether it
    was done: not where another C library is in use, nor where the user has chosen through the environment. Holds
    for the process, which keeps the memory of its peak until it ends.
    """
    if any(name in os.environ for name in _USER_CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, -1)])
