"""Common inputs of the systems of a comparison, and the measures of each.

All systems see the same global batches, the same T, memory model, interconnects and overlap.
Micro-batches have varlen attention everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ds_hydra.lab.simulator.events import (
    Simulation,
    pipeline_work,
    simulate_iteration,
    simulate_plan,
)
from ds_hydra.lab.simulator.fixed_length import MicroBatches
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.schedule import (
    MAX_BALANCED_MICRO_BATCHES,
    FloatArray,
    IntArray,
    balance_micro_batches,
)
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.profiles.profile import NO_LINKS, LatencyModel, LinkTimes
from ds_hydra.strategy.proposal.program import homogeneous_strategies, usable_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

WITHOUT_PROGRAMS = PlannerSettings(solver="none")
"""The planner without integer programs: seconds less for each plan, and the same for every planned
system.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Measures of an iteration whose passes are not simulated. `iteration_ms` has pull, push,
    switches and step in it.
    """

    propagation_ms: float
    iteration_ms: float
    imbalance: float
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SystemResult:
    """One system over all global batches; arrays have one entry for each. `strategy` names the
    choice.
    """

    name: str
    strategy: str
    propagation_ms: FloatArray
    iteration_ms: FloatArray
    imbalance: FloatArray
    bubble: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(World):
    """Common inputs of all systems: the global batches and where they run.

    `overlap`: whether pull and push hide behind propagation, layer by layer. `hpz`: systems on
    ZeRO-3 keep weights that have crossed between nodes (`zero_hpz_partition_size` of DeepSpeed).
    """

    batches: tuple[GlobalBatch, ...] = ()
    overlap: bool = True
    hpz: bool = False
    settings: PlannerSettings = WITHOUT_PROGRAMS
    _sorted: list[IntArray] = field(default_factory=list, init=False, compare=False)

    @property
    def lengths(self) -> list[IntArray]:
        """Lengths of every global batch, descending."""
        if not self._sorted:
            self._sorted.extend(
                np.sort(np.array(b.lengths, dtype=np.int64))[::-1] for b in self.batches
            )
        return self._sorted

    def statics(self) -> tuple[Strategy, ...]:
        """Homogeneous strategies of <TP,PP> that fit the context."""
        return homogeneous_strategies(self)

    def plan(self, batch: GlobalBatch, strategies: Sequence[Strategy]) -> IterationPlan:
        """The plan of ds_hydra's planner."""
        return plan_iteration(
            batch,
            strategies=strategies,
            profile=self.profile,
            num_devices=self.num_devices,
            settings=self.linked_settings(strategies),
        )

    def planned_outcome(
        self, strategy: Strategy, number: int, *, is_heuristic: bool = False
    ) -> Simulation:
        """Global batch `number` with `strategy`, as planned, or as the planner's heuristic has
        it.
        """
        planner = replace(self, settings=self.settings.heuristic()) if is_heuristic else self
        return self.simulate(planner.plan(self.batches[number], [strategy]))

    def linked_settings(self, strategies: Sequence[Strategy]) -> PlannerSettings:
        """The planner's settings with times of pull and push of `strategies` here."""
        if self.cluster is None:
            return self.settings
        times = {strategy: self.links(strategy) for strategy in strategies}
        return replace(self.settings, link_times=times, overlaps_links=self.overlap)

    def links(self, strategy: Strategy, *, is_fully_sharded: bool = True) -> LinkTimes:
        """Pull and push of `strategy`; nothing where interconnects are not known."""
        if self.cluster is None:
            return NO_LINKS
        return self.cluster.link_times(strategy, is_fully_sharded=is_fully_sharded)

    def simulate(self, plan: IterationPlan) -> Simulation:
        """The iteration that carries out `plan`."""
        return simulate_plan(
            plan,
            self.profile,
            self.cluster,
            links_of=self.links,
            overlap=self.overlap,
        )

    def run_micro_batches(
        self,
        strategy: Strategy,
        lengths: IntArray,
        micro_batches: Sequence[MicroBatches],
        *,
        overlap: bool = True,
    ) -> Simulation:
        """A homogeneous strategy whose pipelines run `micro_batches`, states sharded over its
        replicas.
        """
        latency = self.profile.get_latency(strategy.schemes[0])
        work = latency.sequences_ms(lengths)
        return self.run_times(
            strategy,
            [
                np.array([packed_ms(latency, work[m]) for m in own], dtype=np.float64)
                for own in micro_batches
            ],
            [[int(lengths[m].sum()) for m in own] for own in micro_batches],
            overlap=overlap,
        )

    def run_times(
        self,
        strategy: Strategy,
        times_ms: Sequence[FloatArray],
        tokens: Sequence[Sequence[int]],
        *,
        overlap: bool = True,
    ) -> Simulation:
        """A homogeneous strategy whose pipelines have micro-batches of these times in each stage
        and so many tokens, states sharded over its replicas.
        """
        return simulate_iteration(
            [
                pipeline_work(strategy.schemes[0], ranks, times, own, self.cluster)
                for ranks, times, own in zip(strategy.place(), times_ms, tokens)
            ],
            num_devices=self.num_devices,
            links=self.links(strategy, is_fully_sharded=False),
            overlap=self.overlap and overlap,
            num_layers=self.profile.memory.num_layers,
        )


