"""The DeepSpeed JSON around the "hydra" section: what is refused, pointed out, and filled in."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, Literal

from ds_hydra.configs.files import plain_json, read_json_object
from ds_hydra.configs.hydra_config import SMALLEST_SECTION, HydraConfig, find_auto, join_problems
from ds_hydra.errors import HydraConfigError
from ds_hydra.refusals import Refusal, each

logger = logging.getLogger(__name__)

KNOWN_TOP_LEVEL_KEYS = frozenset(
    """
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile csv_monitor data_efficiency data_parallel_size data_types
    dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state
    expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation
    memory_breakdown optimizer pipeline prescale_gradients scheduler
    seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """.split()  # noqa: SIM905 (a list literal would take fifty lines)
)
"""Top-level keys that DeepSpeed 0.19 reads. It ignores all others: a misspelled one has no
effect.
"""

_REMOVED_KEYS = frozenset(
    """
    amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula
    progressive_layer_drop quantize_training sparse_attention sparse_gradients
    """.split()  # noqa: SIM905
)
"""Keys that DeepSpeed 0.19 itself reports at the start of the engine as no longer read."""

_NUMBERS = ("gradient_clipping", "steps_per_print")
"""Top-level numbers that DeepSpeed reads without a look at their type."""

_READ_OF_SECTION = {
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "data_types": ("grad_accum_dtype",),
    "checkpoint": (
        *("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"),
    ),
}
"""All that DeepSpeed reads of these sections."""

_SECTIONS = frozenset(
    """
    activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger compile csv_monitor
    data_efficiency data_types expert_parallel flops_profiler fp16 hybrid_engine optimizer scheduler
    tensor_parallel tensorboard timers torch_autocast wandb zero_optimization
    """.split()  # noqa: SIM905
)
"""Keys whose values are objects."""

_SWITCHES = (
    *("checkpoint.use_node_local_storage", "checkpoint.load_universal"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dump_state"),
    *("bf16.enabled", "fp16.enabled"),
)
"""Keys for which DeepSpeed takes any text for true."""

_NEAR_MISS = 0.82
"""Similarity from which an unknown key counts as misspelled: catches one wrong letter in a word of
four.
"""


def _is_on(value: Any) -> bool:
    return value not in (None, False)


def _is_above(limit: int) -> Callable[[Any], bool]:
    def is_above(value: Any) -> bool:
        try:
            return value not in (None, "auto") and float(value) > limit
        except (TypeError, ValueError):  # refused, whatever it means
            return True

    return is_above


def _of_key(
    key: str,
    reason: str,
    example: Any = True,
    works: Any = False,
    applies: Callable[[Any], bool] = _is_on,
) -> Refusal:
    """Row of a key of DeepSpeed, with the advice that follows from what `works`."""
    advice = "remove the key" + f" or set it to {json.dumps(works)}" * (works is not None)
    return Refusal(key, f"{reason}; {advice}", example, works, applies)


_ZERO = "zero_optimization"
_OWN_LAYOUT = (
    "ds_hydra reads the ZeRO-3 partitions itself and knows the plain layout over all ranks only"
)
OWN_PARALLELISM = "ds_hydra chooses TP and PP itself, every iteration (hydra.strategies)"
_OWN_EXECUTION = (
    "ds_hydra runs the layers itself, outside of the forward and backward that this changes"
)
ONE_STEP = (
    "an iteration is one optimizer step over hydra.tokens_per_iteration tokens, in as many micro-batches as the plan "
    "needs"
)
NO_BATCH_SIZE = "hydra.tokens_per_iteration decides how many sequences an iteration has"
NO_LAST_BATCH = "global batches run on from one epoch into the next"
_OWN_FILES = "ds_hydra writes checkpoint files itself, so that a crash leaves the one before"
_FP32_MASTER = "ds_hydra keeps master weights and sums gradients in fp32"

REFUSALS = (
    Refusal(
        f"{_ZERO}.stage",
        'parameters live fully sharded between iterations; set "zero_optimization": {"stage": 3}', 2, 3,
        lambda stage: stage != 3,
    ),
    _of_key(
        f"{_ZERO}.zero_hpz_partition_size",
        "ds_hydra keeps gathered weights on the node by itself where that pays, or where hydra.strategies has schemes "
        "such as <sp8,1;hpz>", 2, 1, _is_above(1),
    ),
    _of_key(f"{_ZERO}.mics_shard_size", _OWN_LAYOUT, 1, None, _is_above(0)),
    _of_key(f"{_ZERO}.mics_hierarchical_params_gather", _OWN_LAYOUT, works=None),
    _of_key(f"{_ZERO}.zero_quantized_weights", _OWN_LAYOUT),
    _of_key(f"{_ZERO}.zero_quantized_nontrainable_weights", _OWN_LAYOUT),
    _of_key(f"{_ZERO}.zero_quantized_gradients", "gradients are summed in fp32 at their owner"),
    _of_key(
        f"{_ZERO}.offload_param.device",
        "slices are pulled out of the device's own shards, in every iteration; offload_optimizer works", "cpu", "none",
        lambda device: device in ("cpu", "nvme"),
    ),
    _of_key(
        f"{_ZERO}.cpu_offload_param",
        "it is DeepSpeed's old name of offload_param, which slices are not pulled from; offload_optimizer works",
    ),
    _of_key(
        f"{_ZERO}.offload_optimizer.device",
        "of an optimizer on NVMe DeepSpeed 0.19 restores nothing in load_checkpoint, and says nothing of it", "nvme",
        "cpu", lambda device: device == "nvme",
    ),
    _of_key(f"{_ZERO}.offload_optimizer.super_offload", _OWN_EXECUTION),
    _of_key(f"{_ZERO}.zenflow", _OWN_EXECUTION, {"topk_ratio": 0.1}, None),
    _of_key("tensor_parallel.autotp_size", OWN_PARALLELISM, 2, 0, _is_above(1)),
    _of_key("tensor_parallel.tp.tp_size", OWN_PARALLELISM, 2, 1, _is_above(1)),
    _of_key(
        "sequence_parallel_size",
        "ds_hydra chooses SP itself, every iteration; to force it set hydra.strategies, e.g. to <sp2,1>", 2, 1,
        _is_above(1),
    ),
    _of_key(
        "expert_parallel.enabled",
        "ds_hydra shares experts itself; to force it set hydra.strategies, e.g. to <sp2,1;ep=2>",
    ),
    _of_key("torch_autocast.enabled", f'{_OWN_EXECUTION}; use "bf16": {{"enabled": true}}'),
    _of_key("compile.deepcompile", _OWN_EXECUTION),
    _of_key("hybrid_engine.enabled", _OWN_EXECUTION),
    _of_key(
        "flops_profiler.enabled",
        "it counts in a forward of DeepSpeed that does not run, and would write nothing; `ds-hydra report` shows "
        "tokens/s, and with hydra.trace_every the times of every stage",
    ),
    _of_key("autotuning.enabled", "it profiles a forward of DeepSpeed that does not run, and ds_hydra tunes itself"),
    _of_key(
        f"{_ZERO}.save_muon_momentum_buffer_in_memory",
        "DeepSpeed then keeps Muon's momentum twice, and a resume restores one of them",
    ),
    _of_key("weight_quantization", _OWN_LAYOUT, {"quantized_initialization": {}}, None),
    _of_key("data_efficiency.enabled", "ds_hydra draws the global batch (hydra.tokens_per_iteration)"),
    _of_key("checkpoint.writer", _OWN_FILES, {"type": "VANILLA"}, None),
    _of_key("datastates_ckpt", _OWN_FILES, {"host_cache_size": 16}, None),
    _of_key("bf16.bf16_master_weights_and_grads", _FP32_MASTER),
    _of_key("fp16.fp16_master_weights_and_grads", _FP32_MASTER),
    _of_key("gradient_accumulation_steps", ONE_STEP, 4, 1, lambda value: value not in (None, 1, "auto")),
    _of_key(
        "managed_gradient_accumulation", "ds_hydra tells DeepSpeed where an iteration ends", False, True,
        lambda value: value is False,
    ),
)  # fmt: skip
"""Checked in this order; all that apply are shown together."""


@dataclass(frozen=True, slots=True)
class FillIn:
    """A DeepSpeed value that ds_hydra needs or gains from, used where the user was silent.

    `unless` lists further keys that show that the user was not silent.
    """

    key: str
    value: int | bool | str
    why: str
    unless: tuple[str, ...] = ()


FILL_INS = (
    FillIn("train_micro_batch_size_per_gpu", 1, "DeepSpeed wants a batch size; training does not use it"),
    FillIn("gradient_accumulation_steps", 1, "the only value that works"),
    FillIn(
        "data_types.grad_accum_dtype", "fp32",
        "owners sum the gradients of all pipelines; DeepSpeed would do that in the dtype of the model",
    ),
    FillIn(
        f"{_ZERO}.stage3_param_persistence_threshold", 0,
        "parameters kept whole on every rank are gathered after each step, and nothing here reads them",
        unless=(f"{_ZERO}.param_persistence_threshold",),
    ),
    FillIn(
        f"{_ZERO}.contiguous_gradients", False,
        "its buffer (reduce_bucket_size, 1 GB by default) serves a backward of DeepSpeed that does not run",
    ),
    FillIn(
        f"{_ZERO}.memory_efficient_linear", False,
        "it replaces torch's linear by a function in Python: eight times the host time of a call, for gathered weights "
        "that do not exist here",
    ),
    FillIn(
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save", True,
        "save_16bit_model and the Trainer's save_model fail without it",
        unless=(
            f"{_ZERO}.gather_16bit_weights_on_model_save", f"{_ZERO}.stage3_gather_fp16_weights_on_model_save"
        ),
    ),
)  # fmt: skip
"""Everything ds_hydra adds to the user's DeepSpeed JSON."""

