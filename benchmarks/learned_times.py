"""How far predictions are off with and without what is learned: recorded runs, replayed.

    python benchmarks/learned_times.py

replays every file of `benchmarks/recorded/` (written by `record_times.py`) as the engine learns,
each pipeline predicted with what was known `lookahead` iterations before, and prints a Markdown
table: median error of a pipeline after 16 iterations, by the profile alone, corrected, and by the
median ratio of each scheme in each strategy over the whole recording, which nobody can know
beforehand. Seconds on one core.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.engine.telemetry.latency_tracker import StragglerFinder
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.profiles.learned import Corrections, LearnedTimes, PipelineTime

RECORDED = Path(__file__).parent / "recorded"
LOOKAHEAD, FIRST = 4, 16


class Errors(NamedTuple):
    """Of one recording: |measured / predicted - 1| of every busy pipeline from iteration 16 on."""

    profiled: np.ndarray
    corrected: np.ndarray
    hindsight: np.ndarray

    @property
    def medians(self) -> tuple[float, float, float]:
        """Without and with correction, and in hindsight."""
        profiled, corrected, hindsight = (float(np.median(errors)) for errors in self)
        return profiled, corrected, hindsight


def replay(document: dict[str, Any]) -> Errors:
    """Errors of the recording, learned as `LatencyTracker` does."""
    learned, straggler = LearnedTimes(), StragglerFinder()
    known: list[tuple[dict[Any, float], Corrections]] = []
    profiled, corrected, hindsight = [], [], []
    iterations = [
        (Strategy.parse(text), pipelines) for text, _, _, pipelines in document["iterations"]
    ]
    ratios: defaultdict[tuple, list[float]] = defaultdict(list)
    for strategy, pipelines in iterations:
        for scheme, _, (measured, predicted, _) in _busy(strategy, pipelines):
            ratios[strategy, scheme].append(measured / predicted)
    for number, (strategy, pipelines) in enumerate(iterations):
        planned_with = iterations[min(number + LOOKAHEAD, len(iterations) - 1)][0]
        if number >= max(FIRST, LOOKAHEAD):
            factors, slow = known[number - LOOKAHEAD]
            for scheme, ranks, (measured, predicted, _) in _busy(strategy, pipelines):
                profiled.append(abs(measured / predicted - 1))
                expected = predicted * factors[scheme] * slow.slowdown(ranks)
                corrected.append(abs(measured / expected - 1))
                usual = float(np.median(ratios[strategy, scheme]))
                hindsight.append(abs(measured / predicted / usual - 1))
        if number:  # as `LatencyTracker.observe`
            _take_in(strategy, pipelines, learned, straggler)
        known.append(
            (
                {scheme: learned.factor(scheme) for scheme in planned_with.schemes},
                Corrections(slow_ranks=straggler.slow_ranks()),
            )
        )
    return Errors(np.array(profiled), np.array(corrected), np.array(hindsight))


def _busy(strategy: Strategy, pipelines: list) -> Iterator[tuple]:
    for scheme, ranks, times in zip(strategy.schemes, strategy.place(), pipelines, strict=True):
        if times[0] > 0 and times[1] > 0:
            yield scheme, ranks, times


def _take_in(
    strategy: Strategy, pipelines: list, learned: LearnedTimes, straggler: StragglerFinder
) -> None:
    busy = list(_busy(strategy, pipelines))
    straggler.observe(
        [
            SimpleNamespace(ranks=ranks, num_micro_batches=1, measured_ms=measured, predicted_ms=1)
            for _, ranks, (measured, _, _) in busy
        ],
        [predicted * learned.factor(scheme) for scheme, _, (_, predicted, _) in busy],
    )
    slow = Corrections(slow_ranks=straggler.slow_ranks())
    learned.observe(
        [
            PipelineTime(scheme, predicted, measured / slow.slowdown(ranks))
            for scheme, ranks, (measured, predicted, _) in busy
        ]
    )


def read_recordings(folder: Path) -> dict[str, dict[str, Any]]:
    """The recordings by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    recordings = read_recordings(parser.parse_args().recorded)
    print("| ranks | workload | disturbed | load | profile alone | corrected | ratio | hindsight |")
    print("|---|---|---|---|---|---|---|---|")
    for document in recordings.values():
        before, after, hindsight = replay(document).medians
        print(
            f"| {document['ranks']} | {document['workload']} | {document['disturbed']} | "
            f"{document['load_before']:.0f} | {before:.1%} | {after:.1%} | {after / before:.2f} | {hindsight:.1%} |"
        )


if __name__ == "__main__":
    main()
