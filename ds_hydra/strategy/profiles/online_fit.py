"""T(l, P) kept true while training runs: re-fitted from what pipelines took, with the error of each
prediction.

Pure: the engine feeds it one observation per pipeline and iteration, and asks for the models when
it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.fit import solve_non_negative
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.scheme import Scheme

FloatArray = npt.NDArray[np.float64]

_OUTLIER_SPREADS = 5.0
"""Median absolute deviations from the median ratio beyond which a sample does not count."""
_LEAST_SPREAD = 0.02
_OBSERVATIONS_FOR_DRIFT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFitSettings:
    """`window`: samples kept of each scheme. `prior_samples`: how many samples the profile is
    worth.

    `drift_threshold`: median prediction error (measured / predicted - 1) of the last samples of a
    scheme above which to warn.
    """

    window: int = 256
    prior_samples: float = 4.0
    drift_threshold: float = 0.15


@dataclass(frozen=True, slots=True)
class _Sample:
    """Sums over the micro-batches of one pipeline, and the work of one stage that its time amounts
    to.

    `ratio` is measured over what the profile's model says, so it does not depend on later fits.
    """

    squares: float
    tokens: float
    num_micro_batches: float
    stage_ms: float
    ratio: float
    prediction_error: float


class OnlineFit:
    """Latency models of the schemes in use. Memory is bounded by `window` samples of seven numbers
    each.

    >>> latency = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0)
    >>> fit = OnlineFit({Scheme(1, 1): latency})
    >>> fit.observe(Scheme(1, 1), [[10, 20]], predicted_ms=30.0, measured_ms=60.0)
    1.0
    """

    def __init__(
        self,
        latency: Mapping[Scheme, LatencyModel],
        settings: OnlineFitSettings = OnlineFitSettings(),
    ) -> None:
        self._profiled = dict(latency)
        self._settings = settings
        self._samples: dict[Scheme, deque[_Sample]] = {}

    def observe(
        self,
        scheme: Scheme,
        micro_batches: Sequence[Sequence[int]],
        *,
        predicted_ms: float,
        measured_ms: float,
        model: LatencyModel | None = None,
    ) -> float:
        """Take in one pipeline of one iteration; returns measured / predicted - 1.

        `micro_batches[j]` are the lengths of packed micro-batch j, `predicted_ms` what the plan
        said of this pipeline, `model` the T that the plan was made with (None: the profile's). The
        bubble is taken from the plan: a pipeline's time is proportional to T, so the micro-batches'
        work of one stage is the planned one times measured over predicted. Raises HydraConfigError
        for a time that cannot be, or a scheme without a profile.
        """
        if (
            not all(isfinite(time) and time > 0 for time in (predicted_ms, measured_ms))
            or not micro_batches
        ):
            raise HydraConfigError(
                f"scheme {scheme}: predicted {predicted_ms} ms and measured {measured_ms} ms for {len(micro_batches)} "
                "micro-batches; expected times above 0 of one micro-batch or more"
            )
        if scheme not in self._profiled:
            raise HydraConfigError(f"scheme {scheme} was observed and is not in the profile")
        lengths = np.array(
            [length for micro_batch in micro_batches for length in micro_batch], dtype=np.float64
        )
        sums = np.array([lengths @ lengths, lengths.sum(), len(micro_batches)])
        planned_ms = float(sums @ _as_array(model or self._profiled[scheme]))
        stage_ms = planned_ms * measured_ms / predicted_ms
        error = measured_ms / predicted_ms - 1
        ratio = stage_ms / max(float(sums @ _as_array(self._profiled[scheme])), 1e-9)
        samples = self._samples.setdefault(scheme, deque(maxlen=self._settings.window))
        squares, tokens, num_micro_batches = sums.tolist()
        samples.append(_Sample(squares, tokens, num_micro_batches, stage_ms, ratio, error))
        return error

    def models(self) -> dict[Scheme, LatencyModel]:
        """T of every profiled scheme: re-fitted where there are samples, else the profile at their
        level.

        The level is the median ratio of all samples to the profile: were schemes without samples
        left as they are, a machine that is slower than its profile would make them look good.
        """
        kept = [sample.ratio for samples in self._samples.values() for sample in samples]
        level = float(np.median(kept)) if kept else 1.0
        return {scheme: self._refit(scheme, level) for scheme in self._profiled}

    def state_dict(self) -> dict[str, list[list[float]]]:
        """All samples, by the text of their scheme, for a checkpoint."""
        return {
            str(scheme): [list(astuple(sample)) for sample in samples]
            for scheme, samples in self._samples.items()
        }

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Take the samples of a checkpoint in place of those there are; unknown schemes are left
        out.
        """
        known = {str(scheme): scheme for scheme in self._profiled}
        self._samples = {
            known[text]: deque(
                (_Sample(*sample) for sample in samples), maxlen=self._settings.window
            )
            for text, samples in state.items()
            if text in known
        }

    def drift(self, scheme: Scheme) -> float | None:
        """Median prediction error of the last ones; None before there are enough."""
        samples = self._samples.get(scheme, ())
        if len(samples) < _OBSERVATIONS_FOR_DRIFT:
            return None
        last = list(samples)[-_OBSERVATIONS_FOR_DRIFT:]
        return float(np.median([sample.prediction_error for sample in last]))

    def drift_warning(self) -> str | None:
        """What to tell the user, or None while predictions hold."""
        drifts = {
            scheme: drift for scheme in self._samples if (drift := self.drift(scheme)) is not None
        }
        worst = max(drifts, key=lambda scheme: abs(drifts[scheme]), default=None)
        if worst is None or abs(drifts[worst]) <= self._settings.drift_threshold:
            return None
        return (
            f"measured times of scheme {worst} are off the predicted ones by {drifts[worst]:+.0%} over the last "
            f"{_OBSERVATIONS_FOR_DRIFT} pipelines (threshold {self._settings.drift_threshold:.0%}); profile again, "
            "or look for a slow or shared device"
        )

    def _refit(self, scheme: Scheme, level: float) -> LatencyModel:
        """Non-negative least squares of relative errors, outliers left out, the profile as a prior.

        The prior speaks at the sums that were observed: it holds the split between the three terms,
        which micro-batches of similar shape do not tell, and is scaled by the median ratio, so that
        it does not hold the level of a device that has become slower.
        """
        samples = self._samples.get(scheme)
        traffic_ms = self._profiled[scheme].traffic_ms
        if not samples:
            return _from_array(_as_array(self._profiled[scheme]) * level, traffic_ms)
        ratios = np.array([sample.ratio for sample in samples])
        kept = _without_outliers(ratios)
        sums = np.array([(s.squares, s.tokens, s.num_micro_batches) for s in samples])[kept]
        times = np.array([s.stage_ms for s in samples])[kept]
        prior = _as_array(self._profiled[scheme]) * float(np.median(ratios[kept]))
        weight = np.sqrt(self._settings.prior_samples / 3)
        typical = float(np.median(times))
        scale = np.median(sums, axis=0)
        prior_terms = np.diag(scale) * weight / typical
        terms = np.concatenate([sums / times[:, None], prior_terms])
        target = np.concatenate([np.ones(times.size), prior_terms @ prior])
        found = solve_non_negative(terms, target)
        # Squared relative errors weigh slow samples least; the level is where half of them are
        # slower.
        return _from_array(found * float(np.median(times / (sums @ found))), traffic_ms)


def _from_array(terms: FloatArray, traffic_ms: float) -> LatencyModel:
    quadratic, linear, constant = terms.tolist()
    return LatencyModel(
        quadratic_ms=quadratic, linear_ms=linear, constant_ms=constant, traffic_ms=traffic_ms
    )


def _as_array(model: LatencyModel) -> FloatArray:
    return np.array([model.quadratic_ms, model.linear_ms, model.constant_ms])


def _without_outliers(ratios: FloatArray) -> npt.NDArray[np.bool_]:
    """Which ratios are near the median: a pipeline disturbed once must not move the model."""
    distance = np.abs(ratios - np.median(ratios))
    spread = max(float(np.median(distance)), _LEAST_SPREAD * float(np.median(ratios)))
    return np.asarray(distance <= _OUTLIER_SPREADS * spread)
