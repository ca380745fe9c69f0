"""Strategies of whole pipelines near one of the relaxed program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

MAX_ROUNDED_SCHEMES = 6
"""Schemes of one relaxed strategy that are rounded both ways; the ones with the fewest devices
beyond are rounded down. 2^6 strategies for one maximum length are more than a planner wants to look
at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedStrategy:
    """S[N][L] of Problem 1 before rounding: fractional numbers of pipelines, and the time t[N][L].

    `longest_scheme` takes the interval that holds the longest sequences.
    """

    max_length_tokens: int
    num_pipelines: tuple[tuple[Scheme, float], ...]
    longest_scheme: Scheme
    time_ms: float


def round_strategy(
    relaxed: RelaxedStrategy,
    num_devices: int,
    fillers: Sequence[Scheme],
) -> tuple[Strategy, ...]:
    """All integer strategies near `relaxed` on at most `num_devices`.

    Every number of pipelines is rounded down and up, the scheme of the longest sequences to one at
    least. What does not fit is made to fit, and what is left free is filled, by one scheme after
    the other in the role of the one that gives way; devices still free go to `fillers`, in their
    order.

    >>> counts = ((Scheme(4, 1), 0.4), (Scheme(1, 1), 6.4))
    >>> relaxed = RelaxedStrategy(max_length_tokens=9, num_pipelines=counts,
    ...                           longest_scheme=Scheme(4, 1), time_ms=1.0)
    >>> [str(s) for s in round_strategy(relaxed, 8, ())]
    ['1x<4,1> + 4x<1,1>']
    """
    counts = dict(relaxed.num_pipelines)
    by_share = sorted(counts, key=lambda s: -counts[s] * s.num_devices)
    choices = [_neighbours(x, by_share.index(s) < MAX_ROUNDED_SCHEMES) for s, x in counts.items()]
    rounded: dict[tuple[tuple[Scheme, int], ...], None] = {}
    for combination in product(*choices):
        for giving_way in by_share[:MAX_ROUNDED_SCHEMES]:
            others = {s: c for s, c in zip(counts, combination) if s != giving_way}
            if giving_way != relaxed.longest_scheme:
                others[relaxed.longest_scheme] = max(1, others[relaxed.longest_scheme])
            free = num_devices - sum(s.num_devices * c for s, c in others.items())
            count = free // giving_way.num_devices
            if free < 0 or (giving_way == relaxed.longest_scheme and count < 1):
                continue
            chosen = {**others, giving_way: count}
            filled = Counter(chosen)
            filled.update(
                _fill(num_devices - sum(s.num_devices * c for s, c in chosen.items()), fillers)
            )
            rounded.setdefault(tuple(sorted((+filled).items())))
    return tuple(_strategy_of(counts) for counts in rounded)


@lru_cache(maxsize=4096)
def _strategy_of(counts: tuple[tuple[Scheme, int], ...]) -> Strategy:
    """The strategy of so many pipelines of each scheme; large ones take a while to make."""
    return Strategy(tuple(scheme for scheme, count in counts for _ in range(count)))


def _neighbours(number: float, is_rounded_up: bool) -> list[int]:
    below, above = int(np.floor(number + 1e-9)), int(np.ceil(number - 1e-9))
    return [below, above] if is_rounded_up and above > below else [below]


def _fill(num_free: int, fillers: Sequence[Scheme]) -> list[Scheme]:
    added: list[Scheme] = []
    for scheme in fillers:
        added += [scheme] * (num_free // scheme.num_devices)
        num_free %= scheme.num_devices
    return added
