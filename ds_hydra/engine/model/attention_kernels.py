"""Kernels for attention over packed micro-batches: which there are, and what each takes.

[Note: One contract]
A kernel is a pair of functions. Forward gives the output and, of each row, the logarithm of the sum
of exp(scores); backward takes both. Every kernel takes segments whose queries are the last of more
keys, windows, and fewer key-value heads than query heads. `Kernel` says in what else they differ.

The functions are those that the released packages build their own autograd functions from. They are
called by the names of their parameters, because releases differ in the order, and in what else they
require: flash-attn 2.7 to 2.8.3, flash-attn 3 of 2.8.3 and of August 2026, flash-attn-4 4.0.0b36,
torch 2.11 to 2.13, and what the Hugging Face hub builds of these.

[Note: Long sequences apart]
cuDNN runs one long sequence in about half the time of flash attention 2, and builds a plan for each
new shape, which takes tens of milliseconds. So the kernel "cudnn" gives it whole sequences from
`LONG_TOKENS` on, one call each, and the rest of a micro-batch to torch's varlen, in one call. Rows
of zeros pad a long sequence to one of 16 lengths per power of two. They are its last ones, so no
other row sees them; their output is cut off, and their gradient is zero. Backward gets 0 as their
log-sum-exp: their scores are 0, too, so what it computes of them is finite, times zero.

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
from torch import Tensor, nn

from ds_hydra.engine.ranks.process import in_one_order

HALVES = (torch.float16, torch.bfloat16)
_MULTIPLE = 8
"""Of which every kernel wants widths to be one."""
LONG_TOKENS = 4096
"""From which cuDNN is known to be faster than flash attention 2: both passes of one sequence of as
many under 32 heads of 128 took 1.32 ms against 2.23, on an H200 with torch 2.11.
"""
_GRID_TOKENS, _GRID_STEPS = 128, 16
"""Long sequences are padded to multiples of the first, and to as many lengths per power of two."""


class LongSequence(NamedTuple):
    """Segment `number`, tokens `begin` to `end`, which sees no other keys ([Note: Long sequences
    apart]).
    """

    number: int
    begin: int
    end: int


class Ends(NamedTuple):
    """Where segments begin among T queries and among N keys, [num_segments + 1] int32 on the
    device, and the longest of both in tokens.
    """

    queries: Tensor
    keys: Tensor
    longest: int
    longest_keys: int
    longest_of_rest: int = 0
    """Without those that are long."""
    long: tuple[LongSequence, ...] = ()
    """In their order."""


class Demand(NamedTuple):
    """What a layer's attention asks of a kernel."""

    query_width: int
    value_width: int
    dtype: torch.dtype
    is_capped: bool = False
    """Whether scores are capped by tanh."""

    def __str__(self) -> str:
        widths = dict.fromkeys((self.query_width, self.value_width))
        capped = ", capped" if self.is_capped else ""
        return f"heads of {'/'.join(map(str, widths))}{capped} in {str(self.dtype).removeprefix('torch.')}"


