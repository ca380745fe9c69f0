"""Methods of transformers.Trainer that a run under ds_hydra does not call, or calls with nothing in
its hands: overriding one of them is refused by name.

All others are called as transformers calls them, so that overriding them works.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from ds_hydra.errors import HydraConfigError

_OWN_DATA = (
    "the engine draws, plans and packs the mini-batches itself; choose rows and their order with _get_train_sampler(), "
    "and put what else it computes into train_dataset"
)
_OWN_BATCHES = "batches never pass through the Trainer; put what it computes into train_dataset"
_OWN_LOSS = (
    "the loss is computed inside the last pipeline stage, as the cross entropy averaged over all label tokens of "
    "the iteration; leave it out"
)
_OWN_EVALUATION = "rows are evaluated in the order of eval_dataset; select them there"

NOT_CALLED = {
    "get_train_dataloader": _OWN_DATA,
    "_get_dataloader": _OWN_DATA,
    "_remove_unused_columns": _OWN_DATA,
    "_get_collator_with_removed_columns": _OWN_DATA,
    "_set_signature_columns_if_needed": _OWN_DATA,
    "_get_eval_sampler": _OWN_EVALUATION,
    "get_batch_samples": _OWN_BATCHES,
    "_get_num_items_in_batch": _OWN_BATCHES,
    "_prepare_input": _OWN_BATCHES,
    "_prepare_inputs": _OWN_BATCHES,
    "_prepare_context_parallel_inputs": _OWN_BATCHES,
    "training_step": _OWN_LOSS,
    "compute_loss": _OWN_LOSS,
    "compute_loss_context_manager": _OWN_LOSS,
    "autocast_smart_context_manager": _OWN_LOSS,
    "get_total_train_batch_size": "hydra.tokens_per_iteration decides how many sequences there are in one",
}
"""Names of transformers 5; a test compares them with what its Trainer calls."""

_STOCK = dict(vars(Trainer))


def check_overrides(trainer: Any, base: type) -> None:
    """Raise HydraConfigError where `trainer` has its own version of something that is not called.

    `base` is HydraTrainer. A method may come from a subclass, or have been set on the trainer or on
    transformers.Trainer.
    """
    problems = [
        f"{name}(): {why}" for name, why in NOT_CALLED.items() if is_overridden(trainer, name, base)
    ]
    problems.extend(_find_set(trainer))
    if problems:
        raise HydraConfigError(
            "\n  ".join([f"{type(trainer).__name__} overrides what would not be used:", *problems])
        )


def is_overridden(trainer: Any, name: str, base: type) -> bool:
    """Whether `trainer.name` is neither that of transformers nor that of `base`."""
    method = getattr(trainer, name)
    ours = [vars(kind).get(name) for kind in base.__mro__[: base.__mro__.index(Trainer)]]
    return getattr(method, "__func__", method) not in (_STOCK[name], *ours)


def _find_set(trainer: Any) -> Iterator[str]:
    """What is an attribute, and may have been set after the trainer was made."""
    for name in ("compute_loss_func", "label_smoother"):
        value = getattr(trainer, name)
        if value is not None and type(value) is not LabelSmoother:
            yield f"{name} is {value!r}: {_OWN_LOSS}"
