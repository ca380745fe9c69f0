"""Draws the pictures of docs/concepts.md: python docs/images/draw_concepts.py

Packing and proposal are computed from the shipped profile and histogram; link and iteration
are schemes without scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from ds_hydra.configs import find_file
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.strategy import Profile, Scheme, parse_strategies
from ds_hydra.strategy.proposal.histogram import LengthHistogram

HERE = Path(__file__).parent
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY = "#d9d9d9"
NUM_DEVICES, CONTEXT, TOKENS = 8, 32768, 131_072


def main() -> None:
    """Write the pictures next to this file."""
    rcParams.update({"svg.hashsalt": "ds_hydra", "font.size": 9, "svg.fonttype": "path"})
    profile = Profile.load(find_file("profiles", "a800_llama2_7b"))
    histogram = LengthHistogram.load(find_file("lengths", "github")).limit(CONTEXT)
    draw_iteration()
    draw_link()
    draw_packing(profile, histogram)
    draw_proposal(profile, histogram)


def save(figure: Figure, name: str) -> None:
    """As SVG without date and creator, so that the same picture is the same file."""
    figure.savefig(str(HERE / f"{name}.svg"), metadata={"Date": None, "Creator": None})


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "", **style: Any
) -> None:
    """A labelled box."""
    size = style.pop("fontsize", 8)
    axes.add_patch(
        Rectangle((x, y), width, height, **{"facecolor": GREY, "edgecolor": "white", **style})
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def draw_iteration() -> None:
    """One iteration of 1x<2,1> + 1x<1,2> on 4 ranks, and the planner beside it."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    whole = [("F1", 2.0, 2.0), ("B1", 4.0, 4.0), ("F2", 8.0, 1.5), ("B2", 9.5, 3.0)]
    first = [("F1", 2.0, 1.0), ("F2", 3.0, 1.0), ("B1", 6.0, 2.0), ("B2", 9.0, 2.0)]
    second = [("F1", 3.0, 1.0), ("B1", 4.0, 2.0), ("F2", 6.0, 1.0), ("B2", 7.0, 2.0)]
    for rank, blocks in enumerate((whole, whole, first, second)):
        forward, backward = (COLORS[0], COLORS[4]) if rank < 2 else (COLORS[1], "#f4c96b")
        for name, x, width in blocks:
            box(
                axes,
                x,
                3 - rank,
                width,
                0.8,
                name,
                facecolor=forward if name[0] == "F" else backward,
            )
    for rank in range(4):
        box(axes, 0, 3 - rank, 1.9, 0.8, "pull", facecolor=COLORS[2])
        box(axes, 12.6, 3 - rank, 1.9, 0.8, "push", facecolor=COLORS[3])
        box(axes, 14.6, 3 - rank, 1.4, 0.8, "step")
    box(
        axes,
        0,
        4.2,
        16,
        0.7,
        "planning processes: dispatch and packing of iterations i+1 ... i+4",
        facecolor="#f0f0f0",
    )
    axes.set_yticks(
        [3.4, 2.4, 1.4, 0.4], ["rank 0  <2,1>", "rank 1  <2,1>", "rank 2  <1,2>", "rank 3  <1,2>"]
    )
    axes.set_xticks([])
    axes.set_xlim(0, 16)
    axes.set_ylim(-0.1, 5)
    axes.set_xlabel("time of iteration i (not to scale)")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    save(figure, "iteration")


