"""Settings that CUDA, its allocator and NCCL read from the environment when they start."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

import torch
from deepspeed.accelerator import get_accelerator

from ds_hydra.errors import HydraConfigError

logger = logging.getLogger(__name__)

WANTED = {
    # Kernels of the link's stream and of communicators queue behind computation with fewer.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A kernel that is loaded at its first launch waits for those that run, collectives among them.
    "CUDA_MODULE_LOADING": "EAGER",
    # Slices and micro-batches have other sizes in every iteration.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""What is set where the user has not chosen. Nobody has measured it with ds_hydra: the first is the
number of hardware queues, the others follow from the documentation of CUDA and torch."""

_OLD_NAMES = {"PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF",)}


def set_accelerator_environment(
    environment: MutableMapping[str, str], *, is_started: bool
) -> list[str]:
    """Set `WANTED` in `environment` where nothing is chosen; returns what comes too late because
    the device has been used already (`is_started`), one `NAME=value` each. Not collective.

    Raises HydraConfigError for CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM wants it: with one
    queue a kernel of a collective holds up the computation that another rank waits for.
    """
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise HydraConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, which lets collectives of several threads wait for each other for "
            "ever; unset it, or set it to 32"
        )
    late = []
    for name, value in WANTED.items():
        if any(key in environment for key in (name, *_OLD_NAMES.get(name, ()))):
            continue
        if is_started:
            late.append(f"{name}={value}")
        else:
            environment[name] = value
    return late


def prepare_accelerator() -> None:
    """Settings of CUDA for this process, before its first use; says what comes too late. Not
    collective. Raises HydraConfigError as `set_accelerator_environment`.
    """
    if get_accelerator().device_name() != "cuda":
        return
    late = set_accelerator_environment(os.environ, is_started=torch.cuda.is_initialized())
    if late:
        logger.warning("the device was used before ds_hydra; start with %s", " ".join(late))
