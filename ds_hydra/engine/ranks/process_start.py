"""What a process needs before its first engine: settings of its accelerator in force, and nothing
in its way that DeepSpeed compiles or shares between processes.

[Note: No shared memory]
DeepSpeed's all-reduce over shared memory serves inference in its own AutoTP alone. Yet every CPU
rank would compile it and keep 66 MiB in /dev/shm, beyond its end; in a container's usual 64 MiB one
rank dies of it while the others spin for ever. So it is left out from the import of the engine on,
and gloo carries all there is.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from torch.utils import cpp_extension

from ds_hydra.configs.ds_config import find_key
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.engine.ranks.memory import to_device
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
    if not torch.are_deterministic_algorithms_enabled():  # else as strict as the caller wants it
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it


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


NO_COMPILER = 'set "torch_adam": true, "fused": true in optimizer.params for torch\'s fused AdamW'
"""What needs no nvcc."""

QUIET_S = 120.0
"""A lock counts as left behind when its folder has not changed for so long, which no compiler needs
for one file, and no process of this host has it open; one of another host may share the folder.
"""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def leave_out_shared_memory() -> None:
    """From now on DeepSpeed makes no buffers in shared memory. Repeating it changes nothing."""
    # As an attribute of deepspeed.comm, "torch" is torch itself.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def compiles_adam(ds_config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed, as it is installed here, builds its FusedAdam with nvcc for `ds_config` at
    the first start of an engine on GPUs.
    """
    offload = find_key(ds_config, "zero_optimization.offload_optimizer.device")
    return (
        str(find_key(ds_config, "optimizer.type")).lower() in ("adam", "adamw")
        and not find_key(ds_config, "optimizer.params.torch_adam")
        and offload in (None, "none")
        and not installed_ops.get("fused_adam")
    )


def clear_up(is_first: bool) -> None:
    """Remove what dead processes have left on this host where engines would meet it; for all ranks
    to call, of which the first one of a host works.
    """
    if is_first:
        free_shared_memory()
        remove_stale_locks()


def free_shared_memory() -> None:
    """Remove the names of buffers that ranks of this run made before; they keep what they have
    mapped.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    for file in _SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_*"):
        file.unlink(missing_ok=True)


def remove_stale_locks() -> None:
    """Remove the locks of compilers that were killed, under which a later start would wait for
    ever.
    """
    for lock in sorted(_find_locks()):
        _remove_if_stale(lock)


def _find_locks() -> Iterator[Path]:
    """Locks of torch's folder of compiled extensions, as torch names them."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    yield from root.glob("*/lock")
    yield from root.glob("*/*/lock")


def _remove_if_stale(lock: Path) -> None:
    is_told = False
    try:
        while not _is_open_here(lock):
            idle_s = time.time() - max(
                path.stat().st_mtime for path in (lock, *lock.parent.iterdir())
            )
            if idle_s >= QUIET_S:
                lock.unlink()
                logger.warning("removed %s, the lock of a compiler that is gone", lock)
                return
            if not is_told:
                logger.warning(
                    "waiting up to %.0f s for %s: no process of this host holds this lock of a compiler; remove it if "
                    "no other host compiles there",
                    QUIET_S - idle_s,
                    lock,
                )
                is_told = True
            time.sleep(min(1.0, QUIET_S))
    except FileNotFoundError:
        return  # whoever compiled has finished
    except OSError as error:
        logger.warning("%s: %s; remove it if nobody compiles there", lock, error)


def _is_open_here(path: Path) -> bool:
    """Whether a process of this host that may be looked at has `path` open."""
    wanted = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samestat(link.stat(), wanted):
                return True
        except OSError:
            continue  # the process, or its file, is gone or another user's
    return False
