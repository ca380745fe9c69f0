"""Process groups of all strategies, created once and shared between them.

[Note: Group order]
`new_group` is collective over all ranks, members or not, and must be called in the same order
everywhere. Every rank therefore asks the pool for the groups of a whole strategy, which it creates
in sorted order.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ds_hydra.engine.ranks.agreement import find_timeout
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.schemes.placement import (
    MAX_GROUPS_OF_RANK,
    GroupKey,
    communicator,
    communicators,
    groups_of_all,
    most_groups_of_rank,
)

logger = logging.getLogger(__name__)

NCCL_PAIR_BYTES = 544 << 20
NCCL_GROUP_BYTES = 688 << 20
"""Device memory of one NCCL communicator of two ranks, and of more: measured on 4 A100 with NVLink
and NCCL's default buffers (NVIDIA/nccl issue 964). It is allocated at a communicator's first use,
and falls with NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS; other topologies need other amounts."""


BLOCKS = {f"pull by {most} blocks": most for most in (4, 8, 16, 24)}
"""Purposes of groups like that of a pull, and the thread blocks that their kernels may take: the
doctor measures them.
"""
_MOST_CTAS = {
    **BLOCKS, "pull": 8, "push": 8, "pull_node": 8, "push_node": 8, "pp_down": 4, "pp_up": 4
}  # fmt: skip
"""Thread blocks, of a multiprocessor each, that a kernel of NCCL may take for a purpose: those that
run beside computation leave it most of a device, and all of a rank's at once fit one. TP, SP, CP
and `ep`, for which computation waits, have what NCCL chooses. NCCL_MAX_CTAS in the environment
stands above it."""


def _is_nccl(device: torch.device) -> bool:
    """Whether NCCL carries what ranks exchange on `device`, whatever the start called the backend:
    nothing, "nccl", or "cpu:gloo,cuda:nccl".
    """
    try:
        backend = c10d._get_default_group()._get_backend(device)
    except RuntimeError:  # a group that is registered under no type of device
        return False
    return backend.name() == "nccl"


def describe_groups(keys: Iterable[GroupKey], rank: int, is_nccl: bool) -> str:
    """Number of groups by purpose, and the cost of those of `rank`."""
    made = communicators(keys)
    mine = [ranks for _, ranks in made if rank in ranks and len(ranks) > 1]
    purposes = Counter(purpose for purpose, _ in made)
    counts = ", ".join(f"{count} {purpose}" for purpose, count in purposes.items())
    text = f"{len(made)} process groups ({counts}), {len(mine)} of them on rank {rank}"
    if is_nccl:
        total = sum(NCCL_PAIR_BYTES if len(ranks) == 2 else NCCL_GROUP_BYTES for ranks in mine)
        return (
            f"{text}: up to about {total / 2**30:.1f} GiB of device memory with NCCL's default buffers; lower "
            "hydra.max_process_groups, or NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS, for less"
        )
    return text


def check_num_groups(total: int, most: int) -> None:
    """Raise HydraConfigError where there would be more groups than `most`, on all ranks alike."""
    if total > most:
        raise HydraConfigError(
            f"the strategies need {total} process groups, more than hydra.max_process_groups = {most}; raise it to "
            f"{total} (each costs communicator memory) or list fewer strategies in hydra.strategies"
        )


def check_groups_of_rank(keys: Iterable[GroupKey]) -> None:
    """Raise HydraConfigError where one rank would be in more groups than a device has queues for;
    the same on all ranks.
    """
    most = most_groups_of_rank(keys)
    if most > MAX_GROUPS_OF_RANK:
        raise HydraConfigError(
            f"the strategies put one rank into {most} process groups, more than the {MAX_GROUPS_OF_RANK} that a "
            "device has queues for; list fewer strategies in hydra.strategies, or some of fewer distinct sizes"
        )


def _communicator_options(purpose: str, timeout: datetime.timedelta, device: torch.device) -> Any:
    """NCCL's options of a group; None for other backends. Its kernels go before computation, for
    which they would otherwise wait block by block while other ranks wait for them. They take no
    more of the device than the purpose needs.
    """
    # Builds of torch without NCCL have no such class.
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None or not _is_nccl(device):
        return None
    options = nccl.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout  # else torch warns of another one
    config = getattr(options, "config", None)
    if hasattr(config, "max_ctas") and purpose in _MOST_CTAS:
        config.max_ctas = _MOST_CTAS[purpose]
    return options


_MULTICAST = ("nvls", "nvlink sharp", "multicast")
_WITHOUT_MULTICAST = (
    "set NCCL_NVLS_ENABLE=0 in the environment of all ranks, or lower hydra.max_process_groups"
)
MAX_MULTICAST_OBJECTS = 128
"""NVLink multicast objects (NVLS) that the switches of a node have. From 2.29.7 on NCCL ends the
start where it gets none for a communicator.
"""


def describe_multicast(num_objects: int) -> str:
    """A warning of more objects than a node has."""
    return (
        f"NCCL may make {num_objects} NVLink multicast objects (NVLS) on a node, which has {MAX_MULTICAST_OBJECTS}, "
        f"and from 2.29.7 on ends the start where it gets none: {_WITHOUT_MULTICAST}"
    )


@contextlib.contextmanager
def _naming_multicast(num_groups: int) -> Iterator[None]:
    """Say how to go on where NCCL cannot have a multicast object for a communicator."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _MULTICAST):
            raise
        raise HydraConfigError(
            f"NCCL found no NVLink multicast object (NVLS) for one of {num_groups} communicators, each of which "
            f"takes one of a node: {_WITHOUT_MULTICAST}: {error!s:.300}"
        ) from error


