"""Lengths of the sequences of a dataset: one `ds_hydra.lengths/1` file as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ds_hydra.configs.files import read_json_object, reading
from ds_hydra.errors import HydraConfigError

_LENGTHS_SCHEMA = "ds_hydra.lengths/1"

_MAX_DRAWN_SEQUENCES = 1 << 22
"""Most sequences of the drawn global batches: some hundred bytes each while they are planned."""

IntArray: TypeAlias = npt.NDArray[np.int64]
OverLength: TypeAlias = Literal["truncate", "drop", "split"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthHistogram:
    """`counts[i]` sequences have `lengths_tokens[i]` tokens; lengths rise, every count is 1 or
    more.
    """

    name: str
    lengths_tokens: IntArray
    counts: IntArray

    @property
    def num_sequences(self) -> int:
        """Sequences of all lengths."""
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.counts @ self.lengths_tokens)

    def quantile(self, share: float) -> int:
        """Shortest length that at least `share` of the sequences do not exceed."""
        return int(
            self.lengths_tokens[np.searchsorted(np.cumsum(self.counts), share * self.num_sequences)]
        )

    def limit(self, context_length: int, over_length: OverLength = "truncate") -> LengthHistogram:
        """The histogram that training sees: longer sequences cut to the context, dropped, or split.

        A split sequence gives as many sequences of `context_length` as it holds, and its rest.
        """
        is_over = self.lengths_tokens > context_length
        lengths, counts = self.lengths_tokens[is_over], self.counts[is_over]
        limited = dict(zip(self.lengths_tokens[~is_over].tolist(), self.counts[~is_over].tolist()))
        whole, rest = np.divmod(lengths, context_length)
        if over_length != "drop" and lengths.size:
            num_whole = counts.sum() if over_length == "truncate" else whole @ counts
            limited[context_length] = limited.get(context_length, 0) + int(num_whole)
        if over_length == "split":
            for length, count in zip(rest.tolist(), counts.tolist()):
                limited[length] = limited.get(length, 0) + count
        limited.pop(0, None)
        if not limited:
            raise HydraConfigError(
                f"histogram {self.name!r}: no sequence is left within a context of {context_length} tokens; the "
                f"shortest has {self.lengths_tokens[0]}; raise the context to that or truncate"
            )
        return LengthHistogram.from_counts(limited, name=self.name)

    def draw_batches(
        self, tokens_per_iteration: int, num_batches: int, seed: int
    ) -> Iterator[IntArray]:
        """Lengths of `num_batches` global batches drawn with replacement, each within the token
        budget.

        As the sampler does, a batch takes sequences while they fit the budget and one at least.
        Raises HydraConfigError for more than `_MAX_DRAWN_SEQUENCES` in all, about.
        """
        self._check_amount(tokens_per_iteration, num_batches)
        generator = np.random.Generator(np.random.PCG64(seed))
        mean = self.num_tokens / self.num_sequences
        at_once = int(2 * tokens_per_iteration / mean) + 16
        share = self.counts / self.num_sequences
        waiting = np.empty(0, dtype=np.int64)
        for _ in range(num_batches):
            while waiting.sum() <= tokens_per_iteration:
                waiting = np.append(
                    waiting, generator.choice(self.lengths_tokens, at_once, p=share)
                )
            stop = max(
                1, int(np.searchsorted(np.cumsum(waiting), tokens_per_iteration, side="right"))
            )
            yield waiting[:stop]
            waiting = waiting[stop:]

    def _check_amount(self, tokens_per_iteration: int, num_batches: int) -> None:
        per_batch = tokens_per_iteration * self.num_sequences // self.num_tokens + 1
        if per_batch * num_batches > _MAX_DRAWN_SEQUENCES:
            most = _MAX_DRAWN_SEQUENCES // per_batch
            tokens = _MAX_DRAWN_SEQUENCES // 2 * self.num_tokens // self.num_sequences
            raise HydraConfigError(
                f"{num_batches} global batches of {tokens_per_iteration} tokens are about {per_batch * num_batches} "
                f"sequences of histogram {self.name!r}, more than {_MAX_DRAWN_SEQUENCES}; "
                + (
                    f"draw {most} global batches"
                    if most
                    else f"lower the tokens of one to {tokens}"
                )
            )

    @classmethod
    def from_counts(cls, counts: Mapping[int, int], *, name: str = "lengths") -> LengthHistogram:
        """The histogram of a mapping from length to number of sequences; zero counts are left
        out.
        """
        kept = sorted((int(length), int(count)) for length, count in counts.items() if count)
        if not kept:
            raise HydraConfigError(f"histogram {name!r} is empty: it counts no sequence")
        if kept[0][0] < 1 or min(count for _, count in kept) < 0:
            raise HydraConfigError(
                f"histogram {name!r}: lengths must be 1 or more and counts 0 or more; found "
                f"{next((length, count) for length, count in kept if length < 1 or count < 0)}"
            )
        if sum(length * count for length, count in kept) >= 1 << 63:
            raise HydraConfigError(
                f"histogram {name!r} counts 2^63 tokens or more; its numbers are damaged"
            )
        table = np.array(kept, dtype=np.int64)
        return cls(name=name, lengths_tokens=table[:, 0].copy(), counts=table[:, 1].copy())

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], *, source: str = "histogram"
    ) -> LengthHistogram:
        """The histogram in a `ds_hydra.lengths/1` document; raises HydraConfigError naming the
        error.
        """
        with reading(document, _LENGTHS_SCHEMA, source):
            counts = document.get("counts")
            if not isinstance(counts, dict):
                raise HydraConfigError("'counts' must map a length to a number of sequences")
            try:
                whole = {int(length): count for length, count in counts.items()}
            except ValueError as error:
                raise HydraConfigError(f"a length is not a whole number: {error}") from error
            for length, count in whole.items():
                if type(count) is not int:
                    raise HydraConfigError(
                        f"length {length} has count {count!r}, expected a whole number"
                    )
        return cls.from_counts(whole, name=str(document.get("name", source)))

    @classmethod
    def load(cls, path: str | Path) -> LengthHistogram:
        """The histogram in the JSON file `path`."""
        return cls.from_json(read_json_object(path), source=str(path))

    def to_json(self, **more: Any) -> dict[str, Any]:
        """The `ds_hydra.lengths/1` document, with the fields `more` before the counts."""
        return {
            "schema": _LENGTHS_SCHEMA,
            "name": self.name,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            **more,
            "counts": {
                str(length): count
                for length, count in zip(self.lengths_tokens.tolist(), self.counts.tolist())
            },
        }
