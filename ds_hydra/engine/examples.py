"""Training data as the engine takes them: a dataset, or the examples of one global batch."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import datasets
import deepspeed
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.model.micro_batches import Example
from ds_hydra.engine.ranks.agreement import (
    check_alike,
    check_same_numbers,
    run_together,
)
from ds_hydra.engine.ranks.turns import first_on_node
from ds_hydra.errors import HydraConfigError, HydraDataError
from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.examples import IGNORED_LABEL
from ds_hydra.sampler.data.stream import RowReading, TokenStream
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan

logger = logging.getLogger(__name__)


def local_rank() -> int:
    """This rank's number on its node, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def read_data(
    dataset: Any, config: HydraConfig, device: torch.device
) -> TokenDataset | TokenStream:
    """Token lengths of `dataset`; rank 0 of each node tokenises, the others find its cache. A
    stream is not read yet.

    Collective over all ranks; what one rank's data or tokenizer raise is raised on all.
    """
    tokenize = run_together(functools.partial(_load_tokenizer, config.tokenizer), device)
    stream = find_stream(dataset, device)
    if stream is not None:
        return TokenStream(stream, reading_of(config, tokenize))

    def read() -> TokenDataset:
        with first_on_node("tokenising the training data"):
            return tokens_of(dataset, config, tokenize)

    data = run_together(read, device)
    if deepspeed.comm.get_rank() == 0:
        logger.info(f"training data: {data.report}")
    return data


def tokens_of(
    dataset: Any, config: HydraConfig, tokenize: Any, *, every_row: bool = False
) -> TokenDataset:
    """Tokens of data at rest; with `every_row` none is cut or left out."""
    return TokenDataset.from_dataset(
        dataset,
        context_length=config.context_length,
        over_length=config.over_length,
        text_column=config.text_column,
        tokenize=tokenize,
        every_row=every_row,
    )


def find_stream(dataset: Any, device: torch.device) -> datasets.IterableDataset | None:
    """Find the stream that `dataset` is, of `datasets` or of torch; None where it has rows by
    number. Raises on all ranks where they differ in that. Collective over all ranks.
    """
    is_stream = isinstance(dataset, IterableDataset)  # those of `datasets` are torch's, too
    check_alike({"whether the training data is a stream": is_stream}, device)
    if is_stream and not isinstance(dataset, datasets.IterableDataset):
        return datasets.IterableDataset.from_generator(dataset.__iter__)
    return dataset if is_stream else None


def reading_of(config: HydraConfig, tokenize: Any) -> RowReading:
    """Settings that make sequences of a stream's rows."""
    return RowReading(
        context_length=config.context_length,
        over_length=config.over_length,
        text_column=config.text_column,
        tokenize=tokenize,
    )


def refuse_by_hand(what: str) -> NoReturn:
    """Raise HydraConfigError for a pass, or a part of one, that a script does itself."""
    raise HydraConfigError(
        f"{what}, but each rank holds other layers in every iteration; call "
        "engine.train_batch(batch=examples) (or engine.train_batch() with training_data), and "
        "engine.eval_batch(examples) or engine.eval() for evaluation"
    )


def warn_of_collator(collate_fn: Any) -> None:
    """Say on the first rank that `collate_fn` is not called. One that pads may stay in a script."""
    if collate_fn is not None and int(os.environ.get("RANK", "0")) == 0:
        logger.warning(
            f"collate_fn is {getattr(collate_fn, '__name__', type(collate_fn).__name__)} and not called: sequences are "
            "packed without padding, by the plan; what else it computes has to be in the dataset (input_ids with "
            "labels, assistant_masks or completion_mask)"
        )


def check_same_data(sampler: TokenBudgetSampler, device: torch.device) -> None:
    """Raise PlanMismatchError where a rank has other data: rank 0 alone draws from now on.

    Collective over all ranks.
    """
    identity = sampler.identity
    mine = [identity[key] for key in ("num_sequences", "num_tokens", "num_label_tokens")]
    digests = (identity["data_digest"] + identity["token_digest"]).encode()
    mine.append(zlib.crc32(digests))

    def say(of_first: list[int], of_other: list[int], rank: int) -> str:
        first, other = (
            f"{sequences} sequences of {tokens} tokens, {predicted} predicted (digest {digest:08x})"
            for sequences, tokens, predicted, digest in (of_first, of_other)
        )
        return (
            f"the dataset has {first} on rank 0 and {other} on rank {rank}; give every rank the same dataset, "
            "whole, in the same order (with a seed where it is shuffled or split)"
        )

    check_same_numbers(mine, say, device)


