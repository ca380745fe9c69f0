"""Ranks fail together: an error that one rank finds is raised on all of them, instead of leaving them waiting."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra import errors
from ds_hydra.errors import HydraError


def gather_rows(mine: Tensor) -> Tensor:
    """[num_ranks, n] out of every rank's [n], in rank order. Collective over all ranks."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows)


def raise_together(error: Exception | None, device: torch.device) -> None:
    """Raise on all ranks if any rank brings an error. Collective over all ranks.

    A rank that brings one raises its own; the others raise that of the lowest failing rank, naming it.
    """
    has_error = gather_rows(torch.tensor([error is not None], dtype=torch.int64, device=device)).flatten()
    if not has_error.any():
        return
    source = int(has_error.nonzero()[0])
    name, text = broadcast_text([type(error).__name__, str(error)], source, device)
    if error is not None:
        raise error
    raise restore_error(name, f"rank {source}: {text}")


def restore_error(name: str, text: str) -> HydraError:
    """The error of ds_hydra of that name, or a HydraError that mentions it."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HydraError):
        return kind(text)
    return HydraError(f"{name}: {text}")


def broadcast_text(texts: list[str], source: int, device: torch.device) -> list[str]:
    """The texts of rank `source` on every rank; every rank passes as many. Collective over all ranks."""
    payload = join_texts(texts)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=source)
    body = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        body.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(body, src=source)
    return split_texts(bytes(body.cpu().tolist()))


def join_texts(texts: list[str]) -> bytes:
    """The texts as bytes, for `split_texts`."""
    return "\0".join(texts).encode()


def split_texts(payload: bytes) -> list[str]:
    """The texts that `join_texts` joined."""
    return payload.decode().split("\0")
