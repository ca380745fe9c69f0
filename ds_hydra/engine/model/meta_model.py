"""Models without weights: the configuration a name stands for, and its stage model with parameters
on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from ds_hydra.engine.model.packing_probe import build_stage_model
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import HydraConfigError, HydraError, UnsupportedModelError
from ds_hydra.model_config import find_quantisation, load_config, say_once


def load_model_config(name: str) -> PretrainedConfig:
    """The configuration called `name`: a shipped preset, a folder with config.json, that file, or a
    hub id. Says once what of its checkpoint does not count.
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
"""Far above any model: a module is made for each layer and rotary frequencies for each feature of a
head, even where no weight is."""


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
    """Inside a model is made from the configuration called `name`: what is wrong with it becomes an
    UnsupportedModelError.
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


def load_stage_model(name: str) -> StageModel:
    """The stage model of the model called `name`, without memory for weights."""
    transformers.logging.set_verbosity_error()
    config = load_model_config(name)
    with making(name):
        # Whether stages work is tried
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
        return build_stage_model(model)
