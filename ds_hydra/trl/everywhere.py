"""One mini-batch out of what each rank's data loader gave: scored and trained by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hydra.engine import HydraEngine
from ds_hydra.engine.losses import Loss, Tokens
from ds_hydra.engine.losses.objective import Scores
from ds_hydra.engine.ranks.agreement import gather_ragged, gather_rows

WEIGHT, ENTROPY_WEIGHT = "weight", "entropy_weight"


@dataclass(frozen=True, kw_only=True)
class Weighted(Loss):
    """Log-probabilities (and entropies) times given weights, summed: what has the gradient of any
    function of them whose derivatives are the weights.

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

    Returns the weighted sum, and with `keep_scores` the scores of this rank's sequences.
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
    value = float(engine.train_batch(batch, loss=loss, keep_scores=keep_scores))
    return value, _own(engine.last_scores, ranks, engine) if keep_scores else None


def _own(scores: Scores, ranks: Sequence[Sequence[Tensor]], engine: HydraEngine) -> Scores:
    """What of `scores` is about this rank's sequences."""
    rank = engine.global_rank
    begin = sum(map(len, ranks[:rank]))
    return Scores(*(values[begin : begin + len(ranks[rank])] for values in scores))
