"""Settings that CUDA, its allocator and NCCL read from the environment when they start; set when
ds_hydra is imported, and without importing torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping

WANTED = {
    # Kernels of the link's stream and of communicators could queue behind computation with fewer;
    # on an H200 31 streams ran side by side with the default, too.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A kernel that is loaded at its first launch waits for those that run, collectives among them:
    # exchanges of several threads hung with LAZY on an H200. (cuBLAS loads at the first launch with
    # both.)
    "CUDA_MODULE_LOADING": "EAGER",
    # 4,093 launches before a thread waits for its stream in place of 1,021, measured on an H200;
    # others do not wait with it.
    "CUDA_SCALE_LAUNCH_QUEUES": "4x",
    # Slices and micro-batches have other sizes in every iteration.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Variables set where the user has not chosen; measured in docs/benchmarks/one_gpu.md."""

_OVERLAP_NEEDS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
_OVERLAP_FORBIDS = {
    # A message would wait for an exchange that was launched before it, and so for other stages.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    # A launch waits for its kernel, and so for other ranks.
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # Messages are not coalesced: each pair of ranks gets a communicator of its own.
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
_OLD_NAMES = {"PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF",)}


_TASKS = "SLURM_STEP_TASKS_PER_NODE"
"""Slurm's variable for the tasks of each node, such as "8(x4)"."""


def _of_slurm(name: str) -> str | None:
    """Slurm's variable where plain srun has started this process, and neither torchrun nor
    DeepSpeed, which tell more.
    """
    is_launched = "LOCAL_WORLD_SIZE" in os.environ or "LOCAL_SIZE" in os.environ
    return None if is_launched else os.environ.get(name)


def is_first_on_host() -> bool:
    """Whether this process goes first among those of its host. Where srun gives each task a device
    all of them may have LOCAL_RANK 0.
    """
    return (_of_slurm("SLURM_LOCALID") or os.environ.get("LOCAL_RANK", "0")) == "0"


def count_ranks_here(num_ranks: int) -> int:
    """Ranks of this host, all `num_ranks` where no launcher says."""
    launched = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    tasks = _of_slurm(_TASKS)
    return int(launched or (tasks and re.findall(r"\d+", tasks)[0]) or num_ranks)


def count_own_cores(num_ranks: int) -> int:
    """Cores for this process alone, 1 or more: those that it may use over the ranks of its host,
    `num_ranks` where no launcher says; all of them where Slurm gives each task its own.
    """
    cores = len(os.sched_getaffinity(0))
    if _of_slurm(_TASKS) and cores < (os.cpu_count() or cores):
        return cores
    return max(1, cores // count_ranks_here(num_ranks))


def has_read(name: str) -> bool:
    """Whether a setting of `WANTED` is in force already, whatever it was when it was read: torch
    reads its own when it first uses a device, CUDA's driver the others when it starts, for which
    `torch.cuda.is_available()`, which `import deepspeed` calls, is enough.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # None while torch itself is being imported
    is_in_use = cuda is not None and bool(cuda.is_initialized())
    return is_in_use or (not name.startswith("PYTORCH") and module_loading() != "")


def module_loading() -> str:
    """Mode in which CUDA's driver loads kernels in this process, "EAGER" or "LAZY". "" where it has
    not started, and so not read its settings.
    """
    mode = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        code = driver.cuModuleGetLoadingMode(ctypes.byref(mode))
    except (OSError, AttributeError):  # nobody has loaded it, or it is older than CUDA 11.7
        return ""
    return "" if code else {1: "EAGER"}.get(mode.value, "LAZY")


def set_accelerator_environment(
    environment: MutableMapping[str, str], is_late: Callable[[str], bool] = has_read
) -> list[str]:
    """Set `WANTED` in `environment` where nothing is chosen; returns what comes too late
    (`is_late`), one `NAME=value` each. Such a setting stays out of `environment`: what is there was
    in force when the device started.
    """
    late = []
    for name, value in WANTED.items():
        if any(key in environment for key in (name, *_OLD_NAMES.get(name, ()))):
            continue
        if is_late(name):
            late.append(f"{name}={value}")
        else:
            environment[name] = value
    return late


def missing_for_overlap(environment: Mapping[str, str]) -> list[str]:
    """Variables that exchanges beside computation need on a CUDA device and `environment` lacks,
    one `NAME=value` each.

    >>> missing_for_overlap({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "EAGER"})
    ['CUDA_DEVICE_MAX_CONNECTIONS=32']
    """
    return [f"{n}={WANTED[n]}" for n in _OVERLAP_NEEDS if environment.get(n) != WANTED[n]]


def in_the_way_of_overlap(environment: Mapping[str, str]) -> list[str]:
    """Variables of `environment` with which exchanges cannot run beside computation, one
    `NAME=value` each.

    >>> in_the_way_of_overlap({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO"})
    ['CUDA_LAUNCH_BLOCKING=1']
    """
    return [f"{n}={value}" for n, value in _OVERLAP_FORBIDS.items() if environment.get(n) == value]


def prepare() -> None:
    """Set up the process for `import ds_hydra`: nothing harms where no CUDA device is used."""
    set_accelerator_environment(os.environ)
    logging.getLogger("torch.utils._pytree").addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a user can do anything about a warning: not of classes of torchao, which transformers
    and PEFT import.
    """
    return "is an Enum subclass" not in record.getMessage()
