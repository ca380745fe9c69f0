"""Other systems' pipelines that no sequence is too long for: micro-batches of <TP,PP> that several
ranks share by context parallelism (CP), with keys and values passed around a ring; WLB-LLM, whose
micro-batches on them are of equal work and whose longest documents are held back; InfiniPipe and
ChunkFlow, with long sequences in chunks, short ones packed to chunks, and 1F1B over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_hydra.lab.simulator.fixed_length import (
    balanced_groups,
    balanced_micro_batches,
    pack_balanced,
)
from ds_hydra.lab.simulator.scenario import (
    NO_WORK,
    Outcome,
    Scenario,
    SystemResult,
    best_of,
    recomputing,
    summarize,
)
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.cost_models.analytic import key_values_ms
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Pipelines of `scheme`, <TP,PP>, whose stages are `cp` times as wide.

    A document is cut so that all CP ranks have the same attention. T of a sequence is b l / CP and
    a l^2 / CP, or what the ring takes, whichever is longer: keys and values travel behind
    attention. A micro-batch holds CP times MaxLen.
    """

    scenario: Scenario
    scheme: Scheme
    cp: int

    @property
    def latency(self) -> LatencyModel:
        """T of a stage without CP."""
        return self.scenario.profile.get_latency(self.scheme)

    @property
    def max_len(self) -> int:
        """Tokens of one micro-batch."""
        return self.cp * self.scenario.max_len_tokens(self.scheme)

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy with as many pipelines as fit; CP ranks hold the same slices."""
        return Strategy.alike(self._wide, self.scenario.num_devices)

    @property
    def _wide(self) -> Scheme:
        return replace(self.scheme, cp=self.cp)

    def __str__(self) -> str:
        number = len(self.strategy.schemes)
        return f"{number}x{self.scheme}" + (f" CP{self.cp}" if self.cp > 1 else "")

    def sequences_ms(self, lengths: IntArray) -> FloatArray:
        """Milliseconds that each sequence adds to the time of its micro-batch in one stage."""
        tokens = lengths.astype(np.float64)
        attention = self.latency.quadratic_ms * tokens**2 / self.cp
        cluster = self.scenario.cluster
        ring = (
            0.0 if cluster is None else key_values_ms(cluster.shape, cluster.hardware, self._wide)
        )
        attention = np.maximum(attention, ring * tokens)
        return attention + self.latency.linear_ms * tokens / self.cp


def context_parallel(scenario: Scenario) -> Iterator[ContextParallel]:
    """Every <TP,PP>, some layers recomputed, all or none, and power of two for CP that fits the
    devices and holds the context.
    """
    scenario, schemes = recomputing(scenario)
    for scheme in schemes:
        cp = 1
        while cp * scheme.num_devices <= scenario.num_devices:
            found = ContextParallel(scenario=scenario, scheme=scheme, cp=cp)
            if found.max_len >= scenario.context_length:
                yield found
            cp *= 2


OUTLIERS = (2, 4)
"""A document longer than the context over one of these is held back."""


def wlb(scenario: Scenario, *, delays: bool, name: str) -> SystemResult | None:
    """Micro-batches of any length up to MaxLen with equal work (variable-length packing), documents
    cut one by one over CP ranks.

    Tuned over TP, PP, CP and recomputed layers. Karmarkar-Karp by time in place of the paper's
    greedy, so no worse. With `delays` long documents wait until every pipeline can have one of
    them, at most to the end of the run: other mini-batches than those of all other systems, with
    the same documents in all. None where nothing fits the context.
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
    return best_of(results)


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


KEPT_BYTES = 8
"""Bytes of a token, layer and hidden unit for every chunk of a sequence until its last backward:
keys, values and their gradients in 16 bit.
"""
SMALLEST_CHUNK_TOKENS = 2048


def chunked(scenario: Scenario, *, name: str) -> SystemResult | None:
    """Homogeneous <TP,PP> pipelines, tuned over the scheme and the length of a chunk.

    A sequence longer than a chunk is cut into the fewest, of equal time; shorter ones are packed.
    Pipelines are balanced by time (Karmarkar-Karp), chunks run as micro-batches of their own, and
    chunks of a sequence that the memory cannot keep are computed forward once more. Idealised: a
    chunk never waits for another of its sequence.
    """
    results = []
    for scheme in usable_schemes(scenario):
        strategy = Strategy.alike(scheme, scenario.num_devices)
        max_len = scenario.max_len_tokens(scheme)
        chunk = longest = min(scenario.context_length, max_len)
        while chunk >= min(SMALLEST_CHUNK_TOKENS, max(1, longest // 4)):
            kept = kept_chunks(scenario, scheme, chunk)
            if kept >= scheme.pp:
                outcomes = [_run(scenario, strategy, own, chunk, kept) for own in scenario.lengths]
                results.append(summarize(name, f"{strategy}, chunks of {chunk}", outcomes))
            chunk //= 2
    return best_of(results)


def kept_chunks(scenario: Scenario, scheme: Scheme, chunk: int) -> int:
    """Chunks whose activations fit a stage beside keys and values of the longest sequence.

    MaxLen holds PP micro-batches in flight.
    """
    memory = scenario.profile.memory
    share = KEPT_BYTES / memory.activation_bytes[scheme.tp]
    beside = share * scenario.context_length if chunk < scenario.context_length else 0.0
    return int((scheme.pp * scenario.max_len_tokens(scheme) - beside) // chunk)


def _run(
    scenario: Scenario, strategy: Strategy, lengths: IntArray, chunk: int, kept: int
) -> Outcome:
    scheme = strategy.schemes[0]
    latency = scenario.profile.get_latency(scheme)
    counts: IntArray = -(-lengths // chunk)
    work: FloatArray = latency.sequences_ms(lengths)
    again = np.maximum(0, counts - (kept - scheme.pp + 1)) / counts * scenario.forward_fraction
    work = work * np.where(counts > 1, 1 + again, 1.0)
    total: FloatArray = work + np.where(counts > 1, counts * latency.constant_ms, 0.0)
    times: list[FloatArray] = []
    tokens: list[list[int]] = []
    for members in balanced_groups(total, len(strategy.schemes)):
        own: list[float] = []
        sizes: list[int] = []
        for member in members[counts[members] > 1]:
            count = int(counts[member])
            own += [float(work[member]) / count + latency.constant_ms] * count
            sizes += [int(lengths[member]) // count] * count
        short = members[counts[members] == 1]
        for packed in balanced_micro_batches(short, lengths, work, chunk):
            own.append(float(work[packed].sum()) + latency.constant_ms)
            sizes.append(int(lengths[packed].sum()))
        times.append(np.array(own, dtype=np.float64))
        tokens.append(sizes)
    return scenario.run_times(strategy, times, tokens)
