"""State of the trained model's modules besides parameters: carried over to the copy that runs, or
refused by name.

Hooks and patched forwards are the user's code. A copy would run it on slices of weights and packed
micro-batches, or it would keep the trained model, whose parameters are partitioned.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn

from ds_hydra.engine.model.adapters import TokenDropout, find_saved_in_use, refuse_empty_merges
from ds_hydra.engine.model.decoder_parts import find_loss_problem, is_rate
from ds_hydra.errors import HydraConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_LIBRARIES = {"deepspeed", "transformers", "peft", "accelerate"}
"""Their hooks partition parameters, record outputs or let embeddings require gradients."""
_NOISE = "transformers.integrations.neftune"

_OUTSIDE_TRAINING = {"use_cache", "architectures", "dtype", "transformers_version"}
"""Keys of a model's configuration that saving and generation set."""

_NOT_FOLLOWED = {
    *vars(nn.Module()),
    *("gradient_checkpointing", "_gradient_checkpointing_func"),
    *("config", "generation_config", "peft_config", "_loss_function"),
    *("applied_pre_backward_ref_cnt", "_external_params", "_original_parameters"),
    *("all_parameters", "pre_bwd_fn", "post_bwd_fn"),
    *("_require_grads_hook", "_require_grads_hooks"),  # of enable_input_require_grads()
}
"""Attributes of modules that are torch's own, have a check of their own, or are DeepSpeed's notes
(as those that begin with `ds_`).
"""

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum),
    *(torch.dtype, torch.device, torch.layout, np.generic),
)
_NOTHING = object()
"""Value of an attribute that is not there."""

_OUTSIDE_PASSES = ("torch.nn.modules.module", "transformers.modeling_utils", "transformers.gener")
"""Prefixes of modules with methods that neither forward nor backward calls, as `save_pretrained`.
"""


class ModuleState:
    """The modules of a model and of its copy."""

    def __init__(self, model: nn.Module, copied: nn.Module):
        named = zip(model.named_modules(), copied.modules(), strict=True)
        self._twins = [_Twins(name, module, twin) for (name, module), twin in named]
        self._model = model
        self._settings = copy.deepcopy(_settings(model))

    def carry_over(self) -> list[nn.Module]:
        """Give the copy the changes of the model's modules since the last call: attributes that are
        values (`disable_adapter()`, a LoRA scaling), tensors and arrays among them, and buffers.
        Returns modules of the copy that got something new, as far as that is known.

        Raises UnsupportedModelError for other modules, patched forwards, hooks, and attributes that
        became other objects. Not collective.
        """
        for twins in self._twins:
            twins.check()
        if problem := find_loss_problem(self._twins[0].module):
            raise UnsupportedModelError(problem)
        changed = [twins.twin for twins in self._twins if twins.carry_over()]
        self._warn_of_settings()
        return changed

    def _warn_of_settings(self) -> None:
        """Name once the changes of the model's configuration; the copy has its own."""
        for key, value in _settings(self._model).items():
            before = self._settings.get(key)
            if not _is_same(_snapshot(before), value):
                logger.warning(
                    "model.config.%s was %r when the engine started and is %r now, which training does not see; "
                    "set it before ds_hydra.initialize",
                    key,
                    before,
                    value,
                )
                self._settings[key] = copy.deepcopy(value)


