"""Host time of a pull and a push on one rank of many: packing, posting, unpacking, without ranks.

Tensors have no memory (device "meta") and the process group is torch's fake one, so what is left is
what the host does for them.

    python -m benchmarks.link_host_time --devices 64 --ranks-per-node 8
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_hydra.engine.model.meta_model import load_stage_model
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import LinkPlan, plan_link
from ds_hydra.zero_link.exchange import Link

STRATEGIES = (
    "64x<1,1>",
    "32x<1,2>",
    "16x<2,2>",
    "8x<8,1>",
    "1x<8,8>",
    "2x<8,1> + 8x<4,1> + 8x<2,1>",
)
META = torch.device("meta")


def run_pull(
    link: Link, plan: LinkPlan, shards_P: list[Tensor], slices: list[list[Tensor]]
) -> None:
    for index in range(len(plan.rounds)):
        own = slices[index] if index < len(slices) else []
        link.begin_pull(plan, index, shards_P, own)()


def run_push(link: Link, plan: LinkPlan, grads: list[list[Tensor]], grads_P: list[Tensor]) -> None:
    for index in reversed(range(len(plan.rounds))):
        own = grads[index] if index < len(grads) else []
        link.begin_push(plan, index, own, grads_P)()


def count_phases(plan: LinkPlan) -> int:
    return sum(len(round_.hops) for round_ in plan.rounds)


def host_ms(run: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of CPU time of this process; the first run, which plans, is left out."""
    times = []
    for _ in range(1 + repeats):
        begin = time.process_time()
        run()
        times.append((time.process_time() - begin) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2_7b")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--ranks-per-node", type=int, help="node-aware routes of such nodes")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    num_ranks, node = arguments.devices, arguments.ranks_per_node
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=num_ranks)
    model = load_stage_model(arguments.model)

    def empty(numels: list[int], dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(numel, dtype=dtype, device=META) for numel in numels]

    shard_numels = [spec.shard_numel(num_ranks) for spec in model.specs]
    shards_P, grads_P = empty(shard_numels, torch.bfloat16), empty(shard_numels, torch.float32)
    print("host ms of rank 0: pull, push")
    for text in arguments.strategies:
        rank_buckets = model.strategy_buckets(Strategy.parse(text), num_ranks)
        pull = plan_link(model.specs, rank_buckets, 0, ranks_per_node=node)
        push = plan_link(model.specs, rank_buckets, 0, gradients=True, ranks_per_node=node)
        numels = [[ref.region.numel for ref in bucket] for bucket in rank_buckets[0]]
        slices_S = [empty(bucket, torch.bfloat16) for bucket in numels]
        grads_S = [empty(bucket, torch.float32) for bucket in numels]
        link = Link(None, META)
        times = [
            host_ms(functools.partial(run, link, *given), arguments.repeats)
            for run, *given in (
                (run_pull, pull, shards_P, slices_S),
                (run_push, push, grads_S, grads_P),
            )
        ]
        print(
            f"{text:>32} {times[0]:8.1f} {times[1]:8.1f}"
            f"   {count_phases(pull)} and {count_phases(push)} all-to-alls",
            flush=True,
        )


if __name__ == "__main__":
    main()
