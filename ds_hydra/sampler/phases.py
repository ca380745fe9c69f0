"""Iterations of several phases: which schemes the planner puts together anew for every step.

[Note: Phases]
Where all ranks gather layers for every pass (`;gather`), a strategy leaves nothing behind: no
slice, no home. And where strategies of one stage differ in SP and CP alone, all leave the same
slices on every rank. So pipelines may be cut anew for every micro-batch at no cost, and an
iteration may run several strategies one after another, its phases: long sequences on wide groups of
all ranks, then short ones on narrow groups of all ranks.

Candidates are a palette: the planner takes the schemes of those that gather, and of homogeneous
ones that leave the same slices, one for each number of ranks, and cuts the ranks into them as it
likes ([Note: Mixed groups]). Sizes divide each other, so groups lie as they do under the strategies
of one scheme on all ranks, whose communicators the candidates need. Steps of gathered layers are
phases as they are; where slices stay, those of one strategy are one phase, packed and refined like
any plan, and all phases together are pulled for and pushed once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.mixed_groups import MixedGroups, Step, plan_steps
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.profiles.link_times import LinkTimes
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.schemes.neighbours import num_cuts
from ds_hydra.strategy.schemes.placement import GroupKey, groups_of
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

_MANY = 16
"""Equal sequences of a full micro-batch, for which a second palette is put together."""
MAX_CUTS = 2000
"""Ways to cut the ranks that are tried; 64 ranks have 1,828."""


class Palette(NamedTuple):
    """Schemes, smallest first, what they take (`factors` times what the profile says) and hold, and
    the pull and push of the widest.
    """

    schemes: tuple[Scheme, ...]
    latency: tuple[LatencyModel, ...]
    factors: tuple[float, ...]
    max_len_tokens: tuple[int, ...]
    link: LinkTimes

    @property
    def traffic_ms(self) -> float:
        """Least time of a step."""
        return max(latency.traffic_ms for latency in self.latency)

    @property
    def keeps_slices(self) -> bool:
        """Whether all leave the same slices on every rank; else layers are gathered."""
        return not self.schemes[0].gather

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a group holds."""
        return max(self.max_len_tokens)

    def per_token_ms(self, num_sequences: int) -> float:
        """Of a full micro-batch of so many equal sequences on the smallest scheme."""
        lengths = [max(1, self.max_len_tokens[0] // num_sequences)] * num_sequences
        return self.latency[0].micro_batch_ms(lengths) / sum(lengths)

    def least_link_ms(self, num_buckets: int) -> float:
        """What pull and push add to a step at least, one by one in so many buckets; 0: as one."""
        return _total_ms(self.link) / max(1, num_buckets)


def find_palettes(
    schemes: Iterable[Scheme],
    profile: Profile,
    num_devices: int,
    *,
    max_len_tokens: Callable[[Scheme, Strategy], int],
    links_of: Callable[[Strategy], LinkTimes],
    factor_of: Callable[[Strategy], float] = lambda _: 1.0,
    groups: Collection[GroupKey] | None = None,
) -> list[Palette]:
    """What may be put together of `schemes`: one or two palettes for each number of checkpointed
    layers, where slices stay for each TP.

    For each number of ranks they have the scheme that is fastest for one sequence as long as it
    holds, or for `_MANY` short ones; the widest ones where all have too many cuts. `max_len_tokens`
    of a scheme in a strategy; `factor_of` a strategy of one scheme: what measured times make of T.
    `groups`: those that exist, where schemes that need others are left out.
    """
    of_kind: dict[tuple[bool, int, int], dict[int, Palette]] = {}
    for scheme in dict.fromkeys(schemes):
        number, rest = divmod(num_devices, scheme.num_devices)
        if scheme.pp > 1 or scheme.ep > 1 or scheme.stream or rest:
            continue
        alike = Strategy((scheme,) * number)
        if groups is not None and not groups_of(alike).issubset(groups):
            continue
        factor, held = factor_of(alike), max_len_tokens(scheme, alike)
        latency = profile.get_latency(scheme).scaled(factor)
        one = Palette((scheme,), (latency,), (factor,), (held,), links_of(alike))
        for count in (1, _MANY):
            alike_in = scheme.ckpt if scheme.gather else scheme.tp
            of_size = of_kind.setdefault((scheme.gather, alike_in, count), {})
            other = of_size.get(scheme.num_devices)
            if held > 0 and (other is None or one.per_token_ms(count) < other.per_token_ms(count)):
                of_size[scheme.num_devices] = one
    found = []
    for of_size in of_kind.values():
        sizes = [n for n in sorted(of_size) if all(not (m % n and n % m) for m in of_size)]
        while sizes and num_cuts(num_devices, tuple(sizes)) > MAX_CUTS:
            sizes = sizes[1:]
        if len(sizes) > 1:
            *fields, links = zip(*(of_size[size] for size in sizes))
            own, latencies, factors, max_len = (sum(field, ()) for field in fields)
            link = max(links, key=_total_ms)
            found.append(Palette(own, latencies, factors, max_len, link))
    return list({palette.schemes: palette for palette in found}.values())


def _total_ms(link: LinkTimes) -> float:
    return link.pull_ms + link.push_ms


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
            [latency.sequences_ms for latency in palette.latency],
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