class _Twins:
    """A module, its copy, and the module's state when it was last looked at."""

    def __init__(self, name: str, module: nn.Module, twin: nn.Module):
        self._name, self.module, self.twin = name or type(module).__name__, module, twin
        self._class = type(module)
        self._values = {key: _snapshot(value) for key, value in _attributes(module)}
        self._buffers = {key: _clone(buffer) for key, buffer in module._buffers.items()}
        self._children = dict(module._modules)
        self._dtypes: dict[str, torch.dtype] | None = None
        """Dtypes of parameters once training has begun: a start may change them."""
        self._params = dict(module._parameters)
        self._saved_in_use = find_saved_in_use(module)

    def check(self) -> None:
        """Raise UnsupportedModelError for changes that the copy cannot follow."""
        if type(self.module) is not self._class:
            raise UnsupportedModelError(
                f"{self._name} was a {self._class.__name__} at the start and is a {type(self.module).__name__} now; "
                "set its class before ds_hydra.initialize"
            )
        if self.module._modules != self._children:
            raise UnsupportedModelError(
                f"{self._name} has other modules than at the start; add or replace modules and adapters before "
                "ds_hydra.initialize"
            )
        held = self.module._parameters
        for key in held.keys() | self._params.keys():
            if held.get(key) is not self._params.get(key):
                raise UnsupportedModelError(
                    f"{self._name}.{key} is another parameter than at the start, which training would not see; tie, "
                    "add, replace or remove parameters before ds_hydra.initialize"
                )
        self._check_dtypes()
        if find_saved_in_use(self.module) != self._saved_in_use:
            raise UnsupportedModelError(
                f"{self._name} is in modules_to_save, and training runs what adapter {self._saved_in_use!r} had of it "
                "at the start: adapters cannot be switched off or set later; where a reference without adapters is "
                "needed, as in DPO, pass it as a model of its own (ref_model)"
            )
        check_hooks(self._name, self.module)

    def _check_dtypes(self) -> None:
        """A cast of the model does not reach shards."""
        params = self.module._parameters.items()
        dtypes = {key: param.dtype for key, param in params if param is not None}
        before, self._dtypes = self._dtypes or dtypes, dtypes
        for key, dtype in dtypes.items():
            if before[key] is not dtype:
                raise UnsupportedModelError(
                    f"{self._name}.{key} was {before[key]} in the iteration before and is {dtype} now; training goes "
                    "on in the dtype in which it has begun: load the model anew to change it"
                )

    def carry_over(self) -> bool:
        """Give the copy the changes. Returns whether there were any, as far as is known."""
        held, of_twin, is_changed = dict(_attributes(self.module)), vars(self.twin), False
        for key in {**self._values, **held}:
            value, before = held.get(key, _NOTHING), self._values.get(key, _NOTHING)
            if value is before or _is_same(before, value):
                continue
            if value is _NOTHING:  # the class has the value again
                is_changed = True
                del self._values[key]
                of_twin.pop(key, None)
            elif self._can_follow(key, before, value):
                is_changed = True
                self._values[key] = _snapshot(value)
                of_twin[key] = _copy(value)
        for key in {**self.module._buffers, **self._buffers}:
            is_changed |= self._take_buffer(key)
        return is_changed

    def _can_follow(self, key: str, before: Any, value: Any) -> bool:
        """Return whether the copy takes over the new value of an attribute; False where passes do
        not read it. Raises UnsupportedModelError for one that they read and a copy cannot take
        over.
        """
        place = f"{self._name}.{key}"
        if not _is_value(value):
            if before is _NOTHING and _owner_in_passes(self._class, key) is None:
                return False
            raise UnsupportedModelError(
                f"{place} was set after the start, which training would not see ({type(value).__name__}); set it "
                "before ds_hydra.initialize"
            )
        if key == "padding_idx":
            raise UnsupportedModelError(
                f"{place} was {before} at the start and is {value} now; set it before ds_hydra.initialize"
            )
        is_noise = is_rate(self.twin, key) and not isinstance(self.twin, TokenDropout)
        if is_noise and bool(value.any() if _is_array(value) else value):
            raise UnsupportedModelError(
                f"{place} was {before} at the start and is {value} now: noise of the model itself would depend on the "
                f"strategy; set it back to {before}"
            )
        return True

    def _take_buffer(self, key: str) -> bool:
        """Give the copy the module's buffer, where its bits are others than those that were taken
        over: one that is edited through `.data` keeps its identity and version. What the copy has
        made of its own since then stays otherwise. Returns whether they are others; the host waits
        for no accelerator to know.
        """
        now, before = self.module._buffers.get(key), self._buffers.get(key)
        twin = self.twin._buffers.get(key)
        if now is None and before is None:
            return False
        is_other: bool | Tensor = True
        if now is not None and before is not None and _kind(now) == _kind(before):
            if now.is_meta:
                return False
            is_other = (_bits(now) != _bits(before)).any()
            if now.device.type != "cpu" and twin is not None and _kind(now) == _kind(twin):
                self.twin._buffers[key] = torch.where(is_other, now.detach(), twin)
                self._buffers[key] = _clone(now)
                return False
        if is_other:
            own = self._buffers[key] = _clone(now)
            device = None if twin is None else twin.device
            self.twin._buffers[key] = None if own is None else own.clone().to(device)
        return bool(is_other)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _kind(buffer: Tensor) -> tuple[Any, ...]:
    return buffer.dtype, buffer.shape, buffer.device


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module in which its forward may look for a value."""
    for key, value in vars(module).items():
        if key not in _NOT_FOLLOWED and not key.startswith("ds_"):
            yield key, value


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the values of a container by place; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    is_record = isinstance(value, SimpleNamespace) or is_dataclass(type(value))
    return getattr(value, "__dict__", None) if is_record else None


def _is_array(value: Any) -> bool:
    """Whether `value` is a tensor or an array of numbers, and no parameter, which ZeRO-3 has."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return type(value) is Tensor and value.layout is torch.strided


