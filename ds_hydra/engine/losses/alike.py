"""What ranks must have alike of an objective: each pipeline computes its own sequences' part."""

from __future__ import annotations

import hashlib
import inspect
import math
import struct
from collections.abc import Iterator
from enum import Enum
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.engine.losses.objective import Objective, name_of, read_by
from ds_hydra.engine.ranks.agreement import broadcast_text, gather_rows
from ds_hydra.errors import PlanMismatchError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, Enum, Tensor, np.ndarray)
_SAME_NUMBER = 1e-9
"""Relative. Hosts with other instructions may add up in another order."""


def fingerprint(objective: Objective | None) -> tuple[int, int]:
    """63-bit digest of the loss, its parameters and the fields that it reads; the bits of the
    normaliser.
    """
    if objective is None:
        return 0, 0
    digest = hashlib.blake2b(repr(list(_parameters(objective))).encode(), digest_size=8)
    for fields in objective.fields:
        for name in read_by(objective.loss):
            digest.update(f"{name} {list(fields[name].shape)}".encode())
            digest.update(fields[name].contiguous().numpy())
    (bits,) = struct.unpack("<q", struct.pack("<d", objective.normaliser))
    return int.from_bytes(digest.digest(), "big") >> 1, bits


def are_alike(mine: tuple[int, int], theirs: tuple[int, int]) -> bool:
    """Whether two ranks' `fingerprint`s are of one objective."""
    one, other = (struct.unpack("<d", struct.pack("<q", bits))[0] for _, bits in (mine, theirs))
    return mine[0] == theirs[0] and math.isclose(one, other, rel_tol=_SAME_NUMBER)


def find_difference(objective: Objective | None, rank: int, device: torch.device) -> str:
    """What `rank` has in its objective that rank 0 has otherwise. Collective over all ranks."""
    mine = [text for part in _parts(objective) for text in part]
    first, other = (
        dict(zip(texts[::2], texts[1::2]))
        for texts in (broadcast_text(mine, source, device) for source in (0, rank))
    )
    for name in (*first, *other):
        if first.get(name) != other.get(name):
            return f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
    return f"the loss is another one on rank {rank} than on rank 0"


def check_value(loss: str, numbers: Tensor, device: torch.device) -> None:
    """Raise PlanMismatchError on all ranks where what `loss` gives, the `numbers` [n] fp64, differs
    although its fields do not. Collective over all ranks.
    """
    rows = gather_rows(numbers.to(device)).cpu()
    for rank, row in enumerate(rows):
        if not torch.allclose(row, rows[0], rtol=1e-6, atol=1e-12):
            raise PlanMismatchError(
                f"loss {loss} of the mini-batch is {float(rows[0][0])} on rank 0 and {float(row[0])} on rank {rank}, "
                "of the same fields; give every rank the same numbers in what it reads beside them"
            )


def _parameters(objective: Objective) -> Iterator[tuple[str, str]]:
    """Names and values of what the loss has been given: numbers, texts, tuples and arrays in
    attributes whose names do not begin with "_".
    """
    loss = objective.loss
    yield "the loss", name_of(loss)
    for name in dir(loss):
        value = None if name.startswith("_") else inspect.getattr_static(loss, name)
        if isinstance(value, MemberDescriptorType):  # of a class with slots
            value = getattr(loss, name, None)
        if value is not None and _is_plain(value):
            yield f"{name} of loss {name_of(loss)}", _text(value)


def _parts(objective: Objective | None) -> Iterator[tuple[str, str]]:
    """All that is compared, each with its name."""
    if objective is None:
        yield "the loss", "the mean cross entropy"
        return
    yield from _parameters(objective)
    yield f"what loss {name_of(objective.loss)} is divided by", str(objective.normaliser)
    for name in read_by(objective.loss):
        for number, fields in enumerate(objective.fields):
            yield f"{name!r} of example {number} of the mini-batch", _text(fields[name])


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Tensor | np.ndarray):
        held = torch.as_tensor(value).detach().cpu().contiguous()
        if not held.dim():
            return str(held.item())
        digest = hashlib.blake2b(held.flatten().view(torch.uint8).numpy(), digest_size=4)
        return f"{list(held.shape)} values (digest {digest.hexdigest()})"
    return repr(value)
