"""Whether slices of frozen parameters that an earlier iteration pulled are still what the shards
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ds_hydra.zero_link import ParamSpec, RankBuckets, Region

Pull = TypeVar("Pull")

_CHUNK_WORDS = {"cpu": 2**17}
"""8-byte words digested at a time: on a CPU what its cache holds, elsewhere 32 MiB."""
_LARGE_CHUNK_WORDS = 2**22

_WORD_FACTOR, _PLACE_FACTOR = -7046029254386353131, -4658895280553007687
"""Odd, so that every bit of a word reaches its upper half (of splitmix64 and xxhash)."""


def without_frozen(
    specs: Sequence[ParamSpec], rank_buckets: Sequence[RankBuckets]
) -> list[RankBuckets]:
    """`rank_buckets` with an empty region in place of every frozen slice, so that slots keep their
    numbers.
    """
    nothing = Region(0, 0, 0, 0)
    return [
        tuple(
            tuple(
                ref if specs[ref.param].requires_grad else replace(ref, region=nothing)
                for ref in bucket
            )
            for bucket in buckets
        )
        for buckets in rank_buckets
    ]


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """int64 digests of the bits of each tensor, one for each chunk of 8-byte words.

    A word is mixed with its place before it is added, so that edits whose sums stay, and values
    that move, change a digest but for about one in 2^32. One pass over the shards, near memory
    bandwidth; nothing is copied but a last, incomplete word.
    """
    digests = [torch.zeros(0, dtype=torch.int64)]
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = bits.numel() // 8 * 8
        # A view as 8-byte words needs storage that begins at a multiple of 8.
        aligned = bits[:whole] if bits.storage_offset() % 8 == 0 else bits[:whole].clone()
        step = _CHUNK_WORDS.get(bits.device.type, _LARGE_CHUNK_WORDS)
        places = torch.arange(min(step, whole // 8), device=bits.device) * _PLACE_FACTOR
        for words in aligned.view(torch.int64).split(step):
            digests.append(_digest(words, places[: len(words)]))
        digests.append(bits[whole:].to(torch.int64))
    return torch.cat([d.to(digests[-1].device) for d in digests])


def _digest(words: Tensor, places: Tensor) -> Tensor:
    mixed = torch.add(places, words, alpha=_WORD_FACTOR)
    mixed ^= mixed >> 32
    return mixed.sum().view(1)


class FrozenKeeper:
    """Remembers of which slices the pool holds those of frozen parameters."""

    def __init__(self, frozen_P: Callable[[], Sequence[Tensor]], any_rank: Callable[[bool], bool]):
        """`frozen_P()` are this rank's shards of frozen parameters; `any_rank` is collective."""
        self._frozen_P = frozen_P
        self._any_rank = any_rank
        self._key: Hashable = None
        self._fingerprint = torch.zeros(0)

    def choose(self, key: Hashable, pull: Pull, pull_trained: Pull) -> Pull:
        """`pull_trained` where the frozen slices of `key`, that of strategies which need the same
        slices, are in the pool and no rank's shards have changed since; else `pull`, of all slices,
        into the pool now.

        Collective over all ranks, which have pulled the same strategies.
        """
        # Not version counters of tensors: writes by way of `data` do not raise them.
        now = fingerprint(self._frozen_P())
        is_same = self._key == key  # on every rank or on none
        # One rank whose shards changed makes all pull: rounds are collective.
        if is_same and not self._any_rank(not torch.equal(now, self._fingerprint)):
            return pull_trained
        self._key, self._fingerprint = key, now
        return pull

    def forget(self) -> None:
        """The pool no longer holds what was pulled."""
        self._key = None
