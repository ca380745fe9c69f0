"""Published cases of Galvatron's later releases, and our search for plans under their cost models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.galvatron_later import NUM_DEVICES, Frame, Hardware, Head, LaterModel, Strategy
from ds_hydra.strategy.search.layer_dp import FloatArray, StageTables, search_layers
from ds_hydra.strategy.search.space import LayerStrategy

Stages = list[list[Strategy]]
TOLERANCE = 1e-8
"""Relative, of rebuilt against published estimates: the originals fit their lines iteratively."""
BERT_SEQUENCE = 512
"""The record of the BERT runs does not say it; of the profile's lengths it alone gives both published estimates."""


@dataclass(frozen=True)
class LayerCosts:
    """Of one layer in a frame, by strategy."""

    frame: Frame
    strategies: Sequence[Strategy]
    full: FloatArray
    """[S] ms of a micro-batch with gradients synchronised."""
    compute: FloatArray
    """[S] ms without."""
    memory: FloatArray
    """[stages, S] whole MB."""


def search(model: LaterModel) -> tuple[float, Frame, Head, Stages] | None:
    """The fastest plan that our search finds: (ms of an iteration, frame, head, stages); None where none fits.

    Frames and heads go by a lower bound of their time, until it exceeds what was found.
    """
    best: tuple[float, Frame, Head, Stages] | None = None
    for bound, costs, head in sorted(jobs(model), key=lambda job: job[0]):
        if best is not None and bound >= best[0]:
            break
        for stages in plans(model, costs, head):
            found = model.plan_ms(costs.frame, head, stages)
            if best is None or found < best[0]:
                best = found, costs.frame, head, stages
    return best


def jobs(model: LaterModel) -> Iterator[tuple[float, LayerCosts, Head]]:
    """Every frame and head that may hold the model, with a lower bound in ms; one strategy each without `fine`."""
    for frame in model.frames():
        layers = model.layers(frame)
        for choice in [layers] if model.fine else [[strategy] for strategy in layers]:
            costs = _layer_costs(model, frame, choice)
            for head in model.heads(frame):
                if model.fine or _is_uniform(model, choice[0], head):
                    bound = _lower_bound(model, costs, head)
                    if math.isfinite(bound):
                        yield bound, costs, head


def _is_uniform(model: LaterModel, strategy: Strategy, head: Head) -> bool:
    """Without `fine`: whether embedding and head run as the layers do (v2.4.0: at least with their degree)."""
    if not model.is_main:
        return strategy.degree == head.degree
    return head == Head(strategy.degree, strategy.ulysses, strategy.sharded)


def _layer_costs(model: LaterModel, frame: Frame, strategies: Sequence[Strategy]) -> LayerCosts:
    times = np.array([model.layer_times(frame, strategy) for strategy in strategies])
    memory = [
        [math.ceil(model.layer_mb(frame, strategy, stage)) for strategy in strategies]
        for stage in range(frame.pp)
    ]
    return LayerCosts(frame, strategies, times[:, 0], times[:, 1], np.array(memory, dtype=float))


def _lower_bound(model: LaterModel, costs: LayerCosts, head: Head) -> float:
    """No plan takes less: here layers mix strategies in any proportion, and R is nothing."""
    frame, own = costs.frame, model.head_times(costs.frame, head)
    count, other = frame.micro_batches, model.other_mb(frame, head)
    layers = model.stage_layers(frame.pp)

    def least(time: FloatArray, stage: int) -> float:
        budget = (model.budget_mb - other[stage]) / layers[stage]
        return layers[stage] * cheapest_mixture(time, costs.memory[stage], budget)

    compute = [least(costs.compute, stage) + own[stage] for stage in range(frame.pp)]
    bound = model.pipeline_ms(frame, [0.0] * frame.pp, compute)
    last = least(costs.full + (count - 1) * costs.compute, frame.pp - 1) + (count - 1) * own[-1]
    return max(bound, last)


def cheapest_mixture(time: FloatArray, memory: FloatArray, budget: float) -> float:
    """Least mean time of strategies mixed in any proportion whose mean memory is within `budget`; inf where none is."""
    fits = memory <= budget
    best = float(time[fits].min(initial=np.inf))
    if fits.all() or not fits.any():
        return best
    small, large = memory[fits][:, None], memory[~fits][None, :]
    share = (budget - small) / (large - small)
    mixed = (1 - share) * time[fits][:, None] + share * time[~fits][None, :]
    return min(best, float(mixed.min()))


def plans(model: LaterModel, costs: LayerCosts, head: Head) -> Iterator[Stages]:
    """What our search finds where embedding and head hide, or do not hide, the synchronisation of gradients."""
    other = model.other_mb(costs.frame, head)
    for hides in (False, True):
        stages = []
        for stage, count in enumerate(model.stage_layers(costs.frame.pp)):
            tables = _tables(model, costs, stage, count, hides)
            choice = search_layers(tables, model.budget_mb - other[stage])
            if choice is None:
                return
            stages.append([costs.strategies[index] for index in choice])
        yield stages


