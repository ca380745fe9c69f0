"""Training data: token lengths known before anything is loaded, rows read on demand.

The only file of the planner's packages that reads data (through `datasets`).
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets.fingerprint import Hasher

from ds_hydra.errors import HydraConfigError, HydraDataError
from ds_hydra.progress import no_bars_in_files
from ds_hydra.sampler.data.examples import (
    IGNORED_LABEL,
    MASKS,
    TRIVIAL_COLUMNS,
    check_columns,
    find_unread,
    hint_for,
    to_example,
)

IntArray: TypeAlias = npt.NDArray[np.int64]
SizeArray: TypeAlias = npt.NDArray[np.int32]
"""One number for each of many millions of sequences."""
OverLength: TypeAlias = Literal["truncate", "drop", "refuse"]
Tokenize: TypeAlias = Callable[[list[str]], Mapping[str, Sequence[Sequence[int]]]]
"""A list of texts to {"input_ids": one list of token ids per text}, as a tokenizer of transformers
does.
"""

_TOKEN_COLUMNS = ("input_ids", "labels")
_LISTS = (datasets.List, datasets.LargeList)
_ROWS_PER_READ = 10_000
_TOKENS_PER_READ = 1 << 21
"""Bounds the memory of a read where rows are long: some 16 bytes a token."""
_TEXT_BYTES_PER_BATCH = 1 << 24
_TEXTS_PER_BATCH = 1000
_CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Counts of rows and tokens that were read, cut or left out."""

    num_rows: int
    num_sequences: int
    num_tokens: int
    longest_tokens: int
    context_length: int
    num_truncated: int
    num_cut_tokens: int
    num_dropped: int
    num_without_label: int
    num_padded_labels: int = 0
    """Labels where `attention_mask` is 0, which go with the padding."""
    unread: tuple[str, ...] = ()
    """Columns that nothing reads."""

    @property
    def is_partial(self) -> bool:
        """Whether something was cut or left out."""
        return bool(
            self.num_truncated
            or self.num_dropped
            or self.num_without_label
            or self.num_padded_labels
        )

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
            lines.append(
                f"{self.num_dropped:,} dropped, longer than {self.context_length:,} tokens"
            )
        if self.num_without_label:
            lines.append(f"{self.num_without_label:,} left out, without a token to predict")
        if self.num_padded_labels:
            lines.append(
                f"{self.num_padded_labels:,} labels other than -100 left out with the padding, where attention_mask is "
                "0; what shall be predicted, such as the end of a text, belongs where it is 1"
            )
        if self.unread:
            lines.append(f"columns that nothing reads: {', '.join(self.unread)}")
        return "\n".join(lines)


