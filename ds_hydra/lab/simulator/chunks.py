"""InfiniPipe, ChunkFlow: long sequences in chunks, short ones packed to chunks, 1F1B over them."""

from __future__ import annotations

import numpy as np

from ds_hydra.lab.simulator.fixed_length import balanced_groups, balanced_micro_batches
from ds_hydra.lab.simulator.scenario import Outcome, Scenario, SystemResult, best_of, summarize
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

KEPT_BYTES = 8
"""Of a token, layer and hidden unit for every chunk of a sequence until its last backward: keys,
values and their gradients in 16 bit.
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
        strategy = Strategy((scheme,) * (scenario.num_devices // scheme.num_devices))
        max_len = scenario.max_len_tokens(scheme)
        chunk = longest = min(scenario.context_length, max_len)
        while chunk >= min(SMALLEST_CHUNK_TOKENS, max(1, longest // 4)):
            kept = kept_chunks(scenario, scheme, chunk)
            if kept >= scheme.pp:
                outcomes = [_run(scenario, strategy, own, chunk, kept) for own in scenario.lengths]
                results.append(summarize(name, f"{strategy}, chunks of {chunk}", outcomes))
            chunk //= 2
    return best_of(results) if results else None


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
