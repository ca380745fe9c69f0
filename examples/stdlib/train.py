"""Train a small LLaMA from scratch on the source files of the interpreter's standard library.

    deepspeed --num_gpus 4 examples/stdlib/train.py

runs on a CPU or a GPU box. Everything that is special to ds_hydra is the "hydra" section of
ds_config.json, and in `common.train` the import and `engine.train_batch()`.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import deepspeed
import torch
import torch.distributed as dist
from stdlib.prepare import prepare
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent


def build_model(vocab_size: int, context_length: int) -> LlamaForCausalLM:
    """A LLaMA of about 3 million parameters, equal on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=context_length,
            bos_token_id=None,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, then show what ran."""
    parser = common.argument_parser(__doc__, HERE / "ds_config.json", iterations=48, models=False)
    args = parser.parse_args(arguments)
    with contextlib.redirect_stdout(io.StringIO()):  # which DeepSpeed tells what it has loaded
        is_first_rank = common.start(args)
    deepspeed.utils.logger.setLevel("ERROR")
    data = prepare(args.cache_dir)
    config = common.read_json(args.ds_config)
    config["hydra"]["tokenizer"] = str(data.tokenizer_dir)
    # The limit of the file is for 4 ranks; of fewer each holds more of the states.
    config["hydra"]["memory_limit_bytes"] *= max(1, 4 // dist.get_world_size())
    model = build_model(len(data.tokenizer), config["hydra"]["context_length"])
    if is_first_rank:
        print(
            f"{model.num_parameters() / 1e6:.1f} million parameters, {dist.get_world_size()} ranks"
        )
    return common.train(args, config, data.dataset, model)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
