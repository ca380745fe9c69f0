"""Corrections learned while training runs: the error of T(l, P), from measured times of pipelines.

[Note: What is learned] For pipeline j of an iteration

    log(measured / profiled) = machine + scheme + noise

where `machine` is common to all. Both are unknown numbers around 0 that may drift, and are
estimated together by a Kalman filter: what has been seen little stays near 0, what has not been
seen for long becomes uncertain again but is not forgotten, of factors that always run together the
machine takes over what the others are off, and what all pipelines of an iteration share (a
disturbance of the whole machine) is noise of its own and does not hide which of them is slower than
the others. A run of surprises in one direction makes the factors that it concerns uncertain at
once: the level has shifted.

Pure: the engine feeds it one observation per pipeline and iteration. What is known then are
`Corrections`, plain numbers that a plan is made with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, log, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Corrections of all candidates, in force for one iteration.

    `factors`: T of a scheme is so many times the profile's. `outside_ms`: time that iterations of a
    strategy take more than those of others outside of propagation. `slow_ranks`: ranks whose
    pipelines take so many times as long as those of others; a pipeline is as slow as its slowest
    rank.
    """

    factors: Mapping[Scheme, float] = field(default_factory=dict)
    outside_ms: Mapping[Strategy, float] = field(default_factory=dict)
    slow_ranks: Mapping[int, float] = field(default_factory=dict)

    def factor(self, scheme: Scheme) -> float:
        """Factor of T of `scheme`."""
        # Where weights stay on the nodes the same is computed, so the factor holds there, too
        return self.factors.get(scheme, self.factors.get(scheme.crossing, 1.0))

    def slowdown(self, ranks: Iterable[int]) -> float:
        """Slowdown of a pipeline on `ranks`."""
        return max((self.slow_ranks.get(rank, 1.0) for rank in ranks), default=1.0)

    def pipeline_factors(self, strategy: Strategy) -> list[float]:
        """Factor of T of each pipeline of `strategy`."""
        if not self.slow_ranks:
            return [self.factor(scheme) for scheme in strategy.schemes]
        return [
            self.factor(scheme) * self.slowdown(ranks)
            for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True)
        ]

    def more_outside_ms(self, strategy: Strategy) -> float:
        """Milliseconds of `outside_ms`; 0.0 of a strategy of which nothing is known."""
        return self.outside_ms.get(strategy, self.outside_ms.get(strategy.crossing, 0.0))

    def to_json(self) -> dict[str, Any]:
        """The corrections as a JSON document; `from_json` restores equal ones."""
        return {
            "factors": {str(scheme): value for scheme, value in self.factors.items()},
            "outside_ms": {str(strategy): ms for strategy, ms in self.outside_ms.items()},
            "slow_ranks": {str(rank): value for rank, value in self.slow_ranks.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Corrections:
        """The corrections in a document written by `to_json`."""
        return cls(
            factors={Scheme.parse(text): value for text, value in document["factors"].items()},
            outside_ms={Strategy.parse(text): ms for text, ms in document["outside_ms"].items()},
            slow_ranks={int(rank): value for rank, value in document["slow_ranks"].items()},
        )


NO_CORRECTIONS = Corrections()


def are_plausible(times_ms: Sequence[float], longest_ms: float) -> bool:
    """Whether all of `times_ms` can be measured times: above 0, and not above `longest_ms`."""
    return all(isfinite(time) and 0 < time <= longest_ms for time in times_ms)


FloatArray = npt.NDArray[np.float64]

MACHINE = "machine"


class _Kind(NamedTuple):
    """Standard deviations (of logarithms) of a kind of factor: before anything was seen, and of its
    drift in one iteration.
    """

    prior: float
    drift: float


_KINDS = {
    MACHINE: _Kind(0.3, 0.03),
    "scheme": _Kind(0.25, 0.01),
}
_OTHER_MACHINE = 0.5
"""Logarithm from which the error of the first iteration is the machine's: a factor of exp(0.5)
means a profile of other hardware.
"""
_FIRST_NOISE, _LEAST_NOISE, _NOISE_RATE = 0.1, 0.02, 0.15
_OUTLIER = 3.0
"""Standard deviations of a surprise beyond which it counts less."""
_TO_MACHINE = 0.005
"""Rate at which the machine takes over errors of schemes, as far as only the sum is
measured.
"""
_SURPRISE_RATE, _SHIFT = 0.3, 1.5
"""Weight of the last surprise in their mean, in standard deviations, and the mean that is a shift.
"""


class PipelineTime(NamedTuple):
    """One pipeline of an iteration: its profiled and its measured time, slow ranks aside."""

    scheme: Scheme
    profiled_ms: float
    measured_ms: float


@dataclass(slots=True)
class LearnedTimes:
    """The factors known so far, by name ("machine", "scheme <2,1>", ...).

    >>> one = Scheme(1, 1)
    >>> learned = LearnedTimes()
    >>> for _ in range(50):
    ...     learned.observe([PipelineTime(one, 10.0, 20.0)])
    >>> round(learned.factor(one), 2)
    2.0
    """

    names: list[str] = field(default_factory=list)
    mean_F: FloatArray = field(default_factory=lambda: np.zeros(0))
    cov_FF: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    surprise_F: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Mean of the last surprises of each factor, in standard deviations."""
    noise: list[float] = field(default_factory=lambda: [_FIRST_NOISE**2, _FIRST_NOISE**2])
    """Variances: of one pipeline, and of the part that all pipelines of an iteration share."""

    # ---- taking in

    def observe(self, pipelines: Sequence[PipelineTime]) -> None:
        """Take in the busy pipelines of one iteration; times are above 0."""
        if not pipelines:
            return
        # In logarithms factors add up, and twice as long weighs as much as half as long.
        found = np.array([log(p.measured_ms / p.profiled_ms) for p in pipelines])
        if not self.names:
            self._know([MACHINE])
            level = float(np.median(found))
            # What is below that is learned as later errors are, by both factors
            self.mean_F[0] = np.sign(level) * max(0.0, abs(level) - _OTHER_MACHINE)
        self._drift()
        concerned = [names_of([p.scheme]) for p in pipelines]
        self._know(_name_of(p.scheme) for p in pipelines)
        design_KF = np.array([[float(n in own) for n in self.names] for own in concerned])
        surprise_K = found - design_KF @ self.mean_F
        self._notice_shift(design_KF, surprise_K)
        self._update(design_KF, surprise_K)

    def _know(self, names: Iterable[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self.names]
        if not new:
            return
        self.names += new
        self.mean_F = np.append(self.mean_F, np.zeros(len(new)))
        self.surprise_F = np.append(self.surprise_F, np.zeros(len(new)))
        # New factors vary with no other one until they have been seen together
        grown = np.diag(self._prior_F() ** 2)
        grown[: len(self.cov_FF), : len(self.cov_FF)] = self.cov_FF
        self.cov_FF = grown

    def _prior_F(self) -> FloatArray:
        return np.array([_kind(name).prior for name in self.names])

    def _drift(self) -> None:
        drift_F = np.array([_kind(name).drift for name in self.names])
        self.cov_FF = self.cov_FF + np.diag(drift_F**2)
        self._bound()

    def _bound(self) -> None:
        """Bound the uncertainty of each factor by that before anything was seen."""
        scale_F = np.minimum(1.0, self._prior_F() / np.sqrt(np.diag(self.cov_FF)))
        # Rows and columns alike: what is left is still a covariance.
        self.cov_FF = self.cov_FF * np.outer(scale_F, scale_F)

    def _noise(self, num: int) -> FloatArray:
        own, shared = self.noise
        # What all pipelines share is in every entry, also beside the diagonal
        return own * np.eye(num) + shared

    def _notice_shift(self, design_KF: FloatArray, surprise_K: FloatArray) -> None:
        """Make factors uncertain whose pipelines surprise in one direction for some iterations."""
        spread_K = np.sqrt(
            np.diag(design_KF @ self.cov_FF @ design_KF.T + self._noise(len(surprise_K)))
        )
        z_K = np.clip(surprise_K / spread_K, -_OUTLIER, _OUTLIER)
        common = float(z_K.mean())
        for number, name in enumerate(self.names):
            weight_K = np.abs(design_KF[:, number])
            if not weight_K.any():
                continue
            # What all pipelines have in common is the machine's surprise, and no scheme's.
            z = float(weight_K @ (z_K if name == MACHINE else z_K - common) / weight_K.sum())
            self.surprise_F[number] += _SURPRISE_RATE * (z - self.surprise_F[number])
            if abs(self.surprise_F[number]) > _SHIFT:
                self.surprise_F[number] = 0.0
                # What it had in common with others was true of the old level
                self.cov_FF[number, :] = self.cov_FF[:, number] = 0.0
                self.cov_FF[number, number] = _kind(name).prior ** 2

    def _update(self, design_KF: FloatArray, surprise_K: FloatArray) -> None:
        cross_KF = design_KF @ self.cov_FF
        noise_KK = self._noise(len(surprise_K))
        total_KK = cross_KF @ design_KF.T + noise_KK
        z_K = np.abs(surprise_K) / np.sqrt(np.diag(total_KK))
        # An outlier counts as measured with more noise, so that it moves the factors less.
        heavier_K = np.maximum(1.0, z_K / _OUTLIER)
        total_KK = total_KK + noise_KK * (np.outer(heavier_K, heavier_K) - 1)
        # The gain of the Kalman filter is cross.T @ inv(total), and total is symmetric
        gain_FK = np.linalg.solve(total_KK, cross_KF).T
        self.mean_F = self.mean_F + gain_FK @ surprise_K
        cov_FF = self.cov_FF - gain_FK @ cross_KF
        # Of a sum the parts would wander off for ever, one up and another down.
        own_F = np.where(design_KF.any(axis=0), self.mean_F, 0.0)
        own_F[self.names.index(MACHINE)] = 0.0
        self.mean_F -= _TO_MACHINE * cov_FF @ (own_F / self._prior_F() ** 2)
        # Rounding would make it lopsided, a little more in every iteration.
        self.cov_FF = (cov_FF + cov_FF.T) / 2
        self._learn_noise(design_KF, surprise_K - design_KF @ (gain_FK @ surprise_K))

    def _learn_noise(self, design_KF: FloatArray, left_K: FloatArray) -> None:
        """Learn the noise: the rest after the updated factors, and their uncertainty."""
        limit = 2 * sqrt(sum(self.noise))
        # Cut: one outlier says little about the noise of all other iterations.
        left_K = np.clip(left_K, -limit, limit)
        found_KK = np.outer(left_K, left_K) + design_KF @ self.cov_FF @ design_KF.T
        num, (own, shared) = len(left_K), self.noise
        level = float(np.trace(found_KK)) / num
        if num > 1:
            # The mean of what is beside the diagonal: what any two pipelines have in common.
            found_shared = max(0.0, float(found_KK.sum() - num * level) / (num * (num - 1)))
            found_own = level - min(found_shared, level)
        else:
            found_own, found_shared = level * own / (own + shared), level * shared / (own + shared)
        self.noise = [
            max(_LEAST_NOISE**2, old + _NOISE_RATE * (new - old))
            for old, new in ((own, found_own), (shared, found_shared))
        ]

    # ---- what is known

    def mean(self, name: str) -> float:
        """Logarithm of a factor; 0.0 before anything was seen of it."""
        return float(self.mean_F[self.names.index(name)]) if name in self.names else 0.0

    def factors(self) -> dict[str, float]:
        """All factors by name."""
        return {name: exp(mean) for name, mean in zip(self.names, self.mean_F.tolist())}

    def factor(self, scheme: Scheme) -> float:
        """Factor of T of `scheme`."""
        return exp(self.mean(MACHINE) + self.mean(_name_of(scheme)))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "names": list(self.names),
            "mean": self.mean_F.tolist(),
            "cov": self.cov_FF.tolist(),
            "surprise": self.surprise_F.tolist(),
            "noise": list(self.noise),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], keep: Iterable[str]) -> LearnedTimes:
        """Restore the state of `state_dict`, of the factors among `keep` alone; ValueError for
        anything else.
        """
        kept = set(keep)
        indices = [n for n, name in enumerate(state["names"]) if name in kept]
        num = len(state["names"])
        mean_F = np.array(state["mean"], dtype=np.float64)
        # Lists do not say how wide no row is
        cov_FF = np.array(state["cov"] or np.zeros((0, num)), dtype=np.float64)
        surprise_F = np.array(state["surprise"], dtype=np.float64)
        if (mean_F.shape, cov_FF.shape, surprise_F.shape) != ((num,), (num, num), (num,)):
            raise ValueError(f"{num} names, and arrays of {mean_F.shape} and {cov_FF.shape}")
        if state["names"][:1] not in ([], [MACHINE]):
            raise ValueError(f"names that begin with {state['names'][0]!r}")
        noise = [float(value) for value in state["noise"]]
        if len(noise) != 2:
            raise ValueError(f"noise of {len(noise)} numbers")
        if not all(np.isfinite(a).all() for a in (mean_F, cov_FF, surprise_F, noise)):
            raise ValueError("values that are not finite")
        return cls(
            names=[state["names"][n] for n in indices],
            mean_F=mean_F[indices],
            cov_FF=cov_FF[np.ix_(indices, indices)],
            surprise_F=surprise_F[indices],
            noise=noise,
        )


def names_of(schemes: Iterable[Scheme]) -> set[str]:
    """Names of the factors that concern `schemes`, and of the machine's."""
    return {MACHINE, *map(_name_of, schemes)}


def _name_of(scheme: Scheme) -> str:
    return f"scheme {scheme.crossing}"


def _kind(name: str) -> _Kind:
    return _KINDS[name.split(" ", 1)[0]]
