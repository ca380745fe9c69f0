"""The trained model's own modules while a rank's passes run: parameters, hooks and settings of a
stage in place of DeepSpeed's.

[Note: In place]
A stage runs the user's modules themselves. Between passes they are as DeepSpeed left them:
partitioned parameters, and hooks that gather whole ones, collectively. While passes run each module
has a dictionary of its own for parameters, the same one in every pass, so that compiled layers find
slices at the places they know; DeepSpeed's hooks are out, the stage's own stand before the user's,
and attributes that a stage needs otherwise (`training`, forwards of linear layers, the attention
that the configuration names) are set. All else, hooks and values that the user sets at any time
included, is what the user's modules have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import nn
from transformers import PretrainedConfig

from ds_hydra.errors import UnsupportedModelError

_NOTHING = object()
"""Value of an attribute that is not there."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TORCH = {*vars(nn.Module())} - {"training"}
"""Attributes that stay the same objects."""

_SET_IN_PASSES = {
    *("training", "padding_idx"),
    *("gradient_checkpointing", "_gradient_checkpointing_func"),
    "_attn_implementation_internal",
}
"""Attributes that a pass may set, and the user as well between passes."""
_FREE = _SET_IN_PASSES - {"padding_idx"} | {"_require_grads_hook", "_require_grads_hooks"}
"""Attributes that a user may set at any time, and handles of `enable_input_require_grads`."""


class _Change(NamedTuple):
    """Value of an attribute of a module in passes, and at the start."""

    name: str
    """Place of the module."""
    holder: dict[str, Any]
    key: str
    in_passes: Any
    at_start: Any


class _Hooks:
    """Hooks of one kind of a module; in passes the stage's come first, then the user's.

    A model has thousands of such dictionaries, nearly all of them as they were: these are switched
    without a call for each.
    """

    __slots__ = (
        *("_attributes", "_kind", "_of_stage", "_in_passes", "_of_deepspeed"),
        *("_own", "_before"),
    )

    @staticmethod
    def enter_all(hooks: Sequence[_Hooks]) -> None:
        """Put the stage's hooks in the place of DeepSpeed's, of all of `hooks`."""
        for each in hooks:
            own = each._own = each._attributes[each._kind]
            # Equal to what was looked at before: no hook has to be asked again whose it is
            if own == each._of_deepspeed:
                each._attributes[each._kind] = each._in_passes
            else:
                each._enter_changed()

    @staticmethod
    def leave_all(hooks: Sequence[_Hooks]) -> None:
        """Put all of `hooks` back in their order."""
        for each in hooks:
            # A pass may have added hooks, or removed some: then they have to be told apart
            if each._before is None and each._in_passes == each._of_stage:
                each._attributes[each._kind] = each._own
            else:
                each._leave_changed()

    def __init__(self, module: nn.Module, kind: str):
        self._attributes, self._kind = vars(module), kind
        self._of_stage: dict[int, Any] = {}
        # Handles of hooks hold their dictionary weakly, which a plain one does not allow
        self._in_passes: dict[int, Any] = OrderedDict()
        """Dictionary that the module has in passes where no user has hooks."""
        self._of_deepspeed: dict[int, Any] = {}
        """Hooks that were looked at, all of DeepSpeed."""
        self._own: dict[int, Any] = self._attributes[kind]
        self._before: dict[int, Any] | None = None
        """Copy of the hooks between passes, where a user has some."""

    def _enter_changed(self) -> None:
        own = self._own
        if all(map(is_of_deepspeed, own.values())):
            self._of_deepspeed = {**own}
            self._attributes[self._kind] = self._in_passes
            return
        # The same dictionary, or a handle of the user could remove nothing inside of a pass
        self._before = dict(own)
        users = {key: hook for key, hook in own.items() if not is_of_deepspeed(hook)}
        _fill(own, self._of_stage, users)

    def take_new(self) -> None:
        """Take the hooks that were set since `enter` for the stage's."""
        now = self._attributes[self._kind]
        # Keys tell them apart: torch numbers the hooks of all modules in one sequence
        self._of_stage = {k: h for k, h in now.items() if k not in (self._before or {})}
        _fill(self._in_passes, self._of_stage)

    def _leave_changed(self) -> None:
        """A pass may have removed hooks and added others."""
        if self._before is not None:
            # DeepSpeed's were out, so they are missing without having been removed
            now = {k: h for k, h in self._own.items() if k not in self._of_stage}
            kept = {k: h for k, h in self._before.items() if k in now or is_of_deepspeed(h)}
            _fill(self._own, kept, now)
            self._before = None
            return
        self._attributes[self._kind] = self._own
        # What a user has set inside of a pass stays after it
        self._own.update((k, h) for k, h in self._in_passes.items() if k not in self._of_stage)
        _fill(self._in_passes, self._of_stage)


def _fill(hooks: dict[int, Any], *parts: dict[int, Any]) -> None:
    hooks.clear()
    for part in parts:
        hooks.update(part)


