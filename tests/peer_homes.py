"""Homes in parts, as accelerators have them; the parts are memory that ranks of the CPU share."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist

from ds_hydra.engine.ranks import hosts
from ds_hydra.engine.ranks.hosts import SharedMemory


def homes_in_parts(device_type="cpu", on_device=lambda part: part):
    """Engines started within, on such a device, have homes as accelerators have them."""

    def allocate(nbytes, device, group):
        ranks = tuple(dist.get_process_group_ranks(group))

        def share():
            memory = SharedMemory(ranks, nbytes * len(ranks), "a test's home", device)
            return [on_device(part) for part in memory.bytes.split(nbytes)]

        return share

    return mock.patch.dict(hosts.ALLOCATORS, {device_type: allocate})
