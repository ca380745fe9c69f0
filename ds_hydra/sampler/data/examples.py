"""Conversion of one example of the user's: token ids and labels of a single sequence.

Datasets, given global batches and the Trainer all read their examples here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hydra.errors import HydraConfigError

IntArray = npt.NDArray[np.int64]

IGNORED_LABEL = -100

MASKS = ("assistant_masks", "completion_mask", "response_mask", "token_loss_mask")
"""Columns beside `input_ids` that are 1 where a token is predicted, 0 elsewhere: as TRL (the first
two), verl and NeMo-RL call them.
"""

TRIVIAL_COLUMNS = ("attention_mask", "position_ids", "token_type_ids")
"""Columns that tokenizers write beside `input_ids`, and that say nothing of an unpadded
sequence.
"""

_USE_LABELS = (
    "each token that is predicted counts the same: put -100 into 'labels' where nothing is predicted, "
    "and leave this column out"
)
_USE_MASK = (
    "say which tokens are predicted by 'completion_mask' (0 or 1 for each of input_ids) or by -100 in "
    "'labels', and leave this column out"
)

_REFUSED_COLUMNS = {
    **dict.fromkeys(
        (
            "seq_lengths", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens",
            "max_length_q", "max_length_k", "seq_idx", "document_ids", "segment_ids", "sequence_ids",
        ),
        "sequences are packed here: give each sequence as an example of its own, without this column",
    ),
    **dict.fromkeys(
        ("loss_mask", "label_mask", "loss_weights", "loss_weight", "sample_weight", "sample_weights",
         "weights"),
        _USE_LABELS,
    ),
    **dict.fromkeys(
        ("prompt_length", "prompt_lengths", "prompt_len", "prompt_lens", "source_len", "source_length",
         "num_prompt_tokens", "completion_start", "response_start", "label_ids"),
        _USE_MASK,
    ),
    **dict.fromkeys(
        ("inputs_embeds", "decoder_input_ids", "pixel_values", "input_features", "past_key_values"),
        "models are trained on token ids alone: remove it",
    ),
}  # fmt: skip


_OF_TOKENS = ("labels", *MASKS, *TRIVIAL_COLUMNS)
_SAYS_NOTHING = ("input_ids", "special_tokens_mask", *_OF_TOKENS)
_SAYS_WHICH = re.compile(r"(^|_)(masks?|weights?)($|_)")
_SAYS_WHAT_COUNTS = re.compile(r"(^|_)(masks?|weights?|labels?|targets?)($|_)")


def check_columns(
    columns: Iterable[str],
    has_numbers: Callable[[str], bool],
    what: str,
    read: Collection[str] = (),
) -> None:
    """Raise HydraConfigError where a column beside the known ones would change training.

    This is also any that `has_numbers` for each token and a name that speaks of masks, weights,
    labels or targets; beside texts, whose tokens are not known to it, of masks or weights. Columns
    that no model reads (an id, a source, a text) are ignored, and those that a loss has `read`.
    """
    columns = list(columns)
    if "input_ids" not in columns:
        for name in columns:
            if _SAYS_WHICH.search(name.lower()) and has_numbers(name):
                raise HydraConfigError(
                    f"{what} has {name!r} beside texts or chats, where nothing reads it; give 'input_ids' with "
                    "it, or leave this column out"
                )
        return
    for name in columns:
        if name in read or name in _SAYS_NOTHING:
            continue
        why = _REFUSED_COLUMNS.get(name)
        if why is None and _SAYS_WHAT_COUNTS.search(name.lower()) and has_numbers(name):
            why = _USE_MASK
        if why is not None:
            raise HydraConfigError(f"{what} has {name!r}, which is not used; {why}")


def find_unread(columns: Iterable[str], text_column: str = "text") -> list[str]:
    """The columns that nothing reads, of a dataset whose columns say where its tokens come from.

    >>> find_unread(["text", "source"]), find_unread(["input_ids", "completion_mask"])
    (['source'], [])
    """
    columns = list(columns)
    read = _SAYS_NOTHING if "input_ids" in columns else (text_column,)
    return [name for name in columns if name not in read]


_CHATS = ("messages", "conversations")
_PROMPTS = ("prompt", "instruction", "question", "query")
_COMPLETIONS = ("completion", "output", "response", "answer")
"""Names of prompts and completions: of TRL, Alpaca, Dolly, GSM8K, UltraFeedback."""


def hint_for(columns: Collection[str], otherwise: str) -> str:
    """Return the advice on `columns` that nothing reads: what turns chats, or prompts and
    completions, into tokens, or else `otherwise`.

    >>> hint_for(["question", "answer"], "name the text")
    'train prompts and completions by ds_hydra.trl.HydraSFTTrainer, or name the text'
    """
    if not {*_CHATS}.isdisjoint(columns):
        turn = "turn 'conversations' (from, value) into 'messages' (role, content), and "
        return (
            f"{turn * ('messages' not in columns)}tokenise chats before, by dataset.map(lambda row: "
            "tokenizer.apply_chat_template(row['messages'], return_dict=True, return_assistant_tokens_mask=True)) "
            "where the template has {% generation %} around the assistant's turns, train them by "
            f"ds_hydra.trl.HydraSFTTrainer, or {otherwise}"
        )
    if not ({*_PROMPTS}.isdisjoint(columns) or {*_COMPLETIONS}.isdisjoint(columns)):
        return f"train prompts and completions by ds_hydra.trl.HydraSFTTrainer, or {otherwise}"
    return otherwise


def to_example(
    row: Mapping[str, Any], what: str, read: Collection[str] = ()
) -> tuple[IntArray, IntArray]:
    """`input_ids` and `labels` [length] of one example; `what` names it in errors.

    Labels are those given, else the token ids, and -100 where one of `MASKS` is 0. Padding at the
    beginning or the end, where `attention_mask` is 0, is taken away. Raises HydraConfigError for
    all that would have to be reinterpreted.

    >>> example = {"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1]}
    >>> to_example({**example, "completion_mask": [0, 0, 1, 1]}, "example 0")
    (array([5, 6, 7]), array([-100,    6,    7]))
    """
    if not isinstance(row, Mapping):
        raise HydraConfigError(
            f"{what} is a {type(row).__name__}, expected a dict such as {{'input_ids': [1, 2, 3]}}"
        )
    if "input_ids" not in row:
        raise HydraConfigError(
            f"{what} has keys {sorted(map(str, row))}, expected 'input_ids' (and 'labels')"
        )
    check_columns(map(str, row), lambda name: _is_of_numbers(row.get(name)), what, read)
    input_ids = _read_integers(row["input_ids"], "input_ids", what)
    beside = {name: _read_integers(row[name], name, what) for name in _OF_TOKENS if name in row}
    for name, values in beside.items():
        if len(values) != len(input_ids):
            hint = " (labels not shifted)" if name == "labels" else ""
            raise HydraConfigError(
                f"{what} has {len(input_ids)} input_ids and {len(values)} {name}, expected the same number{hint}"
            )
    kept = _find_tokens(beside.get("attention_mask"), len(input_ids), what)
    input_ids, beside = input_ids[kept], {name: values[kept] for name, values in beside.items()}
    _check_trivial(beside, len(input_ids), what)
    labels = beside.get("labels", input_ids).copy()
    for name in MASKS:
        if name in beside:
            labels[~_as_mask(beside[name], name, what)] = IGNORED_LABEL
    return input_ids, labels


def to_examples(batch: Any, read: Collection[str] = ()) -> list[tuple[IntArray, IntArray]]:
    """Each example of a given global batch, whose columns `read` a loss reads. Raises
    HydraConfigError naming the first that is none.
    """
    if isinstance(batch, Mapping):
        raise HydraConfigError(
            f"the global batch is a dict of {', '.join(map(repr, batch))}, expected a list with one dict for each "
            "example: [{'input_ids': [...], 'labels': [...]}, ...]; of a dict of columns this is "
            "[dict(zip(batch, row)) for row in zip(*batch.values())]"
        )
    if not isinstance(batch, Iterable):
        raise HydraConfigError(
            f"the global batch is {batch!r}, expected a list of examples: [{{'input_ids': [...]}}, ...]"
        )
    examples = []
    for index, row in enumerate(batch):
        example = to_example(row, f"example {index} of the global batch", read)
        if not len(example[0]):
            raise HydraConfigError(
                f"example {index} of the global batch has no token; leave it out of the global batch"
            )
        examples.append(example)
    return examples


def _is_of_numbers(value: Any) -> bool:
    """Whether `value` of one example is a list (an array, a tensor) of numbers."""
    if not hasattr(value, "__len__") or isinstance(value, str | bytes | Mapping):
        return False
    first = next(iter(value), None) if getattr(value, "ndim", 1) else None
    return first is not None and not isinstance(first, str | bytes | Mapping)


def _read_integers(value: Any, name: str, what: str) -> IntArray:
    """A column of one example as [length]; None is an empty list, [1, length] a list of one
    sequence.
    """
    check_unmasked(value, f"{name!r} of {what}")
    try:
        value = value.cpu() if hasattr(value, "cpu") else value
        values = np.asarray(() if value is None else value)
    # Lists of unequal length, bf16, tensors without data on the meta device
    except (TypeError, ValueError, RuntimeError) as error:
        raise HydraConfigError(
            f"{name!r} of {what} cannot be read: {error}; expected a list of integers"
        ) from error
    if values.ndim == 2 and len(values) == 1:
        values = values[0]
    if values.ndim != 1:
        raise HydraConfigError(
            f"{name!r} of {what} has shape {list(values.shape)}, expected [length]: one sequence in each example"
        )
    if values.size and values.dtype.kind not in (
        "iu" if name in ("input_ids", "labels") else "iub"
    ):
        raise HydraConfigError(f"{name!r} of {what} holds {values.dtype}, expected integers")
    return np.array(values, dtype=np.int64)


def check_unmasked(value: Any, what: str) -> None:
    """Raise HydraConfigError where `value`, as an array, would lose a mask of its own."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise HydraConfigError(
            f"{what} is a masked array with {int(np.ma.getmaskarray(value).sum())} values masked, which would be read "
            "as if they were not; put what shall stand there by array.filled(value), such as -100 into labels"
        )


