"""The JSON files that come with the package: models, profiles, length histograms, DeepSpeed configs."""

from __future__ import annotations

import json
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ds_hydra.errors import HydraConfigError

Kind: TypeAlias = Literal["models", "profiles", "lengths", "deepspeed", "hardware", "cases"]
"""Fields of a `LlamaConfig`; schemas `ds_hydra.profile/1`, `ds_hydra.lengths/1`; DeepSpeed JSON;
schemas `ds_hydra.hardware/1` and `ds_hydra.cases/1`."""


def list_files(kind: Kind) -> tuple[str, ...]:
    """Names of the shipped files of one kind, without `.json`, sorted."""
    return tuple(sorted(path.stem for path in _folder(kind).glob("*.json")))


def find_file(kind: Kind, name_or_path: str) -> Path:
    """The path of a shipped file, or `name_or_path` itself where it ends in `.json`.

    Raises HydraConfigError listing the names for one that is not shipped; a path is not looked at.
    """
    if name_or_path.endswith(".json"):
        return Path(name_or_path)
    names = list_files(kind)
    if name_or_path not in names:
        nearest = get_close_matches(name_or_path, names, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise HydraConfigError(
            f"{name_or_path!r} is not among the {kind} that come with ds_hydra; {hint}There are "
            f"{', '.join(names)}, or give the path of a file that ends in .json"
        )
    return _folder(kind) / f"{name_or_path}.json"


def find_profile(name_or_path: str) -> Path:
    """The profile of that path, whatever it ends in, or the shipped one of that name."""
    path = Path(name_or_path)
    return path if path.is_file() else find_file("profiles", name_or_path)


def load_model_preset(name: str) -> dict[str, Any]:
    """The fields of a preset, for `LlamaConfig(**load_model_preset("llama2_7b"))`.

    7B and 13B are Meta's LLaMA 2. 32B is the model of the Hydraulis paper, with the shape of the authors'
    profile: 60 layers, hidden size 6656, 64 heads. The context of a run is not in them: rotary positions
    have no end, and `max_position_embeddings` is the 4096 of LLaMA 2.
    """
    preset: dict[str, Any] = json.loads(find_file("models", name).read_text(encoding="utf-8"))
    return preset


def _folder(kind: Kind) -> Path:
    return Path(str(files("ds_hydra.configs"))) / kind
