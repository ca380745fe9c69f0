"""A loss and the fields of one global batch's examples: read, checked, alike on all ranks, and cut
into rows.

Legend: T tokens of a packed micro-batch, N sequences of a global batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.losses.loss import NUM_COUNTED, WEIGHT, Fields, Loss, SequenceLoss, Tokens
from ds_hydra.engine.ranks.agreement import broadcast_text, gather_rows, on_all_ranks
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.errors import HydraConfigError, HydraError, PlanMismatchError
from ds_hydra.sampler.data.examples import IGNORED_LABEL, check_unmasked

_INDEX = "number of the token in the global batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Objective of an iteration: `loss` of all sequences over `normaliser`, with the fields of
    each.
    """

    loss: Loss
    normaliser: float
    fields: Sequence[Fields]

    @classmethod
    def read(
        cls,
        loss: Loss,
        rows: Sequence[Mapping[str, Any]],
        labels: Sequence[Tensor],
        num_logits: int | None = None,
    ) -> Objective:
        """The objective of `rows`, whose `labels` [l] say what counts, for a model of `num_logits`.
        Raises HydraConfigError naming the loss, and the example and field where it is one's.
        """
        if not isinstance(loss, Loss):
            raise HydraConfigError(
                f"loss is {loss!r:.80}, expected an object of a subclass of ds_hydra.losses.Loss, "
                "such as ds_hydra.losses.CrossEntropy()"
            )
        _check_names(loss)
        fields = [
            _read_fields(loss, row, len(l), number)
            for number, (row, l) in enumerate(zip(rows, labels, strict=True))
        ]
        _check_shapes(loss, fields)
        counts = [_predicted(l) for l in labels]
        _check_candidates(loss, fields, counts, num_logits)
        normaliser = _read_number(loss, counts, fields)
        if not 0 < normaliser < float("inf"):
            raise HydraConfigError(
                f"loss {name_of(loss)} is divided by {normaliser} in this global batch, expected a finite number "
                "above 0; some token of some example must count, and weights of tokens add up to such a number"
            )
        counted = (torch.tensor(float(count.sum())) for count in counts)
        with_counts = [{**f, NUM_COUNTED: number} for f, number in zip(fields, counted)]
        return cls(loss=loss, normaliser=normaliser, fields=with_counts)

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
        # In fp64: losses of pairs are differences of such sums, and small beside them.
        sums_N = torch.stack([values.double().sum() for values in log_probs]).requires_grad_()
        counts_N = torch.stack([_predicted(l).sum() for l in labels])
        what = f"the global batch of {len(labels)} examples"
        with _of_the_user(self.loss, what):
            value = self.loss.of_sequences(sums_N, counts_N, self.fields)
        if problem := find_problem(self.loss, value, "sums_N", "over sequences"):
            raise HydraConfigError(problem)
        (weights_N,) = torch.autograd.grad(value, sums_N)
        if not bool(value.isfinite() & weights_N.isfinite().all()):
            bad = [n for n, w in enumerate(weights_N.tolist()) if w != w] or ["all"]
            raise HydraConfigError(
                f"loss {name_of(self.loss)} of the global batch is {float(value)}, and its derivative not finite for "
                f"example {bad[0]}; look at its fields {', '.join(self.loss.sequence_fields)}"
            )
        fields = [{**f, WEIGHT: w} for f, w in zip(self.fields, weights_N.float())]
        return WeightedObjective(
            loss=self.loss,
            normaliser=self.normaliser,
            fields=fields,
            value=value.item() / self.normaliser,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedObjective(Objective):
    """An objective of known `value`, whose gradient is that of weighted sums."""

    value: float


class TokenScoreRecorder(Loss):
    """Keeps the scores of every token of a global batch, without a loss or beside the `inner` one.

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
        self.inner = inner
        reads = Loss() if inner is None else inner
        self.token_fields = (_INDEX, *reads.token_fields)
        self.sequence_fields = reads.sequence_fields
        self.needs_entropy = entropy or reads.needs_entropy
        self.needs_mean_log_prob = reads.needs_mean_log_prob
        self.candidates = reads.candidates
        names = ["log_probs"]
        names += ["entropy"] * entropy + ["is_top1", "mean_logit"] * details
        self._kept = {name: torch.zeros(num_tokens, device=device) for name in names}

    def objective(self, lengths: Sequence[int], given: Objective | None = None) -> Objective:
        """The objective for evaluating `lengths`; with the inner loss the one to train on."""
        numbers = torch.arange(sum(lengths)).split(list(lengths))
        fields = [{_INDEX: n} for n in numbers]
        if given is None:
            return Objective(loss=self, normaliser=1.0, fields=fields)
        both = [{**f, **own} for f, own in zip(given.fields, fields, strict=True)]
        return Objective(loss=self, normaliser=given.normaliser, fields=both)

    def __call__(self, tokens: Tokens) -> Tensor:
        """The inner loss; without one there is nothing to minimise."""
        # What is not predicted goes to the first token of the global batch, which nothing predicts.
        index_T = tokens.fields[_INDEX].masked_fill(~tokens.counts_T, 0)
        for name, kept in self._kept.items():
            values_T = getattr(tokens.scores, f"{name}_T")
            kept[index_T] = torch.where(tokens.counts_T, values_T.detach(), 0.0)
        return tokens.log_probs_T.new_zeros(()) if self.inner is None else self.inner(tokens)

    def gather(self, lengths: Sequence[int], here: Sequence[bool]) -> Scores:
        """Scores of all sequences on every rank; each counts where it is `here`, on one rank of a
        TP group. Collective over all ranks.
        """
        values = torch.stack(list(self._kept.values()))
        here_S = torch.tensor(here).repeat_interleave(torch.tensor(lengths))
        values = values * to_device(here_S, values.device)
        dist.all_reduce(values)
        of_sequences = (kept.split(list(lengths)) for kept in values.cpu())
        return Scores(**dict(zip(self._kept, of_sequences)))


class Scores(NamedTuple):
    """Scores of the sequences of a global batch, in its order; fp32 on the CPU.

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
    """Name of `loss` in errors."""
    if isinstance(loss, TokenScoreRecorder) and loss.inner is not None:
        loss = loss.inner
    return type(loss).__name__


def find_problem(
    loss: Loss, value: Any, scores: str = "log_probs_T or another score", sums: str = "over tokens"
) -> str:
    """Reason that `value`, which `loss` has returned, cannot train. "" where it can."""
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        found = type(value).__name__
        if isinstance(value, Tensor):
            found = str(list(value.shape) if value.dim() else value.dtype)
        return (
            f"loss {name_of(loss)} returned {found}, expected one number: the sum {sums}, a "
            "floating-point tensor of shape []"
        )
    if not value.requires_grad:
        return (
            f"loss {name_of(loss)} returned a number that does not depend on {scores}, so nothing would be trained; "
            "leave out detach() and torch.no_grad()"
        )
    return ""


def evaluate(loss: Loss, tokens: Tokens, examples: Sequence[int]) -> tuple[Tensor, str]:
    """Evaluate `loss` on `tokens`, of a micro-batch with these `examples`. Where it cannot train,
    returns 0, with a gradient that other ranks may wait for, and the reason. A constant 0 rightly
    trains nothing.
    """
    nothing = tokens.log_probs_T.sum() * 0.0
    where = f"the micro-batch of examples {', '.join(map(str, sorted(examples)))}"
    try:
        with _of_the_user(loss, where):
            value = loss(tokens)
    except HydraError as error:
        return nothing, str(error)
    if not (problem := find_problem(loss, value)):
        return value, ""
    is_constant = isinstance(value, Tensor) and not value.dim() and value.is_floating_point()
    if is_constant and not (torch.is_grad_enabled() and float(value)):
        return nothing + value, ""
    return nothing, f"{problem} (in {where})"


@contextlib.contextmanager
def _of_the_user(loss: Loss, what: str) -> Iterator[None]:
    """Errors of the code of `loss`, called for `what`, are HydraConfigErrors that say so."""
    try:
        yield
    except HydraError:
        raise
    except Exception as error:
        raise HydraConfigError(
            f"loss {name_of(loss)} raised {type(error).__name__} for {what}: {error}"
        ) from error


def _check_names(loss: Loss) -> None:
    for kind in ("token_fields", "sequence_fields"):
        names = getattr(loss, kind)
        if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
            raise HydraConfigError(
                f"loss {name_of(loss)} has {kind} {names!r:.80}, expected a tuple of names, such as ('advantages',)"
            )
    wanted = loss.candidates
    if wanted is not None and wanted not in loss.token_fields:
        raise HydraConfigError(
            f"loss {name_of(loss)} has candidates {wanted!r:.80}, expected one of its token_fields: "
            f"{', '.join(map(repr, loss.token_fields)) or 'it has none'}"
        )


def _check_shapes(loss: Loss, fields: Sequence[Fields]) -> None:
    """Micro-batches join the examples that they hold, whichever these are."""
    for name in loss.token_fields:
        wanted = fields[0][name].shape[1:]
        for number, of_example in enumerate(fields):
            if (found := of_example[name].shape[1:]) != wanted:
                raise HydraConfigError(
                    f"loss {name_of(loss)} reads {name!r}, which has {list(found) or 'one value'} for each token of "
                    f"example {number} and {list(wanted) or 'one value'} for each of example 0; give all examples as "
                    "many"
                )


def _check_candidates(
    loss: Loss, fields: Sequence[Fields], counts: Sequence[Tensor], num_logits: int | None
) -> None:
    if (name := loss.candidates) is None:
        return
    for number, (of_example, count) in enumerate(zip(fields, counts, strict=True)):
        ids = of_example[name]
        what = f"loss {name_of(loss)} reads candidates {name!r}, which example {number} of the global batch has"
        if ids.dim() != 2:
            raise HydraConfigError(
                f"{what} in shape {list(ids.shape)}, expected [{len(ids)}, k]: k token ids for each of its input_ids"
            )
        ids = ids[count]
        outside = ids[(ids < 0) | (ids >= num_logits)] if num_logits else ids[ids < 0]
        if len(outside):
            raise HydraConfigError(
                f"{what} with {int(outside[0])} where a token counts, expected token ids"
                f"{f' below {num_logits}' if num_logits else ''}"
            )


def _read_number(loss: Loss, counts: Sequence[Tensor], fields: Sequence[Fields]) -> float:
    with _of_the_user(loss, f"the normaliser of {len(counts)} examples"):
        return float(loss.normaliser(counts, fields))


def _predicted(labels: Tensor) -> Tensor:
    """[l] bool: which tokens are predicted; nothing predicts the first."""
    counts = labels != IGNORED_LABEL
    counts[:1] = False
    return counts


def _read_fields(loss: Loss, row: Mapping[str, Any], length: int, number: int) -> Fields:
    found = {}
    for name in (*loss.token_fields, *loss.sequence_fields):
        what = f"loss {name_of(loss)} reads {name!r}, which example {number} of the global batch"
        if name not in row:
            raise HydraConfigError(f"{what} lacks; it has {', '.join(map(repr, sorted(row)))}")
        check_unmasked(row[name], f"{name!r} of example {number} of the global batch")
        try:
            values = torch.as_tensor(row[name]).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise HydraConfigError(f"{what} has as what cannot be read: {error}") from error
        is_ids = name == loss.candidates
        if is_ids and values.numel() and (values.is_floating_point() or values.is_complex()):
            raise HydraConfigError(f"{what} has as {values.dtype}, expected integers: token ids")
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


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, Enum, Tensor, np.ndarray)
_SAME_NUMBER = 1e-9
"""Relative. Hosts with other instructions may add up in another order."""


