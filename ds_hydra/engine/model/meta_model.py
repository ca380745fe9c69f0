"""Models without weights: the configuration a name stands for, and its stage model with parameters
on the meta device.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig
from transformers.initialization import no_init_weights

from ds_hydra.configs.files import list_files, load_model_preset
from ds_hydra.engine.model.packing_probe import build_stage_model
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import HydraConfigError, UnsupportedModelError


def load_model_config(name: str) -> PretrainedConfig:
    """The configuration called `name`: a shipped preset, a folder with config.json, or a hub id."""
    if name in list_files("models"):
        return LlamaConfig(**load_model_preset(name))
    nearest = get_close_matches(name, list_files("models"), n=1, cutoff=0.8)
    if nearest and not Path(name).exists():
        raise HydraConfigError(
            f"--model is {name!r}, which is neither a shipped preset nor a folder; did you mean {nearest[0]!r}?"
        )
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # a file may hold anything
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise HydraConfigError(
            f"--model is {name!r}, which is neither a shipped preset ({', '.join(list_files('models'))}), nor a "
            f"folder with a config.json, nor a readable model of the hub: {first_line}"
        ) from error


def load_stage_model(name: str) -> StageModel:
    """The stage model of the model called `name`, without memory for weights."""
    transformers.logging.set_verbosity_error()
    config = load_model_config(name)
    try:
        # Whether stages work is tried
        with (
            init_empty_weights(include_buffers=False),
            no_init_weights(),
        ):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    except ValueError as error:
        raise UnsupportedModelError(
            f"--model {name}: {str(error).splitlines()[0]}; use a causal language model"
        ) from error
    return build_stage_model(model)