_MESSAGE_TO = {"pp_down": 1, "pp_up": -1}
"""How many ranks of its group further a stage sends to."""


def _use_first(purpose: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange one element as the group will, so that its communicator connects here. Collective
    over `group`: a first message that not all ranks join is undefined.

    An all-reduce makes NCCL allocate rings and trees, which TP alone uses, and leaves the peers of
    all-to-alls and messages to the first iteration.
    """
    if purpose == "tp":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    elif purpose in _MESSAGE_TO:
        ranks, step = dist.get_process_group_ranks(group), _MESSAGE_TO[purpose]
        here = ranks.index(dist.get_rank())
        one = torch.zeros(1, device=device)
        messages = [
            # A tensor each: what arrives must not overwrite what is sent.
            dist.P2POp(action, one.clone(), ranks[there], group)
            for action, there in ((dist.isend, here + step), (dist.irecv, here - step))
            if 0 <= there < len(ranks)
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    else:
        sent = torch.zeros(dist.get_world_size(group), device=device)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


class GroupPool:
    """Process groups keyed by purpose and ranks, on communicators that may be shared. Every method
    that creates groups is collective over all ranks.
    """

    def __init__(self, max_groups: int | None, device: torch.device):
        """`max_groups`: None for as many as are asked for, on a rank, too."""
        self._max_groups, self._device = max_groups, device
        self._keys: dict[GroupKey, None] = {}
        self._groups: dict[GroupKey, dist.ProcessGroup | None] = {}
        """Communicators; None where this rank is not in them."""

    def __len__(self) -> int:
        return len(self._groups)

    def __str__(self) -> str:
        is_started = dist.is_initialized()
        rank = dist.get_rank() if is_started else 0
        return describe_groups(self._groups, rank, is_started and _is_nccl(self._device))

    def ensure(self, strategies: Iterable[Strategy]) -> None:
        """Create the groups of all `strategies` that do not exist yet; raises HydraConfigError
        beyond the bounds.
        """
        wanted = groups_of_all(strategies) - self._keys.keys()
        # A set may have another order on each rank, and ranges compare only as tuples.
        self.create(sorted(wanted, key=lambda key: (key[0], tuple(key[1]))))

    def create(self, keys: Iterable[GroupKey]) -> None:
        """Create the groups `keys`, in the given order, equal on all ranks.

        Their ranks meet here: NCCL connects a communicator at its first collective, and one of
        point-to-point messages that not all of them join is undefined.
        """
        keys = list(keys)
        new = [key for key in communicators(keys) if key not in self._groups]
        total = len(self._groups) + len(new)
        # Before any group is made: all ranks raise, and none waits in a creation.
        if self._max_groups is not None:
            check_num_groups(total, self._max_groups)
            check_groups_of_rank([*self._groups, *new])
        begin, rank, timeout = time.perf_counter(), dist.get_rank(), find_timeout(self._device)
        with _naming_multicast(total):
            for purpose, ranks in new:
                options = _communicator_options(purpose, timeout, self._device)
                group = dist.new_group(list(ranks), timeout=timeout, pg_options=options)
                # Ranks outside a group have nothing to communicate with.
                self._groups[purpose, ranks] = group if rank in ranks else None
            # By purpose: a shared communicator is used first in every way in which it will be.
            for purpose, ranks in keys:
                if rank in ranks:
                    _use_first(purpose, self.get(purpose, ranks), self._device)
        self._keys |= dict.fromkeys(keys)
        # Made one by one, the groups of a large cluster take long enough to say so.
        if (seconds := time.perf_counter() - begin) > 1 and rank == 0:
            logger.info("%d process groups were made in %.1f s", len(new), seconds)

    def get(self, purpose: str, ranks: range) -> dist.ProcessGroup:
        """The group of `ranks` for `purpose`; this rank must be a member."""
        group = self._groups[communicator((purpose, ranks))]
        assert group is not None, f"rank {dist.get_rank()} is not in {purpose} group {ranks}"
        return group

    def destroy(self) -> None:
        """Destroy all groups (releases their threads and descriptors)."""
        for group in self._groups.values():
            # Whoever has destroyed the default group has destroyed these with it.
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups.clear()
        self._keys.clear()
