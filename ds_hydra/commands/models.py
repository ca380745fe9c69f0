"""Models of `--model` and `--hardware` in place of a profile: times of a roofline, and which
schemes the engine runs.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_hydra.commands.common import HARDWARE, MODEL_HELP, log, say_loading
from ds_hydra.errors import HydraConfigError

if TYPE_CHECKING:
    from ds_hydra.strategy.cost_models.costs import CanRun, Costs
    from ds_hydra.strategy.profiles.profile import Profile
    from ds_hydra.strategy.schemes.scheme import Scheme

ProfileOption = Annotated[
    str | None,
    typer.Option(help="A ds_hydra.profile/1 file, or the name of a shipped one (a800_llama2_32b)."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help=f"Instead of --profile: {MODEL_HELP} --hardware says on what. Times are then those of a roofline."
    ),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(*HARDWARE, help="With --model, a ds_hydra.hardware/1 file or shipped name."),
]


def load_costs(
    profile: str | None,
    model: str | None,
    hardware: str | None,
    num_devices: int,
    context_length: int,
) -> Costs:
    """Prices by a profile, or by a model and hardware.

    Raises HydraConfigError unless one of the two is given.
    """
    from ds_hydra.strategy.cost_models.cluster import find_cluster
    from ds_hydra.strategy.cost_models.costs import Costs
    from ds_hydra.strategy.profiles.profile import load_profile, with_engine_layers

    if (profile is None) == (model is None):
        raise HydraConfigError("give --profile, or --model with --hardware: one of them")
    if (model is None) != (hardware is None):
        raise HydraConfigError(
            "--model and --hardware go together, e.g. --model llama2_7b --hardware h100"
        )
    if profile is not None:
        return Costs.of(load_profile(profile), num_devices)
    assert model is not None
    assert hardware is not None
    estimated = estimate_profile(model, hardware, num_devices, context_length)
    estimated = with_engine_layers(estimated)
    return Costs(estimated, find_cluster(estimated, num_devices, hardware))


def estimate_profile(
    model: str,
    hardware: str,
    num_devices: int,
    context_length: int,
    expert_skew: float = 1.0,
    *,
    float8: bool = False,
) -> Profile:
    """The profile of `model` by a roofline of `hardware`, with activations of Megatron-LM's layers
    beside the engine's; says what it assumes.
    """
    from ds_hydra.model_config import read_config
    from ds_hydra.strategy.cost_models.estimate import estimate_from_config

    config, notes = read_config(model)
    profile, more = estimate_from_config(
        model, hardware, num_devices, context_length, expert_skew, config, float8=float8
    )
    for sentence in (*notes, *more):
        log(f"assumed: {sentence}")
    return profile


def ask_engine(model: str) -> CanRun:
    """Find the schemes that the engine runs `model` under; says what it refuses."""
    from ds_hydra.errors import HydraError
    from ds_hydra.strategy.cost_models.costs import runs_all
    from ds_hydra.strategy.schemes.scheme import Scheme

    _stage_model.cache_clear()
    say_loading()
    try:
        from ds_hydra.engine.candidates import find_unsupported

        kinds = map(Scheme.parse, ("<2,1>", "<1,2>", "<sp2,1>", "<cp2,1>", "<1,1;gather>"))
        refused = list(find_unsupported(_stage_model(model), kinds))
    except ImportError:
        log(
            "assumed: the model runs under every scheme, as the engine cannot be asked without torch"
        )
        return runs_all
    except HydraError as error:
        log(f"assumed: the model runs under every scheme, though the engine refuses it: {error}")
        return runs_all
    for reason in refused:
        log(f"left out of what ds_hydra runs: {reason}")
    return partial(_model_can_run, model)


def _model_can_run(model: str, scheme: Scheme) -> bool:
    from ds_hydra.engine.model.scheme_support import can_run

    return can_run(_stage_model(model), scheme)


@lru_cache(maxsize=1)
def _stage_model(model: str) -> Any:
    """Made before processes fork."""
    from ds_hydra.engine.model.meta_model import load_stage_model

    return load_stage_model(model)
