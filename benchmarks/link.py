"""Link times as ratios: pull against ZeRO-3's own all-gather, push against its reduce-scatter, in one run.

    deepspeed --num_gpus 4 --no_local_rank benchmarks/link.py --out docs/benchmarks/link.json

Both sides move the same parameters on the same ranks, alternated, bucket by bucket; medians. Prints a table,
writes JSON. `switching` compares pull + push when every round uses another strategy with keeping one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra
from ds_hydra.engine.propagation import Propagator, Slices
from ds_hydra.strategy import Strategy

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

SIZES = {
    "50M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 13, "vocab_size": 8192},
    "300M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "vocab_size": 16384},
}


def start(size: str, dtype: str) -> ds_hydra.HydraEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size], num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False
    )
    model = LlamaForCausalLM(config)
    section = {
        "context_length": 64,
        "tokens_per_iteration": 64,
        "strategies": STRATEGIES[dist.get_world_size()],
    }
    engine, *_ = ds_hydra.initialize(
        model=model,
        config={
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": dtype == "bf16"},
            "hydra": {key: list(v) if isinstance(v, tuple) else v for key, v in section.items()},
        },
    )
    return engine


class Case:
    """The four things measured, on one engine."""

    def __init__(self, engine: ds_hydra.HydraEngine):
        self.propagator: Propagator = engine.hydra.propagator
        skeleton = self.propagator.skeleton
        self.units = [[skeleton.params[b.param] for b in unit.bindings] for unit in skeleton.units]
        self.device = engine.device
        self.group = dist.group.WORLD
        self.grads_P = [torch.zeros(p.ds_tensor.numel(), device=self.device) for p in skeleton.params]

    def pull(self, strategy: Strategy) -> Slices:
        slices, session = self.propagator._open(strategy, with_gradients=True, grads_P=None)
        with session:
            session.finish()
        return slices

    def push(self, strategy: Strategy, slices: Slices) -> None:
        link = self.propagator._link_of(strategy)
        self.propagator._push_link.push(link.push, slices.grad_bucket_S, self.grads_P)

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
        return [[torch.ones(p.ds_shape, device=self.device) for p in params] for params in self.units]


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
    times: dict[str, dict[str, list[float]]] = {
        str(s): {"pull": [], "push": [], "all_gather": [], "reduce_scatter": []} for s in strategies
    }
    for round_ in range(rounds + 1):
        for strategy in strategies:
            row = {}
            row["all_gather"], _ = timed(case.zero_all_gather)
            row["pull"], slices = timed(lambda s=strategy: case.pull(s))
            row["push"], _ = timed(lambda s=strategy, x=slices: case.push(s, x))
            gradients = case.full_gradients()
            row["reduce_scatter"], _ = timed(lambda g=gradients: case.zero_reduce_scatter(g))
            if round_:  # the first round warms up
                for name, value in row.items():
                    times[str(strategy)][name].append(value)
    return times


def measure_switching(case: Case, strategies: list[Strategy], rounds: int) -> dict[str, float]:
    """Pull + push per iteration: every strategy in turn, against each of them kept for as many iterations."""

    def iteration(strategy: Strategy) -> float:
        return timed(lambda: case.push(strategy, case.pull(strategy)))[0]

    kept, switched = [], []
    for strategy in strategies:
        iteration(strategy)
    for _ in range(rounds):
        switched += [iteration(s) for s in strategies]
        for strategy in strategies:
            iteration(strategy)
            kept.append(iteration(strategy))
    return {"switching_ms": statistics.median(switched), "keeping_ms": statistics.median(kept)}


def print_table(size: str, dtype: str, times: dict) -> list[dict]:
    rows = []
    print(f"\n{size} parameters, {dtype}, {dist.get_world_size()} ranks, medians in ms")
    print(f"{'strategy':<20} {'pull':>8} {'/ all-gather':>13} {'push':>8} {'/ reduce-scatter':>17}")
    for strategy, measured in times.items():
        median = {name: statistics.median(values) for name, values in measured.items()}
        row = {
            "strategy": strategy,
            **{f"{name}_ms": round(value, 2) for name, value in median.items()},
            "pull_ratio": round(median["pull"] / median["all_gather"], 3),
            "push_ratio": round(median["push"] / median["reduce_scatter"], 3),
        }
        rows.append(row)
        print(
            f"{strategy:<20} {median['pull']:>8.1f} {row['pull_ratio']:>13.2f} {median['push']:>8.1f} "
            f"{row['push_ratio']:>17.2f}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, "all"], default="50M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed()
    results = {}
    for size in SIZES if args.size == "all" else [args.size]:
        engine = start(size, args.dtype)
        strategies = list(engine.hydra.strategies)
        case = Case(engine)
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
