"""JSON files: how they are read and what may be in them, and those that come with the package:
models, profiles, length histograms, DeepSpeed configs.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.resources import files
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from ds_hydra.errors import HydraConfigError

Kind: TypeAlias = Literal["models", "profiles", "lengths", "deepspeed", "hardware", "cases"]
"""Fields of a `LlamaConfig`; schemas `ds_hydra.profile/1`, `ds_hydra.lengths/1`; DeepSpeed JSON;
schemas `ds_hydra.hardware/1` and `ds_hydra.cases/1`."""

MAX_FILE_BYTES = 1 << 28
"""Size up to which a JSON file is read; the largest shipped one has less than 1 MB."""

LARGEST = 10**15
"""Beyond this a count or a time is damaged (10^15 ms are 30,000 years); below, counts are exact as
floats and squares finite."""

MAX_DEVICES = 1 << 18
"""Ranks that a strategy may name: far above any cluster, and small enough to list."""

MAX_LENGTH_TOKENS = (1 << 31) - 1
"""Longest sequence: positions are 32 bit in kernels, and l^2 stays exact in 64."""

MAX_TOKENS_PER_ITERATION = 1 << 28
"""Largest global batch: several times any that is published, and still to be listed."""

MAX_DEPTH = 100
"""Objects and lists in one another: more than any document of ours, of DeepSpeed or of Hugging Face
has, and few enough for Python to copy and write."""

Pairs: TypeAlias = Callable[[list[tuple[str, Any]]], Any]

_SURROGATE = re.compile("[\ud800-\udfff]")
_SUSPECT = re.compile(r"NaN|Infinity|\d{300}|[eE]\+?0*\d{3}|\\u(?:0000|[dD][89a-fA-F])")
"""Pattern of JSON texts whose numbers or text `plain_json` may refuse."""


def parse_json(text: str | bytes, source: str, object_pairs_hook: Pairs | None = None) -> Any:
    """The JSON value in `text`. Raises HydraConfigError naming `source`, also for too deep nesting
    and for all that `plain_json` refuses.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(decoded, object_pairs_hook=object_pairs_hook)
    except HydraConfigError as error:
        raise HydraConfigError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise HydraConfigError(f"{source} is not JSON: {error}") from error
    return plain_json(value, source) if _SUSPECT.search(decoded) else value


