"""cuDNN's attention for long segments, a call or two each, beside torch's varlen for the others.

[Note: Long segments apart]
cuDNN runs one long sequence in about half the time of flash attention 2, and wants a plan for each
shape. So shapes are few: rows of zeros pad a segment to one of 16 lengths per power of two. Zeros
behind a segment are its last ones, so no other row sees them; their output is cut off, and their
gradient is zero. Backward gets 0 as their log-sum-exp: their scores are 0, too, so what it computes
of them is finite, times zero.

A segment whose queries are the last of more keys (a row of context parallelism) is two blocks:

    keys      0 ........ whole ... before ........ last
    queries   all of them see these | a causal square

The first `whole` keys are seen by all of its queries: a block without a mask, whose keys are not
padded, because nothing would hide zeros there. They are the most keys that stand on a grid of their
own, and the few that are left before the queries go to the causal square, which gets as many
queries of zeros in front. Outputs of both are merged by their log-sum-exps, and backward of each
gets the merged output and log-sum-exp, by which its probabilities are those among all keys (as in
ring attention, arXiv:2310.01889, which TransformerEngine runs by cuDNN in this way).

[Note: Plans before an iteration]
Where cuDNN gets a new shape it builds a plan, some 0.05 s of the host for each pass, and its launch
waits until the device has nothing to do (beside a kernel of 0.86 s it took 0.86 s, on an H200). Two
ranks whose devices hold collectives would wait for each other ([Note: A kernel's first use] in
`session.py`). So plans are built before an iteration, on all ranks in the same place: of the blocks
of its plan, wherever they run, that compute enough in all of it, because pieces have hundreds of
shapes, most of which are rare. Ranks so agree on blocks; heads are those that a rank has met, as SP
and CP run some of them at a time. A segment whose shape has no plan runs by the rest's kernel.
Plans belong to threads: forward runs in the one that computes, backward, and forward again under
checkpointing, in that of autograd.

Legend: as in `attention_contract`; S tokens with what pads them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hydra.engine.model.attention_contract import (
    Ends,
    Kernel,
    LongSegment,
    MissingKernelError,
    Named,
    Scoring,
    first_line,
)

logger = logging.getLogger(__name__)

_GRID_TOKENS, _GRID_STEPS, _KEY_STEPS = 128, 16, 32
"""Padded lengths are multiples of the first, and as many as the second, of keys that all queries
see as the third, per power of two.
"""

Rows = Sequence[tuple[int, int]]


class _Block(NamedTuple):
    """Keys of a long segment, counted from its first, and whether the last queries see fewer of
    them; then `num_before` queries of zeros come first.
    """

    keys: slice
    is_causal: bool
    num_before: int


_WORTH_FLOPS = 1e12
"""A rank's share in what an iteration computes of a block, from which its plans, 0.15 s, are paid
for by a hundred alike: both passes run at 320 TFLOP/s by `varlen` and at 560 by cuDNN, on an H200.
"""


class _Sizes(NamedTuple):
    """Queries and keys of a block with what pads them."""

    num_queries: int
    num_keys: int
    is_causal: bool

    @property
    def num_pairs(self) -> float:
        """Pairs of a query with a key that it sees."""
        return self.num_queries * self.num_keys / (2 if self.is_causal else 1)


class _Heads(NamedTuple):
    """Heads that run together, whatever the lengths of their segments."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int
    value_width: int


class _Plans:
    """Blocks that have plans, by thread, for the heads that were met."""

    def __init__(self, build: Callable[[_Sizes, _Heads, Callable[[], None]], None]):
        self._build = build
        self._known: dict[int, set[tuple[_Sizes, _Heads]]] = {}
        self._tried: set[tuple[_Sizes, _Heads]] = set()
        self._heads: dict[_Heads, None] = {}

    def has(self, sizes: _Sizes, heads: _Heads) -> bool:
        """Whether this thread has plans of such a block."""
        # Also where there are none: the next iteration's preparation plans for these heads
        self._heads[heads] = None
        return (sizes, heads) in self._known.get(threading.get_ident(), ())

    def build(self, blocks: Iterable[_Sizes]) -> None:
        """Plans of `blocks` for all heads that were met, in the two threads that will want them."""
        # Each once: a shape that has no plan would be tried before every iteration
        shapes = [s for s in itertools.product(blocks, self._heads) if s not in self._tried]
        begin = time.monotonic()
        for shape in shapes:
            self._tried.add(shape)
            threads: list[int] = []
            try:
                self._build(*shape, lambda threads=threads: threads.append(threading.get_ident()))
            except (
                RuntimeError
            ) as error:  # too little memory, or no plan: it goes on as it ran before
                logger.warning(
                    "attention: cuDNN does not plan %s of %s: %s", *shape, first_line(error)
                )
                continue
            # Of all threads at once: backward by another kernel is slower than both by that one.
            for thread in threads:
                self._known.setdefault(thread, set()).add(shape)
        if (seconds := time.monotonic() - begin) > 1:
            logger.info("attention: cuDNN has planned %d shapes in %.1f s", len(shapes), seconds)


