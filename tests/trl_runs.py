"""Small runs of TRL's trainers: models, tokenizers and data that need no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
from as_stock import TIMED
from models import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }};{% endgeneration %}"
    "{% else %}U:{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
NUM_TOKENS = 259
STEPS, PER_STEP, NUM_ROWS = 5, 8, 80


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, the end of a text and padding."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>", "<bos>"]
    vocab = {token: index for index, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


def save_model(folder: str | Path, family: str = "llama") -> str:
    """A folder to load a model by name and its tokenizer from."""
    path = str(Path(folder, "model" if family == "llama" else family))
    tiny(family, vocab_size=NUM_TOKENS, max_position_embeddings=512).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def _words(generator: np.random.Generator, most: int) -> str:
    letters = np.array(list("abcdefgh "))
    return "".join(generator.choice(letters, 3 + int(generator.random() ** 3 * most)))


def texts() -> datasets.Dataset:
    """Plain texts of unequal lengths."""
    generator = np.random.default_rng(0)
    return datasets.Dataset.from_list([{"text": _words(generator, 100)} for _ in range(NUM_ROWS)])


def texts_of_one_length() -> datasets.Dataset:
    """A batch for evaluation, whose loss is the mean over batches of any size."""
    found = [row["text"][:12] for row in texts() if len(row["text"]) >= 12]
    return datasets.Dataset.from_list([{"text": text} for text in found[:PER_STEP]])


def chats() -> datasets.Dataset:
    """Conversations of one or two turns."""
    generator = np.random.default_rng(1)

    def chat(turns: int) -> list[dict[str, str]]:
        roles = ("user", "assistant") * turns
        return [{"role": role, "content": _words(generator, 40)} for role in roles]

    return datasets.Dataset.from_list([{"messages": chat(1 + n % 2)} for n in range(NUM_ROWS)])


def pairs() -> datasets.Dataset:
    """Prompts, each with a better and a worse completion."""
    generator = np.random.default_rng(2)
    names = ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_list(
        [{name: _words(generator, 60) for name in names} for _ in range(NUM_ROWS)]
    )


GENERATIONS = 2


def prompts() -> datasets.Dataset:
    """Prompts, each of which is answered GENERATIONS times."""
    generator = np.random.default_rng(3)
    num_prompts = NUM_ROWS // GENERATIONS
    return datasets.Dataset.from_list(
        [{"prompt": f"{n}: {_words(generator, 30)}"} for n in range(num_prompts)]
    )


def rollouts(given: list[str], trainer: Any) -> dict[str, Any]:
    """Answers as a dataset has them: to a prompt always the same ones, of unequal lengths."""
    tokenizer, seen = trainer.processing_class, {}
    ids, answers = [], []
    for prompt in given:
        seen[prompt] = seen.get(prompt, -1) + 1
        generator = np.random.default_rng([int(prompt.split(":")[0]), seen[prompt]])
        ids.append(tokenizer(prompt)["input_ids"])
        answers.append(tokenizer(_words(generator, 80))["input_ids"])
    log_probs = [[-1.0] * len(answer) for answer in answers]
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": log_probs}


def share_of_a(completions: list[str], **_: Any) -> list[float]:
    """The reward."""
    return [text.count("a") / len(text) for text in completions]


def arguments(folder: str | Path, num_ranks: int, **settings: Any) -> dict[str, Any]:
    """What a script says, with a batch of PER_STEP rows whatever the number of ranks."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": PER_STEP // num_ranks,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_length": 128,
        **settings,
    }


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a log that say what was trained."""
    other = (*TIMED, "train_loss")
    return [{k: v for k, v in entry.items() if not any(t in k for t in other)} for entry in history]


def life_with_callback(folder: str, _where: str, victim: int, number: int) -> None:
    """SFT whose victim ends, or stops, in a callback after the second step."""
    import torch.distributed as dist
    import transformers
    import trl
    from faults import die

    import ds_hydra.trl

    class Fault(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and dist.get_rank() == victim:
                die(folder, number)

    hydra = {
        "context_length": 128,
        "faults": {"silence_s": 6, "grace_s": 2},
        "profiling": {"repeats": 1, "lengths": [4, 16, 64]},
        "planner": {"num_workers": 0},
    }
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3},
        "hydra": hydra,
    }
    if dist.get_rank() == 0:  # transformers saves on one rank alone
        save_model(folder)
    dist.barrier()
    path = str(Path(folder, "model"))
    given = trl.SFTConfig(**arguments(str(Path(folder, "out")), 2, deepspeed=config))
    trainer = ds_hydra.trl.HydraSFTTrainer(
        model=path, args=given, train_dataset=texts(), callbacks=[Fault()]
    )
    trainer.train()
