"""TrainingArguments and overridden methods under ds_hydra: refused ones, those without effect, and
those that become a key of "hydra".

[Note: Overridden methods]
Some methods of transformers.Trainer are not called under ds_hydra, or are called with nothing in
their hands: overriding one of them is refused by name. All others are called as transformers calls
them, so that overriding them works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from ds_hydra.configs import HydraConfig
from ds_hydra.errors import HydraConfigError

Note = Callable[[str], None]
"""Shows one message to the user."""

_OWN_LOSS = "the loss is the cross entropy averaged over all label tokens, computed inside the last pipeline stage"
_OWN_LAYERS = "ds_hydra runs the layers itself, on slices of the weights"
_OWN_DATA = "the engine draws, plans and loads the global batches itself"

REFUSED = {
    "gradient_accumulation_steps": "an iteration is one optimizer step over hydra.tokens_per_iteration tokens, in as "
    "many micro-batches as the plan needs; leave it out and multiply hydra.tokens_per_iteration",
    "torch_compile": f"{_OWN_LAYERS}; leave it out and set hydra.compile_layers",
    "auto_find_batch_size": "the plan keeps every rank within its memory; leave it out and set "
    "hydra.memory_limit_bytes if memory is shared",
    "parallelism_config": "ds_hydra chooses TP and PP itself, every iteration (hydra.strategies); leave it out",
    "fsdp": "parameters are sharded by DeepSpeed ZeRO-3; leave it out",
    "enable_jit_checkpoint": "it saves before the optimizer's step, which an iteration contains, so that weights would "
    "be one step ahead of their checkpoint; leave it out and set hydra.faults.save_on_sigterm to output_dir",
}
"""Arguments that would change training and are not honoured, with advice."""

WITHOUT_EFFECT = {
    "per_device_train_batch_size": "hydra.tokens_per_iteration decides how many sequences an iteration has",
    "average_tokens_across_devices": f"{_OWN_LOSS} of all ranks",
    "dataloader_drop_last": "global batches run on from one epoch into the next",
    "dataloader_num_workers": f"{_OWN_DATA}; hydra.planner.num_workers plan beside training",
    "dataloader_prefetch_factor": f"{_OWN_DATA}; hydra.planner.lookahead is how far ahead",
    "dataloader_persistent_workers": _OWN_DATA,
    "dataloader_multiprocessing_context": _OWN_DATA,
    "dataloader_in_order": _OWN_DATA,
    "torch_empty_cache_steps": "slices are freed at the end of every iteration",
    "bf16_full_eval": "evaluation runs in the dtype of training",
    "fp16_full_eval": "evaluation runs in the dtype of training",
    "ddp_find_unused_parameters": "gradients go to their ZeRO-3 owners, not through DDP",
    "ddp_bucket_cap_mb": "gradients go to their ZeRO-3 owners, not through DDP",
    "ddp_broadcast_buffers": "gradients go to their ZeRO-3 owners, not through DDP",
    "ddp_static_graph": "gradients go to their ZeRO-3 owners, not through DDP",
}
"""Arguments that are legal and change nothing, with the reason; each is a message."""

_ELSEWHERE = {
    "peft_config": "wrap the model before: model=peft.get_peft_model(model, peft_config); or use "
    "ds_hydra.trl.HydraSFTTrainer, which takes all of TRL's",
    "formatting_func": "write the texts before: train_dataset=train_dataset.map(lambda row: {'text': "
    "formatting_func(row)})",
    "tokenizer": "pass it as processing_class",
    "dataset_text_field": "set hydra.text_column",
    "max_seq_length": "set hydra.context_length",
    "packing": "leave it out: sequences are packed by the plan, and do not see each other",
    "model_init_kwargs": "load the model before: model=AutoModelForCausalLM.from_pretrained(name, **model_init_kwargs)",
    "quantization_config": "load the model before; base weights must not be quantized",
}
"""Arguments of TRL's SFTTrainer, now or once, with where they go."""

_SFT_HONOURED = ("completion_only_loss", "assistant_only_loss")
"""Fields of TRL's SFTConfig that HydraTrainer reads itself."""

_SFT_KEYS = {"max_length": "context_length", "dataset_text_field": "text_column"}
"""Fields of TRL's SFTConfig that say the same as a key of "hydra"."""

