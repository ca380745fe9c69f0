"""Chats and columns that TRL would take for something else without a word: what Arrow has added to
messages, turns that say that they do not count, masks of other tools.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ds_hydra.configs.files import parse_json
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.dataset import check_dataset_columns

Row: TypeAlias = Mapping[str, Any]

OF_OTHER_TOOLS = ("response_mask", "token_loss_mask")
"""Masks of verl and NeMo-RL; TRL has others."""

_READ = ("seq_lengths",)
"""Columns that TRL reads and HydraTrainer refuses."""


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


def render_chat(tokenizer: Any, conversation: Any, **settings: Any) -> Any:
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


def _reads_parts(tokenizer: Any, template: str | None) -> bool:
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
