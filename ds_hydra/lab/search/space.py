"""Hybrid strategies of one layer: the decision trees of Galvatron-BMW, §III-B.

A tree splits N devices into PP stages, then the N / PP devices of a stage level by level: each
level applies one of DP, SDP (ZeRO-3) and TP at a power of two, no paradigm twice. The order of the
levels says whose groups are runs of neighbouring devices. Activation checkpointing doubles the set.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import permutations

from ds_hydra.errors import HydraConfigError


class Paradigm(str, Enum):
    """How one level of a decision tree divides the devices below it."""

    DP = "DP"
    SDP = "SDP"
    TP = "TP"


_ALL_PARADIGMS = frozenset(Paradigm)


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """What one layer does on its N / PP devices: levels (paradigm, degree) from outer to inner.

    As text `PP-TP-DP`: `*` follows the degree whose groups are consecutive devices (only where both
    TP and DP divide the stage), `f` marks SDP, `-c` checkpointing: `1-2*-4f-c`.
    """

    pp: int
    levels: tuple[tuple[Paradigm, int], ...] = ()
    checkpoints: bool = False

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return self._degree(Paradigm.TP)

    @property
    def dp(self) -> int:
        """Data parallel degree, sharded or not: by what the batch is divided."""
        return self._degree(Paradigm.DP) * self._degree(Paradigm.SDP)

    @property
    def sdp(self) -> int:
        """By what sharding divides the model states."""
        return self._degree(Paradigm.SDP)

    @property
    def num_devices(self) -> int:
        """PP x TP x DP."""
        return self.pp * self.tp * self.dp

    @property
    def is_tp_consecutive(self) -> bool:
        """Whether a TP group is a run of neighbouring devices, as it is without any DP.

        The trees of the originals read so: TP above DP means consecutive TP groups.
        """
        order = [paradigm for paradigm, _ in self.levels]
        return self.dp == 1 or Paradigm.TP not in order or order[0] is Paradigm.TP

    @property
    def is_dp_consecutive(self) -> bool:
        """Whether a data parallel group is a run of neighbouring devices."""
        return self.tp == 1 or not self.is_tp_consecutive

    @property
    def layout(self) -> tuple[int, int, bool]:
        """What decides where the layer's activations lie: (TP, DP, consecutive TP groups)."""
        return self.tp, self.dp, self.is_tp_consecutive

    def __str__(self) -> str:
        both = self.tp > 1 and self.dp > 1
        tp = f"{self.tp}{'*' if both and self.is_tp_consecutive else ''}"
        sharded = "f" if self.sdp > 1 else ""
        dp = f"{self.dp}{sharded}{'*' if both and not self.is_tp_consecutive else ''}"
        return f"{self.pp}-{tp}-{dp}{'-c' if self.checkpoints else ''}"

    @classmethod
    def parse(cls, text: str) -> LayerStrategy:
        """The strategy written as `text`; raises HydraConfigError for anything `str` does not
        write.
        """
        match = re.fullmatch(r"(\d{1,6})-(\d{1,6})(\*?)-(\d{1,6})(f?)(\*?)(-c)?", text)
        if match is None:
            raise HydraConfigError(
                f"layer strategy {text!r} is not of the form PP-TP-DP, such as 1-2*-4f-c"
            )
        pp, tp, dp = int(match[1]), int(match[2]), int(match[4])
        data = (Paradigm.SDP if match[5] else Paradigm.DP, dp)
        levels = [data, (Paradigm.TP, tp)] if match[6] else [(Paradigm.TP, tp), data]
        strategy = cls(pp, tuple(level for level in levels if level[1] > 1), match[7] is not None)
        if str(strategy) != text or min(pp, tp, dp) < 1:
            raise HydraConfigError(
                f"layer strategy {text!r} reads as {strategy}; write it that way"
            )
        return strategy

    def _degree(self, paradigm: Paradigm) -> int:
        return next((degree for found, degree in self.levels if found is paradigm), 1)


def layer_strategies(
    num_devices: int,
    *,
    paradigms: Collection[Paradigm] = _ALL_PARADIGMS,
    pipelines: bool = True,
    checkpoints: bool = True,
    mixes_dp_and_sdp: bool = False,
) -> list[LayerStrategy]:
    """Every strategy of one layer on `num_devices` devices, for all PP degrees.

    `mixes_dp_and_sdp` keeps the trees that Takeaway #3 drops: SDP alone beats a mixture of both. On
    8 devices: 68 strategies before, 44 after Takeaway #3, 22 without checkpointing. Raises
    HydraConfigError where `num_devices` is not a power of two.
    """
    if num_devices < 1 or num_devices & (num_devices - 1):
        raise HydraConfigError(
            f"the search divides devices into halves, {num_devices} is not a power of two; give "
            f"{1 << max(num_devices, 1).bit_length() - 1} or {1 << max(num_devices, 1).bit_length()} devices"
        )
    strategies = []
    for pp in _powers_of_two(num_devices) if pipelines else (1,):
        for levels in _trees(num_devices // pp, paradigms):
            mixes = {Paradigm.DP, Paradigm.SDP} <= {paradigm for paradigm, _ in levels}
            if mixes and not mixes_dp_and_sdp:
                continue
            strategies.append(LayerStrategy(pp, levels))
            if checkpoints:
                strategies.append(LayerStrategy(pp, levels, checkpoints=True))
    return strategies


def _trees(
    num_devices: int, paradigms: Collection[Paradigm]
) -> Iterator[tuple[tuple[Paradigm, int], ...]]:
    """Ordered levels of distinct paradigms whose degrees multiply to `num_devices`."""
    for height in range(len(paradigms) + 1):
        for order in permutations(sorted(paradigms), height):
            for degrees in _factors(num_devices, height):
                yield tuple(zip(order, degrees, strict=True))


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered `count` powers of two of at least 2 with this product."""
    if count == 0:
        if product == 1:
            yield ()
        return
    for first in _powers_of_two(product)[1:]:
        for rest in _factors(product // first, count - 1):
            yield (first, *rest)


def _powers_of_two(largest: int) -> list[int]:
    return [1 << k for k in range(largest.bit_length())]
