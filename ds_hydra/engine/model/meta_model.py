"""Models without whole weights: from a name, with parameters on the meta device, or with random
ZeRO-3 shards to measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as of_transformers

from ds_hydra.engine.model.packing_probe import build_stage_model, try_small_copy
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import HydraConfigError, HydraError, UnsupportedModelError
from ds_hydra.model_config import find_quantisation, load_config
from ds_hydra.progress import say_once


def load_model_config(name: str) -> PretrainedConfig:
    """Load the configuration called `name`: a shipped preset, a folder with config.json, that file,
    or a hub id. Says once what of its checkpoint does not count.
    """
    config = load_config(name)
    _check_sizes(config.get_text_config(), name)
    for note in find_quantisation(config.to_dict()):
        say_once(f"--model {name}: {note}")
    return config


_MOST = {
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 16,
    "hidden_size": 1 << 24,
    "head_dim": 1 << 16,
}
_MOST_OF_OTHERS = 1 << 32
"""Number far above any model's: a module is made for each layer and rotary frequencies for each
feature of a head, even where no weight is.
"""


def _check_sizes(config: PretrainedConfig, name: str) -> None:
    for key, value in config.to_dict().items():
        most = _MOST.get(key, 1 << 14 if "experts" in key else _MOST_OF_OTHERS)
        least = 1 if key in _MOST else -most
        if type(value) is int and not least <= value <= most:
            raise HydraConfigError(
                f"--model {name}: {key} is {value}, expected {least} to {most}; correct config.json"
            )


@contextmanager
def making(name: str) -> Iterator[None]:
    """Make a model from the configuration called `name` inside. Whatever is wrong with it becomes
    an UnsupportedModelError.
    """
    try:
        yield
    except HydraError:
        raise
    except Exception as error:  # its classes read anything without a look
        first_line = (str(error).splitlines() or [""])[0]
        raise UnsupportedModelError(
            f"--model {name}: transformers cannot make a model of its config.json ({type(error).__name__}: "
            f"{first_line[:200]}); use a causal language model"
        ) from error


def make_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A new model of `config`, whole on this rank; `options` are those of `from_config`. Not
    collective.

    While TrainingArguments with ZeRO-3 live, transformers partitions every model that it makes.
    """
    of_training = getattr(of_transformers, "_hf_deepspeed_config_weak_ref", None)
    of_transformers.unset_hf_deepspeed_config()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, **options
        )
    finally:
        of_transformers._hf_deepspeed_config_weak_ref = of_training
    return model


def load_stage_model(name: str) -> StageModel:
    """Build the stage model of the model called `name`, without memory for weights."""
    transformers.logging.set_verbosity_error()
    config = load_model_config(name)
    with making(name):
        # Whether stages work is tried
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = make_model(config)
        model.tie_weights()
        return build_stage_model(model)


_SPREAD = 0.02


def build_random_stage_model(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_ranks: int,
    **options: Any,
) -> StageModel:
    """Build the stage model of a model whose shards, 1/num_ranks of each parameter, are random;
    `options` are StageModel's. Not collective.

    Links read `ds_tensor` of a parameter only, so that is all that a parameter gets. Raises
    UnsupportedModelError for what cannot be trained. On the meta device nothing is allocated.
    """
    with init_empty_weights(include_buffers=False):
        model = make_model(config, dtype=dtype)
    model.tie_weights()
    abilities = try_small_copy(model)
    generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(0)
    for parameter in model.parameters():
        shard_P = torch.ones(-(-parameter.numel() // num_ranks), dtype=dtype, device=device)
        if parameter.dim() > 1:  # norms stay at 1
            shard_P.normal_(0.0, _SPREAD, generator=generator)
        parameter.ds_tensor = shard_P  # type: ignore[attr-defined]
    stage_model = StageModel(model, abilities, **options)
    stage_model.to_device(device)
    return stage_model
