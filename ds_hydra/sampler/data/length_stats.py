"""Token lengths of a dataset as a histogram: of data at rest through the training cache, or of a
stream.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import no_bars_in_files
from ds_hydra.sampler.data.dataset import TokenDataset, Tokenize
from ds_hydra.sampler.data.examples import hint_for
from ds_hydra.sampler.data.stream import RowReading
from ds_hydra.strategy.proposal.histogram import LengthHistogram

logger = logging.getLogger(__name__)

_NO_LIMIT = 2**31 - 1
"""A context that cuts nothing: a histogram holds untruncated lengths."""
_BATCH_ROWS = 1000
_BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".txt": "text",
    ".csv": "csv",
}
_HOLD_DATA_ALONE = (".parquet", ".arrow", ".jsonl")
"""Endings of files beside which others of a folder are descriptions of them."""
_PACKAGES = {"type zstd not supported": "zstandard", "type lz4 not supported": "lz4"}
"""Missing packages, by the errors that `datasets` raises without them."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")


@no_bars_in_files()
def load_data(
    name: str, *, split: str, config: str | None = None, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """The dataset called `name`: a saved `datasets` folder, a data file, a folder of them, or a hub
    id.
    """
    path = Path(name)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return _load_saved(path, split, streaming)
    files, suffix = _data_files(path)
    if files:
        if split != "train":
            raise HydraConfigError(
                f"{path} are files, which have one split, train, not {split!r}; leave out --split, or name the "
                "files of that split"
            )
        builder = _BUILDERS[suffix]
        document = {"sample_by": "document"} if builder == "text" else {}
        paths = [str(file) for file in files]
        if builder == "json":
            _check_first_rows(files)
        try:
            return datasets.load_dataset(
                builder, data_files=paths, split=split, streaming=streaming, **document
            )
        except Exception as error:  # of `datasets`, or of what it reads files with
            raise _unreadable(path, builder, error) from error
    if path.exists() or not is_hub_name(name):
        what = "holds no file" if path.exists() else "does not exist; expected a file or folder"
        raise HydraConfigError(
            f"{path} {what} that ends in {', '.join(_BUILDERS)}, or in one of them and {', '.join(_COMPRESSED)}"
        )
    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # the hub client raises its own kinds, which change between versions
        raise HydraConfigError(
            f"{name!r} is neither a path nor a readable dataset of the hub: {error}"
        ) from error


def is_hub_name(name: str) -> bool:
    """Whether the Hugging Face hub could have it: "name", "owner/name" or a URL.

    >>> is_hub_name("allenai/c4"), is_hub_name("texts/"), is_hub_name("../texts")
    (True, False, False)
    """
    return "://" in name or re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _load_saved(
    path: Path, split: str, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise HydraConfigError(f"{path} has the splits {', '.join(saved)}, not {split!r}")
        saved = saved[split]
    return saved.to_iterable_dataset() if streaming else saved


def _check_first_rows(files: Sequence[Path]) -> None:
    """Raise HydraConfigError for a file that begins with null, at which pyarrow 26 crashes the
    process.
    """
    for file in files:
        try:
            with file.open("rb") as opened:
                begin = opened.read(4096).lstrip()
        except OSError as error:
            raise HydraConfigError(f"cannot read {file}: {error.strerror}") from error
        if begin.startswith(b"null"):
            raise HydraConfigError(f"{file}: row 0 is null, expected an object; remove it")


def _unreadable(name: str | Path, builder: str, error: Exception) -> HydraConfigError:
    # `datasets` says what is wrong in the cause alone
    lines = (str(error.__cause__ or "").strip() or str(error).strip()).splitlines() or [
        "it holds no rows"
    ]
    needed = next((package for what, package in _PACKAGES.items() if what in lines[0]), "")
    hint = f"; it needs a package: pip install {needed}" if needed else ""
    return HydraConfigError(f"{name} cannot be read as {builder}: {lines[0]}{hint}")


def _data_files(path: Path) -> tuple[list[Path], str]:
    """The data files of one kind, sorted, and how they end without compression: the kind with most
    files where a folder has several, but no .json, .txt or .csv beside data of other kinds. Hidden
    files are left out.
    """
    try:
        if path.is_file():
            files = [path]
        else:
            found = (file for file in path.rglob("*") if file.is_file())
            files = sorted(file for file in found if not _is_hidden(file.relative_to(path)))
    except OSError as error:
        raise HydraConfigError(f"cannot read {error.filename}: {error.strerror}") from error
    of_kind: dict[str, list[Path]] = {}
    for file in files:
        if (suffix := _suffix(file)) in _BUILDERS:
            of_kind.setdefault(suffix, []).append(file)
    if not of_kind:
        return [], ""
    kinds = [kind for kind in of_kind if kind in _HOLD_DATA_ALONE] or list(of_kind)
    chosen = max(kinds, key=lambda kind: len(of_kind[kind]))
    left_out = [f"{len(n)} of {kind}" for kind, n in of_kind.items() if kind != chosen]
    if left_out:
        logger.warning(
            f"{path}: the {len(of_kind[chosen])} files of {chosen} are read, and {', '.join(left_out)} are left out"
        )
    return of_kind[chosen], chosen


def _suffix(file: Path) -> str:
    """Return the ending of `file`, in lower case and without that of a compression."""
    name = file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file
    return name.suffix.lower()


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def measure_dataset(
    dataset: datasets.Dataset, tokenize: Any, *, name: str, text_column: str = "text"
) -> LengthHistogram:
    """Lengths of data at rest. Tokenises as training does, so that either finds the other's
    cache.
    """
    _check_source(dataset.column_names, text_column, tokenize)
    data = TokenDataset.from_dataset(
        dataset, context_length=_NO_LIMIT, text_column=text_column, tokenize=tokenize
    )
    lengths, counts = np.unique(data.lengths, return_counts=True)
    return LengthHistogram.from_counts(dict(zip(lengths.tolist(), counts.tolist())), name=name)


def measure_stream(
    stream: datasets.IterableDataset,
    tokenize: Tokenize | None,
    *,
    name: str,
    text_column: str = "text",
    max_rows: int | None = None,
    progress: Callable[[int, int], None],
) -> LengthHistogram:
    """Lengths of the first `max_rows` rows of a stream, read as training reads them; `progress` is
    told the rows and the tokens counted so far.
    """
    reading = RowReading(
        context_length=_NO_LIMIT,
        over_length="truncate",
        text_column=text_column,
        tokenize=tokenize,
        num_inputs=_NO_LIMIT,
        num_labels=_NO_LIMIT,
    )
    num_rows, counts = 0, Counter[int]()
    rows = islice(iter(stream), max_rows)
    while True:
        batch: list[dict[str, Any]] = []
        try:
            batch.extend(islice(rows, _BATCH_ROWS))
        except Exception as error:  # of `datasets`, or of what it reads files with
            what = f"a stream after row {num_rows + len(batch)}"
            raise _unreadable(name, what, error) from error
        if not batch:
            return LengthHistogram.from_counts(counts, name=name)
        _check_source(list(batch[0]), text_column, tokenize)
        counts.update(len(input_ids) for input_ids, _ in reading.read(batch, num_rows))
        num_rows += len(batch)
        progress(num_rows, sum(length * count for length, count in counts.items()))


def _check_source(columns: Sequence[str], text_column: str, tokenize: Any) -> None:
    """Raise HydraConfigError, with the command's options, where nothing of `columns` gives tokens
    or only a tokenizer would.
    """
    if "input_ids" in columns:
        return
    if text_column not in columns:
        raise HydraConfigError(
            f"the dataset has neither 'input_ids' nor the text column {text_column!r}, but the columns "
            f"{', '.join(columns)}; {hint_for(columns, 'name one of them (--text-column)')}"
        )
    if tokenize is None:
        raise HydraConfigError(
            f"column {text_column!r} holds text and there is no tokenizer; name one (--tokenizer)"
        )
