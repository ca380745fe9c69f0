"""What `train_batch(batch, loss=...)` minimises."""

from ds_hydra.engine.losses.loss import CrossEntropy, Loss, SequenceLoss, Tokens
from ds_hydra.engine.losses.post_training import DPO, GRPO, Distillation

__all__ = ["DPO", "GRPO", "CrossEntropy", "Distillation", "Loss", "SequenceLoss", "Tokens"]
