"""What the sub-commands share: errors without traceback, documents as files and on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer

from ds_hydra.errors import HydraConfigError, HydraError


@contextmanager
def errors_to_stderr() -> Iterator[None]:
    """End the command with the message of a ds_hydra error, without a traceback."""
    try:
        yield
    except HydraError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def log(text: str) -> None:
    """A line for the user on stderr; stdout belongs to results."""
    print(text, file=sys.stderr)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside `path` is written: say so afterwards, or raise HydraConfigError where it cannot be."""
    try:
        yield
    except OSError as error:
        raise HydraConfigError(f"cannot write {path}: {error.strerror}") from error
    log(f"wrote {path}")


def write_document(document: Mapping[str, Any], out: Path | None) -> None:
    """Write `document` to the file `out`, if there is one; a file that exists is replaced as a
    whole.
    """
    if out is not None:
        write_documents([document], out)


def write_documents(documents: Iterable[Mapping[str, Any]], out: Path) -> None:
    """Write `documents` to the file `out`, one a line; a file that exists is replaced as a
    whole.
    """
    partial = out.with_name(out.name + ".writing")
    with writing(out):
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(document) + "\n" for document in documents)
        partial.replace(out)


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
    """Raise HydraConfigError where the file `out`, if there is one, has no folder to be in."""
    if out is not None and not out.absolute().parent.is_dir():
        raise HydraConfigError(
            f"--out is {out}, whose folder does not exist; create it or name another one"
        )


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
