"""Sums of gradients whose bits do not depend on the order of the addends.

[Note: Sums without an order]
Ranks add to a node's sums when they have a gradient, so that none waits for another's computation.
Sums in floating point would then depend on who came first. These are sums of integers. Every addend
is cut into digits on a fixed grid of places, powers of 2^`width`. Of each row of a parameter two
places are kept: `top`, the highest place that any addend of the row reaches, and the next one.
`high` is the sum of the digits at `top`, `low` that of the digits below it. Digits of lower places
are cut off.

The sums may not depend on the order either where the largest addend comes last. An addend that
reaches one place higher makes `high` the new `low`; one that reaches further drops both. The sums
are then what they would be if this addend had come first. With places of one decimal digit:

    0.37, then 4.6:   high 3, low 7, top 0.1  ->  high 0, low 3, top 1  ->  high 4, low 9, top 1
    4.6, then 0.37:   high 4, low 6, top 1    ->  high 4, low 9, top 1
    0.37, then 52:    high 3, low 7, top 0.1  ->  high 0, low 0, top 10 ->  high 5, low 2, top 10
    52, then 0.37:    high 5, low 2, top 10   ->  high 5, low 2, top 10

Each addend loses less than 2^-width of the row's largest addend.

Both sums are int32, so `width` leaves room for the number of addends, which a plan tells:
23 (the precision of fp32) for up to 255 of them, one less each time that they double.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WIDTH = 23
MIN_WIDTH = 12

_NOT_FINITE = 1 << 20  # stands above every place
_MANTISSA_BITS, _BIAS, _INF_OR_NAN = 23, 127, 255  # of fp32
_DOUBLE_MANTISSA_BITS, _DOUBLE_BIAS = 52, 1023
_LOWEST_NORMAL = 126  # the smallest normal fp32 is 2**-126


def digit_width(num_addends: int) -> int:
    """Bits of a digit where an element has up to `num_addends` addends.

    >>> digit_width(4), digit_width(255), digit_width(1000)
    (23, 23, 21)
    """
    width = min(MAX_WIDTH, 31 - num_addends.bit_length())
    if width < MIN_WIDTH:
        raise ValueError(f"{num_addends} addends leave {width} bits, wanted {MIN_WIDTH} or more")
    return width


class Adder:
    """Adds to sums on `device`, piece by piece in memory of its own; not for several threads."""

    def __init__(self, piece_numel: int, device: torch.device):
        self._scaled = torch.empty(piece_numel, dtype=torch.float32, device=device)
        self._digits = torch.empty(piece_numel, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._scaled.nbytes + self._digits.nbytes

    def add(
        self,
        high: Tensor,
        low: Tensor,
        top: Tensor,
        addend: Tensor,
        begin_col: int,
        width: int,
    ) -> None:
        """Add `addend` [m, c] to columns from `begin_col` on of sums: `high`, `low` [m, n], `top`
        [m, 1].

        Sums are int32, and zero before the first addend. At most `piece_numel` elements.
        """
        scaled = self._scaled[: addend.numel()].view_as(addend)
        digits = self._digits[: addend.numel()].view_as(addend)
        scaled.copy_(addend)
        reached = _place_of(scaled.abs_().amax(1, keepdim=True), width)
        # Read on the host: nearly every add after the first finds its place and moves nothing.
        if not bool((reached <= top).all()):
            # `top` is 0 before the first addend: there is nothing to move.
            if bool(top.any()):
                _make_room(high, low, top, reached)
            torch.maximum(top, reached, out=top)
        cols = slice(begin_col, begin_col + addend.shape[1])
        # A product with a power of 2 is exact, so the digits do not depend on rounding.
        scaled.copy_(addend).mul_(_power_of_two(-_exponent(top, width)))
        digits.copy_(scaled)  # cuts towards zero
        high[:, cols].add_(digits)
        digits.copy_(scaled.frac_().mul_(2.0**width))
        low[:, cols].add_(digits)


def value_of(high: Tensor, low: Tensor, top: Tensor, width: int) -> Tensor:
    """[m, n] fp32 values of sums; NaN in rows to which something was added that was not finite."""
    # Both digits as one integer: rounded once, when the sum is known, so in no order of addends.
    whole = high.to(torch.int64).bitwise_left_shift_(width).add_(low)
    unit_exponent = (_exponent(top, width) - width + _DOUBLE_BIAS).to(torch.int64)
    unit = unit_exponent.bitwise_left_shift_(_DOUBLE_MANTISSA_BITS)
    return (
        whole.double()
        .mul_(unit.view(torch.float64))
        .float()
        .masked_fill_(top == _NOT_FINITE, torch.nan)
    )


def _place_of(peak: Tensor, width: int) -> Tensor:
    """The highest place of a digit that is not zero in numbers up to `peak`; 1 is the lowest."""
    exponent = peak.view(torch.int32).bitwise_right_shift(_MANTISSA_BITS)
    place = torch.div(exponent - _BIAS, width, rounding_mode="floor") + _LOWEST_NORMAL // width
    return place.clamp_(min=1).masked_fill_(exponent == _INF_OR_NAN, _NOT_FINITE)


def _exponent(top: Tensor, width: int) -> Tensor:
    """The exponent of the unit of `high`; that of `low` is `width` less, and of a normal number."""
    # Of a row that is not finite any will do: `value_of` puts NaN there.
    return (top.clamp(1, 2 * _LOWEST_NORMAL // width) - _LOWEST_NORMAL // width) * width


def _power_of_two(exponent: Tensor) -> Tensor:
    return (exponent + _BIAS).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)


def _make_room(high: Tensor, low: Tensor, top: Tensor, reached: Tensor) -> None:
    """Where `reached` is above `top`, move the sums as many places down."""
    rows = (reached > top).flatten().nonzero().flatten()
    # One place up `high` is the new `low`; further up both are below what is kept.
    low[rows] = high[rows] * (reached[rows] == top[rows] + 1)
    high[rows] = 0
