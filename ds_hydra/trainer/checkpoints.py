"""A checkpoint folder of the Trainer that is either whole or not there under its name.

While it is written, `checkpoint-3` is called `.saving-checkpoint-3`, as in
engine/checkpointing/files.py.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from ds_hydra.engine.checkpointing.files import do_together, put_in_place, restore_replaced
from ds_hydra.engine.ranks.agreement import raise_together


@contextlib.contextmanager
def written_aside(folder: Path, *, commits: bool, device: torch.device) -> Iterator[Path]:
    """The folder to write to in place of `folder`, which it becomes when all ranks have written.

    Collective over all ranks; those that `commits` make and rename it: one on each file system.
    Errors of writing are raised on all ranks as CheckpointError, and then nothing has changed.
    """
    aside = folder.with_name(f".saving-{folder.name}")
    do_together(lambda: _make_anew(aside) if commits else None, device)
    error: Exception | None = None
    try:
        yield aside
    except Exception as caught:
        error = caught
    try:
        raise_together(error, device)
        do_together(lambda: put_in_place(aside, folder) if commits else None, device)
    except Exception:
        if commits:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def restore_checkpoints(output_dir: Path, *, commits: bool, device: torch.device) -> None:
    """Put back what a crash has left between the two renames of a checkpoint that was written
    again. Collective over all ranks.
    """
    do_together(lambda: restore_replaced(output_dir) if commits else None, device)


def _make_anew(aside: Path) -> None:
    aside.parent.mkdir(parents=True, exist_ok=True)
    restore_replaced(aside.parent)
    if aside.exists():  # what a crash left
        shutil.rmtree(aside)
    aside.mkdir()
