"""How a plan cuts micro-batches into the rows of a CP group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import make_plan
from test_sequence_parallel import PROFILE

from ds_hydra.errors import HydraError
from ds_hydra.sampler.cuts import Piece, cut_micro_batch, tile
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import LatencyModel, Profile, Scheme

T = LatencyModel(quadratic_ms=1e-5, linear_ms=0.1, constant_ms=1.0)


def shares(rows):
    """Tokens of each row, and time by T."""
    tokens = [sum(p.end - p.begin for p in row) for row in rows]
    return tokens, [sum(T.sequence_ms(p.end) - T.sequence_ms(p.begin) for p in row) for row in rows]


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40), num_rows=st.integers(1, 9))
def test_every_token_is_in_one_row_and_rows_are_about_even(lengths, num_rows):
    micro_batch = list(range(len(lengths)))[::-1]
    rows = cut_micro_batch(micro_batch, lengths, num_rows, T)
    assert len(rows) == num_rows
    assert tile(rows, micro_batch, lengths)
    assert rows == cut_micro_batch(micro_batch[::-1], lengths, num_rows, T)
    tokens, times = shares(rows)
    # Chunks of a sequence differ by a token, so that a row may have two more of each than its share
    slack = 2 * len(lengths)
    assert max(tokens) <= 1.02 * sum(tokens) / num_rows + slack
    longest = max(lengths)
    assert max(times) <= 1.05 * sum(times) / num_rows + slack * (0.1 + 2e-5 * longest)


def test_long_sequences_are_mirrored_and_short_ones_whole():
    lengths = [16384, *[300] * 24]
    rows = cut_micro_batch(range(25), lengths, 4, T)
    assert [sorted(p for p in row if p.position == 0) for row in rows] == [
        [Piece(0, 0, 2048), Piece(0, 14336, 16384)],
        [Piece(0, 2048, 4096), Piece(0, 12288, 14336)],
        [Piece(0, 4096, 6144), Piece(0, 10240, 12288)],
        [Piece(0, 6144, 10240)],
    ]
    assert all(p.end - p.begin == 300 for row in rows for p in row if p.position)
    tokens, times = shares(rows)
    assert len(set(tokens)) == 1
    assert np.ptp(times) < 1e-6


def test_nothing_is_cut_where_whole_sequences_are_even():
    rows = cut_micro_batch(range(8), [512] * 8, 4, T)
    assert all(p.begin == 0 and p.end == 512 for row in rows for p in row)


@pytest.mark.parametrize("lengths", [[1], [2], [1, 1], [3, 1]])
def test_fewer_tokens_than_rows_leave_rows_empty(lengths):
    rows = cut_micro_batch(range(len(lengths)), lengths, 8, T)
    assert tile(rows, range(len(lengths)), lengths)
    assert max(shares(rows)[0]) <= 2


def planned():
    document = {"tp": 1, "pp": 1, "cp": 2, **T.to_json()}
    profile = Profile.from_json({**PROFILE, "schemes": [*PROFILE["schemes"], document]})
    return make_plan([900, 7, 30, 31], ["1x<cp2,1> + 1x<1,1>"], profile, 3)


def test_a_plan_prints_and_keeps_its_rows():
    plan = planned()
    cut = plan.pipelines[0]
    assert cut.scheme == Scheme(1, 1, cp=2)
    assert cut.own_row(0, 1, plan.lengths) == cut.rows[0][1]
    assert "of 1 sequences cut, 450 to 450 tokens in 2 rows" in str(plan)
    assert IterationPlan.from_json(plan.to_json()) == plan
    assert plan.pipelines[1].rows == ()


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (((Piece(0, 0, 900),),),),
        (((Piece(0, 0, 900),), (Piece(0, 0, 900),)),),
        (((Piece(0, 0, 899),), ()),),
        (((Piece(0, 0, 900),), (Piece(1, 0, 7),)),),
        (((Piece(0, 0, 900), Piece(0, 5, 5)), ()),),
    ],
)
def test_rows_that_are_not_the_micro_batch_are_refused(rows):
    plan = planned()
    cut = replace(plan.pipelines[0], rows=rows)
    with pytest.raises(HydraError, match="every token once"):
        replace(plan, pipelines=(cut, *plan.pipelines[1:]))
