"""Common parts of the sub-commands: options, errors without traceback, output of documents."""

from __future__ import annotations

import codecs
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from ds_hydra.configs.files import (
    MAX_DEVICES,
    MAX_LENGTH_TOKENS,
    MAX_TOKENS_PER_ITERATION,
    json_text,
    list_files,
    write_whole,
)
from ds_hydra.errors import HydraConfigError, HydraError
from ds_hydra.progress import Progress, is_terminal

if TYPE_CHECKING:
    from ds_hydra.strategy import Profile

MODEL_HELP = f"A shipped preset ({', '.join(list_files('models'))}), a folder with config.json, that file, or a hub id."
HARDWARE = ("--hardware", "--device")
"""One option of all commands, by both names that it had."""
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
NumDevices = Annotated[int, typer.Option(min=1, max=MAX_DEVICES, help="Devices of the cluster.")]
ContextLength = Annotated[
    int, typer.Option(min=2, max=MAX_LENGTH_TOKENS, help="Longest sequence in tokens.")
]
TokensPerIteration = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_TOKENS_PER_ITERATION,
        help="Tokens of one iteration; 100K for every 64 devices if not given.",
    ),
]
MAX_BATCHES = 1 << 20
"""Global batches, samples, rows or repeats that an option may ask for."""
LocalRank = Annotated[int | None, typer.Option("--local_rank", hidden=True)]
"""Option that launchers add."""
_HEAVY = (
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "matplotlib",
)
"""Packages that only some commands import."""
DType = Literal["bf16", "fp16", "fp32"]


READS_LIKE_DEEPSPEED = (
    "for DeepSpeed itself reads its part of the configuration, and the model's layers are made by the classes of "
    "transformers, without weights"
)
"""Reason that commands without ranks and without a GPU need torch."""
WITHOUT_TORCH = "plan, lengths, propose, fit, simulate, search, report"


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    """Return the characters that an encoding lacks in ASCII: ± as +-, others escaped."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].replace("±", "+-")
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


SPELL_OUT = "ds_hydra.spell_out"
"""Error handler of streams for results, whose encoding may be ASCII (`PYTHONIOENCODING`, an old
locale).
"""
codecs.register_error(SPELL_OUT, _spell_out)


@contextmanager
def errors_to_stderr(why_torch: str = "") -> Iterator[None]:
    """End the command with the message of a ds_hydra error, of a path that cannot be used, or of a
    package that is missing, without a traceback. `why_torch`: what of the command needs torch.
    """
    try:
        yield
    except HydraError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _HEAVY:
            raise
        others = f"; without torch there are {WITHOUT_TORCH}" if why_torch else ""
        print(
            f"error: this command needs {missing}{why_torch and f', {why_torch}'}; {missing} is not installed: pip "
            f"install {missing}, or `pip install ds_hydra` for all that it depends on{others}",
            file=sys.stderr,
        )
        raise typer.Exit(1) from error
    except OSError as error:  # of a path that was given: too long a name, no permission
        if error.filename is None:
            raise
        print(f"error: cannot use {error.filename!s:.300}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(1) from error


def print_json(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print `document` as one JSON text; ends the command where a number of it is none."""
    with errors_to_stderr():
        print(json_text(document), file=file, flush=True)


def log(text: str) -> None:
    """A line for the user on stderr; stdout belongs to results."""
    print(text, file=sys.stderr)


def hide_torchao() -> None:
    """Silence what torchao logs while transformers imports it: it has nothing to do with the
    commands.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)


def say_loading() -> None:
    """Print a line before the imports that take seconds, where somebody looks on."""
    if is_terminal(sys.stderr):
        log("loading torch, DeepSpeed and transformers")


Show = Callable[[int, int], None]
"""Is told how many steps are done, and of how many."""
_FIRST_AFTER_S, _LINE_EVERY_S = 1.0, 10.0
"""Seconds until the first line that tells how far a step is, and from one to the next, where output
goes to a file.
"""


@contextmanager
def progress_bar(
    what: str, unit: str, inside: Callable[[Show], str] | None = None
) -> Iterator[Show]:
    """A bar on stderr; yields what is told (done, total). `inside`, which may tell it, too, says
    how far the current step is: each second where somebody looks on, else in a line after
    `_FIRST_AFTER_S` and every `_LINE_EVERY_S`.
    """
    with Progress(desc=what, unit=unit) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        with _refreshing(bar, inside and functools.partial(inside, show)):
            yield show


@contextmanager
def _refreshing(bar: Any, inside: Callable[[], str] | None) -> Iterator[None]:
    if inside is None:
        yield
        return
    is_over, is_looked_at = threading.Event(), is_terminal(sys.stderr)

    def refresh() -> None:
        wait_s = _FIRST_AFTER_S
        while not is_over.wait(wait_s):
            if is_looked_at:
                bar.set_postfix_str(inside())
            else:
                wait_s = _LINE_EVERY_S
                log(f"{bar.desc.removesuffix(': ')}: {inside()}")

    thread = threading.Thread(target=refresh, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def write_document(document: Mapping[str, Any], out: Path | None) -> None:
    """Write `document` to the file `out`, if there is one, and say so; a file that exists is
    replaced as a whole. Raises HydraConfigError where it cannot be written.
    """
    if out is None:
        return
    try:
        write_whole(out, [json_text(document) + "\n"])
    except OSError as error:
        raise HydraConfigError(f"cannot write {out}: {error.strerror}") from error
    log(f"wrote {out}")


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """DeepSpeed logs to stdout, and so do the compilers it starts; stdout belongs to the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def check_folder(out: Path | None) -> None:
    """Raise HydraConfigError where the file `--out`, if there is one, has no folder to be in."""
    if out is not None and not out.absolute().parent.is_dir():
        raise HydraConfigError(
            f"--out is {out}, whose folder does not exist; create it or name another one"
        )
    if out is not None and out.is_dir():
        raise HydraConfigError(f"--out is {out}, which is a folder; name a file")


def leave_ranks() -> int:
    """This rank's number, after leaving the ranks that a command has joined; a group that is left
    open is reported at exit. Collective over all ranks.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return 0
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return rank


def log_size(profile: Profile) -> None:
    """Say how large the model of `profile` is, where it says its sizes."""
    from ds_hydra.strategy.cost_models.decoder import find_size

    if size := find_size(profile):
        log(f"model: {profile.document['model']['name']}, {size}")
