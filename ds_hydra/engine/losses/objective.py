"""A loss and the fields of one mini-batch's examples: read, checked, and cut into rows.

Legend: T tokens of a packed micro-batch, N sequences of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.losses.loss import NUM_COUNTED, WEIGHT, Fields, Loss, SequenceLoss, Tokens
from ds_hydra.engine.parallel.token_scores import TokenScores
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.examples import IGNORED_LABEL

_INDEX = "number of the token in the mini-batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What an iteration minimises: `loss` of all sequences over `normaliser`, with the fields of
    each.
    """

    loss: Loss
    normaliser: float
    fields: Sequence[Fields]

    @classmethod
    def read(
        cls, loss: Loss, rows: Sequence[Mapping[str, Any]], labels: Sequence[Tensor]
    ) -> Objective:
        """The objective of `rows`, whose `labels` [l] say what counts. Raises HydraConfigError
        naming the loss, and the example and field where it is one's.
        """
        if not isinstance(loss, Loss):
            raise HydraConfigError(
                f"loss is {loss!r:.80}, expected an object of a subclass of ds_hydra.losses.Loss, "
                "such as ds_hydra.losses.GRPO()"
            )
        fields = [
            _read_fields(loss, row, len(l), number)
            for number, (row, l) in enumerate(zip(rows, labels, strict=True))
        ]
        counts = [_predicted(l) for l in labels]
        normaliser = loss.normaliser(counts, fields)
        if not 0 < normaliser < float("inf"):
            raise HydraConfigError(
                f"loss {name_of(loss)} is divided by {normaliser} in this mini-batch, expected a number above 0; "
                "some token of some example must count"
            )
        counted = (torch.tensor(float(count.sum())) for count in counts)
        with_counts = [{**f, NUM_COUNTED: number} for f, number in zip(fields, counted)]
        objective = cls(loss=loss, normaliser=normaliser, fields=with_counts)
        objective._try_out(counts)
        return objective

    def rows_of(self, position: int, part: slice, num_tokens: int) -> dict[str, Tensor]:
        """Fields of the predictions `part` of the sequence at `position`, [t] or [t, k]."""
        names = set(self.loss.sequence_fields) | {NUM_COUNTED, WEIGHT}
        found = {}
        for name, values in self.fields[position].items():
            if name in names:
                found[name] = values.expand(num_tokens)[part]
            else:
                found[name] = torch.cat([values[1:], torch.zeros_like(values[:1])])[part]
        return found

    def weighted(self, log_probs: Sequence[Tensor], labels: Sequence[Tensor]) -> WeightedObjective:
        """The second pass of a `SequenceLoss`, where tokens have these log-probabilities [l] each.

        Raises HydraConfigError where the loss, or a derivative of it, is not finite.
        """
        assert isinstance(self.loss, SequenceLoss)
        sums_N = torch.stack([values.double().sum() for values in log_probs]).requires_grad_()
        counts_N = torch.stack([_predicted(l).sum() for l in labels])
        value = self.loss.of_sequences(sums_N, counts_N, self.fields)
        if not value.requires_grad:
            raise HydraConfigError(
                f"loss {name_of(self.loss)} returned a number that does not depend on sums_N, so nothing would be "
                "trained; leave out detach() and torch.no_grad()"
            )
        (weights_N,) = torch.autograd.grad(value, sums_N)
        if not bool(value.isfinite() & weights_N.isfinite().all()):
            bad = [n for n, w in enumerate(weights_N.tolist()) if w != w] or ["all"]
            raise HydraConfigError(
                f"loss {name_of(self.loss)} of the mini-batch is {float(value)}, and its derivative not finite for "
                f"example {bad[0]}; look at its fields {', '.join(self.loss.sequence_fields)}"
            )
        fields = [{**f, WEIGHT: w} for f, w in zip(self.fields, weights_N.float())]
        return WeightedObjective(
            loss=self.loss,
            normaliser=self.normaliser,
            fields=fields,
            value=value.item() / self.normaliser,
        )

    def _try_out(self, counts: Sequence[Tensor]) -> None:
        """Call a loss of tokens with those of one example: a mistake in it is everyone's."""
        if isinstance(self.loss, SequenceLoss):
            return
        number = next((n for n, count in enumerate(counts) if count.any()), 0)
        num_tokens = len(counts[number])
        log_probs_T = torch.full((num_tokens,), -1.0, requires_grad=True)
        rows = self.rows_of(number, slice(0, num_tokens), num_tokens)
        wanted = self.loss.candidates
        scores = TokenScores(
            counts_T=torch.cat([counts[number][1:], torch.zeros(1, dtype=torch.bool)]),
            log_probs_T=log_probs_T,
            log_normaliser_T=torch.ones(num_tokens),
            entropy_T=torch.ones(num_tokens) if self.loss.needs_entropy else None,
            mean_log_prob_T=-torch.ones(num_tokens) if self.loss.needs_mean_log_prob else None,
            candidate_log_probs_TK=None if wanted is None else -torch.ones(rows[wanted].shape),
        )
        name = name_of(self.loss)
        try:
            value = self.loss(Tokens(scores=scores, fields=rows))
        except Exception as error:  # the user's own code
            raise HydraConfigError(
                f"loss {name} raised {type(error).__name__} for example {number}: {error}"
            ) from error
        if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise HydraConfigError(
                f"loss {name} returned {shape}, expected one number: the sum over tokens, a tensor of shape []"
            )
        if not value.requires_grad:
            raise HydraConfigError(
                f"loss {name} returned a number that does not depend on log_probs_T or another score, so nothing "
                "would be trained; leave out detach() and torch.no_grad()"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedObjective(Objective):
    """An objective of known `value`, whose gradient is that of weighted sums."""

    value: float


class Collector(Loss):
    """Keeps the scores of every token of a mini-batch, without a loss or beside the `inner` one.

    What other ranks score is 0 here.
    """

    def __init__(
        self,
        num_tokens: int,
        device: torch.device,
        *,
        entropy: bool,
        details: bool = False,
        inner: Loss | None = None,
    ):
        self._inner = inner
        self.token_fields = (_INDEX, *(() if inner is None else inner.token_fields))
        self.sequence_fields = () if inner is None else inner.sequence_fields
        self.needs_entropy = entropy or (inner is not None and inner.needs_entropy)
        self.needs_mean_log_prob = inner is not None and inner.needs_mean_log_prob
        self.candidates = None if inner is None else inner.candidates
        names = ["log_probs"]
        names += ["entropy"] * entropy + ["is_top1", "mean_logit"] * details
        self._kept = {name: torch.zeros(num_tokens, device=device) for name in names}

    def objective(self, lengths: Sequence[int], given: Objective | None = None) -> Objective:
        """What to evaluate sequences of `lengths` with; with the inner loss what to train on."""
        numbers = torch.arange(sum(lengths)).split(list(lengths))
        fields = [{_INDEX: n} for n in numbers]
        if given is None:
            return Objective(loss=self, normaliser=1.0, fields=fields)
        both = [{**f, **own} for f, own in zip(given.fields, fields, strict=True)]
        return Objective(loss=self, normaliser=given.normaliser, fields=both)

    def __call__(self, tokens: Tokens) -> Tensor:
        """The inner loss; without one there is nothing to minimise."""
        # What is not predicted goes to the first token of the mini-batch, which nothing predicts.
        index_T = tokens.fields[_INDEX].masked_fill(~tokens.counts_T, 0)
        for name, kept in self._kept.items():
            values_T = getattr(tokens.scores, f"{name}_T")
            kept[index_T] = torch.where(tokens.counts_T, values_T.detach(), 0.0)
        return tokens.log_probs_T.new_zeros(()) if self._inner is None else self._inner(tokens)

    def gather(self, lengths: Sequence[int], here: Sequence[bool]) -> Scores:
        """Scores of all sequences on every rank; each counts where it is `here`, on one rank of a
        TP group. Collective over all ranks.
        """
        values = torch.stack(list(self._kept.values()))
        here_S = torch.tensor(here, device=values.device)
        values = values * here_S.repeat_interleave(torch.tensor(lengths, device=values.device))
        dist.all_reduce(values)
        of_sequences = (kept.split(list(lengths)) for kept in values.cpu())
        return Scores(**dict(zip(self._kept, of_sequences)))


class Scores(NamedTuple):
    """What a model says of the sequences of a mini-batch, in its order; fp32 on the CPU.

    Value i of a sequence is about its token i, given those before it; the first is 0.
    """

    log_probs: tuple[Tensor, ...]
    """[l] of each sequence: log-probability of its tokens."""
    entropy: tuple[Tensor, ...] = ()
    """[l] of each sequence: entropy of the prediction of each token; empty where not asked for."""
    is_top1: tuple[Tensor, ...] = ()
    """[l] of each sequence: 1 where no token is more probable; empty where not asked for."""
    mean_logit: tuple[Tensor, ...] = ()
    """[l] of each sequence: mean logit over the vocabulary; empty where not asked for."""


def read_by(loss: Loss | None) -> tuple[str, ...]:
    """Names of the fields that `loss` reads."""
    return (*loss.token_fields, *loss.sequence_fields) if isinstance(loss, Loss) else ()


def name_of(loss: Loss) -> str:
    """As errors name it."""
    return type(loss).__name__


def _predicted(labels: Tensor) -> Tensor:
    """[l] bool: which tokens are predicted; nothing predicts the first."""
    counts = labels != IGNORED_LABEL
    counts[:1] = False
    return counts


def _read_fields(loss: Loss, row: Mapping[str, Any], length: int, number: int) -> Fields:
    found = {}
    for name in (*loss.token_fields, *loss.sequence_fields):
        what = f"loss {name_of(loss)} reads {name!r}, which example {number} of the mini-batch"
        if name not in row:
            raise HydraConfigError(f"{what} lacks; it has {', '.join(map(repr, sorted(row)))}")
        try:
            values = torch.as_tensor(row[name]).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise HydraConfigError(f"{what} has as what cannot be read: {error}") from error
        is_ids = name == loss.candidates
        values = values.to(torch.int64 if is_ids else torch.float32)
        if name in loss.sequence_fields and values.dim():
            raise HydraConfigError(f"{what} has in shape {list(values.shape)}, expected one number")
        if name in loss.token_fields and (not values.dim() or len(values) != length):
            raise HydraConfigError(
                f"{what} has in shape {list(values.shape)}, expected {length} values: one for each of its input_ids"
            )
        if values.isnan().any():
            at = values.isnan().nonzero()[0].tolist()
            raise HydraConfigError(
                f"{what} has with NaN{f' at {at[0] if len(at) == 1 else at}' if at else ''}; look at what has written "
                "it, or leave out the example"
            )
        found[name] = values
    return found
