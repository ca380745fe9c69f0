"""Supervised examples: chats and completions become labels; what has no answer is refused by
row.
"""

from __future__ import annotations

import ast
import json
import re

import datasets
import pytest
from tokenizers import processors
from trl_runs import make_tokenizer

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.sft import to_labels

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}U:{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture
def tokenizer():
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def texts(tokenizer, row):
    """The whole text, and the text that is predicted."""
    predicted = [token for token in row["labels"] if token != -100]
    return tokenizer.decode(row["input_ids"]), tokenizer.decode(predicted)


def one(row):
    return datasets.Dataset.from_list([row])


def test_a_completion_mask_may_be_left_out():
    row = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}
    assert to_labels(one(row)).column_names == ["input_ids", "completion_mask"]
    assert to_labels(one(row), completion_only_loss=False).column_names == ["input_ids"]


def test_tokens_and_texts_stay_as_they_are():
    for row in (
        {"input_ids": [1, 2], "labels": [1, -100], "assistant_masks": [1, 1]},
        {"text": "x"},
    ):
        dataset = one(row)
        assert to_labels(dataset) is dataset


@pytest.mark.parametrize(
    "names", [("instruction", "output"), ("question", "answer"), ("prompt", "response")]
)
def test_columns_of_other_conventions_are_told_the_names_that_train_them(tokenizer, names):
    dataset = one(dict(zip(names, ("1 + 1 =", " 2"))))
    with pytest.raises(HydraConfigError) as refusal:
        TokenDataset.from_dataset(dataset, context_length=99, tokenize=tokenizer)
    (advice,) = re.findall(r"dataset\.rename_columns\((.*?)\)", str(refusal.value))
    renamed = dataset.rename_columns(ast.literal_eval(advice))
    assert texts(tokenizer, to_labels(renamed, tokenizer)[0]) == ("1 + 1 = 2<eos>", " 2<eos>")


def test_chats_go_through_the_template(tokenizer):
    whole = to_labels(one({"messages": CHAT, "id": 7}), tokenizer)
    assert whole.column_names == ["input_ids", "labels"]
    rendered = "U:hi;A:yo;U:more;A:no;"
    assert texts(tokenizer, whole[0]) == (rendered, rendered)
    masked = to_labels(one({"messages": CHAT}), tokenizer, assistant_only_loss=True)
    assert texts(tokenizer, masked[0]) == (rendered, "yono")


def test_completions_are_predicted_and_prompts_are_not(tokenizer):
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    assert texts(tokenizer, to_labels(one(row), tokenizer)[0]) == ("1 + 1 = 2<eos>", " 2<eos>")
    everything = to_labels(one(row), tokenizer, completion_only_loss=False)[0]
    assert everything["labels"] == everything["input_ids"]
    chat = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert texts(tokenizer, to_labels(one(chat), tokenizer)[0]) == ("U:hi;A:yo;U:more;A:no;", "no;")


def test_no_end_of_text_between_prompt_and_completion(tokenizer):
    """Of a tokenizer that ends each text itself; what the prompt's own text ends with stays."""
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", end)]
    )
    made = to_labels(one({"prompt": "1 + 1 =", "completion": " 2"}), tokenizer)[0]
    assert texts(tokenizer, made) == ("1 + 1 = 2<eos>", " 2<eos>")
    tokenizer.bos_token = "<eos>"
    made = to_labels(one({"prompt": "", "completion": "b"}), tokenizer)[0]
    assert texts(tokenizer, made) == ("<eos>b<eos>", "b<eos>"), "it begins each text, too"
    made = to_labels(one({"prompt": "a<eos>", "completion": "b"}), tokenizer)[0]
    assert texts(tokenizer, made)[0].startswith("a<eos>")


def test_a_rendered_prompt_has_one_begin(tokenizer):
    begin = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", begin)]
    )
    for prompt in "ab", "<eos>ab":
        made = to_labels(one({"prompt": prompt, "completion": "c"}), tokenizer)[0]
        assert texts(tokenizer, made) == ("<eos>abc<eos>", "c<eos>")


def test_turns_of_the_assistant_within_completions(tokenizer):
    chat = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    made = to_labels(one(chat), tokenizer, assistant_only_loss=True)[0]
    assert texts(tokenizer, made) == ("U:hi;A:yo;U:more;A:no;", "yono")
    later = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    for completion_only, predicted in ((None, "no"), (False, "yono")):
        made = to_labels(
            one(later), tokenizer, assistant_only_loss=True, completion_only_loss=completion_only
        )[0]
        assert texts(tokenizer, made)[1] == predicted


