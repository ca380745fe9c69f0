"""Tensor parallel collectives around a Hugging Face model's own modules, from its tp plan, and
sequence parallelism between them.

[Note: Shards of a micro-batch]
Where the model allows it, residual stream and norms are not repeated on every rank of a TP
group: a rank has T / TP tokens of a micro-batch, of a sequence shard of it under SP (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", Sec. 4.2.2). Before a
block (attention, MLP, head) shards are all-gathered, after it partial outputs are reduce-scattered,
where TP alone reduces whole micro-batches; in backward the other way round. Parameters outside
blocks see the tokens of a shard alone, so their gradient is a partial sum on every rank of the
group: all of them push it, and owners add them up (`Slicing.REPLICATED_PARTIAL_GRAD`). The bias of
a row-wise layer is added by the first rank to its partial output, and sees the gradient of all
tokens. Micro-batches are padded to a multiple of TP as in [Note: Sequence shards of a micro-batch];
stages hand on shards.

The gathered micro-batch lives in forward alone. Linears that read it keep the shard, and gather
once more in backward where they have weights to train.

Hooks read the current group from a `TensorParallel` value when they run, so one set of hooks serves
every TP degree that strategies choose.

Legend: B = 1 micro-batch (modules may leave that out), T its tokens, t = T / TP those of a shard, H
hidden size, O output features, V vocabulary rows of this rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hydra.engine.parallel.linear import (
    SharedBackward,
    apply_linear,
    apply_outside,
    find_held,
    takes_products,
    trace_linear,
)

_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""The second names are those of torch before 2.13."""


Posted = tuple[Tensor, Callable[[], None]]
"""A tensor in flight, valid once the function has been called."""


def nothing() -> None:
    """Wait for nothing: nothing is in flight."""


COLUMN, ROW = "column-wise", "row-wise"
"""Sides of a block: linears whose output features are cut, and those whose input features are."""


