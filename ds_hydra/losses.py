"""What `train_batch(batch, loss=...)` minimises, under a name to import it by."""

from ds_hydra.engine.losses import *  # noqa: F403
from ds_hydra.engine.losses import __all__ as __all__
