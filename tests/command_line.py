"""Commands as tests call them, in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from ds_hydra.cli import app


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def accepted(*words: object) -> Result:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result


def document_of(*words: object) -> Any:
    """What a command prints with --json."""
    return json.loads(accepted(*words).stdout)


def refused(*words: object) -> str:
    """What a command that refuses says on stderr, where its results would go says nothing."""
    result = invoke(*words)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr
