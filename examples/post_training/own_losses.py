"""Losses of post-training, as a user writes them: a policy's, one of pairs, and a teacher's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.losses import CrossEntropy, Fields, Loss, SequenceLoss, Tokens


class GRPO(Loss):
    """Clipped policy loss (Shao et al. 2024, Eq. 3), mean over the tokens of the batch (DAPO,
    Yu et al. 2025, Eq. 8), with `kl` times an estimate of the divergence from a reference.
    """

    sequence_fields = ("advantages",)

    def __init__(self, *, clip: float = 0.2, kl: float = 0.0):
        self.clip, self.kl = clip, kl
        self.token_fields = ("old_log_probs", *(("reference_log_probs",) if kl else ()))

    def __call__(self, tokens: Tokens) -> Tensor:
        """Sum over the tokens that count."""
        fields, counts_T, log_probs_T = tokens.fields, tokens.counts_T, tokens.log_probs_T
        # Before exp, which may overflow where nothing counts: a gradient of 0 times Inf is NaN.
        ratio_T = torch.where(counts_T, log_probs_T - fields["old_log_probs"], 0.0).exp()
        clipped_T = ratio_T.clamp(1 - self.clip, 1 + self.clip)
        advantages_T = fields["advantages"]
        loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        if self.kl:
            below_T = torch.where(counts_T, fields["reference_log_probs"] - log_probs_T, 0.0)
            loss_T = loss_T + self.kl * (below_T.exp() - below_T - 1)
        return torch.where(counts_T, loss_T, 0.0).sum()


class DPO(SequenceLoss):
    """Preferences in pairs (Rafailov et al. 2023, Eq. 7), mean over pairs. The two sequences of a
    `pair` have its number; `chosen` is 1 for the better one and 0 for the other.
    """

    sequence_fields = ("pair", "chosen", "reference_log_prob")

    def __init__(self, *, beta: float = 0.1):
        self.beta = beta

    def of_sequences(self, sums_N: Tensor, counts_N: Tensor, fields: Sequence[Fields]) -> Tensor:
        """Sum over pairs."""
        places = sorted(range(len(fields)), key=lambda n: (fields[n]["pair"], -fields[n]["chosen"]))
        rewards_N = sums_N - torch.stack([f["reference_log_prob"] for f in fields]).double()
        better_P, worse_P = rewards_N[places[::2]], rewards_N[places[1::2]]
        return -F.logsigmoid(self.beta * (better_P - worse_P)).sum()

    def normaliser(self, counts: Sequence[Tensor], fields: Sequence[Fields]) -> float:
        """Pairs."""
        return len(fields) / 2


class Distillation(Loss):
    """KL divergence from a teacher's k most probable tokens, mean over the tokens that count;
    `labels` is the share of cross entropy beside it.
    """

    token_fields = ("teacher_ids", "teacher_log_probs")
    candidates = "teacher_ids"

    def __init__(self, *, labels: float = 0.0):
        self.labels = labels

    def __call__(self, tokens: Tokens) -> Tensor:
        """Sum over the tokens that count."""
        student_TK, teacher_TK = (
            tokens.scores.candidate_log_probs_TK,
            tokens.fields["teacher_log_probs"],
        )
        kl_T = (teacher_TK.exp() * (teacher_TK - student_TK)).sum(-1)
        kl = torch.where(tokens.counts_T, kl_T, 0.0).sum()
        return (1 - self.labels) * kl + self.labels * CrossEntropy()(tokens)
