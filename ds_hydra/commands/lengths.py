"""`ds-hydra lengths`: the token-length histogram of a dataset, and a plot of it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ds_hydra.commands import common
from ds_hydra.configs.files import MAX_LENGTH_TOKENS
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import Progress, is_terminal

if TYPE_CHECKING:
    from ds_hydra.sampler.data.dataset import Tokenize
    from ds_hydra.strategy.proposal.histogram import LengthHistogram


OverLength = Literal["keep", "truncate", "drop", "split"]


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
    append_eos: Annotated[
        bool, typer.Option(help="Count the end of text that training appends.")
    ] = True,
    num_proc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that tokenise; fast tokenizers use all cores in one, which is the default.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, max=MAX_LENGTH_TOKENS, help="Context that --over-length refers to."),
    ] = None,
    over_length: Annotated[
        OverLength, typer.Option(help="What becomes of sequences longer than the context.")
    ] = "keep",
    plot: Annotated[
        Path | None, typer.Option(help="PNG of the histogram; beside --out if not given.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Count the token lengths of a dataset.

    Data at rest is tokenised once, into the cache that training uses. A stream that was interrupted
    is continued when the command is run again.

    Example: ds-hydra lengths --dataset data/ --tokenizer meta-llama/Llama-2-7b-hf --out
    lengths.json
    """
    # All cores inside a batch, unless processes share the batches.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if num_proc is None else "false")
    with common.errors_to_stderr():
        common.check_folder(out)
        if over_length != "keep" and context is None:
            raise HydraConfigError(
                f"--over-length {over_length} needs --context, e.g. --context 32768"
            )
        if max_rows is not None and not streaming:
            raise HydraConfigError("--max-rows needs --streaming")
        if num_proc is not None and streaming:
            raise HydraConfigError("--num-proc is for data at rest; leave it out with --streaming")
        tokenize = _load_tokenizer(tokenizer)
        from ds_hydra.sampler.data.length_stats import load_data, measure_dataset

        data = load_data(dataset, split=split, config=config, streaming=streaming)
        given: dict[str, Any] = {
            "name": dataset, "text_column": text_column, "append_eos": append_eos,
        }  # fmt: skip
        if streaming:
            given |= {"part": f"{config} {split}", "max_rows": max_rows}
            histogram = _measure_stream(
                data, tokenize, resume_file=out.with_name(out.name + ".partial"), **given
            )
        else:
            started = time.monotonic()

            def tell_time(_show: common.Show) -> str:
                return f"{len(data):,} rows, {time.monotonic() - started:.0f} s so far"

            # A terminal has the bars of datasets
            inside = None if is_terminal(sys.stderr) else tell_time
            with common.progress_bar("tokenising and counting", "dataset", inside):
                histogram = measure_dataset(data, tokenize, num_proc=num_proc, **given)
        document = _document(histogram, dataset, tokenizer, context, over_length)
        common.write_document(document, out)
        from ds_hydra.report.plots import plot_lengths

        image = plot or out.with_suffix(".png")
        with common.writing(image):
            plot_lengths(histogram, image)
    common.print_json(document) if as_json else print(_describe(histogram, document))


def _load_tokenizer(name: str | None) -> Tokenize | None:
    """Load a `tokenizer.json` without transformers, else by `AutoTokenizer`."""
    if name is None:
        return None
    from ds_hydra.sampler.data.length_stats import is_hub_name

    if not Path(name).exists() and not is_hub_name(name):
        raise HydraConfigError(f"the tokenizer {name!r} does not exist; expected a file or folder")
    try:
        if name.lower().endswith(".json"):
            from tokenizers import Tokenizer

            from ds_hydra.sampler.data.dataset import RawTokenize

            return RawTokenize(Tokenizer.from_file(name))
        from transformers import AutoTokenizer

        tokenizer: Tokenize = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises nothing more specific
        raise HydraConfigError(f"cannot load the tokenizer {name!r}: {error}") from error
    return tokenizer


def _measure_stream(*given: Any, max_rows: int | None, **options: Any) -> LengthHistogram:
    """`measure_stream` with a bar."""
    from ds_hydra.sampler.data.length_stats import measure_stream

    with Progress(desc="counting", unit="row", total=max_rows) as bar:

        def show(num_rows: int, num_tokens: int) -> None:
            bar.update(num_rows - bar.n)
            bar.set_postfix_str(f"{num_tokens:,} tokens")

        return measure_stream(*given, max_rows=max_rows, progress=show, **options)


def _document(
    histogram: LengthHistogram,
    dataset: str,
    tokenizer: str | None,
    context: int | None,
    over_length: OverLength,
) -> dict[str, Any]:
    more: dict[str, Any] = {
        "source": f"{dataset}, tokenizer {tokenizer or 'none, input_ids as stored'}"
    }
    limited = histogram
    if context is not None:
        num_over, beyond = histogram.count_over(context)
        more |= {"context_length": context, "over_length": over_length}
        more |= {"num_over_length": num_over, "num_tokens_beyond_context": beyond}
        if over_length != "keep":
            limited = histogram.limit(context, over_length)
    return limited.to_json(**more)


def _describe(histogram: LengthHistogram, document: dict[str, Any]) -> str:
    quantiles = ", ".join(
        f"{share:.0%} {histogram.quantile(share):,}" for share in (0.5, 0.9, 0.99, 1.0)
    )
    lines = [
        f"{histogram.num_sequences:,} sequences, {histogram.num_tokens:,} tokens, mean "
        f"{histogram.num_tokens / histogram.num_sequences:,.0f}; up to: {quantiles}"
    ]
    if "context_length" in document:
        lines.append(
            f"{document['num_over_length']:,} longer than {document['context_length']:,} tokens, "
            f"{document['num_tokens_beyond_context']:,} tokens beyond: {document['over_length']}"
        )
    return "\n".join(lines)
