"""TRL's trainers on HydraEngine: the import changes, the script stays."""

try:
    import trl as _trl  # noqa: F401
except ImportError as error:
    raise ImportError("ds_hydra.trl needs TRL; pip install 'ds_hydra[trl]'") from error

from ds_hydra.trl.mixin import HydraDPOTrainer, HydraGRPOTrainer, HydraMixin, HydraSFTTrainer

__all__ = ["HydraDPOTrainer", "HydraGRPOTrainer", "HydraMixin", "HydraSFTTrainer"]