def _is_value(value: Any) -> bool:
    """Whether a copy of `value` can stand for it, as for numbers and arrays in containers."""
    if (parts := _parts(value)) is not None:
        return all(map(_is_value, parts.values()))
    if isinstance(value, set | frozenset):
        return all(map(_is_value, value))
    return isinstance(value, _PLAIN) or _is_array(value)


def _snapshot(value: Any) -> Any:
    """Return the reference that `_is_same` compares later values with: copies of values, other
    objects themselves.
    """
    if (parts := _parts(value)) is not None:
        return type(value), {key: _snapshot(part) for key, part in parts.items()}
    if isinstance(value, Tensor) and _is_array(value):
        return _clone(value)
    return value.copy() if isinstance(value, set | np.ndarray) else value


def _is_same(before: Any, value: Any) -> bool:
    """Whether `value` is unchanged since `_snapshot`."""
    if before is value:
        return True
    if (parts := _parts(value)) is not None:
        if type(before) is not tuple or before[0] is not type(value):
            return False
        kept = before[1]
        return kept.keys() == parts.keys() and all(_is_same(kept[key], parts[key]) for key in kept)
    if type(before) is not type(value):
        return False
    if isinstance(value, Tensor):
        # No identity or version tells of an edit of `.data`; attributes on accelerators are rare.
        if not (_is_array(value) and _kind(before) == _kind(value)):
            return False
        return value.is_meta or bool((_bits(before) == _bits(value)).all())
    if isinstance(value, np.ndarray):
        has_nan = value.dtype.kind in "fc"
        return before.dtype == value.dtype and np.array_equal(before, value, equal_nan=has_nan)
    if isinstance(value, _PLAIN):
        return bool(before == value) or bool(before != before and value != value)  # NaN
    return isinstance(value, set | frozenset) and before == value


def _copy(value: Any) -> Any:
    """Return a deep copy of a value, without the graphs that its tensors belong to."""
    memo: dict[int, Any] = {}

    def detach(value: Any) -> None:
        if isinstance(value, Tensor):
            memo[id(value)] = _clone(value)
        for part in (_parts(value) or {}).values():
            detach(part)

    detach(value)
    return copy.deepcopy(value, memo)


def _settings(model: nn.Module) -> dict[str, Any]:
    """Return the settings of a model's configuration that a user may change."""
    return {
        key: value
        for key, value in getattr(getattr(model, "config", None), "__dict__", {}).items()
        if not key.startswith("_") and key not in _OUTSIDE_TRAINING and _is_value(value)
    }


def check_user_code(model: nn.Module) -> None:
    """Raise UnsupportedModelError for hooks, and for methods set on instances that a copy of the
    model would not take along.
    """
    for name, module in model.named_modules():
        name = name or type(module).__name__
        check_hooks(name, module)
        for attribute, value in vars(module).items():
            if callable(value) and _is_used_in_passes(type(module), attribute):
                _check_patch(f"{name}.{attribute}", value)


def check_hooks(name: str, module: nn.Module) -> None:
    """Raise UnsupportedModelError for a hook of `module` or of its parameters that is not of a
    library.
    """
    for kind in _MODULE_HOOKS:
        _check_hooks(name, getattr(module, kind).values())
    for attribute, param in module._parameters.items():
        for kind in _TENSOR_HOOKS if param is not None else ():
            hooks: OrderedDict[int, Any] = getattr(param, kind, None) or OrderedDict()
            _check_hooks(f"{name}.{attribute}", hooks.values())


def _check_hooks(name: str, hooks: Collection[Any]) -> None:
    for hook in hooks:
        function = hook.func if isinstance(hook, functools.partial) else hook
        origin = getattr(function, "__module__", None) or type(function).__module__
        if origin.split(".")[0] not in _LIBRARIES or origin == _NOISE:
            raise UnsupportedModelError(
                f"{name} has a hook, {_name_of(function)} of {origin}: layers run as copies on slices of weights and "
                "packed micro-batches, where it would see other tensors or none; remove it (handle.remove())"
            )


def _is_used_in_passes(kind: type[nn.Module], attribute: str) -> bool:
    owner = _owner_in_passes(kind, attribute)
    return owner is not None and callable(vars(owner)[attribute])


def _owner_in_passes(kind: type[nn.Module], attribute: str) -> type | None:
    """Return the class that defines an attribute of `kind` for forward or backward, if any."""
    owner = next((base for base in kind.__mro__ if attribute in vars(base)), None)
    is_outside = owner is None or owner.__module__.startswith(_OUTSIDE_PASSES)
    return None if is_outside else owner


