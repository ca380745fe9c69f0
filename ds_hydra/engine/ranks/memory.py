"""Memory of the host and of the device: used, free, and the error of a rank whose device has none
left. Copies to a device that nobody waits for.

[Note: Pauses of the collector]
Now and then Python's garbage collector looks at all objects that live. With transformers, DeepSpeed
and an engine these are 670,000, and it takes 0.26 s, every 100 iterations here. Each rank does so
in an iteration of its own, and all others wait for it there: of 64 ranks in most iterations. Nearly
all of these objects live as long as the engine, so after its first iterations it takes them out of
what the collector looks at, which then takes 0.3 ms. A destroyed engine is garbage: who ends one,
or makes another, puts all of them back.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.errors import HydraConfigError

_is_frozen = False
"""Whether objects were taken out by `freeze_gc`."""


def freeze_gc() -> None:
    """Freeze the garbage collector: it never looks again at objects that live now ([Note: Pauses of
    the collector]). Nothing happens where that was done, or the user has switched it off, or takes
    care of it.
    """
    global _is_frozen
    if _is_frozen or not gc.isenabled() or gc.get_freeze_count():
        return
    gc.collect()  # what is garbage now would stay
    gc.freeze()
    _is_frozen = True


def unfreeze_gc() -> None:
    """Let the collector look at everything again, if `freeze_gc` has taken something out."""
    global _is_frozen
    if _is_frozen:
        gc.unfreeze()
        gc.collect()  # left to itself it would come to the oldest objects much later
    _is_frozen = False


def process_bytes(field: str) -> int:
    """A line of Linux' /proc/self/status, such as "VmRSS" or "VmHWM" (its peak), in bytes; 0
    elsewhere.
    """
    return 1024 * (_read_number("/proc/self/status", f"{field}:") or 0)


def _read_number(path: str | Path, name: str) -> int | None:
    """Return the number behind `name` in a file of the kernel; None where there is none."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return None


def forget_peak() -> None:
    """Reset "VmHWM" to the memory in use now, where the system allows it."""
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


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file "),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
}
"""Limit, usage, and the line of memory.stat that counts files read before, which the kernel drops
when memory is wanted: of control groups by the controller's name in /proc/self/cgroup, which is
empty in version 2.
"""


def available_bytes() -> float:
    """Bytes of memory that this host and all control groups above this process have left; infinite
    where none of them says.
    """
    of_host = _read_number("/proc/meminfo", "MemAvailable:")
    # The tightest bound counts: the host's, or that of any group around this process
    found = [] if of_host is None else [1024.0 * of_host]
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found += _left_in_groups(controllers, path)
    return min(found, default=float("inf"))


def _left_in_groups(controllers: str, path: str) -> Iterator[float]:
    """Yield the bytes left in each control group from `path` up to the root that has a limit."""
    name = "memory" if "memory" in controllers.split(",") else controllers
    if name not in _GROUP_FILES:
        return
    root = Path("/sys/fs/cgroup", name)
    group = root / path.lstrip("/")  # a container may see its own group as the root alone
    for folder in (group, *group.parents):
        limit, used, dropped = _GROUP_FILES[name]
        with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
            limit_bytes, used_bytes = (float((folder / file).read_text()) for file in (limit, used))
            yield limit_bytes - used_bytes + (_read_number(folder / "memory.stat", dropped) or 0)
        if folder == root:
            return


_SHARE = 0.9
"""Share of the memory bound that the error advises as a limit."""


_MULTIPROCESSORS = 132
"""Multiprocessors of a device that is not at hand: those of an H100."""


def count_multiprocessors() -> int:
    """Multiprocessors of this process's CUDA device, or of an H100 where there is none."""
    if not torch.cuda.is_available():
        return _MULTIPROCESSORS
    device = torch.cuda.current_device()
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def outside_bytes() -> int:
    """Bytes of this process's device that are in use outside of torch's allocator: contexts,
    kernels, communicators, other processes. 0 where the device does not tell.
    """
    accelerator = get_accelerator()
    read = getattr(getattr(torch, accelerator.device_name(), None), "mem_get_info", None)
    if read is None:
        return 0
    free, total = read()
    return max(0, int(total - free - accelerator.memory_reserved()))


@contextlib.contextmanager
def naming_memory_limit(limit_bytes: int | None) -> Iterator[None]:
    """Raise HydraConfigError for a device without memory inside, with a value below `limit_bytes`,
    or below what torch could have of the device. The watchdog tells the other ranks.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        accelerator = get_accelerator()
        # What torch holds and what is free: the rest of the device is other users'
        reached = accelerator.memory_reserved() + accelerator.available_memory()
        bound = reached if limit_bytes is None else min(reached, limit_bytes)
        raise HydraConfigError(
            f"the device has no memory left: torch has {accelerator.memory_reserved() / 1e9:.1f} GB of the "
            f"{reached / 1e9:.1f} GB that it can have, and hydra.memory_limit_bytes is {limit_bytes}; set "
            f"hydra.memory_limit_bytes to {int(_SHARE * bound)}, for which plans hold less at a time "
            f"({str(error).splitlines()[0][:200]})"
        ) from error
