"""What the device reaches in bare operations: the products of a layer, attention, a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.one_gpu.device import DEVICE, DTYPE, HAS_GPU, median_ms
from ds_hydra.engine.model.attention import _attend
from ds_hydra.engine.model.attention_contract import Scoring
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch


def matmul_flops(size: int = 8192 if HAS_GPU else 256) -> float:
    """FLOP/s of a square product of random numbers, the most that a layer could reach."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, repeats=10) * 1e3


def copy_bytes_per_s(num_bytes: int = 4 << 30 if HAS_GPU else 1 << 24) -> float:
    """Bytes read and written in a second."""
    source = torch.ones(num_bytes // 4, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms(lambda: target.copy_(source)) * 1e3


def products_ms(config: PretrainedConfig, num_tokens: int) -> tuple[float, float]:
    """Of a layer's matrices and of the head: forward, both gradients."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    keys = config.num_key_value_heads * head
    query = config.num_attention_heads * head
    shapes = [(hidden, query), (hidden, keys), (hidden, keys), (query, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    layer = sum(_three_products_ms(num_tokens, *shape) for shape in shapes)
    return layer, _three_products_ms(num_tokens, hidden, config.vocab_size)


def _three_products_ms(tokens: int, width: int, out: int) -> float:
    x = torch.randn(tokens, width, device=DEVICE, dtype=DTYPE)
    w = torch.randn(width, out, device=DEVICE, dtype=DTYPE)
    y = x @ w

    def run() -> None:
        torch.mm(x, w, out=y)
        y @ w.T
        x.T @ y

    return median_ms(run, repeats=3, warmup=1)


def attention_inputs(config: PretrainedConfig, num_tokens: int) -> list[Tensor]:
    """Queries, keys and values [1, heads, tokens, width] that want gradients."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    return [
        torch.randn(1, n, num_tokens, width, device=DEVICE, dtype=DTYPE, requires_grad=True)
        for n in heads
    ]


def attention_ms(config: PretrainedConfig, lengths: Sequence[int]) -> float:
    """Of one layer's attention over a packed micro-batch as a stage calls it, forward and
    backward.
    """
    inputs = attention_inputs(config, sum(lengths))
    micro_batch = PackedMicroBatch.build(lengths, DEVICE)
    scoring = Scoring(inputs[0].shape[-1] ** -0.5)
    return forward_backward_ms(lambda: _attend(*inputs, micro_batch, scoring), inputs)


def forward_backward_ms(run: Any, inputs: Sequence[Tensor]) -> float:
    """Median of `run` and the gradients of `inputs`."""
    cotangent = torch.randn_like(run())
    return median_ms(lambda: torch.autograd.grad(run(), inputs, cotangent), repeats=3, warmup=1)
