"""Processes that end right after a collective."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ending_script.py"


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_process_whose_last_collective_has_just_ended_does_not_abort():
    found = subprocess.run(
        [sys.executable, SCRIPT, "3"], capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout) == [0] * 6, found.stderr
