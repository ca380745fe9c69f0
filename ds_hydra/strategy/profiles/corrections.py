"""What measured iterations say against a profile, as plain numbers that a plan is made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What is known of one strategy.

    `factors`: T of each of its schemes is so many times the profile's when its pipelines run beside
    each other. `outside_ms`: what its iterations take more than those of other strategies outside
    of propagation. `spread`: how far its time may be off, the standard deviation of its logarithm.
    `is_new`: nobody has seen it run.
    """

    factors: Mapping[Scheme, float] = field(default_factory=dict)
    outside_ms: float = 0.0
    spread: float = 0.0
    is_new: bool = False


UNKNOWN = Correction()


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Of all candidates, in force for one iteration.

    `slow_ranks`: ranks whose pipelines take so many times as long as those of others; a pipeline is
    as slow as its slowest rank. `trial_ms`: how much longer than the best known strategy one may
    take, as expected, that could be better for all that is known; 0.0 allows none.
    """

    strategies: Mapping[Strategy, Correction] = field(default_factory=dict)
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    trial_ms: float = 0.0

    def of(self, strategy: Strategy) -> Correction:
        """That of `strategy`, of which nothing may be known."""
        return self.strategies.get(strategy, UNKNOWN)

    def slowdown(self, ranks: Iterable[int]) -> float:
        """Of a pipeline on `ranks`."""
        return max((self.slow_ranks.get(rank, 1.0) for rank in ranks), default=1.0)

    def pipeline_factors(self, strategy: Strategy) -> list[float]:
        """What T of each pipeline of `strategy` is multiplied with."""
        factors = self.of(strategy).factors
        if not self.slow_ranks:
            return [factors.get(scheme, 1.0) for scheme in strategy.schemes]
        return [
            factors.get(scheme, 1.0) * self.slowdown(ranks)
            for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """The corrections as a JSON document; `from_json` restores equal ones."""
        return {
            "strategies": {
                str(strategy): {
                    "factors": {str(scheme): value for scheme, value in known.factors.items()},
                    "outside_ms": known.outside_ms,
                    "spread": known.spread,
                    "is_new": known.is_new,
                }
                for strategy, known in self.strategies.items()
            },
            "slow_ranks": {str(rank): value for rank, value in self.slow_ranks.items()},
            "trial_ms": self.trial_ms,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Corrections:
        """The corrections in a document written by `to_json`."""
        return cls(
            strategies={
                Strategy.parse(text): Correction(
                    factors={Scheme.parse(s): value for s, value in known["factors"].items()},
                    outside_ms=known["outside_ms"],
                    spread=known["spread"],
                    is_new=known["is_new"],
                )
                for text, known in document["strategies"].items()
            },
            slow_ranks={int(rank): value for rank, value in document["slow_ranks"].items()},
            trial_ms=document["trial_ms"],
        )


NO_CORRECTIONS = Corrections()


def are_plausible(times_ms: Sequence[float], longest_ms: float) -> bool:
    """Whether all of `times_ms` can be measured times: above 0, and not above `longest_ms`."""
    return all(isfinite(time) and 0 < time <= longest_ms for time in times_ms)
