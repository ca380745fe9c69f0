"""`ds-hydra lengths`: the token-length histogram of a dataset."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_hydra.commands import common
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import Progress, is_terminal

if TYPE_CHECKING:
    from ds_hydra.sampler.data.dataset import Tokenize
    from ds_hydra.strategy.proposal.histogram import LengthHistogram


def lengths(
    dataset: Annotated[
        str, typer.Option(help="A data file, a folder of them, a saved dataset, or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Where to write ds_hydra.lengths/1.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Path or hub id; not needed for data with input_ids.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Split of a dataset that has several; files have one.")
    ] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of a hub dataset.")] = None,
    text_column: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    streaming: Annotated[
        bool, typer.Option(help="Read row by row, download and store nothing.")
    ] = False,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows to read at most, with --streaming.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Count the token lengths of a dataset, as training counts them but without a longest one.

    Data at rest is tokenised once, into the cache that training uses.

    Example: ds-hydra lengths --dataset data/ --tokenizer meta-llama/Llama-2-7b-hf --out
    lengths.json
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with common.errors_to_stderr():
        common.check_folder(out)
        if max_rows is not None and not streaming:
            raise HydraConfigError("--max-rows needs --streaming")
        tokenize = _load_tokenizer(tokenizer)
        from ds_hydra.sampler.data.length_stats import load_data, measure_dataset, measure_stream

        data = load_data(dataset, split=split, config=config, streaming=streaming)
        given: dict[str, Any] = {"name": dataset, "text_column": text_column}
        if streaming:
            with Progress(desc="counting", unit="row", total=max_rows) as bar:

                def show(num_rows: int, num_tokens: int) -> None:
                    bar.update(num_rows - bar.n)
                    bar.set_postfix_str(f"{num_tokens:,} tokens")

                histogram = measure_stream(
                    data, tokenize, max_rows=max_rows, progress=show, **given
                )
        else:
            started = time.monotonic()

            def tell_time(_show: common.Show) -> str:
                return f"{len(data):,} rows, {time.monotonic() - started:.0f} s so far"

            # A terminal has the bars of datasets
            inside = None if is_terminal(sys.stderr) else tell_time
            with common.progress_bar("tokenising and counting", "dataset", inside):
                histogram = measure_dataset(data, tokenize, **given)
        source = f"{dataset}, tokenizer {tokenizer or 'none, input_ids as stored'}"
        document = histogram.to_json(source=source)
        common.write_document(document, out)
    common.print_json(document) if as_json else print(_describe(histogram))


def _load_tokenizer(name: str | None) -> Tokenize | None:
    """Load a `tokenizer.json`, or what `AutoTokenizer` finds."""
    if name is None:
        return None
    from ds_hydra.sampler.data.length_stats import is_hub_name

    if not Path(name).exists() and not is_hub_name(name):
        raise HydraConfigError(f"the tokenizer {name!r} does not exist; expected a file or folder")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if name.lower().endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=name)
        tokenizer: Tokenize = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises nothing more specific
        raise HydraConfigError(f"cannot load the tokenizer {name!r}: {error}") from error
    return tokenizer


def _describe(histogram: LengthHistogram) -> str:
    quantiles = ", ".join(
        f"{share:.0%} {histogram.quantile(share):,}" for share in (0.5, 0.9, 0.99, 1.0)
    )
    return (
        f"{histogram.num_sequences:,} sequences, {histogram.num_tokens:,} tokens, mean "
        f"{histogram.num_tokens / histogram.num_sequences:,.0f}; up to: {quantiles}"
    )
