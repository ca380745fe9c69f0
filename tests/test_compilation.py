"""`hydra.compile_layers` without a compiler; its gradients are in test_engine_parity."""

import pytest
import torch
import torch._inductor.config
from torch import nn

from ds_hydra.engine.model.stage_forward import compile_each
from ds_hydra.errors import HydraConfigError


def test_a_missing_compiler_is_named_at_the_start():
    layer = nn.Linear(2, 2)
    no_compiler = torch._inductor.config.patch({"cpp.cxx": (None, "/no/such/compiler")})
    with (
        no_compiler,
        pytest.raises(
            HydraConfigError,
            match=r"hydra\.compile_layers is true.*CXX.*set hydra\.compile_layers to",
        ),
    ):
        compile_each([layer])
    assert "forward" not in vars(layer), "nothing was replaced"
