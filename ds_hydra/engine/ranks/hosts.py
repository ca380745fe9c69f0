"""Ranks that share a host.

The ranks themselves tell where they are, so that it is right under every launcher.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from pathlib import Path

import torch

from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine.ranks.agreement import gather_ragged

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
    """Ranks per core, 1.0 or more, where ranks compute on cores: their threads over the cores that
    they may use, on the fullest host. 1.0 on accelerators. Collective over all ranks.
    """
    if device.type != "cpu":
        return 1.0
    mine = torch.tensor([torch.get_num_threads(), *sorted(os.sched_getaffinity(0))])
    threads, cores = Counter[int](), defaultdict[int, set[int]](set)
    for host, (row,) in zip(hosts.of_rank, gather_ragged([mine], torch.int64, device)):
        threads[host] += int(row[0])
        cores[host] |= set(row[1:].tolist())
    return max(1.0, *(threads[host] / len(cores[host]) for host in threads))


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
    """Warn of a slow order of the ranks; for one rank to call."""
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
    """Return the ranks of a node, or None where none relays: on one node, or nodes of one rank."""
    found = devices_per_node(config, host_of)
    return found if 1 < found < len(host_of) else None


def devices_per_node(config: LinkConfig, host_of: Sequence[int]) -> int:
    """Ranks of a node; `host_of`, the host of every rank, answers where
    `hydra.link.devices_per_node` is open.
    """
    return config.devices_per_node or ranks_per_node(host_of)