NO_WORK = Outcome(propagation_ms=0.0, iteration_ms=0.0, imbalance=0.0, bubble=0.0)


def packed_ms(latency: LatencyModel, sequences_ms: FloatArray) -> float:
    """T of a packed micro-batch whose sequences add these times."""
    return float(max(sequences_ms.sum() + latency.constant_ms, latency.traffic_ms))


def summarize(name: str, strategy: str, outcomes: Sequence[Outcome | Simulation]) -> SystemResult:
    """The outcomes of all global batches as arrays."""
    columns = {
        key: np.array([getattr(outcome, key) for outcome in outcomes])
        for key in ("propagation_ms", "iteration_ms", "imbalance", "bubble")
    }
    return SystemResult(name=name, strategy=strategy, **columns)


def best_of(results: Iterable[SystemResult]) -> SystemResult | None:
    """The fastest of several choices, by whole iterations; None without any."""
    return min(results, key=lambda result: float(result.iteration_ms.mean()), default=None)


NUM_TRIAL_BATCHES, NUM_FINALISTS = 12, 3
"""Numbers of trials where a choice takes long: global batches that all are tried on, and how many
of the best run all of them.
"""
PARTIAL = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the layers that activation checkpointing computes again, for systems that choose."""


def recomputing(scenario: Scenario) -> tuple[Scenario, tuple[Scheme, ...]]:
    """Every <TP,PP> with `PARTIAL` layers computed again, if the profile says what these keep, and
    a scenario that knows their T.
    """
    return priced(scenario, _recomputed(scenario, usable_schemes(scenario)))


def _recomputed(scenario: Scenario, schemes: Iterable[Scheme]) -> Iterator[Scheme]:
    memory = scenario.profile.memory
    shares = PARTIAL if memory.input_bytes else (0.0,)
    counts = [math.ceil(memory.num_layers * share) for share in shares]
    return (replace(scheme, ckpt=n) for scheme in schemes for n in counts)


def priced(scenario: Scenario, schemes: Iterable[Scheme]) -> tuple[Scenario, tuple[Scheme, ...]]:
    """Price those of `schemes` that fit the devices. Returns a scenario that knows their prices,
    and the schemes that have one.
    """
    distinct = dict.fromkeys(s for s in schemes if s.num_devices <= scenario.num_devices)
    found = [s for s in distinct if scenario.costs.find(s)]
    wider = scenario.knowing(scenario.costs.extended(found))
    return wider, tuple(s for s in found if wider.has_room(s))


_PRECISION = 1e-4
"""Relative width of the interval in which a bound is left by its bisection."""
_ROUNDING = 1e-9
"""Tolerance that keeps bounds valid."""
_COUNTS = np.arange(1, MAX_BALANCED_MICRO_BATCHES + 1)
"""Micro-batches of a pipeline, for which the best division is known."""
_PRICES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Prices of a device's memory in a step, as shares of the time of the step."""


