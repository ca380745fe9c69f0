"""WLB-LLM: micro-batches of equal work on 4D-parallel pipelines, longest documents held back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hydra.lab.simulator.context_parallel import ContextParallel, context_parallel
from ds_hydra.lab.simulator.fixed_length import pack_balanced
from ds_hydra.lab.simulator.scenario import (
    NO_WORK,
    Outcome,
    Scenario,
    SystemResult,
    best_of,
    summarize,
)
from ds_hydra.sampler.schedule import IntArray

OUTLIERS = (2, 4)
"""A document longer than the context over one of these is held back."""


def wlb(scenario: Scenario, *, delays: bool, name: str) -> SystemResult | None:
    """Micro-batches of any length up to MaxLen with equal work (variable-length packing), documents
    cut one by one over CP ranks.

    Tuned over TP, PP and CP. Karmarkar-Karp by time in place of the paper's greedy, so no worse.
    With `delays` long documents wait until every pipeline can have one of them, at most to the end
    of the run: other mini-batches than those of all other systems, with the same documents in all.
    None where nothing fits the context.
    """
    results = []
    for pipelines in context_parallel(scenario):
        for share in OUTLIERS if delays else (0,):
            lengths = scenario.lengths
            if share:
                longest = scenario.context_length // share
                lengths = hold_back(lengths, longest, len(pipelines.strategy.schemes))
            outcomes = [run_balanced(pipelines, own) if own.size else NO_WORK for own in lengths]
            held = f", above {scenario.context_length // share} held back" if share else ""
            results.append(summarize(name, f"{pipelines}{held}", outcomes))
    return best_of(results) if results else None


def run_balanced(pipelines: ContextParallel, lengths: IntArray) -> Outcome:
    """One mini-batch (lengths descending), balanced by time."""
    work = pipelines.sequences_ms(lengths)
    strategy = pipelines.strategy
    placed = pack_balanced(lengths, work, pipelines.max_len, len(strategy.schemes))
    constant = pipelines.latency.constant_ms
    return pipelines.scenario.run_times(
        strategy,
        [np.array([work[m].sum() + constant for m in own], dtype=np.float64) for own in placed],
        [[int(lengths[m].sum()) for m in own] for own in placed],
    )


def hold_back(mini_batches: Sequence[IntArray], longest: int, num_pipelines: int) -> list[IntArray]:
    """The mini-batches with every document above `longest` in a queue, which leaves it in groups of
    `num_pipelines`; what is left at the end joins the last mini-batch.

    >>> [m.tolist() for m in hold_back([np.array([9, 2]), np.array([8, 1])], 5, 2)]
    [[2], [9, 8, 1]]
    """
    waiting: list[int] = []
    found = []
    for number, lengths in enumerate(mini_batches):
        waiting += lengths[lengths > longest].tolist()
        is_last = number == len(mini_batches) - 1
        count = len(waiting) if is_last else len(waiting) // num_pipelines * num_pipelines
        released, waiting = waiting[:count], waiting[count:]
        own = np.concatenate([np.array(released, dtype=np.int64), lengths[lengths <= longest]])
        found.append(np.sort(own)[::-1])
    return found
