"""Schemes that fit so many devices, the strategies that they make (all, those that fill the
devices, those one step away from a given one), and those that a `ds_hydra.strategies/1` file names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

from ds_hydra.configs.files import read_json_object, reading
from ds_hydra.configs.hydra_config import Space
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

_FEW = 8
"""Devices of one node, whose groups of all sizes are no more than a few."""

STRATEGIES_SCHEMA = "ds_hydra.strategies/1"


def is_power_of_two(number: int) -> bool:
    """Whether a number above 0 is a power of two."""
    return number & (number - 1) == 0


def power_of_two_schemes(num_devices: int) -> tuple[Scheme, ...]:
    """Every <TP,PP> of powers of two that fits `num_devices`, smallest first."""
    degrees = [1 << exponent for exponent in range(num_devices.bit_length())]
    return fitting_schemes(num_devices, tp=degrees, pp=degrees)


def measured_beside(
    num_devices: int, space: Space, *, are_nodes: bool = False
) -> tuple[Scheme, ...]:
    """Schemes measured at the start beside <TP,PP> for proposals of `space`: <1,1;gather> and
    <spN,1;gather>, of which phases are put together. Nothing else tells their times on hardware
    without a description. Up to `_FEW` devices every N; on more the widest alone, whose groups are
    few. Where there `are_nodes`, with `hpz` as well.

    >>> [str(s) for s in measured_beside(4, "full")]
    ['<1,1;gather>', '<sp2,1;gather>', '<sp4,1;gather>']
    >>> [str(s) for s in measured_beside(64, "full", are_nodes=True)]
    ['<1,1;gather>', '<sp8,1;gather>', '<1,1;hpz>', '<sp8,1;hpz>']
    >>> [str(s) for s in measured_beside(20, "full")]
    ['<1,1;gather>', '<sp4,1;gather>']
    """
    if space == "plain":
        return ()
    degrees = [n for n in range(1, _FEW + 1) if is_power_of_two(n) and num_devices % n == 0]
    if num_devices > _FEW:
        degrees = sorted({degrees[0], degrees[-1]})
    return tuple(
        Scheme(1, 1, sp=n, gather=True, hpz=hpz)
        for hpz in (False, True)[: 1 + are_nodes]
        for n in degrees
    )


def fitting_schemes(
    num_devices: int,
    *,
    tp: Iterable[int] | None = None,
    pp: Iterable[int] | None = None,
    sp: Iterable[int] = (1,),
    cp: Iterable[int] = (1,),
) -> tuple[Scheme, ...]:
    """Every <SP,CP,TP,PP> that fits `num_devices`, smallest first: of the given degrees, else of
    powers of two and divisors of `num_devices` (which fill clusters of 6 or 12 devices).

    >>> [str(s) for s in fitting_schemes(6, tp=[1, 2])]
    ['<1,1>', '<2,1>', '<1,2>', '<1,3>', '<2,2>', '<1,4>', '<2,3>', '<1,6>']
    """
    degrees = [n for n in range(1, num_devices + 1) if num_devices % n == 0 or is_power_of_two(n)]
    schemes = {
        Scheme(t, p, sp=s, cp=c)
        for s, c in product(sp, cp)
        for t in tp or degrees
        for p in pp or degrees
        if s * c * t * p <= num_devices
    }
    return tuple(sorted(schemes, key=lambda s: (s.num_devices, s.pp, s.sp, s.cp)))


def enumerate_strategies(schemes: Iterable[Scheme], num_devices: int) -> tuple[Strategy, ...]:
    """All strategies of one of `schemes`, or two, that use every device.

    >>> [str(s) for s in enumerate_strategies([Scheme(1, 1), Scheme(2, 1)], 4)]
    ['4x<1,1>', '1x<2,1> + 2x<1,1>', '2x<2,1>']
    """
    ordered = sorted(set(schemes), key=lambda s: (s.num_devices, s.pp))
    found: dict[Strategy, None] = {}
    for number, scheme in enumerate(ordered, start=1):
        for count in range(num_devices // scheme.num_devices, 0, -1):
            own, free = (scheme,) * count, num_devices - count * scheme.num_devices
            if not free:
                found.setdefault(Strategy(own))
            for other in ordered[number:] if free else ():
                if free % other.num_devices == 0:
                    found.setdefault(Strategy(own + (other,) * (free // other.num_devices)))
    return tuple(found)


def strategies_from_json(
    document: Mapping[str, Any], *, source: str = "strategies"
) -> tuple[Strategy, ...]:
    """The candidates in a `ds_hydra.strategies/1` document; raises HydraConfigError naming
    `source`.
    """
    with reading(document, STRATEGIES_SCHEMA, source):
        texts = document.get("strategies")
        if not isinstance(texts, list) or not texts or {*map(type, texts)} != {str}:
            raise HydraConfigError(
                "strategies must be a list of texts, e.g. ['4x<16,1>', '8x<8,1>']"
            )
        return parse_strategies(texts)


def load_strategies(wanted: str | Sequence[str]) -> tuple[Strategy, ...]:
    """Strategies given as texts or as the path of a `ds_hydra.strategies/1` file."""
    if isinstance(wanted, str):
        return strategies_from_json(read_json_object(Path(wanted)), source=wanted)
    return parse_strategies(wanted)


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
            if new == old or removed > count or new.gathering != old.gathering:
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
    """Number of `cuts`."""
    if len(sizes) == 1:
        return int(num_ranks % sizes[0] == 0)
    last = sizes[-1]
    return sum(num_cuts(num_ranks - k * last, sizes[:-1]) for k in range(num_ranks // last + 1))


@lru_cache(maxsize=64)
def cuts(num_ranks: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Numbers of groups of each size: every way to use all ranks.

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
