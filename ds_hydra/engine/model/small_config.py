"""Configurations of small models of a family: few layers, one of each kind, and small widths."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

VOCABULARY = 32
_WINDOW = 3
_WIDTH = 48
_HEADLESS_WIDTH = 64
_CHUNK = 4


def small_configs(config: Any, positions: int) -> Iterator[Any]:
    """`config` with two layers (or one of each kind), small widths and at most `positions` learned
    positions, smallest first: heads keep their size and their grouping, and sizes that a family
    does not run at are followed by larger ones.
    """
    heads = _get(config, "num_attention_heads") or 1
    for num_heads in sorted({min(2, heads), min(4, heads), heads}):
        yield _shrink(config, num_heads, positions)
        yield _shrink(config, num_heads, None)


def _shrink(config: Any, num_heads: int, positions: int | None) -> Any:
    small = copy.deepcopy(config)
    layers = _layers_of_each_kind(small)
    num_layers = _get(small, "num_hidden_layers")
    for key, value in list(vars(small).items()):
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(small, key, type(value)(value[i] for i in layers))
    for key, value in (
        dict.fromkeys(_LAYER_COUNTS, len(layers)) | _small_widths(small, num_heads)
    ).items():
        before = _get(small, key)
        if before is not None:
            of_layers = isinstance(before, list | tuple)
            _set(small, key, [value] * len(before) if of_layers else value)
    if positions is not None and (_get(small, "max_position_embeddings") or 0) > positions:
        small.max_position_embeddings = positions
    if (_get(small, "pad_token_id") or 0) >= VOCABULARY:
        small.pad_token_id = VOCABULARY - 1
    return small


_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def _get(config: Any, key: str) -> Any:
    """What `config` has at `key`, or None; some raise errors of their own where layers differ."""
    try:
        return getattr(config, key, None)
    except Exception:  # a family's own configuration
        return None


def _set(config: Any, key: str, value: Any) -> None:
    with contextlib.suppress(NotImplementedError):  # names of others that cannot be set
        setattr(config, key, value)


def _layers_of_each_kind(config: Any) -> list[int]:
    """Two layers, or the first of each of more kinds, in their order; a kind is what the lists of
    the configuration with an entry for each layer say of it.
    """
    num_layers = _get(config, "num_hidden_layers") or 2
    of_layers = [
        value
        for value in vars(config).values()
        if isinstance(value, list | tuple)
        and len(value) == num_layers
        and len(set(map(str, value))) < max(num_layers, 3)  # else numbers of layers
    ]
    kinds = [tuple(map(str, kind)) for kind in zip(*of_layers)] or [()] * num_layers
    first = {kinds.index(kind) for kind in kinds}
    return sorted(first | set(range(min(2, num_layers))))


def _small_widths(config: Any, num_heads: int) -> dict[str, int]:
    heads = _get(config, "num_attention_heads") or 1
    kv_heads = _get(config, "num_key_value_heads") or heads
    hidden = _get(config, "hidden_size") or _WIDTH
    head_dim = _get(config, "head_dim") or hidden // heads
    width = num_heads * head_dim if _get(config, "num_attention_heads") else _HEADLESS_WIDTH
    widths = {
        "num_attention_heads": num_heads,
        "decoder_attention_heads": num_heads,
        "encoder_attention_heads": num_heads,
        "num_decoder_attention_heads": num_heads,
        "num_key_value_heads": num_heads if kv_heads == heads else max(1, num_heads // 2),
        "hidden_size": width,
        "attention_hidden_size": width,
        "word_embed_proj_dim": width,
        "intermediate_size": _WIDTH,
        "decoder_ffn_dim": _WIDTH,
        "encoder_ffn_dim": _WIDTH,
        "ffn_dim": _WIDTH,
        "ffn_hidden_size": _WIDTH,
        "moe_intermediate_size": _WIDTH,
        "shared_expert_intermediate_size": _WIDTH,
        "first_k_dense_replace": min(1, _get(config, "first_k_dense_replace") or 0),
        "mamba_n_heads": _mamba_heads(config, width),
    }
    for key in ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"):
        if many := _get(config, key):
            few = _get(config, "linear_num_key_heads") or many
            widths[key] = 2 * max(1, many // few)
    if _get(config, "state_size"):  # a state space model without attention
        widths |= {"num_heads": _mamba_heads(config, width), "n_groups": 1}
    for part, most in (("window", _WINDOW), ("chunk_size", _CHUNK), ("vocab_size", VOCABULARY)):
        for key, value in vars(config).items():
            if part in key and type(value) is int and value > most:
                widths[key] = most
    return widths


def _mamba_heads(config: Any, width: int) -> int:
    """Heads of a state space layer, whose width is a multiple of the model's."""
    expanded = (_get(config, "mamba_expand") or _get(config, "expand") or 1) * width
    size = _get(config, "mamba_d_head") or _get(config, "head_dim")
    return max(1, expanded // size) if isinstance(size, int) and size else 1
