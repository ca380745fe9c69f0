"""Draw how tokens spread over experts in one run or two.

python examples/moe/draw_experts.py runs/balanced runs/free --out experts.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from ds_hydra.report import load_run


def main() -> None:
    """A map of layers and experts for each run, and the imbalance of all over iterations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("experts.png"))
    args = parser.parse_args()
    runs = [load_run(folder) for folder in args.run_dirs]
    figure, axes = plt.subplots(
        1, len(runs) + 1, figsize=(4.2 * (len(runs) + 1), 3.2), layout="constrained"
    )
    for run, panel in zip(runs, axes):
        last = max(iteration for iteration, trace in run.traces.items() if trace.expert_tokens)
        tokens = run.traces[last].expert_tokens
        counts = np.array(list(tokens.values()))
        share = counts / counts.mean(axis=1, keepdims=True)
        image = panel.imshow(share, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=3)
        panel.set(title=f"{run.name}, iteration {last}", xlabel="expert", ylabel="layer")
        panel.set_yticks(range(len(tokens)), [str(layer) for layer in tokens])
    figure.colorbar(image, ax=axes[len(runs) - 1], label="tokens / mean")
    for run in runs:
        axes[-1].plot(
            [r.iteration for r in run.records],
            [r.expert_imbalance for r in run.records],
            label=run.name,
        )
    axes[-1].set(
        xlabel="iteration", ylabel="most chosen / mean - 1", title="worst layer", ylim=(0, None)
    )
    axes[-1].legend(frameon=False)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
