"""Memory that nobody measured: activations of a decoder layer by its sizes, and the engine's needs
beside the profile of another system.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.attention_choice import keeps_copies
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import NCCL_GROUP_BYTES, NCCL_PAIR_BYTES
from ds_hydra.engine.profiling.profile_document import layer_params, state_memory
from ds_hydra.engine.ranks.memory import count_multiprocessors
from ds_hydra.errors import HydraConfigError
from ds_hydra.model_config import all_fields
from ds_hydra.sampler.candidate_set import gradient_bytes
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.cost_models.decoder import describe_config
from ds_hydra.strategy.profiles.profile import exchange_bytes
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.placement import groups_of, link_groups

_CONTEXT_BYTES = 3 << 29
"""Bytes of CUDA and its libraries in each process, with EAGER loading: 1.3 GB idle, 1.6 with
cuBLAS, on an H200 under torch 2.11.
"""


def is_of_another_system(document: Mapping[str, Any]) -> bool:
    """Whether a profile says that something else than this engine was measured."""
    return bool(document.get("measured_with"))


def as_the_engine_needs(
    profile: Profile, stage_model: StageModel, config: HydraConfig, num_devices: int
) -> Profile:
    """`profile` with the larger of its memory and the engine's known needs. A profile that this
    engine measured stays as it is, but for the needs of `hydra.deterministic` if it was measured
    without.

    States are counted from the dtypes in use, activations by the sizes of a layer, communicators
    are those of all homogeneous strategies on one rank, exchange buffers those of two layers, or of
    a layer and a larger embedding. Not collective. Where the user has set
    `hydra.memory_limit_bytes`, communicators are the user's to leave out.
    """
    profile = _with_ordered_sums(profile, config)
    document = profile.document
    if not is_of_another_system(document):
        return profile
    memory = dict(document["memory"])
    counted = state_memory(stage_model)
    pairs = [_split(memory), _split(counted)]
    sharded, held = (max(parts) for parts in zip(*pairs, strict=True))
    if stage_model.offloads_optimizer:
        sharded = pairs[1][0]
    memory |= {
        "state_bytes_per_layer_per_hidden2": sharded + held,
        "sharded_fraction": sharded / (sharded + held),
        "vocabulary_tables": counted["vocabulary_tables"],
        "exchange_bytes": exchange_bytes(
            layer_params(stage_model),
            stage_model.hidden_size * stage_model.vocab_size,
            gradient_bytes(config),
        ),
    }
    key = "activation_bytes_per_token_per_layer_per_hidden"
    memory[key] = {
        tp: max(value, count_activation(stage_model, int(tp), config) or 0.0)
        for tp, value in memory[key].items()
    }
    hardware = dict(document["hardware"])
    if config.memory_limit_bytes is None:
        hardware["reserved_bytes"] = max(
            hardware["reserved_bytes"], _CONTEXT_BYTES + _communicator_bytes(num_devices)
        )
    cut = stage_model.tp.cuts_micro_batches
    changed = {"memory": memory, "hardware": hardware, "tp_sequence_parallel": cut}
    return Profile.from_json({**document, **changed})


def _with_ordered_sums(profile: Profile, config: HydraConfig) -> Profile:
    """`profile`, with copies of gradients that `hydra.deterministic` takes and it does not have."""
    document = profile.document
    has_none = document["hardware"]["name"] == "cpu" or document.get("deterministic")
    if has_none or not config.deterministic or not keeps_copies(config.attention):
        return profile
    memory = {**document["memory"], "ordered_multiprocessors": count_multiprocessors()}
    return Profile.from_json({**document, "memory": memory})


def _split(memory: Mapping[str, Any]) -> tuple[float, float]:
    """Sharded and held bytes of states per layer and hidden unit squared."""
    total, share = memory["state_bytes_per_layer_per_hidden2"], memory["sharded_fraction"]
    return total * share, total * (1 - share)


def count_activation(stage_model: StageModel, tp: int, hydra: HydraConfig) -> float | None:
    """Activation bytes of a layer under TP degree `tp`, as profiles have them, by the sizes of the
    layer; None where these are not known.
    """
    element = stage_model.params[0].dtype.itemsize
    copies = 1 if stage_model.tp.cuts_micro_batches else tp
    if hydra.activation_checkpointing:  # its input
        return float(element * copies)
    config = stage_model.config
    try:
        shape, heads = describe_config(all_fields(config), config.model_type)
    except HydraConfigError:
        return None
    # Of each row the statistics of two norms and of attention; and the rotary factors, which are
    # the same in all layers, but stand here for the small tensors of a pass that nothing counts.
    small = 8 + 4 * heads
    if not hydra.compile_layers:
        small += 4 * tp * shape.means.attention_width / heads
    known = shape.activation_bytes(tp, compiled=hydra.compile_layers, copies=copies)
    return (known + small / shape.hidden_size) * element / 2


def _communicator_bytes(num_devices: int) -> int:
    """Device memory of NCCL's communicators on rank 0, with those of pull, push and the homogeneous
    strategies of all powers of two.
    """
    keys = {*link_groups(num_devices, None)}
    for scheme in power_of_two_schemes(num_devices):
        keys |= groups_of(Strategy.alike(scheme, num_devices))
    sizes = [len(ranks) for _, ranks in keys if 0 in ranks and len(ranks) > 1]
    return sum(NCCL_PAIR_BYTES if size == 2 else NCCL_GROUP_BYTES for size in sizes)