_NUM_DIGESTED = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDataset:
    """Sequences of at most `context_length` tokens. `lengths[i]` belongs to `self[i]`.

    A sequence of l tokens has l - 1 positions that predict a token, those whose next label is not
    -100; `num_label_tokens[i]` counts them, and a sequence without any is left out.
    """

    lengths: SizeArray
    num_label_tokens: SizeArray
    max_token_id: int
    """The largest of all token ids and labels."""
    report: DataReport
    _rows: datasets.Dataset
    _row_of: Sequence[int] | SizeArray

    @classmethod
    def from_dataset(
        cls,
        dataset: datasets.Dataset,
        *,
        context_length: int,
        over_length: OverLength = "truncate",
        text_column: str = "text",
        tokenize: Tokenize | None = None,
        every_row: bool = False,
    ) -> TokenDataset:
        """The sequences of `dataset`: its `input_ids`, `labels` and masks as `to_example` reads
        them, else its texts.

        Texts are tokenised in batches once and found in the cache of `datasets` later, whatever the
        context length; several processes should not start that at the same time. Each text ends
        with `tokenize.eos_token_id` where the tokenizer has one. With `every_row` none is cut or
        left out, for who wants an answer for each. Raises HydraConfigError for data that cannot be
        used.
        """
        if every_row:
            context_length, over_length = np.iinfo(np.int32).max, "truncate"
        _check_dataset(dataset)
        dataset = select_shown(dataset)
        unread = find_unread(dataset.column_names, text_column)
        check_dataset_columns(dataset)
        num_padded_labels = 0
        if "input_ids" not in dataset.column_names:
            dataset = _tokenize_dataset(dataset, text_column, tokenize)
        elif not _is_plain(dataset):
            given, dataset = dataset, _convert_dataset(dataset)
            num_padded_labels = _count_padded_labels(given)
        full_lengths, num_label_tokens, max_token_id = _measure(dataset, context_length)
        has_label = num_label_tokens > 0
        is_over = full_lengths > context_length
        if over_length == "refuse" and is_over.any():
            raise HydraConfigError(_describe_over_length(full_lengths, context_length))
        is_kept = has_label & ~is_over if over_length == "drop" else has_label | every_row
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
                num_without_label=int((~(has_label | every_row)).sum()),
                num_padded_labels=num_padded_labels,
                unread=tuple(unread),
            ),
            _rows=dataset.with_format("numpy", columns=_present(dataset, _TOKEN_COLUMNS)),
            _row_of=(
                range(len(dataset)) if is_kept.all() else np.flatnonzero(is_kept).astype(np.int32)
            ),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def check_vocabulary(self, num_inputs: int, num_labels: int) -> None:
        """Raise HydraConfigError naming the first row with a token id or label outside of the rows
        of the embedding and of the head.
        """
        if self.max_token_id < min(num_inputs, num_labels):
            return
        sizes = {"input_ids": num_inputs, "labels": num_labels}
        if "labels" not in self._rows.column_names:
            sizes["input_ids"] = min(num_inputs, num_labels)  # they are predicted, too
        first_row = 0
        for table in _read_tables(self._rows, _TOKEN_COLUMNS):
            _check_token_ids(table, first_row, sizes)
            first_row += len(table)

    def __getitem__(self, index: int) -> dict[str, IntArray]:
        """Sequence `index` as {"input_ids": [length], "labels": [length]}, not shifted."""
        row = self._rows[int(self._row_of[index])]
        length = int(self.lengths[index])
        input_ids = np.asarray(row["input_ids"][:length], dtype=np.int64)
        labels = np.asarray(row.get("labels", row["input_ids"])[:length], dtype=np.int64)
        return {"input_ids": input_ids, "labels": labels}

    def digest_tokens(self) -> str:
        """Digest of a sample of sequences, the first and the last among them. It differs where
        ranks, or a run and its checkpoint, have sequences of equal lengths in another order.
        """
        digest = hashlib.blake2b(digest_size=8)
        some = np.linspace(0, len(self.lengths) - 1, _NUM_DIGESTED, dtype=np.int64)
        for index in np.unique(some).tolist():
            for tokens in self[index].values():
                digest.update(tokens.astype("<i8").tobytes())
        return digest.hexdigest()


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
    check_stored(dataset, "the dataset")


def select_shown(dataset: datasets.Dataset) -> datasets.Dataset:
    """`dataset` with the columns that its rows show, where set_format() or with_format() hides
    some.
    """
    shown = dataset.format["columns"]
    if dataset.format["output_all_columns"] or set(shown) == set(dataset.column_names):
        return dataset
    return dataset.select_columns(shown)


def check_stored(dataset: datasets.Dataset, what: str) -> None:
    """Raise HydraConfigError for rows that are computed when they are read, so that nobody knows
    their lengths before.
    """
    if dataset.format["type"] == "custom":
        raise HydraConfigError(
            f"{what} computes its rows when they are read (set_transform or with_transform), but global batches are "
            "planned by lengths that are known before; store what it computes: "
            "dataset.with_format(None).map(transform, batched=True)"
        )


def check_dataset_columns(dataset: datasets.Dataset | datasets.IterableDataset) -> None:
    """Raise HydraConfigError naming a column that would change training."""
    features = dataset.features
    check_columns(features, lambda name: _is_list_of_numbers(features[name]), "the dataset")


def _is_list_of_numbers(feature: Any) -> bool:
    while isinstance(feature, _LISTS):
        feature = feature.feature
        if isinstance(feature, datasets.Value):
            return bool(feature.dtype.startswith(("int", "uint", "float", "bool")))
    return False


