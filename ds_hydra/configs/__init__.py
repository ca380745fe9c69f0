"""Configuration of the user as validated values, and the files that come with the package."""

from ds_hydra.configs.ds_config import read_ds_config
from ds_hydra.configs.files import find_file, list_files, load_model_preset
from ds_hydra.configs.hydra_config import HydraConfig, PlannerConfig, ProfilingConfig

__all__ = [
    "HydraConfig",
    "PlannerConfig",
    "ProfilingConfig",
    "find_file",
    "list_files",
    "load_model_preset",
    "read_ds_config",
]
