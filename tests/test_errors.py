"""Messages of errors can be printed and sent, whatever values they name."""

from __future__ import annotations

import pickle

import pytest

from ds_hydra import errors
from ds_hydra.configs import HydraConfig
from ds_hydra.engine.ranks.agreement import restore_error
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.examples import to_example, to_examples
from ds_hydra.strategy import Scheme, Strategy

LONG = "x" * 100_000
HALF = "\ud800"
SIZES = {"context_length": 8, "tokens_per_iteration": 8}


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (lambda value: Scheme.from_json({"tp": value, "pp": 1}), "scheme"),
        (lambda value: Scheme.from_json({"tp": 1, "pp": 1, "cp": value}), "scheme"),
        (lambda value: Strategy.parse(value), "strategy"),
        (lambda value: HydraConfig.parse({**SIZES, "attention": value}), "hydra.attention"),
        (lambda value: HydraConfig.parse({**SIZES, value: 1}), " key"),
        (lambda value: to_examples({value: []}), "the global batch is a dict"),
        (lambda value: to_example({value: [1]}, "example 3"), "expected 'input_ids'"),
    ],
)
@pytest.mark.parametrize("value", [LONG, HALF])
def test_a_value_of_any_size_and_text_is_named(mistake, named, value):
    with pytest.raises(HydraConfigError) as raised:
        mistake(value)
    text = str(raised.value)
    assert len(text.encode()) < 5000  # which half of a surrogate pair could not be
    assert named in text


def test_all_errors_keep_their_beginning_and_their_advice():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) == 8
    for kind in kinds:
        error = kind(f"batch is {LONG}; set hydra.seed")
        for same in (
            error,
            pickle.loads(pickle.dumps(error)),
            restore_error(kind.__name__, str(error)),
        ):
            assert str(same).startswith("batch is xxx")
            assert str(same).endswith("xxx; set hydra.seed")
            assert "[... 96065 characters ...]" in str(same)
            assert type(same) is kind
