"""Measures T(l, P) and activation memory of every scheme on the ranks at hand: one `ds_hydra.profile/1`."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from tqdm import tqdm

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.propagation import Example, Propagator
from ds_hydra.engine.skeleton import Skeleton
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.plan import IterationPlan, PipelinePlan
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.fit import fit_latency, saturation_tokens
from ds_hydra.strategy.profile import PROFILE_SCHEMA

OPTIMIZER_BYTES = 4 + 8 + 4 + 4
"""Per parameter at its owner: fp32 master, two Adam moments, DeepSpeed's gradient, our accumulator."""
GRADIENT_BYTES = 4
"""Per element of a pulled slice: its fp32 gradient."""


def measure_profile(
    propagator: Propagator, strategies: Iterable[Strategy], config: HydraConfig
) -> dict[str, Any]:
    """A profile of every scheme in `strategies`, measured now. Collective over all ranks; equal on all.

    Each scheme runs alone on as many pipelines as fit, PP rows of one sequence each, so that neighbours
    disturb each other as they will in training. The stage time is the makespan over 2 PP - 1 (1F1B).
    """
    schemes = sorted({scheme for strategy in strategies for scheme in strategy.schemes})
    homogeneous = {s: _homogeneous(s, propagator.num_ranks) for s in schemes}
    propagator.prepare(homogeneous.values())
    model = _measure_memory(propagator, homogeneous, config)
    lengths_of = _lengths_that_fit(propagator, schemes, model, config)
    cases = [(scheme, length) for scheme, lengths in lengths_of.items() for length in lengths]
    times: dict[tuple[Scheme, int], list[float]] = {case: [] for case in cases}
    total = len(schemes) + config.profiling.repeats * len(cases)
    with tqdm(total=total, desc="profiling", disable=propagator.rank != 0, file=sys.stderr) as progress:
        for scheme, lengths in lengths_of.items():
            progress.set_postfix_str(f"{scheme} warm-up")
            for _ in range(config.profiling.warmup):
                # With the longest row, whose memory is touched for the first time.
                _stage_ms(propagator, homogeneous[scheme], lengths[-1])
            progress.update()
        # Rounds over all cases, so that a disturbance of some seconds hits every scheme alike.
        for _ in range(config.profiling.repeats):
            for scheme, length in cases:
                progress.set_postfix_str(f"{scheme} {length} tokens")
                times[scheme, length].append(_stage_ms(propagator, homogeneous[scheme], length))
                progress.update()
    entries = [
        _scheme_entry(scheme, lengths, [statistics.median(times[scheme, length]) for length in lengths])
        for scheme, lengths in lengths_of.items()
    ]
    return {**model, "saturation_tokens": _saturation(entries, config.context_length), "schemes": entries}


def _measure_memory(
    propagator: Propagator, homogeneous: dict[Scheme, Strategy], config: HydraConfig
) -> dict[str, Any]:
    """The profile without its times: hardware, model, and activation bytes of every TP degree.

    Measured with a short row under the deepest pipeline of each degree, which needs the least memory.
    """
    deepest = {scheme.tp: scheme for scheme in sorted(homogeneous, key=lambda scheme: scheme.pp)}
    length = min(config.context_length, 512)
    activation = {
        str(tp): _activation_bytes(propagator, homogeneous[scheme], length)
        for tp, scheme in sorted(deepest.items())
    }
    return {
        "schema": PROFILE_SCHEMA,
        "source": f"measured at start on {propagator.num_ranks} ranks",
        "hardware": _hardware(),
        "model": describe_model(propagator.skeleton),
        "memory": {
            "activation_bytes_per_token_per_layer_per_hidden": activation,
            **_state_memory(propagator.skeleton),
        },
        "schemes": [],
    }


