"""Memory of accelerators that the ranks of a host map, each a part of its own device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.ranks.agreement import run_together
from ds_hydra.errors import HydraConfigError

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
