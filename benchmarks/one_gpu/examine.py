"""The doctor on ranks that share a GPU, or on CPU ranks: what it says is what is told."""

from __future__ import annotations

import os

from benchmarks.one_gpu.device import HAS_GPU, join
from benchmarks.one_gpu.telling import tell
from ds_hydra.doctor.examination import Examination
from ds_hydra.doctor.findings import Report, Status

SECONDS = 40.0 if HAS_GPU else 10.0
SHARED = (
    "host",
    "links",
    "speed of ranks",
    "shared memory",
    "open files",
)
"""What ranks that share one device, or the cores of a CPU, cannot do well."""


def main() -> None:
    join()

    def on_hang(report: Report | None) -> None:
        if report is not None:
            tell_all(report)
        os._exit(1)

    hardware = "h100" if HAS_GPU else None
    report = Examination(on_hang, SECONDS, 60.0, hardware).run()
    tell_all(report)


def tell_all(report: Report) -> None:
    for finding in report.findings:
        found = f"{finding.status.value}: {finding.text}"
        is_well = finding.status is not Status.PROBLEM
        tell(
            f"doctor, {finding.check}", found, is_well=None if finding.check in SHARED else is_well
        )


if __name__ == "__main__":
    main()
