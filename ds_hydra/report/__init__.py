"""What a run did: summary and picture of its metrics."""

from ds_hydra.report.run_plot import plot_run
from ds_hydra.report.run_report import RunSummary, summarize_run

__all__ = ["RunSummary", "plot_run", "summarize_run"]
