"""Where tests and benchmarks of the cost models find the reference data."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_path(name: str) -> Path:
    """The reference file or folder `name`; `data/README.md` says where it comes from."""
    return REPOSITORY / "tests/data" / name


def shared_json(name: str) -> Any:
    return json.loads(shared_path(name).read_text(encoding="utf-8"))


def shared_rows(name: str) -> list[dict[str, str]]:
    with shared_path(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
