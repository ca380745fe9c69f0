"""Steps of `ds-hydra profile` on every rank: join the ranks, build a random model, measure, return
the profile.

On one device the compute of every TP slice is measured, and communication is computed. A slice is
the model as one rank of a TP group sees it: its shard of hidden states between blocks (all of them
where the model allows no shards), its share of heads, MLP and vocabulary. It is timed with two
numbers of layers, whose difference is the time of a layer, so that the model itself need not fit on
the device.
"""

from __future__ import annotations

import copy
import datetime
import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from torch.distributed.constants import default_pg_timeout
from transformers import PretrainedConfig

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.meta_model import build_random_stage_model, load_model_config, making
from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.engine.model.stage_model import StageModel, options_of
from ds_hydra.engine.parallel import tensor_parallel
from ds_hydra.engine.profiling import profile_document
from ds_hydra.engine.profiling.profile_document import fit_memory
from ds_hydra.engine.profiling.profiler import (
    activation_source,
    default_lengths,
    measure_in_rounds,
    measure_profile,
    measure_stage_ms,
    token_bytes,
)
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
from ds_hydra.strategy.cost_models.topology import LayerShape, StageParts, Topology, stage_ms
from ds_hydra.strategy.schemes.enumeration import fitting_schemes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Request for a profile. `config` holds context, memory limit, checkpointing, lengths and
    repeats.

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
    model_config, stage_model, schemes = run_together(
        lambda: _prepare(request, dtype, device, num_ranks), device
    )
    if request.topology is not None:
        document = profile_slices(
            model_config,
            stage_model,
            schemes,
            request.topology,
            request.config,
            dtype=dtype,
            device=device,
        )
    else:
        document = _profile_ranks(stage_model, schemes, request.config, device)
    return dict(fit_memory(document, request.config).document)


