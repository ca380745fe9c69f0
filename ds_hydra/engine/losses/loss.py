"""Losses as the engine takes them: a sum over tokens or over sequences, and its divisor. Those that
come with it: cross entropy, preferences, policies, distillation.

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
from typing import Any, Literal

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True, kw_only=True)
class GRPO(Loss):
    """Clipped policy loss with KL: GRPO (Shao et al. 2024, Eq. 3), and PPO's (Schulman et al. 2017,
    Eq. 7) with advantages for each token.

    Fields: `advantages`, a number for each sequence, or for each token with `by_token`;
    `old_log_probs` of the policy that generated, for each token, where `is_off_policy`;
    `reference_log_probs` where `kl` > 0, estimated as exp(r) - r - 1 with r = reference - policy.
    `mean` over "tokens" of the global batch (DAPO, Yu et al. 2025, Eq. 8), or over "sequences",
    each of which is a mean over its tokens. `entropy` rewards that much times the entropy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    entropy: float = 0.0
    by_token: bool = False
    is_off_policy: bool = True
    mean: Literal["tokens", "sequences"] = "tokens"

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl"):
            if getattr(self, name) < 0:
                raise HydraConfigError(f"GRPO: {name} is {getattr(self, name)}, expected 0 or more")
        if self.mean not in ("tokens", "sequences"):
            raise HydraConfigError(f'GRPO: mean is {self.mean!r}, expected "tokens" or "sequences"')
        of_tokens = {
            "old_log_probs": self.is_off_policy,
            "reference_log_probs": self.kl > 0,
            "advantages": self.by_token,
        }
        names = tuple(name for name, is_read in of_tokens.items() if is_read)
        object.__setattr__(self, "token_fields", names)
        object.__setattr__(self, "sequence_fields", () if self.by_token else ("advantages",))
        object.__setattr__(self, "needs_entropy", self.entropy != 0)

    def __call__(self, tokens: Tokens) -> Tensor:
        """Sum over the tokens that count."""
        fields, log_probs_T = tokens.fields, tokens.log_probs_T
        old_T = fields["old_log_probs"] if self.is_off_policy else log_probs_T.detach()
        # Before exp, which may overflow where nothing counts: a gradient of 0 times Inf is NaN.
        ratio_T = torch.where(tokens.counts_T, log_probs_T - old_T, 0.0).exp()
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        advantages_T = fields["advantages"]
        loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        if self.kl:
            below_T = fields["reference_log_probs"] - log_probs_T
            below_T = torch.where(tokens.counts_T, below_T, 0.0)
            loss_T = loss_T + self.kl * (below_T.exp() - below_T - 1)
        if self.entropy:
            assert tokens.scores.entropy_T is not None
            loss_T = loss_T - self.entropy * tokens.scores.entropy_T
        if self.mean == "sequences":
            loss_T = loss_T / tokens.num_counted_T
        return torch.where(tokens.counts_T, loss_T, 0.0).sum()

    def normaliser(self, counts: Sequence[Tensor], fields: Sequence[Fields]) -> float:
        """Tokens that count, or sequences that have some."""
        if self.mean == "tokens":
            return super().normaliser(counts, fields)
        return float(sum(bool(count.any()) for count in counts))


@dataclass(frozen=True, kw_only=True)
class Distillation(Loss):
    """KL divergence from a teacher's most probable tokens, mean over the tokens that count.

    Token fields `teacher_ids` [l, k] and `teacher_log_probs` [l, k]: for each prediction the
    teacher's k most probable tokens. What the teacher gives to others is left out of the sum.
    `labels` is the share of cross entropy with the labels beside it.
    """

    labels: float = 0.0

    token_fields = ("teacher_ids", "teacher_log_probs")
    candidates = "teacher_ids"

    def __post_init__(self) -> None:
        if not 0 <= self.labels <= 1:
            raise HydraConfigError(f"Distillation: labels is {self.labels}, expected 0 to 1")

    def __call__(self, tokens: Tokens) -> Tensor:
        """Sum over the tokens that count."""
        student_TK = tokens.scores.candidate_log_probs_TK
        assert student_TK is not None
        teacher_TK = tokens.fields["teacher_log_probs"]
        kl_T = (teacher_TK.exp() * (teacher_TK - student_TK)).sum(-1)
        kl = torch.where(tokens.counts_T, kl_T, 0.0).sum()
        return (1 - self.labels) * kl + self.labels * CrossEntropy()(tokens)


