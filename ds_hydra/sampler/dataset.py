"""What the training data holds: token lengths known before anything is loaded, rows read on demand.

The only file of the planner's packages that reads data (through `datasets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ds_hydra.errors import HydraConfigError

IntArray: TypeAlias = npt.NDArray[np.int64]
OverLength: TypeAlias = Literal["truncate", "drop", "refuse"]
Tokenize: TypeAlias = Callable[[list[str]], Mapping[str, Sequence[Sequence[int]]]]
"""A list of texts to {"input_ids": one list of token ids per text}, as a tokenizer of transformers does."""

IGNORED_LABEL = -100
_ROWS_PER_READ = 10_000


class RawTokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that is used; such a tokenizer needs no transformers around it."""

    def encode_batch_fast(self, input: list[str]) -> Sequence[Any]:
        """One encoding (with `.ids`) per text."""


@dataclass(frozen=True, slots=True)
class RawTokenize:
    """Gives a `tokenizers.Tokenizer` the call that `TokenDataset` expects, and an end of text."""

    tokenizer: RawTokenizer
    eos_token_id: int | None = None

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        """The token ids of each text under "input_ids"."""
        return {"input_ids": [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What was read, and what was cut or left out of it."""

    num_rows: int
    num_sequences: int
    num_tokens: int
    longest_tokens: int
    context_length: int
    num_truncated: int
    num_cut_tokens: int
    num_dropped: int
    num_without_label: int

    def __str__(self) -> str:
        lines = [
            f"{self.num_sequences:,} sequences, {self.num_tokens:,} tokens, mean "
            f"{self.num_tokens / self.num_sequences:,.0f}, longest {self.longest_tokens:,}"
        ]
        if self.num_truncated:
            share = self.num_cut_tokens / (self.num_cut_tokens + self.num_tokens)
            lines.append(
                f"{self.num_truncated:,} truncated to {self.context_length:,} tokens "
                f"({self.num_cut_tokens:,} tokens cut, {share:.1%})"
            )
        if self.num_dropped:
            lines.append(f"{self.num_dropped:,} dropped, longer than {self.context_length:,} tokens")
        if self.num_without_label:
            lines.append(f"{self.num_without_label:,} left out, without a token to predict")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDataset:
    """Sequences of at most `context_length` tokens. `lengths[i]` belongs to `self[i]`.

    A sequence of l tokens has l - 1 positions that predict a token, those whose next label is not -100;
    `num_label_tokens[i]` counts them, and a sequence without any is left out.
    """

    lengths: IntArray
    num_label_tokens: IntArray
    max_token_id: int
    report: DataReport
    _rows: datasets.Dataset
    _row_of: IntArray

    @classmethod
    def from_dataset(
        cls,
        dataset: datasets.Dataset,
        *,
        context_length: int,
        over_length: OverLength = "truncate",
        text_column: str = "text",
        tokenize: Tokenize | None = None,
        append_eos: bool = True,
        num_proc: int | None = None,
    ) -> TokenDataset:
        """The sequences of `dataset`: its `input_ids` (with `labels` if it has them), else its texts.

        Texts are tokenised in batches once and found in the cache of `datasets` later, whatever the context
        length; several processes should not start that at the same time. `append_eos` ends each text with
        `tokenize.eos_token_id` where the tokenizer has one. `num_proc` processes share the work.
        Raises HydraConfigError for data that cannot be used.
        """
        _check_dataset(dataset)
        if "input_ids" not in dataset.column_names:
            dataset = _tokenize_dataset(dataset, text_column, tokenize, append_eos, num_proc)
        full_lengths, num_label_tokens, max_token_id = _measure(dataset, context_length)
        has_label = num_label_tokens > 0
        is_over = full_lengths > context_length
        if over_length == "refuse" and is_over.any():
            raise HydraConfigError(_describe_over_length(full_lengths, context_length))
        is_kept = has_label & ~is_over if over_length == "drop" else has_label
        if not is_kept.any():
            raise HydraConfigError(_describe_nothing_left(full_lengths, has_label, context_length))
        lengths = np.minimum(full_lengths, context_length)[is_kept]
        is_cut = is_kept & is_over
        return cls(
            lengths=_read_only(lengths),
            num_label_tokens=_read_only(num_label_tokens[is_kept]),
            max_token_id=max_token_id,
            report=DataReport(
                num_rows=len(dataset),
                num_sequences=len(lengths),
                num_tokens=int(lengths.sum()),
                longest_tokens=int(lengths.max()),
                context_length=context_length,
                num_truncated=int(is_cut.sum()),
                num_cut_tokens=int((full_lengths[is_cut] - context_length).sum()),
                num_dropped=int((has_label & ~is_kept).sum()),
                num_without_label=int((~has_label).sum()),
            ),
            _rows=dataset.with_format("numpy", columns=_token_columns(dataset)),
            _row_of=np.flatnonzero(is_kept),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, IntArray]:
        """Sequence `index` as {"input_ids": [length], "labels": [length]}, not shifted."""
        row = self._rows[int(self._row_of[index])]
        length = int(self.lengths[index])
        input_ids = np.asarray(row["input_ids"][:length], dtype=np.int64)
        labels = np.asarray(row.get("labels", row["input_ids"])[:length], dtype=np.int64)
        return {"input_ids": input_ids, "labels": labels}


def _check_dataset(dataset: datasets.Dataset) -> None:
    if isinstance(dataset, datasets.DatasetDict):
        raise HydraConfigError(
            f"the dataset has the splits {', '.join(dataset)}; give one, such as "
            f"dataset[{next(iter(dataset))!r}]"
        )
    if not isinstance(dataset, datasets.Dataset):
        raise HydraConfigError(
            f"the training data is a {type(dataset).__name__}, expected a datasets.Dataset, whose lengths "
            "are known in advance; datasets.Dataset.from_list makes one of a list of examples"
        )
    if not len(dataset):
        raise HydraConfigError("the dataset is empty (0 rows)")


def _tokenize_dataset(
    dataset: datasets.Dataset,
    text_column: str,
    tokenize: Tokenize | None,
    append_eos: bool,
    num_proc: int | None,
) -> datasets.Dataset:
    """`dataset` with `input_ids` in place of all its columns."""
    columns = ", ".join(dataset.column_names)
    if text_column not in dataset.column_names:
        raise HydraConfigError(
            f"the dataset has neither 'input_ids' nor the text column {text_column!r}, but the columns "
            f"{columns}; set hydra.text_column to one of them"
        )
    feature = dataset.features[text_column]
    if not isinstance(feature, datasets.Value) or feature.dtype not in ("string", "large_string"):
        raise HydraConfigError(
            f"column {text_column!r} holds {feature}, expected text; set hydra.text_column to another of the "
            f"columns {columns}"
        )
    if tokenize is None:
        raise HydraConfigError(
            f"column {text_column!r} holds text and there is no tokenizer; set hydra.tokenizer to its path "
            "or hub id, or give a dataset with 'input_ids'"
        )
    return dataset.map(
        _tokenize_batch,
        batched=True,
        input_columns=[text_column],
        remove_columns=dataset.column_names,
        features=datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))}),
        fn_kwargs={
            "tokenize": tokenize,
            "eos_token_id": getattr(tokenize, "eos_token_id", None) if append_eos else None,
        },
        desc="tokenising",
        num_proc=None if num_proc is None else min(num_proc, len(dataset)),
    )


def _tokenize_batch(
    texts: list[str | None], tokenize: Tokenize, eos_token_id: int | None
) -> dict[str, list[list[int]]]:
    batch = [list(ids) for ids in tokenize([text or "" for text in texts])["input_ids"]]
    for ids in batch:
        if eos_token_id is not None and ids[-1:] != [eos_token_id]:
            ids.append(eos_token_id)
    return {"input_ids": batch}


def _token_columns(dataset: datasets.Dataset) -> list[str]:
    return [name for name in ("input_ids", "labels") if name in dataset.column_names]


def _measure(dataset: datasets.Dataset, context_length: int) -> tuple[IntArray, IntArray, int]:
    """Tokens of each row, predicted tokens within its first `context_length`, and the largest token id.

    Reads Arrow, no rows. Raises HydraConfigError for a negative token id.
    """
    lengths, num_label_tokens = [], []
    max_token_id = 0
    first_row = 0
    for table in _read_tables(dataset):
        offsets, ids = _flatten(table["input_ids"], "input_ids")
        if ids.size and ids.min() < 0:
            raise HydraConfigError(f"column 'input_ids' holds {ids.min()}, expected token ids of 0 or more")
        max_token_id = max(max_token_id, int(ids.max(initial=0)))
        _refuse_padding(table, first_row)
        lengths.append(np.diff(offsets))
        num_label_tokens.append(
            _count_labels(table, offsets, context_length, first_row)
            if "labels" in table.column_names
            else np.clip(lengths[-1], 1, context_length) - 1
        )
        first_row += len(table)
    return np.concatenate(lengths), np.concatenate(num_label_tokens), max_token_id


def _read_tables(dataset: datasets.Dataset) -> Iterator[pa.Table]:
    wanted = [name for name in ("input_ids", "labels", "attention_mask") if name in dataset.column_names]
    yield from dataset.with_format("arrow", columns=wanted).iter(batch_size=_ROWS_PER_READ)


def _flatten(column: pa.ChunkedArray, name: str) -> tuple[IntArray, npt.NDArray[Any]]:
    """Offsets [num_rows + 1] and values [offsets[-1]] of a column of lists; a null is an empty list."""
    if not _is_list_of_integers(column.type):
        raise HydraConfigError(f"column {name!r} holds {column.type}, expected lists of token ids")
    sizes = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return offsets, pa.compute.list_flatten(column).to_numpy()


def _is_list_of_integers(arrow_type: pa.DataType) -> bool:
    is_list = pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
    return bool(is_list and pa.types.is_integer(arrow_type.value_type))


def _count_labels(table: pa.Table, offsets: IntArray, context_length: int, first_row: int) -> IntArray:
    """Labels other than -100 at the places 1 up to the context of each row: each is predicted once."""
    label_offsets, labels = _flatten(table["labels"], "labels")
    if (differs := np.flatnonzero(label_offsets != offsets)).size:
        row = int(differs[0]) - 1
        raise HydraConfigError(
            f"row {first_row + row} has {offsets[row + 1] - offsets[row]} input_ids and "
            f"{label_offsets[row + 1] - label_offsets[row]} labels, expected the same number (not shifted)"
        )
    counted_before = np.concatenate([[0], np.cumsum(labels != IGNORED_LABEL)])
    starts, ends = offsets[:-1], offsets[1:]
    last = np.minimum(ends, starts + context_length)
    first = np.minimum(starts + 1, last)
    return np.asarray(counted_before[last] - counted_before[first], dtype=np.int64)


def _refuse_padding(table: pa.Table, first_row: int) -> None:
    """Padding would be trained on and planned for, since rows are packed by their length."""
    if "attention_mask" not in table.column_names:
        return
    offsets, mask = _flatten(table["attention_mask"], "attention_mask")
    if (padded := np.flatnonzero(mask == 0)).size:
        row = int(np.searchsorted(offsets, padded[0], side="right")) - 1
        raise HydraConfigError(
            f"row {first_row + row} of the dataset is padded (attention_mask 0); tokenise with padding=False"
        )


def _describe_over_length(lengths: IntArray, context_length: int) -> str:
    row = int(np.argmax(lengths > context_length))
    return (
        f"row {row} of the dataset has {lengths[row]} tokens, more than hydra.context_length "
        f"{context_length}, as have {int((lengths > context_length).sum())} rows in all; set "
        f'hydra.over_length to "truncate" or "drop", or hydra.context_length to {lengths.max()}'
    )


def _describe_nothing_left(lengths: IntArray, has_label: npt.NDArray[np.bool_], context_length: int) -> str:
    num_over = int((has_label & (lengths > context_length)).sum())
    reasons = [
        f"{int((~has_label).sum())} have no token to predict (fewer than 2 tokens, or labels all -100)"
    ]
    if num_over:
        reasons.append(
            f"{num_over} are longer than hydra.context_length {context_length}; set hydra.over_length to "
            '"truncate"'
        )
    return f"no sequence of the dataset's {len(lengths)} rows is left: {'; '.join(reasons)}"


def _read_only(array: IntArray) -> IntArray:
    array = np.ascontiguousarray(array, dtype=np.int64)
    array.flags.writeable = False
    return array
