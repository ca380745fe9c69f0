"""Parts of a causal language model of any family, whether ds_hydra trains it, and, by transformers'
tp plan, the modules that a TP group shares and how each of their parameters is cut.

[Note: Parts of any family]
Names differ between families (`model.layers`, `transformer.h`, `gpt_neox.layers`). Layers are the
largest list of modules that is in no other list. Embedding and head are what transformers'
accessors give. What else runs before the first layer is tried.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_hydra.engine.model.adapters import SUMMED, split_style
from ds_hydra.engine.parallel import tensor_parallel
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.refusals import Refusal, each
from ds_hydra.zero_link import ParamSpec, Slicing


class Binding(NamedTuple):
    """Place of one parameter in the stage model: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str
    param: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that travel together: the embedding and all else that runs before the layers, one
    decoder layer, or all that follows.

    `modules`: those before whose forward the parameters have to be there; a layer, or the
    embedding, is the first.
    """

    name: str
    modules: tuple[nn.Module, ...]
    bindings: tuple[Binding, ...]


def shape_of(param: nn.Parameter) -> torch.Size:
    """Full shape, also of a parameter that `deepspeed.zero.Init` has already partitioned."""
    return param.ds_shape if hasattr(param, "ds_shape") else param.shape


def on_meta(param: nn.Parameter) -> nn.Parameter:
    """One like `param`, whole, without memory."""
    empty = torch.empty(shape_of(param), device="meta", dtype=param.dtype)
    return nn.Parameter(empty, param.requires_grad)


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


def bindings_of(owners: Iterable[nn.Module], index_of: Mapping[int, int]) -> tuple[Binding, ...]:
    """Bindings of the parameters that `owners` hold themselves; `index_of` by their `id`."""
    return tuple(
        Binding(module, attribute, index_of[id(param)])
        for module in owners
        for attribute, param in module._parameters.items()
        if param is not None
    )


def bind(bindings: Iterable[Binding], params: Any) -> None:
    """Put those of `params`, by their numbers, into the modules of `bindings`."""
    for module, attribute, param in bindings:
        module._parameters[attribute] = params[param]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Parts of a causal language model."""

    base: nn.Module
    """The model without its head, whose configuration has the plans."""
    layers: nn.ModuleList
    embedding: nn.Embedding
    head: nn.Linear

    @classmethod
    def find(cls, model: nn.Module) -> DecoderParts:
        """The parts of `model`. Raises LookupError naming the one that it does not have."""
        lists = list(_outermost_lists(model))
        if not lists:
            raise LookupError("has no list of decoder layers")
        layers = max(lists, key=_num_elements)
        embedding, head = _embedding_of(model), model.get_output_embeddings()
        for name, part in (("input embedding", embedding), ("output head", head)):
            if getattr(part, "weight", None) is None:
                raise LookupError(f"has no {name} that transformers' accessor would give")
        return cls(_base_of(model, layers), layers, embedding, head)

    def outer_modules(self, model: nn.Module) -> list[nn.Module]:
        """Modules of `model` outside its layers that have parameters of their own, in the order in
        which they were made.
        """
        inside = set(self.layers.modules())
        return [
            m
            for m in model.modules()
            if m not in inside and any(p is not None for p in m._parameters.values())
        ]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            if len(child):
                yield child
        else:
            yield from _outermost_lists(child)


def _num_elements(module: nn.Module) -> int:
    return sum(shape_of(param).numel() for param in module.parameters())


def _embedding_of(model: nn.Module) -> Any:
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def _base_of(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """transformers' base model, or its stand-in where a class does not say."""
    base: nn.Module = model.base_model
    if base is not model:
        return base
    holders = (m for m in model.children() if isinstance(m, PreTrainedModel))
    return next((m for m in holders if layers in m.modules()), model)


@contextlib.contextmanager
def noting_calls(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, int]]:
    """Count the calls of each of `modules` inside the block."""
    calls: dict[nn.Module, int] = {}

    def note(module: nn.Module, _args: Any) -> None:
        calls[module] = calls.get(module, 0) + 1

    handles = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def with_holders(
    modules: Sequence[nn.Module], model: nn.Module, layers: nn.Module
) -> list[nn.Module]:
    """`modules` and the modules that contain one of them and not the `layers`: a parent may read
    what its child holds without calling it.
    """
    holders = [
        m
        for m in model.modules()
        if m not in modules and layers not in (inside := set(m.modules())) and inside & set(modules)
    ]
    return [*modules, *holders]


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
        if _is_noise(key) and not key.startswith(_OF_OTHER_HEADS) and is_number(value)
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
                if is_rate(module, key) and is_number(value) and value:
                    yield name, module, key


def is_rate(module: nn.Module, attribute: str) -> bool:
    """Whether `attribute` of `module` says how much noise it makes."""
    return attribute == "p" if isinstance(module, _DropoutNd) else _is_noise(attribute)


