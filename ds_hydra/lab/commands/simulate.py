"""`ds-hydra simulate`: how long training would take, with ds_hydra and without, on any cluster.

`describe_simulation` is its `ds_hydra.simulation/1` document as text.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ds_hydra.commands.common import (
    HARDWARE,
    MAX_BATCHES,
    AsJson,
    check_folder,
    errors_to_stderr,
    log,
    log_size,
    print_json,
    progress_bar,
    write_document,
)
from ds_hydra.commands.models import ModelOption, ask_engine, estimate_profile
from ds_hydra.configs.files import MAX_DEVICES, MAX_LENGTH_TOKENS, MAX_TOKENS_PER_ITERATION
from ds_hydra.configs.hydra_config import MAX_SEED
from ds_hydra.errors import HydraConfigError

if TYPE_CHECKING:
    from ds_hydra.lab.simulator.cases import Workload
    from ds_hydra.lab.simulator.results import Comparison
    from ds_hydra.lab.simulator.systems import Settings
    from ds_hydra.strategy.profiles.profile import Profile

DEFAULT_CONTEXT, DEFAULT_HISTOGRAM = 32768, "commoncrawl"
"""Context and histogram of `--model` where none are given."""
DEFAULT_ITERATIONS = 40


SimulatedSpace = Literal["full", "plain"]


def simulate(
    case: Annotated[
        str | None, typer.Option(help="A shipped case, e.g. paper/commoncrawl-32b-64gpu-f2.")
    ] = None,
    list_cases: Annotated[
        bool, typer.Option("--list-cases", help="Print the names of all cases.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="A ds_hydra.profile/1 file, or the name of a shipped one.")
    ] = None,
    model: ModelOption = None,
    histogram: Annotated[
        str | None,
        typer.Option(
            help="A ds_hydra.lengths/1 file, or the name of a shipped one; commoncrawl with --model if not given."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_DEVICES, help="With --model, nodes in place of --devices."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=MAX_DEVICES, help="Devices of the cluster.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, max=MAX_LENGTH_TOKENS, help="Longest sequence in tokens.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TOKENS_PER_ITERATION,
            help="Tokens of one iteration; 100K for every 64 devices if not given.",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_BATCHES,
            help="Global batches to simulate; 40 if not given, fewer above 200K tokens, whose means are as good.",
        ),
    ] = None,
    strategies: Annotated[
        Path | None, typer.Option(help="Candidates, ds_hydra.strategies/1; proposed if not given.")
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help="What to compare with, as megatron,flexsp; all if not given, none with ds_hydra alone."
        ),
    ] = None,
    space: Annotated[
        SimulatedSpace,
        typer.Option(
            help="Schemes of ds_hydra: <TP,PP>, SP, CP, gathered and checkpointed layers, or <TP,PP> alone."
        ),
    ] = "full",
    hardware: Annotated[
        str | None,
        typer.Option(
            *HARDWARE,
            help="A ds_hydra.hardware/1 file or shipped name; the profile's if not given.",
        ),
    ] = None,
    overlap: Annotated[bool, typer.Option(help="Overlap pull and push with propagation.")] = True,
    expert_skew: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=1e6,
            help="With --model, tokens that experts of the busiest rank get over the mean, where ranks share experts.",
        ),
    ] = 1.0,
    float8: Annotated[
        bool,
        typer.Option(
            "--float8",
            help="With --model, linear layers multiply in 8 bits, as hydra.float8; an estimate, as all of T is.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the global batches.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON document.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate training on a cluster that you need not have.

    Example: ds-hydra simulate --profile a800_llama2_32b --histogram commoncrawl --devices 64
    --context 32768
    --tokens 200000

    Without a profile: ds-hydra simulate --model llama2_7b --hardware h100 --nodes 8
    """
    from ds_hydra.lab.simulator.cases import list_cases as names_of_cases
    from ds_hydra.lab.simulator.cases import load_case

    if list_cases:
        names = names_of_cases()
        print_json({"cases": list(names)}) if as_json else print("\n".join(names))
        return
    from ds_hydra.lab.simulator.results import published_beside_ours
    from ds_hydra.lab.simulator.systems import DS_HYDRA, Settings

    with errors_to_stderr():
        check_folder(out)
        _refuse(
            model is None and expert_skew != 1.0,
            f"--expert-skew {expert_skew:g} goes with --model and --hardware: times of a profile are those it was "
            "measured with",
        )
        _refuse(
            float8 and model is None,
            "--float8 goes with --model and --hardware: times of a profile are those it was measured with",
        )
        settings = Settings(
            iterations=iterations or DEFAULT_ITERATIONS, overlap=overlap, seed=seed, space=space
        )
        if systems is not None:
            named = dict.fromkeys(name.strip() for name in systems.split(","))
            # It is always simulated, so that naming it alone leaves out all others
            settings = replace(settings, systems=tuple(n for n in named if n != DS_HYDRA))
        loaded = None
        if case is not None:
            others = (
                profile, model, histogram, nodes, devices, context, tokens, strategies,
            )  # fmt: skip
            _refuse(
                any(value is not None for value in others),
                "--case brings profile, histogram, devices, context, tokens and strategies; leave those options out",
            )
            loaded = load_case(case)
            workload = loaded.workload
        else:
            estimated = None
            if model is not None:
                _refuse(profile is not None, "give --profile or --model, one of them")
                histogram, devices, context, estimated = _estimate(
                    model, hardware, histogram, nodes, devices, context, expert_skew, float8
                )
            _refuse(
                model is None and nodes is not None, "--nodes goes with --model; give --devices"
            )
            workload = _workload(
                profile, histogram, devices, context, tokens, strategies, estimated
            )
            if model is not None:
                workload = replace(workload, can_run=ask_engine(model))
        log_size(workload.profile)
        if loaded is None:
            sized = settings.sized(workload.tokens_per_iteration)
            settings = replace(sized, iterations=iterations or sized.iterations)
        found = _compare(workload, settings, hardware)
        document = found.to_json()
        if loaded is not None:
            document |= published_beside_ours(loaded, found)
        write_document(document, out)
    print_json(document) if as_json else print(describe_simulation(document))


