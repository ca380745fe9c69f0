"""Chats: TRL reads them as they were before `datasets` stored them; elsewhere transformers has
tokenised them before.
"""

from __future__ import annotations

import json

import datasets
import pytest
from trl_runs import chats, make_tokenizer

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.data.dataset import TokenDataset
from ds_hydra.sampler.data.examples import hint_for
from ds_hydra.trl.chats import check_counts, render_chat

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def render(tokenizer, conversation, **settings):
    """The text of a chat that `datasets` has stored."""
    row = datasets.Dataset.from_list([{"chat": conversation}])[0]
    return render_chat(tokenizer, row["chat"], tokenize=False, **settings)


def test_the_advice_for_chats_trains_the_turns_of_the_assistant(tokenizer):
    dataset = chats().select(range(4))
    advice = hint_for(["messages"], "").partition("by ")[2].partition(" where")[0]
    made = eval(advice, {"dataset": dataset, "tokenizer": tokenizer})
    data = TokenDataset.from_dataset(made, context_length=999)
    for row, chat in zip(data, dataset["messages"], strict=True):
        predicted = tokenizer.decode([token for token in row["labels"] if token != -100])
        assert predicted == "".join(f"{m['content']};" for m in chat if m["role"] == "assistant")
        assert tokenizer.decode(row["input_ids"]).startswith(f"U:{chat[0]['content']};A:")


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
    assert render(tokenizer, chat) == "abc;d;"


def test_parts_that_nothing_reads_are_refused_and_lists_of_tools_are_not(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    image = {"role": "user", "content": [{"type": "image", "url": "a.png"}]}
    with pytest.raises(HydraConfigError, match="the content of a message of 'user' is"):
        render(tokenizer, [image])
    assert render(tokenizer, [{"role": "tool", "content": [1, 2]}]) == "[1, 2];"


def test_a_turn_that_does_not_count_by_its_own_key():
    """It would count; a template may read the key, as the error says."""
    chat = [*CHAT[:1], {**CHAT[1], "weight": 0}, CHAT[2], {**CHAT[3], "weight": 1}]
    for marking in (None, "{{ message.content }}"):
        with pytest.raises(HydraConfigError, match=r"'weight' 0.*message.weight != 0"):
            check_counts(chat, marking)
    check_counts(chat, "{% if message.weight != 0 %}{% generation %}")
    marked = [{**CHAT[0], "loss_mask": 0}, {**CHAT[1], "loss_mask": 1, "loss": 0.83}]
    check_counts(marked, "any")
    with pytest.raises(HydraConfigError, match="'loss_mask' 0"):
        check_counts(marked, None)


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
    as_text = [
        {"messages": call(json.dumps(given)), "tools": json.dumps([schema])}
        for given, schema in zip(arguments, schemas)
    ]
    wanted = [
        f"[{json.dumps([schema])}]hi;{json.dumps(call(given)[1]['tool_calls'])};"
        for given, schema in zip(arguments, schemas)
    ]
    for given in (rows, as_text):
        stored = datasets.Dataset.from_list(given)
        made = [
            render_chat(tokenizer, row["messages"], tools=row["tools"], tokenize=False)
            for row in stored
        ]
        assert made == wanted
    empty = render(tokenizer, call(""), tools="")
    assert empty == f"hi;{json.dumps(call({})[1]['tool_calls'])};"


@pytest.mark.parametrize(
    ("tools", "message"),
    [("[{", "column 'tools' is not JSON"), ("7", "JSON of a int, expected a list")],
)
def test_tools_that_are_no_json_of_a_list_are_refused(tokenizer, tools, message):
    with pytest.raises(HydraConfigError, match=message):
        render(tokenizer, CHAT, tools=tools)
