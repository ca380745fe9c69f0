"""TRL's SFTTrainer with only the import changed: chats, loss on the assistant's turns, LoRA.

    torchrun --nproc-per-node 2 examples/post_training/trl_sft.py --lora

A tiny model and chats of its own, offline: the user gives words, the assistant the same backwards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import datasets
import numpy as np
import tiny_model
import torch
import torch.distributed as dist
from peft import LoraConfig
from trl import SFTConfig

from ds_hydra.trl import HydraSFTTrainer as SFTTrainer


def make_chats(number: int) -> datasets.Dataset:
    """Chats whose lengths have a long tail."""
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(number):
        num_words = 1 + int(draw.random() ** 4 * 60)
        words = ["".join(letters) for letters in draw.choice(list("abcde"), (num_words, 4))]
        question, answer = " ".join(words), " ".join(reversed(words))
        rows.append(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )
    return datasets.Dataset.from_dict({"messages": rows})


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the mean loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="runs/trl_sft")
    options = parser.parse_args(arguments)
    model, tokenizer = tiny_model.make()
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=options.output_dir,
            assistant_only_loss=True,
            max_length=512,
            per_device_train_batch_size=8,
            learning_rate=1e-2 if options.lora else 3e-3,
            max_steps=options.max_steps,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=make_chats(256),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear") if options.lora else None,
    )
    return float(trainer.train().training_loss)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
