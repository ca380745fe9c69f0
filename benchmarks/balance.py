"""Rows of `ds_hydra.balance_rows` against Karmarkar-Karp's, in predicted time: no rank runs.

    python benchmarks/balance.py

Karmarkar-Karp as trainers use it: over ranks, then in each rank over as many rows as the rank with
most tokens needs, by tokens or by time; the longest rows of the ranks run together. Everybody's
rows hold as many tokens, and everybody's time is that of LLaMA 2 7B on an H100 by the roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from packers import divide

from ds_hydra.configs import find_file
from ds_hydra.sampler.balance import balance_rows, read_latency
from ds_hydra.strategy.proposal.histogram import LengthHistogram

CONTEXT, TOKENS_PER_RANK, NUM_BATCHES = 32_768, 120_000, 10
LATENCY = read_latency("llama2_7b", "h100")

Rows = list[list[list[int]]]
"""[rank][row]: lengths."""


def karmarkar_karp_rows(
    lengths: Sequence[int], num_ranks: int, weight: Callable[[int], float]
) -> Rows:
    shares = divide(lengths, num_ranks, weight)
    num_rows = max(-(-sum(share) // CONTEXT) for share in shares)
    while True:
        rows = [divide(share, num_rows, weight) for share in shares]
        if all(sum(row) <= CONTEXT for own in rows for row in own):
            return rows
        num_rows += 1


def time_ms(rows: Rows, *, lockstep: bool) -> float:
    times = [sorted((LATENCY.micro_batch_ms(row) for row in own), reverse=True) for own in rows]
    return sum(map(max, zip(*times))) if lockstep else max(map(sum, times))


def main() -> None:
    print("| lengths | ranks | rows | KK, tokens | KK, time | time of balance_rows |")
    print("|---|---|---|---|---|---|")
    for name in ("github", "commoncrawl"):
        histogram = LengthHistogram.load(find_file("lengths", name)).limit(CONTEXT)
        for num_ranks in (8, 64):
            batches = list(histogram.draw_batches(TOKENS_PER_RANK * num_ranks, NUM_BATCHES + 1, 0))
            for lockstep in (True, False):
                ratios: list[list[float]] = []
                seconds = []
                for batch in batches:
                    lengths = [int(length) for length in batch]
                    begin = perf_counter()
                    found = balance_rows(
                        lengths,
                        num_ranks=num_ranks,
                        max_tokens=CONTEXT,
                        model=LATENCY,
                        lockstep=lockstep,
                    )
                    seconds.append(perf_counter() - begin)
                    others = [
                        karmarkar_karp_rows(lengths, num_ranks, weight)
                        for weight in (float, LATENCY.sequence_ms)
                    ]
                    ratios.append(
                        [time_ms(rows, lockstep=lockstep) / found.predicted_ms for rows in others]
                    )
                tokens, by_time = np.median(ratios[1:], axis=0)  # the first one compiles
                kind = "same number" if lockstep else "own number"
                print(
                    f"| {name} | {num_ranks} | {kind} | {tokens:.2f} | {by_time:.2f} | "
                    f"{np.median(seconds[1:]) * 1e3:.0f} ms |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