def _tables(model: LaterModel, costs: LayerCosts, stage: int, count: int, hides: bool) -> StageTables:
    """`count` layers; times are those of all micro-batches."""
    frame, strategies = costs.frame, costs.strategies
    own = (frame.micro_batches - 1) * costs.compute + (costs.compute if hides else costs.full)
    typical = {strategy.layout: strategy for strategy in strategies}
    layouts = sorted(typical)
    moves = [
        [frame.micro_batches * model.change_ms(frame, typical[before], typical[after]) for after in layouts]
        for before in layouts
    ]
    shape = (count, len(strategies))
    return StageTables(
        time_ms=np.broadcast_to(own, shape),
        forward_mb=np.zeros(shape),
        backward_mb=np.zeros(shape),
        states_mb=np.broadcast_to(costs.memory[stage], shape),
        layout=np.array([layouts.index(strategy.layout) for strategy in strategies]),
        transfer_ms=np.tile(np.array(moves), (count, 1, 1)),
    )


@dataclass(frozen=True)
class Case:
    """A published run: the model, what the originals found for it, and what they estimate."""

    label: str
    model: LaterModel
    throughput: float
    """Samples per second."""
    micro_batches: int
    head: Head
    stages: Stages

    def their_ms(self) -> float:
        """Their plan's time under the rebuilt model, the least of the frames that it fits (the record names none).

        Raises ValueError where that is not the published estimate.
        """
        times = [
            self.model.plan_ms(frame, self.head, self.stages)
            for frame in self.model.frames()
            if frame.micro_batches == self.micro_batches
            and self.head in self.model.heads(frame)
            and all(frame.admits(strategy) for stage in self.stages for strategy in stage)
            and self.model.fits(frame, self.head, self.stages)
        ]
        published = 1e3 * self.model.batch / self.throughput
        if not times or not math.isclose(min(times), published, rel_tol=TOLERANCE):
            raise ValueError(
                f"{self.label}: their plan takes {times} ms in the rebuilt model, not {published}"
            )
        return min(times)

    def ratio(self) -> float | None:
        """Our plan's time over theirs; None where our search finds none."""
        found = search(self.model)
        return None if found is None else found[0] / self.their_ms()


def later_release_cases(data: Path) -> Iterator[tuple[str, float | None]]:
    """(Label of the release and model, our plan's time over theirs) for every published case of the later releases."""
    for case in published_cases(data):
        yield case.label, case.ratio()


def published_cases(data: Path) -> Iterator[Case]:
    """All cases of `cases_repo_tests_and_main.json`."""
    document = json.loads((data / "cases_repo_tests_and_main.json").read_text())
    hardware = _node_of_8(data / "profiles/hardware")
    for run in document["v2_4_0"]:
        options, found = run["options"], run["result"]
        if run["name"].startswith("bert"):
            label = "BERT, 8 GPUs, TP, v2.4.0"
            model = _bert(data, hardware, run["name"].split("_")[1].removeprefix("hidden"), options)
        else:
            label = "Llama, 8 GPUs, TP and Ulysses, v2.4.0"
            model = _llama_of_tests(data, "v2.4.0", options["settle_chunk"], options["fine_grained_mode"])
        yield _from_config(label, model, found["throughput"], found["config"])
    for run in document["main_repo_tests"]:
        if "throughput" in run["expected"]:
            inputs, found = run["inputs"], run["expected"]
            yield Case(
                "Llama, 8 GPUs, TP and Ulysses, main of 2026",
                _llama_of_tests(data, "main", inputs["chunks"], inputs["fine_grained"]),
                found["throughput"],
                inputs["chunks"],
                Head(found["vtp"], bool(found["vsp"]), bool(found["embed_sdp"])),
                [[_named(name) for name, count in found["plan"] for _ in range(count)]],
            )
    for run in document["main_llama2_7b_runs"]:
        model = _llama2_7b(data, hardware, run["bsz"], run["memory_GB"])
        label = "Llama2 7B, 8 GPUs, TP and Ulysses, main of 2026"
        yield _from_config(label, model, run["throughput"], run["config"])


