"""Kernels for attention over packed micro-batches, and the demands that each takes.

[Note: One contract]
A kernel is a pair of functions. Forward gives the output and, of each row, the logarithm of the sum
of exp(scores); backward takes both. Every kernel takes segments whose queries are the last of more
keys, windows, and fewer key-value heads than query heads. `Kernel` says in what else they differ.

The functions are those that the released packages build their own autograd functions from. They are
called by the names of their parameters, because releases differ in the order, and in what else they
require: flash-attn 2.7 to 2.8.3, flash-attn 3 of 2.8.3 and of August 2026, flash-attn-4 4.0.0b36,
torch 2.11 to 2.13, and what the Hugging Face hub builds of these.

Legend: T queries, N keys, H query heads, K key-value heads, D and E widths of queries and values.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.attention
from torch import Tensor

from ds_hydra.engine.ranks.process import in_one_order

HALVES = (torch.float16, torch.bfloat16)
_MULTIPLE = 8
"""Divisor of the head widths that kernels take."""
LONG_TOKENS = 4096
"""Tokens of a sequence from which cuDNN is known to be faster than flash attention 2. Both passes
of one of 4096 under 32 heads of 128 took 1.32 ms against 2.23, on an H200 with torch 2.11.
"""


class LongSegment(NamedTuple):
    """Segment `number`, queries `begin` to `end`, the last of keys `first` to `last`, with a call
    of its own (`attention_cudnn`, [Note: Long segments apart]).
    """

    number: int
    begin: int
    end: int
    first: int
    last: int

    @classmethod
    def of(cls, lengths: Sequence[int], key_lengths: Sequence[int]) -> list[LongSegment]:
        """All segments of a micro-batch, long ones or not."""
        ends, lasts = itertools.accumulate(lengths), itertools.accumulate(key_lengths)
        each = enumerate(zip(lengths, ends, key_lengths, lasts, strict=True))
        return [cls(n, end - own, end, last - keys, last) for n, (own, end, keys, last) in each]

    @property
    def num_pairs(self) -> float:
        """Number of pairs of a query and a key that it sees."""
        queries = self.end - self.begin
        return queries * (self.last - self.first - queries / 2)

    @property
    def is_long(self) -> bool:
        """Whether it has the work of a whole sequence of `LONG_TOKENS`, and a quarter of its
        queries, by which kernels fill a device.
        """
        is_wide = self.end - self.begin >= LONG_TOKENS / 4
        return is_wide and self.num_pairs >= LONG_TOKENS**2 / 2


class Ends(NamedTuple):
    """Begins of the segments among T queries and among N keys, [num_segments + 1] int32 on the
    device, and the longest of both in tokens.
    """

    queries: Tensor
    keys: Tensor
    longest: int
    longest_keys: int
    longest_of_rest: int = 0
    longest_keys_of_rest: int = 0
    """The longest in tokens of both, without long segments."""
    long: tuple[LongSegment, ...] = ()
    """Long segments, in their order."""
    has_pieces: bool = False
    """Whether some segment sees keys before its own, long or not."""


class Demand(NamedTuple):
    """Requirements of a layer's attention on a kernel."""

    query_width: int
    value_width: int
    dtype: torch.dtype
    is_capped: bool = False
    """Whether scores are capped by tanh."""

    def __str__(self) -> str:
        widths = dict.fromkeys((self.query_width, self.value_width))
        capped = ", capped" if self.is_capped else ""
        return f"heads of {'/'.join(map(str, widths))}{capped} in {str(self.dtype).removeprefix('torch.')}"


class Scoring(NamedTuple):
    """Treatment of the products of queries and keys."""

    scale: float
    window: int | None = None
    """Tokens that one sees, itself among them; None: all before it."""
    softcap: float | None = None
    """c of c tanh(score / c); None: not capped."""
    sinks_H: Tensor | None = None
    """Scores of one more column, without a value, in the softmax of each head. Kernels leave them
    to `attention_operator` ([Note: Sinks]).
    """


