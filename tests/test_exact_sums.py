"""Sums of gradients: right, and the same bits in every order and cut."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.engine.transfer.exact_sums import MAX_WIDTH, Adder, digit_width, value_of


def sum_up(addends, width, cuts=None):
    """The sum of [rows, cols] addends, each added in `cuts` (ranges of rows and columns)."""
    rows, cols = addends[0].shape
    high, low = (torch.zeros(rows, cols, dtype=torch.int32) for _ in range(2))
    top = torch.zeros(rows, 1, dtype=torch.int32)
    adder = Adder(rows * cols, torch.device("cpu"))
    for addend in addends:
        for r, c in cuts or [(slice(0, rows), slice(0, cols))]:
            part = addend[r, c]
            adder.add(high[r], low[r], top[r], part, c.start, width)
    return value_of(high, low, top, width)


@st.composite
def addends(draw):
    """Addends whose rows differ by up to 60 powers of ten, some of them zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    rows, cols, count = (draw(st.integers(1, 5)) for _ in range(3))
    exponents = st.sampled_from([-40, -30, -20, -8, -7, -1, 0, 1, 7, 20, 30])
    return [
        torch.randn(rows, cols, generator=generator)
        * torch.tensor(
            [[draw(st.sampled_from([0.0, 1.0])) * 10.0 ** draw(exponents)] for _ in range(rows)]
        )
        for _ in range(count)
    ]


@settings(max_examples=200, deadline=None)
@given(addends(), st.sampled_from([1, 255, 1000, 100_000]))
def test_every_order_gives_the_same_bits_and_the_sum(parts, num_addends):
    width = digit_width(max(num_addends, len(parts)))
    found = sum_up(parts, width)
    for order in random.Random(0).sample(list(itertools.permutations(parts)), min(6, len(parts))):
        assert torch.equal(sum_up(order, width), found)
    wanted = sum(part.double() for part in parts)
    peak = torch.stack(parts).double().abs().amax((0, 2))[:, None]
    lost = peak * 2.0 ** (1 - width) + 2.0**-103  # the grid has a lowest place
    lost = lost * len(parts) + wanted.abs() * 2.0**-23
    assert ((found - wanted).abs() <= lost).all()


def test_columns_that_are_added_apart_give_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(6, 8, generator=generator) * 10.0 ** (3 * i) for i in range(4)]
    cuts = [(slice(0, 6), slice(0, 3)), (slice(0, 6), slice(3, 8))]
    assert torch.equal(sum_up(parts, 20, cuts), sum_up(parts[::-1], 20, cuts[::-1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_in_its_row_in_every_order(bad):
    parts = [torch.ones(3, 2), torch.ones(3, 2), torch.ones(3, 2)]
    parts[1][1, 0] = bad
    for order in itertools.permutations(parts):
        found = sum_up(order, MAX_WIDTH)
        assert found[1].isnan().all()
        assert (found[[0, 2]] == 3).all()


def test_the_largest_number_of_addends_fits():
    for count in (1, 255, 256, 4095):
        width = digit_width(count)
        part = torch.full((1, 1), -(2.0**width) + 1)
        assert sum_up([part] * count, width) == torch.tensor(float(part) * count)


def test_too_many_addends_are_refused():
    with pytest.raises(ValueError, match="1000000 addends leave 11 bits"):
        digit_width(1_000_000)
