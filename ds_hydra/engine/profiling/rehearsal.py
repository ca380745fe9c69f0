"""Calibration iterations as training will run them, for the level of T, which no scheme shows while
it is timed alone.

Probes are equal micro-batches of one scheme, PP of them. In training all pipelines of a strategy
run at once, micro-batches are packed sequences of many lengths, pipelines have other numbers of
them, and slices and gradients travel beside. Where ranks share cores, memory or links, a bubble of
one is time of another. So a few made global batches are planned with what the probes say, run, and
T of each scheme is scaled by how long its pipelines took.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.micro_batches import Example
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import broadcast_text, gather_by_hosts, run_together
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.strategy import Profile, Scheme, Strategy

_HALVINGS = 6
"""Lengths of a made global batch: half of the longest, a quarter, ..., 1/64, and again."""
_SPREAD = 0.3
"""Standard deviation, of logarithms, by which rehearsals and probes of schemes differ: bubbles that
others use, and work beside.
"""
_SETTINGS = PlannerSettings(solver="none")


def side_by_side(schemes: Iterable[Scheme], num_ranks: int) -> list[Strategy]:
    """Strategies in which neighbours among `schemes` have half of the ranks each.

    >>> [str(strategy) for strategy in side_by_side([Scheme(1, 1), Scheme(2, 1), Scheme(4, 1)], 4)]
    ['1x<2,1> + 2x<1,1>']
    """
    half = num_ranks // 2
    fitting = [s for s in sorted(schemes) if half and half % s.num_devices == 0 and not s.gather]
    return [
        Strategy(tuple(s for scheme in pair for s in (scheme,) * (half // scheme.num_devices)))
        for pair in itertools.pairwise(fitting)
    ]


def choose_rehearsals(strategies: Iterable[Strategy], schemes: Iterable[Scheme]) -> list[Strategy]:
    """Choose the strategies to rehearse, with pipelines of `schemes` alone: all homogeneous ones,
    and others where they show a scheme beside another for the first time.

    Not those whose layers are gathered: their times are the link's.
    """
    profiled, seen, chosen = set(schemes), set[Scheme](), []
    for strategy in dict.fromkeys(strategies):
        kinds = set(strategy.schemes)
        is_new = not strategy.is_heterogeneous or not kinds <= seen
        if is_new and kinds <= profiled and not any(s.gather for s in kinds):
            seen |= kinds if strategy.is_heterogeneous else set()
            chosen.append(strategy)
    return chosen


def made_lengths(longest: int, num_tokens: int) -> tuple[int, ...]:
    """Lengths of a global batch of at least `num_tokens`, long and short ones with as many tokens.

    >>> made_lengths(64, 70)
    (32, 16, 16, 8)
    """
    lengths: list[int] = []
    for power in itertools.cycle(range(1, _HALVINGS + 1)):
        length = max(2, longest >> power)
        for _ in range(2 ** (power - 1)):
            if sum(lengths) >= num_tokens:
                return tuple(lengths)
            lengths.append(length)
    raise AssertionError("cycles never end")


def rehearse(
    propagator: Propagator,
    strategies: Sequence[Strategy],
    profile: Profile,
    config: HydraConfig,
    *,
    is_warm: bool,
) -> dict[Scheme, list[dict[str, Any]]]:
    """Time the pipelines of each scheme: {strategy, run, predicted_ms, measured_ms}, one for each
    of them. Collective over all ranks; equal on all.

    Every strategy runs one global batch, of a context a rank or what an iteration has if that is
    less, without a step of the optimizer; gradients are thrown away. Unless `is_warm` the first one
    is run once before, for memory that is touched for the first time, and those of schemes that no
    other strategy has twice, where probes are repeated too.
    """
    found: dict[Scheme, list[dict[str, Any]]] = {}
    num_tokens = min(config.tokens_per_iteration, propagator.num_ranks * config.context_length)
    uses = Counter(scheme for strategy in strategies for scheme in set(strategy.schemes))
    for strategy in strategies:
        longest = max(profile.max_len_tokens(s, propagator.num_ranks) for s in strategy.schemes)
        lengths = made_lengths(min(longest, config.context_length), num_tokens)
        plan = _agree_on_plan(propagator, strategy, profile, lengths)
        busy = [pipeline for pipeline in plan.pipelines if pipeline.micro_batches]
        is_single = min(uses[s] for s in strategy.schemes) == 1
        for run in range(min(2, config.profiling.repeats) if is_single else 1):
            if not is_warm:
                run_once(propagator, plan)
                is_warm = True
            times_ms = run_once(propagator, plan)
            for pipeline in busy:
                measured_ms = max(times_ms[rank] for rank in pipeline.ranks)
                found.setdefault(pipeline.scheme, []).append(
                    {
                        "strategy": str(strategy),
                        "run": run,
                        "predicted_ms": round(pipeline.makespan_ms, 3),
                        "measured_ms": round(measured_ms, 3),
                    }
                )
    return found


def at_rehearsed_level(
    document: Mapping[str, Any], found: Mapping[Scheme, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """The profile with T of each rehearsed scheme at the level of its rehearsals (`level_factors`).

    The terms of T keep their proportions, which probes of many lengths tell and a rehearsal does
    not.
    """
    profile = Profile.from_json(document)
    factors = level_factors(found)
    latency = {s: profile.latency[s].scaled(factor) for s, factor in factors.items()}
    rehearsed = {
        s: {"factor": round(factor, 4), "runs": list(found[s])} for s, factor in factors.items()
    }
    entries = []
    for entry in document["schemes"]:
        scheme = Scheme.from_json(entry)
        more = {"rehearsed": rehearsed[scheme]} if scheme in rehearsed else {}
        model = latency[scheme].to_json() if scheme in latency else {}
        model.pop("traffic_ms", None)
        entries.append({**entry, **model, **more})
    return {**document, "schemes": entries}


def level_factors(found: Mapping[Scheme, Sequence[Mapping[str, Any]]]) -> dict[Scheme, float]:
    """Factor of T for each scheme: measured over predicted time, one value for each rehearsal. It
    is shrunk towards the factor of all schemes, and that towards 1.

    How far the values of a scheme scatter is the noise. Against a spread of `_SPREAD` between
    schemes n values count n S^2 / (n S^2 + noise^2): nearly all on a quiet machine, little on one
    where a run takes half or twice as long as the next.
    """
    logs: dict[Scheme, list[float]] = {}
    for scheme, runs in found.items():
        by_rehearsal: dict[tuple[str, int], list[float]] = {}
        for run in runs:
            if run["measured_ms"] > 0:  # else too short for the clock
                ratio = log(run["measured_ms"] / run["predicted_ms"])
                by_rehearsal.setdefault((run["strategy"], run["run"]), []).append(ratio)
        if by_rehearsal:
            logs[scheme] = [mean(ratios) for ratios in by_rehearsal.values()]
    squares = sum((value - mean(values)) ** 2 for values in logs.values() for value in values)
    noise = squares / max(1, sum(len(values) - 1 for values in logs.values()))

    def weight(count: int) -> float:
        return count * _SPREAD**2 / (count * _SPREAD**2 + noise)

    everything = [value for values in logs.values() for value in values]
    level = median(everything) if everything else 0.0
    return {
        scheme: exp(
            weight(len(everything)) * level + weight(len(values)) * (median(values) - level)
        )
        for scheme, values in logs.items()
    }


def _agree_on_plan(
    propagator: Propagator, strategy: Strategy, profile: Profile, lengths: tuple[int, ...]
) -> IterationPlan:
    """The plan of rank 0, which alone loads the planner; collective over all ranks."""
    batch = GlobalBatch(
        iteration=0,
        sample_indices=tuple(range(len(lengths))),
        lengths=lengths,
        num_label_tokens=sum(lengths) - len(lengths),
    )

    def plan() -> str:
        if propagator.rank > 0:
            return ""
        planned = plan_iteration(
            batch,
            strategies=[strategy],
            profile=profile,
            num_devices=propagator.num_ranks,
            settings=_SETTINGS,
        )
        return json.dumps(planned.to_json())

    text = run_together(plan, propagator.device)
    (text,) = broadcast_text([text], 0, propagator.device)
    return IterationPlan.from_json(json.loads(text))


def probe_example(vocab_size: int, length: int) -> Example:
    """Tokens that look like none in particular, all of them labels."""
    tokens = torch.arange(length, dtype=torch.int64) * 7919 % vocab_size
    return tokens, tokens


def run_once(propagator: Propagator, plan: IterationPlan) -> list[float]:
    """Milliseconds that each rank propagated, beside pull and push."""
    vocab_size = propagator.stage_model.vocab_size

    def load(position: int) -> Example:
        return probe_example(vocab_size, plan.lengths[position])

    shards_P = _gradient_shards(propagator)
    outcome = propagator.train(plan, load, shards_P, 1.0)
    propagator.clock.settle(propagator.clock.stamp())
    mine = torch.tensor([sum(outcome.times().phase_ms)], dtype=torch.float64)
    return gather_by_hosts(mine, propagator.device).flatten().tolist()


def _gradient_shards(propagator: Propagator) -> list[Tensor]:
    """Shards to push into, all in the memory of the largest: nobody reads their sums, and beside
    ZeRO-3's own there may be no room for others.
    """
    numels = [
        shard_P.numel() if spec.requires_grad else 0
        for shard_P, spec in zip(
            propagator.links.shards_P(), propagator.stage_model.specs, strict=True
        )
    ]
    scratch = torch.zeros(max(numels, default=0), dtype=torch.float32, device=propagator.device)
    return [scratch[:numel] for numel in numels]
