"""The parts of a `ds_hydra.profile/1` document: hardware, model, memory of the states, fitted
schemes.

`estimate_profile` is the profile of a model and a device that nobody has measured, by FLOPs and
bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hydra.configs.files import LARGEST
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.losses.loss import chunk_elements
from ds_hydra.engine.model.decoder_parts import num_kv_heads
from ds_hydra.engine.model.experts import is_experts
from ds_hydra.engine.model.scheme_support import can_run
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import HydraConfigError
from ds_hydra.model_config import all_fields
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.analytic import Experts, Hardware, predict_profile
from ds_hydra.strategy.cost_models.decoder import (
    ModelSize,
    describe_config,
    expert_parallel_schemes,
    find_experts,
    read_decoder,
)
from ds_hydra.strategy.cost_models.flops import FROZEN_FLOP, TRAINED_FLOP, ModelFlops
from ds_hydra.strategy.profiles.profile import (
    PROFILE_SCHEMA,
    engine_states,
    expert_memory,
    fit_latency,
)
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION


def digest_of(document: Mapping[str, Any]) -> str:
    """16 digits that a document shares with its equals alone."""
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=8).hexdigest()


def fit_memory(document: Mapping[str, Any], config: HydraConfig) -> Profile:
    """The profile with the memory limit of the configuration, if any, instead of the hardware's."""
    if config.memory_limit_bytes is not None:
        hardware = {**document["hardware"], **_all_of(config.memory_limit_bytes)}
        document = {**document, "hardware": hardware}
    return Profile.from_json(document)


def _all_of(memory_bytes: int) -> dict[str, int]:
    """Memory of which plans may use all."""
    return {"memory_bytes": memory_bytes, "reserved_bytes": 0, "safety_margin_bytes": 0}


def nominal_profile(stage_model: StageModel, schemes: Iterable[Scheme]) -> dict[str, Any]:
    """A profile from FLOP counts at 1 TFLOP/s per rank and without a memory limit; measures
    nothing.

    Good enough to place sequences within a strategy that the caller has forced.
    """
    params = layer_params(stage_model)
    entries = []
    for scheme in sorted(set(schemes)):
        num_layers = stage_model.num_layers
        layers = max(len(scheme.stage_layers(num_layers, stage)) for stage in range(scheme.pp))
        # 2 FLOP forward + 4 backward per parameter, ms at 1 TFLOP/s
        share = layers / scheme.ranks_per_stage * 6 / 1e9
        entries.append(
            {
                **scheme.to_json(),
                "quadratic_ms": share * stage_model.hidden_size,
                "linear_ms": share * params,
                "constant_ms": share * params * 32,
            }
        )
    return {
        "schema": PROFILE_SCHEMA,
        "source": "FLOP counts, nothing measured",
        "hardware": {"name": "nominal", **_all_of(LARGEST)},
        "model": describe_model(stage_model),
        "memory": {
            "activation_bytes_per_token_per_layer_per_hidden": {
                str(tp): 40.0 for tp in {scheme.tp for scheme in schemes}
            },
            **state_memory(stage_model),
        },
        "schemes": entries,
    }


def describe_model(stage_model: StageModel) -> dict[str, Any]:
    """The profile's "model" section."""
    config, experts = stage_model.config, _find_experts(stage_model)
    heads = {}
    if getattr(config, "num_attention_heads", None):  # else no attention
        heads = {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": num_kv_heads(config),
        }
    return {
        "name": config.model_type,
        "num_layers": stage_model.num_layers,
        "hidden_size": stage_model.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None),
        **heads,
        "vocab_size": stage_model.vocab_size,
        **({} if experts is None else {"experts": asdict(experts)}),
        **_describe_layers(stage_model),
        "parameters": asdict(count_parameters(stage_model)),
        "flops": count_flops(stage_model).to_json(),
    }


def _describe_layers(stage_model: StageModel) -> dict[str, Any]:
    """Describe the layers beyond their sizes, for schemes whose T nobody measured."""
    try:
        shape, _ = describe_config(_fields(stage_model), stage_model.config.model_type)
    except HydraConfigError:  # without attention heads, or with sizes of its own names
        return {}
    return {
        key: value
        for key, value in shape.to_json().items()
        if key in ("layer", "attention_width", "norms_heads")
    }


def _find_experts(stage_model: StageModel) -> Experts | None:
    config = stage_model.config
    return find_experts(all_fields(config), stage_model.num_layers, config.model_type)


def _fields(stage_model: StageModel) -> dict[str, Any]:
    return {**all_fields(stage_model.config), "vocab_size": stage_model.vocab_size}


