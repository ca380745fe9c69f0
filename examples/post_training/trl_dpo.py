"""TRL's DPOTrainer with only the import changed: pairs of completions, a reference model with an
engine of its own.

    torchrun --nproc-per-node 2 examples/post_training/trl_dpo.py

A tiny model and pairs of its own, offline: of two completions the one in lower case is better.
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
from trl import DPOConfig

from ds_hydra.trl import HydraDPOTrainer as DPOTrainer


def make_pairs(number: int) -> datasets.Dataset:
    """Pairs whose lengths have a long tail."""
    draw = np.random.default_rng(0)
    columns: dict[str, list[str]] = {"prompt": [], "chosen": [], "rejected": []}
    for _ in range(number):
        for name, letters in (("prompt", "xyz "), ("chosen", "abc "), ("rejected", "ABC ")):
            length = 4 + int(draw.random() ** 4 * 200)
            columns[name].append("".join(draw.choice(list(letters), length)))
    return datasets.Dataset.from_dict(columns)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the mean loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--loss_type", nargs="+", default=["sigmoid"])
    parser.add_argument("--output_dir", default="runs/trl_dpo")
    options = parser.parse_args(arguments)
    model, tokenizer = tiny_model.make()
    reference, _ = tiny_model.make()
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(
            output_dir=options.output_dir,
            loss_type=options.loss_type,
            max_length=512,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            max_steps=options.max_steps,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=make_pairs(256),
        processing_class=tokenizer,
    )
    return float(trainer.train().training_loss)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