def _lengths_that_fit(
    propagator: Propagator, schemes: Sequence[Scheme], model: dict[str, Any], config: HydraConfig
) -> dict[Scheme, tuple[int, ...]]:
    """Lengths to measure under each scheme: those up to its MaxLen, with MaxLen in place of the first above it.

    Schemes that hold too little for two lengths are left out of the profile.
    """
    memory = limit_memory(model, config.memory_limit_bytes).memory
    wanted = config.profiling.lengths or _default_lengths(config.context_length)
    fitting = {}
    for scheme in schemes:
        longest = memory.max_len_tokens(scheme, propagator.num_ranks)
        lengths = tuple(sorted({min(length, longest) for length in wanted}))
        if longest >= 2 and len(lengths) >= 2:
            fitting[scheme] = lengths
    if not fitting:
        raise HydraConfigError(
            f"no scheme of {', '.join(map(str, schemes))} has memory for rows of {wanted[0]} tokens; raise "
            "hydra.memory_limit_bytes, or start more ranks"
        )
    return fitting


def limit_memory(document: Mapping[str, Any], memory_limit_bytes: int | None) -> Profile:
    """The profile, with the hardware's memory replaced by what the user allows a rank."""
    if memory_limit_bytes is not None:
        hardware = {
            **document["hardware"],
            "memory_bytes": memory_limit_bytes,
            "reserved_bytes": 0,
            "safety_margin_bytes": 0,
        }
        document = {**document, "hardware": hardware}
    return Profile.from_json(document)


