"""Stand-ins for the kernels of flash-linear-attention and causal-conv1d: transformers' own torch
code, one sequence after the other where they are told where sequences begin.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def install(modeling: ModuleType, patch: Any = setattr) -> list[list[int]]:
    """Put them into a `modeling` module of transformers; what they are told goes to the list that
    is returned, the lengths of sequences.
    """
    told: list[list[int]] = []
    delta_rule = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    convolution = inspect.unwrap(modeling.causal_conv1d_fn)

    def chunk_gated_delta_rule(
        *qkv_BTHD: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **_others: Any,
    ) -> tuple[Tensor, None]:
        tensors = (*qkv_BTHD, g, beta)
        cut = [tensors]
        if cu_seqlens is not None:
            assert cu_seqlens.dtype == torch.int32
            told.append(cu_seqlens.diff().tolist())
            cut = list(zip(*(t.split(told[-1], dim=1) for t in tensors), strict=True))
        same = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        parts = [delta_rule(*p[:3], g=p[3], beta=p[4], **same)[0] for p in cut]
        return torch.cat(parts, dim=1), None

    def causal_conv1d_fn(
        x_BCT: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        **_others: Any,
    ) -> Tensor:
        lengths = [x_BCT.shape[-1]]
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32
            assert seq_idx.shape == (1, x_BCT.shape[-1])
            lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
            told.append(lengths)
        parts = x_BCT.split(lengths, dim=-1)
        return torch.cat([convolution(p, weight, bias, activation) for p in parts], dim=-1)

    patch(modeling, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
    patch(modeling, "causal_conv1d_fn", causal_conv1d_fn)
    return told