class _InBackward(torch.autograd.Function):
    """Runs a function in the thread of autograd that runs backward passes on a device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.run()
        return grad, None


def _blocks(segment: LongSegment) -> list[_Block]:
    num_keys = segment.last - segment.first
    before = num_keys - (segment.end - segment.begin)
    # Rounded down: keys of this block cannot be padded, so they end on the grid
    whole = before - before % _step(before, _KEY_STEPS)
    square = _Block(slice(whole, num_keys), True, before - whole)
    return [_Block(slice(0, whole), False, 0), square] if whole else [square]


def _sizes_of(segment: LongSegment) -> list[_Sizes]:
    """Sizes of the blocks of `segment`."""
    found = []
    for block in _blocks(segment):
        num_queries = segment.end - segment.begin
        behind = _behind(block, num_queries)
        num_keys = block.keys.stop - block.keys.start + (behind if block.is_causal else 0)
        found.append(_Sizes(block.num_before + num_queries + behind, num_keys, block.is_causal))
    return found


def _step(num_tokens: int, steps: int) -> int:
    """Distance between neighbouring lengths of a grid."""
    power = 1 << max(0, num_tokens.bit_length() - 1)
    return max(_GRID_TOKENS, power // steps)


def build(rest: Kernel) -> Kernel:
    """The kernel; `rest` runs short segments and those without plans. Raises MissingKernelError."""
    version = f"torch {torch.__version__}"
    if why := why_not():
        raise MissingKernelError(f"{version} {why}")
    operators = [
        getattr(torch.ops.aten, f"_scaled_dot_product_cudnn_attention{way}", None)
        for way in ("", "_backward")
    ]
    if None in operators:
        raise MissingKernelError(f"{version} has no operator for cuDNN's attention")
    inputs = ("query", "key", "value", "is_causal", "scale")
    run_forward = Named(operators[0].default, *inputs, "compute_log_sumexp")
    run_backward = Named(operators[1].default, *inputs, "grad_out", "out", "logsumexp")
    lse_dims = [3]  # as the forward pass of this release has it

    def attend_block(heads: Sequence[Tensor], block: _Block, scale: float) -> tuple[Tensor, Tensor]:
        begin, end = block.num_before, block.num_before + len(heads[0])
        query, key, value = _padded(heads[:1], heads[1:], block)
        out, lse, *_ = run_forward(
            query=query, key=key, value=value, compute_log_sumexp=True, is_causal=block.is_causal,
            scale=scale,
        )  # fmt: skip
        # Backward wants it in the form that forward has given
        lse_dims[0] = lse.dim()
        return out[0].transpose(0, 1)[begin:end], lse.reshape(out.shape[1:3]).t()[begin:end]

    def differentiate_block(
        of_queries: Sequence[Tensor], of_keys: Sequence[Tensor], block: _Block, scale: float
    ) -> list[Tensor]:
        *heads, lse_TH = of_queries
        begin, end = block.num_before, block.num_before + len(lse_TH)
        grad, query, out, key, value = _padded(heads, of_keys, block)
        behind = query.shape[2] - end
        # 0 for rows of zeros, whose scores are 0: finite, times a gradient of zero
        lse = nn.functional.pad(lse_TH.t(), (begin, behind)).contiguous().unsqueeze(0)
        state = torch.empty((), dtype=torch.int64, device=query.device)  # of dropout, which is 0
        grads = run_backward(
            grad_out=grad, query=query, key=key, value=value, out=out,
            logsumexp=lse if lse_dims[0] == 3 else lse.unsqueeze(-1),
            philox_seed=state, philox_offset=state, max_q=query.shape[2], max_k=key.shape[2],
            dropout_p=0.0, is_causal=block.is_causal, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (t[0].transpose(0, 1) for t in grads)
        return [dq[begin:end], *(t[: len(of_keys[0])] for t in (dk, dv))]

    def attend_long(
        of_queries: Sequence[Tensor], of_keys: Sequence[Tensor], segment: LongSegment, scale: float
    ) -> tuple[Tensor, Tensor]:
        found = [
            attend_block([*of_queries, *(t[b.keys] for t in of_keys)], b, scale)
            for b in _blocks(segment)
        ]
        return found[0] if len(found) == 1 else _merge(*found)

    def differentiate_long(
        of_queries: Sequence[Tensor], of_keys: Sequence[Tensor], segment: LongSegment, scale: float
    ) -> list[Tensor]:
        each = [
            differentiate_block(of_queries, [t[b.keys] for t in of_keys], b, scale)
            for b in _blocks(segment)
        ]
        if len(each) == 1:
            return each[0]
        of_blocks = list(zip(*each, strict=True))
        # Queries see both blocks, so theirs add up; keys are in one block each
        return [of_blocks[0][0] + of_blocks[0][1], *(torch.cat(t) for t in of_blocks[1:])]

    def build_plans(sizes: _Sizes, heads: _Heads, note: Callable[[], None]) -> None:
        of_queries = (sizes.num_queries, heads.heads, heads.width)
        of_keys = [(sizes.num_keys, heads.key_heads, w) for w in (heads.width, heads.value_width)]
        options = {"device": heads.device, "dtype": heads.dtype}
        # Values do not matter: plans are found by sizes and strides
        query, key, value = (torch.zeros(size, **options) for size in (of_queries, *of_keys))
        block = _Block(slice(0, sizes.num_keys), sizes.is_causal, 0)

        def run_both() -> None:
            # Forward, too: layers run again in the thread of autograd
            out, lse_TH = attend_block([query, key, value], block, 1.0)
            differentiate_block([out, query, out, lse_TH], [key, value], block, 1.0)
            note()

        attend_block([query, key, value], block, 1.0)
        note()
        # An evaluation prepares as well, and without gradients there is no backward thread
        with torch.inference_mode(False), torch.enable_grad():
            begin = torch.zeros((), device=heads.device, requires_grad=True)
            _InBackward.apply(begin, run_both).backward()

    plans = _Plans(build_plans)

    def prepare(segments: Iterable[LongSegment], flops_of_pair: float) -> None:
        flops: Counter[_Sizes] = Counter()
        for sizes in itertools.chain.from_iterable(map(_sizes_of, segments)):
            # Segments of one size share a plan, so their work counts together
            flops[sizes] += flops_of_pair * sizes.num_pairs
        plans.build([sizes for sizes, own in flops.items() if own >= _WORTH_FLOPS])

    def planned(ends: Ends, scoring: Scoring, inputs: Sequence[Tensor]) -> Ends:
        """`ends` whose long segments are those that cuDNN runs here."""
        # Blocks know no window, and cuDNN's backward promises no order of sums
        if not ends.long or scoring.window or torch.are_deterministic_algorithms_enabled():
            return ends._replace(long=())
        query, key, value = inputs
        widths = (query.shape[1], key.shape[1], query.shape[2], value.shape[2])
        heads = _Heads(query.device, query.dtype, *widths)
        is_planned = [all(plans.has(sizes, heads) for sizes in _sizes_of(s)) for s in ends.long]
        others = [s for s, known in zip(ends.long, is_planned, strict=True) if not known]
        return ends._replace(
            long=tuple(itertools.compress(ends.long, is_planned)),
            # Segments without plans go to the rest, whose kernel has to know the longest
            longest_of_rest=max([ends.longest_of_rest, *(s.end - s.begin for s in others)]),
            longest_keys_of_rest=max(
                [ends.longest_keys_of_rest, *(s.last - s.first for s in others)]
            ),
        )

    def attend(
        query: Tensor, key: Tensor, value: Tensor, ends: Ends, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        ends = planned(ends, scoring, (query, key, value))
        if not ends.long:
            return rest.forward(query, key, value, ends, scoring)

        def attend_rest(heads: Sequence[Tensor], of_rest: Ends) -> tuple[Tensor, Tensor]:
            query, key, value = heads
            out, lse_HT = rest.forward(query, key, value, of_rest, scoring)
            return out, lse_HT.t()

        run_long = functools.partial(attend_long, scale=scoring.scale)
        out, lse_TH = _run_apart([query], [key, value], ends, run_long, attend_rest)
        # Kernels of the rest read it by its address, should backward run by them.
        return out, lse_TH.t().contiguous()

    def differentiate(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        ends: Ends,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ends = planned(ends, scoring, (query, key, value))
        if not ends.long:
            return rest.backward(grad, query, key, value, out, lse, ends, scoring)

        def differentiate_rest(given: Sequence[Tensor], of_rest: Ends) -> Sequence[Tensor]:
            grad, query, out, lse_TH, *of_keys = given
            lse = lse_TH.t().contiguous()
            return rest.backward(grad, query, *of_keys, out, lse, of_rest, scoring)

        run_long = functools.partial(differentiate_long, scale=scoring.scale)
        dq, dk, dv = _run_apart(
            [grad, query, out, lse.t()], [key, value], ends, run_long, differentiate_rest
        )
        return dq, dk, dv

    return Kernel(
        name="cudnn",
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
        prepare=prepare,
    )


def why_not() -> str:
    """Reason that this torch cannot call cuDNN's attention, "" where it can."""
    if not torch.backends.cuda.is_built() or torch.version.hip:
        return "is not built for CUDA"
    if not torch.backends.cudnn.is_available():
        return "has no cuDNN"
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "was told by torch.backends.cuda.enable_cudnn_sdp not to use it"
    return ""


