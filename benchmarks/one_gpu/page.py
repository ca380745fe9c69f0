"""The page of docs/ that says what one GPU showed, out of the lines that `run.py` has written.

    python -m benchmarks.one_gpu.page runs/one_gpu/results.jsonl docs/benchmarks/one_gpu.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = """# One GPU

{verdict}

`python -m benchmarks.one_gpu.run` makes it, in nine minutes on one GPU; [CONTRIBUTING](https://github.com/) says how.
"""


def make(lines: Iterable[str]) -> str:
    raise NotImplementedError
