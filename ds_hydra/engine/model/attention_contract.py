"""One contract of kernels for attention over packed micro-batches.

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

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        """Long segments of a micro-batch."""
        ends, lasts = itertools.accumulate(lengths), itertools.accumulate(key_lengths)
        each = enumerate(zip(lengths, ends, key_lengths, lasts, strict=True))
        found = (cls(n, end - own, end, last - keys, last) for n, (own, end, keys, last) in each)
        return [segment for segment in found if segment.is_long]

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
    takes_widths: Callable[[int, int, int | None], bool] = lambda query, value, _: (
        max(query, value) <= 256
    )
    """Whether a device of a major compute capability takes widths of queries and values."""
    pads_values: bool = True
    """Whether values have to be as wide as queries."""
    most_ordered_width: int = 256
    """Largest width for backward in one order (`hydra.deterministic`); 0: never."""
    copies_when_ordered: bool = False
    """Whether it then keeps a copy of the gradient of queries, in fp32, for each group of
    multiprocessors: ceil(multiprocessors / heads) of them. Others take turns instead.
    """
    runs_long_apart: bool = False
    """Whether long segments have calls of their own, which a trial needs some for."""
    prepare: Callable[[Iterable[LongSegment], float], None] = lambda *_: None
    """Called before an iteration, for what must not be done while a device waits for others, with
    its long segments on all ranks, wherever they lie, and a rank's share in the FLOPs of a pair.
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


def first_line(error: BaseException) -> str:
    """First line of an error's text, cut for use in a sentence."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:300]


class Named:
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
        """Call the function with those of `given` that it has."""
        named = {name: given.get(name, default) for name, default in self._named.items()}
        return self._function(*map(given.get, self._names, self._defaults), **named)
