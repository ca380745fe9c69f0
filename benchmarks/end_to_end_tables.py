"""Tables and picture of end_to_end.py, out of its result documents."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import contenders
import matplotlib
import numpy as np
from contenders import TITLES
from training_setup import ModelSize
from workloads import WORKLOADS, Batch, Shape, imbalance


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender of one workload in the table."""

    name: str
    tokens_per_s: float
    """Median over iterations of useful tokens per second."""
    total_tokens_per_s: float
    """Useful tokens of all iterations over their time."""
    ratios: list[float]
    """Of each iteration: time of the contender over that of ds_hydra."""
    total_ratio: float
    imbalance: float | None
    peak_bytes: int
    loss_error: float

    @property
    def is_valid(self) -> bool:
        """Whether its losses are those of ds_hydra."""
        return self.loss_error <= LOSS_TOLERANCE


def read_rows(document: dict[str, Any]) -> list[Row]:
    """The rows of one workload's file."""
    measured = document["contenders"]
    tokens = [sum(batch) for batch in document["batches"]]
    reference = measured["hydra"]
    rows = []
    for name in (title for title in TITLES if title in measured):
        steps = measured[name]
        seconds = [step["seconds"] for step in steps]
        ours = [step["seconds"] for step in reference]
        rows.append(
            Row(
                name=name,
                tokens_per_s=statistics.median(n / s for n, s in zip(tokens, seconds, strict=True)),
                total_tokens_per_s=sum(tokens) / sum(seconds),
                ratios=[theirs / mine for theirs, mine in zip(seconds, ours, strict=True)],
                total_ratio=sum(seconds) / sum(ours),
                imbalance=_imbalance(name, document),
                peak_bytes=max(step["peak_bytes"] for step in steps),
                loss_error=max(
                    abs(a["loss"] - b["loss"]) / abs(b["loss"])
                    for a, b in zip(steps, reference, strict=True)
                ),
            )
        )
    return rows


def _shape_of(document: dict[str, Any]) -> Shape:
    settings = dict(document["settings"])
    return Settings(**{**settings, "model": ModelSize(**settings["model"])}).shape()


def _imbalance(name: str, document: dict[str, Any]) -> float | None:
    stock = contenders.STOCK.get(name)
    if stock is None or not stock.packs or stock.parallel != "data":
        return None
    shape = _shape_of(document)
    batches: list[Batch] = [tuple(batch) for batch in document["batches"]]
    return statistics.mean(imbalance(batch, stock.place(batch, shape), shape) for batch in batches)


def attention_share(document: dict[str, Any]) -> float:
    """Share of the FLOPs of all sequences that attention scores and values take."""
    shape = _shape_of(document)
    lengths = [length for batch in document["batches"] for length in batch]
    return sum(shape.quadratic_flops * n * n for n in lengths) / sum(map(shape.flops, lengths))


