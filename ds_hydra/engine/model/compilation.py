"""`hydra.compile_layers`: torch.compile around each decoder layer.

Attention over a packed micro-batch and TP collectives stay outside (`torch.compiler.disable` where
they are defined): a micro-batch's sequence lengths are no shapes, and collectives keep the order
that the schedule gives them. What is left of a layer compiles for each TP degree and kind of pass,
with the tokens of a micro-batch as a symbolic dimension: norms, rotary embedding, activation and
residuals become few loops beside the matrix products.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hydra.errors import HydraConfigError

_MOST_VARIANTS = 64
"""Compiled forms of one layer: TP degrees x (training, evaluation) x kinds of layers. torch gives
up after 8.
"""


def compile_each(layers: Iterable[nn.Module]) -> None:
    """Compile the forward of each layer at its first use; layers of one class share what is
    compiled.

    The forward alone, so that the module's own hooks (waiting for slices, activation checkpointing)
    stay outside. Raises HydraConfigError where the code cannot be compiled.
    """
    if get_accelerator().device_name() == "cpu":
        _check_cpp_compiler()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]


def _check_cpp_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise HydraConfigError(
            "hydra.compile_layers is true, and torch finds no C++ compiler for CPU code; install g++ or name a "
            f"compiler in the environment variable CXX, or set hydra.compile_layers to false ({error})"
        ) from error