Forward = Callable[[Tensor, Tensor, Tensor, Ends, Scoring], tuple[Tensor, Tensor]]
"""(query [T, H, D], key [N, K, D], value [N, K, E], ends, scoring) to output [T, H, E] and
log-sum-exp [H, T] fp32.
"""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(gradient of the output, query, key, value, output, log-sum-exp, ends, scoring) to gradients of
query, key and value.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel and the demands that it takes ([Note: One contract])."""

    name: str
    """Name of the kernel, as a value of `hydra.attention`."""
    package: str
    """Package that has the kernel, with its version."""
    forward: Forward
    backward: Backward
    generations: tuple[int, ...] | None = None
    """Major compute capabilities of NVIDIA devices that run it; None: it says itself."""
    takes_softcap: bool = True
    dtypes: tuple[torch.dtype, ...] = HALVES
    takes_widths: Callable[[int, int, int | None], bool] = lambda *_: True
    """Whether a device of a major compute capability takes widths of queries and values."""
    pads_values: bool = True
    """Whether values have to be as wide as queries."""
    most_ordered_width: int = 256
    """Largest width for backward in one order (`hydra.deterministic`); 0: never."""
    copies_when_ordered: bool = False
    """Whether it then keeps a copy of the gradient of queries, in fp32, for each group of
    multiprocessors: ceil(multiprocessors / heads) of them. Others take turns instead.
    """
    implementation: str | None = None
    """Name of the implementation that torch has to activate for the kernel."""
    runs_long_apart: bool = False
    """Whether long segments have calls of their own, which a trial needs some for."""
    prepare: Callable[[bool], None] = lambda _: None
    """Called between iterations, for what must not be done while a device waits for others: all
    that was met since (True), or what is worth its time.
    """

    def padded_widths(self, query_width: int, value_width: int) -> tuple[int, int]:
        """Widths of queries (keys) and of values once padded with zeros, which add nothing."""
        query, value = (width + -width % _MULTIPLE for width in (query_width, value_width))
        return (max(query, value),) * 2 if self.pads_values else (query, value)

    def refusal(
        self, demand: Demand, generation: int | None = None, *, is_ordered: bool = False
    ) -> str:
        """Reason that the kernel does not run `demand` on a device of major compute capability
        `generation` (None: not known). "" where it does.
        """
        if self.generations and generation is not None and generation not in self.generations:
            known = " and ".join(f"{major}.x" for major in self.generations)
            return f"it runs on compute capability {known}, the device has {generation}.x"
        if demand.dtype not in self.dtypes:
            return f"it computes in 16 bit, not in {str(demand.dtype).removeprefix('torch.')}"
        widths = self.padded_widths(demand.query_width, demand.value_width)
        if not self.takes_widths(*widths, generation):
            return f"it does not take heads of {demand.query_width} with values of {demand.value_width}"
        if demand.is_capped and not self.takes_softcap:
            return "it cannot cap scores"
        if is_ordered and not self.most_ordered_width:
            return "its backward promises no order of sums (hydra.deterministic)"
        if is_ordered and max(widths) > self.most_ordered_width:
            return (
                f"its backward adds in one order (hydra.deterministic) up to a width of "
                f"{self.most_ordered_width}, heads have {max(widths)}"
            )
        return ""


class MissingKernelError(Exception):
    """A kernel that is not here; the message names the missing package."""


class _Named:
    """A function of a package, called by names: it gets those that it has, and None for others that
    it requires.
    """

    def __init__(self, function: Any, *needed: str):
        # torch.library.custom_op hides what it wraps
        schema = getattr(getattr(function, "_opoverload", function), "_schema", None)
        named: set[str] = set()
        if schema is None:
            parameters = inspect.signature(function).parameters.values()
            empty = inspect.Parameter.empty
            known = [(p.name, None if p.default is empty else p.default) for p in parameters]
        else:
            known = [(a.name, a.default_value) for a in schema.arguments]
            named = {a.name for a in schema.arguments if a.kwarg_only}
        self._function, self._named = function, {n: d for n, d in known if n in named}
        in_order = [(name, default) for name, default in known if name not in named]
        self._names = [name for name, _ in in_order]
        self._defaults = [default for _, default in in_order]
        names = {name for name, _ in known}
        for either in needed:
            if names.isdisjoint(either.split("|")):
                raise MissingKernelError(
                    f"its {getattr(function, '__name__', function)} knows no {either.split('|')[0]}"
                )

    def __call__(self, **given: Any) -> Any:
        named = {name: given.get(name, default) for name, default in self._named.items()}
        return self._function(*map(given.get, self._names, self._defaults), **named)


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
    forward: _Named,
    backward: _Named,
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


def _named_2_and_3(forward: Any, backward: Any) -> tuple[_Named, _Named]:
    """Functions of flash-attn 2 or 3."""
    both = (*_OF_ALL, "window_size|window_size_left")
    of_backward = ("dout", "out", "softmax_lse", "dq", "deterministic")
    return _Named(forward, *both), _Named(backward, *both, *of_backward)


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
        _Named(functions[0], *_OF_ALL, "window_size_left", "return_lse"),
        _Named(functions[1], *_OF_ALL, "window_size_left", "deterministic", "dout", "lse"),
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


def _varlen(name: str, implementation: str | None = None) -> Kernel:
    """torch's own kernel, flash attention 2, or the implementation activated in its place."""
    forward, backward = (
        getattr(torch.ops.aten, f"_flash_attention_{way}", None) for way in ("forward", "backward")
    )
    known = () if forward is None else [a.name for a in forward.default._schema.arguments]
    if "window_size_left" not in known:
        raise MissingKernelError(
            f"torch {torch.__version__} has no kernel for packed micro-batches"
        )
    if implementation is not None:
        import_module(*_PACKAGES[_OF_TORCH[implementation]])
        known = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
        if implementation not in known:
            raise MissingKernelError(f"torch {torch.__version__} cannot activate {implementation}")

    def options(scoring: Scoring) -> dict[str, Any]:
        left = scoring.window - 1 if scoring.window else -1
        return {"scale": scoring.scale, "window_size_left": left, "window_size_right": 0}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, ends: Ends, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        # torch has one for the process, and other heads of the model may run by another.
        activate(implementation)
        is_causal = scoring.window is None
        out, lse, *_ = forward(
            query, key, value, *ends[:4], 0.0, is_causal, False, **options(scoring)
        )
        return out, lse

    def differentiate(grad: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        *heads_and_sums, ends, scoring = saved
        activate(implementation)
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
        generations={"FA3": (9,), "FA4": (9, 10)}.get(implementation or ""),
        takes_softcap=False,
        takes_widths=_of_flash_4 if implementation == "FA4" else _up_to_256,
        pads_values=implementation != "FA4",
        most_ordered_width=192 if implementation == "FA3" else 256,
        # Later generations take turns in place of copies.
        copies_when_ordered=implementation is None,
        implementation=implementation,
    )


