"""Link times as ratios: pull against ZeRO-3's own all-gather, push against its reduce-scatter, in
one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/link.py --size all --out
    docs/benchmarks/link.json python benchmarks/link.py --planning

Both sides move the same parameters on the same ranks, alternated, bucket by bucket; medians. Prints
a table, writes JSON. `switching` compares pull + push when every round uses another strategy with
keeping one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra
from ds_hydra.engine.model.meta_model import load_stage_model
from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.transfer.session import RoundWindow
from ds_hydra.engine.transfer.stage_weights import SlicePool, StageWeights
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.schemes.placement import link_groups
from ds_hydra.zero_link import LinkPlan, plan_link
from ds_hydra.zero_link.buffers import ExchangeBuffers
from ds_hydra.zero_link.exchange import Link, RoundUnderWay

STRATEGIES = {
    1: ("1x<1,1>",),
    2: ("2x<1,1>", "1x<2,1>", "1x<1,2>"),
    4: (
        "4x<1,1>",
        "2x<2,1>",
        "1x<4,1>",
        "1x<2,2>",
        "2x<1,2>",
        "1x<1,4>",
        "1x<2,1> + 1x<1,2>",
        "1x<2,1> + 2x<1,1>",
        "1x<1,2> + 2x<1,1>",
    ),
}

OUR_SYSTEMS = (
    (64, "4x<16,1>"),
    (64, "1x<16,1> + 6x<8,1>"),
    (64, "1x<8,3> + 10x<4,1>"),
    (64, "8x<4,2>"),
    (1024, "4x<16,1> + 120x<8,1>"),
    (1024, "16x<16,1> + 32x<8,1> + 64x<4,2>"),
    (1024, "1024x<1,1>"),
)
"""Ranks and strategies whose planning is timed."""

SIZES = {
    "50M": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 13,
        "vocab_size": 8192,
    },
    "300M": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 20,
        "vocab_size": 16384,
    },
}


def start(size: str, dtype: str) -> ds_hydra.HydraEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size], num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False
    )
    stage3 = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": dtype == "bf16"},
    }
    with deepspeed.zero.Init(config_dict_or_path=stage3):  # never whole on a rank
        model = LlamaForCausalLM(config)
    section = {
        "context_length": 64,
        "tokens_per_iteration": 64,
        "strategies": STRATEGIES[dist.get_world_size()],
    }
    engine, *_ = ds_hydra.initialize(
        model=model,
        config={
            **stage3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_allow_untested_optimizer": True,
            "hydra": {key: list(v) if isinstance(v, tuple) else v for key, v in section.items()},
        },
    )
    return engine


class Case:
    """The things measured, on one engine; `routes` is "direct", or "node" for nodes of
    `ranks_per_node` ranks.
    """

    def __init__(self, engine: ds_hydra.HydraEngine, ranks_per_node: int | None):
        self.stage_model = engine.propagator.stage_model
        self.units = [
            [self.stage_model.params[b.param] for b in unit.bindings]
            for unit in self.stage_model.units
        ]
        self.device = engine.device
        self.group = dist.group.WORLD
        self.grads_P = [
            torch.zeros(p.ds_tensor.numel(), device=self.device) for p in self.stage_model.params
        ]
        self.shards_P = [p.ds_tensor.detach() for p in self.stage_model.params]
        self.ranks_per_node = {"direct": None} | (
            {"node": ranks_per_node} if ranks_per_node else {}
        )
        groups = GroupPool(None, self.device)
        keys = link_groups(dist.get_world_size(), ranks_per_node)
        groups.create(keys)
        rank = dist.get_rank()
        mine = {purpose: groups.get(purpose, ranks) for purpose, ranks in keys if rank in ranks}
        buffers = ExchangeBuffers(self.device)
        self.links = {
            (routes, is_push): Link(
                mine["push" if is_push else "pull"],
                self.device,
                buffers=buffers,
                node_group=mine.get("push_node" if is_push else "pull_node")
                if routes == "node"
                else None,
            )
            for routes in self.ranks_per_node
            for is_push in (False, True)
        }
        self.pool = SlicePool(self.device)
        self.plans: dict[tuple, LinkPlan] = {}

    def plan(self, strategy: Strategy, routes: str, *, gradients: bool) -> LinkPlan:
        key = (strategy, routes, gradients)
        if key not in self.plans:
            self.plans[key] = plan_link(
                self.stage_model.specs,
                self.stage_model.strategy_buckets(strategy, dist.get_world_size()),
                dist.get_rank(),
                gradients=gradients,
                ranks_per_node=self.ranks_per_node[routes],
            )
        return self.plans[key]

    def pull(self, strategy: Strategy, routes: str = "direct") -> StageWeights:
        buckets = self.stage_model.strategy_buckets(strategy, dist.get_world_size())[
            dist.get_rank()
        ]
        slices = StageWeights(self.stage_model.specs, buckets, self.pool, self.shards_P[0].dtype)
        plan, link = self.plan(strategy, routes, gradients=False), self.links[routes, False]

        def begin(index: int) -> RoundUnderWay:
            return link.begin_pull(plan, index, self.shards_P, _bucket(slices.bucket_S, index))

        with RoundWindow(begin, link.abandon) as rounds:
            for index in range(len(plan.rounds)):
                rounds.post(index)
        return slices

    def push(self, strategy: Strategy, slices: StageWeights, routes: str = "direct") -> None:
        plan, link = self.plan(strategy, routes, gradients=True), self.links[routes, True]

        def begin(index: int) -> RoundUnderWay:
            grads = _bucket(slices.grad_bucket_S, index)
            return link.begin_push(plan, index, grads, self.grads_P)

        with RoundWindow(begin, link.abandon) as rounds:
            for index in reversed(range(len(plan.rounds))):
                rounds.post(index)

    def zero_all_gather(self) -> None:
        """What ZeRO-3 does around forward: gather each unit, use it, release it."""
        for params in self.units:
            params[0].all_gather_coalesced(params).wait()
            for param in params:
                param.partition()

    def zero_reduce_scatter(self, gradients: list[list[torch.Tensor]]) -> None:
        for unit in gradients:
            reduce_scatter_coalesced(unit, self.group)

    def full_gradients(self) -> list[list[torch.Tensor]]:
        """Gradients of all units in the memory of the largest one: nobody reads their values."""
        largest = max(sum(p.ds_numel for p in params) for params in self.units)
        ones = torch.ones(largest, device=self.device)
        return [
            [flat.view(p.ds_shape) for p, flat in zip(params, _cut(ones, params), strict=True)]
            for params in self.units
        ]


def _bucket(buckets: list[list[torch.Tensor]], index: int) -> Sequence[torch.Tensor]:
    return buckets[index] if index < len(buckets) else ()


def _cut(flat: torch.Tensor, params: list) -> list[torch.Tensor]:
    sizes = [p.ds_numel for p in params]
    return list(flat[: sum(sizes)].split(sizes))


def timed(action) -> tuple[float, object]:
    """Milliseconds of the slowest rank."""
    dist.barrier()
    get_accelerator().synchronize()
    begin = time.perf_counter()
    result = action()
    get_accelerator().synchronize()
    elapsed = torch.tensor((time.perf_counter() - begin) * 1e3)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed), result


def measure(case: Case, strategies: list[Strategy], rounds: int) -> dict:
    """Milliseconds of each collective; "_node" marks node-aware routes."""
    times: dict[str, dict[str, list[float]]] = {str(s): {} for s in strategies}
    for round_ in range(rounds + 1):
        for strategy in strategies:
            row = {}
            row["all_gather"], _ = timed(case.zero_all_gather)
            row["pull"], slices = timed(lambda s=strategy: case.pull(s))
            row["push"], _ = timed(lambda s=strategy, x=slices: case.push(s, x))
            if "node" in case.ranks_per_node:
                row["pull_node"], slices = timed(lambda s=strategy: case.pull(s, "node"))
                row["push_node"], _ = timed(lambda s=strategy, x=slices: case.push(s, x, "node"))
            gradients = case.full_gradients()
            row["reduce_scatter"], _ = timed(lambda g=gradients: case.zero_reduce_scatter(g))
            if round_:  # the first round warms up
                for name, value in row.items():
                    times[str(strategy)].setdefault(name, []).append(value)
    return times


def measure_switching(case: Case, strategies: list[Strategy], rounds: int) -> dict[str, float]:
    """Pull + push of one iteration of each strategy, medians added up: all in turn, against each
    kept for two.
    """

    def iteration(strategy: Strategy) -> float:
        return timed(lambda: case.push(strategy, case.pull(strategy)))[0]

    kept: dict[Strategy, list[float]] = {s: [] for s in strategies}
    switched: dict[Strategy, list[float]] = {s: [] for s in strategies}
    for strategy in strategies:
        iteration(strategy)
    for _ in range(2 * rounds):
        for strategy in strategies:
            switched[strategy].append(iteration(strategy))
            kept[strategy].append(iteration(strategy))
    return {
        "switching_ms": sum(map(statistics.median, switched.values())),
        "keeping_ms": sum(map(statistics.median, kept.values())),
    }


def print_table(size: str, dtype: str, times: dict) -> list[dict]:
    rows = []
    print(f"\n{size} parameters, {dtype}, {dist.get_world_size()} ranks, medians in ms")
    print(f"{'':<20} {'':>8} {'/ all-gather':>16} {'':>9} {'/ reduce-scatter':>18}")
    print(
        f"{'strategy':<20} {'pull':>8} {'direct':>8} {'node':>7} {'push':>9} {'direct':>9} {'node':>8}"
    )
    for strategy, measured in times.items():
        median = {name: statistics.median(values) for name, values in measured.items()}
        row = {
            "strategy": strategy,
            **{f"{name}_ms": round(value, 2) for name, value in median.items()},
        }
        for name, value in median.items():
            if name.startswith(("pull", "push")):
                collective = "all_gather" if name.startswith("pull") else "reduce_scatter"
                row[f"{name}_ratio"] = round(value / median[collective], 3)
        rows.append(row)
        node = [
            f"{row[key]:.2f}" if key in row else ""
            for key in ("pull_node_ratio", "push_node_ratio")
        ]
        print(
            f"{strategy:<20} {median['pull']:>8.1f} {row['pull_ratio']:>8.2f} {node[0]:>7} "
            f"{median['push']:>9.1f} {row['push_ratio']:>9.2f} {node[1]:>8}"
        )
    return rows


def measure_planning() -> list[dict]:
    """CPU seconds in which one rank plans its part of pull and push, of LLaMA 32B."""
    stage_model = load_stage_model("llama2_32b")
    rows = []
    print(
        f"{'ranks':>6} {'strategy':<34} {'direct':>9} {'node-aware':>11}   s of CPU, pull + push of one rank"
    )
    for num_ranks, text in OUR_SYSTEMS:
        rank_buckets = stage_model.strategy_buckets(Strategy.parse(text), num_ranks)
        row = {"num_ranks": num_ranks, "strategy": text}
        for name, ranks_per_node in (("direct_s", None), ("node_s", 8)):
            begin = time.process_time()
            for gradients in (False, True):
                plan_link(
                    stage_model.specs,
                    rank_buckets,
                    num_ranks // 2,
                    gradients=gradients,
                    ranks_per_node=ranks_per_node,
                )
            row[name] = round(time.process_time() - begin, 3)
        rows.append(row)
        print(f"{num_ranks:>6} {text:<34} {row['direct_s']:>9.2f} {row['node_s']:>11.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, "all"], default="50M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--strategies", nargs="+", help="some of those that are measured for this number of ranks"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=2,
        help="pretended nodes of node-aware routes; 0 for none",
    )
    parser.add_argument(
        "--planning", action="store_true", help="measure planning instead; one process"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if args.planning:
        rows = measure_planning()
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
        return
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed()
    results = {}
    for size in SIZES if args.size == "all" else [args.size]:
        engine = start(size, args.dtype)
        strategies = [
            s
            for s in engine.source.candidates.strategies
            if not args.strategies or str(s) in args.strategies
        ]
        case = Case(engine, args.ranks_per_node or None)
        times = measure(case, strategies, args.rounds)
        switching = measure_switching(case, strategies, args.rounds)
        if dist.get_rank() == 0:
            results[size] = {"strategies": print_table(size, args.dtype, times), **switching}
            ratio = switching["switching_ms"] / switching["keeping_ms"]
            print(f"switching every iteration against keeping one: {ratio:.3f}")
    if dist.get_rank() == 0 and args.out:
        document = {"dtype": args.dtype, "num_ranks": dist.get_world_size(), "sizes": results}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
