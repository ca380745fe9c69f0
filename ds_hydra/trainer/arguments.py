"""TrainingArguments and overridden methods under ds_hydra: refused ones, those without effect, and
those that become a key of "hydra".

[Note: Overridden methods]
Some methods of transformers.Trainer are not called under ds_hydra, or are called with nothing in
their hands: overriding one of them is refused by name. All others are called as transformers calls
them, so that overriding them works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from ds_hydra.configs import HydraConfig
from ds_hydra.configs.ds_config import NO_BATCH_SIZE, NO_LAST_BATCH, ONE_STEP, OWN_PARALLELISM
from ds_hydra.errors import HydraConfigError
from ds_hydra.refusals import Refusal, each, is_set, refuse_all

Note = Callable[[str], None]
"""Shows one message to the user."""

_OWN_LOSS = "the loss is the cross entropy averaged over all label tokens, computed inside the last pipeline stage"
_OWN_LAYERS = "ds_hydra runs the layers itself, on slices of the weights"
_OWN_DATA = "the engine draws, plans and loads the global batches itself"

_OF_MATRICES = Refusal(
    "optim", "it projects whole matrices, or averages weights between train() and eval() of its own, and ZeRO-3 gives "
    "it flat shards; use optim='adamw_torch' or an optimizer in the JSON", "galore_adamw", "adamw_torch",
    lambda optim: optim.startswith(("galore", "apollo", "schedule_free")),
)  # fmt: skip

REFUSED = (
    Refusal(
        "gradient_accumulation_steps", f"{ONE_STEP}; leave it out and multiply hydra.tokens_per_iteration", 4, 1
    ),
    Refusal("torch_compile", f"{_OWN_LAYERS}; leave it out and set hydra.compile_layers"),
    Refusal(
        "auto_find_batch_size",
        "plans keep every rank within its memory; leave it out and set hydra.memory_limit_bytes if memory is shared",
    ),
    Refusal("parallelism_config", f"{OWN_PARALLELISM}; leave it out"),
    Refusal("fsdp", "parameters are sharded by DeepSpeed ZeRO-3; leave it out", "full_shard"),
    Refusal(
        "enable_jit_checkpoint",
        "it saves before the optimizer's step, which an iteration contains, so that weights would be one step ahead of "
        "their checkpoint; leave it out and set hydra.faults.save_on_sigterm to output_dir",
    ),
    Refusal(
        "optim", "it steps inside of backward; use optim='adamw_torch' or an optimizer in the JSON", "adalomo",
        "adamw_torch", lambda optim: optim in ("lomo", "adalomo") or optim.endswith("_layerwise"),
    ),
    _OF_MATRICES,
    Refusal(
        "debug", f"{_OWN_LAYERS}, where its hooks are not called; leave it out", "underflow_overflow", "",
        lambda options: "underflow_overflow" in options,
    ),
    *(
        Refusal(
            f"{kind}_checkpointing_kwargs",
            "every layer is checkpointed on the device; leave out every_n_layers and offload", {"offload": True}, {},
            lambda options: bool({"every_n_layers", "offload"} & set(options or ())),
        )
        for kind in ("activation", "gradient")
    ),
)  # fmt: skip
"""Arguments that would change training."""

_NO_DDP = "gradients go to their ZeRO-3 owners, not through DDP"

WITHOUT_EFFECT = (
    Refusal("per_device_train_batch_size", NO_BATCH_SIZE, 4),
    Refusal("average_tokens_across_devices", f"{_OWN_LOSS} of all ranks", False),
    Refusal("dataloader_drop_last", NO_LAST_BATCH),
    Refusal("dataloader_num_workers", f"{_OWN_DATA}; hydra.planner.num_workers plan beside training", 2),
    Refusal("dataloader_prefetch_factor", f"{_OWN_DATA}; plans are made four iterations ahead", 2),
    *each("dataloader_persistent_workers dataloader_multiprocessing_context", _OWN_DATA, "spawn"),
    Refusal("dataloader_in_order", _OWN_DATA, False),
    Refusal(
        "train_sampling_strategy", "global batches are random, and the plan balances their sequences",
        "group_by_length", applies=lambda order: order in ("group_by_length", "batch_rebalance"),
    ),
    Refusal("torch_empty_cache_steps", "slices are freed at the end of every iteration", 1),
    *each("bf16_full_eval fp16_full_eval", "evaluation runs in the dtype of training"),
    *each("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_bucket_cap_mb", _NO_DDP, 1),
)  # fmt: skip
"""Arguments that are legal and change nothing; each that is set is a message."""

_OF_JSON = {
    "optimizer": {
        "optim": "", "optim_args": "", "learning_rate": "lr", "weight_decay": "weight_decay",
        "adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps",
    },
    "scheduler": {
        "lr_scheduler_type": "", "lr_scheduler_kwargs": "", "warmup_steps": "warmup_num_steps"
    },
}  # fmt: skip
"""Arguments that transformers does not read where the JSON has such a section, but for the named
parameter of it.
"""

_DEFAULTS = {
    field.name: field.default if field.default is not MISSING else None
    for field in fields(TrainingArguments)
}
_PADDING_COLLATORS = (
    transformers.DataCollatorWithPadding,
    transformers.DataCollatorForSeq2Seq,
    transformers.DataCollatorWithFlattening,
)


def check_arguments(args: TrainingArguments, note: Note) -> None:
    """Raise HydraConfigError for arguments that are not honoured; `note` those without effect."""
    kind = type(args)
    problems = []
    if any(base.__module__.partition(".")[0] == "trl" for base in kind.__mro__):
        problems.append(
            f"{kind.__name__} is a configuration of TRL, most of whose fields HydraTrainer does not read; use "
            "TrainingArguments, or a trainer of ds_hydra.trl"
        )
    check_common_arguments(args, note, problems=problems)


def check_common_arguments(
    args: TrainingArguments,
    note: Note,
    *,
    problems: Iterable[str],
    honoured: Collection[str] = (),
) -> None:
    """Refuse arguments that no Trainer honours, except `honoured`, and report the Trainer's own
    `problems`, in one HydraConfigError. `note` gets those without effect.
    """
    found = [*_find_refused(args, honoured), *problems]
    refuse_all(f"these {type(args).__name__} are not supported:", found)
    set_ones = (row for row in WITHOUT_EFFECT if _is_set(args, row.name))
    unused = [(row.name, row.text) for row in set_ones if row.applies_to(getattr(args, row.name))]
    for name, why in (*unused, *_find_unread(args)):
        if name not in honoured:
            note(f"TrainingArguments.{name} has no effect: {why}")


def map_arguments(args: TrainingArguments, hydra: HydraConfig, note: Note) -> HydraConfig:
    """`hydra` with the settings of TrainingArguments on order, seed, determinism, noise and
    activation checkpointing.

    A key that the "hydra" section gives itself must not contradict them.
    """
    kind = type(args).__name__
    wanted: dict[str, tuple[str, Any]] = {}
    if args.data_seed is not None:
        wanted["seed"] = ("data_seed", args.data_seed)
        if args.data_seed != args.seed:
            note(
                f"{kind}.data_seed {args.data_seed} orders the data and draws noise (dropout of adapters, NEFTune); "
                f"{kind}.seed {args.seed} is that of everything else"
            )
    elif _is_set(args, "seed") and "seed" not in hydra.model_fields_set:
        wanted["seed"] = ("seed", args.seed)
    if args.train_sampling_strategy == "sequential":
        wanted["shuffle"] = ("train_sampling_strategy='sequential'", False)
    if args.activation_checkpointing or args.gradient_checkpointing:
        wanted["activation_checkpointing"] = ("activation_checkpointing", True)
    if args.full_determinism:
        wanted["deterministic"] = ("full_determinism", True)
    if args.neftune_noise_alpha is not None:
        wanted["neftune_noise_alpha"] = ("neftune_noise_alpha", args.neftune_noise_alpha)
    for key, (source, value) in wanted.items():
        own = getattr(hydra, key)
        if key in hydra.model_fields_set and own != value:
            raise HydraConfigError(
                f"hydra.{key} is {own!r}, {kind}.{source} asks for {value!r}; make them equal or remove one of them"
            )
        try:
            HydraConfig.parse({"context_length": 2, "tokens_per_iteration": 2, key: value})
        except HydraConfigError as error:
            raise HydraConfigError(f"{kind}.{source} sets {error}") from error
        if own != value:
            note(f"{kind}.{source} sets hydra.{key} to {value!r}")
    return hydra.model_copy(update={key: value for key, (_, value) in wanted.items()})


def check_dtype(model: nn.Module, trained: torch.dtype, note: Note) -> None:
    """Raise HydraConfigError for a model in float16 whose loss nobody would scale; `note` that one
    in bfloat16 stays there. `trained` is what its configuration says; fp32 is cast to by nobody.
    """
    if trained != torch.float32:
        return
    loaded = {param.dtype for param in model.parameters()}
    if torch.float16 in loaded:
        raise HydraConfigError(
            "the model is loaded in torch.float16 and fp16 is off, so that DeepSpeed would train it in torch.float16 "
            "without scaling its loss; set fp16=True, or load it with dtype=torch.float32 "
            "(model_init_kwargs={'dtype': 'float32'} in TRL's configurations)"
        )
    if torch.bfloat16 in loaded:
        note(
            "the model is loaded in torch.bfloat16 and bf16 is off: it is trained and saved in torch.bfloat16, as with "
            "bf16=True; set bf16=True to say so, or load it with dtype=torch.float32"
        )


def check_dtype_of_evaluation(args: TrainingArguments, ds_config: Mapping[str, Any]) -> None:
    """Raise HydraConfigError where a switch of evaluation has decided how weights are trained:
    transformers fills "auto" in with it.
    """
    for name in ("bf16", "fp16"):
        is_on = (ds_config.get(name) or {}).get("enabled") is True
        if is_on and getattr(args, f"{name}_full_eval") and not getattr(args, name):
            raise HydraConfigError(
                f"{name}_full_eval=True without {name}=True: the engine evaluates as it trains, and would train in "
                f"{name}; set {name}=True, or leave {name}_full_eval out, with {name}.enabled of the JSON false or "
                '"auto"'
            )


def correct_best_metric(args: TrainingArguments, note: Note) -> None:
    """Let the least perplexity be the best: transformers takes every metric for one to be raised
    whose name does not end in "loss".
    """
    metric = args.metric_for_best_model or ""
    if metric.endswith("perplexity") and args.greater_is_better:
        args.greater_is_better = False
        note(f"metric_for_best_model={metric!r} sets greater_is_better to False")


def drop_batch_size_mismatches(hf_config: Any) -> None:
    """Forget that batch sizes in JSON and TrainingArguments differ, which transformers would call
    an error.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu")
    starts = tuple(f"- ds {key}=" for key in keys)
    hf_config.mismatches = [
        m for m in getattr(hf_config, "mismatches", []) if not m.startswith(starts)
    ]


