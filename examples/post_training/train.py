"""Preferences, a policy and a teacher on tiny data of their own, offline.

    deepspeed --num_gpus 2 examples/post_training/train.py --loss dpo

`grpo`: rollouts of unequal lengths are rewarded for even tokens; advantages are rewards less their
mean. `dpo`: of two continuations the one with more even tokens is better. `distillation`: a teacher
whose most probable token follows a rule. The loss of each iteration is printed; for `grpo` also the
preference for rewarded rollouts, which grows.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import ds_hydra

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from own_losses import DPO, GRPO, Distillation  # noqa: E402

NUM_TOKENS, PROMPT, NUM_SEQUENCES, NUM_BATCHES = 64, 4, 16, 3

Example = dict[str, Any]


def draw(number: int) -> list[Example]:
    """Sequences with a long tail of lengths; the prompt is not predicted."""
    generator = torch.Generator().manual_seed(number)
    lengths = (8 + torch.rand(NUM_SEQUENCES, generator=generator) ** 4 * 240).int().tolist()
    examples = []
    for length in lengths:
        ids = torch.randint(0, NUM_TOKENS, (length,), generator=generator)
        labels = ids.clone()
        labels[:PROMPT] = -100
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def share_of_even(example: Example) -> float:
    """The reward: how many of the predicted tokens are even."""
    return float((example["input_ids"][PROMPT:] % 2 == 0).float().mean())


def for_grpo(engine: ds_hydra.HydraEngine, examples: list[Example]) -> list[Example]:
    """Advantages, and the log-probabilities of the policy before this iteration."""
    rewards = torch.tensor([share_of_even(example) for example in examples])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    old = engine.score(examples).log_probs
    return [
        {**example, "advantages": advantage, "old_log_probs": log_probs}
        for example, advantage, log_probs in zip(examples, advantages, old, strict=True)
    ]


def preference(batch: list[Example]) -> float:
    """Mean of advantage x mean log-probability of a token, which grows as the policy prefers what
    is rewarded. The loss says nothing of that: each policy is compared with itself.
    """
    weighted = [e["advantages"] * float(e["old_log_probs"][PROMPT:].mean()) for e in batch]
    return sum(weighted) / len(weighted)


def for_dpo(reference: LlamaForCausalLM, examples: list[Example]) -> list[Example]:
    """Neighbours as pairs, and what the reference model says of each."""
    batch = []
    for pair, (first, second) in enumerate(zip(examples[::2], examples[1::2], strict=True)):
        first_is_better = share_of_even(first) >= share_of_even(second)
        for example, chosen in ((first, first_is_better), (second, not first_is_better)):
            ids = example["input_ids"]
            with torch.no_grad():
                log_p = reference(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            log_prob = float(log_p.gather(-1, ids[1:, None])[PROMPT - 1 :].sum())
            batch.append(
                {**example, "pair": pair, "chosen": int(chosen), "reference_log_prob": log_prob}
            )
    return batch


def for_distillation(examples: list[Example]) -> list[Example]:
    """A teacher that expects the token before plus one, and now and then plus two."""
    batch = []
    for example in examples:
        before = example["input_ids"].roll(1)
        ids = torch.stack([(before + 1) % NUM_TOKENS, (before + 2) % NUM_TOKENS], dim=-1)
        log_probs = torch.tensor([0.8, 0.2]).log().expand(len(before), 2)
        batch.append({**example, "teacher_ids": ids, "teacher_log_probs": log_probs})
    return batch


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the loss of every iteration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", choices=["grpo", "dpo", "distillation"], default="grpo")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # of the launcher
    args = parser.parse_args(arguments)
    model, _ = tiny_model.make()
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = str(HERE / "ds_config.json")
    engine, *_ = ds_hydra.initialize(model=model, optimizer=optimizer, config=config)
    loss = {"grpo": GRPO(), "dpo": DPO(beta=0.1), "distillation": Distillation()}[args.loss]
    found = []
    for iteration in range(args.iterations):
        examples = draw(iteration % NUM_BATCHES)
        if args.loss == "grpo":
            batch = for_grpo(engine, examples)
        elif args.loss == "dpo":
            batch = for_dpo(reference, examples)
        else:
            batch = for_distillation(examples)
        found.append(float(engine.train_batch(batch, loss=loss)))
        if dist.get_rank() == 0:
            more = f", preference {preference(batch):+.4f}" if args.loss == "grpo" else ""
            print(f"iteration {iteration}: {args.loss} loss {found[-1]:.4f}{more}", flush=True)
    engine.destroy()
    return found


if __name__ == "__main__":
    main()
