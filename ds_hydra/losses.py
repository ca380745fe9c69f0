"""Losses for `train_batch(batch, loss=...)`, under a name to import them by."""

from ds_hydra.engine.losses import *  # noqa: F403
from ds_hydra.engine.losses import __all__ as __all__