class _Family:
    """Schemes that one strategy may have, all that gather or all others, on a global batch.

    Within M a sequence runs on schemes alone where it ends within M by itself, and there takes a
    share of each device of its group. Whatever the division, these shares, of the scheme where they
    are least, are no more than devices have. A group also has a constant for each micro-batch,
    which is a part of its work at least as large as in a micro-batch that lasts all of M, and the
    bubble of its stages; or constants as full micro-batches have them.

    Layers are gathered in steps of all devices. Each has at least the least constant, and memory
    says what it holds, so in few steps sequences run on schemes that keep less: at any price of
    memory, what sequences take of time and memory is no more than devices have of both (as in
    `sampler/planner/bounds.py`).
    """

    def __init__(self, scenario: Scenario, lengths: FloatArray, schemes: Sequence[Scheme]) -> None:
        latency = [scenario.profile.get_latency(scheme) for scheme in schemes]
        self._constant = np.array([[t.constant_ms] for t in latency])
        traffic = np.array([[t.hpz_traffic_ms or t.traffic_ms] for t in latency])
        devices = np.array([[scheme.num_devices] for scheme in schemes])
        held = np.array([[scenario.max_len_tokens(scheme)] for scheme in schemes])
        work = np.array([t.sequences_ms(lengths) for t in latency])
        stages = np.array([[scheme.pp] for scheme in schemes])
        self._ratio = np.array(
            [balance_micro_batches(scheme.pp).ratio[_COUNTS] for scheme in schemes]
        )
        self._num_devices, self._gathers = scenario.num_devices, schemes[0].gather
        # [scheme, sequence], of all devices
        passes = np.maximum(work + self._constant, traffic) * stages
        self._alone_ms = np.where(lengths <= held, passes, np.inf)
        self._work_ms, self._memory = work * devices, lengths * devices / held
        self._full_ms = self._work_ms + self._constant * self._memory
        self._least_ms = float(self._constant.min())
        self._step_ms = max(self._least_ms, float(traffic.min()))
        self._num_steps = max(1, math.ceil(self._memory.min(axis=0).sum() / self._num_devices))

    def bound_ms(self) -> float:
        """The least M that is not proved impossible; infinite where a sequence fits nowhere."""
        alone_ms = float(self._alone_ms.min(axis=0).max())
        low = max(alone_ms, float(self._least_full_ms().sum()) / self._num_devices)
        if np.isinf(low) or not self._is_impossible(low):
            return low
        high = 2 * low
        while self._is_impossible(high):
            low, high = high, 2 * high
        while low < high * (1 - _PRECISION):
            middle = (low + high) / 2
            low, high = (middle, high) if self._is_impossible(middle) else (low, middle)
        return low

    def _least_full_ms(self) -> FloatArray:
        """Least time of all devices for each sequence in full micro-batches, [sequence]."""
        fitting = np.where(np.isfinite(self._alone_ms), self._full_ms, np.inf)
        least: FloatArray = fitting.min(axis=0)
        return least

    def _is_impossible(self, limit_ms: float) -> bool:
        if not self._gathers:
            # Most work of a pipeline within the limit, with the best number of micro-batches
            most = (limit_ms / self._ratio - _COUNTS * self._constant).max(axis=1, keepdims=True)
            shares = (self._full_ms, self._longer(limit_ms, most))
            return any(self._is_short(limit_ms, limit_ms, own) for own in shares)
        steps = self._num_steps
        while True:
            step_ms = limit_ms - (steps - 1) * self._step_ms
            own = self._longer(step_ms - self._least_ms, step_ms - self._constant)
            there_ms = limit_ms - steps * self._least_ms
            if self._is_short(step_ms, there_ms, own):  # and so are more steps
                return True
            if not any(
                self._is_short(step_ms, there_ms + price * steps, own + price * self._memory)
                for price in np.multiply(_PRICES, step_ms)
            ):
                return False
            steps += 1

    def _longer(self, whole_ms: float, most_ms: FloatArray) -> FloatArray:
        """Work with what else takes devices where they work `most_ms` of `whole_ms`."""
        is_any = most_ms > 0
        longer = self._work_ms * (whole_ms / np.where(is_any, most_ms, 1.0))
        return np.where(is_any, longer, np.inf)

    def _is_short(self, step_ms: float, there_ms: float, shares: FloatArray) -> bool:
        """Whether each device has less than its part of the `shares`, of schemes where sequences
        end within `step_ms`.
        """
        least = np.where(self._alone_ms <= step_ms, shares, np.inf).min(axis=0)
        return bool(least.sum() > there_ms * self._num_devices * (1 + _ROUNDING))


def perfect_balance_ms(
    scenario: Scenario, batch: GlobalBatch, schemes: Collection[Scheme]
) -> float:
    """Lower bound of the propagation of `batch` with all strategies of `schemes`, however placed.

    Sequences are divided freely and all devices are always busy, see `_Family`. Or the longest
    sequence alone in a micro-batch, through all stages of the fastest pipeline that fits it, if
    that is longer.
    """
    lengths = np.array(batch.lengths, dtype=np.float64)
    if not lengths.size:
        return 0.0
    held = [scheme for scheme in schemes if scenario.max_len_tokens(scheme) > 0]
    split = ([s for s in held if s.gather == gathers] for gathers in (False, True))
    families = [_Family(scenario, lengths, own) for own in split if own]
    bound_ms = min((family.bound_ms() for family in families), default=np.inf)
    return 0.0 if np.isinf(bound_ms) else bound_ms
