"""How a step tells what it found: a line of JSON on stdout for each case; `run.py` collects."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

START = '{"case": '
"""Begins every line of these; libraries write to stdout, too."""


def tell(case: str, found: Any, *, wanted: str = "", is_well: bool | None = None) -> None:
    """`found` of `case`: a number, a text, or numbers by name. `is_well` None: nothing to judge."""
    line = {"case": case, "found": _plain(found), "wanted": wanted, "is_well": is_well}
    print(json.dumps(line), flush=True)


def at_most(case: str, found: float, limit: float) -> None:
    """A number that shall not be above `limit`; one that is none is not well."""
    tell(case, found, wanted=f"at most {limit:g}", is_well=found <= limit)


def skip(case: str, why: str) -> None:
    """`case` is not tried here."""
    print(json.dumps({"case": case, "skipped": why}), flush=True)


@contextmanager
def trying(case: str) -> Iterator[None]:
    """What is raised inside is the finding of `case`, and the next case is tried."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        tell(case, text, wanted="no error", is_well=False)


def _plain(found: Any) -> Any:
    """JSON has neither NaN nor more digits than anybody reads."""
    if isinstance(found, dict):
        return {str(key): _plain(value) for key, value in found.items()}
    if isinstance(found, float):
        return float(f"{found:.4g}") if math.isfinite(found) else str(found)
    return found
