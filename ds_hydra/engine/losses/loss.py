"""Losses as the engine takes them: a sum over tokens or over sequences, and its divisor; cross
entropy comes with it.

[Note: Head and loss in chunks]
Of all tensors of a micro-batch the logits are the largest: 128 Ki columns of the vocabulary are 32
times a hidden state of 4,096. A loss is a sum over tokens, so that the gradient of each token's
logits is known as soon as they are. For one chunk of tokens after the other the head's product is
made, scored, overwritten by its gradient, and multiplied on to the gradients of hidden states and
head; the next chunk has the same memory. That is all in forward: backward hands the gradients on.
It takes the three products that the head takes anyway, and adds up the gradient of the head's
weight inside the third one. The idea is that of Liger's fused linear cross-entropy (Hsu et al.
2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", Sec. 3.2).

Legend: T tokens of a packed micro-batch (of which something is predicted), N sequences of a
global batch, H hidden size, V this rank's columns of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.engine.parallel.logits import ScoredLogits, TokenScores, Vocabulary
from ds_hydra.errors import HydraConfigError

Fields = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Input of a loss: tokens of a packed micro-batch, or of a part of one, in any order.

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
    """A sum over tokens. Override `__call__`, and name the fields that it reads.

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
        """0-dim: the sum over those of `tokens` that count; a micro-batch may come in parts."""
        raise NotImplementedError

    def normaliser(self, counts: Sequence[Tensor], fields: Sequence[Fields]) -> float:
        """Divisor of the sum over the whole global batch: the number of tokens that count.

        `counts[n]` [l] says where a token is predicted, `fields[n]` what the example has. Pure:
        every rank asks with the whole global batch.
        """
        del fields
        return float(sum(int(count.sum()) for count in counts))


class SequenceLoss(Loss):
    """A function of the summed log-probabilities of sequences, which may belong to pairs or groups.

    The engine scores the global batch first, without gradients: the derivative of this function by
    each sum is then known, and the gradient is that of sums weighted by it, wherever the sequences
    of a pair are. That costs one more forward pass and no constraint on the plan.
    """

    def of_sequences(self, sums_N: Tensor, counts_N: Tensor, fields: Sequence[Fields]) -> Tensor:
        """0-dim: the loss of the global batch, differentiable by `sums_N` [N] fp64, the summed
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
        """Whether the loss is the engine's own without any given."""
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


_CHUNK_ELEMENTS, _LARGE_CHUNK_ELEMENTS = {"cpu": 2**26}, 2**28
"""Logits of a rank that are there at a time: 512 tokens of 128 Ki columns on a CPU, elsewhere
2,048, which fill a matrix product and take 512 MiB in 16 bit.
"""


def chunk_elements(device: torch.device) -> int:
    """Logits of a rank that are there at a time, or one token's where these are more."""
    return _CHUNK_ELEMENTS.get(device.type, _LARGE_CHUNK_ELEMENTS)


