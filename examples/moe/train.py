"""Train a Qwen3-MoE of 20 million parameters from scratch on the standard library's source.

    deepspeed --num_gpus 4 examples/moe/train.py

runs on a CPU or a GPU box. See README.md in this folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import torch.distributed as dist
from stdlib.prepare import prepare

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, show what ran."""
    parser = common.argument_parser(__doc__, HERE / "ds_config.json", iterations=80)
    parser.set_defaults(model="tiny-moe")
    parser.add_argument(
        "--aux_loss", choices=("sequence", "off"), default="sequence", help="loss of balance"
    )
    args = parser.parse_args(arguments)
    common.start(args)
    data = prepare(args.cache_dir)
    config = common.read_json(args.ds_config)
    config["hydra"] |= {"tokenizer": str(data.tokenizer_dir)}
    common.TINY_MOE["output_router_logits"] = args.aux_loss == "sequence"
    if dist.get_world_size() == 2:  # those of the file are for 4 ranks
        config["hydra"]["strategies"] = ["2x<1,1>", "1x<sp2,1;ep=2>"]
    model = common.build_model(args.model, len(data.tokenizer), config)
    return common.train(args, config, data.dataset, model)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