def test_each_chat_has_arguments_of_its_own_for_the_template(tokenizer):
    tokenizer.chat_template = TEMPLATE + "{{ mood }}{{ tone if tone is defined else '?' }}"
    rows = [
        {"messages": CHAT[:2], "chat_template_kwargs": {"mood": "sad"}},
        {"messages": CHAT[:2], "chat_template_kwargs": {"tone": "low"}},
    ]
    made = to_labels(datasets.Dataset.from_list(rows), tokenizer)
    assert [texts(tokenizer, row)[0] for row in made] == ["U:hi;A:yo;sad?", "U:hi;A:yo;low"]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content + ';' }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson if m.content is not string else m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content if m.content is string else '' }};{% endfor %}",
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}",
    ],
    ids=["written", "added", "as JSON", "left out", "read"],
)
def test_contents_may_be_parts_of_text(tokenizer, template):
    tokenizer.chat_template = template
    turns = zip(("user", "assistant"), (parts("ab", "c"), parts("d")))
    chat = [{"role": role, "content": content} for role, content in turns]
    made = to_labels(one({"messages": chat}), tokenizer)
    assert tokenizer.decode(made[0]["input_ids"]) == "abc;d;"
    made = to_labels(one({"prompt": chat[:1], "completion": chat[1:]}), tokenizer)
    assert texts(tokenizer, made[0]) == ("abc;d;", "d;")


def test_parts_that_nothing_reads_are_refused_and_lists_of_tools_are_not(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    image = {"role": "user", "content": [{"type": "image", "url": "a.png"}]}
    with pytest.raises(HydraConfigError, match="row 0: the content of a message of 'user' is"):
        to_labels(one({"messages": [image]}), tokenizer)
    numbers = {"role": "tool", "content": [1, 2]}
    made = to_labels(one({"messages": [numbers]}), tokenizer)
    assert tokenizer.decode(made[0]["input_ids"]) == "[1, 2];"


def test_a_turn_that_does_not_count_by_its_own_key(tokenizer):
    """It would count; a template may read the key, as the error says."""
    chat = [*CHAT[:1], {**CHAT[1], "weight": 0}, CHAT[2], {**CHAT[3], "weight": 1}]
    row = {"messages": chat}
    for settings in ({}, {"assistant_only_loss": True}):
        with pytest.raises(HydraConfigError, match=r"row 0.*'weight' 0.*message.weight != 0"):
            to_labels(one(row), tokenizer, **settings)
    user, assistant = {**CHAT[0], "loss_mask": 0}, {**CHAT[1], "loss_mask": 1, "loss": 0.83}
    to_labels(one({"messages": [user, assistant]}), tokenizer, assistant_only_loss=True)
    given = {"prompt": [user, {**assistant, "train": False}, user], "completion": [assistant]}
    to_labels(one(given), tokenizer)
    with pytest.raises(HydraConfigError, match="'loss_mask' 0"):
        to_labels(one(given), tokenizer, completion_only_loss=False)
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    tokenizer.chat_template = TEMPLATE.replace(
        marked, f"{{% if m.weight != 0 %}}{marked}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    )
    made = to_labels(one(row), tokenizer, assistant_only_loss=True)[0]
    assert texts(tokenizer, made) == ("U:hi;A:yo;U:more;A:no;", "no")


def test_an_end_of_turn_that_is_not_trained_is_announced(tokenizer):
    row, said = {"messages": CHAT}, []
    for end, num_said in (
        ("{% endgeneration %};", 0),  # no token that only ends a turn
        ("{% endgeneration %}<eos>", 1),
        ("{% endgeneration %} <eos>", 2),
        ("<eos>{% endgeneration %}", 2),
        ("<eos> {% endgeneration %}", 2),
    ):
        tokenizer.chat_template = TEMPLATE.replace("{% endgeneration %}", end)
        to_labels(one(row), tokenizer, assistant_only_loss=True, warn=said.append)
        assert len(said) == num_said, end
    assert "has '<eos>' after the assistant's turn outside" in said[0]


TOOLS = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %};{% endfor %}"
)


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"of": properties}}}


def call(arguments):
    function = {"name": "f", "arguments": arguments}
    return [CHAT[0], {"role": "assistant", "tool_calls": [{"function": function}]}]


