"""What `ds-hydra profile` does on every rank: join the ranks, build a random model, measure, return
the profile; also how much slower computation and gradient synchronisation run beside each other
(Galvatron-BMW, §V).
"""

from __future__ import annotations

import datetime
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from torch.distributed.constants import default_pg_timeout
from transformers import PretrainedConfig

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.meta_model import build_random_stage_model, load_model_config, making
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.profiling.memory import check_slices
from ds_hydra.engine.profiling.profile_document import (
    Measurements,
    ProbeMicroBatch,
    fit_memory,
    layer_params,
)
from ds_hydra.engine.profiling.profiler import measure_profile, measure_stage_ms
from ds_hydra.engine.profiling.rehearsal import side_by_side
from ds_hydra.engine.profiling.slice_profiler import profile_slices
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.ranks.agreement import run_together
from ds_hydra.engine.ranks.memory import naming_memory_limit
from ds_hydra.engine.ranks.process import (
    overlap_where_safe,
    prepare_accelerator,
    use_deterministic_kernels,
)
from ds_hydra.engine.transfer.link_thread import DeviceClock
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.cost_models.topology import Topology
from ds_hydra.strategy.schemes.enumeration import fitting_schemes
from ds_hydra.strategy.schemes.placement import LINK_GROUPS, count_groups

_OVERLAP_TOKENS = 4096
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to profile. `config` holds context, memory limit, checkpointing, lengths and repeats.

    `dtype` None: bf16, fp32 on a CPU. `tp`, `pp`, `sp`, `cp`: degrees to measure, None for all that
    fit.
    `topology`: the cluster that one device stands for.
    """

    model: str
    config: HydraConfig
    dtype: str | None = None
    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    sp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    topology: Topology | None = None


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


def run_profile(
    request: ProfileRequest, device: torch.device, resume_file: Path | None
) -> dict[str, Any]:
    """The `ds_hydra.profile/1` document, equal on all ranks. Collective over all ranks.

    Measurements go to `resume_file` as they come; where it exists, what it knows is not measured
    again. It is left behind for the caller to remove. Raises HydraConfigError or
    UnsupportedModelError on all ranks.
    """
    transformers.logging.set_verbosity_error()
    num_ranks = dist.get_world_size()
    if request.config.deterministic:
        use_deterministic_kernels(device)
    dtype = DTYPES[
        request.dtype or ("fp32" if get_accelerator().device_name() == "cpu" else "bf16")
    ]
    model_config, stage_model, schemes = run_together(
        lambda: _prepare(request, dtype, device, num_ranks), device
    )
    known = Measurements.open(
        resume_file, _identity(request, model_config, dtype, num_ranks, schemes), device
    )
    if request.topology is not None:
        document = profile_slices(
            model_config,
            stage_model,
            schemes,
            request.topology,
            request.config,
            known,
            dtype=dtype,
            device=device,
        )
    else:
        document = _profile_ranks(stage_model, schemes, request.config, known, device)
    return dict(fit_memory(document, request.config).document)


def _profile_ranks(
    stage_model: StageModel,
    schemes: Sequence[Scheme],
    config: HydraConfig,
    known: Measurements,
    device: torch.device,
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    strategies = [Strategy.alike(scheme, num_ranks) for scheme in schemes]
    strategies += side_by_side(schemes, num_ranks)
    config = config.model_copy(update={"tokens_per_iteration": num_ranks * config.context_length})
    config = overlap_where_safe(config, device)
    num_groups = count_groups(strategies) + LINK_GROUPS
    propagator = Propagator(
        stage_model,
        device=device,
        max_groups=num_groups,
        max_groups_of_rank=num_groups,
        link_config=config.link,
    )
    with closing(propagator):
        with naming_memory_limit(config.memory_limit_bytes):
            document = measure_profile(propagator, strategies, config, known)
        if num_ranks > 1:
            slowdown = known.get(
                "overlap slowdown", lambda: _overlap_slowdown(propagator, document, config, device)
            )
            if slowdown:
                document["hardware"]["overlap_slowdown"] = round(slowdown, 3)
    return document


def _overlap_slowdown(
    propagator: Propagator, document: Mapping[str, Any], config: HydraConfig, device: torch.device
) -> float:
    """Of the scheme with the fewest ranks, and its longest measured micro-batch that leaves memory
    for the all-reduces.
    """
    entry = min(document["schemes"], key=lambda e: Scheme.from_json(e).num_devices)
    scheme, lengths = Scheme.from_json(entry), entry["measured"]["lengths"]
    most = min(_OVERLAP_TOKENS, max(lengths) // 2)
    length = max((n for n in lengths if n <= most), default=min(lengths))
    strategy = Strategy.alike(scheme, propagator.num_ranks)
    return measure_overlap_slowdown(
        propagator, strategy, length, device=device, repeats=config.profiling.repeats
    )


def _prepare(
    request: ProfileRequest, dtype: torch.dtype, device: torch.device, num_ranks: int
) -> tuple[PretrainedConfig, StageModel, tuple[Scheme, ...]]:
    """Configuration, stage model of the whole model, and the schemes to measure."""
    num_devices = num_ranks
    if request.topology is not None:
        if num_ranks > 1:
            raise HydraConfigError(
                f"--topology describes the cluster that one device stands for, and {num_ranks} ranks were "
                "started; leave it out to measure them, or start one"
            )
        request.topology.check_one_kind()
        if max(*request.sp, *request.cp) > 1:
            name, degrees = ("sp", request.sp) if max(request.sp) > 1 else ("cp", request.cp)
            raise HydraConfigError(
                f"--{name} is {','.join(map(str, degrees))}, and with --topology schemes are composed of TP slices; "
                f"leave out --{name}, or start the ranks that are to be measured"
            )
        num_devices = request.topology.num_devices
    model_config = load_model_config(request.model)
    with making(request.model):
        stage_model = build_random_stage_model(
            model_config,
            dtype=dtype,
            # The whole model is only looked at where slices are measured.
            device=torch.device("meta") if request.topology is not None else device,
            num_ranks=num_ranks,
            activation_checkpointing=request.config.activation_checkpointing,
            compile_layers=request.config.compile_layers,
            attention_kernel=request.config.attention,
            float8=request.config.float8,
            float8_exclude=request.config.float8_exclude,
            tp_sequence_parallel=request.config.tp_sequence_parallel,
        )
    return model_config, stage_model, _schemes(request, stage_model, num_devices)


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
            stage_model.check_scheme(scheme)
            if request.topology is not None and scheme.tp > 1:
                check_slices(stage_model.config)
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


def _identity(
    request: ProfileRequest,
    model_config: PretrainedConfig,
    dtype: torch.dtype,
    num_ranks: int,
    schemes: Sequence[Scheme],
) -> dict[str, Any]:
    """What must be equal for a run to continue another one."""
    config = request.config
    shape = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    return {
        "model": request.model,
        "model_type": model_config.model_type,
        **{name: getattr(model_config, name, None) for name in shape},
        "key_value_heads": getattr(model_config, "num_key_value_heads", None),
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": config.context_length,
        "memory_limit_bytes": config.memory_limit_bytes,
        "activation_checkpointing": config.activation_checkpointing,
        "attention": config.attention,
        "compile_layers": config.compile_layers,
        "deterministic": config.deterministic,
        "float8": config.float8,
        "float8_exclude": list(config.float8_exclude),
        "tp_sequence_parallel": config.tp_sequence_parallel,
        "profiling": config.profiling.model_dump(mode="json"),
        "schemes": [str(scheme) for scheme in schemes],
        "num_ranks": num_ranks,
        "accelerator": str(get_accelerator().device_name()),
        "measured": "schemes" if request.topology is None else "TP slices",
    }


_MESSAGE_BYTES = 25 << 20
"""At most this much in one all-reduce, as in the buckets of torch's DDP."""
_MAX_MESSAGES = 4096
_LEAST_SHARE = 0.2
"""Of the longer one that the shorter one must last: the slowdown is a small difference of long
times otherwise.
"""


