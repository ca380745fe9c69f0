"""The systems of a comparison: their names, and the way each is run on the global batches of a
scenario; other ways to train, and the parts of ds_hydra one by one.

A system that has a choice is tuned with hindsight: it gets what is best on the very global batches
it is compared on. ds_hydra chooses its candidates on other ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import combinations, pairwise
from typing import Literal, NamedTuple

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.cases import Workload, draw_batches
from ds_hydra.lab.simulator.fixed_length import pack_evenly, pack_fixed_length
from ds_hydra.lab.simulator.mixed_groups import dynamic_cp, fcp, flexsp
from ds_hydra.lab.simulator.scenario import (
    NO_WORK,
    NUM_FINALISTS,
    NUM_TRIAL_BATCHES,
    Scenario,
    SystemResult,
    best_of,
    priced,
    recomputing,
    summarize,
)
from ds_hydra.lab.simulator.ulysses import (
    balanced_ulysses,
    deepspeed_ulysses,
    optimizer_ms,
    packed_zero3,
)
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

HOTSPA_BOUNDARIES_TOKENS = (4096, 16384)
"""Tokens at which HotSPa may change its strategy (Hydraulis, App. F)."""


_NUM_NAMED = 6
"""Strategies that the row of ds_hydra names."""

DEALS = {"": pack_fixed_length, ", spread": pack_evenly}
"""Ways to fill and deal Megatron-LM's micro-batches, by the text of the row."""


def fixed_length(
    scenario: Scenario, strategies: Sequence[Strategy] | None = None, *, name: str
) -> SystemResult | None:
    """Megatron-LM: one homogeneous strategy, first-fit-decreasing micro-batches of the context,
    dealt out in turn, or as `pack_evenly` does where that is faster.

    `strategies`: the choices, `megatron_choices` if not given. None without choices.
    """
    results = []
    if strategies is None:
        scenario, strategies = megatron_choices(scenario)
    for strategy in strategies:
        for dealt, pack in DEALS.items():
            outcomes = [
                scenario.run_micro_batches(
                    strategy,
                    lengths,
                    pack(lengths, scenario.context_length, len(strategy.schemes)),
                )
                for lengths in scenario.lengths
            ]
            text = f"{strategy}, micro-batches of {scenario.context_length}{dealt}"
            results.append(summarize(name, text, outcomes))
    return best_of(results)