def _as_mask(values: IntArray, name: str, what: str) -> npt.NDArray[np.bool_]:
    if (odd := values[(values != 0) & (values != 1)]).size:
        raise HydraConfigError(f"{name!r} of {what} holds {odd[0]}, expected 0 or 1")
    return values.astype(np.bool_)


def _find_tokens(attention_mask: IntArray | None, length: int, what: str) -> slice:
    """Places of the sequence between its padding."""
    if attention_mask is None:
        return slice(0, length)
    places = np.flatnonzero(_as_mask(attention_mask, "attention_mask", what))
    if not places.size:
        return slice(0, 0)
    begin, end = int(places[0]), int(places[-1]) + 1
    if len(places) != end - begin:
        hole = begin + int(np.argmin(attention_mask[begin:end]))
        raise HydraConfigError(
            f"'attention_mask' of {what} is 0 at place {hole}, between places that are 1; only padding at the "
            "beginning or the end can be taken away: remove such tokens, or put -100 into their labels"
        )
    return slice(begin, end)


def _check_trivial(columns: Mapping[str, IntArray], length: int, what: str) -> None:
    """Raise where positions or token types are not those that the model gives by itself."""
    position_ids = columns.get("position_ids")
    if position_ids is not None and (position_ids != np.arange(length)).any():
        place = int(np.argmax(position_ids != np.arange(length)))
        raise HydraConfigError(
            f"'position_ids' of {what} are {position_ids[place]} at token {place}, expected 0 to {length - 1} in "
            "order; give packed sequences as examples of their own, and leave position_ids out"
        )
    token_types = columns.get("token_type_ids")
    if token_types is not None and token_types.any():
        raise HydraConfigError(
            f"'token_type_ids' of {what} hold {token_types[token_types != 0][0]}, expected 0; leave them out"
        )
