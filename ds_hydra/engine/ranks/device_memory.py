"""What a rank says when the memory of its device is used up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from deepspeed.accelerator import get_accelerator

from ds_hydra.errors import HydraConfigError

_SHARE = 0.9
"""Of what did not suffice."""


_MULTIPROCESSORS = 132
"""Of a device that is not at hand: those of an H100."""


def count_multiprocessors() -> int:
    """Those of this process's CUDA device; of an H100 where there is none."""
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
    """While open, a device without memory raises HydraConfigError with a value below `limit_bytes`,
    or below what torch could have of the device; the watchdog tells the other ranks.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        accelerator = get_accelerator()
        reached = accelerator.memory_reserved() + accelerator.available_memory()
        bound = reached if limit_bytes is None else min(reached, limit_bytes)
        raise HydraConfigError(
            f"the device has no memory left: torch has {accelerator.memory_reserved() / 1e9:.1f} GB of the "
            f"{reached / 1e9:.1f} GB that it can have, and hydra.memory_limit_bytes is {limit_bytes}; set "
            f"hydra.memory_limit_bytes to {int(_SHARE * bound)}, for which plans hold less at a time "
            f"({str(error).splitlines()[0][:200]})"
        ) from error