def _refuse(is_wrong: bool, message: str) -> None:
    if is_wrong:
        raise HydraConfigError(message)


def _workload(
    profile: str | None,
    histogram: str | None,
    devices: int | None,
    context: int | None,
    tokens: int | None,
    strategies: Path | None,
    estimated: Profile | None,
) -> Workload:
    """The workload of these options; raises HydraConfigError where one is missing."""
    from ds_hydra.configs import find_file
    from ds_hydra.configs.files import find_profile
    from ds_hydra.lab.simulator.cases import Workload
    from ds_hydra.strategy.cost_models.costs import Costs
    from ds_hydra.strategy.profiles.profile import Profile
    from ds_hydra.strategy.proposal.histogram import LengthHistogram
    from ds_hydra.strategy.proposal.program import default_tokens_per_iteration
    from ds_hydra.strategy.schemes.enumeration import load_strategies
    from ds_hydra.strategy.schemes.scheme import schemes_of

    given = {
        "--profile": estimated.name if estimated else profile,
        "--histogram": histogram,
        "--devices": devices,
        "--context": context,
    }
    missing = [name for name, value in given.items() if value is None]
    _refuse(
        bool(missing), f"{', '.join(missing)} missing; give --case, or all of {', '.join(given)}"
    )
    assert histogram is not None
    assert devices is not None
    assert context is not None
    candidates = load_strategies(str(strategies)) if strategies else ()
    known_profile = estimated or Profile.load(find_profile(profile or ""))
    known = Costs.of(known_profile, devices).extended(schemes_of(candidates))
    return Workload(
        name=f"{estimated.name if estimated else profile}, {histogram}",
        costs=Costs(known),
        histogram=LengthHistogram.load(find_file("lengths", histogram)),
        num_devices=devices,
        context_length=context,
        tokens_per_iteration=tokens or default_tokens_per_iteration(devices, context),
        strategies=candidates,
    )


def _estimate(
    model: str,
    hardware: str | None,
    histogram: str | None,
    nodes: int | None,
    devices: int | None,
    context: int | None,
    expert_skew: float,
    float8: bool,
) -> tuple[str, int, int, Profile]:
    """Histogram, devices and context, with defaults, and the profile of `model` by a roofline; says
    what it assumes.
    """
    from ds_hydra.strategy.cost_models.analytic import Hardware

    _refuse(hardware is None, "--model needs --hardware, e.g. h100")
    assert hardware is not None
    _refuse((nodes is None) == (devices is None), "with --model give --nodes or --devices")
    if nodes is not None:
        devices = nodes * Hardware.load(hardware).devices_per_node
    assert devices is not None
    assumed = []
    if context is None:
        context = DEFAULT_CONTEXT
        assumed.append(f"context: {DEFAULT_CONTEXT}, as --context is not given")
    if histogram is None:
        histogram = DEFAULT_HISTOGRAM
        assumed.append(f"lengths: those of {DEFAULT_HISTOGRAM}, as --histogram is not given")
    profile = estimate_profile(model, hardware, devices, context, expert_skew, float8=float8)
    for sentence in assumed:
        log(f"assumed: {sentence}")
    return histogram, devices, context, profile


