"""Whether slices of frozen parameters that an earlier iteration pulled are still what the shards hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import ParamSpec, RankBuckets, Region

ROW_WORDS = 1024


def without_frozen(specs: Sequence[ParamSpec], rank_buckets: Sequence[RankBuckets]) -> list[RankBuckets]:
    """`rank_buckets` with an empty region in place of every frozen slice, so that slots keep their numbers."""
    nothing = Region(0, 0, 0, 0)
    return [
        tuple(
            tuple(ref if specs[ref.param].requires_grad else replace(ref, region=nothing) for ref in bucket)
            for bucket in buckets
        )
        for buckets in rank_buckets
    ]


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """int64 sums over the bits of each tensor, by row and by column of a matrix of 8-byte words.

    Every single edit changes them, and so does moving values to another row or column. One pass over the
    shards at memory bandwidth; nothing is copied but a last, incomplete row.
    """
    sums = [torch.zeros(0, dtype=torch.int64)]
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = bits.numel() // (8 * ROW_WORDS) * 8 * ROW_WORDS
        rest = bits[whole:].to(torch.int64)
        aligned = bits[:whole] if bits.storage_offset() % 8 == 0 else bits[:whole].clone()
        words = aligned.view(torch.int64).view(-1, ROW_WORDS)
        sums += [words.sum(0), words.sum(1), rest]
    return torch.cat([s.to(sums[-1].device) for s in sums])


class FrozenKeeper:
    """Remembers for which strategy the pool holds pulled slices of frozen parameters."""

    def __init__(self, frozen_P: Callable[[], Sequence[Tensor]], any_rank: Callable[[bool], bool]):
        """`frozen_P()` are this rank's shards of frozen parameters; `any_rank` is collective."""
        self._frozen_P = frozen_P
        self._any_rank = any_rank
        self._strategy: Strategy | None = None
        self._fingerprint: Tensor | None = None

    def may_skip(self, strategy: Strategy) -> bool:
        """Whether the frozen slices of `strategy` are in the pool and no rank's shards have changed since.

        Collective over all ranks, which have pulled the same strategies.
        """
        if self._strategy != strategy or self._fingerprint is None:
            return False
        now = fingerprint(self._frozen_P())
        return not self._any_rank(not torch.equal(now, self._fingerprint))

    def pulled(self, strategy: Strategy) -> None:
        """All slices of `strategy` are being pulled into the pool."""
        self._strategy = strategy
        self._fingerprint = fingerprint(self._frozen_P())