def plain_json(value: Any, source: str, place: tuple[str, ...] = ()) -> Any:
    """A copy of `value` in the types of JSON: NumPy's numbers become Python's, tuples lists.

    Raises HydraConfigError naming `source` and the place for what JSON or its readers do not have:
    other types, keys that are not text, numbers that no float holds, half of a UTF-16 pair, NUL,
    and more than `MAX_DEPTH` objects or lists in one another.
    """

    def refuse(what: str) -> NoReturn:
        raise HydraConfigError(f"{'.'.join((source, *place))[:300]} {what}")

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)  # of an Enum, what it stands for
        if "\0" in text or (not text.isascii() and _SURROGATE.search(text)):
            refuse(f"is {ascii(text)[:80]}, which holds NUL or half of a character; write it anew")
        return text
    if isinstance(value, Real):
        number = int(value) if isinstance(value, Integral) else float(value)
        try:
            if isfinite(number):
                return number
        except OverflowError:  # an integer that no float holds
            pass
        shown = repr(number) if isinstance(number, float) else f"of {number.bit_length()} bits"
        refuse(f"is {shown}, expected a number from -1.7e308 to 1.7e308")
    if len(place) == MAX_DEPTH:
        refuse(f"is nested too deeply: {MAX_DEPTH} objects or lists in one another are the most")
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                refuse(f"has a key of type {type(key).__name__}; keys are text, write it in quotes")
            plain_json(key, f"{source}: a key", place)
        return {key: plain_json(inner, source, (*place, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner, source, (*place, str(i))) for i, inner in enumerate(value)]
    kind = type(value)
    refuse(
        f"is of type {kind.__module__}.{kind.__qualname__}, which JSON does not have; write a number, text, true, "
        "false, null, a list or an object"
    )


def read_json(path: str | Path, object_pairs_hook: Pairs | None = None) -> Any:
    """The JSON value in `path`. Raises HydraConfigError naming the file and the error."""
    try:
        if (size := Path(path).stat().st_size) > MAX_FILE_BYTES:
            raise HydraConfigError(f"{path} has {size} bytes, expected at most {MAX_FILE_BYTES}")
        text = Path(path).read_bytes()
    except OSError as error:
        raise HydraConfigError(f"cannot read {path!s:.300}: {error.strerror}") from error
    except ValueError as error:  # NUL in the name
        raise HydraConfigError(f"cannot read {str(path)[:300]!r}: {error}") from error
    return parse_json(text, str(path), object_pairs_hook)


def read_json_object(path: str | Path, object_pairs_hook: Pairs | None = None) -> dict[str, Any]:
    """Read a file that holds an object; see `read_json`."""
    return check_object(read_json(path, object_pairs_hook), str(path))


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | HydraConfigError]]:
    """Number and object of each line of `path`, or the line's error: damage stays in its line.

    Half a line at the end, as a killed process leaves it, is left out. Raises OSError.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                yield number, check_object(parse_json(line, place), place)
            except HydraConfigError as error:
                if line.endswith(b"\n"):
                    yield number, error


def json_text(document: Any) -> str:
    """`document` as JSON; raises HydraConfigError naming a number that is none."""
    try:
        return json.dumps(document, allow_nan=False)
    except ValueError:
        plain_json(document, "the result")
        raise


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write a file that readers find as it was or as it is to be; a link's is the one that it leads
    to. Pipes and devices are written to.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        return
    path = path.resolve()
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_object(value: Any, source: str) -> dict[str, Any]:
    """`value`, if it is a JSON object."""
    if not isinstance(value, dict):
        raise HydraConfigError(f"{source} holds a JSON {type(value).__name__}, expected an object")
    return value


@contextmanager
def reading(
    document: Mapping[str, Any], schema: str, source: str, hint: str = ""
) -> Iterator[None]:
    """Read `document` inside. Whatever is wrong with it, its schema first, becomes a
    HydraConfigError that names `source`.
    """
    if document.get("schema") != schema:
        raise HydraConfigError(
            f"{source}: schema is {document.get('schema')!r}, expected {schema!r}"
        )
    try:
        yield
    except HydraConfigError as error:
        raise HydraConfigError(f"{source}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise HydraConfigError(
            f"{source}: not a valid {schema} document: {error!r}{hint}"
        ) from error


def read_count(
    document: Mapping[str, Any], key: str, *, least: int = 0, most: int = LARGEST
) -> int:
    """The whole number at `key`; raises KeyError, or HydraConfigError for anything else."""
    return check_count(document[key], key, least=least, most=most)


def check_count(value: Any, name: str, *, least: int = 0, most: int = LARGEST) -> int:
    """`value`, if it is a whole number in these bounds."""
    if type(value) is not int or not least <= value <= most:
        raise HydraConfigError(
            f"{name} is {value!r:.80}, expected a whole number from {least} to {most}"
        )
    return value


def read_counts(
    document: Mapping[str, Any], key: str, *, least: int = 0, most: int = LARGEST
) -> tuple[int, ...]:
    """The list of whole numbers at `key`; raises KeyError, or HydraConfigError for anything
    else.
    """
    return check_counts(read_list(document, key), key, least=least, most=most)


def check_counts(values: Any, name: str, *, least: int = 0, most: int = LARGEST) -> tuple[int, ...]:
    """`values`, if they are a list of whole numbers in these bounds."""
    if not isinstance(values, list):
        raise HydraConfigError(f"{name} is {values!r:.80}, expected a list")
    if set(map(type, values)) - {int} or (
        values and not least <= min(values) <= max(values) <= most
    ):
        for value in values:
            check_count(value, f"one of {name}", least=least, most=most)
    return tuple(values)


def read_number(
    document: Mapping[str, Any], key: str, *, least: float = -LARGEST, most: float = LARGEST
) -> float:
    """The number at `key`; raises KeyError, or HydraConfigError for anything else."""
    return check_number(document[key], key, least=least, most=most)


def check_number(value: Any, name: str, *, least: float = 0, most: float = LARGEST) -> float:
    """`value`, if it is a number in these bounds, which NaN is never."""
    if type(value) not in (int, float) or not least <= value <= most:
        raise HydraConfigError(
            f"{name} is {value!r:.80}, expected a number from {least:g} to {most:g}"
        )
    return float(value)


def read_object(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object at `key`; raises KeyError, or HydraConfigError for anything else."""
    return check_object(document[key], key)


def read_time(document: Mapping[str, Any], key: str) -> float:
    """The time in ms at `key`; raises KeyError, or HydraConfigError for anything else."""
    return read_number(document, key, least=0)


def read_text(document: Mapping[str, Any], key: str) -> str:
    """The text at `key`; raises KeyError, or HydraConfigError for anything else."""
    value = document[key]
    if not isinstance(value, str):
        raise HydraConfigError(f"{key} is {value!r:.80}, expected text")
    return value


def read_list(document: Mapping[str, Any], key: str) -> list[Any]:
    """The list at `key`; raises KeyError, or HydraConfigError for anything else."""
    value = document[key]
    if not isinstance(value, list):
        raise HydraConfigError(f"{key} is {value!r:.80}, expected a list")
    return value


def list_files(kind: Kind) -> tuple[str, ...]:
    """Names of the shipped files of one kind, without `.json`, sorted."""
    return tuple(sorted(path.stem for path in _folder(kind).glob("*.json")))


def find_file(kind: Kind, name_or_path: str) -> Path:
    """The path of a shipped file, or `name_or_path` itself where it ends in `.json`.

    Raises HydraConfigError listing the names for one that is not shipped; a path is not looked at.
    """
    if name_or_path.lower().endswith(".json"):
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
    # `Path.is_file` raises for names that no file can have
    is_file = os.path.isfile(name_or_path)
    return Path(name_or_path) if is_file else find_file("profiles", name_or_path)


def load_model_preset(name: str) -> dict[str, Any]:
    """The fields of a preset, for `LlamaConfig(**load_model_preset("llama2_7b"))`.

    7B and 13B are Meta's LLaMA 2. 32B is the model of the Hydraulis paper, with the shape of the
    authors' profile: 60 layers, hidden size 6656, 64 heads. The context of a run is not in them:
    rotary positions have no end, and `max_position_embeddings` is the 4096 of LLaMA 2.
    """
    preset: dict[str, Any] = json.loads(find_file("models", name).read_text(encoding="utf-8"))
    return preset


def _folder(kind: Kind) -> Path:
    return Path(str(files("ds_hydra.configs"))) / kind