def fingerprint(objective: Objective | None) -> tuple[int, int]:
    """63-bit digest of the loss, its parameters and the fields that it reads; the bits of the
    normaliser.
    """
    if objective is None:
        return 0, 0
    digest = hashlib.blake2b(repr(list(_parameters(objective))).encode(), digest_size=8)
    for fields in objective.fields:
        for name in read_by(objective.loss):
            digest.update(f"{name} {list(fields[name].shape)}".encode())
            digest.update(fields[name].contiguous().numpy())
    (bits,) = struct.unpack("<q", struct.pack("<d", objective.normaliser))
    return int.from_bytes(digest.digest(), "big") >> 1, bits


def are_alike(mine: tuple[int, int], theirs: tuple[int, int]) -> bool:
    """Whether two ranks' `fingerprint`s are of one objective."""
    one, other = (struct.unpack("<d", struct.pack("<q", bits))[0] for _, bits in (mine, theirs))
    return mine[0] == theirs[0] and math.isclose(one, other, rel_tol=_SAME_NUMBER)


def find_difference(objective: Objective | None, rank: int, device: torch.device) -> str:
    """Describe how the objectives of `rank` and rank 0 differ. Collective over all ranks."""
    mine = [text for part in _parts(objective) for text in part]
    first, other = (
        dict(zip(texts[::2], texts[1::2]))
        for texts in (broadcast_text(mine, source, device) for source in (0, rank))
    )
    for name in (*first, *other):
        if first.get(name) != other.get(name):
            return f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
    return f"the loss is another one on rank {rank} than on rank 0"


