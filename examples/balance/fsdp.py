"""Plain FSDP on sequences of unequal lengths, rows by ds_hydra: no engine, no DeepSpeed.

    torchrun --nproc-per-node 2 examples/balance/fsdp.py

Ranks of FSDP gather each layer together, so every rank runs the same number of rows
(`lockstep=True`), and those that run at the same time take about as long as each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra

VOCAB_SIZE, NUM_SEQUENCES, MAX_TOKENS, NUM_BATCHES = 64, 24, 320, 2
NOT_COUNTED = -100


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


def draw(number: int) -> list[torch.Tensor]:
    """A global batch of sequences that count upwards, with a long tail of lengths."""
    generator = torch.Generator().manual_seed(number)
    lengths = (8 + torch.rand(NUM_SEQUENCES, generator=generator) ** 4 * 240).int().tolist()
    starts = torch.randint(0, VOCAB_SIZE, (NUM_SEQUENCES,), generator=generator).tolist()
    return [(torch.arange(n) + start) % VOCAB_SIZE for n, start in zip(lengths, starts)]


def pack(sequences: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row: transformers keep sequences apart by positions that begin anew. An empty row
    becomes one token that does not count, so that its rank takes part in all collectives.
    """
    if not sequences:
        one = torch.zeros(1, 1, dtype=torch.long)
        return {"input_ids": one, "position_ids": one, "labels": one + NOT_COUNTED}
    labels = [torch.cat([s[1:], s.new_full((1,), NOT_COUNTED)]) for s in sequences]
    return {
        "input_ids": torch.cat(list(sequences))[None],
        "position_ids": torch.cat([torch.arange(len(s)) for s in sequences])[None],
        "labels": torch.cat(labels)[None],
    }


def sum_of_losses(model: torch.nn.Module, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy summed over the tokens of a row that count."""
    logits = model(
        input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False
    ).logits[0]
    return torch.nn.functional.cross_entropy(
        logits, row["labels"][0], ignore_index=NOT_COUNTED, reduction="sum"
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean loss of every iteration."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=8)
    args = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for iteration in range(args.iterations):
        sequences = draw(iteration % NUM_BATCHES)
        balanced = ds_hydra.balance_rows(
            [len(sequence) for sequence in sequences],
            num_ranks=world_size,
            max_tokens=MAX_TOKENS,
            model=model.config.to_dict(),
            hardware="cpu",
        )
        total = torch.zeros(())
        for row in balanced.rows[rank]:
            loss = sum_of_losses(model, pack([sequences[i] for i in row]))
            # FSDP takes the mean of the ranks' gradients; the loss is a mean over all tokens.
            (loss * world_size / balanced.num_label_tokens).backward()
            total += loss.detach() / balanced.num_label_tokens
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total))
        if rank == 0:
            print(
                f"iteration {iteration}: loss {losses[-1]:.4f}, rows of each rank "
                f"{[len(own) for own in balanced.rows]}, imbalance {balanced.imbalance:.1%}",
                flush=True,
            )
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
