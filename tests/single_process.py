"""What every strategy must reproduce: one process, the plain HF model, each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Examples = list[dict[str, Tensor]]


def random_examples(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Examples:
    """Random tokens; a third of the labels of every third example do not count."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for index, length in enumerate(lengths):
        input_ids = torch.randint(0, vocab_size, (length,), generator=generator)
        labels = input_ids.clone()
        if index % 3 == 2:
            labels[: length // 3] = -100
        examples.append({"input_ids": input_ids, "labels": labels})
    return examples


def num_label_tokens(examples: Examples) -> int:
    return sum(int((e["labels"][1:] != -100).sum()) for e in examples)


def summed_loss(model: Any, example: dict[str, Tensor]) -> Tensor:
    """Sum of the cross entropies of one sequence run alone, in fp32 (in fp64 for a model in it)."""
    logits = model(input_ids=example["input_ids"].unsqueeze(0), use_cache=False).logits[0]
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        logits[:-1].to(exact), example["labels"][1:], reduction="sum", ignore_index=-100
    )


def token_mean_gradients(model: nn.Module, examples: Examples) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the token mean over all labels of all examples."""
    total = num_label_tokens(examples)
    model.zero_grad()
    loss = 0.0
    for example in examples:
        part = summed_loss(model, example) / total
        part.backward()
        loss += float(part)
    return loss, [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
    ]
