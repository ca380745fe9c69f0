"""Examples of users: what is taken as it is, what is taken away, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from trl_runs import chats, make_tokenizer

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.examples import hint_for, to_example, to_examples

IDS = [5, 6, 7]


def read(**columns):
    input_ids, labels = to_example(columns, "example 3")
    assert input_ids.dtype == labels.dtype == np.int64
    return input_ids.tolist(), labels.tolist()


@pytest.mark.parametrize(
    "ids",
    [IDS, tuple(IDS), [IDS], np.array(IDS, np.uint16), torch.tensor([IDS], dtype=torch.int32)],
)
def test_one_sequence_is_read_from_what_tokenizers_give(ids):
    assert read(input_ids=ids) == (IDS, IDS)


def test_labels_are_those_given_where_all_masks_are_1():
    assert read(input_ids=IDS, labels=[-100, 1, 2]) == (IDS, [-100, 1, 2])
    assert read(input_ids=IDS, completion_mask=[0, 1, 1]) == (IDS, [-100, 6, 7])
    assert read(input_ids=IDS, labels=[5, 9, -100], assistant_masks=[False, True, True]) == (
        IDS,
        [-100, 9, -100],
    )
    both = {"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}
    assert read(input_ids=IDS, **both) == (IDS, [-100, 6, -100])


@pytest.mark.parametrize("name", ["response_mask", "token_loss_mask"])
def test_masks_of_verl_and_nemo_rl_are_read(name):
    assert read(input_ids=IDS, **{name: [0, 0, 1]}) == (IDS, [-100, -100, 7])
    assert read(input_ids=IDS, **{name: torch.tensor([[0, 1, 0]])}) == (IDS, [-100, 6, -100])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_mask", [1, 1, 0]), ("target_mask", np.array([0, 1, 1])), ("token_mask", (0, 1, 1)),
        ("targets", torch.tensor([6, 7, 8])), ("label_ids", IDS), ("token_weights", [0.5, 1.0, 1.0]),
        ("Answer_Mask", [True, False, False]), ("prompt_length", 2), ("labels_mask", [[0, 1, 1]]),
    ],
)  # fmt: skip
def test_what_looks_like_masks_labels_or_weights_is_refused(name, value):
    with pytest.raises(HydraConfigError, match=f"example 3 has '{name}', which is not used; say"):
        read(input_ids=IDS, **{name: value})
    to_example({"input_ids": IDS, name: value}, "example 3", read=(name,))
    for harmless in ("a text", None, torch.tensor(1), 0.5, ["a", "b", "c"], []):
        if name not in ("label_ids", "prompt_length"):
            assert read(input_ids=IDS, **{name: harmless}) == (IDS, IDS)
    assert read(input_ids=IDS, special_tokens_mask=[1, 0, 0]) == (IDS, IDS)


def test_masked_values_are_refused():
    held = np.ma.array([5, 6, 7], mask=[1, 0, 0])
    for column in ("input_ids", "labels", "attention_mask"):
        with pytest.raises(HydraConfigError, match=f"'{column}' of .* masked array with 1 values"):
            read(**{"input_ids": [5, 6, 7], column: held})
    assert read(input_ids=[5, 6, 7], labels=held.filled(-100)) == ([5, 6, 7], [-100, 6, 7])
    assert read(input_ids=np.ma.array([5, 6, 7])) == ([5, 6, 7], [5, 6, 7])


def test_the_users_memory_is_not_shared():
    ids, labels = np.array(IDS), torch.tensor(IDS)
    read_ids, read_labels = to_example({"input_ids": ids, "labels": labels}, "example 0")
    read_ids[0] = read_labels[0] = 99
    assert ids.tolist() == labels.tolist() == IDS


@pytest.mark.parametrize(
    ("mask", "position_ids"),
    [([0, 0, 1, 1, 1], [1, 1, 0, 1, 2]), ([1, 1, 1, 0, 0], [0, 1, 2, 3, 4])],
)
def test_padding_at_either_end_is_taken_away(mask, position_ids):
    padded = np.zeros(5, dtype=int)
    padded[np.array(mask) == 1] = IDS
    labels = np.where(padded, padded, -1).tolist()
    more = {"position_ids": position_ids, "token_type_ids": [0] * 5, "source": "web", "length": 3}
    assert read(input_ids=padded, labels=labels, attention_mask=mask, **more) == (IDS, IDS)
    assert read(input_ids=padded, attention_mask=[0] * 5) == ([], [])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[1, 2], [3, 4]]}, r"'input_ids' of example 3 has shape \[2, 2\]"),
        ({"input_ids": 7}, r"shape \[\]"),
        ({"input_ids": [[1, 2], [3]]}, "'input_ids' of example 3"),
        ({"input_ids": [1.0, 2.5]}, "'input_ids' of example 3 holds float64, expected integers"),
        ({"input_ids": torch.ones(2, dtype=torch.bfloat16)}, "'input_ids' of example 3 .*BFloat16"),
        ({"input_ids": torch.ones(2, dtype=int, device="meta")}, "'input_ids' of .* cannot be read"),
        ({"input_ids": IDS, "labels": torch.ones(3, device="meta")}, "'labels' of .* cannot be read"),
        ({"input_ids": [True, False]}, "holds bool"),
        ({"input_ids": "a b"}, "'input_ids' of example 3"),
        ({"input_ids": IDS, "labels": [5.0, 6.0, 7.0]}, "'labels' of example 3 holds float64"),
        ({"input_ids": IDS, "labels": None}, "3 input_ids and 0 labels, .*not shifted"),
        ({"input_ids": IDS, "completion_mask": [0, 1]}, "3 input_ids and 2 completion_mask"),
        ({"input_ids": IDS, "completion_mask": [0, 1, 2]}, "'completion_mask' .* holds 2"),
        ({"input_ids": IDS, "attention_mask": [1, 0, 1]}, "'attention_mask' .*0 at place 1"),
        ({"input_ids": IDS, "attention_mask": [1, 1, 2]}, "'attention_mask' .* holds 2"),
        ({"input_ids": IDS, "attention_mask": [1.0, 1.0, 1.0]}, "'attention_mask' .*float64"),
        ({"input_ids": IDS, "position_ids": [0, 1, 0]}, "'position_ids' .* 0 at token 2"),
        ({"input_ids": IDS, "token_type_ids": [0, 0, 1]}, "'token_type_ids' .* 1, expected 0"),
        ({"input_ids": IDS, "seq_lengths": [2, 1]}, "'seq_lengths'.*example of its own"),
        ({"input_ids": IDS, "loss_weights": [1, 1, 1]}, "'loss_weights'.*-100"),
        ({"ids": IDS}, r"example 3 has keys \['ids'\], expected 'input_ids'"),
    ],
)  # fmt: skip
def test_what_would_have_to_be_reinterpreted_is_refused_by_name(columns, message):
    with pytest.raises(HydraConfigError, match=message):
        read(**columns)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "global batch is None, expected a list"),
        ([IDS], "example 0 of the global batch is a list, expected a dict"),
        ([{"input_ids": IDS}, {"input_ids": []}], "example 1 of the global batch has no token"),
        ([{"input_ids": IDS}, {"input_ids": IDS, "seq_idx": IDS}], "example 1 .*'seq_idx'"),
    ],
)
def test_a_global_batch_is_a_list_of_examples(batch, message):
    with pytest.raises(HydraConfigError, match=message):
        to_examples(batch)


def test_a_dict_of_columns_is_explained():
    columns = {"input_ids": [[5, 6, 0], IDS], "attention_mask": [[1, 1, 0], [1, 1, 1]]}
    for batch in (columns, BatchEncoding(columns, tensor_type="pt")):
        with pytest.raises(HydraConfigError, match="is a dict of 'input_ids'") as caught:
            to_examples(batch)
        advice = str(caught.value).split("this is ")[1]
        rows = to_examples(eval(advice, {"batch": batch}))
        assert [input_ids.tolist() for input_ids, _ in rows] == [[5, 6], IDS]


def test_the_advice_for_chats_trains_the_turns_of_the_assistant():
    tokenizer = make_tokenizer()
    dataset = chats().select(range(4))
    advice = hint_for(["messages"], "").partition("by ")[2].partition(" where")[0]
    made = eval(advice, {"dataset": dataset, "tokenizer": tokenizer})
    data = TokenDataset.from_dataset(made, context_length=999)
    for row, chat in zip(data, dataset["messages"], strict=True):
        predicted = tokenizer.decode([token for token in row["labels"] if token != -100])
        assert predicted == "".join(f"{m['content']};" for m in chat if m["role"] == "assistant")
        assert tokenizer.decode(row["input_ids"]).startswith(f"U:{chat[0]['content']};A:")
