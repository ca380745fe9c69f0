"""`ds-hydra profile`: time and memory of a model under every scheme, on the devices at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_hydra.commands import common
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.cost_models.decoder import find_size
from ds_hydra.strategy.proposal.program import check_context

if TYPE_CHECKING:
    from ds_hydra.engine.profiling.profile_run import ProfileRequest


def profile(
    model: Annotated[
        str,
        typer.Option(help=f"{common.MODEL_HELP} Weights are random."),
    ],
    context: common.ContextLength,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write ds_hydra.profile/1."),
    ] = None,
    dtype: Annotated[
        common.DType | None, typer.Option(help="Type of weights; bf16 if not given, fp32 on a CPU.")
    ] = None,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            help="Recompute each layer in backward, as hydra.activation_checkpointing does."
        ),
    ] = False,
    attention: Annotated[
        str, typer.Option(help="Kernel of packed attention, as hydra.attention names them.")
    ] = "auto",
    compile_layers: Annotated[
        bool,
        typer.Option(help="Run each layer through torch.compile, as hydra.compile_layers does."),
    ] = False,
    float8: Annotated[
        str | None,
        typer.Option(
            help="Multiply in 8 bits in linear layers, as hydra.float8: tensorwise or rowwise."
        ),
    ] = None,
    float8_exclude: Annotated[
        str | None,
        typer.Option(help="Parts of names of linear layers that do not, separated by commas."),
    ] = None,
    tp: Annotated[
        str | None, typer.Option(help="TP degrees, e.g. 1,2,4,8; all that fit if not given.")
    ] = None,
    pp: Annotated[
        str | None, typer.Option(help="PP degrees, e.g. 1,2; all that fit if not given.")
    ] = None,
    sp: Annotated[
        str,
        typer.Option(
            help="Sequence parallel degrees, e.g. 1,2; every one with all TP and PP degrees."
        ),
    ] = "1",
    cp: Annotated[
        str,
        typer.Option(
            help="Context parallel degrees, e.g. 1,2; every one with all SP, TP and PP degrees."
        ),
    ] = "1",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths to measure, 3 or more; powers of four up to the context if not given."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of each length; the median counts.")
    ] = 5,
    memory_limit: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes one rank may use; the device's memory if not given."),
    ] = None,
    as_json: common.AsJson = False,
    local_rank: common.LocalRank = None,
) -> None:
    """Measure time and memory of a model under every scheme <TP,PP> that fits the launched ranks.

    Run it under a launcher on the cluster that will train, or alone on one device. Without
    "--log_level error" the launcher of DeepSpeed logs to stdout too.

    Example: deepspeed --log_level error --no_local_rank --no_python ds-hydra profile --model
    llama2_7b
    --context 32768 --out profile.json

    Example: torchrun --nproc-per-node 8 --no-python ds-hydra profile --model llama2_7b --context
    32768
    --out profile.json
    """
    with common.errors_to_stderr(), common.stdout_to_stderr():
        config = _config(
            {
                "context_length": context,
                "memory_limit_bytes": memory_limit,
                "activation_checkpointing": activation_checkpointing,
                "attention": attention,
                "compile_layers": compile_layers,
                "float8": float8,
                "float8_exclude": float8_exclude.split(",") if float8_exclude else [],
                "profiling": {
                    "lengths": _numbers("--lengths", lengths),
                    "repeats": repeats,
                },
            }
        )
        degrees = {
            "tp": _numbers("--tp", tp),
            "pp": _numbers("--pp", pp),
            "sp": _numbers("--sp", sp),
            "cp": _numbers("--cp", cp),
        }
        common.check_folder(out)
        # After all that can be checked without them: the imports take seconds.
        from ds_hydra.engine.profiling.profile_run import ProfileRequest

        request = ProfileRequest(model=model, config=config, dtype=dtype, **degrees)
        document, num_devices = _measure(request, out)
    if document is not None:
        if as_json:
            common.print_json(document)
        else:
            print(_describe(document, num_devices, context), flush=True)
    common.leave_ranks()


def _config(section: dict[str, Any]) -> HydraConfig:
    """Configuration for profiling from a "hydra" section, whatever its token budget."""
    context, lengths = section["context_length"], section["profiling"]["lengths"]
    if lengths is not None and max(lengths) > context:
        raise HydraConfigError(
            f"--lengths has {max(lengths)}, more than --context {context}; leave it out or raise --context"
        )
    return HydraConfig.parse({**section, "tokens_per_iteration": context})


def _measure(request: ProfileRequest, out: Path | None) -> tuple[dict[str, Any] | None, int]:
    """The document on rank 0, which writes it, None on other ranks; and the number of ranks."""
    import torch.distributed as dist

    from ds_hydra.engine.profiling.profile_run import join_ranks, run_profile

    device = join_ranks()
    num_devices = dist.get_world_size()
    document = run_profile(request, device)
    if dist.get_rank() != 0:
        return None, num_devices
    common.write_document(document, out)
    _warn_of_context(document, num_devices, request.config.context_length)
    return document, num_devices


def _warn_of_context(document: dict[str, Any], num_devices: int, context_length: int) -> None:
    """Say what would help where no scheme fits the context; the profile is as measured all the
    same.
    """
    try:
        check_context(World.of(Profile.from_json(document), None, num_devices, context_length))
    except HydraConfigError as error:
        common.log(f"warning: {error}")


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers of 1 or more, separated by commas."""
    if text is None:
        return None
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise HydraConfigError(
            f"{option} is {text!r}, expected whole numbers of 1 or more, e.g. {option} 1,2,4"
        )
    return numbers


def _describe(document: dict[str, Any], num_devices: int, context: int) -> str:
    """A table of the schemes."""
    known = Profile.from_json(document)
    width = max(8, *(len(str(scheme)) for scheme in known.latency))
    lines = [
        f"{known.name}, {num_devices} devices; {document['source']}",
        f"model: {find_size(known)}",
        f"{'scheme':>{width}} {'MaxLen':>10} {'ms at ' + str(context):>14} {'tokens/s/device':>16} {'R2':>8}",
    ]
    for entry in document["schemes"]:
        scheme = Scheme.from_json(entry)
        longest = known.max_len_tokens(scheme, num_devices)
        time_ms = known.latency[scheme].micro_batch_ms([context])
        rate = context / time_ms * 1e3 / scheme.num_devices
        lines.append(
            f"{scheme!s:>{width}} {max(longest, 0):>10,} {time_ms:>14,.1f} {rate:>16,.0f} {entry['r_squared']:>8.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(profile)
