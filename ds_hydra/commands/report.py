"""`ds-hydra report`: what runs did, as text, a picture, a trace for Perfetto, and one JSON
document.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_hydra.commands.common import AsJson, errors_to_stderr, log, print_json
from ds_hydra.errors import HydraConfigError

if TYPE_CHECKING:
    from ds_hydra.report.run_folder import Run

PICTURE, TRACE = "report.png", "perfetto.json"


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR",
            help="The hydra.run_dir of a run, or of several to compare.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the picture and the trace of one run, if not RUN_DIR."),
    ] = None,
    perfetto: Annotated[
        bool,
        typer.Option("--perfetto", help="Also write RUN_DIR/perfetto.json for ui.perfetto.dev."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what runs did: strategies, predicted and measured times, where the time went; draw
    RUN_DIR/report.png.

    What the folder does not hold is left out and named.

    Example: ds-hydra report runs/20260101-120000 --perfetto

    Example: ds-hydra report runs/before runs/after
    """
    with errors_to_stderr():
        document, text = _report_runs(run_dirs, out, perfetto)
    print_json(document) if as_json else print(text)


def _report_runs(
    run_dirs: list[Path], out: Path | None, perfetto: bool
) -> tuple[dict[str, Any], str]:
    """Write the files of all runs; returns the document that names them, and the text."""
    from ds_hydra.report.documents import describe_runs
    from ds_hydra.report.plots import plot_records
    from ds_hydra.report.run_folder import load_run
    from ds_hydra.report.timelines import trace_run, write_trace

    if out is not None and len(run_dirs) > 1:
        raise HydraConfigError(f"--out {out} is a folder for one run, {len(run_dirs)} were given")
    runs = [load_run(run_dir) for run_dir in run_dirs]
    document, texts = describe_runs(runs), []
    for run, run_dir, described in zip(runs, run_dirs, document["runs"], strict=True):
        folder = out or run_dir
        for note in run.notes:
            log(f"{run.name}: {note}")
        plot_records(run.records, folder / PICTURE)
        described["picture"] = str(folder / PICTURE)
        lines = [f"run {run.name}", *_describe(run)] if len(runs) > 1 else _describe(run)
        lines.append(f"picture         {folder / PICTURE}")
        if perfetto:
            write_trace(trace_run(run), folder / TRACE)
            described["perfetto"] = str(folder / TRACE)
            lines.append(f"trace           {folder / TRACE} (open it in ui.perfetto.dev)")
        texts.append("\n".join(lines))
    return document, "\n\n".join(texts)


def _describe(run: Run) -> list[str]:
    from ds_hydra.report.run_report import FEWEST, divide_time, scheme_errors

    shares = divide_time(run.records)
    total_ms = sum(getattr(shares, name) for name in shares.__slots__) or 1.0
    parts = (f"{name} {getattr(shares, name) / total_ms:.1%}" for name in shares.__slots__)
    lines = [str(run.summary), f"time            {', '.join(parts)}"]
    if learned := run.records[-1].learned:
        lines.append(f"learned         {', '.join(f'{n} {v:.2f}' for n, v in learned.items())}")
    errors = scheme_errors(run.records)
    if errors and errors[0].num_pipelines >= FEWEST:
        worst = errors[0]
        lines.append(
            f"profile         most wrong about {worst.scheme}, whose pipelines took "
            f"{worst.measured_over_profiled:.2f} times what it says ({worst.num_pipelines} of them)"
        )
    return lines
