"""Setup of a rank's process before its first engine (settings of its accelerator in force, and
nothing in its way that DeepSpeed compiles or shares between processes), and its end: with an error
that nobody catches, or with its work done.

[Note: No shared memory]
DeepSpeed's all-reduce over shared memory serves inference in its own AutoTP alone. Yet every CPU
rank would compile it and keep 66 MiB in /dev/shm, beyond its end; in a container's usual 64 MiB one
rank dies of it while the others spin for ever. So it is left out from the import of the engine on,
and gloo carries all there is.

[Note: One rank speaks]
An error of ds_hydra says in one sentence what to change. Raised on 64 ranks it would stand among 64
tracebacks. So one rank prints it and ends; the others end after it without a word, or by their
launcher. Only a rank that cannot know whether the others fail alike speaks after a pause. Who has
lost a rank says so on every rank: hosts have logs of their own. Of Ctrl-C the first rank alone
shows where it was.

[Note: Work that outlives its wait]
torch's gloo threads drop the tensors of a collective after its `wait` has returned, and need
Python's lock for that. In an interpreter that is already finalizing they cannot have it: the
process aborts ("terminate called without an active exception"), though all its work is done. A
script that ends right after `save_checkpoint` may meet this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops

from ds_hydra.configs.ds_config import find_key
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.ranks.agreement import gather_flags, is_raised_on_all, rank_that_says
from ds_hydra.engine.ranks.watchdog import find_loss_behind
from ds_hydra.environment import (
    in_the_way_of_overlap,
    missing_for_overlap,
    module_loading,
    set_accelerator_environment,
)
from ds_hydra.errors import HydraConfigError, HydraError, RankLostError

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
    set_accelerator_environment(os.environ)


def use_deterministic_kernels(device: torch.device) -> None:
    """Let kernels of this process add in one order on `device` from now on; a CPU's always do. Not
    collective.
    """
    if device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS warns
    if not torch.are_deterministic_algorithms_enabled():  # else as strict as the caller wants it
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it


def only_warns() -> bool:
    """Whether kernels of this process add in one order where they can, as
    `use_deterministic_kernels` lets them.
    """
    # The second is also true where warnings were chosen and nothing is asked for.
    is_asked = torch.are_deterministic_algorithms_enabled()
    return is_asked and torch.is_deterministic_algorithms_warn_only_enabled()


@contextlib.contextmanager
def in_one_order() -> Iterator[None]:
    """Let attention of torch add in one order inside, where kernels of this process have to.

    Its backward passes do so only where operations that have no such order are errors
    (`warn_only=False`), and to other operations of a model that would be the end.
    """
    if not only_warns():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def find_overlap_problem(device: torch.device) -> str:
    """Reason that exchanges beside computation could hang on this process's CUDA device. "" where
    they could not.
    """
    if device.type != "cuda":
        return ""
    if forbidden := in_the_way_of_overlap(os.environ):
        return (
            f"{' and '.join(forbidden)} stops a rank until others have posted what it has; unset it to "
            "train, it is for debugging"
        )
    # What was set after the driver had started is in the environment, too, and without effect
    is_lazy = module_loading() == "LAZY"
    in_force = {**os.environ, **({"CUDA_MODULE_LOADING": "LAZY"} if is_lazy else {})}
    missing = missing_for_overlap(in_force)
    if not missing:
        return ""
    names = (setting.partition("=")[0] for setting in missing)
    chosen = ", ".join(f"{name}={in_force.get(name, '(not set)')}" for name in names)
    return (
        f"the device started with {chosen}, with which exchanges beside computation can hang; "
        f"export {' '.join(missing)} in what starts the ranks, or import ds_hydra before the device is used first"
    )


def can_overlap(device: torch.device) -> bool:
    """Whether exchanges may run beside computation: the settings were in force on all ranks. Warns
    where they were not. Collective over all ranks.
    """
    if device.type != "cuda":
        return True
    problem = find_overlap_problem(device)
    flags = gather_flags(bool(problem), device)
    if True in flags and dist.get_rank() == flags.index(True):
        logger.warning("link.overlap is off: rank %d: %s", dist.get_rank(), problem)
    return True not in flags


def overlap_where_safe(config: HydraConfig, device: torch.device) -> HydraConfig:
    """`config`, with `link.overlap` off where `can_overlap` says no. Collective over all ranks."""
    if not config.link.overlap or can_overlap(device):
        return config
    link = config.link.model_copy(update={"overlap": False})
    return config.model_copy(update={"link": link})


NO_COMPILER = 'set "torch_adam": true, "fused": true in optimizer.params for torch\'s fused AdamW'
"""Advice that needs no nvcc."""


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from making buffers in shared memory. Repeating it changes nothing."""
    # As an attribute of deepspeed.comm, "torch" is torch itself.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def offloads_optimizer(ds_config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed keeps the optimizer's states in the host's memory."""
    device = find_key(ds_config, "zero_optimization.offload_optimizer.device")
    return device not in (None, "none")


def compiles_adam(ds_config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed, as it is installed here, builds its FusedAdam with nvcc for `ds_config` at
    the first start of an engine on GPUs.
    """
    return (
        str(find_key(ds_config, "optimizer.type")).lower() in ("adam", "adamw")
        and not find_key(ds_config, "optimizer.params.torch_adam")
        and not offloads_optimizer(ds_config)
        and not installed_ops.get("fused_adam")
    )


_PATIENCE_S = 5.0
"""Seconds until a rank speaks itself; launchers end the others within a second of a failure."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@functools.cache
def let_one_rank_speak() -> None:
    """Let an uncaught error of ds_hydra, or a lost rank, end this process as the note above says.
    Repeating it changes nothing.
    """
    sys.excepthook = functools.partial(_end, sys.excepthook)


def _end(
    otherwise: Hook, _kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if (loss := find_loss_behind(error)) is not None:
        error = loss.with_traceback(trace)
    own, speaker = own_rank(), own_rank()
    if isinstance(error, KeyboardInterrupt):  # a terminal interrupts all ranks
        speaker = 0
    elif isinstance(error, HydraError) and not isinstance(error, RankLostError):
        speaker = rank_that_says(error)
        if own:
            error.args = (f"rank {own}: {error}",)
    said = type(error), error, error.__traceback__
    if own == speaker:
        otherwise(*said)
        return
    # A tracker files the run as failed; what it prints is what another rank says
    with contextlib.redirect_stderr(io.StringIO()):
        otherwise(*said)
    if isinstance(error, HydraError):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE_S)
        if not is_raised_on_all(error):
            sys.__excepthook__(*said)


def own_rank() -> int:
    """Rank in the process group, or the launcher's rank before there is a group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


_PAUSE_S = 0.2
"""Threads that only wait for Python's lock get it within milliseconds."""


@functools.cache
def let_collectives_end_at_exit() -> None:
    """Give other threads of this process time before it ends. Repeating it changes nothing."""
    atexit.register(time.sleep, _PAUSE_S)
