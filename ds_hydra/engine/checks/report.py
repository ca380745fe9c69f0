"""What a check of a configuration is asked, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hydra.strategy import Profile

CHECK_SCHEMA = "ds_hydra.check/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What to check, and what is known beside the file. `model`, `profile`, `device`, `histogram`:
    names or paths.
    """

    config: Path | Mapping[str, Any]
    model: str | None = None
    num_devices: int | None = None
    profile: str | None = None
    device: str | None = None
    histogram: str | None = None


@dataclass(slots=True)
class ConfigReport:
    """What was found. `problems` would stop a run; `warnings` would not; `assumed` is what nobody
    has said.

    `schemes` has a row for each scheme: MaxLen, bytes of the states, bytes with a full row of
    `micro_batch_tokens`.
    """

    num_devices: int = 0
    context_length: int = 0
    tokens_per_iteration: int = 0
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    profiled: list[str] = field(default_factory=list)
    filled_in: list[str] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)
    """Of the model: all, those of one token, those of embedding and head."""
    profile: str | None = None
    memory_bytes: int | None = None
    schemes: list[dict[str, Any]] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    strategies_source: str = ""
    communicators: dict[str, int] = field(default_factory=dict)
    known_profile: Profile | None = field(default=None, repr=False)
    """What the rows of `schemes` were made of; not in the document."""
    home: dict[str, int] = field(default_factory=dict)
    """Of streamed layers: ranks that share it, bytes of each."""

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.check/1` document."""
        names = self.__dataclass_fields__.keys() - {"known_profile"}
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name in names}
        return {"schema": CHECK_SCHEMA, "ok": not self.problems, **fields}
