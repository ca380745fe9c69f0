"""Losses as the engine takes them: a sum over tokens, or over sequences, and what it is divided by.

Legend: T tokens of a packed micro-batch, N sequences of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ds_hydra.engine.parallel.token_scores import TokenScores
from ds_hydra.errors import HydraConfigError

Fields = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a loss sees of a packed micro-batch, or of a part of one: tokens in any order.

    Row i is about one prediction, that of the token which the fields of row i belong to.
    """

    scores: TokenScores
    fields: Fields
    """[T] or [T, k] for each field the loss names; one of a sequence has its value in each row."""

    @property
    def counts_T(self) -> Tensor:
        """[T] bool: whether the token is predicted; nothing else may add to the loss."""
        return self.scores.counts_T

    @property
    def log_probs_T(self) -> Tensor:
        """[T] fp32, 0 where nothing is predicted."""
        return self.scores.log_probs_T

    @property
    def num_counted_T(self) -> Tensor:
        """[T]: how many tokens count in the sequence of each."""
        return self.fields[NUM_COUNTED]


class Loss:
    """A sum over tokens. Override `__call__`, and name what it reads.

    Fields of an example are columns beside its `input_ids`. One of `token_fields` has a value, or a
    row of values, for each token and lies as labels do: the value at place i belongs to the
    prediction of token i, and that at place 0 to nothing. One of `sequence_fields` is a number.

    Fields, the normaliser, and numbers, texts, tuples and arrays in attributes are compared between
    ranks before each iteration. What a rank keeps for itself belongs into attributes whose names
    begin with "_", or into lists and dicts.
    """

    token_fields: tuple[str, ...] = ()
    sequence_fields: tuple[str, ...] = ()
    needs_entropy = False
    needs_mean_log_prob = False
    candidates: str | None = None
    """Field of token ids [l, k] whose log-probabilities the loss reads."""

    def __call__(self, tokens: Tokens) -> Tensor:
        """0-dim: the sum over the tokens of a micro-batch that count."""
        raise NotImplementedError

    def normaliser(self, counts: Sequence[Tensor], fields: Sequence[Fields]) -> float:
        """What the sum over the whole mini-batch is divided by: the number of tokens that count.

        `counts[n]` [l] says where a token is predicted, `fields[n]` what the example has. Pure:
        every rank asks with the whole mini-batch.
        """
        del fields
        return float(sum(int(count.sum()) for count in counts))


class SequenceLoss(Loss):
    """A function of the summed log-probabilities of sequences, which may belong to pairs or groups.

    The engine scores the mini-batch first, without gradients: the derivative of this function by
    each sum is then known, and the gradient is that of sums weighted by it, wherever the sequences
    of a pair are. That costs one more forward pass and no constraint on the plan.
    """

    def of_sequences(self, sums_N: Tensor, counts_N: Tensor, fields: Sequence[Fields]) -> Tensor:
        """0-dim: the loss of the mini-batch, differentiable by `sums_N` [N] fp64, the summed
        log-probabilities of the `counts_N` tokens of each sequence that count.
        """
        raise NotImplementedError

    def __call__(self, tokens: Tokens) -> Tensor:
        """Sums weighted by their derivatives."""
        return (tokens.log_probs_T * tokens.fields[WEIGHT]).sum()


NUM_COUNTED = "number of tokens that count"
WEIGHT = "derivative of the loss"
"""Fields of a sequence that the engine adds; WEIGHT in the second pass of a `SequenceLoss`."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """Next-token cross entropy, mean over the tokens that count.

    `label_smoothing` mixes in the mean over the vocabulary, as transformers does; `z_loss` adds
    that much times the squared log-normaliser (PaLM, Chowdhery et al. 2022, Sec. 5); `weights`
    names a token field whose values weigh the tokens, and whose sum is the normaliser.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    weights: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise HydraConfigError(
                f"CrossEntropy: label_smoothing is {self.label_smoothing}, expected 0 up to, not including, 1"
            )
        if self.z_loss < 0:
            raise HydraConfigError(f"CrossEntropy: z_loss is {self.z_loss}, expected 0 or more")
        names = () if self.weights is None else (self.weights,)
        object.__setattr__(self, "token_fields", names)
        object.__setattr__(self, "needs_mean_log_prob", self.label_smoothing > 0)

    @property
    def is_plain(self) -> bool:
        """Whether it is what the engine computes without any loss given."""
        return self == CrossEntropy()

    def __call__(self, tokens: Tokens) -> Tensor:
        """Sum over the tokens that count."""
        loss_T = -tokens.log_probs_T
        if self.label_smoothing:
            assert tokens.scores.mean_log_prob_T is not None
            smooth_T = -tokens.scores.mean_log_prob_T
            loss_T = loss_T.lerp(smooth_T, self.label_smoothing)
        if self.z_loss:
            loss_T = loss_T + self.z_loss * tokens.scores.log_normaliser_T.square()
        if self.weights is not None:
            loss_T = loss_T * tokens.fields[self.weights]
        return loss_T.sum()

    def normaliser(self, counts: Sequence[Tensor], fields: Sequence[Fields]) -> float:
        """Tokens that count, or the sum of their weights."""
        if self.weights is None:
            return super().normaliser(counts, fields)
        pairs = zip(counts, fields, strict=True)
        return float(sum(float(f[self.weights][c].double().sum()) for c, f in pairs))
