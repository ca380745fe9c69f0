"""The row of all tables of refusals: a setting, method or part of a model that ds_hydra does not
honour, why, and what to do instead.

A table says what is refused, or what has no effect. One test walks every table by its examples
(`tests/test_refusals.py`), and the documentation prints them (`docs/reference/refusals.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ds_hydra.errors import HydraConfigError


@dataclass(frozen=True, slots=True)
class Refusal:
    """Setting that is not honoured where `applies` to its value, or where it is set at all.

    `text` is the reason and, behind the first semicolon, the advice. `example` is a value that is
    refused, `works` one that the advice names; None where it is to leave the setting out.
    """

    name: str
    text: str
    example: Any = True
    works: Any = None
    applies: Callable[[Any], bool] | None = None

    @property
    def reason(self) -> str:
        """Text up to its first semicolon, for tables."""
        return self.text.partition("; ")[0]

    @property
    def advice(self) -> str:
        """Text behind the reason, which says what to write instead; "" where nothing is to do."""
        return self.text.partition("; ")[2]

    def describe(self, value: Any) -> str:
        """Sentence on `name` with this value, as Python writes it."""
        return f"{self.name}={value!r}: {self.text}"

    def applies_to(self, value: Any) -> bool:
        """Whether a value that somebody has set is not honoured."""
        return self.applies is None or self.applies(value)

    def find_problem(self, value: Any, default: Any = None) -> str | None:
        """Sentence on this value; None where it is honoured."""
        applies = self.applies(value) if self.applies else is_set(value, default)
        return self.describe(value) if applies else None


def refuse_all(header: str, problems: Iterable[str]) -> None:
    """Raise HydraConfigError with every one of `problems` under the `header`, where there are
    any.
    """
    if found := list(problems):
        raise HydraConfigError("\n  ".join([header, *found]))


def each(names: str, text: str, example: Any = True) -> tuple[Refusal, ...]:
    """Rows of several `names`, which blanks separate, with one text."""
    return tuple(Refusal(name, text, example) for name in names.split())


def is_set(value: Any, default: Any = None) -> bool:
    """Whether a value says something else than the default; "", [], None and False all say no."""
    return bool(value != default and (value or default))
