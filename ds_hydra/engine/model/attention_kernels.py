"""Kernels for attention over packed micro-batches: which there are, and where each comes from.

Legend: as in `attention_contract`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_hydra.engine.model import attention_cudnn
from ds_hydra.engine.model.attention_contract import (
    Backward,
    Ends,
    Forward,
    Kernel,
    MissingKernelError,
    Named,
    Scoring,
    first_line,
)
from ds_hydra.engine.ranks.process import in_one_order

_OF_ALL = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
    "causal|is_causal", "softcap",
)  # fmt: skip


def _given(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Ends,
    scoring: Scoring,
    unlimited: int | None,
) -> dict[str, Any]:
    """Arguments that all releases have, under all of their names."""
    left, right = (scoring.window - 1, 0) if scoring.window else (unlimited, unlimited)
    return {
        "q": query, "k": key, "v": value, "softmax_scale": scoring.scale, "softcap": scoring.softcap or 0.0,
        "cu_seqlens_q": ends.queries, "cu_seqlens_k": ends.keys,
        "max_seqlen_q": ends.longest, "max_seqlen_k": ends.longest_keys,
        "causal": True, "is_causal": True, "dropout_p": 0.0,
        "window_size": (left, right), "window_size_left": left, "window_size_right": right,
    }  # fmt: skip


def _adapt(
    forward: Named,
    backward: Named,
    *,
    fills_gradients: bool = True,
    unlimited: int | None = -1,
    **more: Any,
) -> tuple[Forward, Backward]:
    """`forward`, which gets `more`, and `backward` of flash-attn, which fills the gradients that it
    is given, or returns new ones; `unlimited` is their word for no window.
    """

    def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse, *_ = forward(**_given(*inputs, unlimited=unlimited), **more)
        return out, lse

    def differentiate(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        heads = query, key, value
        names = ("dq", "dk", "dv") if fills_gradients else ()
        filled = dict(zip(names, map(torch.empty_like, heads)))
        returned = backward(
            **_given(*heads, *rest, unlimited=unlimited),
            **filled,
            dout=grad,
            out=out,
            softmax_lse=lse,
            lse=lse,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dq, dk, dv = filled.values() if filled else returned[:3]
        return dq, dk, dv

    return attend, differentiate


def _up_to_256(query_width: int, value_width: int, _generation: int | None) -> bool:
    return max(query_width, value_width) <= 256


def _of_flash_4(query_width: int, value_width: int, generation: int | None) -> bool:
    if generation in (None, 9):
        return max(query_width, value_width) <= 256
    widths = (query_width, value_width)
    return max(widths) <= 128 or widths in ((192, 128), (256, 256))


def _named_2_and_3(forward: Any, backward: Any) -> tuple[Named, Named]:
    """Functions of flash-attn 2 or 3."""
    both = (*_OF_ALL, "window_size|window_size_left")
    of_backward = ("dout", "out", "softmax_lse", "dq", "deterministic")
    return Named(forward, *both), Named(backward, *both, *of_backward)


def _flash_2(module: ModuleType, name: str, package: str) -> Kernel:
    functions = _functions(module, "_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
    forward, backward = _adapt(*_named_2_and_3(*functions))
    return Kernel(
        name=name,
        package=package,
        forward=forward,
        backward=backward,
        takes_widths=_up_to_256,
        copies_when_ordered=True,
    )


def _flash_3(module: ModuleType, name: str, package: str) -> Kernel:
    functions = _functions(module, "_flash_attn_forward", "_flash_attn_backward")
    forward, backward = _adapt(*_named_2_and_3(*functions), num_splits=1)
    return Kernel(
        name=name,
        package=package,
        forward=forward,
        backward=backward,
        generations=(8, 9),
        takes_widths=_up_to_256,
        most_ordered_width=192,
    )


def _flash_4(module: ModuleType, name: str, package: str) -> Kernel:
    functions = _functions(module, "_flash_attn_fwd", "_flash_attn_bwd")
    forward, backward = _adapt(
        Named(functions[0], *_OF_ALL, "window_size_left", "return_lse"),
        Named(functions[1], *_OF_ALL, "window_size_left", "deterministic", "dout", "lse"),
        fills_gradients=False,
        unlimited=None,
        return_lse=True,
    )
    return Kernel(
        name=name,
        package=package,
        forward=forward,
        backward=backward,
        generations=(9, 10, 11, 12),
        takes_widths=_of_flash_4,
        # On 10.x it takes 192/128, and not 192/192: values must not be padded to queries.
        pads_values=False,
    )


def _varlen(name: str) -> Kernel:
    """torch's own, flash attention 2, or what the user's script has activated in its place."""
    forward, backward = (
        getattr(torch.ops.aten, f"_flash_attention_{way}", None) for way in ("forward", "backward")
    )
    known = () if forward is None else [a.name for a in forward.default._schema.arguments]
    if "window_size_left" not in known:
        raise MissingKernelError(
            f"torch {torch.__version__} has no kernel for packed micro-batches"
        )

    def options(scoring: Scoring) -> dict[str, Any]:
        left = scoring.window - 1 if scoring.window else -1
        return {"scale": scoring.scale, "window_size_left": left, "window_size_right": 0}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, ends: Ends, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        is_causal = scoring.window is None
        out, lse, *_ = forward(
            query, key, value, *ends[:4], 0.0, is_causal, False, **options(scoring)
        )
        return out, lse

    def differentiate(grad: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        *heads_and_sums, ends, scoring = saved
        # Of dropout, which is 0
        state = torch.empty(2, dtype=torch.uint64, device=grad.device), grad.new_empty(0)
        # Around this call alone: other operations of a model would be errors inside.
        with in_one_order():
            grads: tuple[Tensor, Tensor, Tensor] = backward(
                grad if grad.stride(-1) == 1 else grad.contiguous(),
                *heads_and_sums, *ends[:4], 0.0, scoring.window is None, *state, **options(scoring),
            )  # fmt: skip
        return grads

    return Kernel(
        name=name,
        package=f"torch {torch.__version__}",
        forward=attend,
        backward=differentiate,
        takes_softcap=False,
        takes_widths=_up_to_256,
        copies_when_ordered=True,
    )


def _cudnn(name: str) -> Kernel:
    return attention_cudnn.build(name, _varlen(name))


def _functions(module: ModuleType, *names: str) -> list[Any]:
    """Functions `names` of `module`, or of the submodule in which packages of the hub have them."""
    inner = (module, *(getattr(module, n, None) for n in ("flash_attn_interface", "interface")))
    for holder in inner:
        if all(hasattr(holder, name) for name in names):
            return [getattr(holder, name) for name in names]
    raise MissingKernelError(f"{module.__name__} has no {names[0]} and {names[1]}")


def import_module(module: str, distribution: str) -> ModuleType:
    """`module` of a package. Raises MissingKernelError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", module.split(".")[0]):
            raise MissingKernelError(f"{distribution} is not installed") from error
        # The package is here, and lacks something that it imports itself.
        raise MissingKernelError(f"{distribution} cannot be imported: {error}") from error
    except (OSError, RuntimeError, AttributeError) as error:  # of another CUDA or torch
        raise MissingKernelError(f"{distribution} cannot be imported: {error}") from error