def _check_patch(name: str, patch: Any) -> None:
    """Bound methods and partials follow a deep copy; what a function has in sight does not."""
    is_bound = isinstance(patch, MethodType | functools.partial)
    if is_bound and not any(map(_sees_a_module, _functions_of(patch))):
        return
    raise UnsupportedModelError(
        f"{name} is set on the instance ({_name_of(patch)}) and would still run the trained model, whose parameters "
        "are partitioned, in place of the copy that a rank runs; set it on a subclass, or bind a function that "
        "reaches the model by its first argument alone (types.MethodType(function, module))"
    )


def _functions_of(patch: Any) -> Iterator[FunctionType]:
    """Functions that a deep copy of `patch` shares with it."""
    if isinstance(patch, MethodType):
        yield from _functions_of(patch.__func__)
    elif isinstance(patch, functools.partial):
        for part in (patch.func, *patch.args, *patch.keywords.values()):
            yield from _functions_of(part)
    elif isinstance(patch, FunctionType):
        yield patch


def _sees_a_module(function: FunctionType) -> bool:
    """Whether `function` names a module, or an object that runs one, from outside its arguments."""
    names = [i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"]
    seen: set[int] = set()
    in_sight = [function, *(function.__globals__.get(name) for name in names)]
    return any(_holds_a_module(value, seen) for value in in_sight)


def _holds_a_module(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    return isinstance(value, nn.Module) or any(_holds_a_module(v, seen) for v in _held_by(value))


def _held_by(value: Any) -> Iterator[Any]:
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def _name_of(function: Any) -> str:
    return repr(getattr(function, "__qualname__", None) or type(function).__qualname__)


_modules_of_engines: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_told_of_empty: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_are_shards_saved = False
"""Whether shards are saved beside the dictionary of empty weights that is asked for."""


def hold(model: nn.Module) -> None:
    """Note that an engine starts on `model`; DeepSpeed wants its weights in one piece."""
    for param in model.parameters():
        if not param.is_contiguous():  # an SVD has made it
            param.data = param.data.contiguous()
    _modules_of_engines.update(model.modules())
    refuse_empty_merges()
    if _tell_of_empty not in model._state_dict_pre_hooks.values():
        model.register_state_dict_pre_hook(_tell_of_empty)


@contextlib.contextmanager
def saving_shards() -> Iterator[None]:
    """Announce no state dictionary of empty weights inside."""
    global _are_shards_saved
    _are_shards_saved = True
    try:
        yield
    finally:
        _are_shards_saved = False


def _tell_of_empty(model: nn.Module, *_: Any) -> None:
    params = [*model.parameters()]
    trained = [param for param in params if param.requires_grad] or params  # as adapters are saved
    is_empty = any(param.numel() == 0 and getattr(param, "ds_numel", 0) for param in trained)
    is_told = model in _told_of_empty or _are_shards_saved
    if is_empty and not is_told and dist.is_initialized() and dist.get_rank() == 0:
        _told_of_empty.add(model)
        logger.warning(
            "weights in this state_dict() or save_pretrained() are empty, because ZeRO-3 has them in shards; save with "
            "engine.save_16bit_model or trainer.save_model, or inside deepspeed.zero.GatheredParameters"
        )


def let_go(model: nn.Module) -> None:
    """Take away what DeepSpeed leaves on modules and parameters, and in tables, of a destroyed
    engine, or of one whose start failed: it holds the engine, fp32 copies and states, and gathers
    parameters for it. Its weights stay in shards, so empty ones are still announced.
    """
    parameter_offload.FWD_MODULE_STACK[:] = [
        module for module in parameter_offload.FWD_MODULE_STACK if module is not model
    ]
    for module in model.modules():
        module._parameters = dict(module._parameters.items())
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            of_deepspeed = [key for key, hook in hooks.items() if _is_of_deepspeed(hook)]
            for key in of_deepspeed:
                del hooks[key]
        _modules_of_engines.discard(module)
    for param in model.parameters():
        vars(param).pop("_z3_optimizer", None)
    # A table of DeepSpeed's, by engine and module, of what forward passes of its own release
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            getattr(cell.cell_contents, "cache_clear", lambda: None)()


def _is_of_deepspeed(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")


def check_free(model: Any) -> None:
    """Raise HydraConfigError unless `model` is a module that no engine holds."""
    if not isinstance(model, nn.Module):
        raise HydraConfigError(
            f"model is {model!r}, expected a torch.nn.Module; load it first: "
            f"AutoModelForCausalLM.from_pretrained({str(model)!r})"
        )
    if any(module in _modules_of_engines for module in model.modules()):
        raise HydraConfigError(
            f"an engine holds this {type(model).__name__} (or a part of it), and ZeRO-3 has its parameters; go on with "
            "that engine, call its destroy() first (trainer.engine.destroy() of a Trainer), or load the model anew"
        )
