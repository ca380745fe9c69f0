"""Memory of the host: kept when freed, because an iteration allocates the same tensors again;
measured; and copied to a device without waiting for it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h

_USER_CHOICES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> bool:
    """Tell glibc not to give freed blocks back to the system, nor to map large ones one by one.

    A tensor of some MB is otherwise mapped, touched page by page, and unmapped in every layer.
    Returns whether it was done: not where another C library is in use, nor where the user has
    chosen through the environment. Holds for the process, which keeps the memory of its peak until
    it ends.
    """
    if any(name in os.environ for name in _USER_CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, -1)])


def process_bytes(field: str) -> int:
    """A line of Linux' /proc/self/status, such as "VmRSS" or "VmHWM" (its peak), in bytes; 0
    elsewhere.
    """
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else 0


def forget_peak() -> None:
    """Let "VmHWM" start again from what is in use now, where the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, in the order of the current stream; the host does not wait for the
    copy.
    """
    if device.type == "cpu":
        return tensor
    return get_accelerator().pin_memory(tensor).to(device, non_blocking=True)


def available_bytes() -> float:
    """Memory that this host, or the control group of this process, has left; infinite where neither
    says.
    """
    found = [free for free in (_free_of_host(), _free_of_group()) if free is not None]
    return min(found, default=float("inf"))


def _free_of_host() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return float(free[0]) * 1024 if free else None


def _free_of_group() -> float | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        return float(limit) - float(used)
    except (OSError, ValueError):  # no limit reads "max"
        return None
