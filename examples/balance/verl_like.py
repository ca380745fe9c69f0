"""A policy update as in verl, rows by ds_hydra: padded rollouts, gradients summed once.

    torchrun --nproc-per-node 2 examples/balance/verl_like.py

In place of `seqlen_balancing.rearrange_micro_batches`, which balances tokens. Ranks that meet only
when gradients are summed need no equal number of rows: `lockstep=False`. (With verl's FSDP workers
it is `lockstep=True`, and an empty row is one token that does not count, as in `fsdp.py`.)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra

VOCAB_SIZE, PROMPT, NUM_ROLLOUTS, LONGEST, MAX_TOKENS, NUM_BATCHES = 64, 4, 32, 256, 320, 2
CLIP = 0.2

Batch = dict[str, torch.Tensor]


def make_model() -> LlamaForCausalLM:
    """A LLaMA of 0.1M parameters, equal on all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def roll_out(number: int) -> Batch:
    """Rollouts [num, longest], padded on the right: what a generator would send. Even tokens are
    rewarded, advantages are rewards less their mean.
    """
    generator = torch.Generator().manual_seed(number)
    lengths = 8 + torch.rand(NUM_ROLLOUTS, generator=generator) ** 4 * (LONGEST - 8)
    attention_mask = torch.arange(LONGEST) < lengths.int()[:, None]
    ids = torch.randint(0, VOCAB_SIZE, (NUM_ROLLOUTS, LONGEST), generator=generator)
    response_mask = attention_mask.clone()
    response_mask[:, :PROMPT] = False
    is_even = (ids % 2 == 0) & response_mask
    rewards = is_even.sum(1) / response_mask.sum(1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return {
        "input_ids": ids * attention_mask,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "advantages": advantages[:, None].expand(-1, LONGEST),
    }


def micro_batches(batch: Batch, rows: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """The rows of one rank without padding, [1, tokens of the row], positions beginning anew with
    each rollout.
    """
    for row in rows:
        mask = batch["attention_mask"][list(row)]
        packed = {name: values[list(row)][mask][None] for name, values in batch.items()}
        packed["position_ids"] = torch.arange(LONGEST).expand(len(row), -1)[mask][None]
        yield packed


def log_probs(model: torch.nn.Module, row: Batch) -> torch.Tensor:
    """[1, tokens]: of each token given those before; 0 for the first, which no one predicts."""
    logits = model(
        input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False
    ).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, row["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


def update_policy(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rank: int,
    num_ranks: int,
) -> float:
    """One step of the clipped policy loss, a mean over the response tokens of all ranks."""
    balanced = ds_hydra.balance_rows(
        batch["attention_mask"].sum(1),
        num_ranks=num_ranks,
        max_tokens=MAX_TOKENS,
        model=model.config.to_dict(),
        hardware="cpu",
        lockstep=False,
        label_tokens=batch["response_mask"].sum(1),
    )
    total = torch.zeros(())
    for row in micro_batches(batch, balanced.rows[rank]):
        log_p = log_probs(model, row)
        ratio = (log_p - row.get("old_log_probs", log_p.detach())).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        by_token = -torch.minimum(ratio * row["advantages"], clipped * row["advantages"])
        loss = by_token[row["response_mask"]].sum() / balanced.num_label_tokens
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        if parameter.grad is None:  # a rank may have no row
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        num_rows = [len(own) for own in balanced.rows]
        print(f"rows of the ranks {num_rows}, imbalance {balanced.imbalance:.1%}", flush=True)
    return float(total)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the loss of every iteration."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=6)
    args = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = [roll_out(number) for number in range(NUM_BATCHES)]
    with torch.no_grad():  # every rank for itself: the data are small
        for batch in batches:
            every = list(micro_batches(batch, [[i] for i in range(NUM_ROLLOUTS)]))
            old = torch.zeros(batch["input_ids"].shape)
            for i, row in enumerate(every):
                old[i, : row["input_ids"].shape[1]] = log_probs(model, row)[0]
            batch["old_log_probs"] = old
    losses = []
    for iteration in range(args.iterations):
        batch = batches[iteration % NUM_BATCHES]
        losses.append(
            update_policy(model, optimizer, batch, dist.get_rank(), dist.get_world_size())
        )
        if dist.get_rank() == 0:
            print(f"iteration {iteration}: policy loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