def _padded(of_queries: Sequence[Tensor], of_keys: Sequence[Tensor], block: _Block) -> list[Tensor]:
    """[1, H, S, D] of both: queries on the grid, and keys as many in a square."""
    behind = _behind(block, len(of_queries[0]))
    queries = [_dense(t, block.num_before, behind) for t in of_queries]
    return [*queries, *(_dense(t, 0, behind if block.is_causal else 0) for t in of_keys)]


def _behind(block: _Block, num_queries: int) -> int:
    """Rows of zeros that pad the queries of `block` to the grid."""
    num_tokens = block.num_before + num_queries
    return -num_tokens % _step(num_tokens, _GRID_STEPS)


def _dense(heads_THD: Tensor, before: int, behind: int) -> Tensor:
    """[1, H, S, D] with zeros around, and dense as [S, H, D]: plans are found by sizes and
    strides.
    """
    if before or behind:
        heads_THD = nn.functional.pad(heads_THD, (0, 0, 0, 0, before, behind))
    tokens, heads, width = heads_THD.shape
    # A single head may have any stride where torch counts as contiguous.
    sizes, strides = (1, heads, tokens, width), (heads_THD.numel(), width, heads * width, 1)
    return heads_THD.contiguous().as_strided(sizes, strides)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of both blocks."""
    total_TH = torch.logaddexp(one[1], other[1])
    shares = [(lse_TH - total_TH).exp().unsqueeze(-1) for _, lse_TH in (one, other)]
    merged = (one[0] * shares[0]).addcmul_(other[0], shares[1])  # in the type of the sums
    return merged.to(one[0].dtype), total_TH


def _run_apart(
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
    ends: Ends,
    run_long: Callable[[Sequence[Tensor], Sequence[Tensor], LongSegment], Sequence[Tensor]],
    run_rest: Callable[[Sequence[Tensor], Ends], Sequence[Tensor]],
) -> list[Tensor]:
    """Results of `run_long`, which gets the rows of one long segment, and of `run_rest`, which gets
    all others, in their places.
    """
    rows = [(s.begin, s.end) for s in ends.long]
    key_rows = [(s.first, s.last) for s in ends.long]
    apart = [
        run_long([t[a:b] for t in of_queries], [t[c:d] for t in of_keys], segment)
        for (a, b), (c, d), segment in zip(rows, key_rows, ends.long, strict=True)
    ]
    found: Sequence[Tensor] = [t[:0] for t in apart[0]]
    if ends.longest_of_rest:
        others = [_without(t, rows) for t in of_queries], [_without(t, key_rows) for t in of_keys]
        found = run_rest([*others[0], *others[1]], _ends_of_rest(ends))
    # Two of queries, or one of queries and two of keys
    places = [rows, rows] if len(found) == 2 else [rows, key_rows, key_rows]
    each = zip(found, zip(*apart, strict=True), places, strict=True)
    return [_put_back(t, own, of_rows) for t, own, of_rows in each]


def _without(tensor: Tensor, ranges: Rows) -> Tensor:
    """Rows outside of `ranges`, one after another."""
    edges = [0, *itertools.chain.from_iterable(ranges), len(tensor)]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return _join([tensor[a:b] for a, b in pairs if b > a])


def _put_back(rest: Tensor, apart: Sequence[Tensor], ranges: Rows) -> Tensor:
    """Insert rows `apart`, which `_without` left out, into `rest` again."""
    edges = [0, *itertools.chain.from_iterable(ranges)]
    gaps = [b - a for a, b in zip(edges[::2], edges[1::2])]
    others = rest.split([*gaps, len(rest) - sum(gaps)])
    parts = itertools.chain.from_iterable(itertools.zip_longest(others, apart))
    return _join([part for part in parts if part is not None and len(part)])


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _ends_of_rest(ends: Ends) -> Ends:
    """The ends of a micro-batch without its long segments."""
    segments = [(segment.number, segment.number + 1) for segment in ends.long]

    def of(edges: Tensor) -> Tensor:
        lengths = _without(edges.diff(), segments)
        return nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    queries = of(ends.queries)
    keys = of(ends.keys) if ends.has_pieces else queries
    return Ends(queries, keys, ends.longest_of_rest, ends.longest_keys_of_rest)