@no_bars_in_files()
def _tokenize_dataset(
    dataset: datasets.Dataset, text_column: str, tokenize: Tokenize | None
) -> datasets.Dataset:
    """`dataset` with `input_ids` in place of all its columns."""
    columns = ", ".join(dataset.column_names)
    if text_column not in dataset.column_names:
        raise HydraConfigError(
            f"the dataset has neither 'input_ids' nor the text column {text_column!r}, but the columns "
            f"{columns}; {hint_for(dataset.column_names, 'set hydra.text_column to one of them')}"
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
    per_text = max(1, dataset.data.nbytes // max(1, len(dataset.data)))
    batch_size = min(_TEXTS_PER_BATCH, max(1, _TEXT_BYTES_PER_BATCH // per_text))
    try:
        return _map_rows(
            dataset,
            tokenize_texts,
            datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))}),
            batched=True,
            batch_size=batch_size,
            writer_batch_size=batch_size,
            input_columns=[text_column],
            fn_kwargs={
                "tokenize": tokenize,
                "eos_token_id": getattr(tokenize, "eos_token_id", None),
            },
            desc="tokenising",
        )
    except UnicodeDecodeError as error:  # pyarrow does not look at what a JSON file holds
        raise HydraDataError(
            f"column {text_column!r} holds bytes that are no UTF-8 ({error.reason} {error.object[error.start]:#x}); "
            "save the texts as UTF-8"
        ) from error


def _map_rows(
    dataset: datasets.Dataset,
    function: Callable[..., Any],
    features: datasets.Features,
    **options: Any,
) -> datasets.Dataset:
    """Return the results of `function` on the rows of `dataset`, in place of all their columns.

    It is computed once and found in the cache of `datasets` later, which is beside the dataset's
    files, or in the user's own cache where nobody may write there (a mount that is read-only).
    `datasets` knows a function of a package by its name: one whose results change gets a new one.
    Raises HydraDataError where there is no folder to write to.
    """

    def run(**more: Any) -> datasets.Dataset:
        return dataset.map(
            function,
            remove_columns=dataset.column_names,
            features=features,
            **options,
            **more,
        )

    try:
        return run()
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or not dataset.cache_files:
            raise
        beside = Path(dataset.cache_files[0]["filename"]).parent
    key = Hasher.hash((dataset._fingerprint, function, options))
    folder = Path(datasets.config.HF_DATASETS_CACHE, "ds_hydra")
    try:
        return run(cache_file_name=str(folder / f"cache-{key}.arrow"))
    except OSError as error:
        raise HydraDataError(
            f"the tokens of the dataset can be written neither beside it, into {beside}, nor into {folder}: "
            f"{error.strerror}; set HF_DATASETS_CACHE to a folder that this user may write to"
        ) from error


def tokenize_texts(
    texts: list[str | None], tokenize: Tokenize, eos_token_id: int | None
) -> dict[str, list[list[int]]]:
    """Return {"input_ids": the tokens of each text}, which end with `eos_token_id` if given and
    have one begin, whether the tokenizer puts it there or the text has it (one that a chat template
    has rendered).
    """
    batch = []
    for ids in tokenize([text or "" for text in texts])["input_ids"]:
        tokens = without_second_begin(list(ids), tokenize)
        if eos_token_id is not None and tokens[-1:] != [eos_token_id]:
            tokens.append(eos_token_id)
        batch.append(tokens)
    return {"input_ids": batch}


def without_second_begin(tokens: list[int], tokenize: Callable[..., Any]) -> list[int]:
    """Return the tokens of a text, without the begin that `tokenize` put before the text's own."""
    if len(tokens) < 2 or tokens[0] != tokens[1]:
        return tokens
    # What stands before any text, and is not the end of an empty one
    empty, letter = tokenize(["", "a"])["input_ids"]
    is_begin = list(empty[:1]) == list(letter[:1]) == tokens[:1]
    return tokens[1:] if is_begin else tokens


def _is_plain(dataset: datasets.Dataset) -> bool:
    """Whether `to_example` would give each row's `input_ids` and `labels` as they are stored.

    Of data at rest that is seen in Arrow, without converting all its rows.
    """
    if any(_is_nested(dataset.features[name]) for name in _present(dataset, _TOKEN_COLUMNS)):
        return False
    if not _present(dataset, MASKS + TRIVIAL_COLUMNS):
        return True
    return not _present(dataset, MASKS) and all(
        _is_trivial(table) for table in _read_tables(dataset, ("input_ids", *TRIVIAL_COLUMNS))
    )


