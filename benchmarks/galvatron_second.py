"""The cost model of Galvatron's second release (v2.0, 2023), rebuilt to compare searches under it.

Against the first release (`benchmarks/galvatron_originals.py`) it knows checkpointing, 1F1B and ZeRO-2, gives every
stage its own memory, and judges a plan by a formula for the whole pipeline that the search over layers does not see.
Profiles, the table of costs and the search results come from `../shared/data/galvatron/`. The rules follow public
versions of its code near that release, and are checked against all of those costs and results. Those do not
test GPipe with several stages, nor changes of TP between layers: no published plan has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.strategy.search import LayerStrategy, layer_strategies
from ds_hydra.strategy.search.layer_dp import StageTables, search_layers
from ds_hydra.strategy.search.partition import even_partition
from ds_hydra.strategy.search.space import Paradigm

CONTEXT_MB = 1024.0
MICRO_BATCH = 4
"""Samples of one micro-batch on each device of a stage, where that makes no more than `MAX_MICRO_BATCHES`."""
MAX_MICRO_BATCHES = 8
MAX_DEGREE = 8
"""Of TP and of PP."""
BACKWARD = 2.0
"""Backward computation over forward; checkpointing adds `RECOMPUTED`."""
RECOMPUTED = 0.5
SHARDING_OVERHEAD = 0.003
"""Of the model states, beside a device's shard of them."""
CHANGE_BIAS_MS = 1.0
"""Of a layer that shards no longer, or checkpoints from here on, and is otherwise like the one before."""

MODELS = {
    "gpt-1.5b": ("gpt", 48, 1600, 1024),
    "gpt-2.7b": ("gpt", 32, 2560, 2048),
    "llama-7b": ("llama", 32, 4096, 2048),
    "baichuan-7b": ("baichuan", 32, 4096, 2048),
}
"""Folder of the profiles, layers, hidden size, sequence length."""

Stages = list[list[LayerStrategy]]


