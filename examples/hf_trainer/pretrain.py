"""(Continued) pre-training with HydraTrainer: what changes against transformers.Trainer is the
import.

    deepspeed --num_gpus 4 examples/hf_trainer/pretrain.py

Every field of TrainingArguments is an argument, for example --max_steps 100 or
--resume_from_checkpoint DIR.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import torch.distributed as dist
from transformers import HfArgumentParser, TrainingArguments

from ds_hydra import HydraTrainer

HERE = Path(__file__).parent


@dataclass
class ScriptArguments:
    """What the script takes beside TrainingArguments."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "none: a tiny untrained LLaMA"}
    )
    data: str = field(default="stdlib", metadata={"help": "stdlib, or a folder of text"})
    suffixes: list[str] = field(
        default_factory=lambda: [".txt", ".md", ".py"], metadata={"help": "of a folder"}
    )
    cache_dir: Path = field(
        default=common.DEFAULT_CACHE_DIR, metadata={"help": "texts and tokenizer"}
    )
    num_eval_texts: int = field(default=32, metadata={"help": "texts kept out of training"})


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; returns the metrics of the evaluation."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        deepspeed=str(HERE / "ds_config.json"),
        output_dir="runs/hf_pretrain",
        max_steps=24,
        learning_rate=1e-3,
        warmup_steps=5,
        logging_steps=4,
        save_steps=12,
        save_total_limit=2,
        report_to="none",
        use_cpu=common.is_cpu(),
    )
    script, args = parser.parse_args_into_dataclasses(arguments)
    common.ignore_future_warnings()
    texts = common.load_texts(
        script.data, script.cache_dir, hub=("", ""), num_rows=0, suffixes=script.suffixes
    )
    model, tokenizer = common.load_model(script.model_name_or_path, texts)
    splits = texts.dataset.train_test_split(test_size=script.num_eval_texts, seed=args.seed)
    trainer = HydraTrainer(
        model=model,
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    return metrics


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
