"""`score` and a GRPO step on one global batch of rollouts: ds_hydra, and stock DeepSpeed ZeRO-3 on
Karmarkar-Karp's rows as trainers of reinforcement learning write it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from stock_trainer import PACKED_ATTENTION, per_sequence_attention
from torch import Tensor, nn
from training_setup import Task, Turns, ds_config, start_engine
from workloads import Batch, Placement, Shape, place_balanced_flops, place_balanced_tokens

import ds_hydra

PROMPT, CLIP = 16, 0.2
NOT_COUNTED = -100

Rollouts = list[dict[str, Any]]


def rollouts_of(task: Task) -> list[Rollouts]:
    """The global batches: tokens, labels without the prompt, an advantage for each rollout."""
    generator = torch.Generator().manual_seed(task.seed)
    batches = []
    for batch in task.batches:
        rollouts = []
        for length in batch:
            ids = torch.tensor(task.tokens_of(length, generator))
            labels = ids.clone()
            labels[:PROMPT] = NOT_COUNTED
            advantage = float(torch.randn((), generator=generator))
            rollouts.append({"input_ids": ids, "labels": labels, "advantages": advantage})
        batches.append(rollouts)
    return batches


def run_hydra(task: Task, turns: Turns) -> None:
    """`engine.score`, then `engine.train_batch(loss=GRPO())`."""
    profiling = {"lengths": [512, 1024, 2048], "repeats": 2}
    engine = start_engine(task, profiling=profiling)
    turns.ready()
    for rollouts in rollouts_of(task):
        turns.wait()
        old = engine.score(rollouts).log_probs
        batch = [{**r, "old_log_probs": values} for r, values in zip(rollouts, old, strict=True)]
        loss = float(engine.train_batch(batch, loss=PolicyLoss()))
        turns.done(
            loss if dist.get_rank() == 0 else 0.0,
            metrics={
                "strategy": str(engine.last_metrics.strategy),
                "grad_norm": float(engine.get_global_grad_norm()),
            },
        )
    turns.wait()


class PolicyLoss(ds_hydra.losses.Loss):
    """The clipped loss of `stock_loss`, mean over tokens."""

    token_fields, sequence_fields = ("old_log_probs",), ("advantages",)

    def __call__(self, tokens: ds_hydra.losses.Tokens) -> Tensor:
        """Sum over the tokens that count."""
        log_probs_T, advantages_T = tokens.log_probs_T, tokens.fields["advantages"]
        ratio_T = (log_probs_T - tokens.fields["old_log_probs"]).exp()
        clipped_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
        loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        return loss_T[tokens.counts_T].sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRows:
    """How rows are made: every rank the same number of them, at most about `row_tokens` long."""

    place: Callable[[Batch, Shape], Placement]
    row_tokens: int

    def rows(self, batch: Batch, shape: Shape) -> Placement:
        of_batch = replace(shape, context_length=self.row_tokens, tokens_per_iteration=sum(batch))
        return self.place(batch, of_batch)


STOCK_ROWS = {
    "rollouts_kk_tokens": StockRows(place=place_balanced_tokens, row_tokens=8192),
    "rollouts_kk_flops": StockRows(place=place_balanced_flops, row_tokens=8192),
    "rollouts_kk_flops_one_row": StockRows(place=place_balanced_flops, row_tokens=10**9),
}


def run_stock(task: Task, turns: Turns, *, stock: StockRows) -> None:
    """The rows of a rank forward for their log-probabilities, then forward and backward."""
    transformers.AttentionInterface.register(PACKED_ATTENTION, per_sequence_attention)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = task.model.build(task.shape.context_length)
    model.config._attn_implementation = PACKED_ATTENTION
    engine, *_ = deepspeed.initialize(model=model, config=ds_config())
    turns.ready()
    for lengths, rollouts in zip(task.batches, rollouts_of(task), strict=True):
        turns.wait()
        rows = [
            _pack([rollouts[i] for i in slot[rank]]) for slot in stock.rows(lengths, task.shape)
        ]
        counted = sum(len(r["labels"]) - PROMPT for r in rollouts)
        with torch.no_grad():
            for row in rows:
                row["old"] = _log_probs(engine, row)
        total = 0.0
        for number, row in enumerate(rows):
            log_p = _log_probs(engine, row)
            ratio = (log_p - row["old"]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            by_token = -torch.minimum(ratio * row["advantages"], clipped * row["advantages"])
            loss = by_token[row["targets"] != NOT_COUNTED].sum() / counted
            engine.set_gradient_accumulation_boundary(number == len(rows) - 1)
            engine.backward(loss * world)
            total += float(loss.detach())
        engine.step()
        norm = float(engine.get_global_grad_norm())
        turns.done(total, metrics={"strategy": f"{len(rows)} rows", "grad_norm": norm})
    turns.wait()


def _pack(rollouts: Rollouts) -> dict[str, Tensor]:
    """One row; an empty one becomes a token that does not count."""
    if not rollouts:
        one = torch.zeros(1, dtype=torch.int64)
        rollouts = [{"input_ids": one, "labels": one + NOT_COUNTED, "advantages": 0.0}]
    targets = [nn.functional.pad(r["labels"][1:], (0, 1), value=NOT_COUNTED) for r in rollouts]
    lengths = [len(r["input_ids"]) for r in rollouts]
    return {
        "input_ids": torch.cat([r["input_ids"] for r in rollouts])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "targets": torch.cat(targets),
        "advantages": torch.cat(
            [torch.full((n,), r["advantages"]) for n, r in zip(lengths, rollouts, strict=True)]
        ),
    }


def _log_probs(engine: Any, row: dict[str, Tensor]) -> Tensor:
    """[T] of each target, 0 where nothing counts; by the fused cross entropy."""
    logits = engine(
        input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False
    ).logits[0]
    return -nn.functional.cross_entropy(
        logits, row["targets"], ignore_index=NOT_COUNTED, reduction="none"
    )