_SFT_WITHOUT_EFFECT = {
    "padding_free": "sequences are packed without padding, and do not see each other",
    "pad_to_multiple_of": "sequences are packed without padding",
    "dataset_num_proc": "one process of each node tokenises; `ds-hydra lengths --num-proc` uses more",
}
"""Fields of TRL's SFTConfig that change nothing, with the reason."""

_SFT_REFUSED = {
    "packing": _ELSEWHERE["packing"],
    "eval_packing": _ELSEWHERE["packing"],
    "loss_type": f"{_OWN_LOSS}; set it to 'nll'",
    "activation_offloading": "set hydra.activation_checkpointing instead",
    "shuffle_dataset": "leave it out: hydra.shuffle mixes the rows anew in every epoch",
    "model_init_kwargs": _ELSEWHERE["model_init_kwargs"],
    "chat_template_path": "set processing_class.chat_template",
    "eos_token": "set processing_class.eos_token",
    "pad_token": "leave it out: sequences are packed without padding",
    "dataset_kwargs": "prepare train_dataset before: input_ids with labels, assistant_masks or completion_mask are "
    "taken as they are",
}
"""Fields of TRL's SFTConfig that would change training, with advice; so would those that are not
named here.
"""

_BY_MATRIX = {
    "adafactor": "moments are not factored",
    "grokadamw": "all layers are clipped as one and have one decay of momentum",
    "stable_adamw": "a jump of one holds back all",
}
"""Values of `optim` that compute something for each parameter, with their effect here."""

_OF_JSON = {
    "optimizer": {
        "optim": "",
        "optim_args": "",
        "learning_rate": "lr",
        "weight_decay": "weight_decay",
        "adam_beta1": "betas",
        "adam_beta2": "betas",
        "adam_epsilon": "eps",
    },
    "scheduler": {
        "lr_scheduler_type": "",
        "lr_scheduler_kwargs": "",
        "warmup_steps": "warmup_num_steps",
    },
}
"""Arguments that transformers does not read where the JSON has such a section, but for the named
parameter of it.
"""

_IMPLEMENTATIONS = {"torch", "fused", "apex", "hf", "npu", "xla", "32bit"}
"""Words of `optim` for the implementation of an algorithm, which do not change its result."""

_OF_ADAM_OR_WARMUP = ("adam", "lamb", "onebit", "zerooneadam", "warmup")
"""Beginnings of the types of optimizers and schedules that have all of these parameters."""

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
    check_common_arguments(args, note, problems=_find_refused_of_trl(args))
    if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        note(
            f"TrainingArguments.train_sampling_strategy={args.train_sampling_strategy!r} has no effect: global batches "
            "are random, and the plan balances their sequences"
        )
    for name, value in _set_fields_of_trl(args).items():
        if name in _SFT_WITHOUT_EFFECT:
            note(
                f"{type(args).__name__}.{name}={value!r} has no effect: {_SFT_WITHOUT_EFFECT[name]}"
            )


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
    if found := [*_find_refused(args, honoured), *problems]:
        raise HydraConfigError(
            "\n  ".join([f"these {type(args).__name__} are not supported:", *found])
        )
    for name, why in WITHOUT_EFFECT.items():
        if name not in honoured and _is_set(args, name):
            note(f"TrainingArguments.{name} has no effect: {why}")
    for name, why in _find_unread(args):
        note(f"TrainingArguments.{name} has no effect: {why}")
    if (optim := _optim(args)) in _BY_MATRIX and not _has_own_optimizer(args):
        note(
            f"optim={optim!r} takes the flat shards of ZeRO-3 for its matrices: {_BY_MATRIX[optim]}, and steps "
            "depend on the number of ranks, as in stock DeepSpeed"
        )


def check_elsewhere(given: Iterable[str]) -> None:
    """Raise HydraConfigError for arguments of TRL's SFTTrainer that HydraTrainer does not take."""
    if problems := [f"{name}: {_ELSEWHERE[name]}" for name in given if name in _ELSEWHERE]:
        raise HydraConfigError(
            "\n  ".join(["HydraTrainer does not take these arguments:", *problems])
        )


