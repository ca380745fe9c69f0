"""Kernels for attention over packed micro-batches: which there are, and where each comes from.

Legend: as in `attention_contract`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.engine.model import attention_cudnn
from ds_hydra.engine.model.attention_contract import (
    Ends,
    Kernel,
    MissingKernelError,
    Named,
    Scoring,
    first_line,
)
from ds_hydra.engine.ranks.process import in_one_order

_FORWARD = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
    "causal|is_causal", "softcap", "window_size|window_size_left",
)  # fmt: skip
_BACKWARD = (*_FORWARD, "dout", "out", "softmax_lse|lse", "dq", "deterministic")
"""Parameters that functions of all generations have, by one of their names."""


def _takes_of_4(query_width: int, value_width: int, generation: int | None) -> bool:
    if generation in (None, 9):
        return max(query_width, value_width) <= 256
    widths = (query_width, value_width)
    return max(widths) <= 128 or widths in ((192, 128), (256, 256))


class _Flash(NamedTuple):
    """A generation of flash attention: where it comes from, and in what its functions differ."""

    module: str
    """Module of the package that has the functions."""
    distribution: str
    """Package that is installed for it."""
    repository: str
    """Repository of the hub that has both passes."""
    functions: tuple[str, str]
    properties: Mapping[str, Any]
    """Properties of the `Kernel`."""
    more: Mapping[str, Any] = {}
    """Arguments of forward beside those that all have."""
    unlimited: int | None = -1
    """Its word for no window."""
    fills_gradients: bool = True
    """Whether backward fills the gradients that it is given; else it returns new ones."""


_FLASH = {
    "flash_attention_2": _Flash(
        "flash_attn.flash_attn_interface",
        "flash-attn",
        "kernels-community/flash-attn2",
        ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
        {"copies_when_ordered": True},
    ),
    "flash_attention_3": _Flash(
        "flash_attn_interface",
        "flash-attn-3",
        "kernels-community/flash-attn3",
        ("_flash_attn_forward", "_flash_attn_backward"),
        {"generations": (8, 9), "most_ordered_width": 192},
        more={"num_splits": 1},
    ),
    "flash_attention_4": _Flash(
        "flash_attn.cute.interface",
        "flash-attn-4",
        "kernels-community/flash-attn4",
        ("_flash_attn_fwd", "_flash_attn_bwd"),
        # On 10.x it takes 192/128, and not 192/192: values must not be padded to queries.
        {"generations": (9, 10, 11, 12), "takes_widths": _takes_of_4, "pads_values": False},
        more={"return_lse": True},
        unlimited=None,
        fills_gradients=False,
    ),
}


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


def _flash(flash: _Flash, module: ModuleType, name: str, package: str) -> Kernel:
    """Kernel `name` by the functions of `module`, or of the submodule in which packages of the hub
    have them.
    """
    inner = (module, *(getattr(module, n, None) for n in ("flash_attn_interface", "interface")))
    found = (h for h in inner if all(hasattr(h, function) for function in flash.functions))
    if (holder := next(found, None)) is None:
        raise MissingKernelError(f"{module.__name__} has no {' and '.join(flash.functions)}")
    forward, backward = (getattr(holder, function) for function in flash.functions)
    run_forward, run_backward = Named(forward, *_FORWARD, *flash.more), Named(backward, *_BACKWARD)

    def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse, *_ = run_forward(**_given(*inputs, unlimited=flash.unlimited), **flash.more)
        return out, lse

    def differentiate(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        heads = query, key, value
        names = ("dq", "dk", "dv") if flash.fills_gradients else ()
        filled = dict(zip(names, map(torch.empty_like, heads)))
        returned = run_backward(
            **_given(*heads, *rest, unlimited=flash.unlimited),
            **filled,
            dout=grad,
            out=out,
            softmax_lse=lse,
            lse=lse,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dq, dk, dv = filled.values() if filled else returned[:3]
        return dq, dk, dv

    return Kernel(
        name=name, package=package, forward=attend, backward=differentiate, **flash.properties
    )


def _varlen() -> Kernel:
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
        # With a window, whose right end is 0, later keys are hidden already
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
        name="varlen",
        package=f"torch {torch.__version__}",
        forward=attend,
        backward=differentiate,
        takes_softcap=False,
        copies_when_ordered=True,
    )


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


def _of_hub(name: str) -> Kernel:
    """Kernel `name`, "owner/repository" with "@revision" where wanted; the `kernels` package
    downloads it unless it has.
    """
    if "/" not in name:
        raise MissingKernelError("it is not for packed micro-batches")
    repository, _, revision = name.partition("@")
    # Names end with the generation, whoever has built it
    last = repository.rstrip("/")[-1:]
    flash = next((f for f in _FLASH.values() if f.repository[-1] == last), None)
    if flash is None:
        raise MissingKernelError(f"{repository} is no flash-attn2, flash-attn3 or flash-attn4")
    try:
        from transformers.integrations import hub_kernels

        version = None if revision else hub_kernels.get_attn_kernel_version(repository)
        module = hub_kernels.get_kernel(repository, revision=revision or None, version=version)
    except Exception as error:  # of the network, the hub, the device, or there is no such package
        raise MissingKernelError(f"{name} cannot be loaded: {first_line(error)}") from error
    return _flash(flash, module, name, f"{name} of the Hugging Face hub")


def _has_downloaded(repository: str) -> bool:
    """Whether the `kernels` package has it, so that loading needs no network."""
    try:
        from kernels.hf_hub import CACHE_DIR
    except ImportError:
        return False
    from huggingface_hub import constants

    folder = Path(CACHE_DIR or os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE))
    return any(folder.glob(f"*--{repository.replace('/', '--')}"))


def _of_package(name: str) -> Kernel:
    """Flash attention of a generation: its package, else its download."""
    flash = _FLASH[name]
    try:
        module = import_module(flash.module, flash.distribution)
        package = f"{flash.distribution} {_version(flash.distribution, module)}"
        return _flash(flash, module, name, package)
    except MissingKernelError as missing:
        if not _has_downloaded(flash.repository):
            raise
        try:
            return _of_hub(flash.repository)
        except MissingKernelError as error:
            raise MissingKernelError(f"{missing}; {error}") from error


def _load(name: str) -> Kernel:
    if name == "varlen":
        return _varlen()
    if name == "cudnn":
        return attention_cudnn.build(_varlen())
    return _of_package(name) if name in _FLASH else _of_hub(name)


KERNELS = ("flash_attention_3", "flash_attention_4", "cudnn", "flash_attention_2", "varlen")
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
            _loaded[name] = _load(name)
        except MissingKernelError as error:
            # Remembered as well: each demand asks for all kernels
            _loaded[name] = str(error)
    found = _loaded[name]
    if isinstance(found, str):
        raise MissingKernelError(found)
    return found
