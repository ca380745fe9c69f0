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
        cls,
        check: str,
        text: str,
        *,
        is_well: bool,
        advice: str,
        figures: Mapping[str, Any],
        otherwise: Status = Status.WARNING,
    ) -> Finding:
        """A check that ends well, or as `otherwise` says and with its advice."""
        status, advice = (Status.OK, "") if is_well else (otherwise, advice)
        return cls(check=check, status=status, text=text, advice=advice, figures=figures)

    @classmethod
    def of_unknown_hardware(cls, check: str, text: str, figures: Mapping[str, Any]) -> Finding:
        """A figure that no description of hardware says anything about."""
        return cls(
            check=check,
            status=Status.SKIPPED,
            text=f"{text}; nothing to compare with",
            advice="--device NAME (a shipped hardware description, or a file of your own)",
            figures=figures,
        )

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
