"""`ds-hydra report`: what a run did, as an HTML page, a trace for Perfetto, and one JSON
document.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_hydra.commands.common import AsJson, errors_to_stderr, log, print_json
from ds_hydra.errors import HydraConfigError

if TYPE_CHECKING:
    from ds_hydra.records.timeline import Timeline

PAGE, TRACE = "report.html", "perfetto.json"


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR",
            help="The hydra.run_dir of a run, or a file of timelines; two runs with --compare.",
        ),
    ],
    compare: Annotated[bool, typer.Option("--compare", help="Put two runs side by side.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The page; RUN_DIR/report.html, or compare.html here, if not given."),
    ] = None,
    perfetto: Annotated[
        bool,
        typer.Option("--perfetto", help="Also write RUN_DIR/perfetto.json for ui.perfetto.dev."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the page of a run: loss, strategies, predicted and measured times, memory, slowest
    iterations.

    The page needs no network and no other file. What the folder does not hold is left out and
    named.

    Example: ds-hydra report runs/20260101-120000 --perfetto

    Example: ds-hydra report --compare runs/before runs/after --out compare.html

    A file of ds_hydra.timeline/1 documents, one a line, as a simulation gives them, becomes a page
    of strategies and timelines.
    """
    with errors_to_stderr():
        _check_number(run_dirs, compare)
        if len(run_dirs) == 1 and run_dirs[0].is_file():
            document = _write_simulation(
                run_dirs[0], out or run_dirs[0].with_suffix(".html"), perfetto
            )
        else:
            page = run_dirs[0] / PAGE if len(run_dirs) == 1 else Path("compare.html")
            document = _write(run_dirs, out or page, perfetto)
    print_json(document) if as_json else print(_describe(document))


def _check_number(run_dirs: list[Path], compare: bool) -> None:
    wanted = 2 if compare else 1
    if len(run_dirs) == wanted:
        return
    hint = "give two runs" if compare else "give one, or two with --compare"
    raise HydraConfigError(f"{len(run_dirs)} run folders were given, expected {wanted}; {hint}")


def _write(run_dirs: list[Path], page: Path, perfetto: bool) -> dict[str, Any]:
    """Write the files; returns the document that names them."""
    from ds_hydra.report.page import describe_runs, render_runs, write_page
    from ds_hydra.report.run_folder import load_run
    from ds_hydra.report.timelines import trace_run, write_trace

    runs = [load_run(run_dir) for run_dir in run_dirs]
    for run in runs:
        for note in run.notes:
            log(f"{run.name}: {note}")
    write_page(render_runs(runs), page)
    document = {**describe_runs(runs), "page": str(page)}
    if perfetto:
        traces = [run_dir / TRACE for run_dir in run_dirs]
        for run, trace in zip(runs, traces, strict=True):
            write_trace(trace_run(run), trace)
        document["perfetto"] = [str(trace) for trace in traces]
    return document


def _write_simulation(path: Path, page: Path, perfetto: bool) -> dict[str, Any]:
    """Page and trace of the timelines in `path`."""
    from ds_hydra.report.page import describe_timelines, render_simulation, write_page
    from ds_hydra.report.timelines import trace_timelines, write_trace

    timelines = _read_timelines(path)
    num_devices = timelines[0].num_devices
    write_page(
        render_simulation(timelines, title=path.stem, subtitle=f"{num_devices} devices"), page
    )
    document = {**describe_timelines(timelines), "page": str(page)}
    if perfetto:
        trace = path.with_suffix(".perfetto.json")
        write_trace(trace_timelines(timelines), trace)
        document["perfetto"] = [str(trace)]
    return document


def _read_timelines(path: Path) -> list[Timeline]:
    from ds_hydra.configs.files import read_json_lines
    from ds_hydra.records.timeline import Timeline

    timelines = []
    for number, document in read_json_lines(path):
        if isinstance(document, HydraConfigError):
            raise document
        timelines.append(Timeline.from_json(document, source=f"{path}, line {number}"))
    if not timelines:
        raise HydraConfigError(
            f"{path} is empty; expected a ds_hydra.timeline/1 document on each line"
        )
    return timelines


def _describe(document: dict[str, Any]) -> str:
    from ds_hydra.report.charts import FEWEST

    lines = [f"page: {document['page']}"]
    lines += [
        f"trace: {path} (open it in ui.perfetto.dev or chrome://tracing)"
        for path in document.get("perfetto", [])
    ]
    if "timelines" in document:
        lines.append(
            f"{document['timelines']} timelines of {document['num_iterations']} iterations"
        )
    for run in document.get("runs", []):
        slow = run["slowest"][0]
        lines.append(
            f"{run['name']}: {run['num_iterations']} iterations, {run['tokens_per_s']:,.0f} tokens/s (median); slowest "
            f"is iteration {slow['iteration']} ({slow['iteration_ms']:,.0f} ms): {slow['causes'][0]['text']}"
        )
        if run["schemes"] and run["schemes"][0]["num_pipelines"] >= FEWEST:
            worst = run["schemes"][0]
            lines.append(
                f"{run['name']}: the profile is most wrong about {worst['scheme']}, whose pipelines took "
                f"{worst['measured_over_profiled']:.2f} times what it says ({worst['num_pipelines']} of them)"
            )
    return "\n".join(lines)
