"""Which rank is slow: the one whose pipelines take longer than predicted, whatever pipeline it is
in.

Ranks of one pipeline wait for each other, so one iteration only accuses a pipeline. Strategies
change, and over some iterations the accusations meet in one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ds_hydra.engine.telemetry.metrics import PipelineMetrics

_MEMORY = 0.9
"""Share of the old score that an iteration leaves: about ten iterations count."""
_NUM_NEEDED = 5
"""Iterations with two busy pipelines or more before anyone is accused."""


class StragglerFinder:
    """Scores of all ranks; the same calls give the same answer on every rank.

    A rank's score is the mean over recent iterations of measured over predicted time of its
    pipeline, relative to the median pipeline of the iteration. Iterations with fewer than two busy
    pipelines say nothing.
    """

    def __init__(self, threshold: float = 1.3) -> None:
        self._threshold = threshold
        self._scores: dict[int, float] = {}
        self._num_seen = 0

    def observe(self, pipelines: Sequence[PipelineMetrics]) -> int | None:
        """Take in one iteration; the rank that is slow by the threshold and above all others, if
        there is one.
        """
        ratios = {
            p.ranks: p.measured_ms / p.predicted_ms
            for p in pipelines
            if p.num_micro_batches and p.predicted_ms > 0 and p.measured_ms > 0
        }
        if len(ratios) > 1:
            self._num_seen += 1
            median = statistics.median_low(ratios.values())
            for ranks, ratio in ratios.items():
                for rank in ranks:
                    old = self._scores.get(rank, 1.0)
                    self._scores[rank] = _MEMORY * old + (1 - _MEMORY) * ratio / median
        return self._find()

    def _find(self) -> int | None:
        if self._num_seen < _NUM_NEEDED:
            return None
        first, *others = sorted(self._scores, key=lambda rank: -self._scores[rank])
        is_alone = not others or self._scores[first] > self._scores[others[0]] + 0.02
        return first if self._scores[first] >= self._threshold and is_alone else None
