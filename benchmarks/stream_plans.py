"""Plans of a stream beside those of the whole dataset, in predicted time.

    python -m benchmarks.stream_plans [--devices 64 --tokens 800000]

The same rows, each once, as a dataset and as a stream: the dataset is shuffled whole, and its
candidates are proposed from all lengths; the stream is shuffled in windows, and its candidates are
proposed from the first window (and the context, as nobody knows what comes). Rows come in the order
of the draw, or in runs of one source each (`clustered`), as files of a crawl do: each run has
lengths around a middle of its own. Times are those of the plans, pull and push with them, over
all iterations; more devices and other windows by options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np

from ds_hydra.configs import find_file
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.errors import HydraDataError
from ds_hydra.lab.simulator.scenario import Scenario
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.sampler.data.stream import RowReading, StreamReader, StreamSampler
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.profiles.profile import Profile, with_engine_memory
from ds_hydra.strategy.proposal.histogram import LengthHistogram

CONTEXT = 32768
RUN = 500
"""Rows of a source that follow each other."""


def rows_of(lengths: list[int]) -> Iterator[dict[str, Any]]:
    for length in lengths:
        yield {"input_ids": np.ones(length, np.int32)}


def draw(name: str, num_tokens: int, clustered: bool) -> list[int]:
    """Lengths of rows of at least so many tokens."""
    histogram = LengthHistogram.load(find_file("lengths", name)).limit(CONTEXT)
    generator = np.random.default_rng(3)
    mean = histogram.num_tokens / histogram.num_sequences
    share = histogram.counts / histogram.num_sequences
    lengths = generator.choice(histogram.lengths_tokens, int(num_tokens / mean), p=share)
    if not clustered:
        return lengths.tolist()
    # Each run takes from a stretch of the sorted lengths that is a tenth of them wide
    ordered = np.sort(lengths)
    middles = generator.permutation(np.linspace(0, 1, max(1, len(ordered) // RUN)))
    keys = np.repeat(middles, RUN)[: len(ordered)]
    keys = np.concatenate([keys, np.ones(len(ordered) - len(keys))])
    ranks = np.argsort(np.argsort(keys + generator.uniform(-0.05, 0.05, len(keys))))
    return ordered[ranks].tolist()


def ms_per_token(
    sampler: TokenBudgetSampler, seen: list[int], num_devices: int, tokens: int
) -> float:
    """Predicted time of a token over all rows, with candidates from the lengths `seen`."""
    profile = with_engine_memory(Profile.load(find_file("profiles", "a800_llama2_7b")))
    cluster = try_cluster(profile, num_devices, 4.0)
    config = HydraConfig(context_length=CONTEXT, tokens_per_iteration=tokens)
    settings = CandidateSettings.of(
        config,
        num_devices=num_devices,
        given=(),
        can_run=lambda scheme: scheme.ep == 1,
        cluster=cluster,
        num_link_groups=2,
    )
    counts = dict(zip(*(column.tolist() for column in np.unique(seen, return_counts=True))))
    found = decide_candidates(profile, LengthHistogram.from_counts(counts), settings)
    scenario = Scenario.of(found.profile or profile, cluster, num_devices, CONTEXT)
    total_ms = total_tokens = 0.0
    while sampler.state.epoch == 0:
        try:
            batch = next(sampler)
        except HydraDataError:  # the stream has ended
            break
        total_ms += scenario.simulate(scenario.plan(batch, found.strategies)).iteration_ms
        total_tokens += sum(batch.lengths)
    return total_ms / total_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--devices", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--windows", type=int, nargs="+", default=[8])
    args = parser.parse_args()
    warm_up()
    for num_devices in args.devices:
        for name in ("commoncrawl", "github"):
            for clustered in (False, True):
                lengths = draw(name, args.tokens * args.iterations, clustered)
                whole = TokenBudgetSampler(lengths, lengths, args.tokens)
                wanted = ms_per_token(whole, lengths, num_devices, args.tokens)
                for window in args.windows:
                    stream = datasets.IterableDataset.from_generator(
                        rows_of, gen_kwargs={"lengths": lengths}
                    )
                    reading = RowReading(
                        context_length=CONTEXT, over_length="refuse", text_column="text",
                        tokenize=None, num_inputs=2, num_labels=2,
                    )  # fmt: skip
                    reader = StreamReader(
                        stream, reading, window_tokens=window * args.tokens, seed=42, shuffle=True
                    )
                    sampler = StreamSampler(reader, args.tokens)
                    first = [len(ids) for ids, _ in sampler.first_window()]
                    taken = ms_per_token(sampler, [*first, CONTEXT], num_devices, args.tokens)
                    sampler.close()
                    order = "clustered" if clustered else "as drawn"
                    print(
                        f"| {num_devices} | {name} | {order} | {window} | {taken / wanted:.4f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