@dataclass(frozen=True, kw_only=True)
class SecondRelease:
    """One model on one cluster, in bf16, with the options of a search."""

    num_layers: int
    hidden_size: int
    sequence_length: int
    forward_ms: float
    """One layer, one sample."""
    weight_mb: float
    activation_mb: dict[str, float]
    """One layer, one sample: by TP degree, and for `checkpoint`."""
    ends: dict[str, dict[str, float]]
    """Embedding and head: `model_states` and `activation` on the `only` stage, the `first` and the `last` one."""
    num_devices: int
    all_reduce: dict[tuple[int, bool], float]
    """Milliseconds for each MB of ring volume: by group size, and whether the devices are neighbours."""
    point_to_point: dict[int, float]
    """Milliseconds for each MB: by PP degree."""
    slowdown: float
    """Of gradient synchronisation and backward computation by each other."""
    is_1f1b: bool
    """Whether a stage holds no more micro-batches than stages follow; otherwise all (GPipe)."""
    is_zero2: bool
    """Whether data parallel layers without SDP, embedding and head shard gradients and optimizer states."""
    has_checkpoints: bool
    """Whether there is checkpointing in the space: then every stage keeps room for one recomputed layer."""

    def micro_batches(self, pp: int, batch: int) -> list[int]:
        """Samples of each on one device, as if the whole stage were data parallel; the last may be smaller."""
        samples = batch * pp // self.num_devices
        size = math.ceil(samples / self.asked_micro_batches(pp, batch))
        return [min(size, samples - start) for start in range(0, samples, size)]

    def asked_micro_batches(self, pp: int, batch: int) -> int:
        """Before they are made equal: the search over layers divides the batch by this."""
        samples = batch * pp // self.num_devices
        return 1 if pp == 1 else min(MAX_MICRO_BATCHES, math.ceil(samples / MICRO_BATCH))

    def held(self, pp: int, stage: int, batch: int) -> float:
        """Share of the batch whose activations the stage keeps at once."""
        parts = self.micro_batches(pp, batch)
        return sum(parts[: pp - stage]) / sum(parts) if self.is_1f1b and pp > 1 else 1.0

    def sharded(self, pp: int, degree: int, batch: int, kept_eighths: int) -> float:
        """Share of the model states on a device; gradients that accumulate stay whole, another eighth."""
        kept = (kept_eighths + (len(self.micro_batches(pp, batch)) > 1)) / 8
        return kept + (1 - kept) * (1 / degree + SHARDING_OVERHEAD)

    def states_mb(self, strategy: LayerStrategy, batch: int) -> float:
        """Weights, gradients and optimizer states of one layer."""
        states = 4 * self.weight_mb / strategy.tp
        if strategy.sdp > 1:
            return states * self.sharded(strategy.pp, strategy.sdp, batch, kept_eighths=0)
        if strategy.dp > 1 and self.is_zero2:
            return states * self.sharded(strategy.pp, strategy.dp, batch, kept_eighths=1)
        return states

    def layer_mb(self, strategy: LayerStrategy, stage: int, batch: int) -> float:
        """Model states and activations of one layer."""
        sample_mb = self.activation_mb["checkpoint" if strategy.checkpoints else str(strategy.tp)]
        mine = batch / strategy.dp * self.held(strategy.pp, stage, batch)
        return self.states_mb(strategy, batch) + sample_mb * mine

    def other_mb(self, pp: int, batch: int) -> list[float]:
        """Of every stage: context, embedding, head and a recomputed layer, as if the stage were data parallel."""
        group = self.num_devices // pp
        states = self.sharded(pp, group, batch, kept_eighths=1) if self.is_zero2 else 1.0
        found = [CONTEXT_MB] * pp
        for end, stage in (("only", 0),) if pp == 1 else (("first", 0), ("last", pp - 1)):
            found[stage] += self.ends[end]["model_states"] * states
            found[stage] += self.ends[end]["activation"] * batch / group * self.held(pp, stage, batch)
        if self.has_checkpoints:
            recomputed = self.activation_mb["1"] * batch / group * self.held(pp, pp - 1, batch)
            found = [size + math.floor(recomputed) for size in found]
        return found

    def used_mb(self, stages: Stages, batch: int) -> list[int]:
        """Of every stage, each of its layers rounded up to whole MB."""
        return [
            sum(math.ceil(self.layer_mb(s, stage, batch)) for s in layers) + math.ceil(other)
            for stage, (layers, other) in enumerate(
                zip(stages, self.other_mb(len(stages), batch), strict=True)
            )
        ]

    def layer_ms(self, strategy: LayerStrategy, batch: float, synchronises: bool = True) -> float:
        """One layer, `batch` samples in one go: forward, backward and, if it `synchronises`, its gradients."""
        pp, tp, dp = strategy.pp, strategy.tp, strategy.dp
        mine = batch / dp
        forward = self.forward_ms * mine / tp
        backward = forward * (BACKWARD + RECOMPUTED * strategy.checkpoints)
        message = mine * self.sequence_length * self.hidden_size * 2 / 2**20
        tensor = gradients = hops = 0.0
        if tp > 1:
            volume = 4 * (1 + 0.5 * strategy.checkpoints) * 2 * (tp - 1) / tp * message
            tensor = volume * self._link(tp, strategy.is_tp_consecutive)
        if dp > 1:
            volume = (dp - 1) / dp * self.weight_mb / tp
            gradients = volume * self._link(dp, strategy.is_dp_consecutive)
        if pp > 1:
            hops = 2 * pp * message * self.point_to_point[pp] / self.num_layers
        total = forward + backward + tensor + hops + (gradients / 2 if strategy.sdp > 1 else 0.0)
        if synchronises:
            together = min(gradients, backward * (0.5 if tp > 1 and dp <= 2 else 1.0))
            total += gradients + (self.slowdown - 2) * together
        return total

    def iteration_ms(self, stages: Stages, batch: int) -> float:
        """A plan: each slot of the pipeline takes its slowest stage; then the gradients that still travel."""
        count = len(self.micro_batches(len(stages), batch))
        compute, whole = (
            [sum(self.layer_ms(s, batch / count, synchronises) for s in layers) for layers in stages]
            for synchronises in (False, True)
        )
        left = max(ends - start for ends, start in zip(whole, np.cumsum(compute), strict=True))
        return max(compute) * (count - 1 + len(stages)) + max(0.0, float(left))

    def move_ms(self, before: LayerStrategy, after: LayerStrategy, batch: int) -> float:
        """A change between two layers, in the search alone: `iteration_ms` is without it."""
        grows = after.tp > before.tp
        turns = after.is_tp_consecutive != before.is_tp_consecutive and (
            after.tp == before.tp or (before.tp * before.dp, before.tp, after.tp) == (8, 4, 2)
        )
        if grows or turns:
            volume = (after.tp - 1) / after.tp * 2 * batch / after.dp
            return volume * self._link(after.tp, after.is_tp_consecutive)
        if after.layout != before.layout:
            return 0.0
        gathers = before.sdp > after.sdp and before.checkpoints == after.checkpoints
        recomputes = after.checkpoints > before.checkpoints and before.sdp == after.sdp
        return CHANGE_BIAS_MS if gathers or recomputes else 0.0

    def tables(
        self, strategies: Sequence[LayerStrategy], stage: int, num_layers: int, batch: int
    ) -> StageTables:
        """One stage, for the search: the time of one micro-batch and its gradients, the memory in whole MB."""
        micro_batch = batch / self.asked_micro_batches(strategies[0].pp, batch)
        time = [self.layer_ms(s, micro_batch) for s in strategies]
        memory = [float(math.ceil(self.layer_mb(s, stage, batch))) for s in strategies]
        moves = [[self.move_ms(before, after, batch) for after in strategies] for before in strategies]
        nothing = np.zeros((num_layers, len(strategies)))
        return StageTables(
            time_ms=nothing + time,
            forward_mb=nothing,
            backward_mb=nothing,
            states_mb=nothing + memory,
            layout=np.arange(len(strategies)),
            transfer_ms=np.tile(np.array(moves), (num_layers, 1, 1)),
        )

    def search(
        self, strategies: Sequence[LayerStrategy], batch: int, memory_mb: int
    ) -> tuple[float, Stages] | None:
        """The fastest plan with equally many layers on each stage: (milliseconds of an iteration, its stages)."""
        plans = []
        for pp in sorted({s.pp for s in strategies}):
            mine = [s for s in strategies if s.pp == pp]
            if batch % (self.num_devices // pp) == 0:
                plans.append(self._search_stages(mine, batch, memory_mb - withheld_mb(memory_mb)))
        timed = [(self.iteration_ms(stages, batch), stages) for stages in plans if stages is not None]
        return min(timed, key=lambda found: found[0], default=None)

    def _search_stages(
        self, strategies: Sequence[LayerStrategy], batch: int, usable_mb: int
    ) -> Stages | None:
        pp = strategies[0].pp
        others = self.other_mb(pp, batch)
        stages = []
        for stage, num_layers in enumerate(even_partition(self.num_layers, pp)):
            tables = self.tables(strategies, stage, num_layers, batch)
            choice = search_layers(tables, usable_mb - math.ceil(others[stage]))
            if choice is None:
                return None
            stages.append([strategies[index] for index in choice])
        return stages

    def _link(self, size: int, is_consecutive: bool) -> float:
        return self.all_reduce[size, is_consecutive] if size > 1 else 0.0


def withheld_mb(memory_mb: int) -> int:
    """What a device of more than 20 GB leaves to the allocator."""
    return int(0.2 * memory_mb) if memory_mb // 1024 > 20 else 0


def second_release(
    data: Path,
    model: str,
    *,
    nodes: int = 1,
    is_1f1b: bool = True,
    is_zero2: bool = True,
    has_checkpoints: bool = True,
) -> SecondRelease:
    """A model of `profiles/v2.0` on `nodes` nodes of 8 devices as in `profiles/hardware`."""
    family, num_layers, hidden_size, sequence_length = MODELS[model]

    def profile(path: str) -> dict[str, Any]:
        return dict(json.loads((data / "profiles" / path).read_text()))

    shape = f"bf16_hidden{hidden_size}_head32_seqlen{sequence_length}"
    memory = profile(f"v2.0/{family}/memory_profiling_{shape}.json")
    layer = memory["layertype_0"]
    cluster = f"{nodes}nodes_8gpus_per_node"
    rings = profile(f"hardware/allreduce_bandwidth_{cluster}.json")
    hops = profile(f"hardware/p2p_bandwidth_{cluster}.json")
    return SecondRelease(
        num_layers=num_layers,
        hidden_size=hidden_size,
        sequence_length=sequence_length,
        forward_ms=profile(f"v2.0/{family}/computation_profiling_{shape}.json")["layertype_0"],
        weight_mb=layer["parameter_size"],
        activation_mb=layer["tp_activation_per_bsz_dict"],
        ends={
            "only": memory["other_memory_pp_off"],
            "first": memory["other_memory_pp_on_first"],
            "last": memory["other_memory_pp_on_last"],
        },
        num_devices=8 * nodes,
        all_reduce={
            (int(key.split("_")[2]), key.endswith("_1")): 1 / bandwidth for key, bandwidth in rings.items()
        },
        point_to_point={int(key.removeprefix("pp_size_")): 1 / bandwidth for key, bandwidth in hops.items()},
        slowdown=profile("hardware/overlap_coefficient.json")["overlap_coe"],
        is_1f1b=is_1f1b,
        is_zero2=is_zero2,
        has_checkpoints=has_checkpoints,
    )


def published_searches(data: Path) -> list[dict[str, Any]]:
    """The cases of `cases_v2_a100.json`, each with what was searched and what was found."""
    return list(json.loads((data / "cases_v2_a100.json").read_text())["cases"])


def searched(data: Path, case: dict[str, Any]) -> tuple[SecondRelease, list[LayerStrategy]]:
    """Cost model and strategies of a published case."""
    options, num_devices = case["options"], 8 * case["nodes"]
    space = options.get("space", "full")
    model = second_release(
        data,
        case["model"],
        nodes=case["nodes"],
        is_1f1b=options.get("pipe") != "gpipe",
        is_zero2=options.get("dptype") != "ddp",
        has_checkpoints=space != "3d" and not options.get("disable_ckpt"),
    )
    if space == "3d":
        return model, [LayerStrategy.parse(f"2-2*-{num_devices // 4}")]
    strategies = layer_strategies(
        num_devices,
        paradigms={"dp+tp": {Paradigm.DP, Paradigm.TP}, "dp+pp": {Paradigm.DP}, "full": set(Paradigm)}[space],
        pipelines=space != "dp+tp",
        checkpoints=model.has_checkpoints,
    )
    return model, [s for s in strategies if max(s.tp, s.pp) <= MAX_DEGREE]


def published_stages(result: dict[str, Any]) -> Stages:
    """Layers of every stage of a published plan."""
    layers = iter([LayerStrategy.parse(name) for name, count in result["plan"] for _ in range(count)])
    return [[next(layers) for _ in range(count)] for count in result["pp_division"]]


def second_release_ratio(data: Path, case: dict[str, Any]) -> float | None:
    """Our cost over theirs; 1 where both find that nothing fits, None where one does or ours does not fit."""
    model, strategies = searched(data, case)
    memory_mb, batch = 1024 * case["memory_GB"], case["bsz"]
    found, theirs = model.search(strategies, batch, memory_mb), case["result"]["time_s"]
    if found is None or theirs is None:
        return 1.0 if found is None and theirs is None else None
    time_ms, stages = found
    fits = max(model.used_mb(stages, batch)) <= memory_mb - withheld_mb(memory_mb)
    return time_ms / 1e3 / theirs if fits else None


def second_release_cases(data: Path) -> Iterator[tuple[str, float | None]]:
    """(row of the table, ratio) of every published case."""
    for case in published_searches(data):
        label = f"{case['model']}, {8 * case['nodes']} A100, second release"
        yield label, second_release_ratio(data, case)
