"""What the examples share: models by name, texts from the hub, a folder or the standard library,
and the loop.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from stdlib.prepare import DEFAULT_CACHE_DIR, StdlibData, prepare, prepare_rows
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import HfDeepSpeedConfig

import ds_hydra
from ds_hydra.configs import load_model_preset, read_ds_config
from ds_hydra.progress import Progress

TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""About 2 million parameters with the vocabulary of `stdlib/prepare.py`: trains on a laptop's
CPU.
"""


TINY_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 640,
    "moe_intermediate_size": 160,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
"""About 20 million parameters, 6 million of them for a token."""

SMALL = {"tiny": TINY, "tiny-moe": TINY_MOE}


def argument_parser(
    doc: str, ds_config: Path, *, iterations: int, models: bool = True
) -> argparse.ArgumentParser:
    """The arguments that examples take, also those that launchers add; without `models` none that
    choose one.
    """
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if models:
        parser.add_argument(
            "--model",
            default="tiny",
            help=f"{', '.join(SMALL)}, or a preset, as llama2-7b or mixtral-8x7b",
        )
        parser.add_argument(
            "--tokenizer", help="folder or hub id; none trains a small one on the data"
        )
    parser.add_argument("--iterations", type=int, default=iterations, help="optimizer steps")
    parser.add_argument(
        "--ds_config", type=Path, default=ds_config, help="DeepSpeed JSON with a hydra section"
    )
    parser.add_argument(
        "--run_dir", type=Path, help="folder of the run; none names one in runs/ by the time"
    )
    parser.add_argument(
        "--cache_dir", type=Path, default=DEFAULT_CACHE_DIR, help="texts and tokenizer"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher, not used")
    return parser


def start(args: argparse.Namespace, *, quiet: bool = True) -> bool:
    """Join the other ranks, and agree with them on `args.run_dir`, without one a folder named by
    the time; returns whether this rank is the first.
    """
    if quiet:
        ignore_future_warnings()
        transformers.logging.set_verbosity_error()
        deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed()
    # On all ranks that of the first: clocks may be in different seconds
    chosen = [args.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")]
    dist.broadcast_object_list(chosen)
    args.run_dir = chosen[0]
    return dist.get_rank() == 0


def ignore_future_warnings() -> None:
    """Those of libraries about names that other libraries use."""
    warnings.filterwarnings("ignore", category=FutureWarning)


def is_cpu() -> bool:
    """Whether there is no accelerator: the Trainer of transformers wants to be told."""
    return str(get_accelerator().device_name()) == "cpu"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def build_model(name: str, vocab_size: int, config: dict[str, Any]) -> PreTrainedModel:
    """An untrained model, partitioned while it is built: no rank holds all of it."""
    shape = model_config(name, vocab_size, config["hydra"]["context_length"])
    is_bf16 = config.get("bf16", {}).get("enabled", False)
    torch.manual_seed(0)
    # As long as it lives, models are partitioned
    keep_alive = HfDeepSpeedConfig(read_ds_config(config)[0])
    model = AutoModelForCausalLM.from_config(
        shape, dtype=torch.bfloat16 if is_bf16 else torch.float32
    )
    del keep_alive
    return model


def model_config(name: str, vocab_size: int, context_length: int) -> PreTrainedConfig:
    """Of "tiny", "tiny-moe" or a preset, as "llama2-7b", with the tokens of another tokenizer."""
    shape = SMALL[name] if name in SMALL else load_model_preset(name.replace("-", "_"))
    own = {"vocab_size": vocab_size, "max_position_embeddings": context_length, "eos_token_id": 0}
    own |= {"bos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(**{**shape, **own})


def load_model(
    name_or_path: str | None, texts: StdlibData
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A pretrained model and its tokenizer, or without a name an untrained tiny LLaMA for the
    tokenizer of `texts`.
    """
    if name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(name_or_path)
        return model, AutoTokenizer.from_pretrained(name_or_path)
    model = AutoModelForCausalLM.from_config(model_config("tiny", len(texts.tokenizer), 2048))
    # As the tokenizer has it: the Trainer would align them, with a line for each rank.
    model.config.pad_token_id = texts.tokenizer.pad_token_id
    model.generation_config.pad_token_id = texts.tokenizer.pad_token_id
    return model, texts.tokenizer


def read_folder(root: str, suffixes: list[str]) -> Iterator[dict[str, str]]:
    """One row per file of `root` that ends in one of `suffixes`, in sorted order."""
    for path in sorted(Path(root).rglob("*")):
        if path.suffix in suffixes and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            yield {"path": str(path.relative_to(root)), "text": text}


def read_hub(name: str, column: str, num_rows: int) -> Iterator[dict[str, str]]:
    """The first `num_rows` texts of a data set of the hub, streamed: nothing else of it is
    downloaded.
    """
    for index, row in enumerate(
        datasets.load_dataset(name, split="train", streaming=True).take(num_rows)
    ):
        yield {"path": f"{name}/{index}", "text": row[column]}


def load_texts(
    source: str, cache_dir: Path, *, hub: tuple[str, str], num_rows: int, suffixes: list[str]
) -> StdlibData:
    """Texts and a tokenizer trained on them: of "stdlib", the "hub" (name and column), or a folder.

    Raises SystemExit with a sentence where the hub cannot be reached or the folder has no such
    file.
    """
    if source == "stdlib":
        return prepare(cache_dir)
    if source == "hub":
        try:
            return prepare_rows(
                f"{hub[0].replace('/', '--')}-{num_rows}",
                read_hub,
                {"name": hub[0], "column": hub[1], "num_rows": num_rows},
                cache_dir,
            )
        except (
            OSError,
            datasets.exceptions.DatasetGenerationError,
            datasets.DatasetNotFoundError,
        ) as error:
            raise SystemExit(
                f"{hub[0]} cannot be read from the hub ({error}); start with --data stdlib or --data FOLDER"
            ) from error
    found = [path for path in Path(source).rglob("*") if path.suffix in suffixes and path.is_file()]
    if not found:
        raise SystemExit(f"--data {source}: no file ends in {', '.join(suffixes)}; see --suffixes")
    state = "\0".join(
        f"{path}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}" for path in sorted(found)
    )
    name = f"folder-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    return prepare_rows(name, read_folder, {"root": source, "suffixes": suffixes}, cache_dir)


def train(
    args: argparse.Namespace,
    config: dict[str, Any],
    dataset: datasets.Dataset,
    model: PreTrainedModel,
) -> list[float]:
    """Train `model` on `dataset`, then show what ran; returns the losses."""
    is_first_rank = dist.get_rank() == 0
    config["hydra"] |= {"run_dir": str(args.run_dir)}
    engine, *_ = ds_hydra.initialize(model=model, training_data=dataset, config=config)
    losses = []
    with Progress(total=args.iterations, disable=not is_first_rank, unit="it") as progress:
        for _ in range(args.iterations):
            losses.append(float(engine.train_batch()))
            # Not the last one, for whose step an accelerator would be waited for
            if (metrics := engine.ended_metrics) is not None:
                progress.set_description_str(
                    f"loss {metrics.loss:.3f} | {metrics.tokens_per_s:,.0f} tokens/s | {metrics.strategy} | "
                    f"imbalance {metrics.imbalance:.2f}"
                )
            progress.update()
    engine.destroy()
    if is_first_rank:
        # Only one rank pays for matplotlib
        from ds_hydra.report import plot_run, summarize_run

        print(summarize_run(args.run_dir))
        plot_run(args.run_dir, args.run_dir / "report.png")
        print(f"run folder: {args.run_dir} (metrics.jsonl, plans/, trace.jsonl, report.png)")
    dist.barrier()
    return losses
