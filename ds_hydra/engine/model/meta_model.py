"""Models without weights: the configuration a name stands for, and its stage model with parameters
on the meta device.
"""

from __future__ import annotations

import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from ds_hydra.engine.model.packing_probe import build_stage_model
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.model_config import find_quantisation, load_config, say_once


def load_model_config(name: str) -> PretrainedConfig:
    """The configuration called `name`: a shipped preset, a folder with config.json, that file, or a
    hub id. Says once what of its checkpoint does not count.
    """
    config = load_config(name)
    for note in find_quantisation(config.to_dict()):
        say_once(f"--model {name}: {note}")
    return config


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
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
    except ValueError as error:
        raise UnsupportedModelError(
            f"--model {name}: {str(error).splitlines()[0]}; use a causal language model"
        ) from error
    return build_stage_model(model)
