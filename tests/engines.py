"""Engines for tests: ds_hydra's and stock DeepSpeed's, of one configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import deepspeed
import torch
import torch.distributed as dist
from models import VOCAB_SIZE
from single_process import Examples, num_label_tokens
from torch import Tensor, nn

import ds_hydra
from ds_hydra.engine import HydraEngine
from ds_hydra.engine.iteration import gather_outcomes
from ds_hydra.engine.ranks.agreement import gather_rows
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.profile import PROFILE_SCHEMA


def ds_config(*, hydra: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A ZeRO-3 configuration with clipping; `hydra` adds the section of that name, whose plans do
    not depend on measured times, so that runs can be compared.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.5,
        **sections,
    }
    if hydra is not None:
        section = {"context_length": 128, "tokens_per_iteration": 512, **hydra}
        config["hydra"] = section | {"planner": {"refit": "log", **hydra.get("planner", {})}}
    return config


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)


def start_hydra(
    model: nn.Module,
    *,
    hydra: dict[str, Any] | None = None,
    training_data: Any = None,
    **sections: Any,
) -> HydraEngine:
    config = ds_config(hydra=hydra or {}, **sections)
    engine, *_ = ds_hydra.initialize(
        model=model, optimizer=adamw(model), config=config, training_data=training_data
    )
    return engine


def start_stock(model: nn.Module, **sections: Any) -> deepspeed.DeepSpeedEngine:
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=ds_config(**sections)
    )
    return engine


def stock_step(engine: Any, examples: Examples) -> float:
    """One stock iteration on the global batch: this rank's share as one right-padded batch.

    Causal attention makes right padding invisible to real tokens.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = examples[rank::world]
    longest = max(len(e["input_ids"]) for e in mine)
    ids = torch.zeros(len(mine), longest, dtype=torch.int64)
    targets = torch.full((len(mine), longest), -100)
    for row, example in enumerate(mine):
        length = len(example["input_ids"])
        ids[row, :length] = example["input_ids"]
        targets[row, : length - 1] = example["labels"][1:]
    logits = engine(input_ids=ids, use_cache=False).logits
    summed = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
    )
    total = num_label_tokens(examples)
    engine.backward(summed / total * world)  # DeepSpeed averages over ranks
    engine.step()
    loss = summed.detach().double()
    dist.all_reduce(loss)
    return float(loss) / total


def full_states(engine: Any, params: Sequence[nn.Parameter]) -> list[dict[str, Tensor]]:
    """fp32 master weight and Adam moments of every parameter, gathered."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return [
        {
            "param": safe_get_full_fp32_param(p).clone(),
            "exp_avg": safe_get_full_optimizer_state(p, "exp_avg").clone(),
            "exp_avg_sq": safe_get_full_optimizer_state(p, "exp_avg_sq").clone(),
        }
        for p in params
    ]


def refused(action: Callable[[], object], kind: type[Exception] = HydraConfigError) -> str:
    """What the error of this `kind` says that `action` raises."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def raised_by(action: Callable[[], object]) -> tuple[type[Exception] | None, str]:
    """The error that `action` raises, if any, and what it says."""
    try:
        action()
    except Exception as error:
        return type(error), str(error)
    return None, ""


@contextlib.contextmanager
def gradient_on_rank_1(engine: HydraEngine, value: float) -> Iterator[None]:
    """Within, an element of rank 1's gradient shards has `value` after all passes."""
    train = engine.propagator.train

    def poisoned(plan, load, grads_P, *rest):
        outcome = train(plan, load, grads_P, *rest)
        if engine.global_rank == 1:
            grads_P[2][0] = value
        return outcome

    with mock.patch.object(engine.propagator, "train", poisoned):
        yield


def write_json(path: str | Path, document: Any) -> str:
    """Write a file that all ranks read; its name. Collective over all ranks."""
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(document))
    dist.barrier()
    return str(path)


def train_plan(engine, plan, load, objective=None):
    """What this rank measured in the passes of `plan`, and its shards of the gradients; no step."""
    engine.propagator.prepare([plan.strategy])
    grads_P = engine._zero_gradient_shards()
    outcome = engine.propagator.train(plan, load, grads_P, 1.0, objective)
    return outcome, [g.clone() for g in grads_P]


def gather_gradients(engine, grads_P):
    """Full gradients out of every rank's shards, in one collective; zeros of what is frozen."""
    gathered = gather_rows(torch.cat(list(grads_P))).split([g.numel() for g in grads_P], dim=1)
    return [
        rows.flatten()[: spec.numel].view(spec.shape)
        if spec.requires_grad
        else torch.zeros(spec.shape)
        for spec, rows in zip(engine.propagator.stage_model.specs, gathered, strict=True)
    ]


def loss_and_gradients(engine, plan, load, objective=None):
    """Loss and full gradients of the passes of `plan`."""
    outcome, grads_P = train_plan(engine, plan, load, objective)
    loss = gather_outcomes(engine.propagator, outcome).loss()
    return loss, gather_gradients(engine, grads_P)


def small_profile(memory_bytes, num_layers=2):
    """A profile under which TP 2 fits about twice the tokens of TP 1."""
    return {
        "schema": PROFILE_SCHEMA,
        "hardware": {
            "name": "test",
            "memory_bytes": memory_bytes,
            "reserved_bytes": 0,
            "safety_margin_bytes": 0,
        },
        "model": {
            "name": "tiny",
            "num_layers": num_layers,
            "hidden_size": 32,
            "vocab_size": VOCAB_SIZE,
        },
        "memory": {
            "activation_bytes_per_token_per_layer_per_hidden": {"1": 100, "2": 100},
            "state_bytes_per_layer_per_hidden2": 1,
            "sharded_fraction": 0.9,
        },
        "schemes": [
            {"tp": tp, "pp": 1, "quadratic_ms": 1e-4, "linear_ms": 0.1 / tp, "constant_ms": 1.0}
            for tp in (1, 2)
        ],
    }


def write_profile(folder: str | Path) -> str:
    """The path of a small profile of four layers, which rank 0 writes. Collective."""
    return write_json(Path(folder, "profile.json"), small_profile(6_000_000, num_layers=4))


def dataset_of(batches: Iterable[Examples]) -> datasets.Dataset:
    """All examples of `batches`, a row each."""
    rows = [{key: ids.tolist() for key, ids in e.items()} for batch in batches for e in batch]
    return datasets.Dataset.from_list(rows)


def long_on_four_ranks(*, gather: bool) -> dict[str, Any]:
    """A profile by which a long sequence wants all of four ranks and short ones a rank each: 40
    tokens fit under <1,1>, about 150 under <sp4,1>.
    """
    document = small_profile(1 << 40, num_layers=4)
    memory = document["memory"] | {
        "input_bytes_per_token_per_layer_per_hidden": 4,
        "slice_bytes_per_layer_per_hidden2": 100,
        "activation_bytes_per_token_per_layer_per_hidden": {"1": (1 << 40) / 128 / 41},
    }
    schemes = [
        {"tp": 1, "pp": 1, "sp": sp, "quadratic_ms": 0, "linear_ms": ms, "constant_ms": 0}
        for sp, ms in ((1, 1.0), (2, 0.55), (4, 0.3))
    ]
    return document | {"memory": memory, "schemes": [{**s, "gather": gather} for s in schemes]}
