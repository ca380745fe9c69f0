"""Examples in docstrings print what they say; docstrings begin with a noun or a verb."""

from __future__ import annotations

import ast
import doctest
import importlib

import pytest
from shared_data import REPOSITORY

HEADLESS = frozenset(
    """
    After As At Before Beside Between By For From In Inside Of On Than To Until With Without
    How That Those What When Where Which While Who Whose Why
    """.split()  # noqa: SIM905
)
"""First words that name neither a value nor an action: prepositions and relative words."""

ALLOWED_PER_THOUSAND = 20


def modules_with_examples():
    for path in sorted((REPOSITORY / "ds_hydra").rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            yield ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_print_what_they_say(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


def docstrings(source):
    """Line and text of each docstring: of modules, classes, functions, fields, constants."""
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for statement in body if isinstance(body, list) else ():
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value.strip()


def is_headless(docstring):
    return docstring.split(maxsplit=1)[0].rstrip(",:;") in HEADLESS


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Bytes of a shard."""', 0),
        ('"""What a shard has."""', 1),
        ('class A:\n    """A shard."""\n    b: int\n    """Of a shard: bytes."""', 1),
        ('def f():\n    """In bytes."""\n    if g:\n        c = 1\n        """As many as d."""', 2),
        ('a = """What a text has is not looked at."""', 0),
    ],
)
def test_docstrings_without_a_head_are_found(source, count):
    assert sum(is_headless(text) for _, text in docstrings(source)) == count


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = [
        (f"{path.relative_to(REPOSITORY)}:{line}", text)
        for path in sorted((REPOSITORY / "ds_hydra").rglob("*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
    ]
    headless = [f"{where}: {text.splitlines()[0]}" for where, text in found if is_headless(text)]
    assert len(found) > 1000
    assert len(headless) <= len(found) * ALLOWED_PER_THOUSAND // 1000, "\n".join(["", *headless])
