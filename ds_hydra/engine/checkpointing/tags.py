"""Names of checkpoints: which may be used, and which one is meant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_hydra.errors import CheckpointError

REPLACED_PREFIX = ".replaced-"
"""Before the tag of a checkpoint whose successor is being put in its place."""

_NO_TAGS = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
"""Files that lie beside the checkpoints."""

_MAX_TAG_BYTES = 200


def _check_tag(tag: str) -> None:
    """Raise CheckpointError unless `tag` is the name of one folder."""
    is_name = isinstance(tag, str) and tag and not tag.startswith(".")
    if not is_name or tag != os.path.basename(tag) or "\0" in tag:
        raise CheckpointError(
            f"the checkpoint tag is {tag!r}, expected the name of a folder without {os.sep!r} and not starting "
            "with a dot, such as 'global_step100'"
        )


def check_new_tag(tag: str) -> None:
    """Raise CheckpointError unless `tag` is the name of a folder that `latest` can name."""
    _check_tag(tag)
    if tag in _NO_TAGS:
        raise CheckpointError(
            f"the checkpoint tag is {tag!r}, which is a file beside the checkpoints; pass another tag, such as "
            f"'{tag.split('.')[0]}_1'"
        )
    if not tag.isprintable() or " " in tag or len(tag.encode()) > _MAX_TAG_BYTES:
        raise CheckpointError(
            f"the checkpoint tag is {tag!r}, expected up to {_MAX_TAG_BYTES} bytes without blanks, line ends and "
            "control characters, such as 'global_step100'"
        )


def check_folder_name(argument: str, folder: Any) -> None:
    """Raise CheckpointError unless `folder`, given as `argument`, names a folder."""
    name = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise CheckpointError(
            f"{argument} is {folder!r}, expected the path of a folder, such as 'checkpoints' ('.' is the working "
            "directory)"
        )


def resolve_tag(load_dir: Path, tag: str) -> str:
    """The folder in `load_dir` with the checkpoint `tag`: that name, or the place of one being
    replaced.
    """
    _check_tag(tag)
    replaced = f"{REPLACED_PREFIX}{tag}"
    return replaced if not (load_dir / tag).exists() and (load_dir / replaced).exists() else tag


def find_tag(load_dir: Path, name: str) -> str | None:
    """The tag in `load_dir/latest` (or another `name`); None where there is no such file."""
    try:
        with (load_dir / name).open("rb") as file:
            tag = file.read(4096).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {load_dir / name}: {error.strerror}") from error
    _check_tag(tag)
    return tag
