"""Sequence and context parallelism: the ranks of a group share the tokens of a micro-batch,
contiguous shards of it (SP) or rows of pieces (CP).

[Note: Sequence shards of a micro-batch]
The ranks of an SP group hold the same slices. A micro-batch is cut into contiguous sequence shards
of equal length, wherever its sequences begin; padding, at most SP - 1 tokens, is a sequence of its
own without labels. Labels are shifted before the cut. Everything in a layer but attention works on
single tokens, because packed micro-batches demand that anyway. Attention exchanges sequence shards
of all heads for all sequence shards of some heads and back (DeepSpeed-Ulysses, Jacobs et al. 2023,
Sec. 3), so its kernel sees whole sequences. Each rank pushes the gradient of its own tokens, and
owners add them up as they do for data parallel pipelines.

Heads do not see each other, so they travel in parts of some heads each: the exchanges of all parts
are posted at once, attention to a part runs beside those of the parts after it, and its output
leaves beside attention to the next part. Backward does the same the other way round. Nothing hides
the queries, keys and values of the first part, and nothing the output of the last one.

[Note: Keys of other rows]
Everything in a layer but attention works on the tokens of a row ([Note: Rows of a micro-batch] says
which). In attention queries stay, and keys and values are all-gathered in the group, as Llama 3
does (Dubey et al. 2024, Sec. 3.3.2): grouped-query heads are few. Out of them a rank takes, for
each of its pieces, those of the sequence from its beginning to the piece's end, so that a kernel
for sequences of unequal numbers of queries and keys, with causal masks aligned at their ends, does
the rest. Gradients are reduce-scattered back. Sequences that lie whole in a row stay out of all
this. Gathered keys do not wait for backward, which would keep those of all layers: backward gathers
them anew, unless the layer is checkpointed and runs again anyway.

Keys travel in parts of some heads, too, those of one part that SP has brought, or of all: all
gathers are posted at once, and attention to a part's keys runs beside the gathers of the parts
after it, in backward beside the reduce-scatters of those before. Nothing hides the gather of the
first part, and nothing the reduce-scatter of the same one, which is the last in backward; so it has
the fewest heads, and each part twice those of the one before it. Backward asks for the keys of a
layer where its own begins, so that they travel beside its MLP.

Legend: P ranks of the group, H query heads, K key-value heads (of a part under CP), T tokens of the
padded micro-batch, t those of a shard or of a padded row, S tokens that a row sends, N keys of all
pieces of a row, D head dimension, w = K D or K Dv numbers of a token's keys or values, W of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.parallel import recomputation
from ds_hydra.engine.parallel.tensor_parallel import Posted, TokenShards, nothing
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.sampler.cuts import Row
from ds_hydra.strategy.profiles.memory_model import MOST_KEY_VALUE_PARTS, key_value_parts


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """This rank's tokens of each micro-batch, where its pipeline cuts or pads them.

    A row of the micro-batch (CP), of that a sequence shard (SP), of as many tokens as a TP group
    can share (TP-SP).
    """

    group: dist.ProcessGroup | None = None
    """The ranks that hold the other sequence shards."""
    size: int = 1
    """Sequence shards of a row."""
    rank: int = 0
    """Number of this rank's sequence shard."""
    multiple: int = 1
    """A sequence shard has a multiple of it of tokens."""
    rows: TokenShards | None = None
    """The CP group, whose ranks hold the rows; None where a micro-batch is one row."""
    row: int = 0
    """Number of this rank's row."""

    def padded(self, num_tokens: int) -> int:
        """Tokens of a row of `num_tokens` with those that let it be cut evenly."""
        step = self.size * self.multiple
        return -(-num_tokens // step) * step

    def cut(self, row_T: Tensor, fill: int = 0, least: int = 0) -> Tensor:
        """[t, ...] of this rank's sequence shard out of one entry per token of its row, padded with
        `fill`, to `least` tokens at least.
        """
        num_padding = self.padded(max(len(row_T), least)) - len(row_T)
        padding = row_T.new_full((num_padding, *row_T.shape[1:]), fill)
        return torch.cat([row_T, padding]).chunk(self.size)[self.rank]


LEAST_PART_BYTES = 1 << 20
"""Least bytes that a rank sends in the first part of some heads. A shorter exchange costs more than
what it lets hide is worth.
"""


def _parts_of(num_heads: int, num_bytes: int) -> list[int]:
    """Key-value heads of each part, where a rank sends `num_bytes` for all of them."""
    # From sizes that are equal on all ranks of the group: each part is a collective of its own.
    most = (num_bytes // LEAST_PART_BYTES + 1).bit_length() - 1  # the first is one of 2^n - 1
    return key_value_parts(num_heads, min(MOST_KEY_VALUE_PARTS, most))


def attend_to_all_tokens(
    query_BHtD: Tensor,
    key_BKtD: Tensor,
    value_BKtD: Tensor,
    layout: TokenLayout,
    attend: Callable[[Tensor, Tensor, Tensor, slice], Tensor],
) -> Tensor:
    """[1, t, H, Dv] of this rank's sequence shard and all heads: `attend` of all tokens' queries,
    [1, h, T, D], keys and values of a part of this rank's heads, and which query heads these are.

    H divides by P. Key-value heads are repeated where they do not, so that a rank has those of its
    queries and each of them serves as many. One exchange of each part for queries, keys and values,
    one for its output. Collective over the group, in backward too.
    """
    copies = lcm(key_BKtD.shape[1], layout.size) // key_BKtD.shape[1]
    if copies > 1:
        key_BKtD = key_BKtD.repeat_interleave(copies, dim=1)
        value_BKtD = value_BKtD.repeat_interleave(copies, dim=1)
    shards = query_BHtD, key_BKtD, value_BKtD
    num_bytes = sum(shard.nbytes for shard in shards)
    sizes = _parts_of(key_BKtD.shape[1] // layout.size, num_bytes)
    ratio = query_BHtD.shape[1] // key_BKtD.shape[1]
    columns = [
        heads.unflatten(0, (layout.size, -1)).split([each * size for size in sizes], dim=1)
        for (heads,), each in zip(shards, (ratio, 1, 1))
    ]
    sent = [
        torch.cat([heads.transpose(1, 2).flatten(2) for heads in part], dim=2)
        for part in zip(*columns)
    ]
    widths = [shard.shape[3] for shard in shards]
    # What is sent is a copy, so copies of repeated heads need not stay beside it.
    del shards, columns, query_BHtD, key_BKtD, value_BKtD
    # Outside of autograd, whose node for the way back is `_Arrive`.
    posted = [_post_all_to_all(one.detach(), layout.group) for one in sent]
    waits: list[Callable[[], None]] = []
    sources = [*_Sources.apply(waits, *sent)]
    sent.clear()
    outputs, begin = _Outputs(layout.group), 0
    left: list[Tensor] = []
    for size in sizes:
        # What was sent does not stay once it has arrived
        received: Tensor = _Arrive.apply(sources.pop(0), posted.pop(0), layout.group, waits)
        numbers = [ratio * size * widths[0], size * widths[1], size * widths[2]]
        query, key, value = (
            heads_Tw.unflatten(1, (-1, width)).transpose(0, 1).unsqueeze(0)
            for heads_Tw, width in zip(received.flatten(0, 1).split(numbers, dim=1), widths)
        )
        end = begin + query.shape[1]
        out_BThD = attend(query, key, value, slice(begin, end))
        left.append(_Leave.apply(out_BThD[0].unflatten(0, (layout.size, -1)), outputs, len(left)))
        del received, query, key, value, out_BThD
        begin = end
    out_PthD = _join(_ArriveAll.apply(outputs, *left), dim=2)
    return out_PthD.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([*parts], dim=dim) if len(parts) > 1 else parts[0]


def _post_all_to_all(sent: Tensor, group: dist.ProcessGroup | None) -> Posted:
    """Post an all-to-all: part i of [P, ...] goes to rank i, part i of the result is rank i's."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return received, work.wait


class _Sources(torch.autograd.Function):
    """Identity on the sent parts; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, waits: list[Callable[[], None]], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.waits = waits
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # This node runs after every `_Arrive`: all exchanges are posted before one is waited for.
        for wait in ctx.waits:
            wait()
        ctx.waits.clear()
        return None, *grads


class _Arrive(torch.autograd.Function):
    """A part of what all ranks send; its gradient goes back, there once `waits` are over."""

    @staticmethod
    def forward(
        ctx: Any,
        _source: Tensor,
        arriving: Posted,
        group: dist.ProcessGroup | None,
        waits: list[Callable[[], None]],
    ) -> Tensor:
        ctx.group, ctx.waits = group, waits
        received, wait = arriving
        recomputation.settle_late(wait)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back, wait = _post_all_to_all(grad, ctx.group)
        ctx.waits.append(wait)
        # Still on its way. Autograd only hands it on: a part has one reader, and nothing is added.
        return back, None, None, None


class _Outputs:
    """Waits for parts of the output in forward, and for their gradients in backward."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.waits: list[Callable[[], None]] = []


class _Leave(torch.autograd.Function):
    """Sends part `number` of the output; in backward waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, outputs: _Outputs, number: int) -> Tensor:
        ctx.outputs, ctx.number = outputs, number
        arriving, wait = _post_all_to_all(out, outputs.group)
        outputs.waits.append(wait)
        return arriving

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.outputs.waits[ctx.number]()
        ctx.outputs.waits[ctx.number] = nothing  # it holds what has come
        return grad, None, None


class _ArriveAll(torch.autograd.Function):
    """All parts of the output; backward sends their gradients, those first whose attention's
    backward comes first.
    """

    @staticmethod
    def forward(ctx: Any, outputs: _Outputs, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.outputs = outputs
        for wait in outputs.waits:
            wait()
        outputs.waits.clear()  # they hold what has come, which would stay as long as the graph
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = [_post_all_to_all(grad, ctx.outputs.group) for grad in reversed(grads)]
        ctx.outputs.waits = [wait for _, wait in reversed(back)]
        # Still on their way, too: each `_Leave` waits for its own.
        return None, *(grad for grad, _ in reversed(back))


@dataclass(frozen=True, slots=True)
class KeysOfRow:
    """Places of the keys of a row's pieces: among those that all rows send, then among its own."""

    group: TokenShards
    row_tokens: int
    """t, the same of all rows."""
    sent_S: Tensor
    """[S] places in this rank's row of the tokens that it sends: tokens of cut sequences. S is the
    same of all rows; those with fewer repeat a token whose copies nobody uses.
    """
    num_sent: int
    """Tokens of `sent_S` that are somebody's."""
    blocks: tuple[Tensor, ...]
    """[n] places in the P S sent tokens and the t of the row, on the compute device: of consecutive
    pieces of different sequences, so that none is twice in a block and gradients add up in one
    order.
    """
    places_N: Tensor
    """All blocks, one after another."""
    _gathered: list[_Part] = field(default_factory=list, compare=False)
    """Parts that a layer's backward gathers again, noted in its forward."""

    @classmethod
    def find(cls, rows: Sequence[Row], layout: TokenLayout, device: torch.device) -> KeysOfRow:
        """Find the keys of this rank's row, whose padding attends to itself. All `rows` of a
        micro-batch are padded to the longest.
        """
        assert layout.rows is not None, "a micro-batch of one row needs no others' keys"
        row_tokens = layout.padded(max(sum(p.end - p.begin for p in row) for row in rows))
        num_pieces = Counter(piece.position for row in rows for piece in row)

        def num_sent(row: Row) -> int:
            return sum(p.end - p.begin for p in row if num_pieces[p.position] > 1)

        most = max(map(num_sent, rows))
        behind = most * len(rows)  # where the row's own tokens begin
        places: dict[int, list[tuple[int, Tensor]]] = {}
        sent = [torch.arange(0)]
        for number, row in enumerate(rows):
            at, own_at = number * most, 0
            for piece in row:
                length = piece.end - piece.begin
                own = torch.arange(own_at, own_at + length)
                if num_pieces[piece.position] > 1:
                    found = torch.arange(at, at + length)
                    places.setdefault(piece.position, []).append((piece.begin, found))
                    at += length
                    sent += [own] if number == layout.row else []
                elif number == layout.row:
                    places[piece.position] = [(piece.begin, own + behind)]
                own_at += length
        of_sequence = {
            position: torch.cat([place for _, place in sorted(found, key=lambda part: part[0])])
            for position, found in places.items()
        }
        blocks: list[dict[int, Tensor]] = [{}]
        for piece in rows[layout.row]:
            if piece.position in blocks[-1]:
                blocks.append({})
            blocks[-1][piece.position] = of_sequence[piece.position][: piece.end]
        used = sum(piece.end - piece.begin for piece in rows[layout.row])
        # Padding is a sequence of its own, and -1 is no position of any.
        blocks[-1][-1] = torch.arange(used, row_tokens) + behind
        of_blocks = [torch.cat([*block.values()]) for block in blocks]
        places_N = to_device(torch.cat(of_blocks), device)
        sent_S = torch.cat([*sent, torch.zeros(most, dtype=torch.int64)])[:most]
        return cls(
            layout.rows,
            row_tokens,
            to_device(sent_S, device),
            num_sent(rows[layout.row]),
            places_N.split([*map(len, of_blocks)]),
            places_N,
        )

    def note(self, parts: Sequence[_Part]) -> None:
        """Lets the backward of the layer that runs gather `parts` again."""
        self._gathered.extend(parts)

    def before_backward(self, hidden: Tensor) -> None:
        """Lets the gradient of a layer's output `hidden` gather the layer's keys again, those first
        whose attention's backward comes first. Collective over the group in backward.
        """
        if not hidden.requires_grad:  # no gradient comes here: a later output gathers these parts
            return
        parts = [*reversed(self._gathered)]
        self._gathered.clear()

        def gather_again(_: Tensor) -> None:
            for part in parts:
                part.gather()

        if parts:
            hidden.register_hook(gather_again)

    def post(self, row_tW: Tensor, widths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Returns what waits for keys and values of this rank's pieces, [N, w] of each of `widths`,
        which add up to W, out of what all rows send and its own. Collective over the group.
        """

        def of_pieces(both: Tensor) -> list[Tensor]:
            return [one.index_select(0, self.places_N) for one in both.split([*widths], dim=1)]

        if not len(self.sent_S):
            return lambda: of_pieces(row_tW)
        received, wait = self.group.post_gather(row_tW.index_select(0, self.sent_S).unsqueeze(0))
        # In a list, to be let go once it is joined, before pieces are selected.
        held = [received]

        def select() -> list[Tensor]:
            wait()
            return of_pieces(torch.cat([held.pop()[0], row_tW]))

        return select

    def post_gradients(self, *grads: Tensor) -> Posted:
        """[t, W] of this rank's row out of the gradients of all ranks, [N, w] of keys and of
        values. Collective over the group.
        """
        num_sent = len(self.sent_S) * self.group.size
        widths = [grad_Nw.shape[1] for grad_Nw in grads]
        both = grads[0].new_zeros(num_sent + self.row_tokens, sum(widths))
        for one, grad_Nw in zip(both.split(widths, dim=1), grads):
            of_blocks = grad_Nw.split([*map(len, self.blocks)])
            one.index_copy_(0, self.blocks[0], of_blocks[0])
            for block, grad in zip(self.blocks[1:], of_blocks[1:], strict=True):
                _add_at(one, block, grad)
        if not num_sent:
            return both, nothing
        sent, row = both.split([num_sent, self.row_tokens])
        own, wait = self.group.post_reduce_scatter(sent.unsqueeze(0))
        row = row.clone()  # what was sent does not stay with it

        def add() -> None:
            wait()
            # Without the token that fills up S: repeated writes to its place would hide one.
            _add_at(row, self.sent_S[: self.num_sent], own[0, : self.num_sent])

        return row, add


def _add_at(whole: Tensor, places_n: Tensor, values: Tensor) -> None:
    """Adds `values` at places of which none is twice; `index_add_` would add by atomics."""
    whole.index_copy_(0, places_n, whole.index_select(0, places_n).add_(values))


class _Part:
    """The keys and values of some heads of a row, from which backward gathers those of its pieces
    again.
    """

    def __init__(self, row_tW: Tensor, widths: Sequence[int], keys: KeysOfRow) -> None:
        self.row_tW, self.widths, self.keys = row_tW.detach(), widths, keys
        self._arriving: Callable[[], list[Tensor]] | None = keys.post(self.row_tW, widths)
        self._addresses: list[int] = []
        self._again: list[Tensor] = []
        self._late: list[Tensor] = []

    def allocate(self) -> list[Tensor]:
        """Tensors for the keys and values that `fill` selects."""
        num_keys = len(self.keys.places_N)
        selected = [self.row_tW.new_empty(num_keys, width) for width in self.widths]
        # Without the node of autograd that the others get
        self._late = [one.detach() for one in selected]
        return selected

    def free(self) -> None:
        """Free the memory of what `allocate` has returned until `fill` needs it."""
        for one in self._late:
            one.untyped_storage().resize_(0)

    def fill(self) -> None:
        """Select keys and values into what `allocate` has returned."""
        for one, found in zip(self._late, self.select(), strict=True):
            one.untyped_storage().resize_(found.nbytes)
            one.copy_(found)
        self._late = []

    @contextmanager
    def left_out(self, selected: Sequence[Tensor]) -> Iterator[None]:
        """Autograd keeps no view of the `selected` keys and values in this context."""
        # By address, because hooks get other tensors of the same storage.
        self._addresses = [one.untyped_storage().data_ptr() for one in selected]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | tuple[Any, ...]:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._addresses:
            return tensor
        number = self._addresses.index(address)
        return number, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Tensor | tuple[Any, ...]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self._again:
            self._again = self.select()
        number, *strided = packed
        return self._again[number].as_strided(*strided)

    def gather(self) -> None:
        """Ask for keys and values. Collective over the group."""
        self._arriving = self.keys.post(self.row_tW, self.widths)

    def select(self) -> list[Tensor]:
        """Wait for keys and values of this rank's pieces, which are here once."""
        # Where no hook of a later output has asked for them, they are asked for now
        arriving = self._arriving or self.keys.post(self.row_tW, self.widths)
        self._arriving = None
        return arriving()

    def let_go(self) -> None:
        self._again = []


class _Select(torch.autograd.Function):
    """Keys and values of a row's pieces; in backward the gradients of all ranks go back to the
    rows, there once `waits` are over.
    """

    @staticmethod
    def forward(
        ctx: Any, row_tW: Tensor, part: _Part, waits: list[Callable[[], None]]
    ) -> tuple[Tensor, ...]:
        ctx.part, ctx.waits = part, waits
        if recomputation.is_late():
            recomputation.settle_late(part.fill)
            return tuple(part.allocate())
        return tuple(part.select())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Attention's backward has made these gradients, so nobody reads the keys any more.
        ctx.part.let_go()
        row, wait = ctx.part.keys.post_gradients(*grads)
        ctx.waits.append(wait)
        return row, None, None


def attend_to_all_rows(
    query_BHtD: Tensor,
    key_BKtD: Tensor,
    value_BKtD: Tensor,
    keys: KeysOfRow,
    attend: Callable[[Tensor, Tensor, Tensor, slice], Tensor],
) -> Tensor:
    """`attend` of this rank's queries and of the keys and values of its pieces, [1, K, N, D] and
    [1, K, N, Dv], and which query heads these are; [1, t, H, Dv] of all heads.

    Collective over the group, in backward too, twice for each part.
    """
    recomputation.settle()  # rows are copied
    num_heads = key_BKtD.shape[1]
    numbers = (key_BKtD.numel() + value_BKtD.numel()) // keys.row_tokens
    num_bytes = numbers * len(keys.sent_S) * key_BKtD.element_size()
    sizes = _parts_of(num_heads, num_bytes)
    ratio = query_BHtD.shape[1] // num_heads
    chunks = list(zip(key_BKtD[0].split(sizes), value_BKtD[0].split(sizes)))
    queries = query_BHtD.split([ratio * size for size in sizes], dim=1)
    rows = [torch.cat([x.transpose(0, 1).flatten(1) for x in both], dim=1) for both in chunks]
    waits: list[Callable[[], None]] = []
    parts = [_Part(row, [x[:, 0].numel() for x in both], keys) for row, both in zip(rows, chunks)]
    gathers_again = (
        rows[0].requires_grad and torch.is_grad_enabled() and not recomputation.is_checkpointed()
    )
    outs, begin = [], 0
    for row, part, query, size in zip(_Sources.apply(waits, *rows), parts, queries, sizes):
        selected: tuple[Tensor, Tensor] = _Select.apply(row, part, waits)
        if not gathers_again:
            part.row_tW = row.new_empty(0)  # else it stays with the graph
        key, value = (
            one_Nw.unflatten(1, (size, -1)).transpose(0, 1).unsqueeze(0) for one_Nw in selected
        )
        end = begin + query.shape[1]
        with part.left_out(selected) if gathers_again else nullcontext():
            outs.append(attend(query, key, value, slice(begin, end)))
        part.free()
        begin = end
    if gathers_again:
        keys.note(parts)
    return _join(outs, dim=2)
