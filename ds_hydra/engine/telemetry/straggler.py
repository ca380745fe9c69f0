"""Which ranks are slow: those whose pipelines take longer than predicted, whatever pipelines they
are in.

Ranks of one pipeline wait for the slowest of them, so an iteration only accuses a pipeline. It
acquits every rank of a pipeline that was faster than the rank is believed to be, and confirms the
slowest one of a pipeline that was slower. Strategies change, and over some iterations the
accusations meet in one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt
from typing import Any

from ds_hydra.records.metrics import PipelineMetrics

_RATE = 0.2
"""Weight of an iteration in what is believed of a rank: about five count."""
_NUM_NEEDED = 5
"""Iterations with two busy pipelines or more before anyone is accused."""
_SLOW = 1.15
"""Factor from which the plans to come count with a slow rank, where noise does not explain it."""
_FIRST_NOISE = 0.1


class StragglerFinder:
    """What is believed of all ranks; the same calls give the same answer on every rank.

    For each rank the logarithm of measured over predicted time of its pipelines, relative to the
    median pipeline of the iteration. Iterations with fewer than two busy pipelines say nothing.
    """

    def __init__(self, threshold: float = 1.3) -> None:
        self._threshold = threshold
        self._slowness: dict[int, float] = {}
        self._variance = _FIRST_NOISE**2
        """Of a pipeline around the slowest of its ranks."""
        self._num_seen = 0

    def observe(
        self, pipelines: Sequence[PipelineMetrics], expected_ms: Sequence[float] | None = None
    ) -> int | None:
        """Take in one iteration; the rank that is slow by the threshold and above all others, if
        there is one.

        `expected_ms` is what each pipeline would take without slow ranks; by default as predicted.
        """
        if expected_ms is None:
            expected_ms = [p.predicted_ms for p in pipelines]
        ratios = {
            p.ranks: log(p.measured_ms / expected)
            for p, expected in zip(pipelines, expected_ms, strict=True)
            if p.num_micro_batches and expected > 0 and 0 < p.measured_ms < inf
        }
        if len(ratios) > 1:
            self._num_seen += 1
            median = statistics.median(ratios.values())
            for ranks, ratio in ratios.items():
                self._accuse(ranks, ratio - median)
        return self._find()

    def _accuse(self, ranks: Sequence[int], ratio: float) -> None:
        slowest = max(self._slowness.setdefault(rank, 0.0) for rank in ranks)
        limit = 2 * sqrt(self._variance)
        left = min(max(ratio - slowest, -limit), limit)
        self._variance += _RATE / 2 * (left * left - self._variance)
        for rank in ranks:
            if self._slowness[rank] > ratio or self._slowness[rank] == slowest:
                self._slowness[rank] += _RATE * (ratio - self._slowness[rank])

    def slow_ranks(self) -> dict[int, float]:
        """Ranks that are slow beyond what noise explains, and how many times as long as others
        their pipelines take.
        """
        if self._num_seen < _NUM_NEEDED:
            return {}
        usual = statistics.median_low(self._slowness.values())
        spread = sqrt(self._variance * _RATE / (2 - _RATE))
        least = max(log(_SLOW), 3 * spread)
        return {
            rank: exp(slowness - usual)
            for rank, slowness in self._slowness.items()
            if slowness - usual > least
        }

    def _find(self) -> int | None:
        if self._num_seen < _NUM_NEEDED:
            return None
        usual = statistics.median_low(self._slowness.values())
        first, *others = sorted(self._slowness, key=lambda rank: -self._slowness[rank])
        is_alone = not others or self._slowness[first] > self._slowness[others[0]] + 0.02
        is_slow = self._slowness[first] - usual >= log(self._threshold)
        return first if is_slow and is_alone else None

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        slowness = {str(rank): value for rank, value in self._slowness.items()}
        return {"slowness": slowness, "variance": self._variance, "num_seen": self._num_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; ValueError where it is not that."""
        slowness = {int(rank): float(value) for rank, value in state["slowness"].items()}
        variance, num_seen = float(state["variance"]), int(state["num_seen"])
        if not all(map(isfinite, [*slowness.values(), variance])):
            raise ValueError("values that are not finite")
        self._slowness, self._variance, self._num_seen = slowness, variance, num_seen
