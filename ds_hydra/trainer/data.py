"""Datasets of the Trainer as tokens, and the facts that its loop needs: rows in their order,
epochs, evaluation batches, padded batches.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from ds_hydra.configs import HydraConfig
from ds_hydra.engine.examples import find_stream, reading_of, tokens_of
from ds_hydra.engine.ranks.agreement import check_same_numbers, gather_rows, run_together
from ds_hydra.engine.ranks.turns import first_on_node
from ds_hydra.errors import HydraConfigError, HydraDataError
from ds_hydra.sampler.data.batches import SamplerState, TokenBudgetSampler
from ds_hydra.sampler.data.dataset import TokenDataset, check_stored, select_shown
from ds_hydra.sampler.data.examples import IGNORED_LABEL
from ds_hydra.sampler.data.stream import TokenStream

logger = logging.getLogger(__name__)


class Epochs:
    """Iterations of each epoch of a sampler, found by drawing ahead; not more than `limit` of them
    (0: no limit).

    The first rank draws, the others hear the count: methods are collective over all ranks where
    they reach an epoch for the first time, which an instance does with the first one when it is
    made.

    A global batch runs on from one epoch into the next, and counts for the one in which it begins;
    so epochs may differ by an iteration. An epoch has at least one, even if a global batch holds
    the whole dataset. Where the limit comes first, the length of the epoch is extrapolated.

    >>> epochs = Epochs(TokenBudgetSampler([3, 4, 2, 9], [2, 3, 1, 8], 8, shuffle=False), 4)
    >>> counts = [epochs.num_iterations(epoch) for epoch in range(3)]
    >>> counts, epochs.iterations_until(1.5), epochs.find(4)
    ([3, 3, 3], 5, (1, 1))
    """

    def __init__(
        self,
        sampler: TokenBudgetSampler,
        num_sequences: int,
        *,
        limit: int = 0,
        device: torch.device | None = None,
    ):
        self.num_sequences = num_sequences
        self._sampler = sampler
        self._limit = limit
        self._device = device
        self._state = SamplerState()
        self._ends = [0]
        self.num_iterations(0)

    def num_iterations(self, epoch: int) -> int:
        """Iterations of `epoch`, counted from 0."""
        return self._begin(epoch + 1) - self._begin(epoch)

    def iterations_until(self, num_epochs: float) -> int:
        """Iterations of the first `num_epochs`, rounded up."""
        whole = int(num_epochs)
        part = num_epochs - whole
        return self._begin(whole) + (int(np.ceil(part * self.num_iterations(whole))) if part else 0)

    def training_values(self, max_steps: int, num_train_epochs: float) -> tuple[int, ...]:
        """Values for `Trainer.set_initial_training_values`; `max_steps` decides where it is above
        0. At 0 transformers' loop ends after its first step.
        """
        is_limited = max_steps > 0
        total = max_steps if max_steps >= 0 else self.iterations_until(num_train_epochs)
        num_epochs = self.num_epochs(total) if is_limited else ceil(num_train_epochs)
        per_epoch = self.num_iterations(0)
        num_per_step = max(1, round(self.num_sequences / per_epoch))
        return (
            num_epochs,
            per_epoch,
            self.num_sequences,
            total * num_per_step,
            num_per_step,
            per_epoch,
            total,
        )

    def iterations_from(self, state: SamplerState, num_epochs: float) -> int:
        """Iterations from `state` until so many epochs are drawn. Collective over all ranks."""

        def count() -> int:
            at, end = state, num_epochs * self.num_sequences
            while at.epoch * self.num_sequences + at.position < end:
                _, at = self._sampler.draw(at)
            return at.iteration - state.iteration

        return _on_first_rank(count, self._device)

    def num_epochs(self, num_iterations: int) -> int:
        """Epochs that `num_iterations` reach into."""
        epoch, into = self.find(num_iterations)
        return epoch + (into > 0)

    def find(self, iteration: int) -> tuple[int, int]:
        """The epoch of `iteration`, and how many iterations of it came before."""
        epoch = 0
        while self._begin(epoch + 1) <= iteration:
            epoch += 1
        return epoch, iteration - self._begin(epoch)

    def _begin(self, epoch: int) -> int:
        while len(self._ends) <= epoch:
            self._ends.append(
                max(_on_first_rank(self._draw_epoch, self._device), self._ends[-1] + 1)
            )
        return self._ends[epoch]

    def _draw_epoch(self) -> int:
        """Iterations before the next epoch begins."""
        state, epoch = self._state, len(self._ends)
        while state.epoch < epoch:
            if 0 < self._limit <= state.iteration:
                drawn = state.epoch + state.position / self.num_sequences
                return self._ends[-1] + round(state.iteration / drawn)
            _, state = self._sampler.draw(state)
            self._state = state
        return state.iteration


def _on_first_rank(count: Callable[[], int], device: torch.device | None) -> int:
    """Result of `count`, which raises nothing, on rank 0. Collective over all ranks."""
    if not dist.is_initialized():
        return count()
    counted = torch.tensor(count() if dist.get_rank() == 0 else 0, device=device)
    dist.broadcast(counted, src=0)
    return int(counted)


class StreamEpochs(Epochs):
    """All `max_steps` iterations of a stream as one epoch, whose rows nobody counts.

    >>> epochs = StreamEpochs(5)
    >>> epochs.num_iterations(0), epochs.find(3), epochs.find(5)
    (5, (0, 3), (1, 0))
    """

    def __init__(self, max_steps: int):
        self.num_sequences = self._max_steps = max_steps

    def _begin(self, epoch: int) -> int:
        return epoch * self._max_steps


class Iterations(IterableDataset):
    """Endless empty batches: transformers' loop counts them, the engine draws the real ones."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {}


