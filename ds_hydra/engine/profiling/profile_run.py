"""Steps of `ds-hydra profile` on every rank: join the ranks, build a random model, measure, return
the profile.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from torch.distributed.constants import default_pg_timeout

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.meta_model import build_random_stage_model, load_model_config, making
from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.engine.model.stage_model import StageModel, options_of
from ds_hydra.engine.profiling.profile_document import fit_memory
from ds_hydra.engine.profiling.profiler import measure_profile
from ds_hydra.engine.profiling.rehearsal import side_by_side
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import run_together
from ds_hydra.engine.ranks.memory import naming_memory_limit
from ds_hydra.engine.ranks.process import (
    overlap_where_safe,
    prepare_accelerator,
    use_deterministic_kernels,
)
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.schemes.enumeration import fitting_schemes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Request for a profile. `config` holds context, memory limit, checkpointing, lengths and
    repeats.

    `dtype` None: bf16, fp32 on a CPU. `tp`, `pp`, `sp`, `cp`: degrees to measure, None for all that
    fit.
    """

    model: str
    config: HydraConfig
    dtype: str | None = None
    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    sp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)


def use_device() -> None:
    """Begin to use this rank's device, under the settings of training. Not collective."""
    prepare_accelerator()
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def join_ranks(timeout: datetime.timedelta = default_pg_timeout) -> torch.device:
    """This rank's device, after joining the ranks that a launcher has started; alone where none
    has.
    """
    use_device()
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        # Port 0: whichever is free when the store starts to listen, which nobody else has to know.
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    if not dist.is_initialized():
        try:
            deepspeed.init_distributed(timeout=timeout)
        except RuntimeError as error:
            raise _of_shared_device(error) from error
    return torch.device(get_accelerator().current_device_name())


def _of_shared_device(error: RuntimeError) -> Exception:
    """`error`, or where it is NCCL's about two ranks on one device what to do about that."""
    found = re.search(r"Duplicate GPU detected.*", str(error))
    if found is None:
        return error
    return HydraConfigError(
        f"two ranks use one device ({found[0].strip()}), and LOCAL_RANK is {os.environ.get('LOCAL_RANK')} here: start "
        "as many ranks on a host as it has devices (--num_gpus, --nproc-per-node), each with a LOCAL_RANK of its own. "
        "Where ranks shall share a GPU, export NCCL_HOSTID=rank0, rank1, ... (another one for each rank), "
        "NCCL_SOCKET_IFNAME=lo, NCCL_NET=Socket and TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, as python -m "
        "benchmarks.one_gpu.ranks does"
    )


def run_profile(request: ProfileRequest, device: torch.device) -> dict[str, Any]:
    """The `ds_hydra.profile/1` document, equal on all ranks. Collective over all ranks.

    Raises HydraConfigError or UnsupportedModelError on all ranks.
    """
    transformers.logging.set_verbosity_error()
    num_ranks = dist.get_world_size()
    if request.config.deterministic:
        use_deterministic_kernels(device)
    dtype = DTYPES[
        request.dtype or ("fp32" if get_accelerator().device_name() == "cpu" else "bf16")
    ]
    config = request.config
    stage_model, schemes = run_together(lambda: _prepare(request, dtype, device, num_ranks), device)
    strategies = [Strategy.alike(scheme, num_ranks) for scheme in schemes]
    strategies += side_by_side(schemes, num_ranks)
    config = config.model_copy(update={"tokens_per_iteration": num_ranks * config.context_length})
    config = overlap_where_safe(config, device)
    propagator = Propagator(stage_model, device=device, link_config=config.link)
    with closing(propagator), naming_memory_limit(config.memory_limit_bytes):
        document = measure_profile(propagator, strategies, config)
    return dict(fit_memory(document, request.config).document)


def _prepare(
    request: ProfileRequest, dtype: torch.dtype, device: torch.device, num_ranks: int
) -> tuple[StageModel, tuple[Scheme, ...]]:
    """Stage model of the whole model, and the schemes to measure."""
    model_config = load_model_config(request.model)
    with making(request.model):
        stage_model = build_random_stage_model(
            model_config,
            dtype=dtype,
            device=device,
            num_ranks=num_ranks,
            **options_of(request.config),
        )
    return stage_model, _schemes(request, stage_model, num_ranks)


def _schemes(
    request: ProfileRequest, stage_model: StageModel, num_devices: int
) -> tuple[Scheme, ...]:
    """Schemes of the wanted degrees that the devices hold and the model allows; raises where there
    is none.
    """
    allowed, refused = [], ""
    wanted = {"tp": request.tp, "pp": request.pp, "sp": request.sp, "cp": request.cp}
    for scheme in fitting_schemes(num_devices, **wanted):
        try:
            check_scheme(stage_model, scheme)
            allowed.append(scheme)
        except (HydraConfigError, UnsupportedModelError) as error:
            refused = f"; {error}"
    if not allowed:
        raise HydraConfigError(
            f"no scheme of {_degrees('--tp', request.tp)}, {_degrees('--pp', request.pp)} and "
            f"{_degrees('--sp', request.sp)}, {_degrees('--cp', request.cp)} fits {num_devices} devices and the "
            f"model{refused}"
        )
    return tuple(allowed)


def _degrees(option: str, degrees: Sequence[int] | None) -> str:
    return f"any {option}" if degrees is None else f"{option} {','.join(map(str, degrees))}"
