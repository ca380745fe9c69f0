"""What every strategy must reproduce: one process, the plain HF model, each sequence alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


def load_of(examples: Examples) -> Callable[[int], tuple[Tensor, Tensor]]:
    """What gives an iteration its sequences: token ids and labels of an example."""
    return lambda position: (examples[position]["input_ids"], examples[position]["labels"])


def num_label_tokens(examples: Examples) -> int:
    return sum(int((e["labels"][1:] != -100).sum()) for e in examples)


def summed_loss(model: Any, example: dict[str, Tensor]) -> Tensor:
    """Sum of the cross entropies of one sequence run alone, in fp32 (in fp64 for a model in it)."""
    logits = model(input_ids=example["input_ids"].unsqueeze(0), use_cache=False).logits[0]
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        logits[:-1].to(exact), example["labels"][1:], reduction="sum", ignore_index=-100
    )


def balance_loss(model: Any, example: dict[str, Tensor]) -> Tensor:
    """The loss of balance of one sequence run alone, mean over layers, coefficient included:
    transformers' own function where the family has one, else DeepSeek-V3's Eqs. 17-20.
    """
    if hasattr(model, "get_base_model"):  # of adapters
        model = model.get_base_model()
    output = model.base_model(
        input_ids=example["input_ids"].unsqueeze(0), use_cache=False, output_router_logits=True
    )
    num_chosen = model.config.num_experts_per_tok
    own = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    losses = []
    for logits in output.router_logits:
        num_tokens, num_experts = logits.shape
        if own is not None:
            losses.append(own((logits,), num_experts, num_chosen))
            continue
        scores = logits.sigmoid() / logits.sigmoid().sum(dim=1, keepdim=True)
        hits = torch.zeros_like(scores).scatter(1, scores.topk(num_chosen).indices, 1.0)
        fraction = hits.sum(dim=0) * num_experts / (num_chosen * num_tokens)
        losses.append((fraction * scores.mean(dim=0)).sum())
    return torch.stack(losses).mean() * model.config.router_aux_loss_coef


def token_mean_gradients(model: Any, examples: Examples) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the token mean over all labels of all examples, and of the balance of
    each by its tokens where the model has `output_router_logits`.
    """
    total = num_label_tokens(examples)
    num_tokens = sum(len(e["input_ids"]) for e in examples)
    model.zero_grad()
    loss = 0.0
    for example in examples:
        part = summed_loss(model, example) / total
        if getattr(model.config, "output_router_logits", False):
            part = part + balance_loss(model, example) * len(example["input_ids"]) / num_tokens
        part.backward()
        loss += float(part)
    return loss, [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
    ]