class GlobalBatches:
    """Rows of each global batch of the first epoch, of all ranks, as the engine draws them."""

    def __init__(self, sampler: TokenBudgetSampler, epochs: Epochs):
        self._sampler, self._epochs = sampler, epochs

    def __len__(self) -> int:
        return self._epochs.num_iterations(0)

    def __iter__(self) -> Iterator[list[int]]:
        state = SamplerState()
        for _ in range(len(self)):
            batch, state = self._sampler.draw(state)
            yield list(batch.sample_indices)


class EvalBatches:
    """Global batches of at most `budget` tokens (or one sequence) in dataset order; whoever
    iterates over them sees each of them padded, as from any loader.
    """

    def __init__(
        self,
        tokens: TokenDataset,
        budget: int,
        pad: Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]],
    ):
        self.dataset = tokens
        self._pad = pad
        self._bounds = [0]
        before = np.concatenate([[0], np.cumsum(tokens.lengths)])
        while (begin := self._bounds[-1]) < len(tokens):
            end = int(np.searchsorted(before, before[begin] + budget, side="right")) - 1
            self._bounds.append(max(end, begin + 1))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self._pad(examples) for examples, _ in self.examples())

    def examples(self) -> Iterator[tuple[list[dict[str, Any]], int]]:
        """Examples of each global batch, with the number of their label tokens."""
        for begin, end in zip(self._bounds, self._bounds[1:], strict=False):
            examples = [self.dataset[index] for index in range(begin, end)]
            yield examples, int(self.dataset.num_label_tokens[begin:end].sum())


def draw_rows(sampler: Any, num_rows: int, device: torch.device) -> tuple[list[int], bool]:
    """The rows that a sampler draws, and whether always in this order. Collective over all ranks.

    Found by drawing twice: where only the order differs, the rows are sorted. Raises
    HydraConfigError on all ranks for rows that differ between draws or ranks.
    """
    name = f"{type(sampler).__name__} of _get_train_sampler()"

    def draw() -> tuple[list[int], bool]:
        if not hasattr(sampler, "__len__"):
            raise HydraConfigError(
                f"{name} has no length, and global batches are planned ahead; give it __len__"
            )
        with torch.random.fork_rng(devices=[]):
            first, second = (list(sampler) for _ in range(2))
        wrong = [
            row for row in first if not isinstance(row, int | np.integer) or not 0 <= row < num_rows
        ]
        if wrong or not first:
            raise HydraConfigError(
                f"{name} draws {repr(wrong[0]) if wrong else 'nothing'}, expected rows of the training data, 0 to "
                f"{num_rows - 1}; global batches are made by hydra.tokens_per_iteration"
            )
        if first != second and sorted(first) != sorted(second):
            raise HydraConfigError(
                f"{name} draws other rows each time ({len(set(first) ^ set(second))} of {len(first)} differ), but "
                "every epoch has the same rows; put the rows into train_dataset as often as they shall be seen"
            )
        return (first, True) if first == second else (sorted(first), False)

    rows, is_ordered = run_together(draw, device)
    digest = zlib.crc32(np.asarray([is_ordered, *rows]).tobytes())

    def say(first: list[int], other: list[int], rank: int) -> str:
        return (
            f"{name} draws {first[0]} rows on rank 0 and others on rank {rank} ({other[0]}), but a batch is planned "
            "for all ranks together; return the same sampler of all rows on every rank (no DistributedSampler)"
        )

    check_same_numbers([len(rows), digest], say, device)
    return rows, is_ordered