def _is_noise(key: str) -> bool:
    return any(word in key for word in _NOISE)


def is_number(value: Any) -> bool:
    """Whether `value` is a number, and no truth value."""
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
    """The configuration of the language model inside `config`; itself where it is one."""
    try:
        return config.get_text_config()
    except (ValueError, AttributeError):  # of several, or of a type that has none
        return config


def other_layer_types(config: Any) -> list[str]:
    """Kinds of layers beside those whose attention ds_hydra computes for packed micro-batches."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _PACKED_LAYER_TYPES)


_DISPATCHED, _WHOLE_EXPERTS = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers' ep plans: a module of experts, and its parameters."""
_NUM_PACKED = 2
"""Matrices in a parameter of style packed_colwise: gate and up."""

_KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj"}
_QUERY_PROJECTIONS = {"q_proj"}


def module_styles(base: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """(module, (style, last name part)) of every module of `base` that its tp plan mentions."""
    plan = tp_plan(base)
    for name, module in base.named_modules():
        if (style := plan.get(_pattern(name))) is not None:
            yield module, (style, name.rsplit(".", 1)[-1])


def module_sides(base: nn.Module) -> dict[nn.Module, str]:
    """Modules whose features a TP group shares by the tp plan of `base` -> COLUMN or ROW."""
    sides = {
        m: tensor_parallel.STYLES[style].side
        for m, (style, _) in module_styles(base)
        if style in tensor_parallel.STYLES
    }
    return {module: side for module, side in sides.items() if side}


def expert_modules(base: nn.Module) -> list[nn.Module]:
    """The modules of experts that ranks may share, by the model's ep plan."""
    plan = ep_plan(base)
    return [m for name, m in base.named_modules() if plan.get(_pattern(name)) == _DISPATCHED]


def num_experts_of(base: nn.Module) -> dict[tuple[nn.Module, str], int]:
    """(module, attribute) of a parameter of experts that ranks may share -> how many it has."""
    plan = ep_plan(base)
    return {
        (module, attribute): param.shape[0]
        for name, module in base.named_modules()
        for attribute, param in module._parameters.items()
        if param is not None and plan.get(_pattern(f"{name}.{attribute}")) == _WHOLE_EXPERTS
    }


def parameter_styles(base: nn.Module) -> dict[tuple[nn.Module, str], tuple[str, str]]:
    """(module, attribute) of a parameter that the tp plan mentions, itself or its module -> (style,
    last name part); those of a LoRA layer belong to its parts.
    """
    styles = {
        (part, attribute): (part_style, name)
        for module, (style, name) in module_styles(base)
        if style != tensor_parallel.EXPERTS
        for part, part_style in split_style(module, style)
        for attribute in part._parameters
    }
    for activation in _sliced_activations(base):
        styles |= {
            (activation, attribute): (tensor_parallel.PARTIAL, "")
            for attribute in activation._parameters
        }
    plan = tp_plan(base)
    for fqn, _ in base.named_parameters(remove_duplicate=False):
        if (style := plan.get(_pattern(fqn))) is not None:
            owner, _, attribute = fqn.rpartition(".")
            styles[base.get_submodule(owner), attribute] = (style, attribute)
    return styles


def _sliced_activations(base: nn.Module) -> Iterator[nn.Module]:
    """Activations between colwise and rowwise layers whose parameters are numbers for all
    features.
    """
    styles = {module: style for module, (style, _) in module_styles(base)}
    for parent in base.modules():
        activation = getattr(parent, "act_fn", None)
        if (
            isinstance(activation, nn.Module)
            and any(styles.get(child) == "colwise" for child in parent.children())
            and all(shape_of(param).numel() == 1 for param in activation.parameters())
        ):
            yield activation


def _before_latent(parent: nn.Module, styles: Mapping[nn.Module, str]) -> set[nn.Module]:
    """The down-projections of latent attention and their norms. The layers after them are colwise,
    so every rank has their whole gradient.
    """
    if not any(styles.get(child) == tensor_parallel.LATENT for child in parent.children()):
        return set()
    before = [child for name, child in parent.named_children() if "_a_" in name]
    return {part for child in before for part in child.modules()}  # those of adapters, too


def _pattern(name: str) -> str:
    """`name` as plans write it: an asterisk for every number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def find_unplanned(
    base: nn.Module, fqn_of: Mapping[tuple[nn.Module, str], str], beside: str = "colwise"
) -> list[str]:
    """Parameters beside layers of the style `beside` (same parent module) whose own module the tp
    plan does not mention; `fqn_of` (module, attribute).

    Their gradient would be partial on each rank of a TP group, or not; only the plan can say.
    """
    styles = {module: style for module, (style, _) in module_styles(base)}
    planned = parameter_styles(base).keys()
    parents = [
        module
        for module in base.modules()
        if any(styles.get(child) == beside for child in module.children())
    ]
    found = {
        fqn_of[module, attribute]
        for parent in parents
        for module in set(parent.modules()) - _before_latent(parent, styles)
        for attribute, param in module._parameters.items()
        if param is not None and (module, attribute) not in planned
    }
    return sorted(found)


def build_specs(
    named: Iterable[tuple[str, nn.Parameter]],
    base: nn.Module,
    *,
    bindings: Iterable[Binding],
    vocabulary: Container[nn.Module],
    cuts_micro_batches: bool,
) -> tuple[ParamSpec, ...]:
    """Build the spec of each `named` parameter for the link, in their order.

    `base`: the model whose modules have them, where `bindings` say.
    `vocabulary`: embedding and head, cut by rows whatever the plan says.
    """
    styles, num_experts = parameter_styles(base), num_experts_of(base)
    places = {param: (module, attribute) for module, attribute, param in bindings}
    specs = []
    for index, (fqn, param) in enumerate(named):
        place = places[index]
        style, name = styles.get(place, ("replicated", ""))
        spec = ParamSpec(
            fqn=fqn,
            shape=tuple(shape_of(param)),
            slicing=Slicing.COLWISE,
            requires_grad=param.requires_grad,
            num_experts=num_experts.get(place, 0),
        )
        if place[0] not in vocabulary:
            spec = _cut_by_plan(spec, style, name, base.config, cuts_micro_batches)
        specs.append(spec)
    return tuple(specs)


def _cut_by_plan(
    spec: ParamSpec,
    style: str,
    name: str,
    config: Any,
    cuts_micro_batches: bool,
) -> ParamSpec:
    """`spec` of a parameter of a module `name`, or of one that the plan mentions itself, with what
    says how it is cut.

    Where TP `cuts_micro_batches`, parameters that the tp plan does not mention see a shard of the
    tokens.
    """
    cut, shape = functools.partial(replace, spec), spec.shape
    num_dims = len(shape)
    if style == "packed_colwise" or (style == "colwise" and num_dims == 3):  # of experts
        dim, num_packed = max(num_dims - 2, 0), 1 if style == "colwise" else _NUM_PACKED
        multiple = _cut_multiple(shape, shape[dim] // num_packed)
        return cut(
            slicing=Slicing.ROWWISE, cut_dim=dim, num_packed=num_packed, cut_multiple=multiple
        )
    if style in ("colwise", tensor_parallel.GATHERED):
        is_head = style == "colwise"
        if is_head and name in _KEY_VALUE_PROJECTIONS:
            return cut(slicing=Slicing.COLWISE, num_blocks=num_kv_heads(config))
        is_head = is_head and name in _QUERY_PROJECTIONS
        num_heads = config.num_attention_heads if is_head else 0
        return cut(slicing=Slicing.COLWISE, num_blocks=num_heads)
    if style in ("rowwise", tensor_parallel.SPLIT):
        if num_dims == 1:
            # A bias: added once, although every rank has a part of the products.
            return cut(slicing=Slicing.FIRST_RANK)
        multiple = _cut_multiple(shape, shape[-1])
        return cut(slicing=Slicing.ROWWISE, cut_dim=num_dims - 1, cut_multiple=multiple)
    if style == SUMMED and num_dims == 1:
        return cut(slicing=Slicing.FIRST_RANK)
    if style in (tensor_parallel.PARTIAL, SUMMED):
        return cut(slicing=Slicing.REPLICATED_PARTIAL_GRAD)
    return cut(
        slicing=Slicing.REPLICATED_PARTIAL_GRAD if cuts_micro_batches else Slicing.REPLICATED
    )


def _cut_multiple(shape: tuple[int, ...], width: int) -> int:
    """Return the number of features at whose multiples a parameter of `width` features is cut."""
    # Grouped products of experts (3 dimensions) want strides of whole 16 bytes. The dtype is not
    # asked: DeepSpeed casts the model after it was cut, and 8 features are enough in any of them.
    return math.gcd(width, 8) if len(shape) == 3 else 1


def num_kv_heads(config: Any) -> int:
    """Key-value heads of a layer; those of queries where `config` does not tell them apart."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Pattern of module names -> style, as transformers ships it for the base model; without its
    embedding, whose rows TP ranks share in any case.
    """
    base = model.base_model
    modules = dict(base.named_modules())
    return {
        name: style
        for name, style in (base.config.base_model_tp_plan or {}).items()
        if style != "embedding_rowwise" or modules.get(name) is not base.get_input_embeddings()
    }


def ep_plan(model: nn.Module) -> dict[str, str]:
    """The expert parallel plan of `model`; see `tp_plan`."""
    return dict(getattr(model.base_model.config, "base_model_ep_plan", None) or {})
