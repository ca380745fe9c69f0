"""Datasets as TRL prepares them, where it alone would train something else without a word."""

from __future__ import annotations

import copy
import functools
from typing import Any

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.dataset import check_dataset_columns
from ds_hydra.sampler.data.sft import OF_OTHER_TOOLS, render_chat

_READ = ("seq_lengths",)
"""Columns that TRL reads beside those of HydraTrainer."""


def with_clean_chats(processing_class: Any) -> Any:
    """A copy of the tokenizer (or processor) whose `apply_chat_template` is `render_chat`."""
    if processing_class is None or not hasattr(processing_class, "apply_chat_template"):
        return processing_class
    reader = copy.copy(processing_class)
    reader.apply_chat_template = functools.partial(render_chat, processing_class)
    return reader


def check_columns_of(dataset: Any) -> None:
    """Raise HydraConfigError where `dataset`, which may be a stream, has a mask that TRL does not
    read.
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
