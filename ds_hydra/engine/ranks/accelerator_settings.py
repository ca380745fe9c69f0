"""Whether the settings of `ds_hydra.environment` were in force when the device started, and what is
off where they were not.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.engine.ranks.host_memory import to_device
from ds_hydra.environment import (
    in_the_way_of_overlap,
    is_device_started,
    missing_for_overlap,
    set_accelerator_environment,
)
from ds_hydra.errors import HydraConfigError

logger = logging.getLogger(__name__)


def prepare_accelerator() -> None:
    """Settings of CUDA for this process, before its first use. Not collective.

    Raises HydraConfigError for CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM wants it: with one
    queue a kernel of a collective holds up the computation that another rank waits for.
    """
    if get_accelerator().device_name() != "cuda":
        return
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise HydraConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, which lets collectives of several threads wait for each other for "
            "ever; unset it, or set it to 32"
        )
    set_accelerator_environment(os.environ, is_started=is_device_started())


def use_deterministic_kernels(device: torch.device) -> None:
    """From now on kernels of this process add in one order on `device`; a CPU's always do. Not
    collective.
    """
    if device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS warns
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it


def find_overlap_problem(device: torch.device) -> str:
    """Why exchanges beside computation could hang on the CUDA device of this process; "" where they
    could not.
    """
    if device.type != "cuda":
        return ""
    if forbidden := in_the_way_of_overlap(os.environ):
        return (
            f"{' and '.join(forbidden)} stops threads that post collectives beside each other, so link.overlap is "
            "off; unset it to train, it is for debugging"
        )
    missing = missing_for_overlap(os.environ)
    if not missing:
        return ""
    names = (setting.partition("=")[0] for setting in missing)
    chosen = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in names)
    return (
        f"the device started with {chosen}, with which exchanges beside computation can hang, so link.overlap is off; "
        f"export {' '.join(missing)} in what starts the ranks, or import ds_hydra before the device is used first"
    )


def can_overlap(device: torch.device) -> bool:
    """Whether exchanges may run beside computation: the settings were in force on all ranks. Warns
    where they were not. Collective over all ranks.
    """
    if device.type != "cuda":
        return True
    problem = find_overlap_problem(device)
    rows = gather_rows(to_device(torch.tensor([bool(problem)]).long(), device)).flatten().tolist()
    if any(rows) and dist.get_rank() == rows.index(1):
        logger.warning("rank %d: %s", dist.get_rank(), problem)
    return not any(rows)


def overlap_where_safe(config: HydraConfig, device: torch.device) -> HydraConfig:
    """`config`, with `link.overlap` off where `can_overlap` says no. Collective over all ranks."""
    if not config.link.overlap or can_overlap(device):
        return config
    link = config.link.model_copy(update={"overlap": False})
    return config.model_copy(update={"link": link})
