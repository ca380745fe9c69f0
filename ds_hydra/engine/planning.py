"""How plans reach the ranks: rank 0 plans ahead, one broadcast per iteration, errors raised on all ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.agreement import join_texts, restore_error, split_texts
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler import plan_codec
from ds_hydra.sampler.background import BackgroundPlanner, PlannedIteration
from ds_hydra.sampler.batches import TokenBudgetSampler
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner import PlannerSettings, plan_iteration
from ds_hydra.simulator.cluster import find_cluster
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.link_times import LinkTimes

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

ENVELOPE_INTS = 4096
"""Integers (32 KiB) in which every plan of some hundred sequences travels at once."""

_FIRST_DEADLINE_S = 600.0
"""For the first plan, which may wait for compilation; a planning process that hangs is not waited for for ever."""


def find_link_times(
    config: HydraConfig, profile: Profile, num_ranks: int
) -> Callable[[Strategy], LinkTimes] | None:
    """Pull and push of a strategy on the hardware of `profile`; None where that has no description.

    From files alone, never from measured iterations, so that a resumed run chooses as the one before.
    """
    try:
        cluster = find_cluster(profile, num_ranks)
    except HydraConfigError as error:
        logger.info("pull and push do not count in the choice of strategies: %s", error)
        return None
    if cluster is None:
        return None
    push_share = 0.5 if config.link.gradient_dtype == "bf16" else 1.0

    def link_times(strategy: Strategy) -> LinkTimes:
        times = cluster.link_times(strategy)
        return replace(times, push_ms=push_share * times.push_ms)

    return link_times


def planner_settings(
    config: HydraConfig, profile: Profile, strategies: Sequence[Strategy], num_ranks: int
) -> PlannerSettings:
    """The planner's settings out of the validated configuration, with the links of the profile's hardware."""
    planner = config.planner
    links_of = find_link_times(config, profile, num_ranks) if len(strategies) > 1 else None
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
        link_times={strategy: links_of(strategy) for strategy in strategies} if links_of else {},
        overlaps_links=config.link.overlap,
    )


class PlanFeed:
    """Plans of the sampler's batches, `lookahead` iterations ahead of the one that trains; rank 0 only works.

    The sampler's own stream stays where training is: the feed draws ahead with `TokenBudgetSampler.draw`.
    """

    def __init__(
        self,
        sampler: TokenBudgetSampler,
        *,
        strategies: Sequence[Strategy],
        profile_of: Callable[[int], Profile],
        num_ranks: int,
        config: HydraConfig,
        plans_here: bool,
    ):
        """`profile_of(iteration)` is what an iteration is planned with, asked when it is submitted."""
        self._sampler = sampler
        self._lookahead = config.planner.lookahead
        self._ahead = sampler.state
        self._profile_of = profile_of
        profile = profile_of(sampler.state.iteration)
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

    def get(self, batch: GlobalBatch) -> PlannedIteration:
        """The plan of `batch`, which the sampler has just drawn; keeps the lookahead filled."""
        assert self._planner is not None, "only rank 0 plans"
        self._submit_until(batch.iteration + self._lookahead)
        planned = self._planner.get(batch.iteration)
        self._planner.deadline_s = self._deadline_s
        return planned

    def _submit_until(self, iteration: int) -> None:
        while self._planner is not None and self._ahead.iteration < iteration:
            batch, self._ahead = self._sampler.draw(self._ahead)
            self._planner.set_profile(self._profile_of(batch.iteration))
            self._planner.submit(batch)

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
    ) -> PlannedIteration:
        """The plan of `batch`, made here and now."""
        plan = plan_iteration(
            batch,
            strategies=strategies,
            profile=profile,
            num_devices=num_ranks,
            settings=planner_settings(config, profile, strategies, num_ranks),
        )
        return PlannedIteration(plan=plan, planning_ms=0.0, waited_ms=0.0, source="inline")


def broadcast_plan(make: Callable[[], PlannedIteration], device: torch.device) -> PlannedIteration:
    """What `make` gives on rank 0, on every rank; an error of rank 0 is raised on every rank.

    Collective over all ranks: one broadcast, and a second one for what does not fit into `ENVELOPE_INTS`.
    """
    planned, error, payload, times_us = None, None, np.empty(0, dtype=np.int64), [0, 0]
    if dist.get_rank() == 0:
        try:
            planned = make()
            payload = plan_codec.to_array(planned.plan)
            times_us = [int(planned.planning_ms * 1e3), int(planned.waited_ms * 1e3)]
        except Exception as caught:  # whatever it is, the other ranks wait for it
            error = caught
            payload = np.frombuffer(join_texts([type(error).__name__, str(error)]), dtype=np.uint8)
    header = np.array([error is not None, len(payload), *times_us], dtype=np.int64)
    (is_error, numel, planning_us, waited_us), body = _broadcast_sized(header, payload, device)
    if error is not None:
        raise error
    if is_error:
        name, text = split_texts(body[:numel].astype(np.uint8).tobytes())
        raise restore_error(name, f"rank 0: {text}")
    if planned is not None:
        return planned
    return PlannedIteration(
        plan=plan_codec.from_array(body[:numel]),
        planning_ms=planning_us / 1e3,
        waited_ms=waited_us / 1e3,
        source="worker",
    )


def _broadcast_sized(header: IntArray, payload: IntArray, device: torch.device) -> tuple[list[int], IntArray]:
    """Header and payload of rank 0 on every rank; `header[1]` is the length of the payload."""
    envelope = np.zeros(ENVELOPE_INTS, dtype=np.int64)
    room = ENVELOPE_INTS - len(header)
    envelope[: len(header)] = header
    envelope[len(header) : len(header) + min(room, len(payload))] = payload[:room]
    first = torch.from_numpy(envelope).to(device)
    dist.broadcast(first, src=0)
    received = first.cpu().numpy()
    numbers, body = received[: len(header)].tolist(), received[len(header) :]
    if numbers[1] > room:
        rest = torch.zeros(numbers[1] - room, dtype=torch.int64, device=device)
        if dist.get_rank() == 0:
            rest.copy_(torch.from_numpy(payload[room:].astype(np.int64)))
        dist.broadcast(rest, src=0)
        body = np.concatenate([body, rest.cpu().numpy()])
    return numbers, body
