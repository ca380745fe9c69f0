"""`ds_hydra.initialize`: `deepspeed.initialize` that builds a HydraEngine."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_hydra.configs.ds_config import read_ds_config, refuse_auto
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.checks.deepspeed_section import check_buildable
from ds_hydra.engine.hydra_engine import HydraEngine, needs_metric
from ds_hydra.engine.model.adapters import check_trains
from ds_hydra.engine.model.held_models import check_free
from ds_hydra.engine.model.language_model import freeze_other_parts
from ds_hydra.engine.ranks.process import prepare_accelerator
from ds_hydra.errors import HydraConfigError

logger = logging.getLogger(__name__)


def no_launcher() -> HydraConfigError:
    """The error that names what is missing where a script was started by itself."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = ", ".join(name for name in names if name not in os.environ)
    return HydraConfigError(
        f"no launcher has said which rank this process is ({missing} not set); start with `torchrun "
        "--nproc-per-node N train.py` or `deepspeed train.py`, where N is the number of devices, 1 for a trial; "
        "mpirun needs mpi4py"
    )


@contextlib.contextmanager
def hydra_engine_class(hydra_config: HydraConfig) -> Iterator[None]:
    """Let `deepspeed.initialize` build a HydraEngine inside, wherever it is called from."""
    prepare_accelerator()
    original = deepspeed.DeepSpeedEngine
    # A class, not a partial: accelerate asks isinstance(model, deepspeed.DeepSpeedEngine)
    # meanwhile.
    init = functools.partialmethod(HydraEngine.__init__, hydra_config=hydra_config)
    deepspeed.DeepSpeedEngine = type(HydraEngine.__name__, (HydraEngine,), {"__init__": init})
    try:
        yield
    except ModuleNotFoundError as error:
        if (
            error.name != "mpi4py"
        ):  # where DeepSpeed looks when nothing else says which rank this is
            raise
        raise no_launcher() from error
    finally:
        deepspeed.DeepSpeedEngine = original


def _refuse_hydra_section(init: Callable[..., None]) -> Callable[..., None]:
    """DeepSpeed's own engine, which would train plain ZeRO-3 and ignore the "hydra" section."""

    @functools.wraps(init)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        ds_config = getattr(kwargs.get("config_class"), "_param_dict", None) or {}
        if "hydra" in ds_config and not isinstance(self, HydraEngine):
            raise HydraConfigError(
                'the DeepSpeed config has a "hydra" section, and deepspeed.initialize (which transformers.Trainer, '
                "TRL and accelerate call) would ignore it; use ds_hydra.initialize or ds_hydra.HydraTrainer, or remove "
                "the section to train with plain ZeRO-3"
            )
        init(self, *args, **kwargs)

    return guarded


# For good, and for this process only: nothing else sees that the section stays without effect.
DeepSpeedEngine.__init__ = _refuse_hydra_section(DeepSpeedEngine.__init__)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
) -> tuple[HydraEngine, Any, Any, Any]:
    """A HydraEngine, its optimizer, an iterator of global batches, its scheduler:
    `deepspeed.initialize` otherwise.

    `config` (or `args.deepspeed_config`) is the DeepSpeed JSON with a "hydra" section.
    `training_data` is a `datasets.Dataset`, or a `datasets.IterableDataset`, with `input_ids`, or
    with a text column and `hydra.tokenizer`. Collective over all ranks. Raises HydraConfigError, on
    all ranks, for what must be edited.
    """
    from_args = getattr(args, "deepspeed_config", None)
    in_call = config if config is not None else config_params
    given = in_call if in_call is not None else from_args
    if in_call is not None and from_args is not None:
        raise HydraConfigError(
            f"two configurations: --deepspeed_config {from_args} and config= of initialize; remove one"
        )
    if given is None:
        raise HydraConfigError(
            "no configuration: pass config= or start with --deepspeed_config FILE"
        )
    if from_args is not None:
        args = copy.copy(args)  # the caller's stays as it is
        args.deepspeed_config = None  # DeepSpeed would read the file again, "hydra" section and all
    if model is None:
        raise HydraConfigError("no model: pass model=, e.g. a LlamaForCausalLM")
    check_free(model)
    ds_config, hydra_config = read_ds_config(given)
    refuse_auto(ds_config)
    used = {"optimizer": optimizer is None, "scheduler": lr_scheduler is None}
    check_buildable({key: ds_config[key] for key in ds_config if used.get(key, True)})
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None and not any(group["params"] for group in groups):
        raise HydraConfigError(
            f"the {type(optimizer).__name__} has no parameters: another engine has taken them (DeepSpeed steps its own "
            "copies); make a new optimizer for this one"
        )
    freeze_other_parts(model)
    if optimizer is not None or "optimizer" in ds_config:
        check_trains(model)
    if model_parameters is None and optimizer is None:
        model_parameters = [p for p in model.parameters() if p.requires_grad]
    with hydra_engine_class(hydra_config):
        engine, *others = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=ds_config,
            mesh_param=mesh_param,
        )
    if needs_metric(engine.lr_scheduler) and engine.global_rank == 0:
        logger.warning(
            f"lr_scheduler is {type(engine.lr_scheduler).__name__}, whose step() needs a metric: train_batch() leaves "
            "it alone; call lr_scheduler.step(metric) after an evaluation, on every rank"
        )
    return engine, *others