def read_loss_option(args: TrainingArguments, name: str, given: bool | None) -> bool | None:
    """Read which tokens count, as given to HydraTrainer or in TRL's SFTConfig."""
    of_args = _set_fields_of_trl(args).get(name)
    if given is not None and of_args is not None and given != of_args:
        raise HydraConfigError(
            f"{name} is {given} in HydraTrainer and {of_args} in {type(args).__name__}; remove one of them"
        )
    return of_args if given is None else given


def map_arguments(
    args: TrainingArguments, hydra: HydraConfig, note: Note, *, of_trl: bool = True
) -> HydraConfig:
    """`hydra` with the settings of TrainingArguments on order, seed, determinism, noise and
    activation checkpointing, and the fields `of_trl`.

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
    for name, value in _set_fields_of_trl(args).items() if of_trl else ():
        if name in _SFT_KEYS:
            wanted[_SFT_KEYS[name]] = (name, value)
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


def _optim(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def section_of_json(args: TrainingArguments, section: str) -> Mapping[str, Any]:
    """The section of the DeepSpeed JSON, which comes before the arguments; empty without one."""
    plugin = args.deepspeed_plugin
    return {} if plugin is None else _mapping(plugin.hf_ds_config.config.get(section))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}  # all else is refused elsewhere


def _has_own_optimizer(args: TrainingArguments) -> bool:
    return bool(section_of_json(args, "optimizer"))


def _find_unread(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    """Arguments that an optimizer or a scheduler of the JSON replaces, with advice."""
    sections = {key: section_of_json(args, key) for key in _OF_JSON}
    given = " ".join(name for of in sections.values() for name in _mapping(of.get("params")))
    for key, names in _OF_JSON.items():
        if not (kind := str(sections[key].get("type", ""))):
            continue
        for name, param in names.items():
            is_same = name == "optim" and _computes(_optim(args), kind)
            # "lr" of the optimizer may be "warmup_max_lr" of the scheduler, or "muon_lr"
            if is_same or not _is_set(args, name) or (param and param in given):
                continue
            # SGD has no "betas", OneCycle no "warmup_num_steps"
            has_all = bool(param) and kind.lower().startswith(_OF_ADAM_OR_WARMUP)
            is_known = has_all or param in ("lr", "weight_decay")
            hint = f' without {param}; set {key}.params.{param} to "auto"' * is_known
            yield name, f"the JSON has the {key} {kind}{hint}"


def _computes(optim: str, kind: str) -> bool:
    """Whether a value of `optim` names the optimizer `kind` of the JSON, its states in fp32."""
    algorithm, *implementation = optim.split("_")
    return algorithm.startswith(kind.lower()) and _IMPLEMENTATIONS.issuperset(implementation)


def _find_refused(args: TrainingArguments, honoured: Collection[str]) -> Iterator[str]:
    for name, why in REFUSED.items():
        if name not in honoured and _is_set(args, name):
            yield f"{name}={getattr(args, name)!r}: {why}"
    optim = _optim(args)
    if optim in ("lomo", "adalomo") or optim.endswith("_layerwise"):
        yield f"optim={optim!r} steps inside of backward; use optim='adamw_torch' or an optimizer in the JSON"
    if optim.startswith(("galore", "apollo", "schedule_free")) and not _has_own_optimizer(args):
        yield (
            f"optim={optim!r} projects whole matrices, or averages weights between train() and eval() of its own, and "
            "ZeRO-3 gives it flat shards; use optim='adamw_torch' or an optimizer in the JSON"
        )
    if any(getattr(option, "value", option) == "underflow_overflow" for option in args.debug):
        yield f"debug='underflow_overflow': {_OWN_LAYERS}, where its hooks are not called; leave it out"
    checkpointing = args.activation_checkpointing_kwargs or args.gradient_checkpointing_kwargs or {}
    if unsupported := sorted({"every_n_layers", "offload"} & set(checkpointing)):
        yield (
            f"activation_checkpointing_kwargs with {', '.join(unsupported)}: every layer is checkpointed on the "
            "device; leave them out"
        )


def _find_refused_of_trl(args: TrainingArguments) -> Iterator[str]:
    if _is_of_trl(args) and not any(kind.__name__ == "SFTConfig" for kind in type(args).__mro__):
        yield (
            f"{type(args).__name__} asks for another training than HydraTrainer's; use TrainingArguments, TRL's "
            "SFTConfig, or a trainer of ds_hydra.trl"
        )
        return
    known = {*_SFT_HONOURED, *_SFT_KEYS, *_SFT_WITHOUT_EFFECT}
    for name, value in _set_fields_of_trl(args).items():
        if name == "loss_type" and value == "chunked_nll":
            continue  # the same number, computed in parts
        if name not in known:
            yield f"{name}={value!r}: {_SFT_REFUSED.get(name, 'HydraTrainer does not read it; leave it out')}"


def _is_of_trl(args: TrainingArguments) -> bool:
    return any(kind.__module__.partition(".")[0] == "trl" for kind in type(args).__mro__)


def _set_fields_of_trl(args: TrainingArguments) -> dict[str, Any]:
    """Fields that a configuration of TRL adds, where they are not the default."""
    own = [f for f in fields(args) if f.name not in _DEFAULTS] if _is_of_trl(args) else []
    values = {f.name: getattr(args, f.name) for f in own}
    return {f.name: values[f.name] for f in own if values[f.name] != f.default}


def _is_set(args: TrainingArguments, name: str) -> bool:
    value, default = getattr(args, name), _DEFAULTS[name]
    return value != default and not (not value and not default)  # "", [], None and False all say no


_OWN_GLOBAL_BATCHES = (
    "the engine draws, plans and packs global batches itself; choose rows and their order with _get_train_sampler(), "
    "and put what else it computes into train_dataset"
)
_OWN_BATCHES = "batches never pass through the Trainer; put what it computes into train_dataset"
_LOSS_IN_LAST_STAGE = (
    "the loss is computed inside the last pipeline stage, as the cross entropy averaged over all label tokens of "
    "the iteration; leave it out"
)
_OWN_EVALUATION = "rows are evaluated in the order of eval_dataset; select them there"

NOT_CALLED = {
    "get_train_dataloader": _OWN_GLOBAL_BATCHES,
    "_get_dataloader": _OWN_GLOBAL_BATCHES,
    "_remove_unused_columns": _OWN_GLOBAL_BATCHES,
    "_get_collator_with_removed_columns": _OWN_GLOBAL_BATCHES,
    "_set_signature_columns_if_needed": _OWN_GLOBAL_BATCHES,
    "_get_eval_sampler": _OWN_EVALUATION,
    "get_batch_samples": _OWN_BATCHES,
    "_get_num_items_in_batch": _OWN_BATCHES,
    "_prepare_input": _OWN_BATCHES,
    "_prepare_inputs": _OWN_BATCHES,
    "_prepare_context_parallel_inputs": _OWN_BATCHES,
    "create_optimizer_and_scheduler": "DeepSpeed asks for each by itself; override create_optimizer() and "
    "create_scheduler()",
    "training_step": _LOSS_IN_LAST_STAGE,
    "compute_loss": _LOSS_IN_LAST_STAGE,
    "compute_loss_context_manager": _LOSS_IN_LAST_STAGE,
    "autocast_smart_context_manager": _LOSS_IN_LAST_STAGE,
    "get_total_train_batch_size": "hydra.tokens_per_iteration decides how many sequences there are in one",
}
"""Names of transformers 5; a test compares them with the calls of its Trainer."""

_STOCK = dict(vars(Trainer))


def check_overrides(
    trainer: Any, not_called: Mapping[str, str] = NOT_CALLED, others: Iterable[str] = ()
) -> None:
    """Raise HydraConfigError where `trainer` has its own version of something that is not called;
    `others` are problems of the same kind.

    A method may come from a subclass, or have been set on the trainer or on transformers.Trainer.
    """
    problems = [
        f"{name}(): {why}" for name, why in not_called.items() if is_overridden(trainer, name)
    ]
    problems += [*_find_shadowed(trainer, not_called), *others]
    if problems:
        raise HydraConfigError(
            "\n  ".join([f"{type(trainer).__name__} overrides what would not be used:", *problems])
        )


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


def _find_shadowed(trainer: Any, not_called: Mapping[str, str]) -> Iterator[str]:
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