MUON_FILL_INS = (
    FillIn(
        f"{_ZERO}.reduce_scatter", False, "DeepSpeed refuses Muon with it, and it is of a backward that does not run"
    ),
)  # fmt: skip
"""Settings where the optimizer is Muon."""

WITHOUT_EFFECT = (
    Refusal("train_batch_size", NO_BATCH_SIZE, 64),
    *each(
        "prescale_gradients gradient_predivide_factor",
        "gradients are divided by the number of label tokens, in fp32", 64,
    ),
    Refusal(
        "activation_checkpointing",
        "layers are ds_hydra's; use hydra.activation_checkpointing, and in place of cpu_checkpointing schemes such as "
        "<1,1;ckpt=8;offload> in hydra.strategies, which are proposed where nothing else fits", {"enabled": True},
    ),
    Refusal(
        "comms_logger",
        "it counts collectives of deepspeed.comm, through which neither pull, push nor pipelines go; metrics.jsonl and "
        "`ds-hydra report` have their times (link_ms, hydra.trace_every)", {"enabled": True},
    ),
    Refusal("pipeline", "stages are chosen every iteration (hydra.strategies)", {"enabled": True}),
    Refusal("aio", "it is for offloading to NVMe, which ds_hydra refuses", {"enabled": True}),
    Refusal("dataloader_drop_last", NO_LAST_BATCH),
    Refusal(
        "wall_clock_breakdown",
        "DeepSpeed times a forward and backward of its own, which do not run, and prints 0.00 for them; metrics.jsonl "
        "and `ds-hydra report` have the times of every iteration (hydra.trace_every)",
    ),
)  # fmt: skip
"""Legal DeepSpeed keys that change nothing under ds_hydra; each is a warning."""

