"""Changes of a model between its engine's start and an iteration that training cannot follow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.engine.model.adapters import find_saved_in_use
from ds_hydra.engine.model.model_checks import find_loss_problem, find_rates
from ds_hydra.errors import UnsupportedModelError

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_NOISE = "transformers.integrations.neftune"
_SET_BY_LIBRARIES = {
    *("use_cache", "architectures", "dtype", "transformers_version"),
    *("training", "gradient_checkpointing", "_parameters"),
    *("applied_pre_backward_ref_cnt", "ds_grads_remaining"),
}
"""Attributes that saving, generation and DeepSpeed set, of modules and of their configuration."""


@dataclass(slots=True)
class _Module:
    """A module at the start, and as it was last looked at."""

    name: str
    module: nn.Module
    children: dict[str, nn.Module | None]
    params: dict[str, nn.Parameter | None]
    saved_in_use: str | None
    forward_hooks: dict[int, Any] = field(default_factory=dict)
    """Forward hooks that were looked at."""
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    """`_state_of` each parameter that was looked at."""

    def is_as_it_was(self) -> bool:
        """Whether parameters are those that were looked at, with the same dtypes and hooks."""
        held = self.module._parameters.values()
        if len(held) != len(self.seen):
            return False
        for param, (own, dtype, before, after) in zip(held, self.seen):
            if param is not own:
                return False
            if param is not None and (
                param.dtype is not dtype
                or param._backward_hooks != before
                or param._post_accumulate_grad_hooks != after
            ):
                return False
        return True

    def remember(self) -> None:
        """This state was looked at."""
        self.forward_hooks = {**self.module._forward_hooks}
        self.seen = [_state_of(param) for param in self.module._parameters.values()]


def _state_of(param: nn.Parameter | None) -> tuple[Any, ...]:
    """Return the parameter, its dtype, and copies of its hooks."""
    if param is None:
        return None, None, None, None
    hooks = [getattr(param, kind, None) for kind in _TENSOR_HOOKS]
    return param, param.dtype, *(None if h is None else {**h} for h in hooks)


class SinceStart:
    """`model` as it was at the start; `inside` are its layers, with all modules in them."""

    def __init__(self, model: nn.Module, inside: Collection[nn.Module]):
        self._model = model
        self._modules = [
            _Module(
                name or type(model).__name__,
                m,
                {**m._modules},
                {**m._parameters},
                find_saved_in_use(m),
            )
            for name, m in model.named_modules()
        ]
        self._rates = [rate for rate in find_rates(model) if not vars(rate[1])[rate[2]]]
        self._outside = [m for m in model.modules() if m not in inside]
        self._dtypes: dict[tuple[str, str], torch.dtype] = {}
        """Dtypes of parameters once training has begun: a start may change them."""
        self._marks = self._mark()

    def check(self) -> None:
        """Raise UnsupportedModelError for changes that training cannot follow."""
        for problem in self._find_changes():
            raise UnsupportedModelError(problem)

    def _find_changes(self) -> Iterator[str]:
        for known in self._modules:
            module = known.module
            if (
                module._modules != known.children
                or module._forward_hooks != known.forward_hooks
                or known.saved_in_use is not None
                or (module._parameters and not known.is_as_it_was())
            ):
                yield from self._find_changes_of(known)
                known.remember()
        for name, module, key in self._rates:
            if rate := vars(module).get(key):
                yield (
                    f"{name}.{key} was 0 at the start and is {rate} now: noise of the model itself would depend on "
                    "the strategy; set it back to 0"
                )
        yield from filter(None, [find_loss_problem(self._model)])

    def take_changes_outside(self) -> bool:
        """Whether an attribute of a module outside the layers, or of its configuration, or a buffer
        is another one than at the last call.
        """
        before, self._marks = self._marks, self._mark()
        return before != self._marks

    def _mark(self) -> list[Any]:
        held = [(vars(m), m._buffers) for m in self._outside]
        configs = {
            id(c): vars(c) for m in self._outside if (c := vars(m).get("config")) is not None
        }
        return [
            (key, _mark(value))
            for values in (*(d for pair in held for d in pair), *configs.values())
            for key, value in values.items()
            if key not in _SET_BY_LIBRARIES and not key.startswith("ds_")
        ]

    def _find_changes_of(self, known: _Module) -> Iterator[str]:
        name, module, held = known.name, known.module, known.module._parameters
        if module._modules != known.children:
            yield (
                f"{name} has other modules than at the start; add or replace modules and adapters before "
                "ds_hydra.initialize"
            )
        for key in held.keys() | known.params.keys():
            if (param := held.get(key)) is not known.params.get(key):
                yield (
                    f"{name}.{key} is another parameter than at the start, which training would not see; tie, "
                    "add, replace or remove parameters before ds_hydra.initialize"
                )
            if param is None:
                continue
            before = self._dtypes.setdefault((name, key), param.dtype)
            if before is not param.dtype:  # a cast of the model does not reach shards
                yield (
                    f"{name}.{key} was {before} in the iteration before and is {param.dtype} now; training goes "
                    "on in the dtype in which it has begun: load the model anew to change it"
                )
        if find_saved_in_use(module) != known.saved_in_use:
            yield (
                f"{name} is in modules_to_save, and training runs what adapter {known.saved_in_use!r} had of it "
                "at the start: adapters cannot be switched off or set later; where a reference without adapters is "
                "needed, as in DPO, pass it as a model of its own (ref_model)"
            )
        yield from find_hooks(name, module)


def find_hooks(name: str, module: nn.Module) -> Iterator[str]:
    """Find hooks on parameters of `module`, whose slices are others, and transformers' noise."""
    for key, param in module._parameters.items():
        for kind in _TENSOR_HOOKS if param is not None else ():
            for hook in (getattr(param, kind, None) or {}).values():
                if not _origin_of(hook).startswith("deepspeed."):
                    yield (
                        f"{name}.{key} has a hook, {_name_of(hook)}: passes run on slices of it, whose gradients no "
                        "hook of the whole sees; remove it (handle.remove())"
                    )
    for hook in module._forward_hooks.values():
        if _origin_of(hook) == _NOISE:
            yield (
                f"{name} has a hook, {_name_of(hook)} of {_NOISE}, whose noise would depend on the strategy; remove "
                "it (handle.remove()), and set hydra.neftune_noise_alpha"
            )


def _origin_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def _name_of(function: Any) -> str:
    return repr(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _mark(value: Any) -> Any:
    """Mark by which a later call tells another value, as far as nobody edits `.data`."""
    if isinstance(value, Tensor):
        return id(value), value._version
    is_plain = isinstance(value, int | float | str) and value == value  # not NaN
    return value if is_plain else id(value)
