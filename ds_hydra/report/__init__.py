"""Report of a run: summary, picture, document and trace of its run folder."""

from ds_hydra.report.plots import plot_run
from ds_hydra.report.run_folder import load_run
from ds_hydra.report.run_report import RunSummary, summarize_run

__all__ = ["RunSummary", "load_run", "plot_run", "summarize_run"]