def overlap_slowdown(compute_ms: float, collective_ms: float, both_ms: float) -> float:
    """How many times as long either takes while both run, at least 1.

    They begin together, and the longer one ends alone. 0.0 where one is too short to tell.

    >>> round(overlap_slowdown(compute_ms=100, collective_ms=60, both_ms=60 * 1.3 + 40), 3)
    1.3
    >>> overlap_slowdown(compute_ms=100, collective_ms=10, both_ms=103)
    0.0
    """
    together, longer = sorted((compute_ms, collective_ms))
    if together < _LEAST_SHARE * longer:
        return 0.0
    return max(1.0, (both_ms - (longer - together)) / together)


def measure_overlap_slowdown(
    propagator: Propagator, strategy: Strategy, length: int, *, device: torch.device, repeats: int
) -> float:
    """The slowdown of a micro-batch of `length` tokens under `strategy` beside all-reduces of about
    as many milliseconds.

    Medians of `repeats` rounds that time each alone and both; 0.0 where even thousands of
    all-reduces are too short beside the micro-batch. Collective over all ranks, equal on all. The
    all-reduces have a process group of their own, besides those of the propagator, so that they
    wait for nothing else, and one buffer: nobody reads what is in it.
    """
    stage_model = propagator.stage_model
    dtype = stage_model.params[0].dtype
    most = _MESSAGE_BYTES // dtype.itemsize
    message = torch.zeros(min(most, int(layer_params(stage_model))), dtype=dtype, device=device)
    group = dist.new_group()
    clock = DeviceClock(device)
    count = 1

    def synchronize() -> list[dist.Work]:
        return [dist.all_reduce(message, group=group, async_op=True) for _ in range(count)]

    def collective_ms() -> float:
        dist.barrier()
        begin = clock.stamp()
        for work in synchronize():
            work.wait()
        end = clock.stamp()
        clock.settle(end)
        return propagator.max_over_ranks(clock.ms_between(begin, end))

    def micro_batch_ms(beside: Callable[[], Iterable[dist.Work]] = tuple) -> float:
        passes = 2 * strategy.schemes[0].pp - 1
        return passes * measure_stage_ms(
            propagator, strategy, ProbeMicroBatch(length), beside=beside
        )

    try:
        micro_batch_ms()  # compiles and allocates
        collective_ms()  # connects the ranks
        count = max(1, min(_MAX_MESSAGES, round(micro_batch_ms() / collective_ms())))
        rounds = [
            (micro_batch_ms(), collective_ms(), micro_batch_ms(beside=synchronize))
            for _ in range(repeats)
        ]
    finally:
        dist.destroy_process_group(group)
    return overlap_slowdown(*map(statistics.median, zip(*rounds, strict=True)))
