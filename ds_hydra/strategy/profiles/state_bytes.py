"""Bytes of parameters, gradients and optimizer states as the engine holds them.

The published constants of App. B.1 count 16.6 to 17.4 bytes a parameter. The engine has its own
account: 16-bit shards and slices, fp32 master, moments and gradients.
"""

from __future__ import annotations

from typing import Any

from ds_hydra.configs.files import find_profile
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.memory_model import GRADIENT_BYTES, OPTIMIZER_BYTES
from ds_hydra.strategy.profiles.profile import Profile

EXCHANGE_BUFFERS = 4
"""Packed ones of two rounds in flight, each with one to send and one to receive; a layer's
gradients at most.
"""
_TABLES = 2
"""Embedding and head of the models whose published profiles count one for both."""

_STATES = "states"
_PUBLISHED = "published"
"""Value of `_STATES` in the memory of a profile whose bytes of states are those of the paper."""


def engine_states(params_per_hidden2: float, element_bytes: float) -> dict[str, float]:
    """B and alpha of App. B.1, and what streamed and checkpointed layers need, of a layer with so
    many parameters per hidden size squared.
    """
    sharded = element_bytes + OPTIMIZER_BYTES
    held = element_bytes + GRADIENT_BYTES
    return {
        "state_bytes_per_layer_per_hidden2": params_per_hidden2 * (sharded + held),
        "sharded_fraction": sharded / (sharded + held),
        "slice_bytes_per_layer_per_hidden2": params_per_hidden2 * element_bytes,
        "input_bytes_per_token_per_layer_per_hidden": element_bytes,
    }


def exchange_bytes(layer_params: float, gradient_bytes: float) -> float:
    """Of packed buffers of pull and push, for a layer of so many parameters."""
    return EXCHANGE_BUFFERS * gradient_bytes * layer_params


def expert_memory(fraction: float) -> dict[str, float]:
    """What the memory of a profile says of experts that are so large a part of a layer; nothing for
    a dense model.
    """
    return {"expert_fraction": fraction} if fraction else {}


def with_engine_states(profile: Profile) -> Profile:
    """`profile` with the engine's bytes in place of published ones; as it is where they are the
    engine's already.
    """
    memory = profile.document["memory"]
    if memory.get(_STATES) != _PUBLISHED:
        return profile
    known = profile.memory
    if not known.slice_bytes or not known.input_bytes:
        raise HydraConfigError(
            f"profile {profile.name!r} has published states, for which its memory needs "
            "slice_bytes_per_layer_per_hidden2 and input_bytes_per_token_per_layer_per_hidden above 0"
        )
    params_per_hidden2 = known.slice_bytes / known.input_bytes
    found: dict[str, Any] = engine_states(params_per_hidden2, known.input_bytes)
    found["exchange_bytes"] = exchange_bytes(params_per_hidden2 * known.hidden_size**2, 2.0)
    found["vocabulary_tables"] = _TABLES
    return Profile.from_json({**profile.document, "memory": {**memory, **found, _STATES: "engine"}})


def load_profile(name_or_path: str) -> Profile:
    """The profile of that path, or the shipped one of that name, with the engine's memory."""
    return with_engine_states(Profile.load(find_profile(name_or_path)))
