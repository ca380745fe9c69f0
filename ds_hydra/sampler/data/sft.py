"""Examples for supervised fine-tuning: chats and prompts with completions become input_ids and
labels.

Columns are those that TRL reads. Like `dataset.py` this file reads data (through `datasets`) and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import datasets

from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import no_bars_in_files
from ds_hydra.sampler.data.examples import IGNORED_LABEL

Row: TypeAlias = Mapping[str, Any]
TokenRow: TypeAlias = dict[str, list[int]]

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "labels": datasets.Sequence(datasets.Value("int32")),
    }
)


_NEEDED = {
    "completion_only_loss": ("completion_mask", "'prompt' and 'completion'"),
    "assistant_only_loss": ("assistant_masks", "'messages'"),
}
"""The columns that tell which tokens an argument means: beside `input_ids`, or instead of them."""


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    chat_template: Any
    eos_token_id: Any

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """{"input_ids": token ids} of a text."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """{"input_ids": ..., "assistant_masks": ...} of a list of messages."""


@no_bars_in_files()
def to_labels(
    dataset: datasets.Dataset,
    tokenizer: ChatTokenizer | None = None,
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> datasets.Dataset:
    """`dataset` with the columns input_ids and labels; labels are -100 where the loss does not
    count.

    Read are, in this order: `messages` (a chat, through the tokenizer's template); `prompt` and
    `completion` (both texts, or both lists of messages); beside chats also the columns `tools` and
    `chat_template_kwargs`. A dataset with `input_ids` stays as it is
    (masks beside them count when it is read), and so do plain texts. Predicted is everything, but
    of `prompt` and `completion` the completion alone unless `completion_only_loss` is False, which
    also leaves out a `completion_mask`, and of chats the assistant's turns alone if
    `assistant_only_loss` is set. Prompt and completion texts are tokenised apart, as at inference,
    and the tokenizer's end of text is appended. Raises HydraConfigError naming the row, or the
    argument that the dataset has nothing for.
    """
    columns = dataset.column_names
    _check_wanted(
        columns,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
    )
    if {"input_ids", "completion_mask"} <= {*columns} and completion_only_loss is False:
        return dataset.remove_columns("completion_mask")
    if "input_ids" in columns or not ("messages" in columns or _has_prompts(columns)):
        return dataset
    source = "messages" if "messages" in columns else "prompt"
    if tokenizer is None:
        raise HydraConfigError(
            f"column {source!r} holds text and there is no tokenizer; pass processing_class=tokenizer to "
            "HydraTrainer, or set hydra.tokenizer to its path or hub id"
        )
    convert: Callable[..., TokenRow] = _from_messages if source == "messages" else _from_prompt
    settings: dict[str, Any] = {"tokenizer": tokenizer, "assistant_only": assistant_only_loss}
    if source == "prompt":
        settings["completion_only"] = completion_only_loss is not False
    return dataset.map(
        convert,
        with_indices=True,
        fn_kwargs=settings,
        remove_columns=columns,
        features=_FEATURES,
        desc="tokenising",
    )


def _check_wanted(columns: Sequence[str], **wanted: bool | None) -> None:
    """Raise HydraConfigError where all tokens would be predicted though an argument says less."""
    has_chat, has_prompts = "messages" in columns, _has_prompts(columns)
    found = {
        "completion_only_loss": has_prompts and not has_chat,
        "assistant_only_loss": has_prompts or has_chat,
    }
    if "input_ids" in columns:
        found = {argument: mask in columns for argument, (mask, _) in _NEEDED.items()}
    for argument, (mask, source) in _NEEDED.items():
        if wanted[argument] and not found[argument]:
            raise HydraConfigError(
                f"{argument} is True, and the dataset has the columns {', '.join(columns)}: it needs {source}, or "
                f"'input_ids' with {mask!r}; add them, or leave {argument} out"
            )


def _has_prompts(columns: Sequence[str]) -> bool:
    return "prompt" in columns and "completion" in columns


def _from_messages(
    row: Row, index: int, *, tokenizer: ChatTokenizer, assistant_only: bool
) -> TokenRow:
    encoded = _encode_chat(tokenizer, row, row["messages"], index, return_masks=assistant_only)
    input_ids = list(encoded["input_ids"])
    counts = _assistants(encoded, index) if assistant_only else [1] * len(input_ids)
    return _label(input_ids, counts)


def _from_prompt(
    row: Row,
    index: int,
    *,
    tokenizer: ChatTokenizer,
    assistant_only: bool,
    completion_only: bool,
) -> TokenRow:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _from_chat_prompt(row, index, tokenizer, assistant_only, completion_only)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise HydraConfigError(
            f"row {index}: prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}, "
            "expected two texts or two lists of messages"
        )
    if assistant_only:
        raise HydraConfigError(
            f"row {index}: prompt and completion are texts, of which assistant_only_loss says nothing; leave "
            "it out, or give lists of messages"
        )
    prompt_ids = list(tokenizer(prompt)["input_ids"])
    completion_ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None and completion_ids[-1:] != [tokenizer.eos_token_id]:
        completion_ids.append(tokenizer.eos_token_id)
    counts = [0 if completion_only else 1] * len(prompt_ids) + [1] * len(completion_ids)
    return _label(prompt_ids + completion_ids, counts)


def _from_chat_prompt(
    row: Row, index: int, tokenizer: ChatTokenizer, assistant_only: bool, completion_only: bool
) -> TokenRow:
    prompt, completion = row["prompt"], row["completion"]
    alone = _encode_chat(tokenizer, row, prompt, index, add_generation_prompt=True)
    both = _encode_chat(tokenizer, row, prompt + completion, index, return_masks=assistant_only)
    prompt_ids, both_ids = list(alone["input_ids"]), list(both["input_ids"])
    if both_ids[: len(prompt_ids)] != prompt_ids:
        raise HydraConfigError(
            f"row {index}: the chat template renders the prompt differently when the completion follows, so "
            "the completion has no beginning; use the column 'messages' with assistant_only_loss=True"
        )
    counts = _assistants(both, index) if assistant_only else [1] * len(both_ids)
    if completion_only:
        counts[: len(prompt_ids)] = [0] * len(prompt_ids)
    return _label(both_ids, counts)


def _assistants(encoded: Mapping[str, Any], index: int) -> list[int]:
    """1 where a token is the assistant's."""
    masks = list(encoded.get("assistant_masks", ()))
    if 1 not in masks:
        raise HydraConfigError(
            f"row {index}: the chat template marks no token as the assistant's, so that nothing would be "
            "predicted; put {% generation %} ... {% endgeneration %} around the assistant's turn in the "
            "tokenizer's chat_template, or leave assistant_only_loss out"
        )
    return masks


def _encode_chat(
    tokenizer: ChatTokenizer,
    row: Row,
    messages: Any,
    index: int,
    *,
    return_masks: bool = False,
    **settings: Any,
) -> Mapping[str, Any]:
    if not getattr(tokenizer, "chat_template", None):
        raise HydraConfigError(
            "the tokenizer has no chat template to turn messages into text; set tokenizer.chat_template"
        )
    if not isinstance(messages, list) or not all(
        isinstance(m, Mapping) and "role" in m for m in messages
    ):
        raise HydraConfigError(
            f"row {index}: expected a list of messages such as "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    # What other rows have alone, `datasets` fills up with None.
    of_row = {k: v for k, v in (row.get("chat_template_kwargs") or {}).items() if v is not None}
    encoded: Mapping[str, Any] = tokenizer.apply_chat_template(
        messages,
        tools=row.get("tools"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=return_masks,
        **settings,
        **of_row,
    )
    return encoded


def _label(input_ids: list[int], counts: Sequence[int]) -> TokenRow:
    labels = [
        token if counted else IGNORED_LABEL
        for token, counted in zip(input_ids, counts, strict=True)
    ]
    return {"input_ids": input_ids, "labels": labels}
