"""HydraTrainer: the Trainer of transformers on HydraEngine."""

from ds_hydra.trainer.hydra_trainer import HydraTrainer
from ds_hydra.trainer.mixin import StrategyProgressCallback

__all__ = ["HydraTrainer", "StrategyProgressCallback"]
