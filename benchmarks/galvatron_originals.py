"""The cost model of Galvatron's first release (2022), rebuilt from its published costs, to compare searches under it.

Profiles, cost tables and search results come from `../shared/data/galvatron/` (its README says how the originals' code
and text differ). Nothing of the package uses this; the package's own cost model is `ds_hydra/strategy/search/costs.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.strategy.search.layer_dp import StageTables, search_layers
from ds_hydra.strategy.search.space import LayerStrategy

CONTEXT_MB = 1024.0
SLOWER = 1.1
"""All their layer times are multiplied by this."""
DUMMY_LAYERS = 24
"""Their fixed overhead of an iteration is spread over this many layers, whatever the model has."""


@dataclass(frozen=True)
class OriginalModel:
    """One model of the originals on their RTX TITAN nodes."""

    layers: Sequence[dict[str, Any]]
    counts: Sequence[int]
    links: dict[str, dict[str, float]]
    num_devices: int
    micro_batch_rule: str

    @property
    def layer_types(self) -> list[int]:
        """Index into `layers` of every layer."""
        return [index for index, count in enumerate(self.counts) for _ in range(count)]

    def link(self, pp: int, size: int, consecutive: bool) -> float:
        """Milliseconds for each MB of ring volume."""
        group = self.links[str(pp)]
        return group.get(str(size), group.get(f"{size}_{int(consecutive)}", 0.0))

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
        """Their time of one layer for the whole batch, its share of the pipeline's bubble included."""
        time, pp, tp, dp = layer["time"], strategy.pp, strategy.tp, strategy.dp
        mine = batch / dp
        forward = time["forward_computation_time"] * mine / tp
        backward = forward * time["bct_fct_coe"]
        message = 2 * (tp - 1) / tp * mine * time["sequence_length"] * time["hidden_size"] * 4 / 2**20
        tensor = 4 * message * self.link(pp, tp, strategy.is_tp_consecutive) if tp > 1 else 0.0
        gradients = 0.0
        if dp > 1:
            volume = 2 * (dp - 1) / dp * time["parameter_size"] / tp
            gradients = volume * self.link(pp, dp, not strategy.is_tp_consecutive or tp == 1)
        share = 0.5 if tp > 1 and tp >= tp * dp // 2 else 1.0
        together = min(backward * share, gradients)
        rest = gradients - together
        if tp == 1 and not strategy.sdp > 1:
            rest /= pp
        m = self.micro_batches(strategy, batch) if pp > 1 else 1.0
        bubble = (pp + m - 1) / (pp * m)
        total = (forward + backward + tensor) * bubble + (time["bct_overlap_coe"] - 1) * together + rest
        if dp > 1:
            total += time["extra_overhead"] / DUMMY_LAYERS
        if strategy.sdp > 1:
            total += gradients / 2
        return total * SLOWER

    def layer_mb(self, layer: dict[str, Any], strategy: LayerStrategy, batch: int) -> float:
        """Their memory of one layer."""
        memory = layer["memory"]
        states = 4 * memory["parameter_size"] / strategy.tp
        if strategy.sdp > 1:
            states *= 1 / strategy.sdp + 0.025
        return states + memory["tp_activation_per_bsz_dict"][str(strategy.tp)] * batch / strategy.dp

    def other_mb(self, pp: int, batch: int) -> float:
        """Context, embedding and head."""
        memory = self.layers[0]["memory"]
        activations = memory["other_activation_per_bsz"] * batch * pp / self.num_devices
        return CONTEXT_MB + memory["other_model_states"] + activations

    def tables(self, strategies: Sequence[LayerStrategy], batch: int, types: Sequence[int]) -> StageTables:
        """For the search. A transformation moves (tp - 1) / tp x 2 batch / dp MB where TP grows or groups change."""
        layouts = sorted({s.layout for s in strategies})
        time = [[self.layer_ms(layer, s, batch) for s in strategies] for layer in self.layers]
        memory = [[math.ceil(self.layer_mb(layer, s, batch)) for s in strategies] for layer in self.layers]
        pp = strategies[0].pp
        moves = [[self._move_ms(pp, before, after, batch) for after in layouts] for before in layouts]
        num_layers = len(types)
        return StageTables(
            time_ms=np.array(time)[list(types)],
            forward_mb=np.zeros((num_layers, len(strategies))),
            backward_mb=np.zeros((num_layers, len(strategies))),
            states_mb=np.array(memory, dtype=float)[list(types)],
            layout=np.array([layouts.index(s.layout) for s in strategies]),
            transfer_ms=np.tile(np.array(moves), (num_layers, 1, 1)),
        )

    def _move_ms(
        self, pp: int, before: tuple[int, int, bool], after: tuple[int, int, bool], batch: int
    ) -> float:
        grows = after[0] > before[0]
        changes = after[0] == before[0] > 1 and after[2] != before[2]
        if not (grows or changes):
            return 0.0
        tp, dp, consecutive = after
        return (tp - 1) / tp * 2 * batch / dp * self.link(pp, tp, consecutive) + 0.1

    def plan_ms(self, plan: Sequence[tuple[str, int]], batch: int) -> float:
        """Their time of an even plan, given as one stage's runs of strategies."""
        strategies = [LayerStrategy.parse(name) for name, count in plan for _ in range(count)]
        layer = self.layers[0]
        return strategies[0].pp * sum(self.layer_ms(layer, s, batch) for s in strategies)

    def search(
        self, strategies: Sequence[LayerStrategy], batch: int, memory_mb: float
    ) -> tuple[float, list[LayerStrategy]] | None:
        """The fastest even plan under their costs: (milliseconds of an iteration, one stage's layers)."""
        best = None
        for pp in sorted({s.pp for s in strategies}):
            mine = [s for s in strategies if s.pp == pp]
            types = self.layer_types[: len(self.layer_types) // pp]
            tables = self.tables(mine, batch, types)
            choice = search_layers(tables, memory_mb - self.other_mb(pp, batch))
            if choice is None:
                continue
            found = pp * tables.total_ms(choice), [mine[index] for index in choice]
            if best is None or found[0] < best[0]:
                best = found
        return best


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


def published_tables(
    data: Path, model: str, batch: int, num_layers: int
) -> tuple[list[LayerStrategy], StageTables, float]:
    """The second release's published costs of strategies without a pipeline: (strategies, tables, other MB).

    Their transformations cost nothing here: the published plans keep one layout.
    """
    rows = json.loads((data / "costs_v2_0_a100_8gpu.json").read_text())["rows"]
    rows = [row for row in rows if (row["model"], row["bsz"]) == (model, batch)]
    rows = [row for row in rows if row["strategy"].startswith("1-")]
    strategies = [LayerStrategy.parse(row["strategy"]) for row in rows]
    shape = (num_layers, len(rows))
    tables = StageTables(
        time_ms=np.broadcast_to([1e3 * row["time_layer_s_unpipelined"] for row in rows], shape),
        forward_mb=np.zeros(shape),
        backward_mb=np.zeros(shape),
        states_mb=np.broadcast_to(
            [math.ceil(row["mem_layer_MB_per_stage"][0]) for row in rows], shape
        ).astype(float),
        layout=np.zeros(len(rows), dtype=np.int64),
        transfer_ms=np.zeros((num_layers, 1, 1)),
    )
    return strategies, tables, math.ceil(rows[0]["mem_other_MB"][0])


def hetu_bert(data: Path, num_layers: int) -> OriginalModel:
    """BERT-Huge on 8 GPUs as the later repository has it: other constants, links from its own files."""
    model = json.loads((data / "profiles/rtx_titan_8gpu_2022.json").read_text())["models"]["BERT-Huge-32"]
    constants = json.loads((data / "cases_2022_hetu_repo.json").read_text())["bert_huge_constants"]
    layer = model["layer_types"][0]
    layer["time"]["extra_overhead"] = constants["extra_overhead_ms"]
    layer["time"]["forward_computation_time"] = constants["forward_ms_per_layer_per_sample"]
    layer["memory"]["other_model_states"] = constants["other_model_states_MB"]
    layer["memory"]["other_activation_per_bsz"] = constants["other_activation_MB_per_sample"]
    links: dict[str, dict[str, float]] = {}
    measured = json.loads(
        (data / "profiles/hetu_2022/env_configs/allreduce_bandwidth_8_gpus.json").read_text()
    )
    for key, cost in measured.items():
        pp, group = key.split("_", 1)
        links.setdefault(pp, {})[group] = cost
    return OriginalModel(
        layers=[layer],
        counts=[num_layers],
        links=links,
        num_devices=8,
        micro_batch_rule=model["micro_batch_rule"],
    )
