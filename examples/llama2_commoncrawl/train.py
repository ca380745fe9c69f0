"""Train a LLaMA from scratch on web text: tiiuae/falcon-refinedweb, a folder, or an offline
stand-in.

    deepspeed --num_gpus 4 examples/llama2_commoncrawl/train.py

The stand-in (the default) is real text, the standard library's source, with the lengths of
CommonCrawl: its tokens are cut and joined to lengths drawn from the histogram `commoncrawl` that
comes with ds_hydra. See README.md in this folder for a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import datasets
import numpy as np
import torch.distributed as dist
from transformers import AutoTokenizer

from ds_hydra.configs import find_file
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.strategy.proposal.histogram import LengthHistogram

HERE = Path(__file__).parent
HUB = ("tiiuae/falcon-refinedweb", "content")


def cut_and_join(
    tokens: TokenDataset, histogram: LengthHistogram, context_length: int, *, seed: int = 0
) -> Iterator[list[int]]:
    """All tokens once, in order, as sequences of lengths drawn from `histogram`, none above the
    context.
    """
    stream = np.concatenate([tokens[index]["input_ids"] for index in range(len(tokens))])
    (lengths,) = histogram.limit(context_length).draw_batches(len(stream), 1, seed)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        yield stream[end - length : end].tolist()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Prepare the texts, train, show what ran."""
    parser = common.argument_parser(__doc__, HERE / "ds_config.json", iterations=24)
    parser.add_argument(
        "--data", default="stand-in", help="stand-in, hub (tiiuae/falcon-refinedweb), or a folder"
    )
    parser.add_argument("--num_rows", type=int, default=20_000, help="pages to stream from the hub")
    parser.add_argument(
        "--suffixes", nargs="+", default=[".txt", ".md", ".rst"], help="files of a folder"
    )
    args = parser.parse_args(arguments)
    is_first_rank = common.start(args)
    is_stand_in = args.data == "stand-in"
    source = "stdlib" if is_stand_in else args.data
    texts = common.load_texts(
        source, args.cache_dir, hub=HUB, num_rows=args.num_rows, suffixes=args.suffixes
    )
    tokenizer_path = str(args.tokenizer or texts.tokenizer_dir)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    config = common.read_json(args.ds_config)
    config["hydra"]["tokenizer"] = tokenizer_path
    dataset = texts.dataset
    if is_stand_in:
        tokens = TokenDataset.from_dataset(dataset, context_length=2**30, tokenize=tokenizer)
        histogram = LengthHistogram.load(find_file("lengths", "commoncrawl"))
        sequences = list(cut_and_join(tokens, histogram, config["hydra"]["context_length"]))
        dataset = datasets.Dataset.from_dict({"input_ids": sequences})
        if is_first_rank:
            print(
                "stand-in for CommonCrawl: source of the standard library, cut and joined to lengths drawn from "
                f"the histogram 'commoncrawl' (median {np.median([len(s) for s in sequences]):.0f} tokens);\n"
                "lengths are those of web pages, contents and loss are not"
            )
    if is_first_rank:
        print(f"{args.model} on {len(dataset):,} texts, {dist.get_world_size()} ranks")
    model = common.build_model(args.model, len(tokenizer), config)
    return common.train(args, config, dataset, model)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
