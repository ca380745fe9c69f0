"""How a scheme is written: `<sp2,4,1;ckpt=2>`."""

from __future__ import annotations

import re
from typing import Any

from ds_hydra.errors import HydraConfigError

_DEGREES = re.compile(
    r"\s*(?:sp\s*(\d{1,9})\s*,\s*)?(?:cp\s*(\d{1,9})\s*,\s*)?(?:(\d{1,9})\s*,\s*)?(\d{1,9})\s*"
)
_OPTION = re.compile(r"\s*([a-z_]{1,20})\s*=\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*")
_COUNTED = ("ckpt", "stages", "stream", "ep")
_OPTIONS = (*_COUNTED, "gather")

MAX_LAYERS = 1 << 20
"""Layers that an option of a scheme may name: far above any model."""

ALL_LAYERS = MAX_LAYERS + 1
"""`stream` of a scheme that streams every layer, the embedding and the head: above any number of
layers, so that `min(stream, layers)` layers of a stage stream.
"""

REPLACED = (
    "a scheme has repull, which stream replaces: write <2,2;stream=8> for the first 8 layers of each stage, "
    "<1,1;stream> for all layers"
)

FORM = (
    "write terms like '2x<4,1>' (count x <TP,PP>) joined by '+'; a scheme may have options, as in "
    "'<2,4;ckpt=12;stages=9,8,8,7>', '<sp2,4,1>' (<SP,TP,PP>), '<cp2,1>' (<CP,PP>), '<2,2;stream=8>', "
    "'<1,1;stream>' (all layers), '<1,1;gather>' or '<sp4,1;ep=4>' (experts)"
)


def read_notation(body: str) -> dict[str, Any]:
    """Fields of the scheme whose text is `body` between angle brackets; raises HydraConfigError."""
    first, *rest = body.split(";")
    degrees = _DEGREES.fullmatch(first)
    if degrees is None or not (degrees[1] or degrees[2] or degrees[3]):
        raise HydraConfigError(f"cannot read {'<' + body[:80] + '>'!r}; {FORM}")
    options: dict[str, tuple[int, ...]] = {}
    gather = False
    for text in rest:
        if text.strip() == "gather" and not gather:
            gather = True
            continue
        match = _OPTION.fullmatch(f"stream={ALL_LAYERS}" if text.strip() == "stream" else text)
        if match is not None and match[1] == "repull":
            raise HydraConfigError(f"scheme {'<' + body[:80] + '>'!r}: {REPLACED}")
        if match is None or match[1] not in _COUNTED:
            raise HydraConfigError(
                f"scheme {'<' + body[:80] + '>'!r}: cannot read {text.strip()[:80]!r}; its options are "
                f"{', '.join(_OPTIONS)}, as in '<2,4;ckpt=12;stages=9,8,8,7>'"
            )
        if match[1] in options:
            raise HydraConfigError(
                f"scheme {'<' + body[:80] + '>'!r} says {match[1]} twice; say it once"
            )
        options[match[1]] = tuple(map(int, match[2].split(",")))
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
        "gather": gather,
        **{option: counts[0] for option, counts in options.items()},
    }
