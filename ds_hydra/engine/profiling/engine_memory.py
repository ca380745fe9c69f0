"""What the engine holds beside what a profile of another system says: never less than counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PretrainedConfig

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel.groups import NCCL_GROUP_BYTES, NCCL_PAIR_BYTES
from ds_hydra.engine.profiling.memory_trace import trace_layer_memory
from ds_hydra.engine.profiling.profile_document import layer_params, state_memory
from ds_hydra.engine.ranks.memory import count_multiprocessors
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.sampler.candidate_set import gradient_bytes
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.profiles.states import exchange_bytes
from ds_hydra.strategy.proposal.candidates import power_of_two_schemes
from ds_hydra.strategy.schemes.placement import groups_of

_CONTEXT_BYTES = 1 << 30
"""Of CUDA and its libraries in each process."""


def is_of_another_system(document: Mapping[str, Any]) -> bool:
    """Whether a profile says that something else than this engine was measured."""
    return bool(document.get("measured_with"))


def as_the_engine_needs(
    profile: Profile, stage_model: StageModel, config: HydraConfig, num_devices: int
) -> Profile:
    """`profile` with the larger of what it says and what the engine is known to hold; where it was
    measured by this engine as it is, but for what `hydra.deterministic` takes if it was measured
    without.

    States are counted from the dtypes in use, activations of a layer are traced, communicators are
    those of all homogeneous strategies on one rank, exchange buffers four times the gradients of a
    layer. Not collective. Where the user has set `hydra.memory_limit_bytes`, communicators are the
    user's to leave out.
    """
    profile = _with_ordered_sums(profile, config)
    document = profile.document
    if not is_of_another_system(document):
        return profile
    memory = dict(document["memory"])
    counted = state_memory(stage_model)
    pairs = [_split(memory), _split(counted)]
    sharded, held = (max(parts) for parts in zip(*pairs, strict=True))
    memory |= {
        "state_bytes_per_layer_per_hidden2": sharded + held,
        "sharded_fraction": sharded / (sharded + held),
        "vocabulary_tables": counted["vocabulary_tables"],
        "exchange_bytes": exchange_bytes(layer_params(stage_model), gradient_bytes(config)),
    }
    key = "activation_bytes_per_token_per_layer_per_hidden"
    traced = _trace(stage_model, map(int, memory[key]), config)
    memory[key] = {tp: max(value, traced.get(int(tp), 0.0)) for tp, value in memory[key].items()}
    hardware = dict(document["hardware"])
    if config.memory_limit_bytes is None:
        hardware["reserved_bytes"] = max(
            hardware["reserved_bytes"], _CONTEXT_BYTES + _communicator_bytes(num_devices)
        )
    cut = config.tp_sequence_parallel
    changed = {"memory": memory, "hardware": hardware, "tp_sequence_parallel": cut}
    return Profile.from_json({**document, **changed})


def _with_ordered_sums(profile: Profile, config: HydraConfig) -> Profile:
    """`profile`, with copies of gradients that `hydra.deterministic` takes and it does not have."""
    document = profile.document
    has_none = document["hardware"]["name"] == "cpu" or document.get("deterministic")
    if has_none or not config.deterministic:
        return profile
    memory = {**document["memory"], "ordered_multiprocessors": count_multiprocessors()}
    return Profile.from_json({**document, "memory": memory})


def _split(memory: Mapping[str, Any]) -> tuple[float, float]:
    """Sharded and held bytes of states per layer and hidden unit squared."""
    total, share = memory["state_bytes_per_layer_per_hidden2"], memory["sharded_fraction"]
    return total * share, total * (1 - share)


def _trace(
    stage_model: StageModel, degrees: Iterable[int], config: HydraConfig
) -> dict[int, float]:
    """Activation bytes by TP degree, of those that the model allows and torch can trace."""
    model_config: PretrainedConfig = stage_model.config
    traced = {}
    for tp in degrees:
        try:
            layer = trace_layer_memory(
                model_config,
                tp=tp,
                dtype=stage_model.params[0].dtype,
                checkpointing=config.activation_checkpointing,
                tp_sequence_parallel=config.tp_sequence_parallel,
            )
        except UnsupportedModelError:
            continue
        traced[tp] = layer.activation_bytes
    return traced


def _communicator_bytes(num_devices: int) -> int:
    """Device memory of NCCL's communicators on rank 0, with those of pull, push and the homogeneous
    strategies of all powers of two.
    """
    everyone = tuple(range(num_devices))
    keys = {("pull", everyone), ("push", everyone)}
    for scheme in power_of_two_schemes(num_devices):
        keys |= groups_of(Strategy((scheme,) * (num_devices // scheme.num_devices)))
    sizes = [len(ranks) for _, ranks in keys if 0 in ranks and len(ranks) > 1]
    return sum(NCCL_PAIR_BYTES if size == 2 else NCCL_GROUP_BYTES for size in sizes)