class InPlace:
    """Switches the modules of `model` between their own state and that of a stage.

    What is changed of them inside of the context belongs to the stage.
    """

    def __init__(self, model: nn.Module, meta_of: Mapping[int, nn.Parameter]):
        self._names = {m: name or type(model).__name__ for name, m in model.named_modules()}
        self.slices = [
            # Names without a parameter stay: a linear layer without bias reads `bias`, too
            (vars(m), {k: None if p is None else meta_of[id(p)] for k, p in m._parameters.items()})
            for m in self._names
            if m._parameters
        ]
        """Attributes of each module with parameters, and what it has in place of these in
        passes.
        """
        self._hooks = [_Hooks(module, kind) for module in self._names for kind in _HOOKS]
        self._classes: list[tuple[str, nn.Module, type, type]] = []
        """Modules whose class is another one in passes; that one, and the user's."""
        self._changes: list[_Change] = []
        self._own: list[Any] = []
        """Values of `_changes` between passes."""
        self._own_params: list[dict[str, Any]] = []
        self.is_entered = False

    def __enter__(self) -> Self:
        # Shallow copies: an attribute counts as changed where it is another object
        self._before = [(n, h, dict(h)) for n, h in self._holders()]
        self._before_classes = {module: type(module) for module in self._names}
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._classes = [
            (self._names[module], module, type(module), kind)
            for module, kind in self._before_classes.items()
            if type(module) is not kind
        ]
        for name, holder, before in self._before:
            for key in {**before, **holder}:
                old, new = before.get(key, _NOTHING), holder.get(key, _NOTHING)
                # Of `_SET_IN_PASSES` those as well that nothing has changed yet: a later pass will
                if key not in _OF_TORCH and (old is not new or key in _SET_IN_PASSES):
                    self._changes.append(_Change(name, holder, key, new, old))
        # `enter` came before the changes were known; `leave` below puts these back
        self._own = [change.at_start for change in self._changes]
        for hooks in self._hooks:
            hooks.take_new()
        self.leave()
        del self._before, self._before_classes

    def _holders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Dictionaries in which a stage may set values, with names of their modules."""
        configs: dict[int, Any] = {}
        for module, name in self._names.items():
            yield name, vars(module)
            # A stage may show placeholders here, and what `modules_to_save` has trained
            yield name, module._modules
            if isinstance(config := vars(module).get("config"), PretrainedConfig):
                # Many modules share one configuration: changed, and put back, once
                configs[id(config)] = config
        for config in configs.values():
            yield "config", vars(config)

    def enter(self) -> None:
        """Put the modules into the state of a stage; nothing where they are in it."""
        if self.is_entered:
            return
        self.is_entered = True
        self._own_params = [held["_parameters"] for held, _ in self.slices]
        for held, params in self.slices:
            held["_parameters"] = params
        # Read anew each time: the user may have set them since the last pass
        self._own = [holder.get(key, _NOTHING) for _, holder, key, _, _ in self._changes]
        for _, holder, key, value, _ in self._changes:
            _set(holder, key, value)
        for _, module, in_passes, _ in self._classes:
            # A class is no entry of a module's dictionary, in which changes are looked for
            module.__class__ = in_passes
        _Hooks.enter_all(self._hooks)

    def leave(self) -> None:
        """Put the modules back into their own state; nothing where they are in it."""
        if not self.is_entered:
            return
        # In the opposite order of `enter`
        _Hooks.leave_all(self._hooks)
        for _, module, _, own in self._classes:
            module.__class__ = own
        for change, value in zip(self._changes, self._own, strict=True):
            _set(change.holder, change.key, value)
        for (held, _), params in zip(self.slices, self._own_params, strict=True):
            held["_parameters"] = params
        self.is_entered = False

    def check(self) -> None:
        """Raise UnsupportedModelError where a user has replaced between passes what a stage runs in
        a form of its own.
        """
        later = [
            (f"{name}.__class__", type(module))
            for name, module, _, own in self._classes
            if type(module) is not own
        ]
        later += [
            (f"{change.name}.{change.key}", type(now))
            for change in self._changes
            if change.key not in _FREE
            and (now := change.holder.get(change.key, _NOTHING)) is not change.at_start
            # Bound methods are new objects each time, and equal
            and now != change.at_start
        ]
        for place, kind in later:
            raise UnsupportedModelError(
                f"{place} was set after the start, which training would not see ({kind.__name__}); set it before "
                "ds_hydra.initialize"
            )


def _set(holder: dict[str, Any], key: str, value: Any) -> None:
    """Set an attribute, past properties and checks of its class."""
    if value is _NOTHING:
        holder.pop(key, None)
    else:
        holder[key] = value


def is_of_deepspeed(hook: Callable[..., Any]) -> bool:
    """Whether `hook` is one of DeepSpeed's, which gather and release parameters."""
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")
