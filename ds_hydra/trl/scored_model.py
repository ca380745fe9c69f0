"""Replacement of the model in a Trainer's `compute_loss`: the engine's scores, with gradients that
end there.

[Note: Losses as TRL computes them]
`compute_loss` runs as it is written, on each rank's own batch. The batch is taken apart into
sequences, and those of all ranks become one global batch of the engine. The model that
`compute_loss` calls gives log-probabilities (and entropies) that all ranks have computed together,
as leaves of the graph. What `backward` leaves in them is all that the weights' gradient needs to
know of the loss, whatever it is: the gradient is that of the log-probabilities' sum, weighted by
it, and on that sum the engine trains (`train_everywhere`).

Legend: B rows and L places of a collated batch, l tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from ds_hydra.engine import HydraEngine
from ds_hydra.engine.losses import Loss, Tokens
from ds_hydra.engine.losses.objective import Scores
from ds_hydra.engine.ranks.agreement import gather_ragged, gather_rows
from ds_hydra.errors import HydraConfigError


class Span(NamedTuple):
    """Place of a sequence in a batch."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one collated batch, without padding, in the order of its rows."""

    ids: tuple[Tensor, ...]
    """[l] int64 on the CPU."""
    spans: tuple[Span, ...]
    shape: tuple[int, int]
    device: torch.device

    @classmethod
    def read(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Sequences:
        """Sequences of `input_ids` [B, L]: where `attention_mask` is 1, or where positions go on.

        Those of a single token, in which nothing is predicted, are left out. Raises
        HydraConfigError for a mask with holes.

        >>> ids = torch.tensor([[0, 5, 6], [7, 8, 0]])
        >>> Sequences.read(ids, (ids > 0).long()).spans
        (Span(row=0, begin=1, end=3), Span(row=1, begin=0, end=2))
        >>> Sequences.read(torch.tensor([[5, 6, 7, 8]]), None, torch.tensor([[0, 1, 0, 1]])).spans
        (Span(row=0, begin=0, end=2), Span(row=0, begin=2, end=4))
        """
        on_cpu = input_ids.detach().cpu()
        if attention_mask is not None:
            spans = list(_between_padding(attention_mask.detach().cpu()))
        else:
            spans = [Span(row, 0, on_cpu.shape[1]) for row in range(len(on_cpu))]
        if position_ids is not None:
            parts = list(_by_positions(spans, position_ids.detach().cpu().expand(on_cpu.shape)))
            if attention_mask is not None and len(parts) != len(spans):
                row = next(
                    part.row for part, span in zip(parts, spans, strict=False) if part != span
                )
                raise HydraConfigError(
                    f"'position_ids' of row {row} of a batch begin anew inside of what 'attention_mask' joins; leave "
                    "attention_mask out where a row has several sequences: mend data_collator"
                )
            spans = parts
        spans = [span for span in spans if span.end - span.begin > 1]
        ids = tuple(on_cpu[row, begin:end] for row, begin, end in spans)
        return cls(ids, tuple(spans), tuple(on_cpu.shape), input_ids.device)

    def spread(self, values: Sequence[Tensor]) -> Tensor:
        """[B, L-1] fp32 of a value [l] for each token: place i is about token i+1, padding is 0."""
        spread = torch.zeros(self.shape, dtype=torch.float32)
        for (row, begin, end), of_tokens in zip(self.spans, values, strict=True):
            spread[row, begin:end] = of_tokens
        return spread[:, 1:].to(self.device)

    def collect(self, spread: Tensor | None) -> list[Tensor]:
        """[l] for each sequence out of what `spread` makes; zeros where that is None."""
        if spread is None:
            return [torch.zeros(len(ids), dtype=torch.float32) for ids in self.ids]
        whole = torch.nn.functional.pad(spread.detach().float().cpu(), (1, 0))
        return [whole[row, begin:end].clone() for row, begin, end in self.spans]


def _between_padding(mask: Tensor) -> Iterator[Span]:
    for row, values in enumerate(mask.bool()):
        places = values.nonzero().flatten().tolist()
        if not places:
            continue
        span = Span(row, places[0], places[-1] + 1)
        if len(places) != span.end - span.begin:
            raise HydraConfigError(
                f"'attention_mask' of row {row} of a batch has {len(places)} ones between place {span.begin} and "
                f"{span.end - 1}; only padding at the beginning or the end can be taken away: mend data_collator"
            )
        yield span


def _by_positions(spans: Iterable[Span], position_ids: Tensor) -> Iterator[Span]:
    """The sequences of each span: as in transformers one begins where positions do not go on."""
    for row, begin, end in spans:
        breaks = (position_ids[row, begin:end].diff() != 1).nonzero().flatten() + begin + 1
        begins = [begin, *breaks.tolist()]
        for first, last in zip(begins, [*begins[1:], end], strict=True):
            yield Span(row, first, last)


WEIGHT, ENTROPY_WEIGHT = "weight", "entropy_weight"


@dataclass(frozen=True, kw_only=True)
class Weighted(Loss):
    """Log-probabilities (and entropies) times given weights, summed. The sum has the gradient of
    any function of them whose derivatives are the weights.

    `label_smoothing` mixes in the mean over the vocabulary, as transformers does.
    """

    label_smoothing: float = 0.0
    with_entropy: bool = False

    def __post_init__(self) -> None:
        names = (WEIGHT, *([ENTROPY_WEIGHT] if self.with_entropy else []))
        object.__setattr__(self, "token_fields", names)
        object.__setattr__(self, "needs_entropy", self.with_entropy)
        object.__setattr__(self, "needs_mean_log_prob", self.label_smoothing > 0)

    def __call__(self, tokens: Tokens) -> Tensor:
        """Sum over the tokens."""
        values_T = tokens.log_probs_T
        if self.label_smoothing:
            values_T = values_T.lerp(tokens.scores.mean_log_prob_T, self.label_smoothing)
        total = (values_T * tokens.fields[WEIGHT]).sum()
        if self.with_entropy:
            total = total + (tokens.scores.entropy_T * tokens.fields[ENTROPY_WEIGHT]).sum()
        return total

    def normaliser(self, counts: Sequence[Tensor], fields: Sequence[object]) -> float:
        """1: the weights have all there is to divide by."""
        return 1.0


def score_everywhere(engine: HydraEngine, ids: Sequence[Tensor], *, noise: bool = False) -> Scores:
    """Scores of this rank's sequences `ids` [l], by all ranks together, with the `noise` of the
    iteration that trains them next. Collective over all ranks; each may bring another number of
    them.
    """
    ranks = gather_ragged(ids, torch.int64, engine.device)
    batch = [{"input_ids": tokens} for of_rank in ranks for tokens in of_rank]
    if not batch:
        return Scores((), (), (), ())
    return _own(engine.score(batch, entropy=True, details=True, noise=noise), ranks, engine)


def train_everywhere(
    engine: HydraEngine,
    ids: Sequence[Tensor],
    weights: Sequence[Tensor],
    entropy_weights: Sequence[Tensor],
    *,
    label_smoothing: float = 0.0,
    keep_scores: bool = False,
) -> tuple[float, Scores | None]:
    """One iteration of the engine on the sequences of all ranks, each with a weight for each of its
    tokens' log-probabilities and entropies. Collective over all ranks.

    Returns the weighted sum, and with `keep_scores` the scores of this rank's sequences. Where no
    rank has a sequence, because all rows have one token, the gradients are zero, as in TRL.
    """
    ranks = gather_ragged(ids, torch.int64, engine.device)
    has_entropy = torch.tensor([any(w.any() for w in entropy_weights)], device=engine.device)
    loss = Weighted(
        label_smoothing=label_smoothing, with_entropy=bool(gather_rows(has_entropy).any())
    )
    columns = {"input_ids": ranks, WEIGHT: gather_ragged(weights, torch.float32, engine.device)}
    if loss.with_entropy:
        columns[ENTROPY_WEIGHT] = gather_ragged(entropy_weights, torch.float32, engine.device)
    flat = {name: [t for rank in lists for t in rank] for name, lists in columns.items()}
    batch = [dict(zip(flat, row)) for row in zip(*flat.values(), strict=True)]
    if not batch:  # the optimizer steps all the same
        batch = [{"input_ids": torch.zeros(2, dtype=torch.int64), WEIGHT: torch.zeros(2)}]
    value = float(engine.train_batch(batch, loss=loss, keep_scores=keep_scores))
    return value, _own(engine.last_scores, ranks, engine) if keep_scores else None


def _own(scores: Scores, ranks: Sequence[Sequence[Tensor]], engine: HydraEngine) -> Scores:
    """The part of `scores` that is about this rank's sequences."""
    rank = engine.global_rank
    begin = sum(map(len, ranks[:rank]))
    return Scores(*(values[begin : begin + len(ranks[rank])] for values in scores))


_READ = ("input_ids", "attention_mask", "position_ids", "labels")
_NOT_NEEDED = (
    "use_cache", "output_router_logits", "num_items_in_batch", "return_dict", "logits_to_keep",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "token_type_ids",
)  # fmt: skip
"""Arguments that add nothing to ids and masks: sequences run apart and without a cache."""

_IGNORED = -100


@dataclass(slots=True)
class Call:
    """One call of the model, and the leaves that it gave."""

    sequences: Sequences
    log_probs: Tensor
    entropy: Tensor

    def weights(self, share: float) -> tuple[list[Tensor], list[Tensor]]:
        """`share` times the derivatives by log-probabilities and entropies, [l] each."""
        by_log_prob = self.sequences.collect(self.log_probs.grad)
        by_entropy = self.sequences.collect(self.entropy.grad)
        return [w * share for w in by_log_prob], [w * share for w in by_entropy]


_INSTEAD = (
    "which no rank holds whole; compute the loss from model(**inputs, labels=labels, fused_lm_head=True), which gives "
    "log_probs and entropy of each token, or give engine.train_batch a loss of ds_hydra.losses"
)


_ELSEWHERE = ("logits", "hidden_states", "last_hidden_state", "attentions")
"""Attributes of other models' outputs that are not available here."""


class _NotThere(HydraConfigError, AttributeError):
    """Error that `hasattr` takes for a missing attribute."""


@dataclass
class _ScoredOutput(FusedCausalLMOutput):
    """Error texts for parts of other models' outputs, with a replacement."""

    def __getattr__(self, name: str) -> Any:
        if name in _ELSEWHERE:
            raise _NotThere(f"compute_loss reads {name} of the model's output, {_INSTEAD}")
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if key in _ELSEWHERE else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return `self[key]`, or `default`, as a dict does."""
        return self[key] if key in self or key in _ELSEWHERE else default


class ScoredModel:
    """Called as the model that TRL has given a fused LM head, or with labels; all else is the
    engine's.

    `score(sequences)` are the scores of a batch, a call of which is collective over all ranks.
    """

    def __init__(self, engine: HydraEngine, score: Callable[[Sequences], Scores]):
        self._engine, self._score = engine, score
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """Log-probabilities and the scores that go with them, without logits."""
        wants_logits = not fused_lm_head and ("labels" not in inputs or not torch.is_grad_enabled())
        if wants_logits or args:
            return self._logits(args, inputs)
        asked = [
            n for n in inputs if n.startswith("output_") and n not in _NOT_NEEDED and inputs[n]
        ]
        if asked:
            raise HydraConfigError(
                f"compute_loss calls the model with {', '.join(f'{name}={inputs[name]}' for name in asked)}, {_INSTEAD}"
            )
        sequences = read_sequences(inputs)
        scores = self._score(sequences)
        leaves = [sequences.spread(v) for v in (scores.log_probs, scores.entropy)]
        log_probs, entropy = (leaf.requires_grad_(torch.is_grad_enabled()) for leaf in leaves)
        self.calls.append(Call(sequences, log_probs, entropy))
        labels = inputs.get("labels", inputs["input_ids"])
        mask = labels[:, 1:] != _IGNORED
        log_probs = torch.where(mask, log_probs, 0.0)
        items = inputs.get("num_items_in_batch")
        divisor = mask.sum().clamp(min=1) if items is None else items
        return _ScoredOutput(
            loss=-log_probs.sum() / divisor,
            log_probs=log_probs,
            entropy=torch.where(mask, entropy, 0.0),
            mean_logits=torch.where(mask, sequences.spread(scores.mean_logit), 0.0),
            is_top1=mask & (sequences.spread(scores.is_top1) > 0),
            label_mask=mask,
        )

    def _logits(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled():
            raise HydraConfigError(f"compute_loss asks the model for logits, {_INSTEAD}")
        return self._engine(*args, **inputs)


def read_sequences(inputs: Mapping[str, Any]) -> Sequences:
    """The sequences of a collated batch. Raises HydraConfigError naming an argument that a model of
    text does not read.
    """
    if unread := [name for name in inputs if name not in (*_READ, *_NOT_NEEDED)]:
        raise HydraConfigError(
            f"the batch has {', '.join(map(repr, unread))}, which is not used: models are trained on token ids alone; "
            "remove it in data_collator, or from the dataset"
        )
    return Sequences.read(
        inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    )


def scored_now(engine: HydraEngine) -> ScoredModel:
    """The model of `engine`, scored when it is called."""
    return ScoredModel(engine, lambda sequences: score_everywhere(engine, sequences.ids))


def zero_scores(sequences: Sequences) -> Scores:
    """Zeros in place of scores, where only the derivatives of a linear function are asked for."""
    zeros = tuple(torch.zeros(len(ids), dtype=torch.float32) for ids in sequences.ids)
    return Scores(zeros, zeros, zeros, zeros)


class Given:
    """Scores of batches that are known already; a batch that is not among them is scored."""

    def __init__(self, engine: HydraEngine, batches: Iterable[Sequences], scores: Scores):
        self._engine = engine
        self._known: list[tuple[Sequences, Scores]] = []
        begin = 0
        for sequences in batches:
            part = slice(begin, begin + len(sequences.ids))
            self._known.append((sequences, Scores(*(values[part] for values in scores))))
            begin = part.stop

    def __call__(self, sequences: Sequences) -> Scores:
        """Scores of `sequences`."""
        for known, scores in self._known:
            if known.spans == sequences.spans and all(map(torch.equal, known.ids, sequences.ids)):
                return scores
        return score_everywhere(self._engine, sequences.ids)
