"""One rank of many on one device: real kernels, memory and host time, no peers.

The process group is torch's fake one, which copies in an all-gather and leaves the rest as it is.
What arrives from other ranks is zeros, so losses mean nothing; times leave out all that other ranks
and links would add.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from benchmarks.one_gpu.device import DEVICE, DTYPE, HAS_GPU
from ds_hydra.configs.hydra_config import LinkConfig
from ds_hydra.engine import strategy_links
from ds_hydra.engine.model.meta_model import build_random_stage_model
from ds_hydra.engine.profiling.profile_run import use_device
from ds_hydra.engine.propagation import Propagator
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import exchange


def enter(world: int, rank: int = 0) -> torch.device:
    """Become rank `rank` of `world`; one host has eight. Once in a process."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(min(world, 8)),
        LOCAL_SIZE=str(min(world, 8)),
    )  # fmt: skip
    use_device()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    strategy_links.check_link_plans = lambda *_: None  # all ranks "say" what this one says
    take = exchange.ExchangeBuffers.take

    def zeros(self: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return take(self, numel, dtype).zero_()

    exchange.ExchangeBuffers.take = zeros
    return DEVICE


def open_rank(
    config: PretrainedConfig, strategy: Strategy, device: torch.device, **options: Any
) -> Propagator:
    """A propagator of a random model under `strategy`; the caller closes it."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
    stage_model = build_random_stage_model(
        config, dtype=DTYPE, device=device, num_ranks=dist.get_world_size(), **options
    )
    propagator = Propagator(
        stage_model,
        device=device,
        link_config=LinkConfig(devices_per_node=min(8, dist.get_world_size())),
    )
    propagator.prepare([strategy])
    return propagator