def _from_config(label: str, model: LaterModel, throughput: float, config: Mapping[str, Any]) -> Case:
    """A plan written as one list for each property of the layers."""
    pp = config["pp_deg"]
    names = ("tp_sizes_enc", "use_sp", "tp_consecutive_flags", "dp_types_enc", "checkpoint")
    rows = zip(*([int(item) for item in config[name].split(",")] for name in names), strict=True)
    layers = iter(
        Strategy(pp, degree, NUM_DEVICES // (pp * degree), *map(bool, flags)) for degree, *flags in rows
    )
    stages = [[next(layers) for _ in range(int(count))] for count in config["pp_division"].split(",")]
    head = Head(config["vtp"], bool(config["vsp"]), bool(config["embed_sdp"]))
    return Case(label, model, throughput, config["chunks"], head, stages)


def _named(name: str) -> Strategy:
    """A layer without Ulysses, by its name."""
    found = LayerStrategy.parse(name)
    return Strategy(
        found.pp,
        found.tp,
        found.dp,
        consecutive=found.is_tp_consecutive,
        sharded=found.sdp > 1,
        checkpoints=found.checkpoints,
    )


def _llama_of_tests(data: Path, release: Any, micro_batches: int | None, fine_grained: int) -> LaterModel:
    profile = json.loads((data / "profiles/test_llama_search_profile.json").read_text())
    return LaterModel(
        release=release,
        hardware=Hardware(profile["hardware"]),
        num_layers=28,
        hidden=3584,
        sequence=8192,
        **_times_by_length(profile["time_sequence"], 8192),
        **_memory(profile["memory_sequence_sp"], 8192),
        batch=64,
        memory_gb=36,
        micro_batches=micro_batches,
        fine=bool(fine_grained),
        async_gradients=False,
        strided=release == "v2.4.0",
    )


def _bert(data: Path, hardware: Hardware, hidden: str, options: Mapping[str, Any]) -> LaterModel:
    name = {"768": "hidden768_head12", "1024": "hidden1024_head16"}[hidden]
    folder = data / "profiles/v2.4.0/bert_hf"
    times = json.loads((folder / f"computation_profiling_bf16_{name}.json").read_text())
    memory = json.loads((folder / f"memory_profiling_bf16_{name}.json").read_text())
    return LaterModel(
        release="v2.4.0",
        hardware=hardware,
        num_layers={"768": 12, "1024": 24}[hidden],
        hidden=int(hidden),
        sequence=BERT_SEQUENCE,
        **_times_by_length(times, BERT_SEQUENCE),
        **_memory(memory, BERT_SEQUENCE),
        batch=options["settle_bsz"],
        memory_gb=options["memory_constraint"],
        micro_batches=None,
        ulysses=False,
    )


def _llama2_7b(data: Path, hardware: Hardware, batch: int, memory_gb: int) -> LaterModel:
    folder = data / "profiles/main_2026/llama2-7b"
    times = json.loads((folder / "computation_profiling_bf16_llama2-7b_all.json").read_text())
    memory = json.loads((folder / "memory_profiling_bf16_llama2-7b_all.json").read_text())
    return LaterModel(
        release="main",
        hardware=hardware,
        num_layers=32,
        hidden=4096,
        sequence=2048,
        **_times_by_batch(times),
        **_memory(memory, 2048),
        batch=batch,
        memory_gb=memory_gb,
        micro_batches=None,
    )


def _node_of_8(folder: Path) -> Hardware:
    """Their node of eight GPUs with NVLink."""
    files = {
        "allreduce": "allreduce_bandwidth_1nodes_8gpus_per_node",
        "p2p": "p2p_bandwidth_1nodes_8gpus_per_node",
        "overlap": "overlap_coefficient",
        "sp": "sp_time_1nodes_8gpus_per_node",
    }
    return Hardware({key: json.loads((folder / f"{name}.json").read_text()) for key, name in files.items()})


def _times_by_length(profile: Mapping[str, float], sequence: int) -> dict[str, Any]:
    """Times of one sample: parabola (layer) and line (head) through what was measured for several lengths."""
    found = {}
    for key, prefix, power in (("layer_ms", "layertype_0_", 2), ("head_ms", "layertype_other_", 1)):
        points = {
            int(name.rsplit("seq", 1)[1]): time
            for name, time in profile.items()
            if name.startswith(prefix) and "_bsz1_" in name
        }
        fit = np.polyfit(list(points), list(points.values()), power)
        found[key] = np.array([np.polyval(fit, sequence), 0.0])
    return found


def _times_by_batch(profile: Mapping[str, float]) -> dict[str, Any]:
    """Times of n samples: the lines through what was measured for several n."""
    found = {}
    for key, prefix in (("layer_ms", "layertype_0_bsz"), ("head_ms", "layertype_other_bsz")):
        each = {
            int(name.removeprefix(prefix).split("_")[0]): time
            for name, time in profile.items()
            if name.startswith(prefix)
        }
        found[key] = np.polyfit(list(each), [batch * time for batch, time in each.items()], 1)
    return found


def _memory(profile: Mapping[str, Any], sequence: int) -> dict[str, Any]:
    """Weights as measured for the shortest length, activations scaled from the longest one."""
    layer = profile["layertype_0_sp"]
    longest, shortest = max(layer, key=int), min(layer, key=int)

    def scaled(by_degree: Mapping[str, float]) -> dict[str, float]:
        return {degree: memory / int(longest) * sequence for degree, memory in by_degree.items()}

    return {
        "parameter_mb": layer[shortest]["parameter_size"],
        "activation_mb": scaled(layer[longest]["tp_activation_per_bsz_dict"]),
        "head_memory": {
            end: {
                "model_states": profile[f"other_memory_pp_{key}_sp"][longest]["model_states"],
                "activation": scaled(profile[f"other_memory_pp_{key}_sp"][longest]["activation"]),
            }
            for end, key in (("only", "off"), ("first", "on_first"), ("last", "on_last"))
        },
    }
