"""Values that were measured, by name: kept in a file while a profile runs, so that a run cut short
continues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_hydra.configs.files import read_json_object
from ds_hydra.engine.ranks.agreement import broadcast_text, run_together
from ds_hydra.errors import HydraConfigError

_SCHEMA = "ds_hydra.measurements/1"


class Measurements:
    """Measured numbers by name, equal on all ranks; rank 0 writes each to the file as it comes."""

    def __init__(
        self,
        values: Mapping[str, float] | None = None,
        *,
        path: Path | None = None,
        identity: Mapping[str, Any] | None = None,
    ):
        self._values = dict(values or {})
        self._path = path
        self._identity = dict(identity or {})
        self.num_found = len(self._values)
        """How many values were known from the start."""

    @classmethod
    def open(
        cls, path: Path | None, identity: Mapping[str, Any], device: torch.device
    ) -> Measurements:
        """Continue `path` where it exists; rank 0 reads and writes it. Collective over all ranks.

        `identity` says what is measured. Raises HydraConfigError on all ranks for a file that
        cannot be read or belongs to something else, naming what differs.
        """
        path = path if dist.get_rank() == 0 else None

        def read() -> dict[str, float]:
            return _read(path, identity) if path is not None and path.exists() else {}

        found = run_together(read, device)
        (text,) = broadcast_text([json.dumps(found)], 0, device)
        return cls(json.loads(text), path=path, identity=identity)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, measure: Callable[[], float]) -> float:
        """The value called `name`, measured now if it is not known; `measure` is collective, equal
        on all ranks.
        """
        if name not in self._values:
            self._values[name] = measure()
            self._write()
        return self._values[name]

    def value(self, name: str) -> float:
        """The value called `name`, which is known."""
        return self._values[name]

    def _write(self) -> None:
        if self._path is None:
            return
        document = {
            "schema": _SCHEMA,
            "digest": _digest(self._identity),
            "identity": self._identity,
            "values": self._values,
        }
        partial = self._path.with_name(self._path.name + ".writing")
        partial.write_text(json.dumps(document), encoding="utf-8")
        partial.replace(self._path)


def _read(path: Path, identity: Mapping[str, Any]) -> dict[str, float]:
    try:
        document = read_json_object(path)
        found, digest = document["identity"], document["digest"]
        values = {str(name): float(value) for name, value in document["values"].items()}
        is_whole = document["schema"] == _SCHEMA and digest == _digest(found)
        is_whole = is_whole and all(isfinite(value) and value >= 0 for value in values.values())
    except (HydraConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HydraConfigError(
            f"cannot continue {path}: {error!r}; remove it to measure from the start"
        ) from error
    if not is_whole:
        raise HydraConfigError(
            f"cannot continue {path}: it is no whole {_SCHEMA} of values from 0 up; remove it to start anew"
        )
    if digest != _digest(identity):
        raise HydraConfigError(
            f"{path} continues another profile: {_differences(found, identity)}; remove it, or give --out "
            "another name"
        )
    return values


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return ", ".join(
        f"{name} {found.get(name)!r} instead of {wanted.get(name)!r}" for name in names
    )