def _cudnn(name: str) -> Kernel:
    from ds_hydra.engine.model import attention_cudnn  # which is made of what is here

    return attention_cudnn.build(name, _varlen(name))


_activated: list[str | None] = [None]
"""Name of the implementation that this module has activated in torch, if any."""


def activate(implementation: str | None) -> None:
    """Activate torch's flash attention of `implementation`; None: its own, or that of the user's
    script.
    """
    # What a user's script has activated stays: nothing is restored that was not set here.
    if _activated[0] == implementation:
        return
    if implementation is None:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        torch.nn.attention.activate_flash_attention_impl(implementation)
    _activated[0] = implementation


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
_OF_TORCH = {"FA3": "flash_attention_3", "FA4": "flash_attention_4"}
"""Keys of `_PACKAGES` by the names that torch has for implementations."""
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


def first_line(error: BaseException) -> str:
    """First line of an error's text, cut for use in a sentence."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:300]


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
    "varlen_fa3": functools.partial(_varlen, "varlen_fa3", "FA3"),
    "varlen_fa4": functools.partial(_varlen, "varlen_fa4", "FA4"),
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


def load_kernel(name: str) -> Kernel:
    """Kernel `name` of `KERNELS`, or "owner/repository" of the hub. Raises MissingKernelError."""
    if name not in _loaded:
        try:
            load = _LOADERS.get(name) or functools.partial(_of_hub, name)
            _loaded[name] = load()
        except MissingKernelError as error:
            _loaded[name] = str(error)
    found = _loaded[name]
    if isinstance(found, str):
        raise MissingKernelError(found)
    return found
