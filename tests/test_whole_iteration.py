"""Rubick's model: the originals' predictions to the last digit, their errors, and what is
refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from command_line import document_of, invoke, refused
from rubick import AUTHORS_MEAN_ERROR, fit_points, replay, validation_points

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.whole_iteration import (
    IterationModel,
    IterationSetup,
    MeasuredIteration,
    fit_iterations,
    norm_overlap,
    predict_iteration,
)

MODEL = IterationModel(
    bwd=2.0, sync=2.0, opt=0.5, opt_offload=2.0, const_ms=5.0, off_ms=3.0, swap_ms=4.0
)
SETUP = IterationSetup(forward_ms=10.0, params_mi=10.0, dp=4, bandwidth_dp=3.0)


def test_parts_of_a_small_example():
    """Backward 20 ms, gradients 8 * 10 * 3/4 / 3 = 20 ms: f_2 gives 20 sqrt 2. Optimizer 0.5 * 10 +
    4.
    """
    time = predict_iteration(MODEL, SETUP)
    assert time.backward_and_sync_ms == pytest.approx(20 * 2**0.5)
    assert time.optimizer_ms == pytest.approx(9)
    assert time.total_ms == pytest.approx(10 + 20 * 2**0.5 + 9 + 5)


def test_overlap_is_the_sum_for_one_and_the_larger_for_infinity():
    assert norm_overlap(3, 4, 1) == pytest.approx(7)
    assert norm_overlap(3, 4, 2) == pytest.approx(5)
    assert norm_overlap(300, 400, 200) == pytest.approx(400)
    assert norm_overlap(0, 0, 2) == 0


@pytest.mark.parametrize("model", [*AUTHORS_MEAN_ERROR, "llama7b", "llama30b"])
def test_every_prediction_of_the_originals_is_repeated(model):
    assert replay(model) < 1e-6


@pytest.mark.parametrize("model", AUTHORS_MEAN_ERROR)
def test_mean_error_is_no_worse_than_the_originals(model):
    fitted = fit_iterations(fit_points(model)).model
    errors = [
        abs(predict_iteration(fitted, setup).total_ms / measured - 1)
        for _, setup, measured, _ in validation_points(model)
    ]
    assert 100 * np.mean(errors) <= AUTHORS_MEAN_ERROR[model]


def made_points() -> list[MeasuredIteration]:
    setups = [
        replace(
            SETUP,
            dp=dp,
            is_sharded=sharded,
            is_offloaded=offloaded,
            forward_ms=forward,
            bandwidth_host=2.0,
        )
        for dp in (1, 2, 8)
        for sharded, offloaded in ((False, False), (True, False), (False, True))
        for forward in (10.0, 70.0)
    ]
    return [
        MeasuredIteration(setup=s, iteration_ms=predict_iteration(MODEL, s).total_ms)
        for s in setups
    ]


def test_made_iterations_are_predicted_again():
    fitted = fit_iterations(made_points())
    assert fitted.rmsle < 0.03
    assert max(map(abs, fitted.relative_errors)) < 0.06
    assert fitted.model.bwd == pytest.approx(MODEL.bwd, rel=0.1)


@pytest.mark.parametrize("value", [0.0, -3.0, float("nan"), float("inf")])
def test_measurements_that_cannot_be_are_refused(value):
    with pytest.raises(HydraConfigError, match="iteration_ms"):
        MeasuredIteration(setup=SETUP, iteration_ms=value)
    with pytest.raises(HydraConfigError, match="forward_ms"):
        replace(SETUP, forward_ms=value)


def test_nothing_to_fit_is_refused():
    with pytest.raises(HydraConfigError, match="no measured iteration"):
        fit_iterations([])


def test_fit_command(tmp_path):
    points = [{"setup": asdict(p.setup), "iteration_ms": p.iteration_ms} for p in made_points()]
    (tmp_path / "points.json").write_text(json.dumps({"points": points}))

    arguments = ("fit", "--points", tmp_path / "points.json")
    document = document_of(*arguments, "--out", tmp_path / "m.json", "--json")
    assert document == json.loads((tmp_path / "m.json").read_text())
    assert len(document["relative_errors"]) == len(points)
    assert "bwd" in invoke(*arguments).stdout
    assert "Example: ds-hydra fit" in invoke("fit", "--help").stdout
    (tmp_path / "bad.json").write_text('{"points": [{"setup": {"speed": 1}, "iteration_ms": 1}]}')
    assert "speed" in refused("fit", "--points", tmp_path / "bad.json")
