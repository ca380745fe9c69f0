"""`ds-hydra doctor`: whether the ranks at hand can train, in minutes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from ds_hydra.commands import common

if TYPE_CHECKING:
    from ds_hydra.doctor.findings import Report


def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            *common.HARDWARE,
            help="Hardware to compare with: a shipped name (a800, h100, cpu) or a file; by the device's name "
            "if not given.",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=10, max=3600, help="For all checks; the rest is spent on looking for hangs."
        ),
    ] = 120.0,
    timeout: Annotated[
        float, typer.Option(min=5, max=1800, help="Seconds after which a step counts as hung.")
    ] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write ds_hydra.doctor/1, to attach to a bug report."),
    ] = None,
    as_json: common.AsJson = False,
    local_rank: common.LocalRank = None,
) -> None:
    """Examine the launched ranks: versions, kernels, links, gradients of a tiny model, hangs,
    memory.

    Run it under the launcher that will train, or alone for one rank. What is not well comes with
    what to do. The exit code is 1 if training would fail, hang or be wrong. Without "--log_level
    error" the launcher of DeepSpeed logs to stdout too.

    Example: deepspeed --log_level error --no_local_rank --no_python ds-hydra doctor --out
    doctor.json

    Example: torchrun --nproc-per-node 8 --no-python ds-hydra doctor --hardware h100
    """
    with common.errors_to_stderr():
        common.check_folder(out)
        stdout = os.dup(1)
        with common.stdout_to_stderr():
            # The imports take seconds.
            from ds_hydra.doctor.examination import Examination, check_launch

            check_launch()

            def on_hang(report: Report | None) -> None:
                """This process is in the middle of a collective, which never ends."""
                if report is not None:
                    with os.fdopen(stdout, "w", errors=common.SPELL_OUT) as file:
                        _print(report, out, as_json, file)
                os._exit(1)

            report = Examination(on_hang, seconds, timeout, device).run()
            is_first_rank = common.leave_ranks() == 0
        if is_first_rank:
            _print(report, out, as_json, sys.stdout)
    if report.has_problem:
        raise typer.Exit(1)


def _print(report: Report, out: Path | None, as_json: bool, file: IO[str]) -> None:
    from ds_hydra.doctor.examination import describe

    common.write_document(report.to_json(), out)
    if as_json:
        common.print_json(report.to_json(), file)
    else:
        print(describe(report), file=file, flush=True)
