"""A profile from one device: the compute of every TP slice is measured, communication is computed.

A slice is the model as one rank of a TP group sees it: whole hidden states (with
`hydra.tp_sequence_parallel` its shard of them between blocks), its share of heads, MLP and
vocabulary. It is timed with two numbers of layers, whose difference is the time of a layer, so that
the model itself need not fit on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.attention_choice import plans_between_iterations
from ds_hydra.engine.model.meta_model import build_random_stage_model
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.profiling import profile_document
from ds_hydra.engine.profiling.memory import slice_config, trace_layer_memory
from ds_hydra.engine.profiling.profiler import (
    default_lengths,
    has_device_memory,
    measure_in_rounds,
    measure_stage_ms,
    token_bytes,
)
from ds_hydra.engine.propagation import Propagator
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.cost_models.topology import LayerShape, StageParts, Topology, stage_ms

_MOST_LAYERS = 4
_MEMORY_SHARE = 0.8
"""Part of the device's memory that the longest micro-batch of a slice may take."""
_ALONE = Strategy((Scheme(1, 1),))


class Slice(NamedTuple):
    """What is timed: the layers of one rank under TP."""

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
    known: profile_document.Measurements,
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
        tp: _measure_slice(model_config, tp, config, known, dtype=dtype, device=device)
        for tp in sorted({scheme.tp for scheme in schemes})
    }
    num_layers, hidden_size = stage_model.num_layers, stage_model.hidden_size
    interconnects = topology.interconnects()
    cuts_micro_batches = config.tp_sequence_parallel
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
    is_measured = has_device_memory()
    document = profile_document.describe_measured(
        stage_model,
        config,
        source=f"compute of TP slices measured on one device, communication computed from {topology.source}",
        hardware=profile_document.describe_hardware()
        | {"devices_per_node": topology.nodes[0].num_devices},
        memory={
            "activation_source": "peak memory"
            if is_measured
            else "layer traced under fake tensors",
            "activation_bytes_per_token_per_layer_per_hidden": activation,
        },
    )
    saturation = profile_document.saturation(entries, config.context_length)
    return {**document, "saturation_tokens": saturation, "schemes": entries}


def _measure_slice(
    model_config: PretrainedConfig,
    tp: int,
    config: HydraConfig,
    known: profile_document.Measurements,
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
            activation_checkpointing=config.activation_checkpointing,
            compile_layers=config.compile_layers,
            attention_kernel=config.attention,
            float8=config.float8,
            float8_exclude=config.float8_exclude,
            tp_sequence_parallel=config.tp_sequence_parallel,
            simulated_tp_size=tp,
        )
        propagators[Slice(tp, num_layers)] = Propagator(stage_model, device=device, max_groups=2)
    try:
        num_bytes = _token_bytes(model_config, propagators, config, known, dtype)
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
            known,
            show_progress=True,
            warms_up_each=config.compile_layers or plans_between_iterations(),
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


def _token_bytes(
    model_config: PretrainedConfig,
    propagators: dict[Slice, Propagator],
    config: HydraConfig,
    known: profile_document.Measurements,
    dtype: torch.dtype,
) -> _TokenBytes:
    """By peak memory; without a device's, a layer is traced under fake tensors and the ends are
    counted.
    """
    length = min(config.context_length, 512)
    few, many = min(propagators), max(propagators)
    counted = {
        slice_: known.get(
            f"{slice_} bytes per token",
            functools.partial(token_bytes, propagators[slice_], _ALONE, length),
        )
        for slice_ in (few, many)
    }
    if few == many:
        return _TokenBytes(counted[many] / many.num_layers, 0.0)
    layer = max(0.0, counted[many] - counted[few]) / (many.num_layers - few.num_layers)
    ends = max(0.0, counted[many] - many.num_layers * layer)
    if not has_device_memory():
        traced = trace_layer_memory(
            model_config,
            num_tokens=length,
            tp=many.tp,
            dtype=dtype,
            checkpointing=config.activation_checkpointing,
            tp_sequence_parallel=config.tp_sequence_parallel,
        )
        layer = traced.kept_bytes / traced.num_tokens
        if config.activation_checkpointing:  # one layer at a time is there as a whole
            ends += traced.peak_bytes / traced.num_tokens
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