def check_examples(
    tensors: Sequence[Example],
    iteration: int,
    *,
    context_length: int,
    vocab_size: int,
    num_logits: int,
    only_scored: bool = False,
) -> GlobalBatch:
    """Make the global batch of `tensors`. Raises HydraConfigError for what the model cannot train
    on; what is `only_scored` need not predict a token.
    """
    if not tensors:
        raise HydraConfigError(
            "the global batch is empty: train_batch(batch=examples) got 0 examples; give every rank the "
            "whole list of {'input_ids': [...]}, at least one with 2 tokens"
        )
    lengths = tuple(len(input_ids) for input_ids, _ in tensors)
    if max(lengths) > context_length:
        index = int(np.argmax(lengths))
        raise HydraConfigError(
            f"example {index} of the global batch has {lengths[index]} tokens, more than hydra.context_length "
            f"{context_length}; cut it, or set hydra.context_length to {lengths[index]}"
        )
    for index, (input_ids, labels) in enumerate(tensors):
        _check_ids(index, "input_ids", input_ids, vocab_size)
        _check_ids(index, "labels", labels[labels != IGNORED_LABEL], num_logits)
    num_label_tokens = sum(int((labels[1:] != IGNORED_LABEL).sum()) for _, labels in tensors)
    if not num_label_tokens and not only_scored:
        raise HydraConfigError(
            "no example of the global batch has a token to predict (labels are all -100)"
        )
    return GlobalBatch(
        iteration=iteration,
        sample_indices=tuple(range(len(tensors))),
        lengths=lengths,
        num_label_tokens=num_label_tokens,
    )


def only_ids(row: Any) -> Any:
    """An example without labels, all of whose tokens are predicted."""
    if not isinstance(row, Mapping):
        return row
    return {key: row[key] for key in ("input_ids", "attention_mask") if key in row}


class GlobalBatches:
    """Endless global batches of an engine's data, as lists of examples."""

    def __init__(self, iterate: Callable[[], Iterator[list[dict[str, Any]]]]):
        self._iterate = iterate

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self._iterate()


def fetch_examples(
    data: TokenDataset, plan: IterationPlan, positions: Iterable[int]
) -> dict[int, Example]:
    """Fetch the sequences at `positions` of `plan`. Raises HydraDataError naming the example."""
    examples = {}
    for position in positions:
        index = plan.sample_indices[position]
        try:
            example = data[index]
        except Exception as error:
            raise HydraDataError(
                f"iteration {plan.iteration}: example {index} of the training data raised "
                f"{type(error).__name__}: {error}; mend or remove it, and resume from the last checkpoint"
            ) from error
        examples[position] = (
            torch.from_numpy(example["input_ids"]),
            torch.from_numpy(example["labels"]),
        )
    return examples


def fingerprint_tensors(tensors: Sequence[Example]) -> tuple[int, int, int]:
    """63-bit fingerprint of a global batch's tokens and labels, its sequences and its tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for example in tensors:
        for tensor in example:
            digest.update(tensor.cpu().numpy().tobytes())
    fingerprint = int.from_bytes(digest.digest(), "big") >> 1
    return fingerprint, len(tensors), sum(len(ids) for ids, _ in tensors)


def _check_ids(index: int, key: str, ids: Tensor, vocab_size: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        outside = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
        raise HydraConfigError(
            f"example {index} of the global batch has {outside} in its {key}, the model's vocabulary has "
            f"{vocab_size} tokens; use the model's tokenizer or call model.resize_token_embeddings"
        )


def _load_tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise HydraConfigError(
            f"hydra.tokenizer is {name!r}, which cannot be loaded; give a folder with tokenizer.json or a hub id "
            f"({error})"
        ) from error
