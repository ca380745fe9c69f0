"""What is wrong in a "hydra" section, said so that the user knows what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic_core import ErrorDetails

SMALLEST_SECTION = '"hydra": {"context_length": 4096, "tokens_per_iteration": 65536}'
"""What every error shows that has to say how a section looks."""

Location: TypeAlias = tuple[int | str, ...]
Sections: TypeAlias = Mapping[Location, type[BaseModel]]
"""The models of the section and of those in it, by where they are."""

_REPLACED = {
    "repull_layers": "layers stream instead: say so for each scheme in hydra.strategies, as in <1,1;stream>",
    "gradient_dtype": 'DeepSpeed\'s own says it, outside of "hydra": "communication_data_type": "fp32" or "bf16" '
    "(as without it, where training is bf16)",
}
"""Keys of earlier versions, and what to write instead."""

_RENAMED: Mapping[Location, Mapping[str, str]] = {("planner", "space"): {"wide": "full"}}
"""Values of earlier versions, by key, and what they are called now."""

AUTO_REFUSED = (
    'is "auto", which the Trainer fills in for DeepSpeed\'s keys only; leave the key out to get its default, '
    "or write the value"
)


def find_auto(section: Mapping[Any, Any], location: Location = ()) -> Iterator[Location]:
    """Where a value is "auto"."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from find_auto(value, (*location, key))
        elif value == "auto":
            yield (*location, key)


def explain(details: ErrorDetails, sections: Sections) -> str:
    """What is wrong at one location, and what would be right."""
    location = details["loc"]
    if details["type"] == "extra_forbidden":
        return _explain_unknown(location, sections)
    if details["type"] == "missing":
        return f"is missing and has no default; the smallest section is {SMALLEST_SECTION}"
    if details["type"] == "value_error":
        return f"is {show(details['input'])}: {details['ctx']['error']}"
    if details["type"] == "model_type":
        return f"is {show(details['input'])}: it should be an object"
    renamed = _RENAMED.get(tuple(location), {}).get(
        details["input"] if isinstance(details["input"], str) else ""
    )
    if renamed:
        return f"is {show(details['input'])}: it is called {show(renamed)} now"
    wanted = re.sub("^(Input|Value|Tuple|List|String) should", "it should", details["msg"])
    return f"is {show(details['input'])}: {wanted}"


def _explain_unknown(location: Location, sections: Sections) -> str:
    """The nearest known key, or where the key belongs, or all keys of that section."""
    *path, key = location
    if key in _REPLACED:
        return f"is no longer a key; {_REPLACED[key]}"
    known = list(sections[tuple(path)].model_fields)
    nearest = get_close_matches(str(key), known, n=1, cutoff=0.6)
    if nearest:
        return f"is not a key; did you mean {_dotted((*path, nearest[0]))}?"
    for home, section in sections.items():
        if str(key) in section.model_fields:
            return f"is not a key here; write {_dotted((*home, key))}"
    return f"is not a key; {_dotted(path)} has {', '.join(known)}"


def _dotted(location: Location | list[int | str]) -> str:
    return ".".join(["hydra", *map(str, location)])


def show(value: object) -> str:
    """The value as JSON, shortened to a line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def list_problems(problems: Mapping[Location, str]) -> str:
    """All problems as the text of one error."""
    lines = [f"{_dotted(location)} {text}" for location, text in problems.items()]
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f'the "hydra" section has {len(lines)} problems:', *lines])
