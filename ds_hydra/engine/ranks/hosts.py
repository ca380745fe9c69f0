"""Which ranks share a host, and the memory that they share: of the host, and of its accelerators.

The ranks themselves tell where they are, so that it is right under every launcher.

[Note: Memory without a name]
`SharedMemory` is an anonymous file (`memfd_create`) of the host's first rank, which the others open
by way of /proc: it needs no room in /dev/shm, has no name that could stay behind, and is gone with
the last process that holds it. Locks are the kernel's own on ranges of that file, and go with their
process too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.ranks.agreement import gather_ragged, gather_rows, run_together
from ds_hydra.engine.ranks.memory import available_bytes
from ds_hydra.errors import HydraConfigError

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run, numbered in the order of their first ranks."""

    names: tuple[str, ...]
    of_rank: tuple[int, ...]

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """All ranks of the host of `rank`."""
        return tuple(other for other, host in enumerate(self.of_rank) if host == self.of_rank[rank])

    def describe_place(self, rank: int) -> str:
        """The host of `rank` with all its ranks, as errors name it; empty where there is only
        one.
        """
        if len(self.names) == 1:
            return ""
        ranks = list(map(str, self.ranks_beside(rank)))
        listed = ", ".join(ranks) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"
        return f"host {self.names[self.of_rank[rank]]} (rank{'s' * (len(ranks) > 1)} {listed})"


def find_hosts(device: torch.device) -> Hosts:
    """The hosts of all ranks. Collective over all ranks."""
    name = torch.tensor(list(socket.gethostname().encode()))
    rows = gather_ragged([torch.tensor([_host_digest()]), name], torch.int64, device)
    digests = [int(digest) for digest, _ in rows]
    first_ranks = [digests.index(digest) for digest in dict.fromkeys(digests)]
    names = [bytes(rows[rank][1].tolist()).decode(errors="replace") for rank in first_ranks]
    number = {digests[rank]: index for index, rank in enumerate(first_ranks)}
    return Hosts(tuple(names), tuple(number[digest] for digest in digests))


def _host_digest() -> int:
    """63 bits of name and boot of this host: some clusters give all hosts one name, containers of a
    host one boot.
    """
    try:
        boot = _BOOT_ID.read_text()
    except OSError:
        boot = ""
    digest = hashlib.blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def find_ranks_per_core(hosts: Hosts, device: torch.device) -> float:
    """How many ranks share a core where ranks compute on cores: their threads over the cores that
    they may use, on the host where these are fewest; 1.0 on accelerators. Collective over all
    ranks.
    """
    if device.type != "cpu":
        return 1.0
    mine = torch.tensor([torch.get_num_threads(), *sorted(os.sched_getaffinity(0))])
    threads, cores = Counter[int](), defaultdict[int, set[int]](set)
    for host, (row,) in zip(hosts.of_rank, gather_ragged([mine], torch.int64, device)):
        threads[host] += int(row[0])
        cores[host] |= set(row[1:].tolist())
    return max(1.0, *(threads[host] / len(cores[host]) for host in threads))


