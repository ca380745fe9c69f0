"""Length histograms: what is read, what is refused, and what global batches are drawn from them."""

from __future__ import annotations

import numpy as np
import pytest

from ds_hydra.configs import find_file
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.proposal.histogram import LengthHistogram


def test_round_trip_and_totals():
    histogram = LengthHistogram.from_counts({7: 2, 3: 5, 9: 0})
    assert histogram.lengths_tokens.tolist() == [3, 7]
    assert (histogram.num_sequences, histogram.num_tokens) == (7, 29)
    again = LengthHistogram.from_json(histogram.to_json(tokenizer="t"))
    assert again.to_json() == histogram.to_json()


@pytest.mark.parametrize("name", ["github", "commoncrawl"])
def test_shipped_histograms_state_their_own_totals(name):
    from ds_hydra.configs.files import read_json_object

    document = read_json_object(find_file("lengths", name))
    histogram = LengthHistogram.from_json(document)
    assert histogram.num_sequences == document["num_sequences"]
    assert histogram.num_tokens == document["num_tokens"]


def test_limit_truncates_or_drops():
    histogram = LengthHistogram.from_counts({4: 1, 8: 2, 20: 3})
    assert histogram.limit(8).to_json()["counts"] == {"4": 1, "8": 5}
    assert histogram.limit(10).to_json()["counts"] == {"4": 1, "8": 2, "10": 3}
    assert histogram.limit(10, "drop").to_json()["counts"] == {"4": 1, "8": 2}
    with pytest.raises(HydraConfigError, match="shortest has 4"):
        histogram.limit(3, "drop")


def test_quantile_is_the_shortest_length_that_covers_the_share():
    histogram = LengthHistogram.from_counts({1: 50, 2: 40, 9: 10})
    assert [histogram.quantile(q) for q in (0.5, 0.51, 0.9, 0.91, 1.0)] == [1, 2, 2, 9, 9]


def test_drawn_batches_keep_to_the_budget_and_follow_the_histogram():
    histogram = LengthHistogram.from_counts({10: 3, 30: 1})
    batches = list(histogram.draw_batches(1000, 50, seed=1))
    assert all(960 < batch.sum() <= 1000 for batch in batches)
    assert np.mean(np.concatenate(batches) == 30) == pytest.approx(0.25, abs=0.03)
    again = histogram.draw_batches(1000, 50, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again))
    alone = LengthHistogram.from_counts({50: 1}).draw_batches(10, 3, seed=0)
    assert [batch.tolist() for batch in alone] == [[50]] * 3, "longer than the budget"


def test_more_sequences_than_memory_holds_are_refused_with_what_would_do():
    histogram = LengthHistogram.from_counts({10: 1})
    with pytest.raises(HydraConfigError, match="draw 381300 global batches"):
        next(histogram.draw_batches(100, 10**30, seed=0))
    next(histogram.draw_batches(100, 381300, seed=0))
    with pytest.raises(HydraConfigError, match="lower the tokens of one to 20971520"):
        next(histogram.draw_batches(10**9, 1, seed=0))
    next(histogram.draw_batches(20971520, 1, seed=0))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema": "x"}, "expected 'ds_hydra.lengths/1'"),
        ({"schema": "ds_hydra.lengths/1"}, "must map a length"),
        ({"schema": "ds_hydra.lengths/1", "counts": {}}, "is empty"),
        ({"schema": "ds_hydra.lengths/1", "counts": {"5": 0}}, "is empty"),
        ({"schema": "ds_hydra.lengths/1", "counts": {"5": -1}}, r"\(5, -1\)"),
        ({"schema": "ds_hydra.lengths/1", "counts": {"0": 3}}, r"\(0, 3\)"),
        ({"schema": "ds_hydra.lengths/1", "counts": {"a": 3}}, "not a whole number"),
        ({"schema": "ds_hydra.lengths/1", "counts": {"4": float("nan")}}, "count nan"),
        ({"schema": "ds_hydra.lengths/1", "counts": {"4": 1.5}}, "count 1.5"),
    ],
)
def test_bad_histograms_are_refused(document, message):
    with pytest.raises(HydraConfigError, match=message):
        LengthHistogram.from_json(document)
