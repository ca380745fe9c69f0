"""Iterations of several phases: which schemes the planner puts together anew for every step.

[Note: Phases]
Where all ranks gather layers for every pass (`;gather`), a strategy leaves nothing behind: no
slice, no home. So pipelines may be cut anew for every micro-batch at no cost, and an iteration may
run several strategies one after another, its phases: long sequences on wide groups of all ranks,
then short ones on narrow groups of all ranks.

Candidates that gather are a palette: the planner takes their schemes, one for each number of ranks,
and cuts the ranks into them as it likes ([Note: Mixed groups]). Sizes divide each other, so groups
lie as they do under the strategies of one scheme, and no further communicators are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.mixed_groups import MixedGroups, Step, plan_steps
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.profiles.link_times import LinkTimes
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.neighbours import num_cuts
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

MAX_CUTS = 2000
"""Ways to cut the ranks that are tried; 64 ranks have 1,828."""


class Palette(NamedTuple):
    """Schemes of gathered layers, smallest first, what they take and hold, and the pull and push of
    the widest.
    """

    schemes: tuple[Scheme, ...]
    latency: tuple[LatencyModel, ...]
    max_len_tokens: tuple[int, ...]
    link: LinkTimes

    @property
    def traffic_ms(self) -> float:
        """Least time of a step."""
        return max(latency.traffic_ms for latency in self.latency)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a group holds."""
        return max(self.max_len_tokens)

    def per_token_ms(self, number: int) -> float:
        """Of a full micro-batch of one of the schemes."""
        held = self.max_len_tokens[number]
        return self.latency[number].micro_batch_ms([held]) / held


def palette_schemes(strategies: Sequence[Strategy], num_devices: int) -> list[tuple[Scheme, ...]]:
    """Schemes that may be put together, for each number of checkpointed layers, smallest first.

    >>> gathered = [Strategy.parse("1x<sp4,1;gather>"), Strategy.parse("4x<1,1;gather>")]
    >>> [str(scheme) for scheme in palette_schemes(gathered, 4)[0]]
    ['<1,1;gather>', '<sp4,1;gather>']
    """
    of_ckpt: dict[int, dict[Scheme, None]] = {}
    for strategy in strategies:
        for scheme in strategy.schemes if strategy.gathers else ():
            if scheme.pp == 1 and num_devices % scheme.num_devices == 0:
                of_ckpt.setdefault(scheme.ckpt, {})[scheme] = None
    return [tuple(sorted(found, key=lambda s: s.num_devices)) for found in of_ckpt.values()]


def without_rivals(palette: Palette, num_devices: int) -> Palette | None:
    """One scheme for each number of ranks, the one that is fastest for the micro-batches it holds,
    the widest ones where all have too many cuts; None for less than two.
    """
    best: dict[int, int] = {}
    for number, held in enumerate(palette.max_len_tokens):
        size = palette.schemes[number].num_devices
        if held > 0 and (
            size not in best or palette.per_token_ms(number) < palette.per_token_ms(best[size])
        ):
            best[size] = number
    sizes = [size for size in sorted(best) if all(b % size == 0 or size % b == 0 for b in best)]
    while sizes and num_cuts(num_devices, tuple(sizes)) > MAX_CUTS:
        sizes = sizes[1:]
    if len(sizes) < 2:
        return None
    own = [best[size] for size in sizes]
    return palette._replace(
        schemes=tuple(palette.schemes[n] for n in own),
        latency=tuple(palette.latency[n] for n in own),
        max_len_tokens=tuple(palette.max_len_tokens[n] for n in own),
    )


def compose(
    lengths: IntArray,
    palettes: Sequence[Palette],
    num_devices: int,
    least_link_ms: float,
    limit_ms: float,
) -> list[Step]:
    """The steps of `lengths` (descending) that take least, each of one of `palettes` and with
    `least_link_ms` of pull and push; none where that is not below `limit_ms`.
    """
    floor = max(palette.traffic_ms for palette in palettes)

    def total_ms(slowest: FloatArray) -> float:
        return float(np.maximum(slowest, floor).sum()) + least_link_ms * slowest.size

    kinds = [
        MixedGroups(
            num_devices,
            [scheme.num_devices for scheme in palette.schemes],
            palette.max_len_tokens,
            [latency.constant_ms for latency in palette.latency],
            [_sequences_ms(latency) for latency in palette.latency],
        )
        for palette in palettes
    ]
    steps = plan_steps(kinds, lengths, total_ms, limit_ms)
    return [step for step in steps if step.members.size]


def strategy_of(step: Step, palette: Palette) -> tuple[Strategy, IntArray]:
    """The strategy of a step, and in which of its pipelines each sequence is."""
    strategy = Strategy(tuple(s for s, n in zip(palette.schemes, step.counts) for _ in range(n)))
    places = [np.flatnonzero([s == own for own in strategy.schemes]) for s in palette.schemes]
    pipeline_of = np.concatenate(places)
    return strategy, pipeline_of[step.group_of]


def _sequences_ms(latency: LatencyModel) -> Callable[[IntArray], FloatArray]:
    def sequences_ms(lengths: IntArray) -> FloatArray:
        tokens = lengths.astype(np.float64)
        return np.array((latency.quadratic_ms * tokens + latency.linear_ms) * tokens)

    return sequences_ms