def _active_shares(stage_model: StageModel) -> dict[int, float] | None:
    """Share of each parameter, by its number, that one token uses. None where the model has experts
    that are not known as such. Raises HydraConfigError for what find_experts refuses.
    """
    experts = _find_experts(stage_model)
    bound = [b for unit in stage_model.units for b in unit.bindings]
    of_experts = {b.param for b in bound if is_experts(b.module)}
    if (experts is None) != (not of_experts):
        return None
    share = experts.chosen / experts.num if experts is not None else 1.0
    return {b.param: share if b.param in of_experts else 1.0 for b in bound}


def count_parameters(stage_model: StageModel) -> ModelSize:
    """Parameters of the model as it was built; all count as active where experts are not known."""
    try:
        shares = _active_shares(stage_model) or {}
    except HydraConfigError:
        shares = {}
    numels = [spec.numel for spec in stage_model.specs]
    tables = {
        b.param
        for unit in (stage_model.units[0], stage_model.units[-1])
        for b in unit.bindings
        if stage_model.vocab_size in stage_model.specs[b.param].shape
    }
    return ModelSize(
        total=sum(numels),
        active=sum(numel * shares.get(param, 1.0) for param, numel in enumerate(numels)),
        tables=sum(numels[param] for param in tables),
    )


def count_flops(stage_model: StageModel) -> ModelFlops:
    """FLOPs of training the model, by its own parameters."""
    family = stage_model.config.model_type
    try:
        shares = _active_shares(stage_model)
        decoder = read_decoder(_fields(stage_model), family)
    except HydraConfigError as error:
        return ModelFlops(unknown=str(error))
    if shares is None:
        return ModelFlops(unknown=f"{family} has experts that are not known as such")
    used = [b for unit in stage_model.units for b in unit.bindings]
    multiplied = {b.param for b in used if not isinstance(b.module, nn.Embedding)}  # others: tables
    per_token = sum(
        (TRAINED_FLOP if stage_model.specs[p].requires_grad else FROZEN_FLOP)
        * stage_model.specs[p].numel
        * shares[p]
        for p in multiplied
    )
    return ModelFlops.of_decoder(decoder, per_token)


def dtype_of(stage_model: StageModel) -> str:
    """Name of the dtype of computation, as "bfloat16"."""
    return str(stage_model.params[0].dtype).removeprefix("torch.")


def model_facts(stage_model: StageModel) -> dict[str, int]:
    """Numbers that `Profile.check_model` compares."""
    experts = _find_experts(stage_model)
    sizes = {
        name: getattr(stage_model, name) for name in ("num_layers", "hidden_size", "vocab_size")
    }
    return {**sizes, "num_experts": 0 if experts is None else experts.num}


class ProbeMicroBatch(NamedTuple):
    """A micro-batch that is timed: sequences of one length."""

    length: int
    num_sequences: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.length * self.num_sequences

    def __str__(self) -> str:
        return (
            f"{self.length}" if self.num_sequences == 1 else f"{self.num_sequences} x {self.length}"
        )


def scheme_entry(scheme: Scheme, times_ms: Mapping[ProbeMicroBatch, float]) -> dict[str, Any]:
    """One entry of the profile's "schemes": coefficients of T, and the measurements that they were
    fitted to.
    """
    micro_batches = sorted(
        times_ms, key=lambda micro_batch: (micro_batch.num_sequences, micro_batch.length)
    )
    times = [times_ms[micro_batch] for micro_batch in micro_batches]
    fit = fit_latency(
        [micro_batch.length for micro_batch in micro_batches],
        times,
        [micro_batch.num_sequences for micro_batch in micro_batches],
    )
    alone = [micro_batch for micro_batch in micro_batches if micro_batch.num_sequences == 1]
    measured: dict[str, Any] = {
        "lengths": [micro_batch.length for micro_batch in alone],
        "times_ms": [round(times_ms[micro_batch], 3) for micro_batch in alone],
    }
    if packed := micro_batches[len(alone) :]:
        measured["packed"] = [
            {**micro_batch._asdict(), "time_ms": round(times_ms[micro_batch], 3)}
            for micro_batch in packed
        ]
    return {
        **scheme.to_json(),
        **fit.model.to_json(),
        "measured": measured,
        "relative_residuals": [round(r, 4) for r in fit.relative_residuals],
        "r_squared": round(fit.r_squared, 5),
    }


def deeper_entry(scheme: Scheme, probed: Mapping[str, Any], source: Scheme) -> dict[str, Any]:
    """Return an entry of `scheme` with T of `source`, which has fewer stages and was `probed`: a
    stage has fewer layers. Hand-over is no part of T.
    """
    terms = ("quadratic_ms", "linear_ms", "constant_ms")
    latency = {term: probed[term] * source.pp / scheme.pp for term in terms}
    return {**scheme.to_json(), **latency, "probed_as": str(source)}


