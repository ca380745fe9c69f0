"""ds_hydra: DeepSpeed ZeRO-3 training with a parallel strategy chosen for every iteration."""

import importlib
import importlib.util
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
    "initialize",
    "losses",
]


_HOMES = {
    "HydraEngine": "ds_hydra.engine",
    "HydraTrainer": "ds_hydra.trainer",
    "initialize": "ds_hydra.engine",
}


def __getattr__(name: str) -> object:
    """Import what is asked for, and with it torch and deepspeed, only then: our names and modules,
    else DeepSpeed's, so that a script for DeepSpeed runs with `import ds_hydra as deepspeed`.
    """
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'ds_hydra' has no attribute {name!r}")
    if importlib.util.find_spec(f"ds_hydra.{name}") is not None:
        return importlib.import_module(f"ds_hydra.{name}")
    try:
        importlib.import_module("ds_hydra.engine")  # before init_distributed(), see above
        return getattr(importlib.import_module("deepspeed"), name)
    except ModuleNotFoundError as error:
        raise AttributeError(
            f"module 'ds_hydra' has no attribute {name!r}, and DeepSpeed cannot be asked: {error}"
        ) from error
