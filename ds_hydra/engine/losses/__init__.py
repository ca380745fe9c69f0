"""Losses for `train_batch(batch, loss=...)`."""

from ds_hydra.engine.losses.loss import CrossEntropy, Fields, Loss, SequenceLoss, Tokens

__all__ = ["CrossEntropy", "Fields", "Loss", "SequenceLoss", "Tokens"]