def _version(distribution: str, module: ModuleType) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # built from a checkout
        return str(getattr(module, "__version__", "of unknown version"))


_PACKAGES = {
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn.cute.interface", "flash-attn-4"),
    "flash_attention_2": ("flash_attn.flash_attn_interface", "flash-attn"),
}
"""Modules that have the functions, and the packages that are installed for them."""
_BUILDERS = {"2": _flash_2, "3": _flash_3, "4": _flash_4}
_HUB = {
    "flash_attention_3": "kernels-community/flash-attn3",
    "flash_attention_4": "kernels-community/flash-attn4",
    "flash_attention_2": "kernels-community/flash-attn2",
}
"""Repositories of the hub that have kernels with both passes."""


def _of_hub(name: str) -> Kernel:
    """Kernel `name`, "owner/repository" with "@revision" where wanted; the `kernels` package
    downloads it unless it has.
    """
    if "/" not in name:
        raise MissingKernelError("it is not for packed micro-batches")
    repository, _, revision = name.partition("@")
    build = next((b for n, b in _BUILDERS.items() if repository.rstrip("/").endswith(n)), None)
    if build is None:
        raise MissingKernelError(f"{repository} is no flash-attn2, flash-attn3 or flash-attn4")
    try:
        from transformers.integrations import hub_kernels

        version = None if revision else hub_kernels.get_attn_kernel_version(repository)
        module = hub_kernels.get_kernel(repository, revision=revision or None, version=version)
    except Exception as error:  # of the network, the hub, the device, or there is no such package
        raise MissingKernelError(f"{name} cannot be loaded: {first_line(error)}") from error
    return build(module, name, f"{name} of the Hugging Face hub")


def _has_downloaded(repository: str) -> bool:
    """Whether the `kernels` package has it, so that loading needs no network."""
    try:
        from kernels.hf_hub import CACHE_DIR
    except ImportError:
        return False
    from huggingface_hub import constants

    folder = Path(CACHE_DIR or os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE))
    return any(folder.glob(f"*--{repository.replace('/', '--')}"))


def _flash(name: str) -> Kernel:
    """Flash attention of a generation: its package, else its download."""
    path, distribution = _PACKAGES[name]
    try:
        module = import_module(path, distribution)
        package = f"{distribution} {_version(distribution, module)}"
        return _BUILDERS[name[-1]](module, name, package)
    except MissingKernelError as missing:
        if not _has_downloaded(_HUB[name]):
            raise
        try:
            return _of_hub(_HUB[name])
        except MissingKernelError as error:
            raise MissingKernelError(f"{missing}; {error}") from error


_LOADERS: dict[str, Callable[[], Kernel]] = {
    "flash_attention_3": functools.partial(_flash, "flash_attention_3"),
    "flash_attention_4": functools.partial(_flash, "flash_attention_4"),
    "cudnn": functools.partial(_cudnn, "cudnn"),
    "flash_attention_2": functools.partial(_flash, "flash_attention_2"),
    "varlen": functools.partial(_varlen, "varlen"),
}
KERNELS = tuple(_LOADERS)
"""The fastest first, as far as is known; each runs where its generation of devices is."""
PER_SEQUENCE = "per_sequence"
"""Name for no kernel: one call of torch's attention for each sequence."""

_loaded: dict[str, Kernel | str] = {}
"""Kernels by name, or why one is missing."""


def load_kernel(name: str, *, anew: bool = False) -> Kernel:
    """Kernel `name` of `KERNELS`, or "owner/repository" of the hub; `anew` where it shall know
    nothing of its calls so far. Raises MissingKernelError.
    """
    if anew or name not in _loaded:
        try:
            load = _LOADERS.get(name) or functools.partial(_of_hub, name)
            _loaded[name] = load()
        except MissingKernelError as error:
            _loaded[name] = str(error)
    found = _loaded[name]
    if isinstance(found, str):
        raise MissingKernelError(found)
    return found
