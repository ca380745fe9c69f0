"""Memory that all ranks of a host read and write, and locks on parts of it.

An anonymous file (`memfd_create`) of the host's first rank, which the others open by way of
/proc: it needs no room in /dev/shm, has no name that could stay behind, and is gone with the last
process that holds it. Locks are the kernel's own on ranges of that file, and go with their
process too.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.ranks.agreement import gather_rows, raise_together
from ds_hydra.engine.ranks.host_memory import available_bytes
from ds_hydra.errors import HydraConfigError

_LOCK_AND_WAIT = 38  # F_OFD_SETLKW: owned by the open file, not by the process


class SharedMemory:
    """`nbytes` of memory, zero at first, that the ranks in `ranks`, all of this host, share.

    Collective over all ranks of the run, whatever their hosts. Raises HydraConfigError on all of
    them where one cannot take part; `purpose` says what for, and what to leave out instead.
    """

    def __init__(self, ranks: tuple[int, ...], nbytes: int, purpose: str, device: torch.device):
        rank, first = dist.get_rank(), ranks[0]
        self._file = -1
        error: Exception | None = None
        try:
            if rank == first:
                self._file = _create(nbytes, purpose)
        except HydraConfigError as caught:
            error = caught
        raise_together(error, device)
        mine = torch.tensor(_identify(self._file), dtype=torch.int64, device=device)
        process, number, *identity = gather_rows(mine)[first].tolist()
        try:
            if rank != first:
                self._file = _open(process, number, identity, purpose, first)
            self.bytes = _map(self._file, nbytes, purpose)
        except HydraConfigError as caught:
            error = caught
        raise_together(error, device)

    @contextlib.contextmanager
    def locked(self, begin: int, nbytes: int) -> Iterator[None]:
        """While open, no other rank is in a lock that overlaps these bytes."""
        self._lock(fcntl.F_WRLCK, begin, nbytes)
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK, begin, nbytes)

    def close(self) -> None:
        """Let go of the file; tensors that are views of the memory keep it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lock(self, kind: int, begin: int, nbytes: int) -> None:
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, begin, nbytes, 0)
        fcntl.fcntl(self._file, _LOCK_AND_WAIT, request)


def _create(nbytes: int, purpose: str) -> int:
    free = available_bytes()
    if nbytes > free:
        raise HydraConfigError(
            f"{purpose}: this takes {nbytes / 1e9:.2f} GB of memory that the ranks of a host share, and "
            f"{free / 1e9:.2f} GB are free"
        )
    try:
        file = os.memfd_create(f"ds_hydra_{os.getpid()}")
        os.ftruncate(file, nbytes)
    except (OSError, AttributeError) as error:
        raise HydraConfigError(
            f"{purpose}: this system gives no shared memory ({error})"
        ) from error
    return file


def _identify(file: int) -> list[int]:
    """Process, file descriptor, and what tells this file from others of the host."""
    if file < 0:
        return [0, 0, 0, 0]
    found = os.fstat(file)
    return [os.getpid(), file, found.st_dev, found.st_ino]


def _open(process: int, number: int, identity: list[int], purpose: str, owner: int) -> int:
    path = Path(f"/proc/{process}/fd/{number}")
    advice = "start all ranks of a host as one user in one container"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HydraConfigError(
            f"{purpose}: the memory of rank {owner} on the same host cannot be opened ({error}); {advice}"
        ) from error
    if _identify(file)[2:] != identity:
        os.close(file)
        raise HydraConfigError(f"{purpose}: {path} is not the memory of rank {owner}; {advice}")
    return file


def _map(file: int, nbytes: int, purpose: str) -> Tensor:
    try:
        return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
    except OSError as error:
        raise HydraConfigError(
            f"{purpose}: {nbytes / 1e9:.2f} GB of shared memory cannot be mapped ({error})"
        ) from error