def _is_nested(feature: Any) -> bool:
    """Whether each row is a list of lists, as [1, length] is."""
    return isinstance(feature, datasets.Array2D) or (
        isinstance(feature, _LISTS) and isinstance(feature.feature, _LISTS)
    )


def _is_trivial(table: pa.Table) -> bool:
    """Whether nothing of `table` is padded, and positions and token types are the usual ones."""
    offsets, _ = _flatten(table["input_ids"], "input_ids")
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    usual = {
        "attention_mask": np.ones_like(starts),
        "position_ids": np.arange(len(starts)) - starts,
        "token_type_ids": np.zeros_like(starts),
    }
    for name in _present(table, TRIVIAL_COLUMNS):
        column_offsets, values = _flatten(table[name], name)
        if not np.array_equal(column_offsets, offsets) or not np.array_equal(values, usual[name]):
            return False
    return True


@no_bars_in_files()
def _convert_dataset(dataset: datasets.Dataset) -> datasets.Dataset:
    """`dataset` with the results of `to_example` on each row in place of all its columns."""
    tokens = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features({"input_ids": tokens, "labels": tokens})
    return _map_rows(dataset, _convert_row, features, with_indices=True, desc="labels")


def _convert_row(row: Mapping[str, Any], index: int) -> dict[str, IntArray]:
    input_ids, labels = to_example(row, f"row {index} of the dataset")
    return {"input_ids": input_ids, "labels": labels}


def _count_padded_labels(dataset: datasets.Dataset) -> int:
    """Labels other than -100 where `attention_mask` is 0, of rows that were converted."""
    names = ("labels", "attention_mask")
    present = _present(dataset, names)
    if len(present) < 2 or any(_is_nested(dataset.features[name]) for name in present):
        return 0
    count = 0
    for table in _read_tables(dataset, names):
        labels, mask = (_flatten(table[name], name)[1] for name in names)
        count += int(((labels != IGNORED_LABEL) & (mask == 0)).sum())
    return count


def _measure(dataset: datasets.Dataset, context_length: int) -> tuple[SizeArray, SizeArray, int]:
    """Tokens of each row, predicted tokens within its first `context_length`, and the largest token
    id or label.

    Reads Arrow, no rows. Raises HydraConfigError for a negative one.
    """
    lengths, num_label_tokens = [], []
    max_token_id = 0
    first_row = 0
    for table in _read_tables(dataset, _TOKEN_COLUMNS):
        max_token_id = max(max_token_id, _check_token_ids(table, first_row))
        offsets, _ = _flatten(table["input_ids"], "input_ids")
        lengths.append(np.diff(offsets).astype(np.int32))
        num_label_tokens.append(
            _count_labels(table, offsets, context_length, first_row)
            if "labels" in table.column_names
            else np.clip(lengths[-1], 1, context_length) - 1
        )
        first_row += len(table)
    return np.concatenate(lengths), np.concatenate(num_label_tokens), max_token_id


def _check_token_ids(
    table: pa.Table, first_row: int, sizes: Mapping[str, int] | None = None
) -> int:
    """The largest token id or label. Raises HydraConfigError naming the first row that holds one
    outside of its column's vocabulary.
    """
    largest = 0
    for name in _present(table, _TOKEN_COLUMNS):
        offsets, ids = _flatten(table[name], name)
        if not ids.size:
            continue
        vocab_size = 2**63 if sizes is None else sizes[name]
        # Data without -100 that are right need no temporaries.
        if ids.min() < 0 or ids.max() >= vocab_size:
            is_wrong = (ids < 0) | (ids >= vocab_size)
            if name == "labels":
                is_wrong &= ids != IGNORED_LABEL
            if is_wrong.any():
                place = int(np.argmax(is_wrong))
                row = first_row + int(np.searchsorted(offsets, place, side="right")) - 1
                raise HydraConfigError(describe_outside(row, name, int(ids[place]), vocab_size))
        largest = max(largest, int(ids.max()))
    return largest


