"""What an examination of the ranks found, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

REPORT_SCHEMA = "ds_hydra.doctor/1"


class Status(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `advice` says what to do where it is not well."""

    check: str
    status: Status
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def judge(
        cls, check: str, text: str, *, is_well: bool, advice: str, figures: Mapping[str, Any]
    ) -> Finding:
        """A check that ends well, or with a warning and its advice."""
        if is_well:
            return cls(check=check, status=Status.OK, text=text, figures=figures)
        return cls(check=check, status=Status.WARNING, text=text, advice=advice, figures=figures)

    def to_json(self) -> dict[str, Any]:
        """As in `ds_hydra.doctor/1`."""
        return {
            "check": self.check,
            "status": self.status.value,
            "text": self.text,
            "advice": self.advice,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings of an examination, in the order of its checks."""

    findings: Sequence[Finding]
    seconds: float

    @property
    def has_problem(self) -> bool:
        """Whether training would fail, hang or be wrong here."""
        return any(finding.status is Status.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The `ds_hydra.doctor/1` document."""
        return {
            "schema": REPORT_SCHEMA,
            "is_well": not self.has_problem,
            "seconds": round(self.seconds, 1),
            "findings": [finding.to_json() for finding in self.findings],
        }
