"""`ds-hydra search`: the best plan of DP, SDP, TP, PP and activation checkpointing for every
layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_hydra.commands.common import (
    HARDWARE,
    MAX_BATCHES,
    AsJson,
    check_folder,
    errors_to_stderr,
    log_size,
    print_json,
    write_document,
)
from ds_hydra.configs import find_file
from ds_hydra.configs.files import MAX_DEVICES, MAX_LENGTH_TOKENS
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import Progress

if TYPE_CHECKING:
    from ds_hydra.lab.search import SearchPlan


def search(
    devices: Annotated[
        int, typer.Option(min=1, max=MAX_DEVICES, help="Devices of the cluster, a power of two.")
    ],
    memory_gb: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Memory of a device in GB (2^30 bytes).")
    ],
    profile: Annotated[
        str, typer.Option(help="A ds_hydra.profile/1 file, or the name of a shipped one.")
    ],
    hardware: Annotated[
        str,
        typer.Option(
            *HARDWARE,
            help="Whose interconnects, a ds_hydra.hardware/1 file or a shipped name.",
        ),
    ] = "a800",
    sequence: Annotated[
        int,
        typer.Option(min=1, max=MAX_LENGTH_TOKENS, help="Tokens of one sample."),
    ] = 4096,
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_BATCHES,
            help="Largest batch in samples; 16 for each device if not given.",
        ),
    ] = None,
    batch_step: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_BATCHES, help="Batches are its multiples; the devices if not given."
        ),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option(help="Whether layers may checkpoint activations.")
    ] = True,
    balance: Annotated[
        bool,
        typer.Option(help="Whether stages may have different numbers of layers (Galvatron-BMW)."),
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Where to write ds_hydra.search/1.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search the best static plan, layer by layer (Galvatron-BMW).

    Example: ds-hydra search --profile a800_llama2_7b --devices 8 --memory-gb 40 --sequence 4096
    """
    from ds_hydra.lab.search import GalvatronSearch, SearchInput, SearchSettings, layer_strategies
    from ds_hydra.strategy import Profile
    from ds_hydra.strategy.cost_models.analytic import Hardware

    with errors_to_stderr():
        check_folder(out)
        if max_batch is not None and max_batch < (batch_step or devices):
            raise HydraConfigError(
                f"--max-batch is {max_batch}, below --batch-step ({batch_step or devices}), so that no batch would be "
                "tried; give a smaller step, or more"
            )
        known = Profile.load(find_file("profiles", profile))
        log_size(known)
        given = SearchInput.from_profile(
            known,
            Hardware.load(hardware),
            num_devices=devices,
            sequence_tokens=sequence,
        )
        settings = SearchSettings(
            memory_mb=1024 * memory_gb,
            max_batch=max_batch,
            batch_step=batch_step,
            balances_stages=balance,
        )
        strategies = layer_strategies(devices, checkpoints=checkpointing)
        with Progress(desc="batch sizes", unit="batch") as bar:

            def show(batch: int, samples_per_s: float) -> None:
                bar.set_postfix_str(f"batch {batch}, best {samples_per_s:.2f} samples/s")
                bar.update()

            plan = GalvatronSearch(given, settings, strategies).best(show)
        document = {**plan.to_json(), "overlap_slowdown": given.overlap_slowdown}
        write_document(document, out)
    print_json(document) if as_json else print(describe(plan, given.overlap_slowdown))


def describe(plan: SearchPlan, overlap_slowdown: float) -> str:
    """The plan as text: one line for each stage."""
    from ds_hydra.lab.search.galvatron import run_lengths
    from ds_hydra.lab.search.layers import OVERLAP_SLOWDOWN

    lines = [
        f"batch {plan.batch_size}, PP {plan.pp}, {plan.num_micro_batches} micro-batches: "
        f"{plan.time_ms:.1f} ms, {plan.samples_per_s:.2f} samples/s"
    ]
    for index, stage in enumerate(plan.stages):
        runs = "  ".join(f"{name} x{count}" for name, count in run_lengths(stage.strategies))
        lines.append(
            f"stage {index}: {stage.compute_ms:.1f} ms, {stage.peak_mb / 1024:.1f} GB   {runs}"
        )
    if plan.pp > 1:
        best = 1 - 1 / plan.pp
        lines.append(
            f"balance of time {plan.time_balance:.3f}, of memory {plan.memory_balance:.3f} (1 - 1/PP = {best:.3f})"
        )
    lines.append("PP-TP-DP; * consecutive groups, f sharded (SDP), -c checkpointed")
    source = ", the paper's figure" if overlap_slowdown == OVERLAP_SLOWDOWN else ""
    lines.append(
        f"computation and gradient synchronisation slow each other down {overlap_slowdown:g} times{source}"
    )
    return "\n".join(lines)