def megatron_choices(scenario: Scenario) -> tuple[Scenario, tuple[Strategy, ...]]:
    """Homogeneous strategies of `recomputing` that fit the context; where none does, with CP by
    gathered keys and values, as Megatron-Core has it, too.

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
    if not (fitting := _fitting(scenario, schemes)):
        degrees = [2**k for k in range(1, scenario.num_devices.bit_length())]
        cut = (replace(scheme, cp=n) for scheme in schemes for n in degrees)
        scenario, schemes = priced(scenario, cut)
        fitting = _fitting(scenario, schemes)
    return scenario, tuple(Strategy.alike(s, scenario.num_devices) for s in fitting)


def _fitting(scenario: Scenario, schemes: Iterable[Scheme]) -> list[Scheme]:
    return [s for s in schemes if scenario.max_len_tokens(s) >= scenario.context_length]


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
    weights = np.array([part.propagation_ms for part in parts]) / np.maximum(propagation, 1e-9)
    return SystemResult(
        name=name,
        strategy=", then ".join(part.strategy for part in parts),
        propagation_ms=propagation,
        iteration_ms=np.sum([part.iteration_ms for part in parts], axis=0)
        - optimizer_ms(scenario) * steps,
        imbalance=np.sum(weights * np.array([part.imbalance for part in parts]), axis=0),
        bubble=np.sum(weights * np.array([part.bubble for part in parts]), axis=0),
    )


def two_stage(
    scenario: Scenario, strategies: Sequence[Strategy] | None = None, *, name: str
) -> SystemResult | None:
    """The best single strategy for all global batches, sequences placed by ds_hydra's planner.

    `strategies`: the choices, homogeneous ones of <TP,PP> that fit the context if not given. All
    are tried with the planner's heuristic on the first global batches, the best few planned as
    ds_hydra's own on all. None without strategies.
    """

    def tried_ms(strategy: Strategy) -> float:
        trial = range(min(NUM_TRIAL_BATCHES, len(scenario.batches)))
        outcomes = (scenario.planned_outcome(strategy, n, is_heuristic=True) for n in trial)
        return sum(outcome.iteration_ms for outcome in outcomes)

    choices = scenario.statics() if strategies is None else strategies
    return best_of(
        summarize(
            name,
            str(strategy),
            [scenario.planned_outcome(strategy, n) for n in range(len(scenario.batches))],
        )
        for strategy in sorted(choices, key=tried_ms)[:NUM_FINALISTS]
    )


def dynamic(
    scenario: Scenario, strategies: Sequence[Strategy], *, name: str
) -> tuple[SystemResult, list[IterationPlan]]:
    """ds_hydra: the planner chooses among `strategies` for every global batch. Also the plans."""
    plans = [scenario.plan(batch, strategies) for batch in scenario.batches]
    outcomes = [scenario.simulate(plan) for plan in plans]
    counts = Counter(str(plan.strategy) for plan in plans).most_common()
    shares = [f"{strategy} ({count / len(plans):.0%})" for strategy, count in counts[:_NUM_NAMED]]
    if others := sum(count for _, count in counts[_NUM_NAMED:]):
        shares.append(f"{len(counts) - _NUM_NAMED} others ({others / len(plans):.0%})")
    return summarize(name, "; ".join(shares), outcomes), plans


DS_HYDRA, PLAIN, PAPER = "ds_hydra", "plain", "paper"
OUR_SYSTEMS = {
    DS_HYDRA: "ds_hydra",
    PLAIN: "ds_hydra, <TP,PP> alone",
    PAPER: "the same, memory of the paper",
}
"""Systems whose plans a comparison keeps, with their labels for users."""


def _on_zero3(
    run: Callable[..., SystemResult | None], scenario: Scenario, *, name: str, **options: bool
) -> SystemResult | None:
    """`run` of a system on ZeRO-3, on several nodes with hpZ of ZeRO++ where that is faster."""
    scenarios, cluster = [scenario], scenario.cluster
    if cluster is not None and cluster.num_devices > cluster.hardware.devices_per_node:
        scenarios.append(replace(scenario, hpz=True))
    found = [run(own, name=name, **options) for own in scenarios]
    return best_of([own for own in found if own is not None]) if any(found) else None


class System(NamedTuple):
    """`label`: what users see. `run` is given a scenario and the name of the result, which is None
    where nothing fits. With `has_own_layers` its layers keep as many bytes as ds_hydra's.
    """

    label: str
    run: Callable[..., SystemResult | None]
    has_own_layers: bool = False


SYSTEMS = {
    "megatron": System("Megatron-LM, tuned", fixed_length),
    "zero3": System("ZeRO-3 / FSDP, packed", partial(_on_zero3, packed_zero3)),
    "deepspeed": System("DeepSpeed ZeRO-3 + Ulysses", partial(_on_zero3, deepspeed_ulysses)),
    "deepspeed_balanced": System(
        "DeepSpeed + Ulysses, by time", partial(_on_zero3, balanced_ulysses)
    ),
    "deepspeed_degrees": System(
        "DeepSpeed + Ulysses, degree too",
        partial(_on_zero3, balanced_ulysses, chooses_degree=True),
    ),
    "flexsp": System("FlexSP", partial(_on_zero3, flexsp)),
    "flexsp_hidden": System(
        "FlexSP, our layers and exchanges",
        partial(_on_zero3, flexsp, hides_exchanges=True),
        has_own_layers=True,
    ),
    "fcp": System("FCP", partial(_on_zero3, fcp)),
    "dynamic_cp": System("Megatron-Core, dynamic CP", dynamic_cp),
    "hotspa": System("HotSPa", hotspa),
    "two_stage": System("homogeneous, two-stage", two_stage),
}
"""All that ds_hydra is compared with, in the order they are shown."""

LABELS = {**OUR_SYSTEMS, **{name: system.label for name, system in SYSTEMS.items()}}
"""Systems in the order they are shown, with their labels for users."""


TOKENS_PER_POINT = 20_000_000
"""Tokens of all global batches of one workload then: large ones get fewer, two at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a simulated comparison.

    `systems` other than ds_hydra; `num_proposal_batches` global batches, drawn apart from those of
    the comparison, decide about ds_hydra's candidates: None for as many as the engine draws.
    `overlap` of pull and push with propagation.
    `space` of ds_hydra, where the workload has no strategies: that of the engine's default
    ("full"), or <TP,PP> ("plain").
    """

    iterations: int = 100
    systems: tuple[str, ...] = tuple(name for name in LABELS if name != DS_HYDRA)
    overlap: bool = True
    seed: int = 1
    num_proposal_batches: int | None = None
    space: Literal["full", "plain"] = "full"

    def sized(self, tokens_per_iteration: int) -> Settings:
        """Settings with fewer global batches where they are large: means over as many tokens are
        about as good.

        >>> [Settings().sized(tokens).iterations for tokens in (200_000, 2_000_000)]
        [100, 10]
        """
        most = max(2, TOKENS_PER_POINT // tokens_per_iteration)
        return replace(self, iterations=min(self.iterations, most))

    def scenario(self, workload: Workload) -> Scenario:
        """The scenario of all systems: global batches of `workload`, the memory of its profile."""
        return Scenario(
            costs=workload.costs,
            num_devices=workload.num_devices,
            context_length=workload.context_length,
            batches=draw_batches(
                workload.histogram.limit(workload.context_length),
                workload.tokens_per_iteration,
                self.iterations,
                self.seed,
            ),
            overlap=self.overlap,
        )

    def __post_init__(self) -> None:
        others = [name for name in LABELS if name != DS_HYDRA]
        unknown = [name for name in self.systems if name not in others]
        if unknown:
            nearest = get_close_matches(unknown[0], others, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise HydraConfigError(
                f"system {unknown[0]!r} is not known; {hint}choose among {', '.join(others)}"
            )