_REFUSED_BY_DEEPSPEED = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
"""Values that DeepSpeed wants of these with ZeRO-3: it refuses all others."""


def read_ds_config(config: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], HydraConfig]:
    """The DeepSpeed part (without "hydra", `FILL_INS` applied) and the validated "hydra" section.

    `config` is the path of a JSON file or its content, which is not changed. Raises
    HydraConfigError for what cannot be read, is misspelled, or asks for a feature in `REFUSALS`;
    logs a warning for what is unknown or has no effect. `train_batch_size` is left out of the
    result: DeepSpeed would check it against a micro-batch size and a number of accumulation steps
    that mean nothing here.
    """
    given = config if isinstance(config, Mapping) else _read_json(config)
    document = plain_json(with_known_names(given), "the DeepSpeed config")
    # The content of a misspelled section counts as absent: what is found missing then would
    # mislead.
    if problems := list(_find_misspelled(document)) or list(_find_refused(document)):
        raise HydraConfigError(join_problems("the DeepSpeed config", problems))
    if "hydra" not in document:
        nearest = get_close_matches("hydra", document, n=1)
        hint = f'did you mean it with "{nearest[0]}"?' if nearest else ""
        raise HydraConfigError(
            'the DeepSpeed config has no "hydra" section; '
            + (hint or f"the smallest one is {SMALLEST_SECTION}")
        )
    hydra = HydraConfig.parse(document.pop("hydra"))
    # Once in a run: all ranks read the same.
    say = logger.warning if os.environ.get("RANK", "0") == "0" else logger.debug
    for note in _find_without_effect(document):
        say(note)
    if hydra.tokens_per_iteration < hydra.context_length:
        say(
            f"hydra.tokens_per_iteration is {hydra.tokens_per_iteration}, below hydra.context_length of "
            f"{hydra.context_length}: a sequence above it is an iteration of its own, larger than the others; "
            f"set hydra.tokens_per_iteration to {4 * hydra.context_length} or more"
        )
    document.pop("train_batch_size", None)
    for key, off in _REFUSED_BY_DEEPSPEED.items():
        if key in document:
            document[key] = off
    _fill_in(document)
    link = hydra.link.with_gradient_dtype(_gradient_dtype(document))
    return document, hydra.model_copy(update={"link": link})


