"""What a Trainer's `compute_loss` calls in place of the model: the engine's scores, with gradients
that end there.

[Note: Losses as TRL computes them]
`compute_loss` runs as it is written, on each rank's own batch. The model that it calls gives
log-probabilities (and entropies) that all ranks have computed together, as leaves of the graph.
What `backward` leaves in them is all that the weights' gradient needs to know of the loss, whatever
it is: the gradient is that of the log-probabilities' sum, weighted by it, and on that sum the
engine trains (everywhere.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from ds_hydra.engine import HydraEngine
from ds_hydra.engine.losses.objective import Scores
from ds_hydra.errors import HydraConfigError
from ds_hydra.trl.everywhere import score_everywhere
from ds_hydra.trl.sequences import Sequences

_READ = ("input_ids", "attention_mask", "position_ids", "labels")
_NOT_NEEDED = (
    "use_cache", "output_router_logits", "num_items_in_batch", "return_dict", "logits_to_keep",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "token_type_ids",
)  # fmt: skip
"""What says nothing beside ids and masks: sequences are taken apart, and run without a cache."""

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
        """Log-probabilities and what goes with them, without logits."""
        wants_logits = not fused_lm_head and ("labels" not in inputs or not torch.is_grad_enabled())
        if wants_logits or args:
            return self._logits(args, inputs)
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
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / divisor,
            log_probs=log_probs,
            entropy=torch.where(mask, entropy, 0.0),
            mean_logits=torch.where(mask, sequences.spread(scores.mean_logit), 0.0),
            is_top1=mask & (sequences.spread(scores.is_top1) > 0),
            label_mask=mask,
        )

    def _logits(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled():
            raise HydraConfigError(
                "compute_loss asks the model for logits, which no rank holds whole; compute the loss from "
                "model(**inputs, labels=labels, fused_lm_head=True), which gives log_probs and entropy of each token, "
                "or give engine.train_batch a loss of ds_hydra.losses"
            )
        return self._engine(*args, **inputs)


def read_sequences(inputs: Mapping[str, Any]) -> Sequences:
    """The sequences of a collated batch. Raises HydraConfigError naming what a model of text does
    not read.
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
    """In place of scores, where only the derivatives of a linear function are asked for."""
    zeros = tuple(torch.zeros(len(ids)) for ids in sequences.ids)
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
        """Those of `sequences`."""
        for known, scores in self._known:
            if known.spans == sequences.spans and all(map(torch.equal, known.ids, sequences.ids)):
                return scores
        return score_everywhere(self._engine, sequences.ids)
