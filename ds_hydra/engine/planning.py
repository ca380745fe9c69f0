"""How plans reach the ranks: rank 0 plans ahead, one broadcast per iteration, errors raised on all
ranks.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.ranks.agreement import broadcast_bytes, restore_error
from ds_hydra.sampler.background import BackgroundPlanner, PlannedIteration
from ds_hydra.sampler.candidate_set import gradient_bytes
from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner import plan_iteration
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.profiles.corrections import Corrections

logger = logging.getLogger(__name__)

_FIRST_DEADLINE_S = 600.0
"""For the first plan, which may wait for compilation; a planning process that hangs is not waited
for for ever.
"""


def planner_settings(
    config: HydraConfig, profile: Profile, strategies: Sequence[Strategy], num_ranks: int
) -> PlannerSettings:
    """The planner's settings out of the validated configuration, with the links of the profile's
    hardware.
    """
    planner = config.planner
    is_choice = len(strategies) > 1
    cluster = try_cluster(profile, num_ranks, gradient_bytes(config)) if is_choice else None
    return PlannerSettings(
        objective=planner.objective,
        dispatch=planner.dispatch,
        num_trials=planner.num_trials,
        seed=config.seed,
        # Backward takes twice the forward, and recomputes it first under activation checkpointing.
        forward_fraction=1 / 4 if config.activation_checkpointing else 1 / 3,
        solver=planner.solver,
        solver_gap=planner.gap_tolerance,
        solver_deadline_s=planner.time_limit_ms / 1e3,
        link_times={s: cluster.link_times(s) for s in strategies} if cluster else {},
        overlaps_links=config.link.overlap,
    )


class PlanFeed:
    """Plans of the sampler's batches, `lookahead` iterations ahead of the one that trains; rank 0
    only works.

    The sampler's own stream stays where training is: the feed draws ahead with
    `TokenBudgetSampler.draw`, and nobody else draws: all ranks go on past what its plans hold.
    """

    def __init__(
        self,
        sampler: TokenBudgetSampler,
        *,
        strategies: Sequence[Strategy],
        profile: Profile,
        corrections_for: Callable[[int], Corrections],
        num_ranks: int,
        config: HydraConfig,
        plans_here: bool,
    ):
        """`corrections_for(iteration)` of the profile are asked for when it is submitted."""
        self._sampler = sampler
        self._lookahead = config.planner.lookahead
        self._ahead = sampler.state
        self._corrections_for = corrections_for
        deadline_ms = config.planner.deadline_ms
        self._deadline_s = threading.TIMEOUT_MAX if deadline_ms is None else deadline_ms / 1e3
        self._planner = (
            BackgroundPlanner(
                strategies=strategies,
                profile=profile,
                num_devices=num_ranks,
                settings=planner_settings(config, profile, strategies, num_ranks),
                num_workers=config.planner.num_workers,
                lookahead=config.planner.lookahead,
                deadline_s=_FIRST_DEADLINE_S,
            )
            if plans_here
            else None
        )
        self._submit_until(self._ahead.iteration + self._lookahead)

    def get(self, iteration: int) -> PlannedIteration:
        """The plan of the next iteration; keeps the lookahead filled."""
        assert self._planner is not None, "only rank 0 plans"
        self._submit_until(iteration + self._lookahead)
        planned = self._planner.get(iteration)
        self._planner.deadline_s = self._deadline_s
        return planned

    def peek(self, iteration: int) -> dict[str, Any] | None:
        """The document of a plan that is made and not yet asked for by `get`, else None."""
        return None if self._planner is None else self._planner.peek(iteration)

    def _submit_until(self, iteration: int) -> None:
        while self._planner is not None and self._ahead.iteration < iteration:
            batch, self._ahead = self._sampler.draw(self._ahead)
            self._planner.submit(batch, self._corrections_for(batch.iteration))

    def close(self) -> None:
        """Stop the planning processes."""
        if self._planner is not None:
            self._planner.close()

    @staticmethod
    def plan_now(
        batch: GlobalBatch,
        strategies: Sequence[Strategy],
        profile: Profile,
        num_ranks: int,
        config: HydraConfig,
        corrections: Corrections,
        *,
        forward_only: bool = False,
    ) -> PlannedIteration:
        """The plan of `batch`, made here and now."""
        settings = planner_settings(config, profile, strategies, num_ranks)
        if forward_only:
            # What a checkpointed layer takes while it runs is in no profile
            holds_longer = not config.activation_checkpointing
            profile = profile.forward_only(settings.forward_fraction, holds_longer=holds_longer)
            pulls = {s: replace(links, push_ms=0.0) for s, links in settings.link_times.items()}
            settings = replace(settings, link_times=pulls)
        plan = plan_iteration(
            batch,
            strategies=strategies,
            profile=profile,
            num_devices=num_ranks,
            settings=settings,
            corrections=corrections,
        )
        return PlannedIteration(
            plan=plan, planning_ms=0.0, waited_ms=0.0, source="inline", corrections=corrections
        )


def broadcast_plan(make: Callable[[], PlannedIteration], device: torch.device) -> PlannedIteration:
    """What `make` gives on rank 0, on every rank; an error of rank 0 is raised on every rank.

    Collective over all ranks.
    """

    def make_both() -> tuple[PlannedIteration, dict[str, Any]]:
        planned = make()
        return planned, planned.to_json()

    planned, document = _broadcast(make_both, device)
    return PlannedIteration.from_json(document) if planned is None else planned


def broadcast_plans(
    feed: PlanFeed,
    iteration: int,
    known: Callable[[], PlannedIteration] | None,
    device: torch.device,
) -> tuple[PlannedIteration, dict[str, Any] | None]:
    """The plan of `iteration`, which every rank has as `known` if it was sent before, and the
    document of the next one where that is ready. Errors as in `broadcast_plan`.

    Collective over all ranks.
    """

    def make() -> tuple[PlannedIteration, dict[str, Any]]:
        planned = feed.get(iteration)
        this = planned.to_json() if known is None else {"waited_ms": planned.waited_ms}
        return planned, {"this": this, "next": feed.peek(iteration + 1)}

    planned, document = _broadcast(make, device)
    if planned is None:
        this = document["this"]
        planned = PlannedIteration.from_json(this) if known is None else replace(known(), **this)
    return planned, document["next"]


def _broadcast(
    make: Callable[[], tuple[PlannedIteration, dict[str, Any]]], device: torch.device
) -> tuple[PlannedIteration | None, dict[str, Any]]:
    """On rank 0 what `make` gives, on the others None and its document. An error of rank 0 is
    raised on every rank.
    """
    planned, error = None, None
    document: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            planned, document = make()
        except Exception as caught:  # whatever it is, the other ranks wait for it
            error = caught
            document = {"error": [type(error).__name__, str(error)]}
    received = broadcast_bytes(json.dumps(document, separators=(",", ":")).encode(), 0, device)
    if error is not None:
        raise error
    if planned is not None:
        return planned, document
    document = json.loads(received)
    if "error" in document:
        name, text = document["error"]
        raise restore_error(name, f"rank 0: {text}")
    return None, document