def check_value(loss: str, numbers: Tensor, device: torch.device) -> None:
    """Raise PlanMismatchError on all ranks where the loss gives different `numbers` [n] fp64,
    although its fields are equal. Collective over all ranks.
    """
    rows = gather_rows(numbers.to(device)).cpu()
    for rank, row in enumerate(rows):
        if not torch.allclose(row, rows[0], rtol=1e-6, atol=1e-12):
            raise on_all_ranks(
                PlanMismatchError(
                    f"loss {loss} of the global batch is {float(rows[0][0])} on rank 0 and {float(row[0])} on rank "
                    f"{rank}, of the same fields; give every rank the same numbers in what it reads beside them"
                )
            )


def _parameters(objective: Objective) -> Iterator[tuple[str, str]]:
    """Names and values of the given loss's settings: numbers, texts, tuples and arrays in
    attributes whose names do not begin with "_".
    """
    loss = objective.loss
    yield "the loss", name_of(loss)
    for name in dir(loss):
        value = None if name.startswith("_") else inspect.getattr_static(loss, name)
        if isinstance(value, MemberDescriptorType):  # of a class with slots
            value = getattr(loss, name, None)
        if value is not None and _is_plain(value):
            yield f"{name} of loss {name_of(loss)}", _text(value)


def _parts(objective: Objective | None) -> Iterator[tuple[str, str]]:
    """All that is compared, each with its name."""
    if objective is None:
        yield "the loss", "the mean cross entropy"
        return
    yield from _parameters(objective)
    yield f"what loss {name_of(objective.loss)} is divided by", str(objective.normaliser)
    for name in read_by(objective.loss):
        for number, fields in enumerate(objective.fields):
            yield f"{name!r} of example {number} of the global batch", _text(fields[name])


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Tensor | np.ndarray):
        held = torch.as_tensor(value).detach().cpu().contiguous()
        if not held.dim():
            return str(held.item())
        digest = hashlib.blake2b(held.flatten().view(torch.uint8).numpy(), digest_size=4)
        return f"{list(held.shape)} values (digest {digest.hexdigest()})"
    return repr(value)
