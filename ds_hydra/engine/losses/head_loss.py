"""The head and the loss of a micro-batch, some tokens at a time, so that its logits are never there
all at once.

[Note: Head and loss in chunks]
Of all tensors of a micro-batch the logits are the largest: 128 Ki columns of the vocabulary are 32
times a hidden state of 4,096. A loss is a sum over tokens, so that the gradient of each token's
logits is known as soon as they are. For one chunk of tokens after the other the head's product is
made, scored, overwritten by its gradient, and multiplied on to the gradients of hidden states and
head; the next chunk has the same memory. That is all in forward: backward hands the gradients on.
It takes the three products that the head takes anyway, and adds up the gradient of the head's
weight inside the third one. The idea is that of Liger's fused linear cross-entropy (Hsu et al.
2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", Sec. 3.2).

Legend: T tokens of which something is predicted, H hidden size, V this rank's columns of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.engine.losses.loss import CrossEntropy, Fields, Loss, Tokens
from ds_hydra.engine.parallel.token_scores import ScoredLogits, Vocabulary

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
        """0-dim, of what a model gives that makes more of its head's output than is known here."""
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
"""Where no loss is given."""


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
        # What is saved is counted as what a token keeps until backward, as those of weights are not
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
