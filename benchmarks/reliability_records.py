"""Measurements of reliability.py, kept after each so that an interrupted run goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults


class Records:
    """What was measured, one JSON object a line."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._path = folder / "records.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.all = faults.read_json_lines(self._path) if self._path.exists() else []

    def of(self, part: str) -> list[dict[str, Any]]:
        return [record for record in self.all if record["part"] == part]

    def measure(
        self, part: str, keys: dict[str, Any], action: Callable[[], dict[str, Any]]
    ) -> None:
        """Record `action()` under `keys`, unless that is there already."""
        known = {"part": part, **keys}
        if any(known.items() <= record.items() for record in self.of(part)):
            return
        begin = time.monotonic()
        record = {**known, **action()}
        self.all.append(record)
        faults.append_json(self._path, record)
        print(
            f"{time.monotonic() - begin:6.1f} s  {json.dumps(record)[:200]}",
            file=sys.stderr,
            flush=True,
        )


STRATEGIES_OF_2 = ("2x<1,1>", "1x<2,1>", "1x<1,2>", "2x<1,1;stream>", "1x<2,1;stream>")
