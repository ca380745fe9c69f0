"""How well the schedule explains measured iterations: a run's own pass times replayed by the
simulator.

Command: python -m benchmarks.replay RUN_DIR    (of `make demo`, or of any run with traces; seconds,
one core)

Prints a Markdown table: each traced iteration is simulated from the measured durations of its
passes, rounds and optimizer, and its time compared with the measured one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from ds_hydra.report import load_run
from ds_hydra.simulator.replay import replay


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    run = load_run(parser.parse_args().run_dir)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for trace in run.traces.values():
        ratio = replay(trace.timeline).iteration_ms / trace.timeline.duration_ms
        ratios[trace.timeline.strategy].append(ratio)
    print("| strategy | iterations | replayed / measured, median | median error | largest error |")
    print("|---|---|---|---|---|")
    everything = [ratio for found in ratios.values() for ratio in found]
    for strategy, found in [
        *sorted(ratios.items(), key=lambda item: -len(item[1])),
        ("all", everything),
    ]:
        values = np.array(found)
        error = np.abs(values - 1)
        print(
            f"| {strategy} | {values.size} | {np.median(values):.3f} | {np.median(error):.1%} | {error.max():.1%} |"
        )


if __name__ == "__main__":
    main()
