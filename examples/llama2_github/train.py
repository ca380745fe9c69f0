"""Train a LLaMA from scratch on source code: the standard library, a folder, or
codeparrot/github-code.

    deepspeed --num_gpus 4 examples/llama2_github/train.py

See README.md in this folder for a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import torch.distributed as dist
from transformers import AutoTokenizer

HERE = Path(__file__).parent
HUB = ("codeparrot/github-code", "code")
SUFFIXES = [".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".go", ".rs", ".sh"]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Prepare the texts, train, show what ran."""
    parser = common.argument_parser(__doc__, HERE / "ds_config.json", iterations=24)
    parser.add_argument(
        "--data", default="stdlib", help="stdlib, hub (codeparrot/github-code), or a folder"
    )
    parser.add_argument("--num_rows", type=int, default=20_000, help="files to stream from the hub")
    parser.add_argument("--suffixes", nargs="+", default=SUFFIXES, help="files to read of a folder")
    args = parser.parse_args(arguments)
    is_first_rank = common.start(args)
    texts = common.load_texts(
        args.data, args.cache_dir, hub=HUB, num_rows=args.num_rows, suffixes=args.suffixes
    )
    tokenizer = str(args.tokenizer or texts.tokenizer_dir)
    config = common.read_json(args.ds_config)
    config["hydra"]["tokenizer"] = tokenizer
    if is_first_rank:
        print(
            f"{args.model} on {len(texts.dataset):,} texts of {args.data}, {dist.get_world_size()} ranks"
        )
    vocab_size = len(AutoTokenizer.from_pretrained(tokenizer))
    model = common.build_model(args.model, vocab_size, config)
    return common.train(args, config, texts.dataset, model)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
