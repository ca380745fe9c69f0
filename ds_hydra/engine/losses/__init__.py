"""Losses for `train_batch(batch, loss=...)`."""

from ds_hydra.engine.losses.loss import (
    DPO,
    GRPO,
    CrossEntropy,
    Distillation,
    Loss,
    SequenceLoss,
    Tokens,
)

__all__ = ["DPO", "GRPO", "CrossEntropy", "Distillation", "Loss", "SequenceLoss", "Tokens"]
