"""Whether a family keeps the sequences of a packed micro-batch apart, tried on a tiny model of its
class when the engine starts: two sequences in a micro-batch against each alone, values and
gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.engine.model.adapters import unwrap_adapters
from ds_hydra.engine.model.attention import PackedMicroBatch
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.model.supported import check_model
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.strategy import Scheme

_LENGTHS = (7, 4)
_WINDOW = 3
_VOCABULARY = 32
_WIDTH = 48

_MOST_DIFFERENCE = 1e-3
"""Relative. Orders of sums differ by about 1e-6 in fp32, a sequence that sees another by 1e-2 and
more.
"""

_SMALLEST_SHARE = 1e-3
"""Of the largest norm: smaller tensors are compared with so much of it."""

_verdicts: dict[tuple[type, str], str] = {}


def check_packing(model: nn.Module) -> None:
    """Raise UnsupportedModelError where a micro-batch of two sequences is not what each of them is
    alone, or where that cannot be tried on a small model of the class.

    Deterministic, so equal on all ranks; takes tenths of a second, on the CPU.
    """
    model = unwrap_adapters(model)
    check_model(model)
    try:
        config = small_config(model.config)
    except Exception as error:  # a configuration may check what is set
        StageModel(model)  # which may have a better reason
        raise UnsupportedModelError(_describe_untried(type(model), error)) from error
    key = (type(model), config.to_json_string())
    if key not in _verdicts:
        _verdicts[key] = _find_problem(type(model), config)
    if _verdicts[key]:
        raise UnsupportedModelError(_verdicts[key])


def _describe_untried(kind: type[nn.Module], error: Exception) -> str:
    return (
        f"{kind.__name__} cannot be tried on a small model of its class ({type(error).__name__}: {error}), and "
        "whether it keeps the sequences of a packed micro-batch apart would not be known; its class has to take a "
        "configuration alone, and its configuration to be one that runs"
    )


def small_config(config: Any) -> Any:
    """`config` with two layers (or one of each kind) and small widths; heads keep their size and
    their grouping.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    layers = _layers_of_each_kind(text)
    num_layers = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(text, key, type(value)(value[i] for i in layers))
    text.num_hidden_layers = len(layers)
    for key, value in _small_widths(text).items():
        if getattr(text, key, None) is not None:
            setattr(text, key, value)
    if (getattr(text, "pad_token_id", None) or 0) >= _VOCABULARY:
        text.pad_token_id = _VOCABULARY - 1
    return small


def _layers_of_each_kind(config: Any) -> list[int]:
    """Two layers, or the first of each of more kinds, in their order; a kind is what the lists of
    the configuration with an entry for each layer say of it.
    """
    num_layers = config.num_hidden_layers
    of_layers = [
        value
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == num_layers
    ]
    kinds = [tuple(map(str, kind)) for kind in zip(*of_layers)] or [()] * num_layers
    first = {kinds.index(kind) for kind in kinds}
    return sorted(first | set(range(min(2, num_layers))))


def _small_widths(config: Any) -> dict[str, int]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    small_heads = 2 if heads > 1 else 1
    return {
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_heads if kv_heads == heads else 1,
        "hidden_size": small_heads * head_dim,
        "intermediate_size": _WIDTH,
        "moe_intermediate_size": _WIDTH,
        "shared_expert_intermediate_size": _WIDTH,
        "first_k_dense_replace": min(1, getattr(config, "first_k_dense_replace", None) or 0),
        "vocab_size": _VOCABULARY,
        "sliding_window": _WINDOW,
    }


def _find_problem(kind: type[nn.Module], config: Any) -> str:
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            model = _build(kind, config, generator)
            stage_model = StageModel(model)
            sequences = [_Sequence.draw(length, generator) for length in _LENGTHS]
            alone = _gradients(model, [_run_alone(model, sequence) for sequence in sequences])
        except UnsupportedModelError as error:
            return str(error)
        except Exception as error:  # a family's own code, at sizes that it was not written for
            return _describe_untried(kind, error)
        try:
            together = _gradients(model, _run_together(stage_model, sequences))
            names = ["values", *(f"gradients of {name}" for name, _ in model.named_parameters())]
            problem = _compare(names, together, alone)
        except Exception as error:
            problem = f"it cannot run one ({type(error).__name__}: {error})"
    return problem and (
        f"{kind.__name__} (model type {config.model_type!r}) does not keep the sequences of a packed "
        f"micro-batch apart: {problem}; use a model whose attention goes through "
        "transformers' AttentionInterface"
    )


@dataclass(frozen=True, slots=True)
class _Sequence:
    input_ids: Tensor
    """[1, l]."""
    weights: Tensor
    """[l, V], by which logits are added up."""

    @classmethod
    def draw(cls, length: int, generator: torch.Generator) -> _Sequence:
        return cls(
            torch.randint(0, _VOCABULARY, (1, length), generator=generator),
            torch.randn(length, _VOCABULARY, generator=generator),
        )


def _build(kind: type[nn.Module], config: Any, generator: torch.Generator) -> nn.Module:
    """A model whose parameters follow from `generator`; vectors (norms, biases) near what they
    start at.
    """
    model = kind(config).float()
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.dim() > 1:
                param.copy_(noise * param.shape[-1] ** -0.5)
            else:
                param.add_(noise * 0.1)
    return model.train().requires_grad_(True)  # some families fix biases of routers


def _run_alone(model: nn.Module, sequence: _Sequence) -> Tensor:
    logits = model(input_ids=sequence.input_ids, use_cache=False).logits[0]
    return logits * sequence.weights


def _run_together(stage_model: StageModel, sequences: Sequence[_Sequence]) -> list[Tensor]:
    stage_model.bind(Scheme(1, 1), 0, dict(enumerate(stage_model.params)))
    micro_batch = PackedMicroBatch.build(_LENGTHS, torch.device("cpu"))
    input_ids = torch.cat([sequence.input_ids for sequence in sequences], dim=1)
    logits = stage_model.forward_stage(micro_batch, input_ids=input_ids, hidden=None, is_last=True)
    return [logits[0] * torch.cat([sequence.weights for sequence in sequences])]


def _gradients(model: nn.Module, weighted: Sequence[Tensor]) -> list[Tensor]:
    """The weighted logits of all sequences, and the gradient of their sum for each parameter."""
    values = torch.cat(list(weighted))
    params = list(model.parameters())
    grads = torch.autograd.grad(values.sum(), params, allow_unused=True, materialize_grads=True)
    return [values.detach(), *grads]


def _compare(names: Sequence[str], got: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    floor = _SMALLEST_SHARE * max(float(tensor.norm()) for tensor in wanted)
    errors = [
        float((mine - theirs).norm()) / max(float(theirs.norm()), floor)
        for mine, theirs in zip(got, wanted, strict=True)
    ]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] <= _MOST_DIFFERENCE:
        return ""
    return f"{names[worst]} are off by {errors[worst]:.0%} where two sequences share one"