def _profile_ranks(
    stage_model: StageModel,
    schemes: Sequence[Scheme],
    config: HydraConfig,
    device: torch.device,
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    strategies = [Strategy.alike(scheme, num_ranks) for scheme in schemes]
    strategies += side_by_side(schemes, num_ranks)
    config = config.model_copy(update={"tokens_per_iteration": num_ranks * config.context_length})
    config = overlap_where_safe(config, device)
    propagator = Propagator(
        stage_model,
        device=device,
        link_config=config.link,
    )
    with closing(propagator), naming_memory_limit(config.memory_limit_bytes):
        return measure_profile(propagator, strategies, config)


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
            **options_of(request.config),
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
            check_scheme(stage_model, scheme)
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


_EXPERT_WIDTHS = {"moe_intermediate_size", "shared_expert_intermediate_size"}
"""Keys of widths that TP cuts, where they are not those of the MLP."""


def check_slices(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError where a model with a part of the heads and of the MLP of `config`
    does not compute as a rank of a TP group.
    """
    for name, style in (config.base_model_tp_plan or {}).items():
        if style in (tensor_parallel.GATHERED, tensor_parallel.SPLIT):
            raise UnsupportedModelError(
                f"every rank of a TP group has all features of {config.model_type} at {name} ({style}), which one "
                "device that stands for the rank does not show; measure on ranks (torchrun, without --topology), or "
                "leave TP above 1 out (--tp 1)"
            )


def slice_config(
    config: PretrainedConfig, tp: int, *, num_layers: int = 1, vocab_size: int = 8
) -> PretrainedConfig:
    """The model that one rank of a TP group computes: its share of heads and MLP, `num_layers` of
    the layers.

    Raises UnsupportedModelError if the shapes do not divide by `tp`, or where the share does not
    show what the rank computes.
    """
    if tp > 1:
        check_slices(config)
    for key in ("num_attention_heads", "intermediate_size"):
        if getattr(config, key, None) is None:
            raise UnsupportedModelError(f"a {config.model_type} config has no {key} to slice by")
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    for name, value in (
        ("attention heads", heads),
        ("intermediate size", config.intermediate_size),
    ):
        if value % tp:
            raise UnsupportedModelError(f"{value} {name} do not divide into TP {tp}")
    sliced = copy.deepcopy(config)
    sliced.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sliced.num_attention_heads = heads // tp
    sliced.num_key_value_heads = max(1, (kv_heads or heads) // tp)
    sliced.intermediate_size = config.intermediate_size // tp
    for key in _EXPERT_WIDTHS & vars(config).keys():
        if width := getattr(config, key):
            if width % tp:
                raise UnsupportedModelError(f"{key} {width} does not divide into TP {tp}")
            setattr(sliced, key, width // tp)
    sliced.num_hidden_layers = num_layers
    sliced.vocab_size = vocab_size
    sliced.pad_token_id = None  # may be outside the micro-batches that are left
    if getattr(config, "layer_types", None):
        sliced.layer_types = config.layer_types[:num_layers]
    return sliced


_MOST_LAYERS = 4
_MEMORY_SHARE = 0.8
"""Part of the device's memory that the longest micro-batch of a slice may take."""
_ALONE = Strategy((Scheme(1, 1),))


class Slice(NamedTuple):
    """Timed part of a model: the layers of one rank under TP."""

    tp: int
    num_layers: int

    def __str__(self) -> str:
        return f"TP {self.tp} slice of {self.num_layers} layers"


class _TokenBytes(NamedTuple):
    """Activation bytes of one token of a micro-batch on a rank."""

    layer: float
    ends: float


def profile_slices(
    model_config: PretrainedConfig,
    stage_model: StageModel,
    schemes: Sequence[Scheme],
    topology: Topology,
    config: HydraConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """The profile of `schemes` on the cluster of `topology`, measured on this one device (world
    size 1).

    `stage_model` is that of the whole model. `state_memory` counts on the cluster's devices as any
    profile's does. Raises HydraConfigError where not even two lengths fit on the device.
    """
    slices = {
        tp: _measure_slice(model_config, tp, config, dtype=dtype, device=device)
        for tp in sorted({scheme.tp for scheme in schemes})
    }
    num_layers, hidden_size = stage_model.num_layers, stage_model.hidden_size
    interconnects = topology.interconnects()
    cuts_micro_batches = stage_model.tp.cuts_micro_batches
    passes = (12 if config.activation_checkpointing else 8) + (2 if cuts_micro_batches else 0)
    entries = []
    for scheme in schemes:
        times = {}
        for length, parts in slices[scheme.tp][0].items():
            shape = LayerShape(
                hidden_size=hidden_size, num_tokens=length, type_bytes=dtype.itemsize
            )
            times[profile_document.ProbeMicroBatch(length)] = stage_ms(
                scheme,
                parts,
                interconnects,
                shape,
                num_layers=num_layers,
                passes=passes,
                cuts_micro_batches=cuts_micro_batches,
            )
        entries.append(profile_document.scheme_entry(scheme, times))
    activation = {
        str(tp): (found.layer + found.ends / num_layers) * tp / hidden_size
        for tp, (_, found) in slices.items()
    }
    document = profile_document.describe_measured(
        stage_model,
        config,
        source=f"compute of TP slices measured on one device, communication computed from {topology.source}",
        hardware=profile_document.describe_hardware()
        | {"devices_per_node": topology.nodes[0].num_devices},
        memory={
            "activation_source": activation_source(),
            "activation_bytes_per_token_per_layer_per_hidden": activation,
        },
    )
    saturation = profile_document.saturation(entries, config.context_length)
    return {**document, "saturation_tokens": saturation, "schemes": entries}


def _measure_slice(
    model_config: PretrainedConfig,
    tp: int,
    config: HydraConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[int, StageParts], _TokenBytes]:
    """Compute of a micro-batch by its length, and bytes of a token, on one rank under `tp`."""
    few, many = _numbers_of_layers(model_config)
    propagators = {}
    for num_layers in {few, many}:
        sliced = slice_config(
            model_config, tp, num_layers=num_layers, vocab_size=-(-model_config.vocab_size // tp)
        )
        stage_model = build_random_stage_model(
            sliced,
            dtype=dtype,
            device=device,
            num_ranks=1,
            simulated_tp_size=tp,
            **options_of(config),
        )
        propagators[Slice(tp, num_layers)] = Propagator(stage_model, device=device)
    try:
        num_bytes = _token_bytes(propagators, min(config.context_length, 512))
        lengths = _lengths_that_fit(num_bytes, many, config)
        cases = [
            (slice_, profile_document.ProbeMicroBatch(length))
            for slice_ in propagators
            for length in lengths
        ]
        times_ms = measure_in_rounds(
            cases,
            lambda slice_, micro_batch: measure_stage_ms(propagators[slice_], _ALONE, micro_batch),
            config,
            show_progress=True,
            warms_up_each=config.compile_layers,
        )
    finally:
        for propagator in propagators.values():
            propagator.close()
    parts = {}
    for length in lengths:
        few_ms, many_ms = (
            times_ms[Slice(tp, n), profile_document.ProbeMicroBatch(length)] for n in (few, many)
        )
        # Noise may turn the order of two short micro-batches around; a layer costs no less than
        # nothing.
        layer_ms = max(0.0, many_ms - few_ms) / (many - few) if many > few else many_ms / many
        parts[length] = StageParts(layer_ms=layer_ms, ends_ms=max(0.0, many_ms - many * layer_ms))
    return parts, num_bytes


def _numbers_of_layers(model_config: PretrainedConfig) -> tuple[int, int]:
    """The two numbers of layers to time; all of them where a model mixes kinds of layers."""
    num_layers = int(model_config.num_hidden_layers)
    is_mixed = len(set(getattr(model_config, "layer_types", None) or ())) > 1
    many = num_layers if is_mixed else min(num_layers, _MOST_LAYERS)
    return max(1, many // 2), many


def _token_bytes(propagators: dict[Slice, Propagator], length: int) -> _TokenBytes:
    """Measure the bytes of a token in a layer and in embedding and head, by micro-batches of
    `length` tokens.
    """
    few, many = min(propagators), max(propagators)
    counted = {n: token_bytes(propagators[n], _ALONE, length) for n in {few, many}}
    if few == many:
        return _TokenBytes(counted[many] / many.num_layers, 0.0)
    layer = max(0.0, counted[many] - counted[few]) / (many.num_layers - few.num_layers)
    ends = max(0.0, counted[many] - many.num_layers * layer)
    return _TokenBytes(layer, ends)


def _lengths_that_fit(num_bytes: _TokenBytes, num_layers: int, config: HydraConfig) -> list[int]:
    per_token = num_layers * num_bytes.layer + num_bytes.ends
    memory = config.memory_limit_bytes or profile_document.describe_hardware()["memory_bytes"]
    longest = int(_MEMORY_SHARE * memory / per_token)
    wanted = config.profiling.lengths or default_lengths(config.context_length)
    lengths = sorted({min(length, longest) for length in wanted})
    if longest < 2 or len(lengths) < 2:
        raise HydraConfigError(
            f"a slice of {num_layers} layers fits micro-batches of {longest} tokens on this device, expected two "
            f"different lengths of {', '.join(map(str, wanted))}; lower --context or --lengths, raise "
            "--memory-limit, or turn on --activation-checkpointing"
        )
    return lengths