def refuse_auto(config: Mapping[str, Any]) -> None:
    """Raise HydraConfigError for values "auto" in DeepSpeed's part of the JSON, which nobody fills
    in where there is no Trainer.
    """
    if keys := find_auto_keys(config):
        raise HydraConfigError(
            f'{", ".join(keys)}: "auto" is what the Trainer fills in (ds_hydra.HydraTrainer); for '
            "ds_hydra.initialize write the value, or leave the key out to get DeepSpeed's default"
        )


def find_auto_keys(config: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose value is "auto", but for those where that is a word of DeepSpeed itself, or
    of ours.
    """
    return [
        ".".join(map(str, location))
        for location in find_auto(config)
        if location[0] != "pipeline"
        and location[-1] != "keep_in_fp32_modules"
        and location != ("hydra", "attention")
    ]


def _gradient_dtype(config: Mapping[str, Any]) -> Literal["fp32", "bf16"]:
    """Dtype in which gradients are sent: the type of training, as DeepSpeed does without
    `communication_data_type`.

    Never fp16: what a rank sends are sums over its micro-batches, which that type may not hold.
    """
    given = find_key(config, "communication_data_type")
    if given in (None, "auto"):
        return "bf16" if find_key(config, "bf16.enabled") in (True, "auto") else "fp32"
    return "bf16" if str(given).lower() == "bf16" else "fp32"


def find_key(config: Mapping[str, Any], dotted_key: str) -> Any:
    """The value at `a.b.c`, or None where any part of the path is absent or no object."""
    value: Any = config
    for key in dotted_key.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def dtype_name(ds_config: Mapping[str, Any]) -> str:
    """torch's name of the type of weights and activations that the DeepSpeed JSON asks for; "auto"
    counts as bf16.
    """
    if find_key(ds_config, "bf16.enabled") in (True, "auto"):
        return "bfloat16"
    return "float16" if find_key(ds_config, "fp16.enabled") in (True, "auto") else "float32"


def _find_misspelled(config: Mapping[str, Any]) -> Iterator[str]:
    known = KNOWN_TOP_LEVEL_KEYS | _REMOVED_KEYS | {"hydra"}
    for key in config:
        if key in known:
            continue
        normalised = key.lower().replace("-", "_")
        meant = sorted(known - _REMOVED_KEYS)
        if nearest := get_close_matches(normalised, meant, n=1, cutoff=_NEAR_MISS):
            yield f'"{key}" is not a DeepSpeed key and would be ignored; did you mean "{nearest[0]}"?'
    for section, read in _READ_OF_SECTION.items():
        content = config.get(section)
        for key in content if isinstance(content, Mapping) else ():
            if key in read or key.startswith("_"):
                continue
            nearest = get_close_matches(key.lower(), read, n=1, cutoff=_NEAR_MISS)
            if nearest:
                hint = f'did you mean "{nearest[0]}"?'
            elif "params" in read:
                hint = f'write it into "{section}.params"'
            else:
                hint = f"it reads {', '.join(read)}"
            yield f"{section}.{key} is not read by DeepSpeed and would be ignored; {hint}"


def _find_refused(config: Mapping[str, Any]) -> Iterator[str]:
    no_objects = [
        key for key in sorted(_SECTIONS & config.keys()) if not isinstance(config[key], Mapping)
    ]
    for key in no_objects:
        yield f"{key} is {json.dumps(config[key], default=repr)}, expected an object: {{...}}"
    for key in _SWITCHES:
        if not isinstance(value := find_key(config, key), bool) and value not in (None, "auto"):
            yield f"{key} is {json.dumps(value)}, expected true or false"
    for key in _NUMBERS:
        number = config.get(key)
        if number is None or number == "auto":
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            yield f"{key} is {number!r}, expected a number; write it without quotes"
        elif number < 0:
            yield f"{key} is {number!r}, expected 0 or more"
    for row in REFUSALS:
        value, section = find_key(config, row.name), row.name.partition(".")[0]
        if section not in no_objects and row.applies_to(value):
            yield f"{row.name} is {json.dumps(value, default=repr)}: {row.text}"


def with_known_names(given: Any) -> Any:
    """`given` as DeepSpeed understands it: "bfloat16" is another name of "bf16", a null section is
    none, and "never print" is 0, or infinity, which accelerate writes and no JSON has.
    """
    if not isinstance(given, Mapping):
        return given
    sections = _SECTIONS | {"bfloat16"}
    known = {key: value for key, value in given.items() if value is not None or key not in sections}
    if "bfloat16" in known:
        other, both = known.pop("bfloat16"), known.get("bf16", {})
        if not isinstance(other, Mapping) or not isinstance(both, Mapping):
            known["bf16"] = other  # refused below
        elif [other.get("enabled"), both.get("enabled")] in ([True, False], [False, True]):
            raise HydraConfigError(
                'bf16.enabled and bfloat16.enabled differ, and are two names of one key; remove "bfloat16"'
            )
        else:
            known["bf16"] = {**other, **both}
    prints = known.get("steps_per_print")
    if type(prints) in (int, float) and prints in (0, inf):
        known["steps_per_print"] = sys.maxsize
    return known


def _find_without_effect(config: Mapping[str, Any]) -> Iterator[str]:
    unused = {row.name: row.text for row in WITHOUT_EFFECT}
    for key, value in config.items():
        is_off = value in (None, False, "auto") or find_key(config, f"{key}.enabled") is False
        if key in unused and not is_off:
            yield f"{key} has no effect: {unused[key]}"
        elif key not in KNOWN_TOP_LEVEL_KEYS | _REMOVED_KEYS:
            nearest = get_close_matches(key, sorted(KNOWN_TOP_LEVEL_KEYS), n=1)
            hint = f'; did you mean "{nearest[0]}"?' if nearest else ""
            yield f'"{key}" is not a key that DeepSpeed or ds_hydra reads{hint}'
    if str(find_key(config, "communication_data_type")).lower() == "fp16":
        yield (
            "communication_data_type is fp16: a rank sends the sum of its micro-batches, which fp16 may not "
            "hold; gradients travel in fp32"
        )
    accumulation = find_key(config, "data_types.grad_accum_dtype")
    if accumulation not in (None, "fp32", "float32", "float", "torch.float32"):
        yield (
            f"data_types.grad_accum_dtype is {accumulation}: the sum over pipelines is rounded to it before "
            "the optimizer step; fp32 is safer"
        )


def _fill_in(config: dict[str, Any]) -> None:
    is_muon = str(find_key(config, "optimizer.type")).lower() == "muon"
    for fill_in in FILL_INS + MUON_FILL_INS if is_muon else FILL_INS:
        if any(find_key(config, key) is not None for key in (fill_in.key, *fill_in.unless)):
            continue
        *path, key = fill_in.key.split(".")
        section = config
        for name in path:
            section[name] = section.get(name) or {}  # an explicit null is silence, too
            section = section[name]
        section[key] = fill_in.value


def _read_json(path: str | Path) -> dict[str, Any]:
    """The object in `path`. A key that is given twice is an error, as in DeepSpeed."""
    if not isinstance(path, str | Path):
        raise HydraConfigError(
            f"the DeepSpeed config is of type {type(path).__name__}, expected a dict or the path of a JSON file"
        )
    return read_json_object(path, _object_without_duplicates)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        raise HydraConfigError(
            f'"{max(keys, key=keys.count)}" is given twice in one object; remove one'
        )
    return document
