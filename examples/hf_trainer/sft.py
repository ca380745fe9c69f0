"""Supervised fine-tuning with HydraTrainer: chats through the tokenizer's template, loss on the
assistant's turns.

    deepspeed --num_gpus 4 examples/hf_trainer/sft.py --lora

The default data are real and offline: functions of the standard library; the user gives signature
and docstring, the assistant answers with the body.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import datasets
import torch.distributed as dist
from transformers import HfArgumentParser, TrainingArguments

from ds_hydra import HydraTrainer

HERE = Path(__file__).parent
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + '\n' }}{% endif %}"
    "{% endfor %}"
)
"""The generation tags mark what `assistant_only_loss` counts."""


@dataclass
class ScriptArguments:
    """What the script takes beside TrainingArguments."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "none: a tiny untrained LLaMA"}
    )
    data: str | None = field(
        default=None, metadata={"help": "JSON lines with 'messages'; none: the standard library"}
    )
    lora: bool = field(default=False, metadata={"help": "train adapters only (needs peft)"})
    cache_dir: Path = field(
        default=common.DEFAULT_CACHE_DIR, metadata={"help": "texts and tokenizer"}
    )
    num_eval_chats: int = field(default=32, metadata={"help": "chats kept out of training"})


def read_chats(definitions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A chat for each function with a docstring and a body after it."""
    for text in definitions:
        try:
            node = ast.parse(text).body[0]
        except (SyntaxError, IndexError):  # a piece that ends inside of a block
            continue
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            lines = text.splitlines(keepends=True)
            begin = node.body[1].lineno - 1
            question, answer = "".join(lines[:begin]), "".join(lines[begin : node.end_lineno])
            yield {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }


def add_adapters(model: Any) -> Any:
    """`model` with LoRA adapters on all its linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; returns the metrics of the evaluation."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        deepspeed=str(HERE / "ds_config.json"),
        output_dir="runs/hf_sft",
        max_steps=16,
        learning_rate=1e-3,
        warmup_steps=2,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        use_cpu=common.is_cpu(),
    )
    script, args = parser.parse_args_into_dataclasses(arguments)
    common.ignore_future_warnings()
    texts = common.prepare(script.cache_dir, unit="definition")
    model, tokenizer = common.load_model(script.model_name_or_path, texts)
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    if script.data is None:
        chats = datasets.Dataset.from_list(list(read_chats(texts.dataset["text"])))
    else:
        chats = datasets.load_dataset("json", data_files=script.data, split="train")
    splits = chats.train_test_split(test_size=script.num_eval_chats, seed=args.seed)
    trainer = HydraTrainer(
        model=add_adapters(model) if script.lora else model,
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=tokenizer,
        assistant_only_loss=True,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    return metrics


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