def count_ranks_here() -> int:
    """Ranks of this host as the launcher tells them (torchrun, DeepSpeed), else all; not
    collective.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(launched) if launched else dist.get_world_size()


def ranks_per_node(host_of: Sequence[int]) -> int:
    """Nodes of how many consecutive ranks the hosts consist of: all of a host's ranks where hosts
    are alike.

    The last host may have fewer ranks than the others. Hosts that differ are cut into nodes of the
    greatest common divisor, and hosts whose ranks are not consecutive into nodes of one rank.

    >>> [ranks_per_node(hosts) for hosts in ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 0, 1])]
    [3, 2, 1]
    """
    runs = [len(list(run)) for _, run in groupby(host_of)]
    if len(runs) > len(set(host_of)):
        return 1
    *all_but_last, last = runs
    if all_but_last and len(set(all_but_last)) == 1 and last <= all_but_last[0]:
        return all_but_last[0]
    return gcd(*runs)


def warn_of_placement(host_of: Sequence[int]) -> None:
    """Say what is slow about the order of the ranks, if anything; for one rank to call."""
    sizes = list(Counter(host_of).values())
    runs = [host for host, _ in groupby(host_of)]
    if len(runs) > len(sizes):
        logger.warning(
            "the ranks of a host are not consecutive (hosts of the first ranks: %s): TP groups will span hosts, and "
            "slices cross the network once per rank. Start the ranks host by host (Open MPI: --map-by slot, Slurm: "
            "--distribution=block)",
            ", ".join(map(str, host_of[:8])),
        )
    elif len(set(sizes)) > 1:
        logger.warning(
            "hosts run different numbers of ranks (%s): routes take them for nodes of %d ranks, and TP groups may "
            "span hosts; start as many ranks on every host",
            ", ".join(map(str, sizes[:8])),
            ranks_per_node(host_of),
        )


def find_ranks_per_node(config: LinkConfig, host_of: Sequence[int]) -> int | None:
    """Ranks of a node for node-aware routes, or None for direct ones (always on a single node)."""
    found = devices_per_node(config, host_of)
    return found if config.routes == "node" and 1 < found < len(host_of) else None


def devices_per_node(config: LinkConfig, host_of: Sequence[int]) -> int:
    """Ranks of a node; `host_of`, the host of every rank, answers what
    `hydra.link.devices_per_node` leaves open.
    """
    return config.devices_per_node or ranks_per_node(host_of)


_LOCK_AND_WAIT = 38  # F_OFD_SETLKW: owned by the open file, not by the process


class SharedMemory:
    """`nbytes` of memory, zero at first, that the ranks in `ranks`, all of this host, share.

    Collective over all ranks of the run, whatever their hosts. Raises HydraConfigError on all of
    them where one cannot take part; `purpose` says what for, and what to leave out instead.
    """

    def __init__(self, ranks: tuple[int, ...], nbytes: int, purpose: str, device: torch.device):
        is_first = dist.get_rank() == ranks[0]
        self._file = run_together(lambda: _create(nbytes, purpose) if is_first else -1, device)
        mine = torch.tensor(_identify(self._file), dtype=torch.int64, device=device)
        of_first = gather_rows(mine)[ranks[0]].tolist()

        def open_and_map() -> Tensor:
            if not is_first:
                self._file = _open(*of_first, purpose=purpose, owner=ranks[0])
            return _map(self._file, nbytes, purpose)

        self.bytes = run_together(open_and_map, device)

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
        # No name in /dev/shm, which is small in containers, and nothing is left behind by a crash.
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


def _open(process: int, number: int, *identity: int, purpose: str, owner: int) -> int:
    path = Path(f"/proc/{process}/fd/{number}")
    advice = "start all ranks of a host as one user in one container"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HydraConfigError(
            f"{purpose}: the memory of rank {owner} on the same host cannot be opened ({error}); {advice}"
        ) from error
    if tuple(_identify(file)[2:]) != identity:
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


Result = TypeVar("Result")

_SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"

Allocate = Callable[[int, torch.device, dist.ProcessGroup], Callable[[], Sequence[Tensor]]]
"""Takes this rank's part, of the same size on all, and returns what maps those of the others:
collective over the group, the bytes of each member's part in the order of the group. This rank's
own part is its own memory.
"""


def allocate_symmetric(
    nbytes: int, device: torch.device, group: dist.ProcessGroup
) -> Callable[[], Sequence[Tensor]]:
    """Parts of `nbytes` by torch's symmetric memory: copies go over NVLink or PCIe."""
    # Nothing here multicasts, and its set-up fails where no fabric manager runs.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)

    def share() -> Sequence[Tensor]:
        handle = _symmetric_memory.rendezvous(own, group)
        return [
            own if peer == group.rank() else handle.get_buffer(peer, (nbytes,), torch.uint8)
            for peer in range(group.size())
        ]

    return share


ALLOCATORS: dict[str, Allocate] = {"cuda": allocate_symmetric}
"""By type of device."""


class PeerMemory:
    """`nbytes` of device memory of each rank of `group`, zero at first, as bytes in `parts`.

    Collective over all ranks of the run, whatever their hosts. Raises HydraConfigError on all of
    them where a device has too little memory or cannot be mapped; `purpose` says what for, and
    what to leave out instead.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, purpose: str, device: torch.device):

        def named(step: Callable[[], Result]) -> Result:
            try:
                return step()
            except (RuntimeError, ImportError) as error:  # torch.OutOfMemoryError is a RuntimeError
                shared = "overlapping devices" in str(error)
                raise HydraConfigError(
                    f"{purpose}: {nbytes / 1e9:.2f} GB of {device} cannot be shared with the ranks of this host "
                    f"({str(error).splitlines()[0]}); their devices must reach each other's memory (NVLink or PCIe "
                    "peer-to-peer), all of a host's ranks in one container"
                    + (f"; where ranks shall share a device, export {_SHARING}" if shared else "")
                ) from error

        # All have their part before any waits for the others
        share = run_together(
            lambda: named(lambda: ALLOCATORS[device.type](nbytes, device, group)), device
        )
        self.parts = run_together(lambda: named(share), device)
        self.parts[group.rank()].zero_()
