"""`ds-hydra check`: effects and errors of a configuration, before ranks start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_hydra.commands import common
from ds_hydra.configs.files import MAX_DEVICES

if TYPE_CHECKING:
    from ds_hydra.engine.checks.config_check import ConfigReport


def check(
    config: Annotated[Path, typer.Argument(help='The DeepSpeed JSON with a "hydra" section.')],
    model: Annotated[str | None, typer.Option(help=common.MODEL_HELP)] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_DEVICES, help="Devices of the cluster; what hydra.strategies need, or 8."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="In place of hydra.profile: a file, or the name of a shipped one."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            *common.HARDWARE,
            help="Without a profile: estimate for this hardware, a shipped name (a800) or a file.",
        ),
    ] = None,
    histogram: Annotated[
        str | None,
        typer.Option(help="On more than 8 devices: propose candidates for these lengths."),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Check a configuration without a GPU: keys, MaxLen, memory, communicators, what is profiled or
    assumed.

    The exit code is 1 if something would stop a run.

    Example: ds-hydra check ds_config.json --model llama2_7b --devices 16
    """
    with common.errors_to_stderr(common.READS_LIKE_DEEPSPEED), common.stdout_to_stderr():
        common.say_loading()
        from ds_hydra.engine.checks.config_check import CheckRequest, check_config

        report = check_config(
            CheckRequest(
                config=config,
                model=model,
                num_devices=devices,
                profile=profile,
                device=device,
                histogram=histogram,
            )
        )
    common.print_json(report.to_json()) if as_json else print(describe_report(report))
    for problem in report.problems:
        common.log(f"error: {problem}")
    if report.problems:
        raise typer.Exit(1)


def describe_report(report: ConfigReport) -> str:
    """The report as text; problems are left to stderr."""
    from ds_hydra.strategy.cost_models.decoder import ModelSize

    lines = []
    if report.num_devices:
        lines.append(
            f"{report.num_devices} devices, context {report.context_length:,}, "
            f"{report.tokens_per_iteration:,} tokens per iteration"
        )
    if report.parameters:
        lines.append(f"model: {ModelSize(**report.parameters)}")
    if report.profile is not None:
        lines.append(f"profile {report.profile}")
    if report.schemes:
        assert report.memory_bytes is not None
        lines.append(f"memory of one rank: {_gib(report.memory_bytes)} usable")
        width = max(8, *(len(row["scheme"]) for row in report.schemes))
        lines.append(
            f"{'scheme':>{width}} {'MaxLen':>9} {'states':>10} {'micro-batch of':>14} {'total':>10} {'ms':>9}"
            f" {'TFLOP/s':>8} {'MFU':>5}"
        )
        for row in report.schemes:
            time = "-" if row["micro_batch_ms"] is None else f"{row['micro_batch_ms']:,.0f}"
            rate, mfu = row["tflops_per_device"], row["mfu"]
            lines.append(
                f"{row['scheme']:>{width}} {row['max_len_tokens']:>9,} {_gib(row['states_bytes']):>10} "
                f"{row['micro_batch_tokens']:>14,} {_gib(row['total_bytes']):>10} {time:>9}"
                f" {'-' if rate is None else f'{rate:.3g}':>8} {'-' if mfu is None else f'{mfu:.0%}':>5}"
            )
        if any(row["tflops_per_device"] is not None for row in report.schemes):
            lines.append(
                "TFLOP/s of each device for one sequence of that length: what the model needs, causal attention "
                "half, recomputation not counted; MFU: over the device's peak in 16 bit"
            )
    if report.strategies:
        shown = ", ".join(report.strategies[:8]) + (", ..." if len(report.strategies) > 8 else "")
        lines.append(
            f"{len(report.strategies)} candidate strategies ({report.strategies_source}): {shown}"
        )
    if report.communicators:
        counts = report.communicators
        lines.append(
            f"communicators: {counts['total']} of at most {counts['limit']}, {counts['most_on_one_rank']} on one rank, "
            f"up to {counts['multicast_objects']} NVLink multicast objects on a node"
        )
    for title in ("profiled", "assumed", "filled_in", "warnings"):
        lines += [
            f"{title.rstrip('s').replace('_', ' ')}: {text}" for text in getattr(report, title)
        ]
    count = len(report.problems)
    if count:
        lines.append(f"{count} problem{'s' * (count > 1)}")
    elif report.memory_bytes is None:
        lines.append(
            "no problem found in keys and communicators; memory and time were not judged: give --hardware with "
            "--model, or --profile"
        )
    else:
        lines.append("no problem found")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
