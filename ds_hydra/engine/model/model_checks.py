"""Models that ds_hydra trains: what it refuses of a configuration, of modules and of a loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_hydra.engine.model.decoder_parts import DecoderParts
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.refusals import Refusal, each

CONFIG_REFUSED = (
    Refusal("is_encoder_decoder", "a decoder's sequences are what is planned; use a decoder-only model"),
    Refusal(
        "return_dict", "outputs are read by their names; set model.config.return_dict to True", False, True,
        lambda value: value is False,
    ),
    *each(
        "expert_capacity capacity_factor",
        "which tokens an expert drops would depend on the strategy; set it to None in model.config, or use a model "
        "that drops none", 64,
    ),
    Refusal(
        "use_bidirectional_attention", "attention is causal; set it to None in model.config", "all",
        applies=lambda value: value in (True, "all"),
    ),
)  # fmt: skip
"""Values of a model's configuration."""
_OF_OTHER_HEADS = ("summary_", "classifier_")
_NOISE = ("dropout", "pdrop", "drop_path", "drop_prob", "layerdrop", "jitter")
"""Words in the names of settings for the strength of a model's noise."""
_PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_supported(model: nn.Module) -> None:
    """Raise UnsupportedModelError naming the first part of `model` that ds_hydra cannot train."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(
            f"{name} is what torch.compile(model) returns; pass the model itself, and set hydra.compile_layers to true"
        )
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model"):
        raise UnsupportedModelError(
            f"{name} is not a Hugging Face causal language model; pass e.g. a LlamaForCausalLM"
        )
    base_config = model.base_model.config
    for problem in _problems(model, config, base_config):
        raise UnsupportedModelError(f"{name} (model type {config.model_type!r}): {problem}")


def _problems(model: nn.Module, config: Any, base_config: Any) -> Iterator[str]:
    for known in {id(c): c for c in (config, base_config)}.values():
        for row in CONFIG_REFUSED:
            yield from filter(None, [row.find_problem(getattr(known, row.name, None))])
    if problem := find_other_inputs(config):
        yield problem
    try:
        DecoderParts.find(model)
    except LookupError as error:
        yield str(error)
    if problem := _find_noise(model, base_config):
        yield problem
    if problem := find_loss_problem(model):
        yield problem
    streams = getattr(base_config, "ngram", 1) if hasattr(base_config, "disable_ngram_loss") else 1
    if streams > 1 and not (base_config.disable_ngram_loss and base_config.eps == 0):  # ProphetNet
        yield (
            f"its loss is over ngram = {streams} streams, smoothed by eps = {base_config.eps}{INSTEAD_OF_ITS_LOSS}: "
            "set disable_ngram_loss to True and eps to 0.0 in model.config"
        )


def check_unchanged(model: nn.Module, *, has_own_masks: bool) -> None:
    """Raise UnsupportedModelError where the modules of a loaded model were changed, so that they do
    other than a small model of its configuration, which was tried. `has_own_masks`: the model masks
    by itself.
    """
    parts = DecoderParts.find(model)
    of_layers = () if has_own_masks else _find_changed_layers(parts, model.base_model.config)
    for problem in (*of_layers, *_find_changed_embedding(parts.embedding)):
        raise UnsupportedModelError(f"{type(model).__name__}: {problem}")


def _find_changed_layers(parts: DecoderParts, config: Any) -> Iterator[str]:
    types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    for place, layer in enumerate(parts.layers):
        for name, module in layer.named_modules():
            where = f"{name} of layer {place}"
            if vars(module).get("is_causal") is False and "encoder" not in name:
                if "cross" in name and getattr(config, "add_cross_attention", False):
                    yield f"{where} is for an encoder's output; load the model with add_cross_attention=False"
                yield f"{where} has is_causal = False, and attention is causal; set it to True"
            own = vars(module).get("sliding_window")
            if isinstance(own, int) and own != window:
                yield (
                    f"{where} has sliding_window = {own}, and the configuration, which transformers masks it by, says "
                    f"{window}; let both agree (a configuration that is changed after loading changes no layer)"
                )
            number = vars(module).get("layer_idx")
            if place >= len(types) or not isinstance(number, int):
                continue
            of_number = types[number] if number < len(types) else None
            made_for = vars(module).get("layer_type") or of_number
            if made_for in _PACKED_LAYER_TYPES and made_for != types[place]:
                yield (
                    f"{where} has the attention of {made_for!r} (layer_idx {number}), and layer_types of the "
                    f"configuration say {types[place]!r}, which transformers masks it by: a layer was moved, left out "
                    "or doubled; let layer_idx, sliding_window and layer_types agree"
                )


def _find_changed_embedding(embedding: nn.Embedding) -> Iterator[str]:
    for attribute in ("max_norm", "scale_grad_by_freq", "sparse"):
        if value := getattr(embedding, attribute, None):
            yield (
                f"its input embedding has {attribute} = {value}, which looks at all tokens of a batch, and those "
                f"are on several pipelines; set {attribute} to {None if attribute == 'max_norm' else False}"
            )


def _find_noise(model: nn.Module, config: Any) -> str:
    """Describe the model's own noise and how to do without it; "" where it has none.

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
        if rate := vars(module)[attribute]:
            by_attribute.setdefault((attribute, rate), []).append(name)
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
    """Modules of `model` that could make noise, but those of adapters, with their names and the
    attributes that hold the rates, 0 or more.
    """
    for name, module in model.named_modules():
        if "lora_dropout" not in name.split("."):
            for key, value in vars(module).items():
                is_rate = key == "p" if isinstance(module, _DropoutNd) else _is_noise(key)
                if is_rate and _is_number(value):
                    yield name or type(module).__name__, module, key