Forward = Callable[[Tensor, Tensor, Tensor, Ends, float, int | None, float], tuple[Tensor, Tensor]]
"""(query [T, H, D], key [N, K, D], value [N, K, E], ends, scale, window, softcap; 0: none) to
output [T, H, E] and log-sum-exp [H, T] fp32.
"""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(gradient of the output, query, key, value, output, log-sum-exp, ends, scale, window, softcap) to
gradients of query, key and value.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel and what it takes ([Note: One contract])."""

    name: str
    """As `hydra.attention` has it."""
    package: str
    """What it comes from, with the version."""
    forward: Forward
    backward: Backward
    generations: tuple[int, ...] | None = None
    """Major compute capabilities of NVIDIA devices that run it; None: it says itself."""
    takes_softcap: bool = True
    dtypes: tuple[torch.dtype, ...] = HALVES
    takes_widths: Callable[[int, int, int | None], bool] = lambda *_: True
    """Of queries and values, multiples of 8, on a device of a major compute capability."""
    pads_values: bool = True
    """Whether values have to be as wide as queries."""
    most_ordered_width: int = 256
    """Up to which its backward can add in one order (`hydra.deterministic`); 0: it never does."""
    copies_when_ordered: bool = False
    """Whether it then keeps a copy of the gradient of queries, in fp32, for each group of
    multiprocessors: ceil(multiprocessors / heads) of them. Others take turns instead.
    """
    implementation: str | None = None
    """That torch has to have activated for it."""
    runs_long_apart: bool = False
    """Whether long sequences have calls of their own, which a trial needs one for."""

    def padded_widths(self, query_width: int, value_width: int) -> tuple[int, int]:
        """What queries (and keys) and values are padded to with zeros, which add nothing."""
        query, value = (width + -width % _MULTIPLE for width in (query_width, value_width))
        return (max(query, value),) * 2 if self.pads_values else (query, value)

    def refusal(
        self, demand: Demand, generation: int | None = None, *, is_ordered: bool = False
    ) -> str:
        """Why it does not do what is asked for on a device of major compute capability
        `generation` (None: not known); "" where it does.
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
    """A kernel that is not here; the message says what is missing."""


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
    scale: float,
    window: int | None,
    softcap: float,
    unlimited: int | None = -1,
) -> dict[str, Any]:
    """Arguments that all releases have, under all of their names."""
    left, right = (window - 1, 0) if window else (unlimited, unlimited)
    return {
        "q": query, "k": key, "v": value, "softmax_scale": scale, "softcap": softcap,
        "cu_seqlens_q": ends.queries, "cu_seqlens_k": ends.keys,
        "max_seqlen_q": ends.longest, "max_seqlen_k": ends.longest_keys,
        "causal": True, "is_causal": True, "dropout_p": 0.0,
        "window_size": (left, right), "window_size_left": left, "window_size_right": right,
    }  # fmt: skip