def check_data_collator(collator: Any, note: Note) -> None:
    """Raise HydraConfigError for a collator that does more than pad or flatten: rows are packed by
    the plan.
    """
    name = getattr(collator, "__name__", type(collator).__name__)
    kind = type(collator)  # a subclass may mask labels, or whatever else it was written for
    if collator is transformers.default_data_collator or kind in _PADDING_COLLATORS:
        return
    if kind is not transformers.DataCollatorForLanguageModeling or collator.mlm:
        raise HydraConfigError(
            f"data_collator is {name}, but sequences are packed without padding, by the plan; leave it out and put "
            "what it computes into the dataset (input_ids with labels, assistant_masks or completion_mask)"
        )
    note(
        f"data_collator {name} is not used: sequences are packed without padding, and labels are those of the dataset, "
        "else all tokens, those included that pad elsewhere (often the end of a text)"
    )


def section_of_json(args: TrainingArguments, section: str) -> Mapping[str, Any]:
    """The section of the DeepSpeed JSON, which comes before the arguments; empty without one."""
    plugin = args.deepspeed_plugin
    return {} if plugin is None else _mapping(plugin.hf_ds_config.config.get(section))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}  # all else is refused elsewhere


def _has_own_optimizer(args: TrainingArguments) -> bool:
    return bool(section_of_json(args, "optimizer"))


