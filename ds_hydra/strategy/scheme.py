"""What a parallel strategy is: schemes <TP,PP>, their multiset, and where each pipeline's ranks are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ds_hydra.errors import HydraConfigError

_SCHEME_TEXT = re.compile(r"\s*(?:(\d{1,9})\s*x\s*)?<\s*(\d{1,9})\s*,\s*(\d{1,9})\s*>\s*")


MAX_DEVICES = 1 << 18
"""Ranks that a strategy may name: far above any cluster, and small enough to list."""


@dataclass(frozen=True, slots=True, order=True)
class Scheme:
    """The parallel scheme <TP,PP> of one pipeline: `pp` stages of `tp` ranks each."""

    tp: int
    pp: int

    def __post_init__(self) -> None:
        if not isinstance(self.tp, int) or not isinstance(self.pp, int) or self.tp < 1 or self.pp < 1:
            raise HydraConfigError(f"scheme <{self.tp},{self.pp}>: TP and PP degrees must be 1 or more")
        if self.tp * self.pp > MAX_DEVICES:
            raise HydraConfigError(f"scheme {str(self)[:80]}: more than {MAX_DEVICES} ranks")

    @property
    def num_devices(self) -> int:
        """Ranks that one pipeline of this scheme occupies (N(P) in §7)."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"<{self.tp},{self.pp}>"


def _placement_order(scheme: Scheme) -> tuple[int, int]:
    return (-scheme.tp, -scheme.pp)


@dataclass(frozen=True, slots=True)
class Strategy:
    """The multiset of schemes of all pipelines, e.g. `1x<8,2> + 4x<4,1>`.

    `schemes` is kept in placement order (larger TP first, then larger PP), so equal multisets are equal
    values and TP groups start at multiples of their size when degrees are powers of two.
    """

    schemes: tuple[Scheme, ...]

    def __post_init__(self) -> None:
        if not self.schemes:
            raise HydraConfigError("a strategy needs at least one pipeline, e.g. '1x<1,1>'")
        object.__setattr__(self, "schemes", tuple(sorted(self.schemes, key=_placement_order)))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy written as `text`; raises HydraConfigError with the expected form.

        >>> str(Strategy.parse("4x<1,1> + <2,2>"))
        '1x<2,2> + 4x<1,1>'
        """
        schemes: list[Scheme] = []
        num_devices = 0
        for term in text.split("+"):
            match = _SCHEME_TEXT.fullmatch(term)
            if match is None or match[1] == "0":
                raise HydraConfigError(
                    f"strategy {text[:80]!r}: cannot read {term.strip()[:80]!r}; "
                    "write terms like '2x<4,1>' (count x <TP,PP>) joined by '+'"
                )
            scheme, count = Scheme(int(match[2]), int(match[3])), int(match[1] or 1)
            num_devices += count * scheme.num_devices
            if num_devices > MAX_DEVICES:
                raise HydraConfigError(f"strategy {text[:80]!r} names more than {MAX_DEVICES} ranks")
            schemes += [scheme] * count
        return cls(tuple(schemes))

    @property
    def num_devices(self) -> int:
        """Ranks that all pipelines together occupy."""
        return sum(scheme.num_devices for scheme in self.schemes)

    @property
    def is_heterogeneous(self) -> bool:
        """Whether two pipelines have different schemes."""
        return len(set(self.schemes)) > 1

    def place(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each pipeline: consecutive blocks in the order of `schemes`, starting at rank 0.

        Inside a pipeline rank `ranks[stage * tp + t]` runs TP slice `t` of `stage`. Ranks from
        `num_devices` on are in no pipeline (idle during propagation).

        >>> Strategy.parse("1x<2,1> + 2x<1,1>").place()
        ((0, 1), (2,), (3,))
        """
        blocks: list[tuple[int, ...]] = []
        start = 0
        for scheme in self.schemes:
            blocks.append(tuple(range(start, start + scheme.num_devices)))
            start += scheme.num_devices
        return tuple(blocks)

    def __str__(self) -> str:
        return " + ".join(f"{count}x{scheme}" for scheme, count in Counter(self.schemes).items())


def parse_strategies(texts: Iterable[str]) -> tuple[Strategy, ...]:
    """The strategies written as `texts`, duplicates removed, first occurrence kept."""
    return tuple(dict.fromkeys(Strategy.parse(text) for text in texts))
