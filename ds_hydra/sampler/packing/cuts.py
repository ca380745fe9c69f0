"""How the sequences of a micro-batch are cut into the rows of a CP group.

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
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

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
"""What a CP rank has of a micro-batch: the pieces in the order in which they lie there."""


@dataclass(slots=True)
class _Rows:
    """Rows that are being filled."""

    first: list[list[Piece]]
    second: list[list[Piece]]
    """The mirrored chunks, behind all others."""
    tokens: list[int]
    pairs: list[int]
    """Twice the pairs of tokens that attend: a piece of b to e has e^2 - b^2."""

    def add(self, row: int, pieces: list[list[Piece]], piece: Piece) -> None:
        pieces[row].append(piece)
        self.tokens[row] += piece.end - piece.begin
        self.pairs[row] += piece.end**2 - piece.begin**2

    def overhang(self, latency: LatencyModel) -> tuple[float, float]:
        """Time and tokens of a row, over an even share of them; 1.0 is the best there is."""
        num_rows, all_tokens, all_pairs = len(self.tokens), sum(self.tokens), sum(self.pairs)
        even = (latency.linear_ms * all_tokens + latency.quadratic_ms * all_pairs) / num_rows
        longest = latency.linear_ms * max(self.tokens) + latency.quadratic_ms * max(self.pairs)
        fewest = -(-all_tokens // num_rows)
        return longest / even if even else 1.0, max(self.tokens) / fewest


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
    best, best_overhang = None, (float("inf"), float("inf"))
    for num_cut in _numbers(sum(lengths[position] > 1 for position in ordered)):
        rows = _fill(ordered, lengths, num_rows, num_cut)
        overhang = rows.overhang(known)
        if overhang < best_overhang:
            best, best_overhang = rows, overhang
        if max(overhang) <= 1 + ROW_TOLERANCE:
            break
    assert best is not None
    return tuple((*a, *b) for a, b in zip(best.first, best.second))


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
    """How many sequences are cut, as long as it is not enough: all numbers at first, then fewer."""
    tried = [0]
    while tried[-1] < most:
        tried.append(min(most, max(tried[-1] + 1, tried[-1] * 4 // 3)))
    return tried


def _fill(ordered: Sequence[int], lengths: Sequence[int], num_rows: int, num_cut: int) -> _Rows:
    """Rows with the first `num_cut` sequences in mirrored chunks and the others whole."""
    first: list[list[Piece]] = [[] for _ in range(num_rows)]
    second: list[list[Piece]] = [[] for _ in range(num_rows)]
    rows = _Rows(first, second, [0] * num_rows, [0] * num_rows)
    num_chunks = 2 * num_rows
    for position in ordered[:num_cut]:
        ends = [lengths[position] * k // num_chunks for k in range(num_chunks + 1)]
        for row in range(num_rows):
            mirrored = num_chunks - 1 - row
            begin, end = ends[row], ends[row + 1]
            if mirrored == row + 1:  # neighbours: one piece
                end = ends[mirrored + 1]
            elif ends[mirrored] < ends[mirrored + 1]:
                last = Piece(position, ends[mirrored], ends[mirrored + 1])
                rows.add(row, rows.second if begin < end else rows.first, last)
            if begin < end:
                rows.add(row, rows.first, Piece(position, begin, end))
    fewest = [(tokens, row) for row, tokens in enumerate(rows.tokens)]
    heapify(fewest)
    for position in ordered[num_cut:]:
        tokens, row = fewest[0]
        rows.add(row, rows.first, Piece(position, 0, lengths[position]))
        heapreplace(fewest, (tokens + lengths[position], row))
    return rows
