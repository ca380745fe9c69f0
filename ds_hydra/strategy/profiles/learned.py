"""Corrections learned while training runs: the error of T(l, P), from measured times of pipelines,
and the scatter of the times of single micro-batches.

[Note: What is learned] For pipeline j of an iteration

    log(measured / profiled) = machine + scheme + log2(pipelines) beside + strategy + noise

where `machine` is common to all, `beside` is what running beside others costs and `strategy` what
is left of a strategy as a whole. All are unknown numbers around 0 that may drift, and are estimated
together by a Kalman filter: what has been seen little stays near 0, what has not been seen for long
becomes uncertain again but is not forgotten, of factors that always run together the machine takes
over what the others are off, and what all pipelines of an iteration share (a disturbance of the
whole machine) is noise of its own and does not hide which of them is slower than the others. The
machine drifts as fast as its times say: a filter that follows at the right pace has surprises that
are not alike from one iteration to the next. A run of surprises in one direction makes the factors
that it concerns uncertain at once: the level has shifted.

Pure: the engine feeds it one observation per pipeline and iteration. What is known then are
`Corrections`, plain numbers that a plan is made with.

[Note: Spread of micro-batches] A rank computes n micro-batches of one scheme in an iteration, in
t_i where the profile says p_i. What the scheme, this rank and the whole machine are off in this
iteration is one factor of all n, and is not in

    d = log(t_i / p_i) - log(t_j / p_j)

Neighbours in order of predicted time a token are compared, of which the shorter takes half of the
longer at least: what T is off for long sequences and for short ones is nearly the same for both. Of
independent normal deviations with standard deviation s, d has sqrt(2) s, and half of all |d| are
below 0.6745 sqrt(2) s (0.6745 is the third quartile of the standard normal distribution). So s is
the median of |d| over 0.954. Up to half of the micro-batches may be disturbed, and their number
counts, not how far they are off.

Where a rank has nothing to compare, other ranks and an iteration before stand in for it. With
r = log(sum of t / sum of p) of a rank's micro-batches of one scheme

    d = (r_now - r_before) of one rank - (r_now - r_before) of the next

has neither what the machine is off in either iteration nor what a rank or its scheme always is. Its
variance is s^2 times the sum of h = sum(p^2) / (sum of p)^2 of the four, 1/n of n equal
micro-batches, so d is multiplied with sqrt(2 / sum of h) to be as above. Only the first rank of a
pipeline tells r, for all its ranks take the same time, and the iteration before is the last of 16
in which both ranks had the schemes that they have now.

Each rank counts its |d| in bins, so that ranks need only add up counts. t is computation alone:
ranks that gather layers together end together, and the times until they end would be alike.

Left out: what all micro-batches of a rank share in an iteration (a slow rank is known as such).
Errors of T that neighbours do not share count as spread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp, inf, isfinite, log, log2, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.strategy.schemes.placement import slices_key
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Correction of one strategy.

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
    """Corrections of all candidates, in force for one iteration.

    `slow_ranks`: ranks whose pipelines take so many times as long as those of others; a pipeline is
    as slow as its slowest rank. `trial_ms`: how much longer than the best known strategy one may
    take, as expected, that could be better for all that is known; 0.0 allows none.
    `micro_batch_spread`: how far the time of a single micro-batch lies from what is known, the
    standard deviation of its logarithm. Groups that wait for each other wait for the slowest.
    """

    strategies: Mapping[Strategy, Correction] = field(default_factory=dict)
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    trial_ms: float = 0.0
    micro_batch_spread: float = 0.0

    def of(self, strategy: Strategy) -> Correction:
        """Correction of `strategy`, of which nothing may be known."""
        known = self.strategies.get(strategy) or self.strategies.get(strategy.crossing)
        return known or UNKNOWN

    def factor(self, strategy: Strategy, scheme: Scheme) -> float:
        """Factor of T of `scheme` in `strategy`."""
        factors = self.of(strategy).factors
        return factors.get(scheme, factors.get(scheme.crossing, 1.0))

    def slowdown(self, ranks: Iterable[int]) -> float:
        """Slowdown of a pipeline on `ranks`."""
        return max((self.slow_ranks.get(rank, 1.0) for rank in ranks), default=1.0)

    def pipeline_factors(self, strategy: Strategy) -> list[float]:
        """Factor of T of each pipeline of `strategy`."""
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
            "micro_batch_spread": self.micro_batch_spread,
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
            micro_batch_spread=document.get("micro_batch_spread", 0.0),
        )


NO_CORRECTIONS = Corrections()


def are_plausible(times_ms: Sequence[float], longest_ms: float) -> bool:
    """Whether all of `times_ms` can be measured times: above 0, and not above `longest_ms`."""
    return all(isfinite(time) and 0 < time <= longest_ms for time in times_ms)


FloatArray = npt.NDArray[np.float64]
Weights = dict[str, float]
"""Weight of each factor, by name, for one pipeline."""

MACHINE, BESIDE = "machine", "beside"


class _Kind(NamedTuple):
    """Standard deviations (of logarithms) of a kind of factor: before anything was seen, and of its
    drift in one iteration.
    """

    prior: float
    drift: float


_KINDS = {
    MACHINE: _Kind(0.3, 0.015),
    "scheme": _Kind(0.25, 0.01),
    BESIDE: _Kind(0.1, 0.005),
    "strategy": _Kind(0.1, 0.005),
}
_FASTEST_DRIFT, _PACE_RATE = 0.08, 0.8
"""Fastest drift of the machine's factor (`_KINDS` has the slowest), and the rate of its pace."""
_OTHER_MACHINE = 0.5
"""Logarithm from which the error of the first iteration is the machine's: a factor of exp(0.5)
means a profile of other hardware.
"""
_FIRST_NOISE, _LEAST_NOISE, _NOISE_RATE = 0.1, 0.02, 0.15
_OUTLIER = 3.0
"""Standard deviations of a surprise beyond which it counts less."""
_TO_MACHINE = 0.005
"""Rate at which the machine takes over errors of schemes and strategies, as far as only the sum is
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
    ...     learned.observe(Strategy((one,)), [PipelineTime(one, 10.0, 20.0)])
    >>> round(learned.correction(Strategy((one,))).factors[one], 2)
    2.0
    """

    names: list[str] = field(default_factory=list)
    mean_F: FloatArray = field(default_factory=lambda: np.zeros(0))
    cov_FF: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    surprise_F: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Mean of the last surprises of each factor, in standard deviations."""
    noise: list[float] = field(default_factory=lambda: [_FIRST_NOISE**2, _FIRST_NOISE**2])
    """Variances: of one pipeline, and of the part that all pipelines of an iteration share."""
    machine_drift: float = _KINDS[MACHINE].drift
    last_surprise: float = 0.0
    """Surprise that the pipelines of the last iteration shared, in standard deviations."""

    # ---- taking in

    def observe(self, strategy: Strategy, pipelines: Sequence[PipelineTime]) -> None:
        """Take in the busy pipelines of one iteration; times are above 0."""
        if not pipelines:
            return
        # In logarithms factors add up, and twice as long weighs as much as half as long.
        found = np.array([log(p.measured_ms / p.profiled_ms) for p in pipelines])
        if not self.names:
            self._know([MACHINE])
            level = float(np.median(found))
            self.mean_F[0] = np.sign(level) * max(0.0, abs(level) - _OTHER_MACHINE)
        self._drift()
        weights = [self._weights(strategy, p.scheme) for p in pipelines]
        self._know(name for of_one in weights for name in of_one)
        design_KF = np.array([[of_one.get(name, 0.0) for name in self.names] for of_one in weights])
        surprise_K = found - design_KF @ self.mean_F
        self._notice_shift(design_KF, surprise_K)
        self._update(design_KF, surprise_K)

    def _weights(self, strategy: Strategy, scheme: Scheme) -> Weights:
        computes, known = f"scheme {scheme.crossing}", f"strategy {_known_as(strategy)}"
        weights = {MACHINE: 1.0, computes: 1.0, known: 1.0}
        if len(strategy.schemes) > 1:
            weights[BESIDE] = log2(len(strategy.schemes))
        return weights

    def _know(self, names: Iterable[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self.names]
        if not new:
            return
        self.names += new
        self.mean_F = np.append(self.mean_F, np.zeros(len(new)))
        self.surprise_F = np.append(self.surprise_F, np.zeros(len(new)))
        grown = np.diag(self._prior_F() ** 2)
        grown[: len(self.cov_FF), : len(self.cov_FF)] = self.cov_FF
        self.cov_FF = grown

    def _prior_F(self) -> FloatArray:
        return np.array([_kind(name).prior for name in self.names])

    def _drift(self) -> None:
        drift_F = np.array([_kind(name).drift for name in self.names])
        drift_F[self.names.index(MACHINE)] = self.machine_drift
        self.cov_FF = self.cov_FF + np.diag(drift_F**2)
        self._bound()

    def _bound(self) -> None:
        """Bound the uncertainty of each factor by that before anything was seen."""
        scale_F = np.minimum(1.0, self._prior_F() / np.sqrt(np.diag(self.cov_FF)))
        # Rows and columns alike: what is left is still a covariance.
        self.cov_FF = self.cov_FF * np.outer(scale_F, scale_F)

    def _noise(self, num: int) -> FloatArray:
        own, shared = self.noise
        return own * np.eye(num) + shared

    def _notice_shift(self, design_KF: FloatArray, surprise_K: FloatArray) -> None:
        """Make factors uncertain whose pipelines surprise in one direction for some iterations."""
        spread_K = np.sqrt(
            np.diag(design_KF @ self.cov_FF @ design_KF.T + self._noise(len(surprise_K)))
        )
        z_K = np.clip(surprise_K / spread_K, -_OUTLIER, _OUTLIER)
        common = float(z_K.mean())
        self._keep_pace(common)
        for number, name in enumerate(self.names):
            weight_K = np.abs(design_KF[:, number])
            if not weight_K.any():
                continue
            # What all pipelines have in common is the machine's surprise, and no scheme's.
            z = float(weight_K @ (z_K if name == MACHINE else z_K - common) / weight_K.sum())
            self.surprise_F[number] += _SURPRISE_RATE * (z - self.surprise_F[number])
            if abs(self.surprise_F[number]) > _SHIFT:
                self.surprise_F[number] = 0.0
                self.cov_FF[number, :] = self.cov_FF[:, number] = 0.0
                self.cov_FF[number, number] = _kind(name).prior ** 2

    def _keep_pace(self, surprise: float) -> None:
        """Let the machine drift faster after two surprises alike, slower after two unlike."""
        drift = self.machine_drift * exp(_PACE_RATE * surprise * self.last_surprise)
        self.machine_drift = min(max(drift, _KINDS[MACHINE].drift), _FASTEST_DRIFT)
        self.last_surprise = surprise

    def _update(self, design_KF: FloatArray, surprise_K: FloatArray) -> None:
        cross_KF = design_KF @ self.cov_FF
        noise_KK = self._noise(len(surprise_K))
        total_KK = cross_KF @ design_KF.T + noise_KK
        z_K = np.abs(surprise_K) / np.sqrt(np.diag(total_KK))
        # An outlier counts as measured with more noise, so that it moves the factors less.
        heavier_K = np.maximum(1.0, z_K / _OUTLIER)
        total_KK = total_KK + noise_KK * (np.outer(heavier_K, heavier_K) - 1)
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

    def correction(
        self, strategy: Strategy, reference: Strategy | None = None, outside_ms: float = 0.0
    ) -> Correction:
        """Correction of `strategy`; `spread` is that of its time over that of `reference`."""
        schemes = list(dict.fromkeys(strategy.schemes))
        weights = [self._weights(strategy, scheme) for scheme in schemes]
        return Correction(
            factors={
                scheme: exp(sum(w * self.mean(name) for name, w in of_one.items()))
                for scheme, of_one in zip(schemes, weights)
            },
            outside_ms=outside_ms,
            spread=max(self._spread(of_one, reference) for of_one in weights),
            is_new=f"strategy {_known_as(strategy)}" not in self.names,
        )

    def _spread(self, weights: Weights, reference: Strategy | None) -> float:
        weights = dict(weights)
        if reference is not None:
            schemes = dict.fromkeys(reference.schemes)
            for scheme in schemes:
                for name, weight in self._weights(reference, scheme).items():
                    weights[name] = weights.get(name, 0.0) - weight / len(schemes)
        seen_F = np.array([weights.get(name, 0.0) for name in self.names])
        unseen = sum(
            (weight * _kind(name).prior) ** 2
            for name, weight in weights.items()
            if name not in self.names
        )
        return sqrt(max(0.0, float(seen_F @ self.cov_FF @ seen_F)) + unseen)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "names": list(self.names),
            "mean": self.mean_F.tolist(),
            "cov": self.cov_FF.tolist(),
            "surprise": self.surprise_F.tolist(),
            "noise": list(self.noise),
            "machine_drift": self.machine_drift,
            "last_surprise": self.last_surprise,
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
        noise = [float(value) for value in state["noise"]]
        pace = [float(state[name]) for name in ("machine_drift", "last_surprise")]
        if not all(np.isfinite(a).all() for a in (mean_F, cov_FF, surprise_F, noise, pace)):
            raise ValueError("values that are not finite")
        return cls(
            names=[state["names"][n] for n in indices],
            mean_F=mean_F[indices],
            cov_FF=cov_FF[np.ix_(indices, indices)],
            surprise_F=surprise_F[indices],
            noise=noise,
            machine_drift=pace[0],
            last_surprise=pace[1],
        )


def names_of(schemes: Iterable[Scheme], names: Iterable[str]) -> list[str]:
    """Names among `names` whose factors concern `schemes` alone, or none of them in particular."""
    known = {str(own) for scheme in schemes for own in (scheme, scheme.crossing)}

    def is_known(name: str) -> bool:
        kind, _, text = name.partition(" ")
        if kind == "scheme":
            return text in known
        if kind == "strategy" and text not in _CUTS:
            return all(str(scheme) in known for scheme in Strategy.parse(text).schemes)
        return kind in _KINDS

    return [name for name in names if is_known(name)]


_GATHERED, _CUT = _CUTS = "gathered", "cut"
"""Strategies cut anew for every step are too many to know each."""


def _known_as(strategy: Strategy) -> str:
    if strategy.gathers:
        return _GATHERED
    is_cut = strategy.is_heterogeneous and slices_key(strategy) != strategy
    return (
        _CUT if is_cut and len({scheme.tp for scheme in strategy.schemes}) == 1 else str(strategy)
    )


def _kind(name: str) -> _Kind:
    return _KINDS[name.split(" ", 1)[0]]


_LEAST, _BINS_PER_OCTAVE, _NUM_BINS = 0.005, 2, 20
_EDGES = tuple(_LEAST * 2 ** (n / _BINS_PER_OCTAVE) for n in range(_NUM_BINS - 1))
"""Edges of the bins of |d|. A median in the first bin, below a spread of half a percent, counts as
none; the last bin begins at 2.56.
"""
_MEDIAN_OF_DIFFERENCE = 0.6745 * sqrt(2)
_ALIKE = 2.0
"""Predicted times are compared up to this ratio."""
_KEPT = 1 - 1 / 64
"""Share of all counts kept from one iteration with differences to the next: about 64 count."""
_NUM_NEEDED = 50
"""Differences before a spread is known: to about 15%."""
_NUM_BEFORE = 16
"""Iterations that ranks without differences of their own are compared with."""
_MOST = 0.3
"""Largest spread that plans count with: beyond it times are of something else than computation."""


class MicroBatchTime(NamedTuple):
    """One micro-batch on one rank: its time by the profile and the measured time of its passes,
    waits aside.

    `is_beside_link`: slices that stay are pulled or pushed beside it. `is_first_rank`: of its
    pipeline.
    """

    scheme: Scheme
    num_tokens: int
    profiled_ms: float
    computed_ms: float
    is_beside_link: bool = False
    is_first_rank: bool = True

    @property
    def is_known(self) -> bool:
        """Whether both times can be compared."""
        return self.profiled_ms > 0 and 0 < self.computed_ms < inf


def differences(micro_batches: Iterable[MicroBatchTime]) -> list[float]:
    """|d| of neighbours among the micro-batches of one rank in one iteration.

    >>> one = Scheme(1, 1)
    >>> own = [MicroBatchTime(one, 10, 5.0, ms) for ms in (5.0, 10.0, 5.0)]
    >>> [round(d, 3) for d in differences(own)]
    [0.693, 0.693]
    """
    of_scheme: dict[Scheme, list[MicroBatchTime]] = {}
    for micro_batch in micro_batches:
        if micro_batch.is_known and not micro_batch.is_beside_link:
            of_scheme.setdefault(micro_batch.scheme, []).append(micro_batch)
    found = []
    for own in of_scheme.values():
        own.sort(key=lambda m: m.profiled_ms / m.num_tokens)
        for one, other in pairwise(own):
            if max(one.profiled_ms, other.profiled_ms) <= _ALIKE * min(
                one.profiled_ms, other.profiled_ms
            ):
                ratio = one.computed_ms * other.profiled_ms
                found.append(abs(log(ratio / (one.profiled_ms * other.computed_ms))))
    return found


def tally(found: Iterable[float]) -> list[float]:
    """Count the differences in each bin."""
    counts = [0.0] * _NUM_BINS
    for difference in found:
        counts[bisect_right(_EDGES, difference)] += 1.0
    return counts


class Level(NamedTuple):
    """Level of a rank without differences of its own. It has the number of its scheme, equal on all
    ranks, -1.0 where there is none, and r and h of its micro-batches ([Note: Spread of
    micro-batches]).
    """

    scheme: float = -1.0
    level: float = 0.0
    share: float = 0.0


def told_by(own: Sequence[MicroBatchTime], schemes: Sequence[Scheme]) -> list[float]:
    """Values for the other ranks after an iteration: counts of this rank's differences, and its
    `Level`. `schemes`: all, in the same order on every rank.
    """
    found, level = differences(own), Level()
    if own and not found:
        longest = max(own, key=lambda m: m.profiled_ms)
        alike = [m for m in own if m.scheme == longest.scheme]
        if all(m.is_first_rank and m.is_known for m in alike):
            profiled_ms = sum(m.profiled_ms for m in alike)
            level = Level(
                float(schemes.index(longest.scheme)),
                log(sum(m.computed_ms for m in alike) / profiled_ms),
                sum(m.profiled_ms**2 for m in alike) / profiled_ms**2,
            )
    return [*tally(found), *level]


NOTHING_TOLD = (*tally([]), *Level())


@dataclass(slots=True)
class LearnedSpread:
    """Estimate of the spread of single micro-batches; the values of all ranks give the same on
    every rank.

    >>> learned = LearnedSpread()
    >>> one = Scheme(1, 1)
    >>> own = [MicroBatchTime(one, 10, 5.0, ms) for ms in (5.0, 5.2, 5.0)]
    >>> for _ in range(40):
    ...     learned.observe([told_by(own, [one])])
    >>> round(learned.value, 2)
    0.04
    """

    counts: list[float] = field(default_factory=lambda: tally([]))
    before: deque[dict[int, Level]] = field(default_factory=lambda: deque(maxlen=_NUM_BEFORE))
    """Levels of ranks in the last iterations, the latest last."""

    def observe(self, told: Sequence[Sequence[float]]) -> None:
        """Take in one iteration: the values of each rank (`told_by`), in their order."""
        levels = {rank: Level(*own[_NUM_BINS:]) for rank, own in enumerate(told)}
        levels = {rank: level for rank, level in levels.items() if level.scheme >= 0}
        found = tally(self._since_before(levels))
        for own in told:
            found = [old + new for old, new in zip(found, own)]
        if levels:
            self.before.append(levels)
        if sum(found) > 0:
            self.counts = [_KEPT * old + new for old, new in zip(self.counts, found)]

    def _since_before(self, levels: Mapping[int, Level]) -> Iterator[float]:
        """|d| of each rank and the next of those that had their schemes in one iteration before."""
        left = dict(levels)
        for before in reversed(self.before):
            ranks = [r for r, now in left.items() if r in before and before[r].scheme == now.scheme]
            if len(ranks) > 1:
                pairs = [(left.pop(rank), before[rank]) for rank in ranks]
                for (now, was), (other_now, other_was) in pairwise(pairs):
                    off = (now.level - was.level) - (other_now.level - other_was.level)
                    shares = now.share + was.share + other_now.share + other_was.share
                    # As of two single micro-batches, whose variances add up to two.
                    yield abs(off) * sqrt(2 / shares)

    @property
    def value(self) -> float:
        """Standard deviation of the logarithm of a micro-batch's time; 0.0 before enough was
        seen, 0.3 at most.
        """
        *before, total = accumulate(self.counts)
        if total < _NUM_NEEDED:
            return 0.0
        # By the median, which a few micro-batches that stumble do not move.
        number = bisect_right(before, total / 2)
        if number in (0, _NUM_BINS - 1):
            return 0.0 if number == 0 else _MOST
        low, high = _EDGES[number - 1], _EDGES[number]
        share = (total / 2 - before[number - 1]) / self.counts[number]
        return min((low + share * (high - low)) / _MEDIAN_OF_DIFFERENCE, _MOST)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint. Iterations before it are not among them: a run that
        continues may number other schemes and ranks.
        """
        return {"counts": list(self.counts)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LearnedSpread:
        """Restore the state of `state_dict`; ValueError for anything else."""
        counts = [float(value) for value in state["counts"]]
        if len(counts) != _NUM_BINS or not all(map(isfinite, counts)) or min(counts) < 0:
            raise ValueError(f"expected {_NUM_BINS} counts of 0 or more, not {counts!r:.200}")
        return cls(counts)
