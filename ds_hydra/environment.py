"""Settings that CUDA, its allocator and NCCL read from the environment when they start; set when
ds_hydra is imported, and without importing torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

WANTED = {
    # Kernels of the link's stream and of communicators queue behind computation with fewer.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A kernel that is loaded at its first launch waits for those that run, collectives among them.
    "CUDA_MODULE_LOADING": "EAGER",
    # A thread whose launch queue is full waits, and may hold what another thread launches with.
    "CUDA_SCALE_LAUNCH_QUEUES": "4x",
    # Slices and micro-batches have other sizes in every iteration.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""What is set where the user has not chosen. Nobody has measured it with ds_hydra: the first is the
number of hardware queues, the others follow from the documentation of CUDA and torch."""

_OVERLAP_NEEDS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
_OVERLAP_FORBIDS = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # takes one order of launches, which two threads do not have
    # A thread that launches waits for its kernel, and so for other ranks.
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # Messages are not coalesced: each pair of ranks gets a communicator of its own.
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
_OLD_NAMES = {"PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF",)}


def is_device_started() -> bool:
    """Whether torch has begun to use a CUDA device in this process, which then has its settings."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # None while torch itself is being imported
    return cuda is not None and bool(cuda.is_initialized())


def set_accelerator_environment(
    environment: MutableMapping[str, str], *, is_started: bool
) -> list[str]:
    """Set `WANTED` in `environment` where nothing is chosen; returns what comes too late because
    the device has been used already (`is_started`), one `NAME=value` each. Such a setting stays out
    of `environment`: what is there was in force when the device started.
    """
    late = []
    for name, value in WANTED.items():
        if any(key in environment for key in (name, *_OLD_NAMES.get(name, ()))):
            continue
        if is_started:
            late.append(f"{name}={value}")
        else:
            environment[name] = value
    return late


def missing_for_overlap(environment: Mapping[str, str]) -> list[str]:
    """What exchanges beside computation need on a CUDA device and `environment` lacks, one
    `NAME=value` each.

    >>> missing_for_overlap({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "EAGER"})
    ['CUDA_DEVICE_MAX_CONNECTIONS=32']
    """
    return [f"{n}={WANTED[n]}" for n in _OVERLAP_NEEDS if environment.get(n) != WANTED[n]]


def in_the_way_of_overlap(environment: Mapping[str, str]) -> list[str]:
    """What `environment` sets with which two threads cannot both post collectives, one `NAME=value`
    each.

    >>> in_the_way_of_overlap({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO"})
    ['CUDA_LAUNCH_BLOCKING=1']
    """
    return [f"{n}={value}" for n, value in _OVERLAP_FORBIDS.items() if environment.get(n) == value]


def prepare() -> None:
    """What `import ds_hydra` does: nothing harms where no CUDA device is used."""
    set_accelerator_environment(os.environ, is_started=is_device_started())
