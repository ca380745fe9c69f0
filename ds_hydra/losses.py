"""What `train_batch(batch, loss=...)` minimises."""

from ds_hydra.engine.losses import (
    DPO,
    GRPO,
    CrossEntropy,
    Distillation,
    Loss,
    SequenceLoss,
    Tokens,
)

__all__ = ["DPO", "GRPO", "CrossEntropy", "Distillation", "Loss", "SequenceLoss", "Tokens"]
