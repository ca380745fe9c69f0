"""`ds-hydra propose`: candidate strategies for a model, a dataset and a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_hydra.commands import common
from ds_hydra.commands.models import (
    HardwareOption,
    ModelOption,
    ProfileOption,
    ask_engine,
    load_costs,
)
from ds_hydra.configs import find_file
from ds_hydra.configs.hydra_config import MAX_GROUPS, MAX_SEED, Space

if TYPE_CHECKING:
    from ds_hydra.sampler.propose import Proposal


def propose(
    histogram: Annotated[
        str, typer.Option(help="A ds_hydra.lengths/1 file, or the name of a shipped one.")
    ],
    devices: common.NumDevices,
    context: common.ContextLength,
    profile: ProfileOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    tokens: common.TokensPerIteration = None,
    space: Annotated[
        Space,
        typer.Option(
            help="Schemes: every one that the profile measured and what follows from it (SP, CP, gathered and "
            "checkpointed layers, with estimated times), those that it measured, or <TP,PP> alone."
        ),
    ] = "full",
    batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=common.MAX_BATCHES,
            help="Global batches to try the candidates on; without it 32, fewer where they are large.",
        ),
    ] = None,
    max_communicators: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_GROUPS,
            help="Process groups that the candidates may need together; without it 256, on more than 64 devices 4 for "
            "each.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the sampled global batches.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to write ds_hydra.strategies/1.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Propose candidate strategies and say why each is there.

    Example: ds-hydra propose --profile a800_llama2_7b --histogram github --devices 8 --context
    32768
    --out strategies.json

    Example: ds-hydra propose --profile a800_llama2_7b --histogram github --devices 16 --context
    32768 --space full

    Without a profile: ds-hydra propose --model llama2_7b --hardware h100 --histogram github
    --devices 16 --context 32768
    """
    from ds_hydra.sampler.candidate_set import decide_candidates
    from ds_hydra.sampler.sample_bench import CandidateSettings
    from ds_hydra.strategy.cost_models.costs import runs_all
    from ds_hydra.strategy.proposal.histogram import LengthHistogram

    with common.errors_to_stderr():
        common.check_folder(out)
        costs = load_costs(profile, model, hardware, devices, context)
        common.log_size(costs.profile)
        can_run = runs_all if model is None else ask_engine(model)
        with common.progress_bar("trying candidates", "batch") as show:
            settings = CandidateSettings(
                num_devices=devices,
                context_length=context,
                tokens_per_iteration=tokens,
                space=space,
                cluster=costs.cluster,
                can_run=can_run,
                max_groups=max_communicators,
                max_enumerated=0,
                num_batches=batches,
                seed=seed,
            )
            lengths = LengthHistogram.load(find_file("lengths", histogram))
            proposal = decide_candidates(costs.profile, lengths, settings, show).proposal
            assert proposal is not None
        common.write_document(proposal.to_json(), out)
    common.print_json(proposal.to_json()) if as_json else print(_describe(proposal))


def _describe(proposal: Proposal) -> str:
    width = max(len(str(strategy)) for strategy in proposal.strategies)
    lines = [f"{kept.strategy!s:{width}}  {kept.reason}" for kept in proposal.kept]
    times = [f"{proposal.kept_ms:.0f} ms on average"]
    if proposal.best_static_ms is not None:
        times.append(f"with the best static strategy {proposal.best_static_ms:.0f} ms")
    if proposal.plain_ms is not None and not all(
        s.is_plain for x in proposal.strategies for s in x.schemes
    ):
        times.append(f"with those of <TP,PP> alone {proposal.plain_ms:.0f} ms")
    lines.append(
        f"{len(proposal.kept)} of {proposal.num_candidates} candidates kept, {proposal.num_communicators} "
        f"communicators; {proposal.tokens_per_iteration} tokens take {', '.join(times)}"
    )
    if proposal.assumed:
        lines.append(
            f"nobody measured {', '.join(map(str, proposal.assumed))}: times are estimated from <TP,PP>, SP may be "
            "measured by `ds-hydra profile --sp`"
        )
    return "\n".join(lines)
