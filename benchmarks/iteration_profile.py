"""Where the time of an iteration goes on one rank: kinds of operations under torch's profiler, one
core, no neighbours.

    python benchmarks/iteration_profile.py --out runs/profile/now.json
    python benchmarks/iteration_profile.py --plot before=runs/profile/before.json
    now=runs/profile/now.json \\
        --picture docs/images/iteration_profile.png

The first form measures the tree that PYTHONPATH points at (so a checkout of an older commit gives
the "before"), on micro-batches of one long and of many short sequences; of `--repeats` iterations
the fastest one counts. The second form draws files that were measured before.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import argparse
import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product_flash",),
    "loss": (
        "aten::_log_softmax",
        "aten::nll_loss",
        "aten::logsumexp",
        "aten::exp_",
        "aten::scatter_add_",
        "aten::amax",
        "aten::gather",
        "_SummedCrossEntropy",
    ),
    "zeroing": ("aten::fill_", "aten::zero_", "aten::_foreach_zero_"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::index_select"),
    "gradient sums": ("aten::add_",),
}
"""Beginnings of operation names; what matches nothing is "other operations" (norms, rotary,
activation, optimizer).
"""

MICRO_BATCHES = {"one sequence of 4,096": (4096,), "48 sequences of 85": (85,) * 48}
COLOURS = ("#2f6f9f", "#6aa5c9", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#c9c9c9", "#4a4a4a")


def kind_of(name: str) -> str:
    """The key of KINDS that an operation belongs to."""
    for kind, beginnings in KINDS.items():
        if name.startswith(beginnings):
            return kind
    return "other operations"


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """For each kind of micro-batch, milliseconds of one iteration by kind of operation; "no
    operation" is Python.
    """
    import deepspeed
    import torch
    import torch.distributed as dist
    import transformers
    from torch.profiler import ProfilerActivity, profile
    from training_setup import ModelSize, ds_config

    import ds_hydra

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("ERROR")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        section = {"context_length": 4096, "tokens_per_iteration": 4096, "strategies": ["1x<1,1>"]}
        engine, *_ = ds_hydra.initialize(
            model=ModelSize().build(4096), config=ds_config(hydra=section)
        )
        generator = torch.Generator().manual_seed(0)
        for title, lengths in MICRO_BATCHES.items():
            batch = [
                {"input_ids": torch.randint(1, 2048, (n,), generator=generator)} for n in lengths
            ]
            for _ in range(2):
                engine.train_batch(batch=batch, strategy="1x<1,1>")
            runs = []
            for _ in range(repeats):
                with profile(activities=[ProfilerActivity.CPU]) as profiled:
                    engine.train_batch(batch=batch, strategy="1x<1,1>")
                runs.append((engine.last_metrics.iteration_ms, profiled.key_averages()))
            total_ms, events = min(runs, key=lambda run: run[0])
            kinds = dict.fromkeys([*KINDS, "other operations"], 0.0)
            for event in events:
                kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e3
            results[title] = {**kinds, "no operation": max(0.0, total_ms - sum(kinds.values()))}
        engine.destroy()
        dist.destroy_process_group()
    return results


def plot(files: Sequence[str], picture: Path) -> None:
    """Stacked bars, one for each file and kind of micro-batch; `files` are NAME=PATH."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    documents = {
        name: json.loads(Path(path).read_text()) for name, path in (f.split("=", 1) for f in files)
    }
    figure, axes = plt.subplots(
        1, len(MICRO_BATCHES), figsize=(11, 1.5 + 0.7 * len(documents)), squeeze=False
    )
    for axis, title in zip(axes[0], MICRO_BATCHES, strict=True):
        names = list(documents)[::-1]
        left = [0.0] * len(names)
        for kind, colour in zip([*KINDS, "other operations", "no operation"], COLOURS, strict=True):
            widths = [documents[name][title][kind] for name in names]
            axis.barh(names, widths, left=left, color=colour, label=kind, height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            axis.text(total, place, f" {total:,.0f}", va="center", fontsize=9)
        axis.set_xlim(0, max(left) * 1.12)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ms of one core")
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="measure, and write the JSON here")
    parser.add_argument("--plot", nargs="+", metavar="NAME=JSON", help="draw these files")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/iteration_profile.png"))
    args = parser.parse_args()
    if not args.out and not args.plot:
        parser.error("give --out to measure or --plot to draw")
    return args


def main() -> None:
    args = parse_arguments()
    if args.out:
        results: dict[str, Any] = measure(args.repeats)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        for title, kinds in results.items():
            total = sum(kinds.values())
            parts = ", ".join(f"{kind} {ms:.0f} ({ms / total:.0%})" for kind, ms in kinds.items())
            print(f"{title}: {total:,.0f} ms: {parts}")
    if args.plot:
        plot(args.plot, args.picture)


if __name__ == "__main__":
    main()