@dataclass(frozen=True, kw_only=True)
class DPO(SequenceLoss):
    """Preferences in pairs: DPO (Rafailov et al. 2023, Eq. 7) and relatives, mean over pairs.

    Sequence fields: `pair`, a number that the two sequences of a pair have alike; `chosen`, 1 for
    the better one and 0 for the other; `reference_log_prob`, the sum over the tokens that count
    under the reference model (not for "simpo").

    `kind`: "sigmoid" with `label_smoothing` (conservative DPO), "hinge" (SLiC), "ipo" (Azar et al.
    2023, Eq. 17, on means over tokens as TRL), "simpo" (Meng et al. 2024, Eq. 6: means over tokens,
    no reference, `margin`).
    """

    beta: float = 0.1
    kind: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    label_smoothing: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise HydraConfigError(f"DPO: beta is {self.beta}, expected above 0")
        if self.kind not in ("sigmoid", "hinge", "ipo", "simpo"):
            raise HydraConfigError(
                f'DPO: kind is {self.kind!r}, expected "sigmoid", "hinge", "ipo" or "simpo"'
            )
        reference = () if self.kind == "simpo" else ("reference_log_prob",)
        object.__setattr__(self, "sequence_fields", ("pair", "chosen", *reference))

    def of_sequences(self, sums_N: Tensor, counts_N: Tensor, fields: Sequence[Fields]) -> Tensor:
        """Sum over pairs."""
        better_P, worse_P = (torch.tensor(side) for side in _pairs(fields))
        rewards_N = sums_N
        if self.kind != "simpo":
            rewards_N = rewards_N - torch.stack([f["reference_log_prob"] for f in fields]).double()
        if self.kind in ("ipo", "simpo"):
            rewards_N = rewards_N / counts_N.clamp(min=1)
        margin_P = rewards_N[better_P] - rewards_N[worse_P]
        if self.kind == "ipo":
            return (margin_P - 1 / (2 * self.beta)).square().sum()
        margin_P = self.beta * margin_P
        if self.kind == "hinge":
            return F.relu(1 - margin_P).sum()
        if self.kind == "simpo":
            margin_P = margin_P - self.margin
        smooth = self.label_smoothing
        return -((1 - smooth) * F.logsigmoid(margin_P) + smooth * F.logsigmoid(-margin_P)).sum()

    def normaliser(self, counts: Sequence[Tensor], fields: Sequence[Fields]) -> float:
        """Pairs."""
        del counts
        return float(len(_pairs(fields)[0]))


def _pairs(fields: Sequence[Fields]) -> tuple[list[int], list[int]]:
    """Numbers of the better and of the worse sequence of each pair."""
    sides: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for number, of_example in enumerate(fields):
        pair, chosen = float(of_example["pair"]), float(of_example["chosen"])
        if not pair.is_integer():
            raise HydraConfigError(
                f"DPO: 'pair' of example {number} is {pair}, expected a whole number"
            )
        if chosen not in (0.0, 1.0):
            raise HydraConfigError(
                f"DPO: 'chosen' of example {number} is {chosen}, expected 0 or 1"
            )
        side, pair = sides[0 if chosen else 1], int(pair)
        if pair in side:
            what = "chosen" if chosen else "rejected"
            raise HydraConfigError(
                f"DPO: examples {side[pair]} and {number} are both the {what} one of pair {pair}; give each pair a "
                "number of its own"
            )
        side[pair] = number
    if alone := sides[0].keys() ^ sides[1].keys():
        pair = min(alone)
        number = sides[0].get(pair, sides[1].get(pair))
        raise HydraConfigError(
            f"DPO: example {number} is alone in pair {pair}; both sequences of a pair belong into one global batch"
        )
    return list(sides[0].values()), [sides[1][pair] for pair in sides[0]]


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
