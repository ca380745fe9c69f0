"""Named workloads, such as those of the paper, with what was published about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ds_hydra.configs import find_file, list_files
from ds_hydra.configs.files import read_json_object, reading
from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.estimate import estimate_from_config
from ds_hydra.lab.simulator.workload import Workload
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.scheme import Strategy, parse_strategies

CASES_SCHEMA = "ds_hydra.cases/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One published figure: what it is, its value as text, and the name of ours
    (`report.metrics`).
    """

    what: str
    paper: str
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One named workload and the figures published for it; `figure` is where they stand."""

    name: str
    figure: str
    workload: Workload
    expected: tuple[Expected, ...]


def list_cases() -> tuple[str, ...]:
    """Names of all shipped cases, `paper/commoncrawl-32b-64gpu-f2` and so on."""
    return tuple(f"{group}/{name}" for group in list_files("cases") for name in _read_group(group))


def load_case(name: str) -> Case:
    """The shipped case `name`; raises HydraConfigError with the nearest names for one that is not
    known.
    """
    names = list_cases()
    if name not in names:
        nearest = get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(nearest)}? " if nearest else ""
        raise HydraConfigError(
            f"case {name!r} is not known; {hint}ds-hydra simulate --list-cases shows all {len(names)}"
        )
    group, short = name.split("/", 1)
    return _read_case(name, _read_group(group)[short])


def _read_group(group: str) -> Mapping[str, Mapping[str, Any]]:
    document = read_json_object(find_file("cases", group))
    with reading(document, CASES_SCHEMA, f"cases {group!r}"):
        cases: Mapping[str, Mapping[str, Any]] = document["cases"]
    return cases


_FIELDS = (
    "figure", "histogram", "num_devices", "context_length", "tokens_per_iteration", "expected",
)  # fmt: skip


def _read_case(name: str, document: Mapping[str, Any]) -> Case:
    missing = [field for field in _FIELDS if field not in document]
    if "profile" not in document:
        missing += [field for field in ("model", "hardware") if field not in document]
    if missing:
        raise HydraConfigError(
            f"case {name!r} lacks {', '.join(missing)}"
            + ("; a case has a profile, or a model and hardware" if "model" in missing else "")
        )
    given = document.get("given")
    histogram = LengthHistogram.load(find_file("lengths", document["histogram"]))
    context_length = document["context_length"]
    return Case(
        name=name,
        figure=document["figure"],
        workload=Workload(
            name=name,
            costs=Costs(_profile(document)),
            histogram=histogram.limit(context_length, document.get("over_length", "truncate")),
            num_devices=document["num_devices"],
            context_length=context_length,
            tokens_per_iteration=document["tokens_per_iteration"],
            given=Strategy.parse(given) if given else None,
            plain_strategies=parse_strategies(document.get("plain_strategies", ())),
        ),
        expected=tuple(Expected(**expected) for expected in document["expected"]),
    )


def _profile(document: Mapping[str, Any]) -> Profile:
    """The published one, or a roofline's."""
    if "profile" in document:
        return Profile.load(find_file("profiles", document["profile"]))
    estimated, _ = estimate_from_config(
        document["model"],
        document["hardware"],
        document["num_devices"],
        document["context_length"],
    )
    return estimated
