"""Examples for supervised fine-tuning: chats, prompts with completions, and masks become input_ids and labels.

Columns are those that TRL reads. Like `dataset.py` this file reads data (through `datasets`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import datasets

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.dataset import IGNORED_LABEL

Row: TypeAlias = Mapping[str, Any]
TokenRow: TypeAlias = dict[str, list[int]]

MASKS = ("assistant_masks", "completion_mask")
"""Columns beside `input_ids` that are 1 where a token is predicted, 0 elsewhere."""

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "labels": datasets.Sequence(datasets.Value("int32")),
    }
)


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    chat_template: Any
    eos_token_id: Any

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """{"input_ids": token ids} of a text."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """{"input_ids": ..., "assistant_masks": ...} of a list of messages."""


def is_supervised(columns: Sequence[str]) -> bool:
    """Whether `to_labels` has something to do for a dataset of these columns."""
    has_mask = "input_ids" in columns and "labels" not in columns and any(m in columns for m in MASKS)
    return has_mask or ("input_ids" not in columns and ("messages" in columns or _has_prompts(columns)))


def to_labels(
    dataset: datasets.Dataset,
    tokenizer: ChatTokenizer | None = None,
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> datasets.Dataset:
    """`dataset` with the columns input_ids and labels; labels are -100 where the loss does not count.

    Read are, in this order: `input_ids` with `assistant_masks` or `completion_mask`; `messages` (a chat,
    through the tokenizer's template); `prompt` and `completion` (both texts, or both lists of messages). Any
    other dataset, also one with `labels`, is returned as it is. Predicted is everything, but of `prompt` and
    `completion` the completion alone unless `completion_only_loss` is False, and of `messages` the assistant's
    turns alone if `assistant_only_loss` is set. Prompt and completion texts are tokenised apart, as at
    inference, and the tokenizer's end of text is appended. Raises HydraConfigError naming the row.
    """
    columns = dataset.column_names
    if not is_supervised(columns):
        return dataset
    convert: Callable[..., TokenRow]
    settings: dict[str, Any] = {}
    if "input_ids" in columns:
        mask = next(m for m in MASKS if m in columns)
        convert, settings = _from_mask, {"mask": mask}
        if mask == "completion_mask" and completion_only_loss is False:
            return dataset.remove_columns([c for c in columns if c != "input_ids"])
    else:
        source = "messages" if "messages" in columns else "prompt"
        if tokenizer is None:
            raise HydraConfigError(
                f"column {source!r} holds text and there is no tokenizer; pass processing_class=tokenizer to "
                "HydraTrainer, or set hydra.tokenizer to its path or hub id"
            )
        convert = _from_messages if source == "messages" else _from_prompt
        settings = {"tokenizer": tokenizer, "masked": assistant_only_loss}
        if source == "prompt":
            settings["masked"] = completion_only_loss is not False
    return dataset.map(
        convert,
        with_indices=True,
        fn_kwargs=settings,
        remove_columns=columns,
        features=_FEATURES,
        desc="tokenising" if "tokenizer" in settings else "labels",
    )


def _has_prompts(columns: Sequence[str]) -> bool:
    return "prompt" in columns and "completion" in columns


def _from_mask(row: Row, index: int, *, mask: str) -> TokenRow:
    input_ids, counts = list(row["input_ids"] or ()), list(row[mask] or ())
    if len(input_ids) != len(counts):
        raise HydraConfigError(
            f"row {index} has {len(input_ids)} input_ids and {len(counts)} {mask}, expected the same number"
        )
    return _label(input_ids, counts)


def _from_messages(row: Row, index: int, *, tokenizer: ChatTokenizer, masked: bool) -> TokenRow:
    encoded = _encode_chat(tokenizer, row["messages"], index, tools=row.get("tools"), return_masks=masked)
    input_ids = list(encoded["input_ids"])
    if not masked:
        return _label(input_ids, [1] * len(input_ids))
    masks = list(encoded.get("assistant_masks", ()))
    if 1 not in masks:
        raise HydraConfigError(
            f"row {index}: the chat template marks no token as the assistant's, so that nothing would be "
            "predicted; put {% generation %} ... {% endgeneration %} around the assistant's turn in the "
            "tokenizer's chat_template, or leave assistant_only_loss out"
        )
    return _label(input_ids, masks)


def _from_prompt(row: Row, index: int, *, tokenizer: ChatTokenizer, masked: bool) -> TokenRow:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt_ids = list(tokenizer(prompt)["input_ids"])
        completion_ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None and completion_ids[-1:] != [tokenizer.eos_token_id]:
            completion_ids.append(tokenizer.eos_token_id)
    elif isinstance(prompt, list) and isinstance(completion, list):
        tools = row.get("tools")
        prompt_ids = list(
            _encode_chat(tokenizer, prompt, index, tools=tools, add_generation_prompt=True)["input_ids"]
        )
        both_ids = list(_encode_chat(tokenizer, prompt + completion, index, tools=tools)["input_ids"])
        if both_ids[: len(prompt_ids)] != prompt_ids:
            raise HydraConfigError(
                f"row {index}: the chat template renders the prompt differently when the completion follows, so "
                "the completion has no beginning; use the column 'messages' with assistant_only_loss=True"
            )
        completion_ids = both_ids[len(prompt_ids) :]
    else:
        raise HydraConfigError(
            f"row {index}: prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}, "
            "expected two texts or two lists of messages"
        )
    counts = [0 if masked else 1] * len(prompt_ids) + [1] * len(completion_ids)
    return _label(prompt_ids + completion_ids, counts)


def _encode_chat(
    tokenizer: ChatTokenizer, messages: Any, index: int, *, return_masks: bool = False, **settings: Any
) -> Mapping[str, Any]:
    if not getattr(tokenizer, "chat_template", None):
        raise HydraConfigError(
            "the tokenizer has no chat template to turn messages into text; set tokenizer.chat_template"
        )
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise HydraConfigError(
            f"row {index}: expected a list of messages such as "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    encoded: Mapping[str, Any] = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=return_masks, **settings
    )
    return encoded


def _label(input_ids: list[int], counts: Sequence[int]) -> TokenRow:
    labels = [token if counted else IGNORED_LABEL for token, counted in zip(input_ids, counts, strict=True)]
    return {"input_ids": input_ids, "labels": labels}
