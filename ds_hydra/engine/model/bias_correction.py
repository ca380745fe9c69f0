"""Corrections of routers' biases, by which experts that get few tokens are chosen more often.

Routing without an auxiliary loss (Wang et al. 2024, Alg. 1; DeepSeek-V3, Sec. 2.1.2): what a router
adds to the scores of its experts to choose among them, and to nothing else, moves by a fixed rate
after every iteration, up for experts that got fewer tokens than the mean, down for those that got
more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.engine.model.adapters import unwrap_adapters
from ds_hydra.engine.model.decoder_parts import DecoderParts
from ds_hydra.engine.model.expert_balance import find_biases, is_experts
from ds_hydra.errors import HydraConfigError, UnsupportedModelError


class BiasCorrection:
    """The biases of a model that ZeRO-3 has partitioned: buffers are whole on every rank, of
    parameters a rank moves its own shard. Not collective.
    """

    def __init__(self, model: nn.Module, rate: float, rank: int) -> None:
        """Raises UnsupportedModelError where routers have none, HydraConfigError for a type in
        which small steps are lost.
        """
        self._rate, self._rank = rate, rank
        self._biases: list[tuple[int, Tensor]] = []
        row = 0
        for layer in DecoderParts.find(unwrap_adapters(model)).layers:
            biases = [_tensors_of(module)[name] for module, name in find_biases(layer)]
            rows = sum(map(is_experts, layer.modules()))
            if biases and rows == len(biases):
                self._biases += [(row + i, bias) for i, bias in enumerate(biases)]
            row += rows
        name = type(model).__name__
        if not self._biases:
            raise UnsupportedModelError(
                f"hydra.moe.bias_update_rate is {rate:g}, and routers of {name} have no correction of their bias "
                "(e_score_correction_bias); set it to 0"
            )
        dtypes = {bias.dtype for _, bias in self._biases}
        if dtypes != {torch.float32}:
            raise HydraConfigError(
                f"hydra.moe.bias_update_rate is {rate:g}, and corrections of routers' biases of {name} are "
                f"{', '.join(sorted(map(str, dtypes)))}, which loses such steps; keep them in fp32 (buffers loaded "
                "by from_pretrained are), or set it to 0"
            )

    @torch.no_grad()
    def update(self, tokens_LE: Tensor) -> None:
        """Move all biases by the rate. `tokens_LE` [layers with experts, E] of the whole
        mini-batch, equal on all ranks.
        """
        for row, bias in self._biases:
            tokens_E = tokens_LE[row].double()
            step_E = self._rate * (tokens_E.mean() - tokens_E).sign().to(bias)
            shard: Any = getattr(bias, "ds_tensor", None)
            if shard is None:
                bias.add_(step_E.view_as(bias))
                continue
            begin = self._rank * shard.numel()
            mine = step_E[begin : begin + shard.numel()]
            shard.view(-1)[: len(mine)].add_(mine)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Buffers and parameters that `module` has itself."""
    held = {**module._buffers, **module._parameters}
    return {name: tensor for name, tensor in held.items() if tensor is not None}