def _find_unread(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    """Arguments that an optimizer or a scheduler of the JSON replaces, with what does."""
    sections = {key: section_of_json(args, key) for key in _OF_JSON}
    given = " ".join(name for of in sections.values() for name in _mapping(of.get("params")))
    for key, names in _OF_JSON.items():
        if not (kind := sections[key].get("type")):
            continue
        for name, param in names.items():
            # "lr" of the optimizer may be "warmup_max_lr" of the scheduler, or "muon_lr"
            if _is_set(args, name) and not (param and param in given):
                yield name, f"the JSON has the {key} {kind}, and its params are what is used"


def _find_refused(args: TrainingArguments, honoured: Collection[str]) -> Iterator[str]:
    for row in REFUSED:
        is_replaced = row is _OF_MATRICES and _has_own_optimizer(args)
        if row.name not in honoured and not is_replaced:
            value = _plain(getattr(args, row.name))
            yield from filter(None, [row.find_problem(value, _DEFAULTS[row.name])])


def _plain(value: Any) -> Any:
    """The value as a user writes it: of an option its text, of several their texts."""
    if isinstance(value, list):
        return " ".join(str(_plain(option)) for option in value)
    return getattr(value, "value", value)


def _is_set(args: TrainingArguments, name: str) -> bool:
    return is_set(getattr(args, name), _DEFAULTS[name])


_LOSS_IN_LAST_STAGE = (
    "the loss is computed inside the last pipeline stage, as the cross entropy averaged over all label tokens of "
    "the iteration; leave it out"
)

NOT_CALLED = (
    *each(
        "get_train_dataloader _get_dataloader _remove_unused_columns _get_collator_with_removed_columns "
        "_set_signature_columns_if_needed",
        "the engine draws, plans and packs global batches itself; choose rows and their order with "
        "_get_train_sampler(), and put what else it computes into train_dataset",
    ),
    Refusal("_get_eval_sampler", "rows are evaluated in the order of eval_dataset; select them there"),
    *each(
        "get_batch_samples _get_num_items_in_batch _prepare_input _prepare_inputs _prepare_context_parallel_inputs",
        "batches never pass through the Trainer; put what it computes into train_dataset",
    ),
    Refusal(
        "create_optimizer_and_scheduler",
        "DeepSpeed asks for each by itself; override create_optimizer() and create_scheduler()",
    ),
    *each(
        "training_step compute_loss compute_loss_context_manager autocast_smart_context_manager", _LOSS_IN_LAST_STAGE
    ),
    Refusal(
        "get_total_train_batch_size",
        "hydra.tokens_per_iteration decides how many sequences there are in one; leave it out",
    ),
)  # fmt: skip
"""Methods of transformers 5 that a run does not call; a test compares them with the calls of its
Trainer.
"""

_STOCK = dict(vars(Trainer))


def check_overrides(
    trainer: Any, not_called: Sequence[Refusal] = NOT_CALLED, others: Iterable[str] = ()
) -> None:
    """Raise HydraConfigError where `trainer` has its own version of something that is not called;
    `others` are problems of the same kind.

    A method may come from a subclass, or have been set on the trainer or on transformers.Trainer.
    """
    overridden = [row for row in not_called if is_overridden(trainer, row.name)]
    problems = [f"{row.name}(): {row.text}" for row in overridden]
    problems += [*_find_shadowed(trainer, {row.name for row in not_called}), *others]
    refuse_all(f"{type(trainer).__name__} overrides what would not be used:", problems)


def is_overridden(trainer: Any, *names: str) -> bool:
    """Whether a class of the user's has its own version of one of `names`, or the trainer itself,
    or transformers' Trainer since this module was imported.
    """
    users = [vars(kind) for kind in type(trainer).__mro__ if not _is_known(kind)]
    return any(
        vars(Trainer)[name] is not _STOCK[name]
        or any(name in own for own in (vars(trainer), *users))
        for name in names
    )


def _is_known(kind: type) -> bool:
    """Whether a class is the Trainer, one of its bases, or of a library that is known here."""
    return kind in Trainer.__mro__ or kind.__module__.partition(".")[0] in ("ds_hydra", "trl")


def _find_shadowed(trainer: Any, not_called: Collection[str]) -> Iterator[str]:
    """Methods of the user's that stand behind those of ds_hydra among the bases, and that these
    replace.
    """
    mro = type(trainer).__mro__
    ours = [kind for kind in mro if kind.__module__.partition(".")[0] == "ds_hydra"]
    replaced = {
        name: kind
        for kind in ours
        for name, method in vars(kind).items()
        if name in _STOCK and "__class__" not in _names_from_outside(method)  # calls no super()
    }
    for kind in mro[mro.index(ours[0]) : mro.index(Trainer)]:
        for name in () if _is_known(kind) else vars(kind):
            if name in replaced and name not in not_called:
                yield (
                    f"{name}() of {kind.__name__}: {replaced[name].__name__} stands before it among the bases and "
                    f"does this itself; override it in {type(trainer).__name__}, and call super()"
                )


def _names_from_outside(method: Any) -> tuple[str, ...]:
    code = getattr(method, "__code__", None)
    return ("__class__",) if code is None else code.co_freevars


def find_set(trainer: Any) -> Iterator[str]:
    """Find attributes that may have been set after the trainer was made."""
    for name in ("compute_loss_func", "label_smoother"):
        value = getattr(trainer, name)
        if value is not None and type(value) is not LabelSmoother:
            yield f"{name} is {value!r}: {_LOSS_IN_LAST_STAGE}"
