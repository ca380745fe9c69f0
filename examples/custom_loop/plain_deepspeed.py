"""A plain DeepSpeed script: the one that `plain_to_hydra.diff` changes in five lines.

deepspeed --num_gpus 2 examples/custom_loop/plain_deepspeed.py
"""

import deepspeed
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
dataset = Dataset.from_list(
    [{"input_ids": [(begin + i) % 32 for i in range(64)]} for begin in range(64)]
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}},
    "zero_optimization": {"stage": 3},
}


def collate(rows):
    """input_ids and labels [batch, length]."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


engine, _, loader, _ = deepspeed.initialize(
    model=model,
    config=config,
    training_data=dataset,
    collate_fn=collate,
    model_parameters=model.parameters(),
)
for step, batch in zip(range(8), loader):
    loss = engine(**{key: value.to(engine.device) for key, value in batch.items()}).loss
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