def pad_examples(examples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """input_ids, labels and attention_mask [num_examples, longest], padded on the right."""
    longest = max(1, *(len(example["input_ids"]) for example in examples))
    shape = (len(examples), longest)
    batch = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED_LABEL, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    for row, example in enumerate(examples):
        length = len(example["input_ids"])
        batch["input_ids"][row, :length] = torch.from_numpy(example["input_ids"])
        batch["labels"][row, :length] = torch.from_numpy(example["labels"])
        batch["attention_mask"][row, :length] = 1
    return batch


def losses_of_rows(logits_NTV: Tensor, labels_NT: Tensor, smoothing: float) -> Tensor:
    """Return the sum of losses and the number of label tokens of each padded row, [N, 2]."""
    rows = []
    for logits_TV, labels_T in zip(logits_NTV, labels_NT.to(logits_NTV.device), strict=True):
        targets_T = labels_T[1:]  # nothing predicts the first
        loss = F.cross_entropy(
            logits_TV[:-1].float(),
            targets_T,
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=smoothing,
        )
        rows.append(torch.stack([loss.double(), (targets_T != IGNORED_LABEL).sum().double()]))
    return torch.stack(rows)


def as_datasets(dataset: Any, name: str) -> datasets.Dataset:
    """`dataset` (of `datasets`, of torch, or a list of examples) as a `datasets.Dataset`; a stream
    is read to its end. `name` is for errors.
    """
    if isinstance(dataset, datasets.DatasetDict):
        return dataset
    if isinstance(dataset, datasets.Dataset):
        check_stored(dataset, name)
        return select_shown(dataset)
    if isinstance(dataset, IterableDataset):
        dataset = list(dataset)
    elif not hasattr(dataset, "__len__"):
        raise HydraConfigError(
            f"{name} is a {type(dataset).__name__}, which has neither a length nor is a stream; give a dataset, or "
            "datasets.IterableDataset.from_generator(...) of what gives its rows"
        )
    for kind, instead in _NO_ROWS.items():
        if any(kind == base.__name__ for base in type(dataset).__mro__):
            raise HydraConfigError(f"{name} is a {type(dataset).__name__}; pass {instead}")
    for stored in _stored_in(dataset):
        check_stored(stored, name)
    rows = [_read_row(dataset, index, name) for index in range(len(dataset))]
    spread = np.linspace(0, len(rows) - 1, _NUM_READ_TWICE, dtype=np.int64)
    for index in np.unique(spread).tolist() if rows else ():
        if _differs(rows[index], _read_row(dataset, index, name)):
            raise HydraConfigError(
                f"{name} is a {type(dataset).__name__} whose row {index} is another one each time it is read, but rows "
                "are read once: global batches are planned by lengths that are known before; give every row as often "
                "as it shall be seen, or engine.train_batch(batch=examples) the global batches"
            )
    # from_list takes its columns from the first row
    columns = dict.fromkeys(column for row in rows for column in row)
    for column in (c for c in columns if c in _OF_ALL_ROWS):
        without = next((index for index, row in enumerate(rows) if column not in row), None)
        if without is not None:
            raise HydraConfigError(
                f"row {without} of {name} has no {column!r}, and others have; give it to all rows, or to none"
            )
    return datasets.Dataset.from_list([{c: row.get(c) for c in columns} for row in rows])


_READ = ("text", "input_ids", "labels")
_OF_ALL_ROWS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks")
_NUM_READ_TWICE = 32

_NO_ROWS = {
    "DataLoader": "its dataset (loader.dataset): the engine draws and packs global batches itself",
    "Mapping": "datasets.Dataset.from_dict(...) of these columns",
    "dict": "datasets.Dataset.from_dict(...) of these columns",
    "DataFrame": "datasets.Dataset.from_pandas(...) of it",
    "Table": "datasets.Dataset(...) of it",
}
"""Classes with a length that are no sequence of rows, and what to pass instead."""


def _read_row(dataset: Any, index: int, name: str) -> dict[str, Any]:
    try:
        row = dataset[index]
    except Exception as error:  # of the user's code
        raise HydraDataError(
            f"row {index} of {name} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(row, Mapping):
        raise HydraConfigError(
            f"row {index} of {name} is a {type(row).__name__}, expected a dict, such as {{'input_ids': [...]}} or "
            "{'text': '...'}"
        )
    return dict(row)


def _stored_in(dataset: Any) -> Iterator[datasets.Dataset]:
    """Datasets of `datasets` that those of torch take their rows from."""
    if isinstance(dataset, datasets.Dataset):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from _stored_in(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _stored_in(part)


def _differs(row: dict[str, Any], again: dict[str, Any]) -> bool:
    """Whether a field that is read differs."""
    return any(not np.array_equal(row[key], again.get(key)) for key in _READ if key in row)


_NUM_KEPT = 64


class DatasetReader:
    """Reads a dataset once, however often it is asked for: tokens of those asked for last are
    kept.
    """

    def __init__(
        self,
        args: transformers.TrainingArguments,
        config: HydraConfig,
        warn: Callable[[str], None],
    ):
        self.config = config
        """May be another one for later readings, as of arguments that were set."""
        self._args, self._warn = args, warn
        # With the tokenizer, so that nobody else gets its number
        self._tokens_of: OrderedDict[tuple[Any, ...], tuple[TokenDataset, Any]] = OrderedDict()
        self._rows_of: dict[int, tuple[Any, datasets.Dataset]] = {}
        """Streams, and their rows, by the number of the stream."""

    def find_stream(self, dataset: Any, tokenizer: Any) -> TokenStream | None:
        """`dataset` where it is a stream, without an end: transformers, too, begins one again until
        max_steps. Collective over all ranks.
        """
        stream = find_stream(dataset, self._args.device)
        if stream is None:
            return None
        return TokenStream(stream.repeat(None), reading_of(self.config, self._complete(tokenizer)))

    def _rows(self, dataset: Any, what: str) -> datasets.Dataset:
        if not isinstance(dataset, IterableDataset):
            return as_datasets(dataset, what)
        if id(dataset) not in self._rows_of:
            self._rows_of[id(dataset)] = dataset, as_datasets(dataset, what)
        return self._rows_of[id(dataset)][1]

    def _complete(self, tokenizer: Any) -> Any:
        """The tokenizer inside of a processor, or that of hydra.tokenizer where there is none."""
        if isinstance(tokenizer, transformers.ProcessorMixin):  # which takes images first
            return tokenizer.tokenizer
        if tokenizer is None and self.config.tokenizer is not None:
            return transformers.AutoTokenizer.from_pretrained(self.config.tokenizer)
        return tokenizer

    def read(
        self, dataset: Any, what: str, tokenizer: Any, *, every_row: bool = False
    ) -> TokenDataset:
        """Tokens and lengths of `dataset`, read once; the first rank of each node tokenises, others
        find its cache. With `every_row` none is cut or left out.
        """
        device = self._args.device
        rows = run_together(lambda: self._rows(dataset, what), device)
        # By content: a list may have other rows than when it was read before, and a tokenizer be
        # another one
        if isinstance(rows, datasets.DatasetDict):
            content: Any = tuple((split, part._fingerprint) for split, part in rows.items())
        else:
            content = rows._fingerprint
        size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
        config = self.config
        cut = config.context_length, config.over_length, config.text_column
        key = content, cut, every_row, id(tokenizer), size
        is_new = torch.tensor([key not in self._tokens_of], device=device)
        if gather_rows(is_new).any():
            with first_on_node(f"reading {what}"):
                try:
                    complete = self._complete(tokenizer)
                    tokens = tokens_of(rows, config, complete, every_row=every_row)
                except (HydraConfigError, HydraDataError) as error:
                    raise type(error)(f"{what}: {error}") from error
            _check_same_rows(tokens, what, device)
            self._tokens_of[key] = tokens, tokenizer
            if len(self._tokens_of) > _NUM_KEPT:
                self._tokens_of.popitem(last=False)
            if tokens.report.is_partial or tokens.report.unread:
                self._warn(f"{what}: {tokens.report}")
            elif self._args.process_index == 0:
                logger.info(f"{what}: {tokens.report}")
        self._tokens_of.move_to_end(key)
        return self._tokens_of[key][0]


def _check_same_rows(tokens: TokenDataset, what: str, device: torch.device) -> None:
    """Raise PlanMismatchError on all ranks where one has rows of other lengths: it would call the
    model more or less often than others. Collective over all ranks.
    """
    digest = zlib.crc32(np.stack([tokens.lengths, tokens.num_label_tokens]).tobytes())

    def say(first: list[int], other: list[int], rank: int) -> str:
        return (
            f"{what} has {first[0]} rows of {first[1]} tokens on rank 0 and {other[0]} of {other[1]} on rank {rank}; "
            "give every rank the same dataset, whole, in the same order"
        )

    check_same_numbers([len(tokens), int(tokens.lengths.sum()), digest], say, device)


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