@dataclass(frozen=True, slots=True)
class TokenShards:
    """The ranks of a TP group in the order of their shards. Methods are collective over them."""

    group: dist.ProcessGroup | None
    size: int

    def gather(self, shard_BtH: Tensor) -> Tensor:
        """[1, T, H] of all shards."""
        micro_batch, wait = self.post_gather(shard_BtH)
        wait()
        return micro_batch

    def post_gather(self, shard_BtH: Tensor) -> Posted:
        """The same, on its way."""
        shard = shard_BtH.flatten(0, -2).contiguous()
        micro_batch = shard.new_empty(len(shard) * self.size, shard.shape[1])
        work = _all_gather(micro_batch, shard, group=self.group, async_op=True)
        return micro_batch.view(*shard_BtH.shape[:-2], *micro_batch.shape), work.wait

    def reduce_scatter(self, partial_BTH: Tensor) -> Tensor:
        """[1, t, H]: this rank's shard of the sum of all ranks' `partial_BTH`."""
        shard, wait = self.post_reduce_scatter(partial_BTH)
        wait()
        return shard

    def post_reduce_scatter(self, partial_BTH: Tensor) -> Posted:
        """The same, on its way."""
        partial = partial_BTH.flatten(0, -2).contiguous()
        shard = partial.new_empty(partial.shape[0] // self.size, partial.shape[1])
        # Gloo would reduce whole micro-batches, which takes more than twice as long
        if partial.device.type == "cpu":
            parts = torch.empty_like(partial)
            work = dist.all_to_all_single(parts, partial, group=self.group, async_op=True)

            def wait() -> None:
                work.wait()
                # Added by this rank in the order of ranks, hence the same bits each time.
                torch.sum(parts.unflatten(0, (self.size, -1)), dim=0, out=shard)

            return shard.view(*partial_BTH.shape[:-2], *shard.shape), wait
        work = _reduce_scatter(shard, partial, group=self.group, async_op=True)
        return shard.view(*partial_BTH.shape[:-2], *shard.shape), work.wait


class GatheredAgain(SharedBackward):
    """The micro-batch that the linears of one block share in backward; gathered by the first,
    dropped after the last.
    """

    def __init__(self, shards: TokenShards):
        super().__init__()
        self._shards = shards
        self._num_waiting = 0
        self._micro_batch: Tensor | None = None
        self._wait: Callable[[], None] = nothing

    def expect_reader(self) -> None:
        """A linear of the block has weights to train."""
        self._num_waiting += 1

    def read(self, kept: Tensor) -> Callable[[], Tensor]:
        """A function that waits for the micro-batch of which `kept` is this rank's shard."""
        if self._micro_batch is None:
            self._micro_batch, self._wait = self._shards.post_gather(kept)
        micro_batch = self._micro_batch

        def arrive() -> Tensor:
            # Whoever reads first waits: a product made at once comes before those postponed.
            wait, self._wait = self._wait, nothing
            wait()
            self._num_waiting -= 1
            if self._num_waiting <= 0:
                self._micro_batch = None
            return micro_batch

        return arrive


@dataclass(frozen=True, slots=True)
class SharedInput:
    """Input of several linears, whose gradient the ranks of the group exchange once."""

    source: Tensor
    """The tensor before its exchange: a whole micro-batch, or [1, t, H] of this rank."""
    whole: Tensor
    """[1, T, H], as linears see it."""
    kept: Tensor
    """The part of it that linears keep for backward."""
    backward: SharedBackward


class _Exchange(torch.autograd.Function):
    """`there` in forward, `back` in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


@torch.compiler.disable
def exchange(
    x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """`there(x)`, whose gradient goes `back`; both are collective, or neither."""
    output: Tensor = _Exchange.apply(x, there, back)
    return output


@torch.compiler.disable
def gather_input(shard_BtH: Tensor, shards: TokenShards) -> SharedInput:
    """The whole micro-batch for a block that is about to run."""
    backward = GatheredAgain(shards)

    def back(grad_BTH: Tensor) -> Tensor:
        shard, wait = shards.post_reduce_scatter(grad_BTH)
        # Products for weights run beside the exchange: [Note: Products for weights].
        backward.run()
        wait()
        return shard

    micro_batch = exchange(shard_BtH, shards.gather, back)
    # Detached, or what linears keep would be one more input of theirs to autograd.
    return SharedInput(shard_BtH, micro_batch, shard_BtH.detach(), backward)


@torch.compiler.disable
def gather_shards(shard: Tensor, shards: TokenShards) -> Tensor:
    """[T, ...] of all shards [t, ...]; where it is differentiable, its gradients are parts of a
    sum.
    """
    return exchange(shard.unsqueeze(0), shards.gather, shards.reduce_scatter).squeeze(0)


def find_blocks(layer: nn.Module, sides: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """The modules of `layer` that read a whole micro-batch: parents of column-wise modules.

    `sides` are those of the modules that the tp plan slices, COLUMN or ROW. Raises ValueError
    saying what is in the way where the sliced modules of `layer` are not in blocks of column-wise
    modules and one row-wise module, which returns what the block does.
    """
    planned = {module for module in layer.modules() if sides.get(module) in (COLUMN, ROW)}
    # Uncut attention would gather nothing, and see the keys of this rank's shard alone.
    for module in layer.modules():
        if "Attention" in type(module).__name__ and not planned & set(module.children()):
            raise ValueError("attention is not cut by heads")
    for block in layer.modules():
        found = [sides[child] for child in block.children() if child in planned]
        planned -= set(block.children())
        if not found:
            continue
        if block is layer or found.count(ROW) != 1 or len(found) == 1:
            name = "the layer itself" if block is layer else type(block).__name__
            raise ValueError(
                f"{name} has {found.count(COLUMN)} {COLUMN} and {found.count(ROW)} {ROW}"
            )
        yield block
    if planned:
        raise ValueError(f"{type(next(iter(planned))).__name__} is sliced by itself")


def input_name(block: nn.Module) -> str:
    """The argument of `block` that is the hidden state: its first."""
    return next(iter(inspect.signature(block.forward).parameters))


EXPERTS = "moe_tp_experts"
"""Style of a module of experts, whose parameters have styles of their own."""
LATENT, GATHERED, SPLIT = "mla_kv_a_proj", "colwise_gather_output", "rowwise_split_input"
"""Latent keys and values; as colwise and rowwise, with whole features outside the layer."""
PARTIAL = "replicated_with_grad_allreduce"
"""Held by every rank, each of which has a part of the gradient."""


class TensorParallel:
    """The TP group in which this rank runs its stage now; size 1 switches every hook off.

    `cuts_micro_batches`: whether ranks of a group have shards of a micro-batch between sliced
    layers ([Note: Shards of a micro-batch]).
    """

    def __init__(self, *, cuts_micro_batches: bool = False) -> None:
        self.cuts_micro_batches = cuts_micro_batches
        self.group: dist.ProcessGroup | None = None
        self.size, self.rank, self.cuts_experts = 1, 0, True
        self.shards: TokenShards | None = None
        """Set where micro-batches are cut now."""
        self.has_copies = self.has_parts = False
        """Whether columnwise layers are handed a copy of their input, whose gradient is summed, and
        outputs of rowwise layers are parts of a sum, or to be cut.
        """
        self.columns: dict[nn.Module, RemovableHandle] = {}
        self.rows: dict[nn.Module, RemovableHandle] = {}
        """Hooks of modules that are handed a shared copy of their input, and of those whose outputs
        are parts.
        """
        self.blocks: list[nn.Module] = []
        """Modules that gather a micro-batch, with hooks only while micro-batches are cut: a hook
        that is always called breaks the graph of a compiled layer.
        """
        self._block_hooks: list[RemovableHandle] = []
        self.shared: SharedInput | None = None
        """Input of the linears that run now, where its gradient is exchanged."""

    def enter(
        self, group: dist.ProcessGroup | None, size: int, rank: int, *, cuts_experts: bool = True
    ) -> None:
        """Use `group` from now on; whether experts are cut by width in it."""
        self.group, self.size, self.rank, self.cuts_experts = group, size, rank, cuts_experts
        self.shards = self._shards(group, size)
        self.has_copies = size > 1 and self.shards is None  # else their block has gathered it
        self.has_parts = size > 1
        self.forget_input()
        if self.shards is None:
            for hook in self._block_hooks:
                hook.remove()
            self._block_hooks = []
        elif not self._block_hooks:
            self._block_hooks = [hook for block in self.blocks for hook in hook_block(block, self)]

    def first_row(self, num_rows: int) -> int:
        """The first row of this rank's slice of an embedding or head of `num_rows` in all."""
        return self.rank * num_rows // self.size

    def micro_batch_multiple(self, size: int) -> int:
        """Number of tokens of which micro-batches are padded to a multiple under TP `size`."""
        shards = self._shards(None, size)
        return 1 if shards is None else shards.size

    def _shards(self, group: dist.ProcessGroup | None, size: int) -> TokenShards | None:
        return TokenShards(group, size) if self.cuts_micro_batches and size > 1 else None

    def shard_tokens(self, num_tokens: int) -> int:
        """Tokens of a micro-batch of `num_tokens` (padded) that this rank has between sliced
        layers.
        """
        return num_tokens if self.shards is None else num_tokens // self.shards.size

    @torch.compiler.disable
    def copy_to_group(self, hidden: Tensor) -> Tensor:
        """Identity whose backward sums gradients over the group, shared by modules with the same
        input.

        q, k and v (gate and up) read one tensor: one all-reduce serves all of them.
        """
        # By identity: only what reads the very same tensor may share the sum of its gradient.
        if self.shared is None or self.shared.source is not hidden:
            backward = SharedBackward()
            copy: Tensor = _CopyToGroup.apply(hidden, self.group, backward)
            self.shared = SharedInput(hidden, copy, copy, backward)
        return self.shared.whole

    @torch.compiler.disable
    def sum_over_group(self, partial: Tensor) -> Tensor:
        """The sum of the group's partial outputs, or this rank's shard of it; its backward hands
        the gradient on.
        """
        # Each rank goes on with a shard, so the gradient of the sum is that of all shards.
        if self.shards is not None:
            return exchange(partial, self.shards.reduce_scatter, self.shards.gather)
        # All go on with the same sum, and each has the whole gradient of it already.
        return exchange(partial, functools.partial(_sum_over, group=self.group), lambda grad: grad)

    def forget_input(self) -> None:
        """Drop the shared input, so that it does not outlive its stage."""
        self.shared = None


class _CopyToGroup(torch.autograd.Function):
    """Identity in forward, all-reduce of the gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, products: SharedBackward | None = None
    ) -> Tensor:
        ctx.group, ctx.products = group, products
        if products is not None:
            ctx.save_for_backward(products.handle)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        summed, wait = _post_sum_over(grad, ctx.group)
        if ctx.products is not None:
            ctx.products.run()
            # Of a layer that runs again in backward: compiled linears postpone to the one that was
            # made then, whose handle takes this one's place.
            if (again := find_held(*ctx.saved_tensors)) is not None:
                again.run()
        wait()
        return summed, None, None


def _sum_over(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    summed, wait = _post_sum_over(part, group)
    wait()
    return summed


def _post_sum_over(part: Tensor, group: dist.ProcessGroup | None) -> Posted:
    """The sum of all ranks' `part`, on its way; in memory of its own, because others may have
    `part`: autograd, or a user's hook.
    """
    summed = part.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(summed, group=group, async_op=True)
    return summed, work.wait


def _gather_features(part: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """All ranks' parts of the last dimension."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _own_features(whole: Tensor, size: int, rank: int) -> Tensor:
    """This rank's part of the last dimension, a view."""
    return whole.chunk(size, dim=-1)[rank]


def hook_colwise(module: nn.Module, tp: TensorParallel) -> None:
    """Columnwise parallel linear: full input, sliced output features."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (tp.copy_to_group(args[0]), *args[1:]) if tp.has_copies else None

    tp.columns[module] = module.register_forward_pre_hook(before)


def hook_block(block: nn.Module, tp: TensorParallel) -> tuple[RemovableHandle, RemovableHandle]:
    """Attention, MLP or head: where micro-batches are cut, gathers them for the columnwise layers
    inside. Returns the hooks.

    These keep their shard of a micro-batch for backward, in place of the micro-batch.
    """
    name = input_name(block)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if tp.shards is None:
            return None
        tp.shared = gather_input(args[0] if args else kwargs[name], tp.shards)
        return (
            ((tp.shared.whole, *args[1:]), kwargs)
            if args
            else (args, {**kwargs, name: tp.shared.whole})
        )

    def after(_module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        tp.shared = None

    return (
        # First, so that a head's own hooks see the gathered micro-batch
        block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        # Always, because a layer that runs again may be left by an exception inside of the block
        block.register_forward_hook(after, always_call=True, prepend=True),
    )


def hook_linear(linear: nn.Module, tp: TensorParallel) -> None:
    """A linear without code of its own, of a layer or the head: [Note: Products for weights].

    It does itself what `hook_colwise` and `hook_rowwise` do for others: calls of hooks are time of
    the host.
    """
    # A class or a forward of its own may compute something else than this product.
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return
    plain = linear.forward
    hooks = tp.columns.get(linear), tp.rows.get(linear)
    # Not the hooks themselves: a compiler of what follows could not represent them
    is_column, is_row = (hook is not None for hook in hooks)
    for hook in hooks:
        if hook is not None:
            hook.remove()

    def trace(hidden: Tensor) -> Tensor:
        weight, shared = linear.weight, tp.shared
        # Without a product for the weight there is nothing to put off.
        if not weight.requires_grad:
            return plain(hidden)
        if tp.shards is None:
            # Not by comparing tensors, whose lengths a compiler would take for constants
            is_shared = shared is not None and is_column and tp.size > 1
            return trace_linear(linear, plain, hidden, shared.backward if is_shared else None)
        # Gathers again in backward, and collectives stay outside of compiled graphs.
        if shared is not None and hidden is shared.whole:
            return apply_outside(hidden, weight, linear.bias, shared.kept, shared.backward)
        return trace_linear(linear, plain, hidden)

    @functools.wraps(plain)
    def forward(hidden: Tensor) -> Tensor:
        if is_column and tp.has_copies:
            hidden = tp.copy_to_group(hidden)
        if torch.compiler.is_compiling():
            output = trace(hidden)
        else:
            # Not by a module's attributes, each of which is a call of the host
            params: Any = linear._parameters
            weight, bias, shared = params["weight"], params["bias"], tp.shared
            if shared is not None and hidden is shared.whole and weight.requires_grad:
                output = apply_linear(hidden, weight, bias, shared.kept, shared.backward)
            elif weight.requires_grad and takes_products(weight):
                output = apply_linear(hidden, weight, bias)
            else:
                output = F.linear(hidden, weight, bias)
        return tp.sum_over_group(output) if is_row and tp.has_parts else output

    linear.forward = forward


def hook_rowwise(module: nn.Module, tp: TensorParallel) -> None:
    """Rowwise parallel linear: sliced input features, partial outputs summed over the group."""

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return tp.sum_over_group(output) if tp.has_parts else None

    tp.rows[module] = module.register_forward_hook(after)


def hook_gathered(module: nn.Module, tp: TensorParallel) -> None:
    """Columnwise parallel linear whose whole output every rank needs."""
    hook_colwise(module, tp)

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if tp.size == 1:
            return None
        gather = functools.partial(_gather_features, group=tp.group, size=tp.size)
        return exchange(
            output, gather, functools.partial(_own_features, size=tp.size, rank=tp.rank)
        )

    module.register_forward_hook(after)


def hook_split(module: nn.Module, tp: TensorParallel) -> None:
    """Rowwise parallel linear that every rank gives the whole input."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if tp.size == 1:
            return None
        gather = functools.partial(_gather_features, group=tp.group, size=tp.size)
        part = exchange(
            args[0], lambda whole: _own_features(whole, tp.size, tp.rank).contiguous(), gather
        )
        return (part, *args[1:])

    module.register_forward_pre_hook(before)
    hook_rowwise(module, tp)


def hook_experts(module: nn.Module, tp: TensorParallel) -> None:
    """Experts cut by width: every rank computes a part of the sum over the width of each expert.

    Arguments: hidden states [T, H], experts and their weights [T, K] of each token. Weights get a
    part of their gradient on every rank, as hidden states do.
    """

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not (tp.has_parts and tp.cuts_experts):
            return None
        hidden, experts, weights = args
        if tp.shards is None:
            return tp.copy_to_group(hidden), experts, _CopyToGroup.apply(weights, tp.group)
        return tuple(gather_shards(x, tp.shards) for x in (hidden, experts, weights))

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        is_part = tp.has_parts and tp.cuts_experts
        return tp.sum_over_group(output.unsqueeze(0)).squeeze(0) if is_part else None

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def hook_latent(module: nn.Module, tp: TensorParallel, latent_width: int) -> None:
    """Down-projection of latent attention: columns after the latent ones are in all heads' keys."""

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        # Where micro-batches are cut all of its gradient is a part, which owners add up.
        if tp.size == 1 or tp.shards is not None:
            return output
        # The latent part's gradient is summed by the column-wise layer that reads it.
        latent, key = output.tensor_split((latent_width,), dim=-1)
        return torch.cat([latent, _CopyToGroup.apply(key, tp.group)], dim=-1)

    module.register_forward_hook(after)


class Style(NamedTuple):
    """Treatment of the modules of one style of tp plans."""

    hook: Callable[[nn.Module, TensorParallel], None] | None = None
    """Function that hooks the exchanges of inputs and outputs."""
    side: str = ""
    """COLUMN or ROW where a linear's output or input features are cut: what its adapter and
    [Note: Shards of a micro-batch] go by.
    """


STYLES: Mapping[str, Style] = {
    "colwise": Style(hook_colwise, COLUMN),
    "rowwise": Style(hook_rowwise, ROW),
    GATHERED: Style(hook_gathered, COLUMN),
    SPLIT: Style(hook_split, ROW),
    "packed_colwise": Style(hook_colwise, COLUMN),
    EXPERTS: Style(hook_experts),
    LATENT: Style(),  # its hook wants a width
    PARTIAL: Style(),
    "local_params": Style(),
}
"""Treatment of modules by their style in a tp plan. Others are refused wherever TP is above 1."""


def hook_embedding(
    module: nn.Embedding, tp: TensorParallel, finish: Callable[[Tensor], Tensor]
) -> None:
    """Vocabulary parallel embedding, whole so far: rows of other ranks count as zero, then partial
    outputs are summed. `finish` adds to each output, on the first rank for all.
    """
    num_rows = module.weight.shape[0]
    # Handed from `before` to `after` of one call.
    outside: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if tp.size == 1:
            return None
        local_ids = args[0] - tp.first_row(num_rows)
        # The weight that is bound now is this rank's slice.
        mask = (local_ids < 0) | (local_ids >= module.weight.shape[0])
        outside.append(mask)
        return (local_ids.masked_fill(mask, 0), *args[1:])

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        if outside:
            output = output.masked_fill(outside.pop().unsqueeze(-1), 0.0)
        # After the mask, or noise on tokens of other ranks' rows would be lost.
        if tp.rank == 0:
            output = finish(output)
        return tp.sum_over_group(output) if tp.has_parts else output

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
