"""How a scheme is written: `<sp2,4,1;ckpt=2>`."""

from __future__ import annotations

import re
from typing import Any

from ds_hydra.errors import HydraConfigError

_DEGREES = re.compile(
    r"\s*(?:sp\s*(\d{1,9})\s*,\s*)?(?:cp\s*(\d{1,9})\s*,\s*)?(?:(\d{1,9})\s*,\s*)?(\d{1,9})\s*"
)
_OPTION = re.compile(r"\s*([a-z_]{1,20})\s*(?:=\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*)?")
_COUNTED = ("ckpt", "stages", "ep")
_FLAGS = ("stream", "gather")

MAX_LAYERS = 1 << 20
"""Layers that an option of a scheme may name: far above any model."""

ALL_STREAM = (
    "all layers of a scheme stream or none: write <2,2;stream>, or <2,1;gather> in all pipelines"
)
"""To whoever gives `stream` a number."""

REPLACED = "a scheme has repull, which stream replaces: write <1,1;stream>, or <1,1;gather>"

FORM = (
    "write terms like '2x<4,1>' (count x <TP,PP>) joined by '+'; a scheme may have options, as in "
    "'<2,4;ckpt=12;stages=9,8,8,7>', '<sp2,4,1>' (<SP,TP,PP>), '<cp2,1>' (<CP,PP>), "
    "'<2,2;stream>', '<1,1;gather>' or '<sp4,1;ep=4>' (experts)"
)


def read_notation(body: str) -> dict[str, Any]:
    """Fields of the scheme whose text is `body` between angle brackets; raises HydraConfigError."""
    first, *rest = body.split(";")
    degrees = _DEGREES.fullmatch(first)
    if degrees is None or not (degrees[1] or degrees[2] or degrees[3]):
        raise HydraConfigError(f"cannot read {'<' + body[:80] + '>'!r}; {FORM}")
    options: dict[str, tuple[int, ...]] = {}
    flags: dict[str, bool] = {}
    for text in rest:
        match = _OPTION.fullmatch(text)
        name, counts = match.groups() if match is not None else (text.strip(), None)
        if name == "repull" and counts:
            raise HydraConfigError(f"scheme {'<' + body[:80] + '>'!r}: {REPLACED}")
        if name == "stream" and counts:
            raise HydraConfigError(f"scheme {'<' + body[:80] + '>'!r}: {ALL_STREAM}")
        if name not in (_COUNTED if counts else _FLAGS):
            raise HydraConfigError(
                f"scheme {'<' + body[:80] + '>'!r}: cannot read {text.strip()[:80]!r}; its options are "
                f"{', '.join((*_COUNTED, *_FLAGS))}, as in '<2,4;ckpt=12;stages=9,8,8,7>'"
            )
        if name in options or name in flags:
            raise HydraConfigError(
                f"scheme {'<' + body[:80] + '>'!r} says {name} twice; say it once"
            )
        if counts:
            options[name] = tuple(map(int, counts.split(",")))
        else:
            flags[name] = True
    stages = options.pop("stages", ())
    for option, counts in options.items():
        if len(counts) != 1 or counts[0] < 1:
            raise HydraConfigError(
                f"scheme {'<' + body[:80] + '>'!r}: {option} is {','.join(map(str, counts))[:80]}, expected one number "
                "from 1 up; leave it out for none"
            )
    return {
        "tp": int(degrees[3] or 1),
        "pp": int(degrees[4]),
        "stages": stages,
        "sp": int(degrees[1] or 1),
        "cp": int(degrees[2] or 1),
        **flags,
        **{option: counts[0] for option, counts in options.items()},
    }
