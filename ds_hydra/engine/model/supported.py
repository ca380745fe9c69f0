"""Which causal language models ds_hydra trains, by what their configuration and modules say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_hydra.engine.model.decoder_parts import DecoderParts
from ds_hydra.errors import UnsupportedModelError

_OF_OTHER_HEADS = ("summary_", "classifier_")
_NOISE = ("dropout", "pdrop", "drop_path", "drop_prob", "layerdrop", "jitter")
"""Words in the names of what says how much noise a model trains with."""
_PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_model(model: nn.Module) -> None:
    """Raise UnsupportedModelError naming the first part of `model` that ds_hydra cannot train."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model"):
        raise UnsupportedModelError(
            f"{name} is not a Hugging Face causal language model; pass e.g. a LlamaForCausalLM"
        )
    base_config = model.base_model.config
    for problem in _problems(model, config, base_config):
        raise UnsupportedModelError(f"{name} (model type {config.model_type!r}): {problem}")


def _problems(model: nn.Module, config: Any, base_config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported; use a decoder-only model"
    if problem := find_other_inputs(config):
        yield problem
    try:
        DecoderParts.find(model)
    except LookupError as error:
        yield str(error)
    for key, value in vars(base_config).items():
        if key in ("expert_capacity", "capacity_factor") and value:
            yield (
                f"{key} = {value}: which tokens an expert drops would depend on the strategy; set it to None in "
                "model.config, or use a model that drops none"
            )
    if problem := _find_noise(model, base_config):
        yield problem
    if getattr(base_config, "use_bidirectional_attention", None) in (True, "all"):
        yield "bidirectional attention is not supported; set use_bidirectional_attention to None"
    if problem := find_loss_problem(model):
        yield problem


def _find_noise(model: nn.Module, config: Any) -> str:
    """Which noise of its own the model trains with, and how to do without it; "" where it has none.

    Modules keep the rates that the configuration had when they were made; some read it later.
    """
    keys = [
        key
        for key, value in vars(config).items()
        if _is_noise(key) and not key.startswith(_OF_OTHER_HEADS) and _is_number(value)
    ]
    found = [f"{key} = {getattr(config, key)} in its config" for key in keys if vars(config)[key]]
    by_attribute: dict[tuple[str, float], list[str]] = {}
    for name, module, attribute in find_rates(model):
        where = by_attribute.setdefault((attribute, vars(module)[attribute]), [])
        where.append(name or type(module).__name__)
    for (attribute, rate), names in by_attribute.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        found.append(f"{attribute} = {rate} of module {names[0]}{more}")
    if not found:
        return ""
    reload = (
        f"load the model with from_pretrained(..., {', '.join(f'{key}=0.0' for key in keys)}), or "
    )
    return (
        f"{'; '.join(found)}: dropout or other noise of the model itself would depend on the strategy; "
        f"{reload if keys else ''}set each of these to 0 where it is, in model.config and in the modules "
        "(model.get_submodule(name)): a model that is loaded does not follow its config"
    )


def find_rates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules of `model` that make noise, but those of adapters, with their names and the
    attributes that hold the rates.
    """
    for name, module in model.named_modules():
        if "lora_dropout" not in name.split("."):
            for key, value in vars(module).items():
                if is_rate(module, key) and _is_number(value) and value:
                    yield name, module, key


def is_rate(module: nn.Module, attribute: str) -> bool:
    """Whether `attribute` of `module` says how much noise it makes."""
    return attribute == "p" if isinstance(module, _DropoutNd) else _is_noise(attribute)


def _is_noise(key: str) -> bool:
    return any(word in key for word in _NOISE)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def find_loss_problem(model: nn.Module) -> str:
    """Why the loss that `model` computes is not the mean cross entropy of its logits, as far as its
    `loss_function` says; "" where it is.
    """
    kind = type(model)
    if not isinstance(model, PreTrainedModel):
        return ""
    if getattr(kind, "loss_function", None) is not PreTrainedModel.loss_function:
        name = getattr(kind, "__qualname__", "")
        return f"class {name} has a loss_function of its own{INSTEAD_OF_ITS_LOSS}"
    function = vars(model).get("_loss_function")
    if function is None:
        function = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)
    if function is ForCausalLMLoss:
        return ""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"its loss_function is {name}{INSTEAD_OF_ITS_LOSS}"


INSTEAD_OF_ITS_LOSS = (
    ", which training would not call: what is minimised is the mean cross entropy of logits, or an object of "
    "ds_hydra.losses.Loss given as engine.train_batch(batch, loss=...) (with HydraTrainer: label_smoothing_factor, or "
    "a trainer of TRL); take the model's own loss away and give it like this"
)


def find_other_inputs(config: Any) -> str:
    """Why a model whose `config` has parts for images or sound is refused, and its text class; ""
    where it has none.
    """
    text = find_text_config(config)
    others = [key for key in ("vision_config", "audio_config") if getattr(config, key, None)]
    if text is config and not others:
        return ""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    return "it has parts for other inputs than text, which no sequence would train; train " + (
        "a model of text alone" if text is config else f"{kind} with its {type(text).__name__}"
    )


def find_text_config(config: Any) -> Any:
    """The configuration of the language model inside `config`; itself where it is one."""
    try:
        return config.get_text_config()
    except (ValueError, AttributeError):  # of several, or of a type that has none
        return config


def other_layer_types(config: Any) -> list[str]:
    """Kinds of layers beside those whose attention ds_hydra computes for packed micro-batches."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _PACKED_LAYER_TYPES)
