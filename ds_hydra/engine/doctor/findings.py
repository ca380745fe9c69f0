"""What an examination of the ranks finds, as values, and what it finds about a rank's own machine:
versions, kernels, limits of the system. Nothing here waits for another rank.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils import cpp_extension

from ds_hydra.engine.model.attention_choice import Choice, choose, has_kernels
from ds_hydra.engine.model.attention_kernels import Demand
from ds_hydra.engine.ranks.memory import available_bytes
from ds_hydra.engine.ranks.process import NO_COMPILER, compiles_adam, find_overlap_problem
from ds_hydra.environment import WANTED
from ds_hydra.strategy.compiled import HAS_NUMBA

REPORT_SCHEMA = "ds_hydra.doctor/1"


class Status(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `advice` says what to do where it is not well."""

    check: str
    status: Status
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def judge(
        cls,
        check: str,
        text: str,
        *,
        is_well: bool,
        advice: str,
        figures: Mapping[str, Any],
        otherwise: Status = Status.WARNING,
    ) -> Finding:
        """A check that ends well, or as `otherwise` says and with its advice."""
        status, advice = (Status.OK, "") if is_well else (otherwise, advice)
        return cls(check=check, status=status, text=text, advice=advice, figures=figures)

    @classmethod
    def of_unknown_hardware(cls, check: str, text: str, figures: Mapping[str, Any]) -> Finding:
        """A figure that no description of hardware says anything about."""
        return cls(
            check=check,
            status=Status.SKIPPED,
            text=f"{text}; nothing to compare with",
            advice="--hardware NAME (a shipped hardware description, or a file of your own)",
            figures=figures,
        )

    def to_json(self) -> dict[str, Any]:
        """As in `ds_hydra.doctor/1`."""
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings of an examination, in the order of its checks."""

    findings: Sequence[Finding]
    seconds: float

    @property
    def has_problem(self) -> bool:
        """Whether training would fail, hang or be wrong here."""
        return any(finding.status is Status.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.doctor/1` document."""
        return {
            "schema": REPORT_SCHEMA,
            "is_well": not self.has_problem,
            "seconds": round(self.seconds, 1),
            "findings": [finding.to_json() for finding in self.findings],
        }


_PACKAGES = (
    "ds_hydra", "torch", "deepspeed", "transformers", "datasets", "accelerate", "numpy", "numba",
    "flash-attn",
)  # fmt: skip
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_LEAST_SHARED_BYTES = 1 << 30
"""NCCL takes some 10 MB of a host's shared memory for each rank and communicator, workers of a data
loader more; containers have 64 MiB if nobody asks for more."""
_LEAST_FILES = 4096
"""Descriptors: a gloo group takes 7 of each rank."""

