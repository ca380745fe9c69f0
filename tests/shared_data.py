"""Where tests and benchmarks of the cost models find the reference data."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def find_shared(name: str) -> Path | None:
    """The reference file `name`, under $DS_HYDRA_SHARED or `../shared` beside the repository."""
    shared = Path(os.environ.get("DS_HYDRA_SHARED", REPOSITORY.parent / "shared"))
    path = shared / "data" / name
    return path if path.exists() else None


def shared_path(name: str) -> Path:
    """The same; skips the test where the data is absent."""
    path = find_shared(name)
    if path is None:
        pytest.skip(f"reference data {name} is absent; set DS_HYDRA_SHARED to the folder that holds data/")
    return path


def shared_json(name: str) -> Any:
    return json.loads(shared_path(name).read_text(encoding="utf-8"))


def shared_rows(name: str) -> list[dict[str, str]]:
    with shared_path(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
