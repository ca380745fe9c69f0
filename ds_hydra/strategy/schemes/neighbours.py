"""Strategies one step away from a given one: pipelines of one scheme exchanged for another on the
same devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import lcm

from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


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
