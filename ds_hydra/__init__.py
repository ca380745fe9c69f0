"""ds_hydra: DeepSpeed ZeRO-3 training with a parallel strategy chosen for every iteration."""

import importlib
import sys

from ds_hydra import environment as _environment
from ds_hydra.version import __version__

_environment.prepare()  # scripts, accelerate and DeepSpeed use the device before they ask for an engine

if "deepspeed" in sys.modules:
    # Before deepspeed.init_distributed(), see [Note: No shared memory].
    from ds_hydra import engine as engine

__all__ = [
    "HydraEngine",
    "HydraTrainer",
    "__version__",
    "balance_rows",
    "initialize",
    "losses",
]


def __getattr__(name: str) -> object:
    """Import the engine (and with it torch and deepspeed) only when it is asked for."""
    if name == "losses":
        return importlib.import_module("ds_hydra.losses")
    if name in ("initialize", "HydraEngine"):
        from ds_hydra import engine

        return getattr(engine, name)
    if name == "balance_rows":
        from ds_hydra.sampler.balance import balance_rows

        return balance_rows
    if name == "HydraTrainer":
        from ds_hydra.trainer import HydraTrainer

        return HydraTrainer
    raise AttributeError(f"module 'ds_hydra' has no attribute {name!r}")
