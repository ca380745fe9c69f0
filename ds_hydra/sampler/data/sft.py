"""Examples for supervised fine-tuning: chats and prompts with completions become input_ids and
labels.

Columns are those that TRL reads. Like `dataset.py` this file reads data (through `datasets`) and
nothing else.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import datasets
import pyarrow as pa

from ds_hydra.configs.files import parse_json
from ds_hydra.errors import HydraConfigError
from ds_hydra.progress import no_bars_in_files
from ds_hydra.sampler.data.dataset import check_dataset_columns, map_rows, without_second_begin
from ds_hydra.sampler.data.examples import IGNORED_LABEL, find_unread

Row: TypeAlias = Mapping[str, Any]
TokenRow: TypeAlias = dict[str, Any]
"""`input_ids`, `labels`, and whether the prompt alone begins them (`is_prefix`)."""

logger = logging.getLogger(__name__)

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "labels": datasets.Sequence(datasets.Value("int32")),
        "is_prefix": datasets.Value("bool"),
    }
)
OF_OTHER_TOOLS = ("response_mask", "token_loss_mask")
"""Masks of verl and NeMo-RL; `MASKS` has TRL's, too."""
_NEEDED = {
    "completion_only_loss": (("completion_mask", *OF_OTHER_TOOLS), "'prompt' and 'completion'"),
    "assistant_only_loss": (("assistant_masks", *OF_OTHER_TOOLS), "'messages'"),
}
"""The columns that tell which tokens an argument means: beside `input_ids`, or instead of them."""
_UNTRAINED_END = (
    "the chat template has {token!r} after the assistant's turn outside of {{% generation %}}, so that the model is "
    "not trained to stop; put it before {{% endgeneration %}} in the tokenizer's chat_template"
)
_OTHER_PREFIX = (
    "the chat template renders the prompts of {rows} differently when the completion follows (such as <think> after "
    "the assistant's name); their completions begin where both part, so that the end of the prompt that inference "
    "gives is not trained"
)


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    chat_template: Any
    eos_token_id: Any

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True
    ) -> Mapping[str, Any]:
        """{"input_ids": token ids} of a text, or of each of several."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """{"input_ids": ..., "assistant_masks": ...} of a list of messages."""


@no_bars_in_files()
def to_labels(
    dataset: datasets.Dataset,
    tokenizer: ChatTokenizer | None = None,
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    num_proc: int | None = None,
    warn: Callable[[str], None] = logger.warning,
) -> datasets.Dataset:
    """`dataset` with the columns input_ids and labels; labels are -100 where the loss does not
    count.

    Read are, in this order: `messages` (a chat, through the tokenizer's template); `prompt` and
    `completion` (both texts, or both lists of messages); beside chats also the columns `tools`
    (schemas, or their JSON text) and `chat_template_kwargs`. A dataset with `input_ids` stays as it
    is (masks beside them count when it is read), and so do plain texts. Predicted is everything,
    but of `prompt` and `completion` the completion alone unless `completion_only_loss` is False,
    which also leaves out a `completion_mask`, and of chats the assistant's turns alone if
    `assistant_only_loss` is set. Prompt and completion texts are tokenised apart, as at inference,
    and the tokenizer's end of text is appended. Where the template renders a prompt differently
    when a completion follows (`<think>`), the completion begins where both part, as in TRL; `warn`
    is told how many. `num_proc` processes share the work. Raises HydraConfigError naming the row,
    or the argument that the dataset has nothing for.
    """
    columns = dataset.column_names
    check_wanted(
        columns,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
    )
    if {"input_ids", "completion_mask"} <= {*columns} and completion_only_loss is False:
        return dataset.remove_columns("completion_mask")
    convert = find_conversion(
        columns,
        tokenizer,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
    )
    if convert is None:
        return dataset
    check_dataset_columns(dataset)
    if assistant_only_loss and (token := _find_untrained_end(tokenizer)):
        warn(_UNTRAINED_END.format(token=token))
    made = map_rows(dataset, convert, _FEATURES, num_proc, with_indices=True, desc="tokenising")
    differing = len(made) - (pa.compute.sum(made.data.column("is_prefix")).as_py() or 0)
    if differing:
        warn(_OTHER_PREFIX.format(rows=f"{differing} of {len(made)} rows"))
    return made.remove_columns("is_prefix")


def make_row_conversion(
    tokenizer: ChatTokenizer | None,
    text_column: str,
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    warn: Callable[[str], None] = logger.warning,
) -> Callable[[Row, int], Row]:
    """A function that does to each row of a stream, and its number, what `to_labels` does to a
    dataset; `warn` is told each thing once.
    """
    wanted: dict[str, Any] = {
        "completion_only_loss": completion_only_loss,
        "assistant_only_loss": assistant_only_loss,
    }
    find_end = functools.cache(lambda: _find_untrained_end(tokenizer))
    say = functools.cache(warn)

    def convert(row: Row, index: int) -> Row:
        columns = list(row)
        check_wanted(columns, **wanted)
        if unread := find_unread(columns, text_column):
            say(f"the stream has columns that nothing reads: {', '.join(unread)}")
        if "input_ids" in columns and completion_only_loss is False:
            return {name: row[name] for name in columns if name != "completion_mask"}
        make = find_conversion(columns, tokenizer, **wanted)
        if make is None:
            return row
        if assistant_only_loss and (token := find_end()):
            say(_UNTRAINED_END.format(token=token))
        made = make(row, index)
        if not made["is_prefix"]:
            say(_OTHER_PREFIX.format(rows="some rows"))
        return made

    return convert


def find_conversion(
    columns: Sequence[str],
    tokenizer: ChatTokenizer | None,
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    option: str = "set hydra.tokenizer to its path or hub id",
) -> Callable[[Row, int], TokenRow] | None:
    """The function that makes tokens of a row (and its number) with these columns. None where they
    are not for supervised fine-tuning. Raises HydraConfigError where they are, and there is no
    tokenizer, which `option` gives.
    """
    if "input_ids" in columns or not ("messages" in columns or _has_prompts(columns)):
        return None
    source = "messages" if "messages" in columns else "prompt"
    if tokenizer is None:
        raise HydraConfigError(
            f"column {source!r} holds text and there is no tokenizer; pass processing_class=tokenizer to "
            f"HydraTrainer, or {option}"
        )
    if source == "messages":
        return functools.partial(
            _messages_to_tokens, tokenizer=tokenizer, assistant_only=assistant_only_loss
        )
    return functools.partial(
        _prompt_to_tokens,
        tokenizer=tokenizer,
        assistant_only=assistant_only_loss,
        completion_only=completion_only_loss is not False,
    )


def check_wanted(columns: Sequence[str], **wanted: bool | None) -> None:
    """Raise HydraConfigError where all tokens would be predicted though an argument says less."""
    has_chat, has_prompts = "messages" in columns, _has_prompts(columns)
    found = {
        "completion_only_loss": has_prompts and not has_chat,
        "assistant_only_loss": has_prompts or has_chat,
    }
    if "input_ids" in columns:
        found = {a: not {*columns}.isdisjoint(masks) for a, (masks, _) in _NEEDED.items()}
    for argument, ((mask, *_), source) in _NEEDED.items():
        if wanted[argument] and not found[argument]:
            raise HydraConfigError(
                f"{argument} is True, and the dataset has the columns {', '.join(columns)}: it needs {source}, or "
                f"'input_ids' with {mask!r}; add them, or leave {argument} out"
            )


def _has_prompts(columns: Sequence[str]) -> bool:
    return "prompt" in columns and "completion" in columns


def _messages_to_tokens(
    row: Row, index: int, *, tokenizer: ChatTokenizer, assistant_only: bool
) -> TokenRow:
    columns = ("messages",)
    encoded = _encode_chat(
        tokenizer, row, columns, index, counting=columns, return_masks=assistant_only
    )
    input_ids = list(encoded["input_ids"])
    counts = _assistants(encoded, index) if assistant_only else [1] * len(input_ids)
    return _label(input_ids, counts)


def _prompt_to_tokens(
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
    prompt_ids = without_second_begin(list(tokenizer(prompt)["input_ids"]), tokenizer)
    eos_token, eos = getattr(tokenizer, "eos_token", None), tokenizer.eos_token_id
    if eos_token and not prompt.endswith(eos_token):
        is_begin = getattr(tokenizer, "bos_token_id", None) == eos  # it stands in front, too
        while prompt_ids[is_begin:][-1:] == [eos]:  # of tokenizers that end each text
            prompt_ids.pop()
    completion_ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None and completion_ids[-1:] != [tokenizer.eos_token_id]:
        completion_ids.append(tokenizer.eos_token_id)
    counts = [0 if completion_only else 1] * len(prompt_ids) + [1] * len(completion_ids)
    return _label(prompt_ids + completion_ids, counts)


def _from_chat_prompt(
    row: Row, index: int, tokenizer: ChatTokenizer, assistant_only: bool, completion_only: bool
) -> TokenRow:
    columns = ("prompt", "completion")
    alone = _encode_chat(
        tokenizer, row, columns[:1], index, counting=(), add_generation_prompt=True
    )
    both = _encode_chat(
        tokenizer,
        row,
        columns,
        index,
        counting=columns[completion_only:],
        return_masks=assistant_only,
    )
    prompt_ids, both_ids = list(alone["input_ids"]), list(both["input_ids"])
    shared = next(
        (place for place, (a, b) in enumerate(zip(prompt_ids, both_ids)) if a != b),
        min(len(prompt_ids), len(both_ids)),
    )
    counts = _assistants(both, index) if assistant_only else [1] * len(both_ids)
    if completion_only:
        counts[:shared] = [0] * shared
    return {**_label(both_ids, counts), "is_prefix": shared == len(prompt_ids)}


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


_TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]


def _find_untrained_end(tokenizer: Any) -> str:
    """The special token behind the last turn that the chat template marks as the assistant's, where
    that does not end by one itself; else "".
    """
    try:
        made = tokenizer.apply_chat_template(
            _TURN * 2, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        masks, special = list(made["assistant_masks"]), tokenizer.get_added_vocab()
        end = len(masks) - masks[::-1].index(1)
        words = [tokenizer.decode([token]).strip() for token in made["input_ids"]]
    except Exception:  # a template may raise anything, and not mark or end a turn
        return ""
    last, follows = ([w for w in part if w] for part in (words[:end], words[end:]))
    is_trained = bool(last) and last[-1] in special
    return follows[0] if follows and follows[0] in special and not is_trained else ""


def _encode_chat(
    tokenizer: ChatTokenizer,
    row: Row,
    columns: Sequence[str],
    index: int,
    *,
    counting: Sequence[str],
    return_masks: bool = False,
    **settings: Any,
) -> Mapping[str, Any]:
    """The chat of these columns, one after the other, as tokens; those of `counting` are trained,
    or what the masks mark of them.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise HydraConfigError(
            "the tokenizer has no chat template to turn messages into text; set tokenizer.chat_template"
        )
    chats = [row[name] for name in columns]
    if not all(
        isinstance(messages, list) and all(isinstance(m, Mapping) and "role" in m for m in messages)
        for messages in chats
    ):
        raise HydraConfigError(
            f"row {index}: expected a list of messages such as "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    where = f"row {index}, column {' and '.join(map(repr, columns))}"
    try:
        for name in counting:
            check_counts(row[name], str(tokenizer.chat_template) if return_masks else None)
        encoded: Mapping[str, Any] = render_chat(
            tokenizer,
            [message for messages in chats for message in messages],
            tools=row.get("tools"),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=return_masks,
            **settings,
            **(row.get("chat_template_kwargs") or {}),
        )
    except HydraConfigError as error:
        raise HydraConfigError(f"row {index}: {error}") from error
    except Exception as error:  # a template may raise anything
        raise HydraConfigError(
            f"{where}: the tokenizer's chat template raised {type(error).__name__}: {error}; mend the row, or "
            "set tokenizer.chat_template"
        ) from error
    return encoded


def render_chat(tokenizer: ChatTokenizer, conversation: Any, **settings: Any) -> Any:
    """Apply the tokenizer's `apply_chat_template` to messages and tools as they were before
    `datasets` stored them.

    Arrow gives every struct all keys of all rows: those that are None are left out at every depth.
    Tools, and arguments of their calls, may be JSON text, which is decoded once. Contents that are
    lists of parts of text are joined where the template does not read parts. Raises
    HydraConfigError for text that is not JSON, and for parts that nothing reads.

    >>> class Shown:
    ...     chat_template = "any"
    ...     def apply_chat_template(self, messages, **settings):
    ...         return messages, settings
    >>> render_chat(Shown(), [{"role": "user", "content": "hi", "name": None}], tools="[]")
    ([{'role': 'user', 'content': 'hi'}], {})
    """
    settings = _without_none(settings)
    if tools := _read_tools(settings.pop("tools", None)):
        settings["tools"] = tools
    chat = [_with_arguments(message) for message in _without_none(list(conversation))]
    has_parts = any(isinstance(m, Mapping) and isinstance(m.get("content"), list) for m in chat)
    if has_parts and not _reads_parts(tokenizer, settings.get("chat_template")):
        chat = [_with_text(message) for message in chat]
    return tokenizer.apply_chat_template(chat, **settings)


_PARTS = [{"type": "text", "text": "8f3dc1"}]
_OF_TOOLS = ("tool", "function", "ipython")
"""Roles whose content may be any list, which templates write as it is."""


def _reads_parts(tokenizer: ChatTokenizer, template: str | None) -> bool:
    """Return whether the template writes the text of a list of parts, not the list itself."""
    named = {} if template is None else {"chat_template": template}
    try:
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": _PARTS}], tokenize=False, **named
        )
    except Exception:  # a template may raise anything
        return False
    is_list = str(_PARTS) in shown or json.dumps(_PARTS) in shown
    return _PARTS[0]["text"] in shown and not is_list


def _with_text(message: Any) -> Any:
    """Return `message` with the text of its parts as its content."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    found = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) == len(content):
        return {**message, "content": "".join(texts)}
    if message.get("role") in _OF_TOOLS:
        return message
    raise HydraConfigError(
        f"the content of a message of {message.get('role')!r} is {content!r:.200}, expected text or parts of text, "
        "such as [{'type': 'text', 'text': '...'}]; the tokenizer's chat template reads no parts"
    )


_SAYS_WHETHER = ("weight", "loss", "loss_mask", "train", "train_on_turn", "trainable")
"""Keys of messages by which OpenAI's files, slime, verl, axolotl and others leave a turn out."""


def check_counts(messages: Sequence[Row], marking: str | None) -> None:
    """Raise HydraConfigError where a message that would count says that it does not, by a key that
    the template `marking`, which marks the assistant's tokens, does not read; all count where that
    is None.
    """
    for message in messages:
        if marking is not None and message["role"] != "assistant":
            continue
        for key in _SAYS_WHETHER:
            if message.get(key) in (0, False) and not re.search(rf"[.'\"]{key}\b", marking or ""):
                raise HydraConfigError(
                    f"a message has {key!r} {message[key]!r}, which nothing reads, so that it would count; leave the "
                    "key out, or set assistant_only_loss=True and put {% generation %} around a turn only "
                    f"{{% if message.{key} != 0 %}} in the tokenizer's chat_template"
                )


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _read_tools(tools: Any) -> Any:
    """Schemas of tools, of which all or each may be JSON text."""
    tools = _from_json(tools, "column 'tools'", list) if isinstance(tools, str) else tools
    if not isinstance(tools, list):
        return tools
    return [
        _from_json(tool, f"column 'tools', tool {number}", dict) if isinstance(tool, str) else tool
        for number, tool in enumerate(tools)
    ]


def _with_arguments(message: Any) -> Any:
    """`message`, whose tool calls have their arguments as dicts, as templates want them."""
    if not isinstance(message, Mapping) or not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_with_arguments_of(c) for c in message["tool_calls"]]}


def _with_arguments_of(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments_of(call["function"])}
    given = call.get("arguments")
    if not isinstance(given, str):
        return call
    where = f"the arguments of a call of {call.get('name')!r}"
    return {**call, "arguments": _from_json(given, where, dict) if given.strip() else {}}


def _from_json(text: str, where: str, kind: type) -> Any:
    """The JSON value in `text`; of another kind than a `kind`, or none, raises HydraConfigError."""
    value = parse_json(text, where) if text.strip() else kind()
    if not isinstance(value, kind):
        raise HydraConfigError(
            f"{where} is the JSON of a {type(value).__name__}, expected a {kind.__name__}: {text:.80}"
        )
    return value


def _label(input_ids: list[int], counts: Sequence[int]) -> TokenRow:
    labels = [
        token if counted else IGNORED_LABEL
        for token, counted in zip(input_ids, counts, strict=True)
    ]
    return {"input_ids": input_ids, "labels": labels, "is_prefix": True}
