"""What machine and which versions these are, and whether ds_hydra has its kernels on them."""

from __future__ import annotations

import inspect
import os
import subprocess

import torch

from benchmarks.one_gpu.telling import tell
from ds_hydra.doctor.findings import describe_environment


def main() -> None:
    found = describe_environment()
    settings = found.pop("environment")
    tell("versions", ", ".join(f"{name} {value}" for name, value in found.items()))
    tell("settings", " ".join(f"{name}={value}" for name, value in settings.items()))
    tell("cores", len(os.sched_getaffinity(0)))
    has_kernel = _has_kernel()
    text = "there" if has_kernel else "absent: pip install 'torch>=2.11', or flash-attn"
    tell("torch's varlen_attn with windows", text, wanted="torch 2.11", is_well=has_kernel)
    if torch.cuda.is_available() and found["accelerator"] == "cuda":
        query = (
            "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.draw,temperature.gpu"
        )
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        tell(
            "device",
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(),
        )
        free, total = torch.cuda.mem_get_info()
        tell(
            "memory", {"total_gb": total / 1e9, "used_by_an_idle_process_gb": (total - free) / 1e9}
        )


def _has_kernel() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


if __name__ == "__main__":
    main()