def _compare(workload: Workload, settings: Settings, hardware: str | None) -> Comparison:
    from ds_hydra.lab.simulator.compare import compare
    from ds_hydra.lab.simulator.systems import LABELS
    from ds_hydra.strategy.cost_models.cluster import find_cluster

    workload = workload.linked_by(find_cluster(workload.profile, workload.num_devices, hardware))
    if workload.cluster is None:
        log(
            "the profile's hardware has no description: communication counts nothing; see --hardware"
        )
    processes = len(os.sched_getaffinity(0))
    fork = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(processes, mp_context=fork) as pool,
        progress_bar("simulating", "system") as tell,
    ):
        num_ended, num_systems = itertools.count(), 1 + len(settings.systems)
        found = compare(
            workload,
            settings,
            progress=lambda _: tell(next(num_ended), num_systems),
            run_each=pool.map if processes > 1 else map,
        )
    for name in found.left_out:
        log(
            f"left out: {LABELS[name]} cannot run a sequence of {workload.context_length} tokens on "
            f"{workload.num_devices} devices"
        )
    return found


def describe_simulation(document: dict[str, Any]) -> str:
    """Text of a simulated workload, or of a case, for users."""
    lines = [_head(document), *_system_lines(document), ""]
    if "published" in document:
        lines.append(f"published ({document['figure']}) and simulated here:")
        lines += [
            f"  {e['what']}: paper {e['paper']}, here {e['ours']}" for e in document["published"]
        ]
    return "\n".join(lines).rstrip()


def _head(point: dict[str, Any]) -> str:
    ours = point["systems"][0]
    return (
        f"{point['name']}: {point['num_devices']} devices, context {point['context_length']:,}, "
        f"{point['tokens_per_iteration']:,} tokens per iteration, {point['iterations']} global batches\n"
        f"ds_hydra: {ours['strategy']}\n"
        f"propagation {point['distance_to_bound']:.1%} above the perfect-balance bound of "
        f"{point['perfect_balance_ms']:,.0f} ms"
        + (_plain_head(point["plain"]) if "plain" in point else "")
        + ("\nT under SP and of gathered layers is estimated" if point["space"] == "full" else "")
        + (
            f"\nTFLOP/s and MFU are left out: {point['flops_unknown']}"
            if point["flops_unknown"]
            else ""
        )
    )


def _rate(system: dict[str, Any]) -> str:
    """TFLOP/s of each device and MFU, as far as they are known."""
    if system["tflops_per_device"] is None:
        return "-"
    share = "" if system["mfu"] is None else f", {system['mfu']:.0%}"
    return f"{system['tflops_per_device']:.3g}{share}"


def _plain_head(plain: dict[str, Any]) -> str:
    return (
        f"\n<TP,PP> alone: {plain['distance_to_bound']:.1%} above the bound of that space, "
        f"{plain['perfect_balance_ms']:,.0f} ms"
    )


def _system_lines(point: dict[str, Any]) -> list[str]:
    ours, *_ = point["systems"]
    lines = [
        f"{'':34}{'iteration, ms':>18}{'tokens/s':>12}{'TFLOP/s, MFU':>14}{'speed-up (95%)':>20}"
        + f"{'propagation':>13}{'imbalance':>11}{'bubble':>8}  strategy"
    ]
    for s in point["systems"]:
        low, high = s["speedup_95"]
        strategy = "" if s["name"] == "ds_hydra" else s["strategy"]
        lines.append(
            f"{s['label']:34}{s['iteration_ms']:>10,.0f} ± {s['iteration_ms_standard_error']:<5,.0f}"
            f"{s['tokens_per_s']:>12,.0f}{_rate(s):>14}{s['speedup']:>8.2f} ({low:.2f}-{high:.2f})"
            f"{s['speedup_of_propagation']:>13.2f}{s['imbalance']:>11.2f}{s['bubble']:>8.0%}  {strategy}"
        )
    if ours["tflops_per_device"] is not None:
        lines.append(
            "TFLOP/s of each device: what the model needs for the sequences' own lengths, causal attention half, "
            "recomputation not counted, over the whole iteration; MFU: its share of the device's peak in 16 bit, a "
            "ceiling for runs, as what slows them down by chance is left out"
        )
    return lines