def overhead(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians, in ms, of where the time of ds_hydra's iterations goes; `rest` is neither layers,
    link nor optimizer.
    """
    parts = [
        {
            "iteration": m["iteration_ms"],
            "propagation": m["measured_ms"],
            "pull": m.get("visible_pull_ms", m["pull_ms"]),
            "push": m.get("visible_push_ms", m["push_ms"]),
            "step": m["step_ms"],
        }
        for m in (step["metrics"] for step in steps)
    ]
    for part in parts:
        part["rest"] = part["iteration"] - sum(v for key, v in part.items() if key != "iteration")
    return {key: statistics.median(part[key] for part in parts) for key in parts[0]}


def make_table(documents: Sequence[dict[str, Any]]) -> str:
    """Markdown: one table per workload."""
    lines = []
    for document in documents:
        workload = WORKLOADS[document["workload"]]
        settings = document["settings"]
        lengths = [length for batch in document["batches"] for length in batch]
        lines += [
            f"### {workload.title}, {settings['num_ranks']} ranks",
            "",
            f"{len(document['batches'])} iterations of {np.mean([sum(b) for b in document['batches']]):,.0f} tokens in "
            f"{np.mean([len(b) for b in document['batches']]):.0f} sequences on average (median "
            f"{int(np.median(lengths))}, longest {max(lengths):,}); {attention_share(document):.0%} of the FLOPs in "
            f"attention; {document['hardware']}; {document['date']}, load {document['load_before']:.1f} at the start.",
            "",
            "| contender | useful tokens/s, median | all | ds_hydra is faster by, median of pairs (quartiles) | all "
            "| FLOPs of slowest rank over mean | peak memory per rank | loss differs by |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in read_rows(document):
            low, middle, high = np.percentile(row.ratios, [25, 50, 75])
            ratio = "1" if row.name == "hydra" else f"{middle:.2f} ({low:.2f}-{high:.2f})"
            balance = "" if row.imbalance is None else f"{row.imbalance:.2f}"
            validity = "" if row.is_valid else " **invalid**"
            lines.append(
                f"| {TITLES[row.name]} | {row.tokens_per_s:,.0f} | {row.total_tokens_per_s:,.0f} | {ratio} "
                f"| {row.total_ratio:.2f} | {balance} | {row.peak_bytes / 2**20:,.0f} MiB "
                f"| {row.loss_error:.0e}{validity} |"
            )
        lines += [
            f"| {TITLES[name]} | does not run: {why} |||||||"
            for name, why in document["failures"].items()
        ]
        lines += _memory_line(document)
        parts = overhead(document["contenders"]["hydra"])
        used = [step["metrics"]["strategy"] for step in document["contenders"]["hydra"]]
        counted = ", ".join(
            f"`{s}` {used.count(s)}" for s in sorted(set(used), key=used.count, reverse=True)
        )
        lines += [
            "",
            f"ds_hydra: {counted} iterations; of {parts['iteration']:.0f} ms propagation {parts['propagation']:.0f}, "
            f"pull {parts['pull']:.0f}, push {parts['push']:.0f}, optimizer {parts['step']:.0f}, rest "
            f"{parts['rest']:.1f} ms ({parts['rest'] / parts['iteration']:.1%}).",
            "",
        ]
    return "\n".join(lines)


def _memory_line(document: dict[str, Any]) -> list[str]:
    """Peak memory where ds_hydra runs the rows of contender (2), and what the memory model says of
    them.
    """
    measured = {row.name: row.peak_bytes for row in read_rows(document)}
    if document["workload"] != "equal" or not {"packing", "hydra_static"} <= measured.keys():
        return []
    ours, theirs = measured["hydra_static"], measured["packing"]
    model = document["model_bytes"]["<1,1>"]
    return [
        "",
        f"Memory, same rows: ds_hydra {ours / 2**20:,.0f} MiB, {ours / theirs - 1:+.0%} against (2); the memory model "
        f"says {model / 2**20:,.0f} MiB, off by {model / ours - 1:+.0%}.",
    ]


def make_plot(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Ratios of all contenders by workload, quartiles as whiskers."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [[row for row in read_rows(d) if row.name != "hydra"][::-1] for d in documents]
    heights = [0.9 + 0.26 * len(rows) for rows in shown]
    figure, axes = plt.subplots(
        len(documents),
        1,
        figsize=(8.5, sum(heights) + 0.4),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    )
    for axis, document, rows in zip(axes[:, 0], documents, shown, strict=True):
        for place, row in enumerate(rows):
            low, middle, high = np.percentile(row.ratios, [25, 50, 75])
            colour = "#9aa5b1" if row.name.startswith("hydra") else "#2f6f9f"
            axis.barh(place, middle, color=colour if row.is_valid else "#d0d0d0", height=0.6)
            axis.plot([low, high], [place, place], color="black", linewidth=1)
            axis.plot(row.total_ratio, place, marker="D", color="#d1495b", markersize=4)
            axis.text(0.03, place, f"{middle:.2f}", va="center", color="white", fontsize=9)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(rows)), [TITLES[row.name] for row in rows], fontsize=7)
        title = (
            f"{WORKLOADS[document['workload']].title}, {document['settings']['num_ranks']} ranks"
        )
        axis.set_title(title, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(
        "time / time of ds_hydra; bars: median of pairs, lines: quartiles, diamonds: all together",
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


LOSS_TOLERANCE = 2e-4
"""Largest relative difference of two losses of one global batch: fp32 sums in another order, over
some AdamW steps.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a workload's file must have been measured with to be used again."""

    num_ranks: int
    context_length: int
    tokens_per_iteration: int
    iterations: int
    warmup: int
    model: ModelSize

    def shape(self) -> Shape:
        """What placement depends on."""
        return Shape(
            num_ranks=self.num_ranks,
            context_length=self.context_length,
            tokens_per_iteration=self.tokens_per_iteration,
            linear_flops=self.model.linear_flops,
            quadratic_flops=self.model.quadratic_flops,
        )

    @property
    def profile_name(self) -> str:
        """File of the measured profile, which depends on ranks, context and model only."""
        size = f"{self.model.num_layers}x{self.model.hidden_size}"
        return f"profile_{self.num_ranks}ranks_{self.context_length}_{size}.json"

    def to_json(self) -> dict[str, Any]:
        """As stored in the files."""
        model = {name: getattr(self.model, name) for name in self.model.__slots__}
        return {name: getattr(self, name) for name in self.__slots__ if name != "model"} | {
            "model": model
        }
