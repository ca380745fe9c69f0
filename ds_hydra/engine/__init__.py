"""HydraEngine and its parts; the only package that imports deepspeed or changes model state."""

from ds_hydra.engine import losses
from ds_hydra.engine.hydra_engine import HydraEngine
from ds_hydra.engine.initialize import hydra_engine_class, initialize

__all__ = ["HydraEngine", "hydra_engine_class", "initialize", "losses"]
