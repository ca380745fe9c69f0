"""Report of a run: summary, picture, and page of its run folder."""

from ds_hydra.report.page import render_runs, render_simulation, write_page
from ds_hydra.report.plots import plot_run
from ds_hydra.report.run_folder import load_run
from ds_hydra.report.run_report import RunSummary, summarize_run

__all__ = [
    "RunSummary",
    "load_run",
    "plot_run",
    "render_runs",
    "render_simulation",
    "summarize_run",
    "write_page",
]