def layer_params(stage_model: StageModel) -> float:
    """Parameters of a decoder layer."""
    layer = {b.param for unit in stage_model.units[1:-1] for b in unit.bindings}
    return sum(stage_model.specs[i].numel for i in layer) / stage_model.num_layers


def logit_chunk_bytes(stage_model: StageModel, device: torch.device) -> int:
    """Maximum bytes of logits that are held at a time; 0 where those of all tokens are."""
    if stage_model.after_head.transform is None:
        return 0
    return chunk_elements(device) * stage_model.params[0].dtype.itemsize


def state_memory(stage_model: StageModel) -> dict[str, float]:
    """B and alpha of App. B.1, and the memory that schemes with options need, counted from the
    dtypes in use.
    """
    element = torch.finfo(stage_model.params[0].dtype).bits // 8
    params = layer_params(stage_model)
    experts = sum(spec.numel for spec in stage_model.specs if spec.num_experts)
    ends = {
        b.param for unit in (stage_model.units[0], stage_model.units[-1]) for b in unit.bindings
    }
    table = stage_model.hidden_size * stage_model.vocab_size
    tables = sum(stage_model.specs[param].numel for param in ends) / table
    return {
        "vocabulary_tables": round(tables, 2),
        **engine_states(
            params / stage_model.hidden_size**2,
            element,
            offloads_optimizer=stage_model.offloads_optimizer,
        ),
        **expert_memory(experts / stage_model.num_layers / params),
    }


def describe_hardware(ranks_here: int = 1) -> dict[str, Any]:
    """The profile's "hardware" section: memory of one of the `ranks_here` of this machine."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        memory, reserved = psutil.virtual_memory().total // ranks_here, 0
        name = "cpu"
    else:
        memory, reserved = int(accelerator.total_memory()), 2**30  # contexts
        name = (
            str(torch.cuda.get_device_name())
            if torch.cuda.is_available()
            else accelerator.device_name()
        )
    return {
        "name": name,
        "devices_per_node": ranks_here,
        "memory_bytes": memory,
        "reserved_bytes": reserved,
        "safety_margin_bytes": memory // 20,
    }


def estimate_profile(
    stage_model: StageModel, hardware: Hardware, num_devices: int, hydra: HydraConfig, *, name: str
) -> Profile:
    """A profile that nobody has measured: roofline of `hardware`, states counted from the dtypes in
    use.

    Recomputed layers keep their input, 2 bytes for each token and hidden unit of 1/TP of a
    micro-batch (2 TP where TP ranks hold whole micro-batches). One of L layers is whole at a time.
    Their forward counts twice in T.
    """
    fields, family = _fields(stage_model), stage_model.config.model_type
    shape, heads = describe_config(fields, family)
    wanted = (
        *power_of_two_schemes(num_devices),
        *expert_parallel_schemes(shape, heads, num_devices),
    )
    schemes = [scheme for scheme in wanted if can_run(stage_model, scheme)]
    layers = stage_model.num_layers

    def activation_bytes(tp: int) -> float:
        copies = 1 if stage_model.tp.cuts_micro_batches else tp
        kept = shape.activation_bytes(tp, compiled=hydra.compile_layers, copies=copies)
        return 2.0 * copies + kept / layers if hydra.activation_checkpointing else kept

    document = predict_profile(
        shape,
        hardware,
        schemes,
        name=name,
        memory={
            "activation_bytes_per_token_per_layer_per_hidden": {
                str(tp): activation_bytes(tp) for tp in {scheme.tp for scheme in schemes}
            },
            "logit_chunk_bytes": logit_chunk_bytes(stage_model, torch.device("cuda")),
            **state_memory(stage_model),
        },
        context_length=hydra.context_length,
        float8=hydra.float8 in ("tensorwise", "rowwise"),
    )
    document["model"]["parameters"] = asdict(count_parameters(stage_model))
    document["model"]["unpriced"] = list(read_decoder(fields, family).unpriced)
    document["tp_sequence_parallel"] = stage_model.tp.cuts_micro_batches
    document["float8"] = hydra.float8
    document["activation_checkpointing"] = hydra.activation_checkpointing
    if hydra.activation_checkpointing:
        for entry in document["schemes"]:
            for term in ("quadratic_ms", "linear_ms", "constant_ms"):
                entry[term] *= 1 + FORWARD_FRACTION
    return Profile.from_json(document)
