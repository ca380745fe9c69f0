"""Command line of ds_hydra, without torch and without a GPU."""

from __future__ import annotations

import io
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from ds_hydra.commands.check import check
from ds_hydra.commands.common import (
    SPELL_OUT,
    AsJson,
    errors_to_stderr,
    hide_torchao,
    print_json,
)
from ds_hydra.commands.doctor import doctor
from ds_hydra.commands.init import init
from ds_hydra.commands.lengths import lengths
from ds_hydra.commands.models import HardwareOption, ModelOption, ProfileOption, load_costs
from ds_hydra.commands.profile import profile
from ds_hydra.commands.propose import propose
from ds_hydra.commands.report import report
from ds_hydra.configs.hydra_config import MAX_SEED
from ds_hydra.errors import HydraConfigError
from ds_hydra.version import __version__

if TYPE_CHECKING:
    from ds_hydra.sampler.plan import IterationPlan
    from ds_hydra.strategy.cost_models.costs import Costs
    from ds_hydra.strategy.schemes.scheme import Strategy


class _Commands(TyperGroup):
    """Commands whose words may begin with ~, also behind `--option=`, where shells leave it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` with the home folder in place of ~."""
        return super().parse_args(ctx, [_expand_home(word) for word in args])


def _expand_home(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + os.path.expanduser(value)


app = typer.Typer(
    cls=_Commands,
    help="Heterogeneous parallel training of Hugging Face causal language models on DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"ds_hydra {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Plan, check, measure and simulate training with ds_hydra."""
    hide_torchao()


@app.command()
def plan(
    strategies: Annotated[Path, typer.Option(help="Candidate strategies, ds_hydra.strategies/1.")],
    lengths: Annotated[
        Path, typer.Option(help="JSON list of the lengths of one global batch in tokens.")
    ],
    profile: ProfileOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    objective: Annotated[
        Literal["exact", "closed_form"],
        typer.Option(help="1F1B recurrence over micro-batches, or (PP-1+V) x the slowest."),
    ] = "exact",
    dispatch: Annotated[
        Literal["greedy", "ideal"],
        typer.Option(help="Alg. 1, or the integer program of Eq. (3) first, to compare."),
    ] = "greedy",
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the dispatch trials.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Plan one global batch: strategy, dispatch and packing.

    Strategies are a file that `ds-hydra propose` writes; batch.json is a list as [4000, 311, 77].

    Example: ds-hydra plan --profile a800_llama2_7b --strategies strategies.json --lengths
    batch.json

    Without a profile: ds-hydra plan --model llama2_7b --hardware h100 --strategies strategies.json
    --lengths batch.json
    """
    with errors_to_stderr():
        candidates, num_devices = _read_strategies(strategies)
        batch = _read_lengths(lengths)
        costs = load_costs(profile, model, hardware, num_devices, max(batch))
        settings = {"objective": objective, "dispatch": dispatch, "seed": seed}
        result, planning_ms = _plan(costs, candidates, num_devices, batch, settings)
    if as_json:
        print_json(_plan_document(result, planning_ms))
    else:
        print(result)
        print(
            f"planned in {planning_ms:.1f} ms; slowest pipeline {result.imbalance:.1%} above the fastest"
        )


def _plan(
    costs: Costs,
    strategies: tuple[Strategy, ...],
    num_devices: int,
    lengths: list[int],
    settings: dict[str, Any],
) -> tuple[IterationPlan, float]:
    """The plan, and the time that planning took without loading compiled code."""
    from ds_hydra.sampler.plan import GlobalBatch
    from ds_hydra.sampler.planner.iteration import plan_iteration
    from ds_hydra.sampler.planner.planner_settings import PlannerSettings
    from ds_hydra.sampler.warm_up import warm_up
    from ds_hydra.strategy.schemes.scheme import schemes_of

    profile = costs.extended(schemes_of(strategies))
    warm_up()
    start = time.perf_counter()
    result = plan_iteration(
        GlobalBatch.of_lengths(lengths),
        strategies=strategies,
        profile=profile,
        num_devices=num_devices,
        settings=PlannerSettings(**settings),
    )
    return result, (time.perf_counter() - start) * 1e3


def _read_strategies(path: Path) -> tuple[tuple[Strategy, ...], int]:
    """The candidate strategies and the number of devices in a `ds_hydra.strategies/1` file."""
    from ds_hydra.configs.files import read_json_object
    from ds_hydra.strategy.schemes.enumeration import strategies_from_json

    document = read_json_object(path)
    strategies = strategies_from_json(document, source=str(path))
    num_devices = document.get("num_devices")
    if not isinstance(num_devices, int) or num_devices < 1:
        raise HydraConfigError(f"{path}: num_devices is {num_devices!r}, expected 1 or more")
    return strategies, num_devices


def _read_lengths(path: Path) -> list[int]:
    """The JSON list of token lengths in `path`."""
    from ds_hydra.configs.files import MAX_LENGTH_TOKENS, read_json

    lengths: Any = read_json(path)
    if not isinstance(lengths, list) or not lengths:
        raise HydraConfigError(
            f"{path}: expected a JSON list of lengths of one global batch in tokens, e.g. [1024, 77, 311]; "
            "a histogram of a dataset goes to `ds-hydra propose`"
        )
    for position, length in enumerate(lengths):
        if type(length) is not int or not 1 <= length <= MAX_LENGTH_TOKENS:
            raise HydraConfigError(
                f"{path}: length {position} is {length!r:.80}, expected an integer from 1 to "
                f"{MAX_LENGTH_TOKENS}"
            )
    return lengths


def _plan_document(result: IterationPlan, planning_ms: float) -> dict[str, Any]:
    """Document of `ds-hydra plan --json`; an index is a position in the given list of lengths."""
    document = result.to_json()
    return {
        "strategy": document["strategy"],
        "makespan_ms": document["makespan_ms"],
        "lower_bound_ms": document["lower_bound_ms"],
        "imbalance": result.imbalance,
        "planning_ms": planning_ms,
        "pipelines": document["pipelines"],
    }


COMMANDS = (check, doctor, init, lengths, profile, propose, report)
# By name, because the core imports nothing of the lab.
for command in (*COMMANDS, *import_module("ds_hydra.lab.commands").COMMANDS):
    app.command()(command)


def main() -> None:
    """Entry point of `ds-hydra`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=SPELL_OUT)
    app()


if __name__ == "__main__":
    main()