def _is_noise(key: str) -> bool:
    return any(word in key for word in _NOISE)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def find_loss_problem(model: nn.Module) -> str:
    """Reason that the loss of `model` is not the mean cross entropy of its logits, as far as its
    `loss_function` and the additions of transformers' forwards show. "" where it is.
    """
    kind = type(model)
    if not isinstance(model, PreTrainedModel):
        return ""
    if weight := getattr(model, "z_loss_coefficient", 0):  # Bamba
        return (
            f"z_loss_coefficient = {weight} adds squared log-normalisers to its loss, which training would not; load "
            "it with from_pretrained(..., z_loss_coefficient=0.0) and give the loss as engine.train_batch(batch, "
            f"loss=ds_hydra.losses.CrossEntropy(z_loss={weight}))"
        )
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
    """Reason that a model whose `config` has parts for images or sound is refused, with its text
    class. "" where it has no such parts.
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
    """Find the configuration of the language model inside `config`; itself where it is one."""
    try:
        return config.get_text_config()
    except (ValueError, AttributeError):  # of several, or of a type that has none
        return config


def other_layer_types(config: Any) -> list[str]:
    """Kinds of layers beside those whose attention ds_hydra computes for packed micro-batches."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _PACKED_LAYER_TYPES)


def is_quantised(param: nn.Parameter) -> bool:
    """Whether the numbers of `param` are integers, or of 8 bits."""
    return not param.is_floating_point() or param.dtype.itemsize < 2


def check_weights(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise UnsupportedModelError for parameters that are no tensors of numbers alone: those of
    quantised models, whose scales are elsewhere, and of tensor subclasses.
    """
    for fqn, param in named:
        is_subclass = is_traceable_wrapper_subclass(param)
        if is_subclass or is_quantised(param):
            kind = type(param).__name__ if is_subclass else "tensor"
            raise UnsupportedModelError(
                f"parameter {fqn} is a {kind} of {param.dtype}, expected a plain tensor in fp32, bf16 or fp16: slices "
                "of quantised or distributed weights are not known here; load the model without quantization_config, "
                "quantize_() and device meshes"
            )
