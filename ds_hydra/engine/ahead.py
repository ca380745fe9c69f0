"""The next iteration's plan and rows, sent and fetched while this one runs on an accelerator, whose
host would otherwise fetch them while the device has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ds_hydra.engine.model.micro_batches import Example
from ds_hydra.engine.planning import PlanFeed, broadcast_plans
from ds_hydra.engine.transfer.link_thread import LinkThread
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.plan import IterationPlan

Rows = dict[int, Example]
"""By position in the plan."""


@dataclass
class _Next:
    """An iteration to come, as a thread finds it."""

    iteration: int
    document: Mapping[str, Any]
    job: Future[None] | None = None
    planned: PlannedIteration | None = None
    rows: Rows | None = None
    error: Exception | None = None

    def get_plan(self) -> PlannedIteration:
        assert self.job is not None
        self.job.result()
        assert self.planned is not None
        return self.planned

    def get_rows(self) -> Rows:
        if self.error is not None:
            raise self.error
        assert self.rows is not None
        return self.rows


class Ahead:
    """One iteration ahead of a feed: `begin` says what this iteration is, `go_on` has a thread
    fetch the rows of the next one, where its plan was ready. `fetch` gives a plan's rows that this
    rank needs.
    """

    def __init__(self, fetch: Callable[[IterationPlan], Rows], device: torch.device):
        self._fetch, self._device = fetch, device
        self._thread = LinkThread(torch.device("cpu"), overlap=True)
        self._next: _Next | None = None

    def begin(self, feed: PlanFeed, iteration: int) -> tuple[PlannedIteration, Callable[[], Rows]]:
        """The plan of `iteration`, and what returns the rows of it or raises what fetching them
        raised. Collective over all ranks.
        """
        held, self._next = self._next, None
        if held is not None and (held.job is None or held.iteration != iteration):
            held = None
        known = None if held is None else held.get_plan
        planned, document = broadcast_plans(feed, iteration, known, self._device)
        if document is not None:
            self._next = _Next(iteration + 1, document)
        if held is not None:
            held.get_plan()
            return planned, held.get_rows
        return planned, lambda: self._fetch(planned.plan)

    def go_on(self) -> None:
        """Fetch what comes next, beside this iteration. Not collective."""
        if self._next is not None:
            coming = self._next
            coming.job = self._thread.submit(lambda: self._find(coming))

    def forget(self) -> None:
        """Other plans will come; all ranks call it together."""
        self._next = None

    def close(self) -> None:
        """End the thread; not collective."""
        self._thread.close()

    def _find(self, coming: _Next) -> None:
        coming.planned = PlannedIteration.from_json(coming.document)
        try:
            coming.rows = self._fetch(coming.planned.plan)
        except Exception as error:  # raised when the iteration comes
            coming.error = error