Evaluate = Callable[[Tokens], Tensor]
"""A loss, 0-dim, of some tokens; it may not raise, because other ranks wait for the next chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """The loss of the tokens of a micro-batch with `targets_T` and `fields`.

    `evaluate` says what it is of some of them. `loss` says what it reads of their logits.
    """

    vocabulary: Vocabulary
    targets_T: Tensor
    fields: Fields
    loss: Loss
    evaluate: Evaluate

    def of_hidden(self, hidden_BTH: Tensor, head: nn.Linear) -> Tensor:
        """0-dim, of hidden states [1, T, H] before the `head`. Collective over the TP group."""
        value: Tensor = _HeadLoss.apply(
            hidden_BTH.flatten(0, -2), head.weight, head.bias, self, torch.is_grad_enabled()
        )
        return value

    def of_logits(self, logits_TV: Tensor) -> Tensor:
        """0-dim loss of logits, for a model with an unknown function after its head."""
        value: Tensor = _HeadLoss.apply(logits_TV, None, None, self, torch.is_grad_enabled())
        return value

    def chunks(self, device: torch.device) -> Iterator[slice]:
        """Consecutive tokens, as many at a time as have logits together; alike on all ranks of a TP
        group.
        """
        num_rows = len(self.targets_T)
        # The widest slice of the group: all its ranks cut tokens alike, as their all-reduces need.
        columns = -(-self.vocabulary.num_columns // self.vocabulary.tp.size)
        number = -(-num_rows // max(1, chunk_elements(device) // columns))
        # As many chunks as are needed, of one size: a short last one would hardly fill a product.
        step = max(1, -(-num_rows // max(1, number)))
        return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))

    def of_chunk(self, outputs_TV: Tensor, rows: slice, *, writes_gradient: bool) -> Tensor:
        """0-dim, of the tokens `rows`, whose `outputs_TV` of the head their gradient overwrites."""
        candidates = self.loss.candidates
        scored = ScoredLogits(
            outputs_TV,
            self.targets_T[rows],
            self.vocabulary,
            entropy=self.loss.needs_entropy,
            mean=self.loss.needs_mean_log_prob,
            candidates_TK=None if candidates is None else self.fields[candidates][rows],
        )
        fields = {name: values[rows] for name, values in self.fields.items()}
        value = self.evaluate(Tokens(scores=scored.scores, fields=fields))
        if writes_gradient:
            scored.write_gradient(value)
        return value.detach()


PLAIN = CrossEntropy()
"""The loss where none is given."""


class _HeadLoss(torch.autograd.Function):
    """See [Note: Head and loss in chunks]. Without a weight the first argument is the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor | None,
        bias_V: Tensor | None,
        of: HeadLoss,
        has_grad: bool,
    ) -> Tensor:
        trains_hidden, trains_weight, trains_bias = (
            n and has_grad for n in ctx.needs_input_grad[:3]
        )
        is_training = trains_hidden or trains_weight or trains_bias
        grad_TH = torch.empty_like(hidden_TH) if trains_hidden else None
        grad_VH = grad_V = buffer = None
        losses = [hidden_TH.new_zeros((), dtype=torch.float32)]
        for rows in of.chunks(hidden_TH.device):
            hidden = hidden_TH[rows]
            if weight_VH is None:
                outputs = hidden.clone()
            else:
                if buffer is None:  # the first chunk is the longest
                    buffer = hidden.new_empty(len(hidden), len(weight_VH))
                outputs = buffer[: len(hidden)]
                torch.mm(hidden, weight_VH.T, out=outputs)
                if bias_V is not None:
                    outputs += bias_V
            with torch.set_grad_enabled(has_grad):
                losses.append(of.of_chunk(outputs, rows, writes_gradient=is_training))
            if grad_TH is not None:
                if weight_VH is None:
                    grad_TH[rows] = outputs
                else:
                    torch.mm(outputs, weight_VH, out=grad_TH[rows])
            if trains_weight:
                if grad_VH is None:
                    grad_VH = outputs.T @ hidden
                else:
                    grad_VH.addmm_(outputs.T, hidden)
            if trains_bias:
                grad_of_chunk = outputs.sum(dim=0)
                grad_V = grad_of_chunk if grad_V is None else grad_V.add_(grad_of_chunk)
        # Only gradients of tokens go through `save_for_backward`, where activations are counted:
        # those of weights are no part of what a token keeps.
        ctx.save_for_backward(grad_TH)
        ctx.of_weights = (grad_VH, grad_V)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.of_weights = (*ctx.saved_tensors, *ctx.of_weights), None
        # Nobody else has them. On a device reading `grad` would wait for it.
        if grad.device.type != "cpu" or float(grad) != 1.0:
            for tensor in grads:
                if tensor is not None:
                    tensor.mul_(grad.to(tensor.dtype))
        return (*grads, None, None)