_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Of queries and values, as models have them."""


def describe_environment() -> dict[str, Any]:
    """Versions and settings of this rank, equal on all ranks where all is well."""
    versions = {name: _version(name) for name in _PACKAGES}
    accelerator = get_accelerator()
    found: dict[str, Any] = {
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
        "accelerator": str(accelerator.device_name()),
    }
    if torch.cuda.is_available():
        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    names = [*WANTED, "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"]
    names += [name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_"))]
    found["environment"] = {
        name: os.environ[name] for name in sorted(set(names)) if name in os.environ
    }
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compare_environments(environments: Sequence[Mapping[str, Any]]) -> Finding:
    """Versions of all ranks, which must be the same."""
    first = environments[0]
    differing = {
        name: sorted({str(environment.get(name)) for environment in environments})
        for name in sorted(set().union(*environments))
        if len({str(environment.get(name)) for environment in environments}) > 1
    }
    shown = [name for name in (*_PACKAGES, "cuda", "nccl", "device") if name in first]
    text = ", ".join(f"{name} {first[name]}" for name in shown)
    differences = "; ".join(f"{name}: {' and '.join(v)}" for name, v in differing.items())
    return Finding.judge(
        "versions",
        f"ranks differ: {differences}" if differing else text,
        is_well=not differing,
        otherwise=Status.WARNING if set(differing) == {"environment"} else Status.PROBLEM,
        advice="install the same packages, and export the same variables, on every host",
        figures={"rank_0": dict(first), "differing": differing},
    )


def check_settings(device: torch.device) -> list[Finding]:
    """Whether exchanges may run beside computation on this device; a CPU needs no settings."""
    if device.type != "cuda":
        return []
    problem = find_overlap_problem(device)
    found = Finding.judge(
        "settings",
        problem or "the device started with what exchanges beside computation need",
        is_well=not problem,
        advice="export them in what starts the ranks, as examples/launch does",
        figures={name: os.environ.get(name) for name in WANTED},
    )
    return [found]


def check_compiler(device: torch.device, ds_config: Mapping[str, Any]) -> list[Finding]:
    """Whether DeepSpeed can build the optimizer of `ds_config` for GPUs here; nothing where it
    builds none.
    """
    if device.type != "cuda" or not compiles_adam(ds_config):
        return []
    nvcc = shutil.which("nvcc") or (cpp_extension.CUDA_HOME or "")
    found = Finding.judge(
        "compiler",
        f"DeepSpeed builds FusedAdam with {nvcc} at the first start"
        if nvcc
        else "there is no nvcc, which DeepSpeed builds FusedAdam with at the first start",
        is_well=bool(nvcc),
        otherwise=Status.PROBLEM,
        advice=NO_COMPILER,
        figures={"nvcc": nvcc},
    )
    return [found]


def check_kernels(device: torch.device) -> list[Finding]:
    """Which attention and which planner run here, and that attention of a packed micro-batch is
    right.
    """
    planner = Finding.judge(
        "planner",
        "compiled by numba" if HAS_NUMBA else "numba does not work here: planning runs in Python",
        is_well=HAS_NUMBA,
        advice="pip install numba; without it large mini-batches are planned some 10 to 100 times slower",
        figures={},
    )
    return [_check_attention(device), planner]


def _check_attention(device: torch.device) -> Finding:
    if not has_kernels(device):
        return Finding(
            check="attention",
            status=Status.OK,
            text=f"torch's scaled_dot_product_attention, one call for each sequence, on {device.type}",
        )
    choices: dict[str, Choice] = {}
    for widths in _WIDTHS:
        shape = "/".join(map(str, dict.fromkeys(widths)))
        choice = choose(Demand(*widths, torch.bfloat16), device)
        choices[shape] = choice
        if choice.kernel is None:
            return Finding(
                check="attention",
                status=Status.WARNING,
                text=f"no kernel for heads of {shape}, which run one call for each sequence: {choice.reasons()}",
                advice="pip install flash-attn, or torch 2.11 or later",
            )
    errors = {shape: choice.error or 0.0 for shape, choice in choices.items()}
    names = {shape: choice.name for shape, choice in choices.items()}
    # Why faster ones do not run: of those that fail, where there are any
    told = max(choices.values(), key=lambda choice: len(choice.failed))
    softcap = choose(Demand(*_WIDTHS[0], torch.bfloat16, True)).kernel is not None
    worst = max(errors, key=errors.__getitem__)
    kernels = " and ".join(dict.fromkeys(names.values()))
    text = f"{kernels}, off by {errors[worst]:.1e} (bf16, heads of {worst})"
    text += ("" if softcap else "; softcap needs flash-attn") + (
        f"; {told.reasons()}" if told.passed_over else ""
    )
    figures = {"kernel": names, "relative_errors": errors, "softcap": softcap}
    failed = dict.fromkeys(name for choice in choices.values() for name in choice.failed)
    return Finding(
        check="attention",
        status=Status.WARNING if failed else Status.OK,
        text=text,
        figures=figures,
        advice=f"reinstall {' and '.join(failed)} for this version of torch and CUDA, or leave it"
        if failed
        else "",
    )


def check_system(num_ranks_here: int) -> list[Finding]:
    """Limits of this host that stop a run: shared memory, open files, memory, CPU cores."""
    return [_check_shared_memory(), _check_files(), _check_host(num_ranks_here)]


def _check_shared_memory() -> Finding:
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return Finding(
            check="shared memory", status=Status.WARNING, text=f"there is no {_SHARED_MEMORY}"
        )
    text, figures = f"{free / 2**30:.1f} GiB free in {_SHARED_MEMORY}", {"free_bytes": free}
    return Finding.judge(
        "shared memory",
        text,
        is_well=free >= _LEAST_SHARED_BYTES,
        advice="start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory)",
        figures=figures,
    )


def _check_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, figures = f"{soft:,} open files allowed", {"soft": soft, "hard": hard}
    return Finding.judge(
        "open files",
        text,
        is_well=soft >= _LEAST_FILES,
        advice=f"ulimit -n {min(hard, 65536) if hard > 0 else 65536} before the launcher",
        figures=figures,
    )


def _check_host(num_ranks_here: int) -> Finding:
    cores, free = len(os.sched_getaffinity(0)), available_bytes()
    text = f"{cores} cores and {free / 2**30:.0f} GiB of memory free for {num_ranks_here} ranks"
    figures = {"cores": cores, "free_bytes": free, "ranks": num_ranks_here}
    is_device = get_accelerator().device_name() != "cpu"
    return Finding.judge(
        "host",
        text,
        is_well=cores >= num_ranks_here * (2 if is_device else 1),
        advice="give every rank a core, and a second one on an accelerator for its exchanges; times below are too long",
        figures=figures,
    )
