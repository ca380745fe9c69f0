"""Other ways to train, and the parts of ds_hydra one by one, on the mini-batches of a scenario.

A system that has a choice is tuned with hindsight: it gets what is best on the very mini-batches it
is compared on. ds_hydra chooses its candidates on other ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.fixed_length import pack_balanced, pack_evenly, pack_fixed_length
from ds_hydra.lab.simulator.scenario import (
    NO_WORK,
    NUM_FINALISTS,
    NUM_TRIAL_BATCHES,
    Outcome,
    Scenario,
    SystemResult,
    best_of,
    outcome_of,
    priced,
    recomputing,
    summarize,
)
from ds_hydra.sampler.candidate import OneStrategy
from ds_hydra.sampler.phase_plan import MiniBatch
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.strategy.schemes.scheme import Strategy

HOTSPA_BOUNDARIES_TOKENS = (4096, 16384)
"""Where HotSPa may change its strategy (Hydraulis, App. F)."""


_NUM_NAMED = 6
"""Strategies that the row of ds_hydra names."""

DEALS = {"": pack_fixed_length, ", spread": pack_evenly}
"""How Megatron-LM's micro-batches are filled and dealt, by what the row says of it."""


def fixed_length(
    scenario: Scenario,
    strategies: Sequence[Strategy] | None = None,
    *,
    tunes_micro_batches: bool = False,
    name: str,
) -> SystemResult | None:
    """Megatron-LM: one homogeneous strategy, first-fit-decreasing micro-batches of the context,
    dealt out in turn, or as `pack_evenly` does where that is faster.

    `strategies`: the choices, `megatron_choices` if not given.
    `tunes_micro_batches`: micro-batches may also be as long as memory allows, or half way there;
    Megatron-LM itself has one sequence length. None without choices.
    """
    results = []
    if strategies is None:
        scenario, strategies = megatron_choices(scenario)
    for strategy in strategies:
        longest = scenario.max_len_tokens(strategy.schemes[0])
        if longest < scenario.context_length:
            raise HydraConfigError(
                f"baseline {strategy}: MaxLen is {longest} on {scenario.num_devices} devices, the context "
                f"{scenario.context_length}; give a strategy that fits it"
            )
        choices = {scenario.context_length}
        if tunes_micro_batches:
            choices |= {(scenario.context_length + longest) // 2, longest}
        for micro_batch_tokens in sorted(choices):
            for dealt, pack in DEALS.items():
                outcomes = [
                    scenario.run_micro_batches(
                        strategy,
                        lengths,
                        pack(lengths, micro_batch_tokens, len(strategy.schemes)),
                    )
                    for lengths in scenario.lengths
                ]
                text = f"{strategy}, micro-batches of {micro_batch_tokens}{dealt}"
                results.append(summarize(name, text, outcomes))
    return best_of(results)


def megatron_choices(scenario: Scenario) -> tuple[Scenario, tuple[Strategy, ...]]:
    """Homogeneous strategies of `recomputing` that fit the context.

    N neighbours may share the experts of a mixture, and cut its micro-batches (`<spN,TP,PP;ep=N>`,
    because Megatron's experts belong to ranks that have micro-batches of their own, which have no
    price here).
    """
    scenario, schemes = recomputing(scenario)
    experts = scenario.cluster.shape.experts if scenario.cluster else None
    if experts is not None:
        sizes = [2**k for k in range(scenario.num_devices.bit_length()) if not experts.num % 2**k]
        shared = (replace(scheme, sp=n, ep=n) for scheme in schemes for n in sizes)
        scenario, schemes = priced(scenario, shared)
    fitting = (s for s in schemes if scenario.max_len_tokens(s) >= scenario.context_length)
    return scenario, tuple(Strategy.alike(s, scenario.num_devices) for s in fitting)


def balanced(scenario: Scenario, *, name: str) -> SystemResult | None:
    """One homogeneous strategy, Karmarkar-Karp over replicas and micro-batches, by tokens or by
    time, what is better. None where no strategy fits the context.
    """
    results = []
    scenario, strategies = megatron_choices(scenario)
    for strategy in strategies:
        scheme = strategy.schemes[0]
        latency, longest = scenario.profile.get_latency(scheme), scenario.max_len_tokens(scheme)
        weights: dict[str, Callable[[FloatArray], FloatArray]] = {
            "tokens": lambda l: l,
            "time": latency.sequences_ms,
        }
        for kind, weigh in weights.items():
            outcomes = []
            for lengths in scenario.lengths:
                weight = weigh(lengths.astype(np.float64))
                micro_batches = pack_balanced(lengths, weight, longest, len(strategy.schemes))
                outcomes.append(scenario.run_micro_batches(strategy, lengths, micro_batches))
            results.append(summarize(name, f"{strategy}, by {kind}", outcomes))
    return best_of(results)


def hotspa(scenario: Scenario, *, name: str) -> SystemResult | None:
    """Several homogeneous strategies after another in every iteration, each for its interval of
    lengths.

    Tuned over the boundaries of App. F and, for each interval, over the schemes that fit it;
    micro-batches are as long as memory allows, at most the context, dealt as Megatron-LM's. A
    switch costs the parameters of the new strategy and the gradients of the old one: bytes only,
    where the paper measured nearly 2 s for 7B. With one strategy nothing is switched, and pull and
    push overlap as Megatron-LM's do. None where no strategy fits the context.
    """
    if not megatron_choices(scenario)[1]:
        return None
    bounds = [b for b in HOTSPA_BOUNDARIES_TOKENS if b < scenario.context_length]
    phases: dict[tuple[int, int], SystemResult] = {}
    results = []
    for count in range(len(bounds) + 1):
        for inner in combinations(bounds, count):
            edges = (0, *inner, scenario.context_length)
            parts = []
            for interval in pairwise(edges):
                if interval not in phases:
                    phases[interval] = _hotspa_phase(scenario, *interval, overlap=count == 0)
                parts.append(phases[interval])
            results.append(_in_sequence(name, parts, scenario))
    return best_of(results)


def _hotspa_phase(scenario: Scenario, above: int, up_to: int, *, overlap: bool) -> SystemResult:
    """All sequences of an interval of lengths with the best homogeneous strategy for them."""
    choices = []
    parts = [lengths[(lengths > above) & (lengths <= up_to)] for lengths in scenario.lengths]
    within, strategies = megatron_choices(replace(scenario, context_length=up_to))
    for strategy in strategies:
        longest = min(scenario.context_length, within.max_len_tokens(strategy.schemes[0]))
        for pack in DEALS.values():
            outcomes = []
            for lengths in parts:
                micro_batches = pack(lengths, longest, len(strategy.schemes))
                found = within.run_micro_batches(strategy, lengths, micro_batches, overlap=overlap)
                outcomes.append(found if lengths.size else NO_WORK)
            choices.append(summarize("", str(strategy), outcomes))
    best = best_of(choices)
    assert best is not None  # What fits the context fits shorter ones
    return best


def _in_sequence(name: str, parts: Sequence[SystemResult], scenario: Scenario) -> SystemResult:
    propagation = np.sum([part.propagation_ms for part in parts], axis=0)
    steps = np.sum([part.iteration_ms > 0 for part in parts], axis=0) - 1
    step_ms = scenario.cluster.step_ms if scenario.cluster else 0.0
    weights = np.array([part.propagation_ms for part in parts]) / np.maximum(propagation, 1e-9)
    return SystemResult(
        name=name,
        strategy=", then ".join(part.strategy for part in parts),
        propagation_ms=propagation,
        iteration_ms=np.sum([part.iteration_ms for part in parts], axis=0) - step_ms * steps,
        imbalance=np.sum(weights * np.array([part.imbalance for part in parts]), axis=0),
        bubble=np.sum(weights * np.array([part.bubble for part in parts]), axis=0),
    )


def two_stage(
    scenario: Scenario, strategies: Sequence[Strategy], *, name: str
) -> SystemResult | None:
    """The best single strategy of `strategies` for all mini-batches, sequences placed by ds_hydra's
    planner.

    All are tried with the planner's heuristic on the first mini-batches. The best few are planned
    as ds_hydra's own on all mini-batches, as long as each can still be the fastest with what the
    rest of the mini-batches takes at least. None without strategies.
    """
    count = len(scenario.batches)
    trial = range(min(NUM_TRIAL_BATCHES, count))
    tried = {
        strategy: np.sum(
            [
                scenario.planned_outcome(strategy, number, is_heuristic=True).iteration_ms
                for number in trial
            ]
        )
        for strategy in strategies
    }
    results: list[SystemResult] = []
    for strategy in sorted(tried, key=lambda s: float(tried[s]))[:NUM_FINALISTS]:
        if results:
            fastest = min(float(result.iteration_ms.sum()) for result in results)
            outcomes = _planned_below(scenario, strategy, fastest, _bounds(scenario, strategy))
        else:
            outcomes = [scenario.planned_outcome(strategy, number) for number in range(count)]
        if len(outcomes) == count:
            results.append(summarize(name, str(strategy), outcomes))
    return best_of(results)


def heterogeneous_static(
    scenario: Scenario, candidates: Sequence[Strategy], *, name: str
) -> SystemResult | None:
    """`two_stage` with those of `candidates` that fit the context, and every homogeneous strategy
    that does.
    """
    fitting = [s for s in candidates if scenario.longest(s) >= scenario.context_length]
    return two_stage(scenario, tuple(dict.fromkeys((*fitting, *scenario.statics()))), name=name)


def _planned_below(
    scenario: Scenario, strategy: Strategy, limit: float, bounds: FloatArray
) -> list[Outcome]:
    """All mini-batches, or the first of them until their sum, with `bounds` of the rest, reaches
    `limit`.
    """
    outcomes: list[Outcome] = []
    least = float(bounds.sum())
    for number, bound in enumerate(bounds.tolist()):
        if least >= limit:
            break
        outcomes.append(scenario.planned_outcome(strategy, number))
        least += outcomes[-1].iteration_ms - bound
    return outcomes


def _bounds(scenario: Scenario, strategy: Strategy) -> FloatArray:
    """What no whole iteration with `strategy` can beat, for each mini-batch, in ms."""
    settings = scenario.linked_settings([strategy])
    step_ms = scenario.cluster.step_ms if scenario.cluster else 0.0
    mini_batches = (
        MiniBatch(batch, scenario.profile, scenario.num_devices, settings)
        for batch in scenario.batches
    )
    candidate = OneStrategy(strategy)
    return np.array([step_ms + candidate.bound_ms(own) for own in mini_batches])


def dynamic(
    scenario: Scenario, strategies: Sequence[Strategy], *, name: str
) -> tuple[SystemResult, list[IterationPlan]]:
    """ds_hydra: the planner chooses among `strategies` for every mini-batch. Also the plans."""
    plans = [scenario.plan(batch, strategies) for batch in scenario.batches]
    outcomes = [outcome_of(scenario.simulate(plan)) for plan in plans]
    counts = Counter(str(plan.strategy) for plan in plans).most_common()
    shares = [f"{strategy} ({count / len(plans):.0%})" for strategy, count in counts[:_NUM_NAMED]]
    if others := sum(count for _, count in counts[_NUM_NAMED:]):
        shares.append(f"{len(counts) - _NUM_NAMED} others ({others / len(plans):.0%})")
    return summarize(name, "; ".join(shares), outcomes), plans
