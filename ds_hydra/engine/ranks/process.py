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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from torch.utils import cpp_extension

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
    where they were not. On a CPU a call returns when its work is done. Collective over all ranks.
    """
    if device.type != "cuda":
        return device.type != "cpu"
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


QUIET_S = 120.0
"""A lock counts as left behind when its folder has not changed for so long, which no compiler needs
for one file, and no process of this host has it open; one of another host may share the folder.
"""


def find_restart_problem(environment: Mapping[str, str]) -> str | None:
    """Reason that a restart by this launcher would not come up, or None. Looks at torchrun's
    variables only.

    torchrun's ranks meet in a store of its agent, which outlives them: a restarted rank finds the
    address of one that is gone and waits for it (pytorch issue 135712, again so in torch 2.13).
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return (
            f"torchrun --max-restarts {restarts} with --master-port (or --node-rank alone) shares a store with ranks "
            "whatever TORCH_DISABLE_SHARE_RDZV_TCP_STORE says, and restarted ones hang in it; start with --standalone, "
            "or with --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        )
    return (
        f"torchrun --max-restarts {restarts} shares a store with the ranks in which restarted ones find the "
        "addresses of lost ones and hang; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    )


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


def remove_stale_locks(is_first: bool) -> None:
    """Remove the locks of compilers that were killed, under which a later start would wait for
    ever; for all ranks to call, of which the first one of a host works.
    """
    if is_first:
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
            idle_s = _idle_s(lock)
            if abs(idle_s) >= QUIET_S:  # a date ahead is of a clock that was set back
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


def _idle_s(lock: Path) -> float:
    """Return the seconds since something was written beside `lock`, by its file system's clock."""
    written = max(path.stat().st_mtime for path in (lock, *lock.parent.iterdir()))
    # The host's clock may differ from that of a network mount
    with tempfile.TemporaryFile(dir=lock.parent) as now:
        return os.fstat(now.fileno()).st_mtime - written


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
    # An error of a broken collective is the consequence: who is lost says more
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
            # A handler may only note the signal: the launcher that ends this rank would wait
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
