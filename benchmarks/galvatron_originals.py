"""The cost models of Galvatron's first release (2022), rebuilt, to compare searches under them.

Profiles, cost tables and search results come from `tests/data/galvatron/`. Nothing of the package
uses this; the package's own cost model is `ds_hydra/lab/search/layers.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.lab.search.layer_dp import StageTables, search_layers
from ds_hydra.lab.search.layers import LayerStrategy, Paradigm

CONTEXT_MB = 1024.0
SLOWER = 1.1
"""All their layer times are multiplied by this."""
DUMMY_LAYERS = 24
"""Their fixed overhead of an iteration is spread over this many layers, whatever the model has."""
UNSHARD_MS = 0.1
"""A layer with DP after one with SDP in the same groups: decides between plans of equal cost."""

Layout = tuple[int, int, bool, bool]
"""(TP, DP, whether TP groups are consecutive, whether states are sharded)."""


def parse_strategy(text: str) -> LayerStrategy:
    """The strategy that is written as `text`."""
    pp, tp, dp, *again = text.split("-")
    data = (Paradigm.SDP if "f" in dp else Paradigm.DP, int(dp.strip("f*")))
    levels = [(Paradigm.TP, int(tp.strip("*"))), data]
    if "*" in dp:
        levels.reverse()
    return LayerStrategy(int(pp), tuple(own for own in levels if own[1] > 1), bool(again))


@dataclass(frozen=True, kw_only=True)
class OriginalModel:
    """One model of the originals on one RTX TITAN node."""

    layers: Sequence[dict[str, Any]]
    counts: Sequence[int]
    links: dict[str, dict[str, float]]
    num_devices: int
    micro_batch_rule: str
    sharding_excess = 0.025
    """Share of the states that stays on every device under SDP."""

    @property
    def layer_types(self) -> list[int]:
        """Index into `layers` of every layer."""
        return [index for index, count in enumerate(self.counts) for _ in range(count)]

    def link(self, pp: int, size: int, consecutive: bool) -> float:
        """Milliseconds for each MB of ring volume."""
        group = self.links[str(pp)]
        both = (f"{size}_{int(consecutive)}", f"{size}_1")  # the whole stage has one entry
        return next((group[key] for key in (str(size), *both) if key in group), 0.0)

    def micro_batches(self, strategy: LayerStrategy, batch: int) -> float:
        """Their (fractional) number of micro-batches."""
        mine = batch / strategy.dp
        if self.micro_batch_rule.startswith("m(b,s)"):
            if strategy.pp == 1:
                return 1.0
            if (strategy.pp, strategy.tp, strategy.dp) in {(2, 4, 1), (4, 2, 1)}:
                return mine / 4
            return mine / 2 if mine < 6 else mine / 8 + 2
        if self.micro_batch_rule == "1 if b==8 else 2":
            return 1.0 if mine == 8 else 2.0
        if self.micro_batch_rule.startswith("1 if b<=8"):
            return 1.0 if mine <= 8 else 2.0 if mine < 32 else 3.0 if mine <= 96 else 4.0
        raise ValueError(f"unknown rule {self.micro_batch_rule!r}")

    def layer_ms(self, layer: dict[str, Any], strategy: LayerStrategy, batch: int) -> float:
        """Their time of one layer for the whole batch, its share of the pipeline's bubble
        included.
        """
        time = layer["time"]
        computation, gradients, hidden = self._parts_ms(layer, strategy, batch)
        rest = gradients - hidden
        if strategy.tp == 1 and not strategy.sdp > 1:
            rest /= strategy.pp
        total = computation + (time["bct_overlap_coe"] - 1) * hidden + rest
        if strategy.dp > 1:
            total += time["extra_overhead"] / DUMMY_LAYERS
        if strategy.sdp > 1:
            total += gradients / 2
        return total * SLOWER

    def _parts_ms(
        self,
        layer: dict[str, Any],
        strategy: LayerStrategy,
        batch: int,
        gradient_share: float = 1.0,
    ) -> tuple[float, float, float]:
        """(compute and TP with the bubble, gradient synchronisation, the part of it behind the
        backward pass).
        """
        time, pp, tp, dp = layer["time"], strategy.pp, strategy.tp, strategy.dp
        mine = batch / dp
        forward = time["forward_computation_time"] * mine / tp
        backward = forward * time["bct_fct_coe"]
        tensor = gradients = 0.0
        if tp > 1:
            ring_mb = 2 * (tp - 1) / tp * activation_mb(layer, mine)
            tensor = 4 * ring_mb * self.link(pp, tp, strategy.is_tp_consecutive)
        if dp > 1:
            ring_mb = 2 * (dp - 1) / dp * time["parameter_size"] / tp * gradient_share
            gradients = ring_mb * self.link(pp, dp, not strategy.is_tp_consecutive or tp == 1)
        overlapped = 0.5 if tp > 1 and tp >= tp * dp // 2 else 1.0
        m = self.micro_batches(strategy, batch) if pp > 1 else 1.0
        bubble = (pp + m - 1) / (pp * m)
        return (
            (forward + backward + tensor) * bubble,
            gradients,
            min(backward * overlapped, gradients),
        )

    def layer_mb(self, layer: dict[str, Any], strategy: LayerStrategy, batch: int) -> float:
        """Their memory of one layer."""
        memory = layer["memory"]
        states = 4 * memory["parameter_size"] / strategy.tp
        if strategy.sdp > 1:
            states *= 1 / strategy.sdp + self.sharding_excess
        return states + memory["tp_activation_per_bsz_dict"][str(strategy.tp)] * batch / strategy.dp

    def other_mb(self, pp: int, batch: int) -> float:
        """Context, embedding and head."""
        memory = self.layers[0]["memory"]
        activations = memory["other_activation_per_bsz"] * batch * pp / self.num_devices
        return CONTEXT_MB + memory["other_model_states"] + activations

    def tables(
        self, strategies: Sequence[LayerStrategy], batch: int, types: Sequence[int]
    ) -> StageTables:
        """For the search."""
        layouts = sorted({layout_of(s) for s in strategies})
        time = [[self.layer_ms(layer, s, batch) for s in strategies] for layer in self.layers]
        memory = [
            [math.ceil(self.layer_mb(layer, s, batch)) for s in strategies] for layer in self.layers
        ]
        pp = strategies[0].pp
        moves = [
            [self._move_ms(pp, before, after, batch) for after in layouts] for before in layouts
        ]
        num_layers = len(types)
        return StageTables(
            time_ms=np.array(time)[list(types)],
            forward_mb=np.zeros((num_layers, len(strategies))),
            backward_mb=np.zeros((num_layers, len(strategies))),
            states_mb=np.array(memory, dtype=float)[list(types)],
            layout=np.array([layouts.index(layout_of(s)) for s in strategies]),
            transfer_ms=np.tile(np.array(moves), (num_layers, 1, 1)),
        )

    def _move_ms(self, pp: int, before: Layout, after: Layout, batch: int) -> float:
        """(TP - 1) / TP x 2 batch / DP MB, whatever the layer; where TP grows or its groups
        change.
        """
        tp, dp, consecutive, _ = after
        regroups = consecutive != before[2] and min(before[0], before[1], tp, dp) > 1
        if before[:3] == after[:3]:
            return UNSHARD_MS if before[3] and not after[3] else 0.0
        if not (tp > before[0] or regroups):
            return 0.0
        return (tp - 1) / tp * 2 * batch / dp * self.link(pp, tp, consecutive)

    def division(self, strategies: Sequence[LayerStrategy], batch: int) -> list[int]:
        """Layers of every stage: even, or filled with the least memory of each layer from the last
        stage on.
        """
        pp, types = strategies[0].pp, self.layer_types
        if len(self.counts) == 1:
            return [len(types) // pp] * pp
        least = [min(self.layer_mb(layer, s, batch) for s in strategies) for layer in self.layers]
        other = self.other_mb(1, batch) if pp > 1 else 0.0
        share = (sum(least[kind] for kind in types) + other) / pp
        counts = [0] * pp
        left = len(types)
        for stage in range(pp - 1, 0, -1):
            filled = 0.0
            while left and share - filled >= 0.5 * least[types[left - 1]]:
                left -= 1
                filled += least[types[left]]
                counts[stage] += 1
        counts[0] = left
        if not left:
            counts[:2] = [1, counts[1] - 1]
        return counts

    def search(
        self, strategies: Sequence[LayerStrategy], batch: int, memory_mb: float
    ) -> tuple[float, list[list[LayerStrategy]]] | None:
        """The fastest plan under their costs: (milliseconds of an iteration, the layers of every
        stage).
        """
        plans = []
        for pp in sorted({s.pp for s in strategies}):
            plan = self._search_stages([s for s in strategies if s.pp == pp], batch, memory_mb)
            if plan is not None:
                plans.append(plan)
        return min(plans, key=lambda plan: plan[0], default=None)

    def _search_stages(
        self, strategies: Sequence[LayerStrategy], batch: int, memory_mb: float
    ) -> tuple[float, list[list[LayerStrategy]]] | None:
        """Stages run one after the other. All of them keep room for embedding and head, if they are
        alike.
        """
        pp, types = strategies[0].pp, self.layer_types
        other = math.ceil(self.other_mb(pp, batch))
        total, start = 0.0, 0
        stages: list[list[LayerStrategy]] = []
        for count in self.division(strategies, batch):
            if stages and len(self.counts) == 1:
                return pp * total, stages * pp
            tables = self.tables(strategies, batch, types[start : start + count])
            choice = search_layers(tables, memory_mb - (0 if stages else other))
            if choice is None:
                return None
            total += tables.total_ms(choice)
            stages.append([strategies[index] for index in choice])
            start += count
        return total, stages


@dataclass(frozen=True, kw_only=True)
class SeveralNodes(OriginalModel):
    """One of their models on two nodes; this part of their code has other rules.

    Sharded gradients are half the volume, sharded weights are gathered twice, and activations sent
    from stage to stage count. Embedding and head lie on different stages. Batches are multiples of
    a stage's devices.
    """

    point_to_point: dict[str, float]
    """Milliseconds for each MB, by PP degree."""
    rows_per_micro_batch: tuple[int, int]
    """Up to PP 8, and above."""
    embedding: dict[str, tuple[float, float]]
    """`alone` (no pipeline), `first` and `last` stage: (MB of states, MB for every row)."""
    chunk_saving_mb: float
    """What a row saves at most by being run in many micro-batches."""
    saves_on_first: bool
    """Whether the first stage saves as well and has its rows at once; otherwise only the last
    one.
    """
    sharding_excess = 0.003

    def micro_batches(self, strategy: LayerStrategy, batch: int) -> float:
        rows = batch / strategy.dp // strategy.tp
        return max(1.0, math.ceil(rows / self.rows_per_micro_batch[strategy.pp > 8]))

    def layer_ms(self, layer: dict[str, Any], strategy: LayerStrategy, batch: int) -> float:
        share = 0.5 if strategy.sdp > 1 else 1.0
        computation, gradients, hidden = self._parts_ms(layer, strategy, batch, share)
        total = computation + (layer["time"]["bct_overlap_coe"] - 1) * hidden + gradients - hidden
        if strategy.sdp > 1:
            total += 2 * gradients
        if strategy.pp > 1:
            sent_mb = 2 * activation_mb(layer, batch / strategy.dp)
            total += sent_mb * self.point_to_point[f"pp_deg_{strategy.pp}"] / sum(self.counts)
        return total * SLOWER

    def other_mb(self, pp: int, batch: int) -> float:
        rows = batch * pp / self.num_devices
        if pp == 1:
            states, of_row = self.embedding["alone"]
            return CONTEXT_MB + states + of_row * rows
        strategy = parse_strategy(f"{pp}-1-{self.num_devices // pp}")
        chunks = min(self.micro_batches(strategy, batch), rows // 1)
        saved = self.chunk_saving_mb * rows * (1 - 1 / chunks)
        states, of_row = self.embedding["first"]
        first = states + (of_row * rows - saved if self.saves_on_first else of_row * rows / pp)
        states, of_row = self.embedding["last"]
        return CONTEXT_MB + max(first, states + of_row * rows - saved)

    def _search_stages(
        self, strategies: Sequence[LayerStrategy], batch: int, memory_mb: float
    ) -> tuple[float, list[list[LayerStrategy]]] | None:
        if batch % (self.num_devices // strategies[0].pp):
            return None
        return super()._search_stages(strategies, batch, memory_mb)


def layout_of(strategy: LayerStrategy) -> Layout:
    """What a change of strategy between layers costs by."""
    return *strategy.layout, strategy.sdp > 1


def activation_mb(layer: dict[str, Any], rows: float) -> float:
    """Activations between two layers in fp32."""
    time = layer["time"]
    return float(rows * time["sequence_length"] * time["hidden_size"] * 4 / 2**20)


def rtx_titan(data: Path, model: str) -> OriginalModel:
    """A model of `profiles/rtx_titan_8gpu_2022.json`."""
    document = json.loads((data / "profiles/rtx_titan_8gpu_2022.json").read_text())
    found = document["models"][model]
    return OriginalModel(
        layers=found["layer_types"],
        counts=found["layer_counts"],
        links=document["comm_coe_ms_per_MB"],
        num_devices=8,
        micro_batch_rule=found["micro_batch_rule"],
    )


def later_links(data: Path, name: str) -> dict[str, dict[str, float]]:
    """Links of the later repository: measured `<PP>_<group>_<consecutive>` by PP and group."""
    links: dict[str, dict[str, float]] = {}
    for key, cost in json.loads(
        (data / "profiles/hetu_2022/env_configs" / name).read_text()
    ).items():
        pp, group = key.split("_", 1)
        links.setdefault(pp, {})[group] = cost
    return links


def later_bert(data: Path, num_layers: int) -> OriginalModel:
    """BERT-Huge on 8 GPUs as the later repository has it: other constants, links from its own
    files.
    """
    model = rtx_titan(data, "BERT-Huge-32")
    constants = json.loads((data / "cases_2022_hetu_repo.json").read_text())["bert_huge_constants"]
    layer = model.layers[0]
    layer["time"]["extra_overhead"] = constants["extra_overhead_ms"]
    layer["time"]["forward_computation_time"] = constants["forward_ms_per_layer_per_sample"]
    layer["memory"]["other_model_states"] = constants["other_model_states_MB"]
    layer["memory"]["other_activation_per_bsz"] = constants["other_activation_MB_per_sample"]
    links = later_links(data, "allreduce_bandwidth_8_gpus.json")
    return replace(model, counts=[num_layers], links=links)


def two_nodes(data: Path, model: str, num_layers: int) -> SeveralNodes:
    """`bert` or `vit`, hidden size 1280, on 16 GPUs.

    Memory beside the layers, activations under TP 16 and rows of a micro-batch: the repository's
    search scripts for 16 GPUs (source in the data's README, tag hetu_2022).
    """
    is_bert = model == "bert"
    layer = rtx_titan(data, "BERT-Huge-32" if is_bert else "ViT-Huge-32").layers[0]
    layer["memory"]["tp_activation_per_bsz_dict"]["16"] = 16.4509375 if is_bert else 4.93
    layer["time"]["extra_overhead"] = 0.0
    forward = json.loads(
        (data / f"profiles/hetu_2022/{model}/forward_profiling_config.json").read_text()
    )
    layer["time"]["forward_computation_time"] = forward["fwd_time_hidden_1280"]
    folder = data / "profiles/hetu_2022/env_configs"
    return SeveralNodes(
        layers=[layer],
        counts=[num_layers],
        links=later_links(data, "allreduce_bandwidth_dist_16_gpus.json"),
        num_devices=16,
        micro_batch_rule="",
        point_to_point=json.loads((folder / "p2p_bandwidth_dist_16_gpus.json").read_text()),
        rows_per_micro_batch=(4, 4) if is_bert else (16, 32),
        embedding=(
            {"alone": (800.0, 280.0), "first": (620.0, 330.0), "last": (662.0, 260.0)}
            if is_bert
            else {"alone": (40.74, 10.0), "first": (25.0, 10.0), "last": (25.0, 10.0)}
        ),
        chunk_saving_mb=120.0 if is_bert else 7.0,
        saves_on_first=not is_bert,
    )


def later_repository_cases(data: Path) -> Iterator[tuple[str, OriginalModel, dict[str, Any]]]:
    """(what it is, model, the published runs) of `cases_2022_hetu_repo.json`."""
    runs = json.loads((data / "cases_2022_hetu_repo.json").read_text())["runs"]
    swin = replace(
        rtx_titan(data, "Swin-Huge-32"), links=later_links(data, "allreduce_bandwidth_8_gpus.json")
    )
    for key, name, model in (
        ("bert8", "BERT-Huge-32, 8 GPUs", later_bert(data, 32)),
        ("bert8_48", "BERT-Huge-48, 8 GPUs", later_bert(data, 48)),
        ("swin8", "Swin-Huge-32, 8 GPUs, uneven stages", swin),
        ("bert16", "BERT-Huge-32, 16 GPUs", two_nodes(data, "bert", 32)),
        ("bert16_48", "BERT-Huge-48, 16 GPUs", two_nodes(data, "bert", 48)),
        ("vit16", "ViT-Huge-32, 16 GPUs", two_nodes(data, "vit", 32)),
    ):
        yield name, model, runs[key]
