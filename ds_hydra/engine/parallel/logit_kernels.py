"""Kernels of Triton for passes over logits: each reads them once, the gradient takes their place.

Same functions as those of torch's operators in `logits.py`; importing this needs triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_hydra.engine.parallel.logit_transform import LogitTransform, RowGradients

_BLOCK = 4096
"""Columns that a program works on at a time."""


@triton.jit
def _logits(x, scale, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    y = x.to(tl.float32) * scale
    if HAS_CAP:
        # tanh(z) by exp of what is not positive, which does not overflow
        z = y / cap
        power = tl.exp(-2.0 * tl.abs(z))
        tanh = (1.0 - power) / (1.0 + power)
        y = cap * tl.where(z < 0, -tanh, tanh)
    return y


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    outputs,
    row_stride,
    sums,
    num_rows,
    num_columns,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    NEEDS_EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # Each lane has the maximum and the sums of its columns; lanes join at the end
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    power = tl.zeros([BLOCK], tl.float32)
    expected = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_columns, BLOCK):
        inside = begin + columns < num_columns
        x = tl.load(outputs + row * row_stride + begin + columns, mask=inside, other=0.0)
        y = _logits(x, scale, cap, HAS_CAP)
        higher = tl.where(inside, tl.maximum(highest, y), highest)
        kept = tl.where(highest == higher, 1.0, tl.exp(highest - higher))
        own = tl.where(inside, tl.exp(y - higher), 0.0)
        power = power * kept + own
        if NEEDS_EXPECTED:
            expected = expected * kept + own * y
        total += tl.where(inside, y, 0.0)
        highest = higher
    most = tl.max(highest, 0)
    kept = tl.exp(highest - most)
    tl.store(sums + row, most)
    tl.store(sums + num_rows + row, tl.sum(power * kept, 0))
    tl.store(sums + 2 * num_rows + row, tl.sum(expected * kept, 0))
    tl.store(sums + 3 * num_rows + row, tl.sum(total, 0))


@triton.jit
def _write_gradient(  # type: ignore[no-untyped-def]
    outputs,
    row_stride,
    normaliser,
    expected,
    of_normaliser,
    of_expected,
    of_sum,
    ids,
    of_given,
    num_columns,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    HAS_EXPECTED: tl.constexpr,
    HAS_SUM: tl.constexpr,
    NUM_GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = outputs + row * row_stride + columns
    y = _logits(tl.load(places, mask=inside, other=0.0), scale, cap, HAS_CAP)
    weight = tl.load(of_normaliser + row)
    if HAS_EXPECTED:
        weight += tl.load(of_expected + row) * (1.0 + y - tl.load(expected + row))
    grad = tl.exp(y - tl.load(normaliser + row)) * weight
    if HAS_SUM:
        grad += tl.load(of_sum + row)
    for k in range(NUM_GIVEN):
        column = tl.load(ids + row * NUM_GIVEN + k)
        own = tl.load(of_given + row * NUM_GIVEN + k)
        grad += tl.where(columns == column, own, 0.0)
    if HAS_CAP:
        grad *= 1.0 - (y / cap) * (y / cap)
    tl.store(places, (grad * scale).to(outputs.dtype.element_ty), mask=inside)


def sum_rows(outputs_TV: Tensor, transform: LogitTransform, needs_expected: bool) -> Tensor:
    """[4, T] fp32: the fields of `RowSums`."""
    num_rows, num_columns = outputs_TV.shape
    sums = torch.empty(4, num_rows, dtype=torch.float32, device=outputs_TV.device)
    _sum_rows[(num_rows,)](
        outputs_TV,
        outputs_TV.stride(0),
        sums,
        num_rows,
        num_columns,
        HAS_CAP=transform.cap > 0,
        NEEDS_EXPECTED=needs_expected,
        **_sizes(transform, num_columns),
    )
    return sums


def write_gradient(outputs_TV: Tensor, transform: LogitTransform, of: RowGradients) -> None:
    """See `logits.write_gradient`."""
    num_rows, num_columns = outputs_TV.shape
    sizes = _sizes(transform, num_columns)
    of_normaliser_T = of.of_normaliser_T.contiguous()
    _write_gradient[(num_rows, triton.cdiv(num_columns, sizes["BLOCK"]))](
        outputs_TV,
        outputs_TV.stride(0),
        of.normaliser_T.contiguous(),
        of.expected_T.contiguous(),
        of_normaliser_T,
        _or(of.of_expected_T, of_normaliser_T),
        _or(of.of_sum_T, of_normaliser_T),
        of.ids_TK.contiguous(),
        of.of_given_TK.contiguous(),
        num_columns,
        HAS_CAP=transform.cap > 0,
        HAS_EXPECTED=of.of_expected_T is not None,
        HAS_SUM=of.of_sum_T is not None,
        NUM_GIVEN=of.ids_TK.shape[1],
        **sizes,
    )


def _sizes(transform: LogitTransform, num_columns: int) -> dict[str, Any]:
    block = min(_BLOCK, triton.next_power_of_2(num_columns))
    return {"scale": transform.scale, "cap": transform.cap or 1.0, "BLOCK": block}


def _or(values: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is not read where there are no `values`."""
    return other if values is None else values.contiguous()