def test_tools_are_rendered_as_they_were_before_arrow_merged_them(tokenizer):
    """Of dicts and of JSON text the same, without keys that other rows alone have."""
    tokenizer.chat_template = TOOLS
    schemas = [tool("rain", city={"type": "a"}), tool("convert", unit={"enum": ["b"]})]
    arguments = [{"city": "x"}, {"unit": "y"}]
    rows = [
        {"messages": call(given), "tools": [schema]} for given, schema in zip(arguments, schemas)
    ]
    merged = to_labels(datasets.Dataset.from_list(rows), tokenizer)
    wanted = [
        f"[{json.dumps([schema])}]hi;{json.dumps(call(given)[1]['tool_calls'])};"
        for given, schema in zip(arguments, schemas)
    ]
    assert [texts(tokenizer, row)[0] for row in merged] == wanted
    as_text = [
        {"messages": call(json.dumps(given)), "tools": json.dumps([schema])}
        for given, schema in zip(arguments, schemas)
    ]
    made = to_labels(datasets.Dataset.from_list(as_text), tokenizer)
    assert [texts(tokenizer, row)[0] for row in made] == wanted
    empty = to_labels(one({"messages": call(""), "tools": ""}), tokenizer)
    assert texts(tokenizer, empty[0])[0] == f"hi;{json.dumps(call({})[1]['tool_calls'])};"


def test_a_completion_begins_where_the_prompt_is_rendered_differently(tokenizer):
    """As in TRL; the rows are counted, also when they come from the cache."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% if messages | length < 2 %}<think>{% endif %}{% endif %}"
    )
    rows = [
        {"prompt": CHAT[:1], "completion": CHAT[1:2]},
        {"prompt": CHAT[:3], "completion": CHAT[3:]},
    ]
    said = []
    for _ in range(2):
        made = to_labels(datasets.Dataset.from_list(rows), tokenizer, warn=said.append)
        assert [texts(tokenizer, row)[1] for row in made] == ["yo;", "no;"]
        assert made.column_names == ["input_ids", "labels"]
    assert [("prompts of 1 of 2 rows differently" in text) for text in said] == [True, True]


@pytest.mark.parametrize("name", ["completion_mask", "response_mask", "token_weights"])
def test_masks_beside_texts_and_chats_are_refused(tokenizer, name):
    for source in ({"messages": CHAT}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(HydraConfigError, match=f"'{name}' beside texts or chats"):
            to_labels(one({**source, name: [0, 1]}), tokenizer)
    assert len(to_labels(one({"messages": CHAT, name: "a"}), tokenizer)) == 1


@pytest.mark.parametrize(
    ("row", "argument"),
    [
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "assistant_only_loss"),
        ({"input_ids": [1, 2], "assistant_masks": [0, 1]}, "completion_only_loss"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "completion_only_loss"),
        ({"messages": CHAT, "prompt": "a", "completion": "b"}, "completion_only_loss"),
        ({"text": "x"}, "assistant_only_loss"),
        ({"text": "x"}, "completion_only_loss"),
    ],
)
def test_an_argument_that_the_columns_have_nothing_for_is_refused(tokenizer, row, argument):
    with pytest.raises(
        HydraConfigError, match=f"{argument} is True, and the dataset has .*it needs"
    ):
        to_labels(one(row), tokenizer, **{argument: True})


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": CHAT}, None, "has no chat template"),
        (
            {"messages": CHAT},
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "row 0: .*marks no token",
        ),
        ({"messages": "hello"}, TEMPLATE, "row 0: expected a list of messages"),
        (
            {"prompt": "a", "completion": CHAT},
            TEMPLATE,
            "row 0: prompt is a str and completion a list",
        ),
        (
            {"prompt": "a", "completion": "b"},
            TEMPLATE,
            "row 0: .* are texts, of which assistant_only",
        ),
        (
            {"messages": CHAT},
            "{{ messages[0].content + 1 }}",
            "row 0, column 'messages': the tokenizer's chat template raised TypeError",
        ),
        ({"messages": CHAT, "tools": "[{"}, TEMPLATE, "row 0: column 'tools' is not JSON"),
        ({"messages": CHAT, "tools": "7"}, TEMPLATE, "row 0: .*JSON of a int, expected a list"),
    ],
)
def test_rows_without_an_answer_are_refused(tokenizer, row, template, message):
    tokenizer.chat_template = template
    with pytest.raises(HydraConfigError, match=message):
        to_labels(one(row), tokenizer, assistant_only_loss=True)


def test_text_needs_a_tokenizer():
    with pytest.raises(
        HydraConfigError, match=r"'messages' holds text .*processing_class=tokenizer"
    ):
        to_labels(one({"messages": CHAT}))
