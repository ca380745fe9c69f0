"""Datasets of the Trainer as tokens: which rows, in which order, read once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.data import SequentialSampler

from ds_hydra.configs import HydraConfig
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.examples import find_unread
from ds_hydra.sampler.data.sft import to_labels
from ds_hydra.trainer.data import (
    as_datasets,
    draw_rows,
)

logger = logging.getLogger(__name__)


class DatasetReader:
    """Reads a dataset once, however often it is asked for."""

    def __init__(
        self,
        args: transformers.TrainingArguments,
        config: HydraConfig,
        *,
        completion_only_loss: bool | None,
        assistant_only_loss: bool,
    ):
        self._args, self._config = args, config
        self._completion_only_loss = completion_only_loss
        self._assistant_only_loss = assistant_only_loss
        self._tokens_of: dict[int, tuple[Any, TokenDataset]] = {}

    def read(self, dataset: Any, what: str, tokenizer: Any) -> TokenDataset:
        """Tokens and lengths of `dataset`, read once; the first rank of each node tokenises, others
        find its cache.
        """
        if id(dataset) not in self._tokens_of:
            with self._args.main_process_first(desc=f"reading {what}"):
                rows = as_datasets(dataset, what)
                tokens = self._read_now(rows, tokenizer, what)
            # With the dataset, so that its id stays its own
            self._tokens_of[id(dataset)] = dataset, tokens
            if self._args.process_index == 0:
                logger.info(f"{what}: {tokens.report}")
        return self._tokens_of[id(dataset)][1]

    def _read_now(self, dataset: Any, tokenizer: Any, what: str) -> TokenDataset:
        config = self._config
        names = getattr(dataset, "column_names", ())  # of a DatasetDict those of each split
        if isinstance(names, list) and (unread := find_unread(names, config.text_column)):
            self._warn(f"{what} has columns that nothing reads: {', '.join(unread)}")
        if tokenizer is None and config.tokenizer is not None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(config.tokenizer)
        labelled = to_labels(
            dataset,
            tokenizer,
            completion_only_loss=self._completion_only_loss,
            assistant_only_loss=self._assistant_only_loss,
            warn=lambda text: self._warn(f"{what}: {text}"),
        )
        return TokenDataset.from_dataset(
            labelled,
            context_length=config.context_length,
            over_length=config.over_length,
            text_column=config.text_column,
            tokenize=tokenizer,
        )

    def _warn(self, message: str) -> None:
        if self._args.process_index == 0:
            logger.warning(message)


def draw_train_rows(
    dataset: Any,
    sampler: Any,
    config: HydraConfig,
    device: torch.device,
    warn: Callable[[str], None],
) -> tuple[Any, bool]:
    """The training rows that `sampler` of an overridden `_get_train_sampler` draws, and whether
    they are to be shuffled: an order of its own stays. None stands for all, as for a DataLoader.
    """
    dataset = as_datasets(dataset, "train_dataset")
    sampler = SequentialSampler(dataset) if sampler is None else sampler
    rows, is_ordered = draw_rows(sampler, len(dataset), device)
    if config.shuffle and is_ordered:
        name = f"{type(sampler).__name__} of _get_train_sampler()"
        if "shuffle" in config.model_fields_set:
            raise HydraConfigError(
                f"hydra.shuffle is true, and {name} draws the rows in an order of its own; remove one of them"
            )
        warn(f"{name} sets hydra.shuffle to False")
    return dataset.select(rows), not is_ordered
