"""Examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest
from shared_data import REPOSITORY


def modules_with_examples():
    for path in sorted((REPOSITORY / "ds_hydra").rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            yield ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_print_what_they_say(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0
