"""A packed micro-batch: where its sequences are, and which one is running now.

Attention, rotary embeddings and experts ask for the running one: layers of some families drop
keyword arguments, and a layer that is computed again in backward has to see its own micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hydra.engine.model.attention_operator import Boundaries, count_on_host
from ds_hydra.engine.parallel import recomputation
from ds_hydra.engine.parallel.offload import OffloadedLayer
from ds_hydra.engine.parallel.token_cuts import KeysOfRow, TokenLayout
from ds_hydra.engine.ranks.memory import to_device


class Segment(NamedTuple):
    """Tokens `begin` to `end` of sequence `number` of a micro-batch, which has `length`."""

    number: int
    length: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Positions of the sequences in a packed micro-batch; attention finds it `running`."""

    segments: tuple[Segment, ...]
    """Whole sequences, or the pieces of them that a row has, in their order; then padding."""
    sequence_lengths: tuple[int, ...]
    """Tokens of each sequence of the micro-batch, then 0 for padding."""
    cu_seqlens: Tensor
    """[num_segments + 1] int32 on the compute device: begin of every segment, then the number of
    tokens.
    """
    cu_keys: Tensor
    """The same of the keys that each segment attends to."""
    on_host: Tensor
    """int64 on the CPU: the longest segments, and where long ones are (`count_on_host`)."""
    position_ids: Tensor
    """[1, T] on the compute device: positions that restart at 0 in every sequence; of this rank's
    sequence shard.
    """
    layout: TokenLayout | None = None
    """This rank's part of the micro-batch, or of its row, where that is cut or padded. `segments`
    are those before the cut.
    """
    keys: KeysOfRow | None = None
    """Places of the row's keys; None where the micro-batch is not cut into rows."""
    token_seeds_T: Tensor | None = None
    """[T] int64 seeds of noise ([Note: Noise by counting]); None where there is none."""
    token_lengths_T: Tensor | None = None
    """[T] int64, beside the seeds: tokens of each token's sequence."""
    predicting: Tensor | None = None
    """[t] int64: places of the tokens that the head is asked about; None where it is about all."""
    _alone: list[PackedMicroBatch] = field(default_factory=list, init=False, compare=False)

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        layout: TokenLayout | None = None,
    ) -> PackedMicroBatch:
        """Concatenate sequences of `lengths` tokens to a micro-batch, or to a sequence shard of
        one.
        """
        whole = [Segment(number, length, 0, length) for number, length in enumerate(lengths)]
        return cls.of_segments(whole, lengths, device, layout)

    @classmethod
    def of_segments(
        cls,
        segments: Sequence[Segment],
        lengths: Sequence[int],
        device: torch.device,
        layout: TokenLayout | None = None,
        keys: KeysOfRow | None = None,
    ) -> PackedMicroBatch:
        """Concatenate the `segments` of a micro-batch of `lengths`; rows are as long as those that
        `keys` come from.
        """
        positions = torch.cat(
            # A row may have no segments at all, and `cat` wants one tensor
            [torch.arange(0), *(torch.arange(segment.begin, segment.end) for segment in segments)]
        )
        if layout is not None:
            # Rows of CP exchange tensors of one size: the shorter ones are padded
            least = keys.row_tokens if keys else 0
            padding = layout.padded(max(len(positions), least)) - len(positions)
            if padding:
                # A sequence of its own, so that padding sees nothing of the others and they not it
                segments = [*segments, Segment(len(lengths), padding, 0, padding)]
            positions = layout.cut(positions, least=least)

        def boundaries(lengths: list[int]) -> Tensor:
            # int32, as kernels of attention want it
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return to_device(ends, device)

        num_tokens = [segment.end - segment.begin for segment in segments]
        # A piece sees its sequence from the begin, so its end counts the keys
        num_keys = [segment.end for segment in segments]
        return cls(
            segments=tuple(segments),
            # Padding has the number after the last sequence: it finds length 0
            sequence_lengths=(*lengths, 0),
            cu_seqlens=boundaries(num_tokens),
            cu_keys=boundaries(num_keys),
            on_host=count_on_host(num_tokens, num_keys),
            position_ids=to_device(positions.unsqueeze(0), device),
            layout=layout,
            keys=keys,
        )

    def each_alone(self) -> Sequence[PackedMicroBatch]:
        """Micro-batches of one segment each, of a micro-batch that no rank shares; made once."""
        if not self._alone:
            noise = (self.token_seeds_T, self.token_lengths_T)
            seeds, of_tokens = (
                [None] * len(self.lengths) if values is None else values.split(self.lengths)
                for values in noise
            )
            for length, seeds_T, lengths_T in zip(self.lengths, seeds, of_tokens, strict=True):
                # Positions restart in each sequence, and noise goes by the token: both as packed
                alone = PackedMicroBatch.build([length], self.position_ids.device)
                alone = replace(alone, token_seeds_T=seeds_T, token_lengths_T=lengths_T)
                self._alone.append(alone)
        return self._alone

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return tuple(segment.end - segment.begin for segment in self.segments)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Tokens that the last token of each segment sees, itself among them."""
        return tuple(segment.end for segment in self.segments)

    @property
    def boundaries(self) -> Boundaries:
        """Boundaries for a kernel: begins of segments and of their keys, the longest of them."""
        return self.cu_seqlens, self.cu_keys, self.on_host

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have tokens of it, too."""
        return self.keys is not None or (self.layout is not None and self.layout.size > 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch, or of this rank's sequence shard, padding included."""
        return self.position_ids.shape[1]


_running: list[tuple[PackedMicroBatch, bool, Boundaries | None]] = []
"""Micro-batches, the innermost last, whether they are computed again, and their boundaries."""


def current_micro_batch() -> PackedMicroBatch | None:
    """Return the micro-batch whose forward runs, or whose checkpointed layer is computed again."""
    return _running[-1][0] if _running else None


def current_boundaries() -> Boundaries | None:
    """Boundaries of the current micro-batch; None where it is cut, or none runs. A compiler finds
    tensors here and nothing that differs between micro-batches.
    """
    return _running[-1][2] if _running else None


def is_computed_again() -> bool:
    """Whether backward runs the forward of a layer now."""
    return bool(_running) and _running[-1][1]


@contextmanager
def running(micro_batch: PackedMicroBatch, *, again: bool = False) -> Iterator[None]:
    """Make `micro_batch` the current one inside; `again` where backward computes it again."""
    # Not by thread: an accelerator's autograd runs layers again in a thread of its own
    _running.append((micro_batch, again, None if micro_batch.is_cut else micro_batch.boundaries))
    try:
        yield
    finally:
        _running.pop()


COMPILED: WeakSet[nn.Module] = WeakSet()
"""Layers that torch compiles."""


@torch.compiler.disable
def _compiled(layer: Callable[..., Any]) -> Callable[..., Any]:
    """`layer` compiled where it is the forward of such a layer: transformers checkpoints inside of
    the forward that was compiled, where a compiler stops.
    """
    # transformers hands over a partial of the class's forward, whose first argument is the layer
    if not isinstance(layer, functools.partial) or not layer.args:
        return layer
    own = layer.args[0]
    if not isinstance(own, nn.Module) or own not in COMPILED:
        return layer
    return functools.partial(_compile(layer.func), *layer.args, **layer.keywords)


@functools.cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, dynamic=True)


@torch.compiler.disable(recursive=False)
def checkpointed(
    layer: Callable[..., Any], *args: Any, keeps: bool = True, offloads: bool = False
) -> Any:
    """`layer(*args)`, computed again in backward with the same current micro-batch, but for its
    attention where it `keeps` what that returns; where it `offloads` that and its input are in the
    host's memory meanwhile.
    """
    # Bound now: in backward another micro-batch may be the current one
    run = functools.partial(_run_again, current_micro_batch(), _compiled(layer))
    offloaded = OffloadedLayer() if offloads and torch.is_grad_enabled() else None
    with nullcontext() if offloaded is None else offloaded.keeping_input():
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # see [Note: Noise by counting]
            context_fn=functools.partial(recomputation.contexts, keeps=keeps, offloaded=offloaded),
        )


def _run_again(micro_batch: PackedMicroBatch, layer: Callable[..., Any], *args: Any) -> Any:
    # The first run, inside of the forward that is current
    if current_micro_batch() is micro_batch:
        return layer(*args)
    with running(micro_batch, again=True):
        return layer(*args)