def _adapt(forward: Any, backward: Any, **more: Any) -> tuple[Forward, Backward]:
    """`forward` and `backward` of flash-attn 2 or 3, of which backward fills the gradients that it
    is given.
    """
    windows = "window_size|window_size_left"
    run_forward = _Named(forward, *_OF_ALL, windows)
    run_backward = _Named(
        backward, *_OF_ALL, windows, "dout", "out", "softmax_lse", "dq", "deterministic"
    )

    def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse, *_ = run_forward(**_given(*inputs), **more)
        return out, lse

    def differentiate(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        run_backward(
            **_given(query, key, value, *rest),
            dout=grad,
            out=out,
            softmax_lse=lse,
            **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads

    return attend, differentiate


def _up_to_256(query_width: int, value_width: int, _generation: int | None) -> bool:
    return max(query_width, value_width) <= 256


def _of_flash_4(query_width: int, value_width: int, generation: int | None) -> bool:
    if generation in (None, 9):
        return max(query_width, value_width) <= 256
    widths = (query_width, value_width)
    return max(widths) <= 128 or widths in ((192, 128), (256, 256))


def _flash_2(module: ModuleType, name: str, package: str) -> Kernel:
    names = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
    forward, backward = _adapt(*_functions(module, *names))
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
    forward, backward = _adapt(*functions, num_splits=1)
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
    forward, backward = _functions(module, "_flash_attn_fwd", "_flash_attn_bwd")
    run_forward = _Named(forward, *_OF_ALL, "window_size_left", "return_lse")
    run_backward = _Named(backward, *_OF_ALL, "window_size_left", "deterministic", "dout", "lse")

    def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse, *_ = run_forward(**_given(*inputs, unlimited=None), return_lse=True)
        return out, lse

    def differentiate(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = run_backward(
            **_given(query, key, value, *rest, unlimited=None),
            dout=grad,
            out=out,
            lse=lse,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads[:3]

    return Kernel(
        name=name,
        package=package,
        forward=attend,
        backward=differentiate,
        generations=(9, 10, 11, 12),
        takes_widths=_of_flash_4,
        pads_values=False,
    )


def _varlen(name: str, implementation: str | None = None) -> Kernel:
    """torch's own, flash attention 2 for all generations, or what it has activated in its place."""
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

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Ends,
        scale: float,
        window: int | None,
        _: float,
    ) -> tuple[Tensor, Tensor]:
        activate(implementation)
        out, lse, *_rest = forward(
            query, key, value, *ends[:4], 0.0, window is None, False, scale=scale, **_window(window)
        )
        return out, lse

    def differentiate(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        ends: Ends,
        scale: float,
        window: int | None,
        _: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        activate(implementation)
        state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which is 0
        with in_one_order():
            grads: tuple[Tensor, Tensor, Tensor] = backward(
                grad if grad.stride(-1) == 1 else grad.contiguous(),
                query, key, value, out, lse, *ends[:4], 0.0, window is None, state, query.new_empty(0),
                scale=scale, **_window(window),
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
        copies_when_ordered=implementation is None,
        implementation=implementation,
    )


def _window(window: int | None) -> dict[str, int]:
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0}


def _cudnn(name: str) -> Kernel:
    """[Note: Long sequences apart]."""
    version = f"torch {torch.__version__}"
    if why := _why_no_cudnn():
        raise MissingKernelError(f"{version} {why}")
    operators = [
        getattr(torch.ops.aten, f"_scaled_dot_product_cudnn_attention{way}", None)
        for way in ("", "_backward")
    ]
    if None in operators:
        raise MissingKernelError(f"{version} has no operator for cuDNN's attention")
    rest = _varlen(name)
    inputs = ("query", "key", "value", "is_causal", "scale")
    run_forward = _Named(operators[0].default, *inputs, "compute_log_sumexp")
    run_backward = _Named(operators[1].default, *inputs, "grad_out", "out", "logsumexp")
    lse_dims = [3]  # as the forward pass of this release has it

    def attend_long(heads: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        num_tokens = len(heads[0])
        query, key, value = (_on_grid(t) for t in heads)
        out, lse, *_ = run_forward(
            query=query, key=key, value=value, compute_log_sumexp=True, is_causal=True, scale=scale
        )
        lse_dims[0] = lse.dim()
        return _off_grid(out, num_tokens), lse.reshape(out.shape[1:3])[:, :num_tokens]

    def differentiate_long(tensors: Sequence[Tensor], lse_HT: Tensor, scale: float) -> list[Tensor]:
        num_tokens = lse_HT.shape[1]
        grad, query, key, value, out = (_on_grid(t) for t in tensors)
        missing = query.shape[2] - num_tokens
        lse = nn.functional.pad(lse_HT, (0, missing)).contiguous().unsqueeze(0)
        state = torch.empty((), dtype=torch.int64, device=query.device)  # of dropout, which is 0
        grads = run_backward(
            grad_out=grad, query=query, key=key, value=value, out=out,
            logsumexp=lse if lse_dims[0] == 3 else lse.unsqueeze(-1),
            philox_seed=state, philox_offset=state, max_q=query.shape[2], max_k=key.shape[2],
            dropout_p=0.0, is_causal=True, scale=scale,
        )  # fmt: skip
        return [_off_grid(t, num_tokens) for t in grads]

    def is_for_rest(ends: Ends, window: int | None) -> bool:
        return not ends.long or bool(window) or torch.are_deterministic_algorithms_enabled()

    def attend(
        query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float, window: int | None, _: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        heads = query, key, value
        if is_for_rest(ends, window):
            return rest.forward(*heads, ends, scale, window, 0.0)
        rows = [(begin, end) for _, begin, end in ends.long]
        apart = [attend_long([t[a:b] for t in heads], scale) for a, b in rows]
        outs, lses = ([found[i] for found in apart] for i in (0, 1))
        out, lse = outs[0][:0], lses[0][:, :0]
        if ends.longest_of_rest:
            query, key, value = (_without(t, rows) for t in heads)
            out, lse = rest.forward(query, key, value, _ends_of_rest(ends), scale, None, 0.0)
        return _put_back(out, outs, rows), _put_back(lse, lses, rows, dim=1)

    def differentiate(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        ends: Ends,
        scale: float,
        window: int | None,
        _: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = grad, query, key, value, out
        if is_for_rest(ends, window):
            return rest.backward(*tensors, lse, ends, scale, window, 0.0)
        rows = [(begin, end) for _, begin, end in ends.long]
        apart = [differentiate_long([t[a:b] for t in tensors], lse[:, a:b], scale) for a, b in rows]
        found: Sequence[Tensor] = [t[:0] for t in apart[0]]
        if ends.longest_of_rest:
            others = [_without(t, rows) for t in tensors]
            lse = _without(lse.t(), rows).t().contiguous()
            found = rest.backward(*others, lse, _ends_of_rest(ends), scale, None, 0.0)
        dq, dk, dv = (
            _put_back(t, [grads[i] for grads in apart], rows) for i, t in enumerate(found)
        )
        return dq, dk, dv

    return Kernel(
        name=name,
        package=f"{version}, cuDNN {torch.backends.cudnn.version()}",
        forward=attend,
        backward=differentiate,
        # On 10.x nobody measured it, and its backward was reported to be off by 7% where scores are
        # very negative (github.com/NVIDIA/cudnn-frontend/issues/744), which no trial here has.
        generations=(9,),
        takes_softcap=False,
        takes_widths=lambda query, value, _: max(query, value) <= 128,
        most_ordered_width=0,
        runs_long_apart=True,
    )


def _why_no_cudnn() -> str:
    """Why this torch cannot call cuDNN's attention; "" where it can."""
    if not torch.backends.cuda.is_built() or torch.version.hip:
        return "is not built for CUDA"
    if not torch.backends.cudnn.is_available():
        return "has no cuDNN"
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "was told by torch.backends.cuda.enable_cudnn_sdp not to use it"
    return ""


def _on_grid(heads_THD: Tensor) -> Tensor:
    """[1, H, S, D] of a long sequence, padded with zeros to S tokens, and dense as [S, H, D]: plans
    are found by sizes and strides.
    """
    power = 1 << (len(heads_THD).bit_length() - 1)
    step = max(_GRID_TOKENS, power // _GRID_STEPS)
    if missing := -len(heads_THD) % step:
        heads_THD = nn.functional.pad(heads_THD, (0, 0, 0, 0, 0, missing))
    tokens, heads, width = heads_THD.shape
    # A single head may have any stride where torch counts as contiguous.
    sizes, strides = (1, heads, tokens, width), (heads_THD.numel(), width, heads * width, 1)
    return heads_THD.contiguous().as_strided(sizes, strides)


def _off_grid(heads_BHSD: Tensor, num_tokens: int) -> Tensor:
    """[T, H, D] of the first tokens."""
    return heads_BHSD[0].transpose(0, 1)[:num_tokens]


def _without(tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Rows outside of `ranges`, one after another."""
    edges = [0, *itertools.chain.from_iterable(ranges), len(tensor)]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return _join([tensor[a:b] for a, b in pairs if b > a])


def _put_back(
    rest: Tensor, apart: Sequence[Tensor], ranges: Sequence[tuple[int, int]], dim: int = 0
) -> Tensor:
    """What `_without` left out of dimension `dim`, `apart`, back in its place among `rest`."""
    edges = [0, *itertools.chain.from_iterable(ranges)]
    gaps = [b - a for a, b in zip(edges[::2], edges[1::2])]
    others = rest.split([*gaps, rest.shape[dim] - sum(gaps)], dim)
    parts = itertools.chain.from_iterable(itertools.zip_longest(others, apart))
    return _join([part for part in parts if part is not None and part.shape[dim]], dim)


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _ends_of_rest(ends: Ends) -> Ends:
    """Those of a micro-batch without its long sequences."""
    segments = [(number, number + 1) for number, _, _ in ends.long]
    lengths = _without(ends.queries.diff(), segments)
    found = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return Ends(found, found, ends.longest_of_rest, ends.longest_of_rest)


_activated: list[str | None] = [None]
"""What this module has torch's attention run with, if anything."""


def activate(implementation: str | None) -> None:
    """Let torch's flash attention be `implementation`; None: its own, or what the user's script has
    activated.
    """
    if _activated[0] == implementation:
        return
    if implementation is None:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        torch.nn.attention.activate_flash_attention_impl(implementation)
    _activated[0] = implementation


def _functions(module: ModuleType, *names: str) -> list[Any]:
    """Those of `module`, or of the submodule where the packages of the hub have them."""
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
"""Modules that have the functions, and what is installed for them."""
_OF_TORCH = {"FA3": "flash_attention_3", "FA4": "flash_attention_4"}
"""What torch activates is of the same packages."""
_BUILDERS = {"2": _flash_2, "3": _flash_3, "4": _flash_4}
_HUB = {
    "flash_attention_3": "kernels-community/flash-attn3",
    "flash_attention_4": "kernels-community/flash-attn4",
    "flash_attention_2": "kernels-community/flash-attn2",
}
"""Where the hub has kernels with both passes."""


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
    """What an error says, as part of a sentence."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:300]


def _flash(name: str) -> Kernel:
    """Flash attention of a generation: its package, else what has been downloaded of it."""
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
"""No kernel: one call of torch's attention for each sequence."""

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