def describe_outside(
    row: int, name: str, token_id: int, vocab_size: int, what: str = "dataset"
) -> str:
    """Text of the error that `row` of the data has a token id, or label, outside of the
    vocabulary.
    """
    ignored = f", or {IGNORED_LABEL} where nothing is predicted" if name == "labels" else ""
    if token_id < 0:
        return (
            f"row {row} of the {what} has {token_id} in its {name}, expected token ids of 0 or "
            f"more{ignored}"
        )
    return (
        f"row {row} of the {what} has {token_id} in its {name}, the model's vocabulary has "
        f"{vocab_size} tokens; use the model's tokenizer (hydra.tokenizer) or call "
        "model.resize_token_embeddings"
    )


def _present(source: datasets.Dataset | pa.Table, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in source.column_names]


def _read_tables(dataset: datasets.Dataset, names: Sequence[str]) -> Iterator[pa.Table]:
    """Read these columns, at most about `_TOKENS_PER_READ` tokens of them at once, or one row."""
    columns = _present(dataset, names)
    rows = dataset.with_format("arrow", columns=columns)
    begin, num_rows = 0, min(_ROWS_PER_READ, 64)
    while begin < len(rows):
        table = rows[begin : begin + num_rows]
        begin += len(table)
        ends = np.cumsum(_sizes(table[columns[0]], columns[0]), dtype=np.int64)
        first = 0
        while first < len(table):
            before = ends[first - 1] if first else 0
            end = int(np.searchsorted(ends, before + _TOKENS_PER_READ, side="right"))
            yield table.slice(first, max(end - first, 1))
            first = max(end, first + 1)
        # Selected or shuffled rows are copied here: few are read where they are long
        mean = max(1, int(ends[-1]) // len(table))
        num_rows = min(_ROWS_PER_READ, max(1, _TOKENS_PER_READ // mean))


def _sizes(column: pa.ChunkedArray, name: str) -> IntArray:
    """Length of each list of `column`; 0 where there is none."""
    if not _is_list_of_integers(column.type, or_bools=name not in _TOKEN_COLUMNS):
        raise HydraConfigError(f"column {name!r} holds {column.type}, expected lists of integers")
    sizes: IntArray = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy()
    return sizes


def _flatten(column: pa.ChunkedArray, name: str) -> tuple[IntArray, npt.NDArray[Any]]:
    """Offsets [num_rows + 1] and values [offsets[-1]] of a column of lists; a null is an empty
    list.
    """
    sizes = _sizes(column, name)
    if pa.types.is_fixed_size_list(column.type):  # which has places for nulls, too
        column = column.cast(pa.large_list(column.type.value_type))
        sizes = _sizes(column, name)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    values = pa.compute.list_flatten(column)
    if values.null_count:
        raise HydraConfigError(f"column {name!r} holds nulls within its lists, expected integers")
    return offsets, values.to_numpy()


def _is_list_of_integers(arrow_type: pa.DataType, *, or_bools: bool) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(arrow_type) for is_kind in kinds):
        return False
    value_type = arrow_type.value_type
    return bool(pa.types.is_integer(value_type) or (or_bools and pa.types.is_boolean(value_type)))


def _count_labels(
    table: pa.Table, offsets: IntArray, context_length: int, first_row: int
) -> SizeArray:
    """Labels other than -100 at the places 1 up to the context of each row: each is predicted
    once.
    """
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
    return np.asarray(counted_before[last] - counted_before[first], dtype=np.int32)


def _describe_over_length(lengths: SizeArray, context_length: int) -> str:
    row = int(np.argmax(lengths > context_length))
    return (
        f"row {row} of the dataset has {lengths[row]} tokens, more than hydra.context_length "
        f"{context_length}, as have {int((lengths > context_length).sum())} rows in all; set "
        f'hydra.over_length to "truncate" or "drop", or hydra.context_length to {lengths.max()}'
    )


def _describe_nothing_left(
    lengths: SizeArray, has_label: npt.NDArray[np.bool_], context_length: int
) -> str:
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


def _read_only(array: SizeArray) -> SizeArray:
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array
