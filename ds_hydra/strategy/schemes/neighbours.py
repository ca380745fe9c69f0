"""Strategies one step away from a given one, and all of some schemes that fill the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from math import comb, lcm

from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, aligned_begins


def neighbour_strategies(strategy: Strategy, schemes: Iterable[Scheme]) -> tuple[Strategy, ...]:
    """Every strategy in which the fewest pipelines of one scheme give way to one of `schemes`.

    The exchanged pipelines have as many devices before as after.

    >>> schemes = [Scheme(4, 1), Scheme(1, 1)]
    >>> [str(s) for s in neighbour_strategies(Strategy.parse("2x<2,1>"), schemes)]
    ['1x<4,1>', '1x<2,1> + 2x<1,1>']
    """
    found: dict[Strategy, None] = {}
    counts = Counter(strategy.schemes)
    for old, count in counts.items():
        for new in schemes:
            devices = lcm(old.num_devices, new.num_devices)
            removed = devices // old.num_devices
            if new == old or removed > count or new.gather != old.gather:
                continue
            changed = counts - Counter({old: removed}) + Counter({new: devices // new.num_devices})
            found.setdefault(Strategy(tuple(changed.elements())))
    return tuple(found)


def full_strategies(schemes: Sequence[Scheme], num_devices: int, most: int) -> tuple[Strategy, ...]:
    """Every strategy of `schemes` that leaves no device over; none where these are more than
    `most`.

    >>> [str(s) for s in full_strategies([Scheme(1, 1), Scheme(2, 1)], 4, 9)]
    ['4x<1,1>', '1x<2,1> + 2x<1,1>', '2x<2,1>']
    """
    sizes = tuple(scheme.num_devices for scheme in schemes)
    if not sizes or num_cuts(num_devices, sizes) > most:
        return ()
    return tuple(
        Strategy(tuple(s for s, n in zip(schemes, counts) for _ in range(n)))
        for counts in cuts(num_devices, sizes)
    )


@lru_cache(maxsize=4096)
def num_cuts(num_ranks: int, sizes: tuple[int, ...]) -> int:
    """How many `cuts` there are."""
    if len(sizes) == 1:
        return int(num_ranks % sizes[0] == 0)
    last = sizes[-1]
    return sum(num_cuts(num_ranks - k * last, sizes[:-1]) for k in range(num_ranks // last + 1))


@lru_cache(maxsize=64)
def cuts(num_ranks: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """How many groups of each size: every way to use all ranks.

    >>> cuts(4, (1, 2))
    [(4, 0), (2, 1), (0, 2)]
    """
    if len(sizes) == 1:
        return [(num_ranks // sizes[0],)] if num_ranks % sizes[0] == 0 else []
    last = sizes[-1]
    return [
        (*head, count)
        for count in range(num_ranks // last + 1)
        for head in cuts(num_ranks - count * last, sizes[:-1])
    ]


UNEVEN_SIZES = (3, 6, 5, 7)
"""Ranks of groups beside those that divide all ranks, those first that are left out last."""


def fits_unevenly(size: int, num_ranks: int) -> bool:
    """Whether all ranks are no multiple of `size`, but of the next power of two."""
    is_aligned = num_ranks % (1 << size.bit_length()) == 0
    return size in UNEVEN_SIZES and num_ranks % size > 0 and is_aligned


_MAX_COMBINATIONS = 20_000
"""Of cuts of single blocks of ranks."""


@lru_cache(maxsize=64)
def aligned_cuts(num_ranks: int, sizes: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """Those of `cuts` whose groups have room where `Strategy.blocks` puts them; none where uneven
    ones among `sizes`, which ascend, make more than `most`.

    >>> aligned_cuts(8, (1, 3, 6), 9)
    [(8, 0, 0), (5, 1, 0), (2, 2, 0), (2, 0, 1)]
    """
    uneven = [size for size in sizes if fits_unevenly(size, num_ranks)]
    if not uneven:
        return cuts(num_ranks, sizes)
    block = 1 << max(uneven).bit_length()
    inside, wide = [s for s in sizes if s <= block], [s for s in sizes if s > block]
    of_block = [
        counts
        for counts in cuts(block, tuple(inside))
        if aligned_begins([s for s, n in zip(inside[::-1], counts[::-1]) for _ in range(n)])
    ]
    found: dict[tuple[int, ...], None] = {}
    for num_blocks, *of_wide in cuts(num_ranks // block, (1, *(size // block for size in wide))):
        if comb(len(of_block) + num_blocks - 1, num_blocks) > _MAX_COMBINATIONS:
            return []
        for own in combinations_with_replacement(of_block, num_blocks):
            found[(*map(sum, zip(*own, (0,) * len(inside))), *of_wide)] = None
    return [*found] if len(found) <= most else []