def draw_link() -> None:
    """One parameter: flat shards on 4 ranks, slices of 1x<2,1> + 2x<1,1>."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for rank in range(4):
        box(axes, 2 * rank, 3.2, 1.96, 0.7, f"shard of rank {rank}", facecolor=COLORS[rank])
    targets = [
        (0.0, "rank 0: upper half, TP slice 0 of <2,1>", (0, 1)),
        (2.2, "rank 1: lower half, TP slice 1 of <2,1>", (2, 3)),
        (4.4, "rank 2: whole, <1,1>", (0, 1, 2, 3)),
        (6.6, "rank 3: whole, <1,1>", (0, 1, 2, 3)),
    ]
    for rank, (x, label, owners) in enumerate(targets):
        height = 1.2 / 4
        for owner in range(4):
            is_held = owner in owners
            y = 1.2 - (owner + 1) * height
            axes.add_patch(
                Rectangle(
                    (x, y), 1.4, height,
                    facecolor=COLORS[owner] if is_held else "white", edgecolor="white" if is_held else GREY,
                )
            )  # fmt: skip
            if is_held:
                is_local = owner == rank
                axes.add_patch(
                    FancyArrowPatch(
                        (2 * owner + 1, 3.2), (x + 0.7, 1.22), arrowstyle="-|>", mutation_scale=8,
                        color=COLORS[owner], linestyle="--" if is_local else "-", linewidth=1,
                    )
                )  # fmt: skip
        axes.text(
            x + 0.7,
            -0.12,
            label.replace(": ", "\n").replace(", ", "\n"),
            ha="center",
            va="top",
            fontsize=8,
        )
    axes.text(
        8.2,
        3.5,
        "optimization layout:\nflat ZeRO-3 partitions\nof one weight",
        va="center",
        fontsize=8,
    )
    axes.text(8.2, 0.6, "propagation layout\nof one iteration", va="center", fontsize=8)
    axes.text(8.2, 2.2, "pull: down, push: up\ndashed: copied, not sent", va="center", fontsize=8)
    axes.set_xlim(-0.2, 10.2)
    axes.set_ylim(-1.1, 4.1)
    axes.axis("off")
    save(figure, "link")


def arrow(
    axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str, **style: Any
) -> None:
    """An arrow from one place to another."""
    style = {"linewidth": 1, **style}
    axes.add_patch(
        FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=8, color=color, **style)
    )


def draw_packing(profile: Profile, histogram: LengthHistogram) -> None:
    """The same global batch on 8 devices: micro-batches of the context on the one static scheme,
    and the planner's choice.
    """
    lengths = next(iter(histogram.draw_batches(TOKENS, 1, seed=5)))
    batch = GlobalBatch(
        iteration=0,
        sample_indices=tuple(range(len(lengths))),
        lengths=tuple(lengths.tolist()),
        num_label_tokens=int(lengths.sum()) - len(lengths),
    )
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 5])
    end = 0.0
    for ax, candidates in zip(
        axes, (["2x<4,1>"], ["2x<4,1>", "1x<4,1> + 2x<2,1>", "4x<2,1>", "1x<2,1> + 3x<1,2>"])
    ):
        plan = plan_iteration(
            batch,
            strategies=parse_strategies(candidates),
            profile=profile,
            num_devices=NUM_DEVICES,
            settings=PlannerSettings().heuristic(),
        )
        draw_plan(ax, plan, profile)
        end = max(end, plan.makespan_ms)
    axes[0].set_xlim(0, 1.02 * end)
    axes[1].set_xlabel(
        "predicted forward + backward, ms (shipped A800 profile); a box is a micro-batch, labelled by its sequences"
    )
    save(figure, "packing")


def draw_plan(axes: Axes, plan: IterationPlan, profile: Profile) -> None:
    """Micro-batches of every pipeline, one after the other."""
    for index, pipeline in enumerate(plan.pipelines):
        start = 0.0
        for number, micro_batch in enumerate(pipeline.micro_batches):
            time = profile.latency[pipeline.scheme].micro_batch_ms(
                [plan.lengths[i] for i in micro_batch]
            )
            box(
                axes, start, -index - 0.4, time, 0.8, str(len(micro_batch)), fontsize=6,
                facecolor=COLORS[(0, 4)[number % 2]], linewidth=0.5,
            )  # fmt: skip
            start += time
        if pipeline.scheme.pp > 1:
            box(axes, start, -index - 0.4, pipeline.makespan_ms - start, 0.8, "bubble", fontsize=6)
    axes.axvline(plan.makespan_ms, color="black", linewidth=0.8)
    axes.set_yticks(
        [-i for i in range(len(plan.pipelines))], [str(p.scheme) for p in plan.pipelines]
    )
    axes.set_ylim(0.6 - len(plan.pipelines), 0.6)
    longest = max(plan.lengths)
    axes.set_title(
        f"{plan.strategy}: {plan.makespan_ms:,.0f} ms   ({len(plan.lengths)} sequences, longest {longest:,} tokens)",
        fontsize=9,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)


def draw_proposal(profile: Profile, histogram: LengthHistogram) -> None:
    """Tokens/s of a device under each scheme over the length, with MaxLen; and where the tokens
    are.
    """
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.3])
    lengths = np.unique(np.geomspace(256, CONTEXT, 200).astype(int))
    for color, scheme in zip(COLORS, (Scheme(1, 2), Scheme(2, 1), Scheme(4, 1), Scheme(8, 1))):
        longest = min(CONTEXT, profile.max_len_tokens(scheme, NUM_DEVICES))
        shown = np.append(lengths[lengths < longest], longest)
        rates = [rate(profile, scheme, int(length), longest) for length in shown]
        upper.plot(
            shown,
            rates,
            color=color,
            label=f"{scheme}, MaxLen {profile.max_len_tokens(scheme, NUM_DEVICES):,}",
        )
        upper.plot(shown[-1], rates[-1], "o", color=color, markersize=4)
    upper.set_ylabel("tokens/s of one device")
    upper.set_ylim(bottom=0)
    upper.legend(loc="lower left")
    upper.set_title(
        "LLaMA2 7B on 8 A800, micro-batches packed full with sequences of one length",
        fontsize=9,
        loc="left",
    )
    edges = np.geomspace(256, CONTEXT + 1, 29)
    tokens = histogram.counts * histogram.lengths_tokens
    share, _ = np.histogram(
        histogram.lengths_tokens, bins=edges, weights=100 * tokens / tokens.sum()
    )
    lower.stairs(share, edges, fill=True, color=COLORS[2], alpha=0.6)
    lower.set_ylabel("% of tokens")
    lower.set_xlabel(
        "length, tokens (GitHub histogram; the last bar holds what is cut to the context)"
    )
    lower.set_xscale("log", base=2)
    lower.set_xticks([2**i for i in range(8, 16)], [f"{2**i:,}" for i in range(8, 16)])
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, "proposal")


def rate(profile: Profile, scheme: Scheme, length: int, longest: int) -> float:
    """Tokens/s of one device when full micro-batches of sequences of one length follow each other
    without a bubble.
    """
    count = max(1, longest // length)
    return (
        1e3
        * count
        * length
        / profile.latency[scheme].micro_batch_ms([length] * count)
        / scheme.num_devices
    )


if __name__ == "__main__":
    main()
