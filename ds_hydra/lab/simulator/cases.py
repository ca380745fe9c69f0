"""Simulated workloads, a model and the lengths of its data on so many devices; and named cases of
them, such as those of the paper, with what was published about them. A model without a profile gets
one by its config.json, on described hardware, without a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from ds_hydra.configs import find_file, list_files
from ds_hydra.configs.files import read_json_object
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import check_context
from ds_hydra.strategy.schemes.scheme import Strategy, parse_strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(World):
    """Simulated workload: a model on so many devices, and the lengths of its data."""

    name: str
    histogram: LengthHistogram
    tokens_per_iteration: int
    strategies: tuple[Strategy, ...] = ()
    """Candidates of ds_hydra, proposed from the histogram where empty."""
    plain_strategies: tuple[Strategy, ...] = ()
    """Strategies that a paper names, of <TP,PP>, for the rows of <TP,PP> alone."""


def check_workload(workload: Workload, *, is_plain: bool = True) -> None:
    """Raise HydraConfigError for a context that nothing fits, or a strategy that has no place in
    the cluster.
    """
    if is_plain:
        check_context(workload)
    if workload.tokens_per_iteration < workload.context_length:
        raise HydraConfigError(
            f"{workload.tokens_per_iteration} tokens per iteration are fewer than one sequence of the context, "
            f"{workload.context_length}; raise --tokens to {workload.context_length} or more"
        )
    for strategy in (*workload.strategies, *workload.plain_strategies):
        if strategy.num_devices > workload.num_devices:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} devices, there are {workload.num_devices}"
            )


def draw_batches(
    histogram: LengthHistogram, tokens_per_iteration: int, count: int, seed: int
) -> tuple[GlobalBatch, ...]:
    """`count` global batches drawn from `histogram`, the same for the same arguments."""
    drawn = histogram.draw_batches(tokens_per_iteration, count, seed)
    return tuple(
        GlobalBatch.of_lengths(lengths.tolist(), number) for number, lengths in enumerate(drawn)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One published figure: its kind, its value as text, and the name of ours
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


@cache
def _read_group(group: str) -> Mapping[str, Mapping[str, Any]]:
    cases: Mapping[str, Mapping[str, Any]] = read_json_object(find_file("cases", group))["cases"]
    return cases


def _read_case(name: str, document: Mapping[str, Any]) -> Case:
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