def nominal_profile(skeleton: Skeleton, schemes: Iterable[Scheme]) -> dict[str, Any]:
    """A profile from FLOP counts at 1 TFLOP/s per rank and without a memory limit; measures nothing.

    Good enough to place sequences within a strategy that the caller has forced.
    """
    layer_params = _layer_params(skeleton)
    entries = []
    for scheme in sorted(set(schemes)):
        layers = -(-skeleton.num_layers // scheme.pp)
        share = layers / scheme.tp * 6 / 1e9  # 2 FLOP forward + 4 backward per parameter, ms at 1 TFLOP/s
        entries.append(
            {
                "tp": scheme.tp,
                "pp": scheme.pp,
                "quadratic_ms": share * skeleton.hidden_size,
                "linear_ms": share * layer_params,
                "constant_ms": share * layer_params * 32,
            }
        )
    return {
        "schema": PROFILE_SCHEMA,
        "source": "FLOP counts, nothing measured",
        "hardware": {
            "name": "nominal",
            "memory_bytes": 2**62,
            "reserved_bytes": 0,
            "safety_margin_bytes": 0,
        },
        "model": describe_model(skeleton),
        "memory": {
            "activation_bytes_per_token_per_layer_per_hidden": {
                str(tp): 40.0 for tp in {scheme.tp for scheme in schemes}
            },
            **_state_memory(skeleton),
        },
        "schemes": entries,
    }


def describe_model(skeleton: Skeleton) -> dict[str, Any]:
    """The profile's "model" section."""
    config = skeleton.config
    return {
        "name": config.model_type,
        "num_layers": skeleton.num_layers,
        "hidden_size": skeleton.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_attention_heads": config.num_attention_heads,
        "vocab_size": skeleton.vocab_size,
    }


def _default_lengths(context_length: int) -> tuple[int, ...]:
    """Powers of four up to the context, and the context: the quadratic term shows at the long end."""
    lengths = [length for length in (64, 256, 1024, 4096, 16384, 65536) if length < context_length]
    return (*lengths[-4:], context_length) if lengths else (max(2, context_length // 2), context_length)


def _homogeneous(scheme: Scheme, num_ranks: int) -> Strategy:
    return Strategy((scheme,) * (num_ranks // scheme.num_devices))


def _probe_plan(strategy: Strategy, num_ranks: int, length: int) -> IterationPlan:
    """Every pipeline runs PP rows of one sequence of `length` tokens."""
    pipelines = []
    count = 0
    for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True):
        rows = tuple((count + i,) for i in range(scheme.pp))
        count += scheme.pp
        pipelines.append(
            PipelinePlan(scheme=scheme, ranks=ranks, micro_batches=rows, makespan_ms=0.0, lower_bound_ms=0.0)
        )
    return IterationPlan(
        iteration=0,
        num_devices=num_ranks,
        strategy=strategy,
        sample_indices=tuple(range(count)),
        lengths=(length,) * count,
        num_label_tokens=count * (length - 1),
        pipelines=tuple(pipelines),
        makespan_ms=0.0,
        lower_bound_ms=0.0,
    )


def _probe_example(vocab_size: int, length: int) -> Example:
    tokens = torch.arange(length, dtype=torch.int64) * 7919 % vocab_size
    return tokens, tokens


def _stage_ms(propagator: Propagator, strategy: Strategy, length: int) -> float:
    """Stage time, of the slowest rank, for one row of one sequence of `length` tokens."""
    plan = _probe_plan(strategy, propagator.num_ranks, length)
    example = _probe_example(propagator.skeleton.vocab_size, length)
    return propagator.time_propagation(plan, lambda _: example) / (2 * strategy.schemes[0].pp - 1)


def _scheme_entry(scheme: Scheme, lengths: Sequence[int], times_ms: Sequence[float]) -> dict[str, Any]:
    fit = fit_latency(lengths, times_ms)
    return {
        "tp": scheme.tp,
        "pp": scheme.pp,
        "quadratic_ms": fit.model.quadratic_ms,
        "linear_ms": fit.model.linear_ms,
        "constant_ms": fit.model.constant_ms,
        "measured": {"lengths": list(lengths), "times_ms": [round(t, 3) for t in times_ms]},
        "relative_residuals": [round(r, 4) for r in fit.relative_residuals],
        "r_squared": round(fit.r_squared, 5),
    }


def _saturation(entries: Sequence[dict[str, Any]], longest: int) -> dict[str, int]:
    """UtilLen per TP degree, from its smallest PP."""
    by_tp: dict[int, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda e: -e["pp"]):
        by_tp[entry["tp"]] = entry
    return {
        str(tp): saturation_tokens(
            fit_latency(entry["measured"]["lengths"], entry["measured"]["times_ms"]).model, longest
        )
        for tp, entry in sorted(by_tp.items())
    }


def _activation_bytes(propagator: Propagator, strategy: Strategy, length: int) -> float:
    """Bytes kept for backward per token, layer and hidden unit under TP (A of App. B.1), head included."""
    plan = _probe_plan(strategy, propagator.num_ranks, length)
    example = _probe_example(propagator.skeleton.vocab_size, length)
    with _count_saved_bytes(propagator) as counted:
        propagator.time_propagation(plan, lambda _: example)
    for address in propagator.pool.addresses():  # autograd keeps views of weights, which are not activations
        counted.pop(address, None)
    most = propagator.max_over_ranks(sum(counted.values()))
    skeleton = propagator.skeleton
    tp = strategy.schemes[0].tp
    return most / (skeleton.num_layers * length * skeleton.hidden_size / tp)


@contextmanager
def _count_saved_bytes(propagator: Propagator) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps, parameters left out, by address."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _layer_params(skeleton: Skeleton) -> float:
    layer = {b.param for unit in skeleton.units[1:-1] for b in unit.bindings}
    return sum(skeleton.specs[i].numel for i in layer) / skeleton.num_layers


def _state_memory(skeleton: Skeleton) -> dict[str, float]:
    """B and alpha of App. B.1, counted from the dtypes in use."""
    element = torch.finfo(skeleton.params[0].dtype).bits // 8
    sharded = element + OPTIMIZER_BYTES
    held = element + GRADIENT_BYTES
    return {
        "state_bytes_per_layer_per_hidden2": _layer_params(skeleton)
        / skeleton.hidden_size**2
        * (sharded + held),
        "sharded_fraction": sharded / (sharded + held),
    }


def _hardware() -> dict[str, Any]:
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
        memory, reserved = psutil.virtual_memory().total // ranks_here, 0
        name = "cpu"
    else:
        memory, reserved = int(accelerator.total_memory()), 2**30  # contexts and communicators
        name = str(torch.cuda.get_device_name()) if torch.cuda.is_available() else accelerator.device_name()
    return {
        "name": name,
        "memory_bytes": memory,
        "reserved_bytes": reserved,
        "safety_margin_bytes": memory // 20,
    }
