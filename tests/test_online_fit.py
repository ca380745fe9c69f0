"""The re-fit during training: learns the truth, shrugs off outliers, stays small, and warns of
drift.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import LatencyModel, Scheme
from ds_hydra.strategy.profiles.fit import fit_latency
from ds_hydra.strategy.profiles.online_fit import OnlineFit, OnlineFitSettings

SCHEME = Scheme(2, 2)
PROFILED = LatencyModel(quadratic_ms=1e-5, linear_ms=0.1, constant_ms=20.0)
TRUTH = LatencyModel(quadratic_ms=2e-5, linear_ms=0.15, constant_ms=10.0)


def pipeline_ms(model: LatencyModel, micro_batches: list[list[int]]) -> float:
    """A stand-in for the planner: micro-batches one after the other, and a bubble of one slot."""
    return sum(model.micro_batch_ms(micro_batch) for micro_batch in micro_batches) * (
        1 + 1 / len(micro_batches)
    )


def run(
    fit: OnlineFit,
    num_iterations: int,
    truth: LatencyModel = TRUTH,
    spikes: float = 0.0,
    seed: int = 0,
):
    generator = np.random.default_rng(seed)
    errors = []
    for _ in range(num_iterations):
        micro_batches = [
            generator.integers(10, 9000, generator.integers(1, 6)).tolist() for _ in range(3)
        ]
        noise = 1 + 0.02 * generator.standard_normal()
        if generator.random() < spikes:
            noise *= 8
        current = fit.models()[SCHEME]
        predicted, measured = (
            pipeline_ms(current, micro_batches),
            pipeline_ms(truth, micro_batches) * noise,
        )
        errors.append(
            fit.observe(
                SCHEME, micro_batches, predicted_ms=predicted, measured_ms=measured, model=current
            )
        )
    return errors


def test_a_wrong_profile_is_corrected():
    fit = OnlineFit({SCHEME: PROFILED})
    errors = run(fit, 100)
    assert abs(errors[0]) > 0.2
    assert np.median(np.abs(errors[20:])) < 0.04
    found = fit.models()[SCHEME]
    assert found.micro_batch_ms([4000]) == pytest.approx(TRUTH.micro_batch_ms([4000]), rel=0.03)
    assert found.micro_batch_ms([9000]) == pytest.approx(TRUTH.micro_batch_ms([9000]), rel=0.03)


def test_outliers_do_not_move_the_model():
    fit = OnlineFit({SCHEME: PROFILED})
    run(fit, 100, spikes=0.25)
    assert fit.models()[SCHEME].micro_batch_ms([4000]) == pytest.approx(
        TRUTH.micro_batch_ms([4000]), rel=0.03
    )


def test_half_of_the_times_are_above_the_prediction_however_they_scatter():
    """Least squares of relative errors alone would be a quarter too low here."""
    fit = OnlineFit({SCHEME: PROFILED})
    generator = np.random.default_rng(3)
    for _ in range(200):
        micro_batches = [generator.integers(500, 4000, 3).tolist()]
        measured = pipeline_ms(TRUTH, micro_batches) * np.exp(0.5 * generator.standard_normal())
        fit.observe(
            SCHEME,
            micro_batches,
            predicted_ms=pipeline_ms(PROFILED, micro_batches),
            measured_ms=measured,
        )
    typical = [1500, 2250, 3000]
    assert fit.models()[SCHEME].micro_batch_ms(typical) == pytest.approx(
        TRUTH.micro_batch_ms(typical), rel=0.12
    )


def test_memory_is_bounded_and_old_truths_are_forgotten():
    fit = OnlineFit({SCHEME: PROFILED}, OnlineFitSettings(window=30))
    run(fit, 60, truth=TRUTH)
    slow = LatencyModel(quadratic_ms=4e-5, linear_ms=0.3, constant_ms=20.0)
    run(fit, 60, truth=slow, seed=1)
    assert len(fit._samples[SCHEME]) == 30
    assert fit.models()[SCHEME].micro_batch_ms([4000]) == pytest.approx(
        slow.micro_batch_ms([4000]), rel=0.05
    )


def test_drift_is_warned_of_and_not_before():
    fit = OnlineFit({SCHEME: PROFILED})
    micro_batches = [[1000, 2000]]
    predicted = pipeline_ms(PROFILED, micro_batches)
    for factor in [1.0] * 8:
        fit.observe(SCHEME, micro_batches, predicted_ms=predicted, measured_ms=factor * predicted)
    assert fit.drift_warning() is None
    for factor in [1.5] * 8:
        fit.observe(SCHEME, micro_batches, predicted_ms=predicted, measured_ms=factor * predicted)
    assert fit.drift(SCHEME) == pytest.approx(0.5)
    assert "scheme <2,2> are off the predicted ones by +50%" in (fit.drift_warning() or "")


def test_schemes_without_samples_follow_the_level_of_the_others():
    fit = OnlineFit({SCHEME: PROFILED, Scheme(1, 1): TRUTH})
    assert fit.models()[Scheme(1, 1)] == TRUTH
    for _ in range(10):
        fit.observe(SCHEME, [[500, 20]], predicted_ms=100.0, measured_ms=120.0)
    found = fit.models()[Scheme(1, 1)]
    assert found.micro_batch_ms([700]) == pytest.approx(1.2 * TRUTH.micro_batch_ms([700]))
    assert fit.drift(Scheme(1, 1)) is None


def test_samples_survive_a_checkpoint():
    fit = OnlineFit({SCHEME: PROFILED})
    run(fit, 20)
    again = OnlineFit({SCHEME: PROFILED})
    again.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    assert again.models() == fit.models()
    assert again.drift(SCHEME) == fit.drift(SCHEME)
    elsewhere = OnlineFit({Scheme(1, 1): PROFILED})
    elsewhere.load_state_dict(fit.state_dict())
    assert elsewhere.models() == {Scheme(1, 1): PROFILED}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_refused(value):
    with pytest.raises(HydraConfigError, match="expected times above 0"):
        OnlineFit({SCHEME: PROFILED}).observe(SCHEME, [[5]], predicted_ms=1.0, measured_ms=value)
    with pytest.raises(ValueError, match="positive, finite"):
        fit_latency([10, 20, 30], [1.0, value, 3.0])
    with pytest.raises(HydraConfigError, match="not in the profile"):
        OnlineFit({}).observe(SCHEME, [[5]], predicted_ms=1.0, measured_ms=1.0)
