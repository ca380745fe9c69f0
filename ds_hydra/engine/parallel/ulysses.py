"""Sequence parallelism: each rank of an SP group has a sequence shard of a micro-batch, and all of
its tokens for a part of the heads.

[Note: Sequence shards of a micro-batch]
The ranks of an SP group hold the same slices. A micro-batch is cut into contiguous sequence shards
of equal length, wherever its sequences begin; padding, at most SP - 1 tokens, is a sequence of its
own without labels. Labels are shifted before the cut. Everything in a layer but attention works on
single tokens, because packed micro-batches demand that anyway. Attention exchanges sequence shards
of all heads for all sequence shards of some heads and back (DeepSpeed-Ulysses, Jacobs et al. 2023,
Sec. 3), so its kernel sees whole sequences. Each rank pushes the gradient of its own tokens, and
owners add them up as they do for data parallel pipelines.

Legend: P ranks of the group, H query heads, K key-value heads, T tokens of the padded micro-batch,
t = T / P, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Which part of each micro-batch this rank holds: sequence shard `rank` of `size`, the others
    being with the ranks of `group`.

    Sequence shards have a multiple of `multiple` tokens. There is one alone, without a group, where
    micro-batches are only padded.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    multiple: int = 1

    def padded(self, num_tokens: int) -> int:
        """Tokens of a micro-batch of `num_tokens` with those that let it be cut evenly."""
        step = self.size * self.multiple
        return -(-num_tokens // step) * step

    def cut(self, micro_batch_T: Tensor, fill: int = 0, least: int = 0) -> Tensor:
        """[t, ...] of this rank out of one row per token of the micro-batch, padded with `fill`, to
        `least` tokens at least.
        """
        num_padding = self.padded(max(len(micro_batch_T), least)) - len(micro_batch_T)
        padding = micro_batch_T.new_full((num_padding, *micro_batch_T.shape[1:]), fill)
        return torch.cat([micro_batch_T, padding]).chunk(self.size)[self.rank]


def gather_micro_batch(
    query_BHtD: Tensor, key_BKtD: Tensor, value_BKtD: Tensor, sequence_shard: SequenceShard
) -> tuple[Tensor, ...]:
    """The whole micro-batch for this rank's part of the heads: [1, H / P, T, D] queries, their keys
    and values.

    H divides by P. Key-value heads are repeated where they do not, so that a rank has those of its
    queries and each of them serves as many. One exchange for all three. Collective over the group,
    in backward too.
    """
    copies = lcm(key_BKtD.shape[1], sequence_shard.size) // key_BKtD.shape[1]
    if copies > 1:
        key_BKtD = key_BKtD.repeat_interleave(copies, dim=1)
        value_BKtD = value_BKtD.repeat_interleave(copies, dim=1)
    parts = (query_BHtD, key_BKtD, value_BKtD)
    columns = [
        part[0].unflatten(0, (sequence_shard.size, -1)).transpose(1, 2).flatten(2) for part in parts
    ]
    received: Tensor = _Exchange.apply(torch.cat(columns, dim=2), sequence_shard.group)
    widths = [part.shape[2] for part in columns]
    return tuple(
        heads.unflatten(1, (-1, part.shape[3])).transpose(0, 1).unsqueeze(0)
        for part, heads in zip(parts, received.flatten(0, 1).split(widths, dim=1), strict=True)
    )


def scatter_micro_batch(out_BThD: Tensor, sequence_shard: SequenceShard) -> Tensor:
    """This rank's sequence shard of all heads, [1, t, H, D], out of all tokens of its part of the
    heads, [1, T, H / P, D].

    Collective over the group, in backward too.
    """
    received: Tensor = _Exchange.apply(
        out_BThD[0].unflatten(0, (sequence_shard.size, -1)), sequence_shard.group
    )
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class _Exchange(torch.autograd.Function):
    """Part i of [P, ...] goes to rank i, and what rank i sends becomes part i; its own inverse in
    backward.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(sent: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
