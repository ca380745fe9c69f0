"""Our overrides against the installed DeepSpeed: an upgrade breaks here and not in a run."""

from __future__ import annotations

import inspect

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

import ds_hydra
from ds_hydra.engine import HydraEngine

REPLACED = [
    "save_checkpoint",
    "load_checkpoint",
    "save_16bit_model",
    "deepspeed_io",
    "forward",
    "backward",
    "step",
    "destroy",
]


@pytest.mark.parametrize("name", REPLACED)
def test_overrides_take_what_deepspeed_takes(name):
    theirs = inspect.signature(getattr(DeepSpeedEngine, name)).parameters
    ours = inspect.signature(getattr(HydraEngine, name)).parameters
    takes_rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours.values())
    missing = [p for p in theirs if p not in ours]
    assert takes_rest or not missing, f"{name} lacks {missing}"


def test_initialize_has_deepspeeds_signature():
    theirs = inspect.signature(deepspeed.initialize).parameters
    ours = inspect.signature(ds_hydra.initialize).parameters
    assert list(ours) == list(theirs)
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_initialize_builds_the_class_that_we_swap_in():
    source = inspect.getsource(deepspeed.initialize)
    assert "engine = DeepSpeedEngine(args=args," in source


def test_what_deepspeed_offers_for_gradients_is_still_there():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.utils import safe_set_local_grad

    assert list(inspect.signature(safe_set_local_grad).parameters) == ["param", "value"]
    assert hasattr(DeepSpeedZeroOptimizer_Stage3, "independent_gradient_partition_epilogue")
    assert "_is_gradient_accumulation_boundary" in inspect.getsource(
        DeepSpeedEngine.set_gradient_accumulation_boundary
    )
