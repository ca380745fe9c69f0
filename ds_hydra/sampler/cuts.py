"""Cuts of the sequences of a micro-batch into the rows of a CP group.

[Note: Rows of a micro-batch]
Under `<cpN,TP,PP>` a micro-batch is N rows of about as many tokens and as much attention. A long
sequence gives every row two chunks that mirror each other: of 2 N chunks row c has number c and
number 2 N - 1 - c, so that one sees few tokens before it and the other as many more (as in Llama 3,
Dubey et al. 2024, Sec. 3.3.2). Short sequences stay whole where that leaves rows even enough,
because attention of pieces is slower than of whole sequences; which ones, is decided document by
document (as in WLB-LLM, Wang et al. 2025, Sec. 5). All rows are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.schedule import IntArray
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.profiles.memory_model import ROW_TOLERANCE
from ds_hydra.strategy.profiles.profile import LatencyModel

_EVEN = LatencyModel(quadratic_ms=1.0, linear_ms=4096.0, constant_ms=0.0)
"""Attention as dear as all else at 4,096 tokens, where nobody knows."""


class Piece(NamedTuple):
    """Tokens `begin` to `end` of the sequence at `position` of a plan."""

    position: int
    begin: int
    end: int


Row = tuple[Piece, ...]
"""Part of a micro-batch on a CP rank: its pieces in the order in which they lie there."""


def cut_micro_batch(
    micro_batch: Sequence[int],
    lengths: Sequence[int],
    num_rows: int,
    latency: LatencyModel | None = None,
) -> tuple[Row, ...]:
    """The rows of a micro-batch of the sequences at positions `micro_batch` of `lengths`.

    The longest sequences are cut, as few as make rows even by `latency` (T of the pipeline); the
    others go, longest first, where the fewest tokens are.

    >>> for row in cut_micro_batch([0, 1, 2], [16, 3, 3], 2):
    ...     print(*(f"{p.position}:{p.begin}-{p.end}" for p in row))
    0:0-4 1:0-3 0:12-16
    0:4-12 2:0-3
    """
    known = latency if latency is not None else _EVEN
    ordered = sorted(micro_batch, key=lambda position: (-lengths[position], position))
    sizes = np.array([lengths[position] for position in ordered], dtype=np.int64)
    row_of, best_row_of = np.zeros_like(sizes), np.zeros_like(sizes)
    best, best_overhang = 0, (float("inf"), float("inf"))
    for num_cut in _numbers(int((sizes > 1).sum())):
        overhang = _overhang(fill_rows(sizes, num_rows, num_cut, row_of), known)
        if overhang < best_overhang:
            best, best_overhang, best_row_of = num_cut, overhang, row_of.copy()
        # The fewest that are enough: keys of a sequence that is cut travel to all rows.
        if max(overhang) <= 1 + ROW_TOLERANCE:
            break
    return _pieces(ordered, sizes.tolist(), num_rows, best, best_row_of.tolist())


def cut_micro_batches(
    micro_batches: Sequence[Sequence[int]],
    lengths: Sequence[int],
    num_rows: int,
    latency: LatencyModel | None = None,
) -> tuple[tuple[Row, ...], ...]:
    """The rows of each micro-batch; nothing where there is one row."""
    if num_rows == 1:
        return ()
    return tuple(cut_micro_batch(m, lengths, num_rows, latency) for m in micro_batches)


def tile(rows: Sequence[Row], micro_batch: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether the pieces of `rows` are the sequences of `micro_batch`, each token once."""
    found: dict[int, list[tuple[int, int]]] = {position: [] for position in micro_batch}
    for piece in (piece for row in rows for piece in row):
        if piece.position not in found or not piece.begin < piece.end:
            return False
        found[piece.position].append((piece.begin, piece.end))
    for position, spans in found.items():
        begins, ends = zip(*sorted(spans)) if spans else ((), ())
        if (*begins, lengths[position]) != (0, *ends):
            return False
    return True


def _numbers(most: int) -> list[int]:
    """Numbers of sequences to cut, tried in turn: all numbers at first, then fewer."""
    tried = [0]
    while tried[-1] < most:
        tried.append(min(most, max(tried[-1] + 1, tried[-1] * 4 // 3)))
    return tried


@compiled
def fill_rows(sizes: IntArray, num_rows: int, num_cut: int, row_of: IntArray) -> IntArray:
    """[tokens or pairs, row] of rows with the first `num_cut` sequences in mirrored chunks and the
    others whole, of which each is written into `row_of`.

    `sizes` descend. Pairs of tokens that attend count twice: a piece of b to e has e^2 - b^2.
    """
    filled = np.zeros((2, num_rows), dtype=np.int64)
    num_chunks = 2 * num_rows
    for i in range(num_cut):
        for chunk in range(num_chunks):
            begin, end = sizes[i] * chunk // num_chunks, sizes[i] * (chunk + 1) // num_chunks
            # Mirrored: early tokens attend to few others, late ones to many; a row has a chunk of
            # each.
            row = min(chunk, num_chunks - 1 - chunk)
            filled[0, row] += end - begin
            filled[1, row] += end * end - begin * begin
    for i in range(num_cut, sizes.size):
        emptiest = np.argmin(filled[0])
        row_of[i] = emptiest
        filled[0, emptiest] += sizes[i]
        filled[1, emptiest] += sizes[i] * sizes[i]
    return filled


def _overhang(filled: IntArray, latency: LatencyModel) -> tuple[float, float]:
    """Time and tokens of a row, over an even share of them; 1.0 is the best there is."""
    tokens, pairs = filled.tolist()
    num_rows, all_tokens, all_pairs = len(tokens), sum(tokens), sum(pairs)
    even = (latency.linear_ms * all_tokens + latency.quadratic_ms * all_pairs) / num_rows
    longest = latency.linear_ms * max(tokens) + latency.quadratic_ms * max(pairs)
    fewest = -(-all_tokens // num_rows)
    return longest / even if even else 1.0, max(tokens) / fewest


def _pieces(
    ordered: Sequence[int],
    sizes: Sequence[int],
    num_rows: int,
    num_cut: int,
    row_of: Sequence[int],
) -> tuple[Row, ...]:
    """The rows that `fill_rows` counted; mirrored chunks lie behind all others."""
    first: list[list[Piece]] = [[] for _ in range(num_rows)]
    second: list[list[Piece]] = [[] for _ in range(num_rows)]
    num_chunks = 2 * num_rows
    for position, size in zip(ordered[:num_cut], sizes):
        ends = [size * k // num_chunks for k in range(num_chunks + 1)]
        for row in range(num_rows):
            mirrored = num_chunks - 1 - row
            begin, end = ends[row], ends[row + 1]
            if mirrored == row + 1:  # neighbours: one piece
                end = ends[mirrored + 1]
            elif ends[mirrored] < ends[mirrored + 1]:
                last = Piece(position, ends[mirrored], ends[mirrored + 1])
                # Without an early chunk it is the only piece of the sequence in this row.
                (second if begin < end else first)[row].append(last)
            if begin < end:
                first[row].append(Piece(position, begin, end))
    for position, size, row in zip(ordered[num_cut:], sizes[num_cut:], row_of[num_cut:]):
        first[row].append(Piece(position, 0, size))
    # The second piece of any sequence is behind all first ones: `KeysOfRow` has two blocks at most.
    return tuple((*a, *b) for a, b in zip(first, second))
