"""Arguments and datasets of TRL's trainers: what is refused, what has no effect, the DeepSpeed
configuration of a script that has none, and chats where TRL alone would train something else
without a word.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

from accelerate.utils import DeepSpeedPlugin
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.dataset import check_dataset_columns
from ds_hydra.sampler.data.sft import OF_OTHER_TOOLS, check_counts, render_chat
from ds_hydra.trainer.arguments import NOT_CALLED, Note, check_common_arguments

OF_THE_LOOP = frozenset(
    (
        "gradient_accumulation_steps", "per_device_train_batch_size",
        "average_tokens_across_devices", "dataloader_drop_last", "dataloader_num_workers",
        "dataloader_prefetch_factor", "dataloader_persistent_workers",
        "dataloader_multiprocessing_context", "dataloader_in_order",
    )
)  # fmt: skip
"""Arguments of transformers that HydraTrainer refuses or reports, and that are honoured here."""

_REFUSED = {
    "activation_offloading": "set gradient_checkpointing=True (hydra.activation_checkpointing) instead",
    "use_weighting": "its weights need the sum of squared probabilities, which is not computed; leave it out",
    "sync_ref_model": "the reference is sharded by an engine of its own and stays as it is; leave it out",
    "cast_lm_head_to_fp32": "log-probabilities are computed in fp32 from the logits of the model's dtype; leave it out",
}
"""Fields of TRL's configurations that would change what is trained, with what to do instead."""

DS_CONFIG = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1_000_000_000,
    "hydra": {},
}
"""What `TrainingArguments(deepspeed=...)` is where a script gives none; the optimizer is the
Trainer's.
"""


_SAID_BY_LAUNCHER = ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_ZERO_STAGE")


def add_deepspeed(args: TrainingArguments) -> None:
    """Have `args` use DeepSpeed, where neither they nor `accelerate launch` say how."""
    if args.deepspeed is not None or any(name in os.environ for name in _SAID_BY_LAUNCHER):
        return
    args.deepspeed = copy.deepcopy(DS_CONFIG)
    args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
    args.hf_deepspeed_config.trainer_config_process(args)
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def complete_section(ds_config: dict[str, Any], args: TrainingArguments, model: Any) -> None:
    """Add what `args` and `model` tell of the "hydra" section, and accumulation, which is done
    here.
    """
    ds_config["gradient_accumulation_steps"] = 1
    section = dict(ds_config.get("hydra") or {})
    longest = getattr(args, "max_length", None)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = [length for length in (longest, positions) if length]
    if "context_length" not in section:
        if not known:
            raise HydraConfigError(
                "how long sequences may get is not known: neither max_length nor the model say it; set "
                'hydra.context_length in the DeepSpeed JSON, such as "hydra": {"context_length": 4096}'
            )
        section["context_length"] = min(known)
    num_examples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    section.setdefault("tokens_per_iteration", section["context_length"] * num_examples)
    ds_config["hydra"] = section


_HANDLED = ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer")


def check_trainer(kind: type) -> None:
    """Raise HydraConfigError for a trainer of TRL that does not run on the engine's scores: it asks
    the model for logits, hidden states or a teacher, or trains a model of another kind.
    """
    base = next((k for k in kind.__mro__ if k.__module__.partition(".")[0] == "trl"), None)
    if base is not None and (base.__name__ not in _HANDLED or "experimental" in base.__module__):
        raise HydraConfigError(
            f"{kind.__name__} is a {base.__name__} of {base.__module__.rpartition('.')[0]}, which ds_hydra.trl "
            f"does not run; it runs {', '.join(_HANDLED)} of TRL. For another loss on token log-probabilities call "
            "engine.train_batch(batch, loss=...) with one of ds_hydra.losses or your own, or train with TRL on plain "
            'ZeRO-3, without HydraMixin and the "hydra" section'
        )


_IN_THE_ENGINE = (
    "passes of training run inside the engine, in the dtype of the DeepSpeed JSON; leave it out"
)
NOT_CALLED_OF_TRL = {
    "compute_loss_context_manager": _IN_THE_ENGINE,
    "autocast_smart_context_manager": _IN_THE_ENGINE,
    "_prepare_context_parallel_inputs": _IN_THE_ENGINE,
    "create_optimizer_and_scheduler": NOT_CALLED["create_optimizer_and_scheduler"],
}
"""Names of transformers 5 that stock trainers of TRL call in training and those on HydraMixin do
not, with what to do instead.
"""


def check_trl_arguments(args: TrainingArguments, note: Note) -> None:
    """Raise HydraConfigError for what would not be honoured; `note` what has no effect."""
    check_common_arguments(args, note, problems=_find_refused(args), honoured=OF_THE_LOOP)


def _find_refused(args: TrainingArguments) -> Iterator[str]:
    for name, why in _REFUSED.items():
        if value := getattr(args, name, None):
            yield f"{name}={value!r}: {why}"
    if (temperature := getattr(args, "temperature", 1.0)) not in (None, 1.0):
        yield f"temperature={temperature!r}: log-probabilities are those of temperature 1; set it to 1.0"


_READ = ("seq_lengths",)
"""Columns that TRL reads beside those of HydraTrainer."""


def with_clean_chats(processing_class: Any, counting: slice | None) -> Any:
    """A copy of the tokenizer (or processor) whose `apply_chat_template` is `render_chat`. Of a
    chat without a prompt for generation these messages count, or what is marked of them; None:
    nothing is known of that.
    """
    if processing_class is None or not hasattr(processing_class, "apply_chat_template"):
        return processing_class

    def render(conversation: Any, **settings: Any) -> Any:
        if counting is not None and not settings.get("add_generation_prompt"):
            template = settings.get("chat_template") or processing_class.chat_template
            is_marked = settings.get("return_assistant_tokens_mask")
            check_counts(list(conversation)[counting], str(template) if is_marked else None)
        return render_chat(processing_class, conversation, **settings)

    reader = copy.copy(processing_class)
    reader.apply_chat_template = render
    return reader


def check_columns_of(dataset: Any) -> list[str]:
    """The columns of `dataset`, which may be a stream. Raises HydraConfigError where it has a mask
    that TRL does not read.
    """
    if dataset.features is None:
        dataset = dataset._resolve_features()
    names = list(dataset.features)
    for name in OF_OTHER_TOOLS:
        if name in names and "labels" not in names:
            raise HydraConfigError(
                f"the dataset has {name!r}, which TRL does not read; call it 'assistant_masks', or put -100 into "
                "'labels' where it is 0"
            )
    check_dataset_columns(dataset, _READ)
    return names
