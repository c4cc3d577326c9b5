"""OpenAI's messages in chat templates: equal to `apply_chat_template` on what a template expects; nothing dropped."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from truedraft import Refused
from truedraft.loading import load_tokenizer
from truedraft.text.templates import render

CHATML = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}
{%- for m in messages %}<{{ m.role }}{% if m.name and m.role == 'user' %} {{ m.name }}{% endif %}>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<end>
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
CONCATENATING = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}\n{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": ["a", 1]}'}}
USER = {"role": "user", "content": "one day"}


@pytest.fixture(scope="module")
def nano() -> PreTrainedTokenizerBase:
    return load_tokenizer("nano", "MODEL")


def with_template(tokenizer: PreTrainedTokenizerBase, template: Any) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    return tokenizer


def asked(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": [CALL]}, *messages]


def test_tools_and_calls_are_those_of_the_template(nano: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(nano, CHATML)
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {**USER, "name": "anna"},
        *asked({"role": "tool", "tool_call_id": "call_1", "content": "a box"}),
    ]
    arguments = {"at": ["a", 1]}
    expected: Any = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "be\nbrief"},
            {**USER, "name": "anna"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]},
            {"role": "tool", "content": "a box"},
        ],
        tools=[TOOL], add_generation_prompt=True, enable_thinking=False,
    )  # fmt: skip
    found = render(tokenizer, messages, tools=[TOOL], template_kwargs={"enable_thinking": False})
    assert found == expected["input_ids"]
    assert '"at": ["a", 1]' in tokenizer.decode(found)


def test_the_last_message_may_be_continued(nano: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(nano, CHATML)
    messages = [USER, {"role": "assistant", "content": "there was"}]
    found = render(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(found).endswith("there was")
    assert render(tokenizer, messages, add_generation_prompt=False) != found
    with pytest.raises(Refused, match="are both true"):
        render(tokenizer, messages, continue_final_message=True)


def test_a_template_that_concatenates_arguments_gets_json(nano: PreTrainedTokenizerBase) -> None:
    found = render(with_template(nano, CONCATENATING), asked())
    assert nano.decode(found).strip() == 'look {"at": ["a", 1]}'


def test_a_refusal_is_what_the_assistant_answered(nano: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(nano, PLAIN)
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    plain = render(tokenizer, [USER, {"role": "assistant", "content": "no"}])
    assert render(tokenizer, [USER, refusal]) == render(tokenizer, [USER, part]) == plain


def test_a_message_of_openais_client_is_as_good_as_its_own_fields(nano: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(nano, PLAIN)
    plain = {"role": "assistant", "content": "3"}
    more = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "name"))
    for empty in (None, []):
        whole = {**plain, **more, "annotations": empty, "parsed": 3}
        assert render(tokenizer, [USER, whole]) == render(tokenizer, [USER, plain])


def calling(arguments: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments, **more}}]}


IMAGE = {"type": "image_url", "image_url": {"url": "http://a"}}
REJECTED: list[tuple[str, dict[str, Any], str]] = [
    (PLAIN, {"messages": []}, "messages is empty"),
    (PLAIN, {"messages": [{"role": "judge", "content": "x"}]}, "role 'judge' is unknown"),
    (PLAIN, {"messages": [{"role": ["user"], "content": "x"}]}, r"role \['user'\] is unknown"),
    (PLAIN, {"messages": ["hello"]}, r"messages\[0\] is no object"),
    (PLAIN, {"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
    (PLAIN, {"messages": [{"role": "user", "content": 5}]}, "content is no text"),
    (PLAIN, {"messages": [{"role": "user", "content": []}]}, "content is no text"),
    (PLAIN, {"messages": [{"role": "user", "content": [IMAGE]}]}, r"content\[0\] is of type 'image_url'"),
    (PLAIN, {"messages": [{"role": "user", "content": "a\ud83d"}]}, "U\\+D83D"),
    (PLAIN, {"messages": [{**USER, "tool_calls": [CALL]}]}, "tool_calls is not supported in a message of role user"),
    (PLAIN, {"messages": [{**USER, "mood": "good"}]}, "mood is not supported"),
    (PLAIN, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "audio is not supported.*reads text only"),
    (PLAIN, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "use tool_calls"),
    (PLAIN, {"messages": [{"role": "assistant", "annotations": [{}]}]}, "no chat template shows them"),
    (PLAIN, {"messages": [{**USER, "parsed": 3}]}, "parsed is not supported in a message of role user"),
    (PLAIN, {"messages": [{**USER, "name": 5}]}, r"messages\[0\].name is no text"),
    (PLAIN, {"messages": asked()}, r"messages\[0\].tool_calls: this model's chat template has no place"),
    (PLAIN, {"messages": [USER], "tools": [TOOL]}, "tools: this model's chat template has no place"),
    (PLAIN, {"messages": [USER], "documents": [{"text": "a"}]}, "documents: this model's chat template has no place"),
    (PLAIN, {"messages": [USER], "template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood: this model's"),
    (PLAIN, {"messages": [USER], "template_kwargs": {"chat_template": "x"}}, "chat_template is no variable"),
    (CHATML, {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "'x' is the id of no tool call"),
    (CHATML, {"messages": [{"role": "assistant", "tool_calls": []}]}, r"messages\[0\].content is missing"),
    (CHATML, {"messages": [{"role": "assistant", "tool_calls": "look"}]}, "is no list of tool calls"),
    (CHATML, {"messages": [calling("[1]")]}, "arguments is no JSON object"),
    (CHATML, {"messages": [calling("[" * 10**6)]}, "arguments is no JSON object"),
    (CHATML, {"messages": [calling("{}", strict=True)]}, r"tool_calls\[0\].function.strict is not supported"),
    (ALTERNATING, {"messages": [{"role": "system", "content": "x"}]}, "chat template: System role not supported"),
    ("{{ messages[7].content.x }}", {"messages": [USER]}, "rejected by this model's chat template"),
    (
        "{% for x in range(10**9) %}a{% endfor %}",
        {"messages": [USER]},
        "rejected by this model's chat template: Range too big",
    ),
    ("{{ messages.__class__.__mro__ }}", {"messages": [USER]}, "rejected by this model's chat template: .*unsafe"),
    ("{% if %}", {"messages": [USER]}, "rejected by this model's chat template"),
    ("", {"messages": [USER]}, "has no chat template"),
    ({"other": PLAIN}, {"messages": [USER]}, "none of them called default"),
    ("{# nothing #}", {"messages": [USER]}, "empty prompt"),
]


@pytest.mark.parametrize(("template", "given", "message"), REJECTED, ids=[case[2][:40] for case in REJECTED])
def test_what_cannot_be_honoured_is_refused(
    nano: PreTrainedTokenizerBase, template: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message) as raised:
        render(with_template(nano, template), **given)
    assert "\n" not in str(raised.value)


GRADED = "{% for m in messages %}{{ m.content }}{% endfor %}Reasoning: {{ reasoning_effort }}"
QWEN = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% for m in messages %}"
    "{{ m['content'].split('</think>')[-1] }}{% endfor %}{{ '<think>' if thinking else '</think>' }}"
)
BOTH = GRADED + "{% if enable_thinking is false %} no{% endif %}"
ALWAYS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


@pytest.mark.parametrize(
    ("template", "values", "read"),
    [
        (GRADED, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (GRADED, {"enable_thinking": True}, {}),
        (QWEN, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (QWEN, {"reasoning_effort": "high"}, {"enable_thinking": True}),
        (QWEN, {"thinking": False}, {"enable_thinking": False}),
        (QWEN, {"enable_thinking": False, "reasoning_effort": "none"}, {"enable_thinking": False}),
        (DEEPSEEK, {"reasoning_effort": "minimal"}, {"thinking": True}),
        (DEEPSEEK, {"enable_thinking": False}, {"thinking": False}),
        (BOTH, {"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (BOTH, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (PLAIN, {"reasoning_effort": "high", "enable_thinking": True, "thinking": None}, {}),
        (PLAIN, {"reasoning_effort": "none"}, {}),
        (ALWAYS, {"reasoning_effort": "high", "enable_thinking": True}, {}),
    ],
)
def test_reasoning_is_asked_for_as_the_template_reads_it(
    nano: PreTrainedTokenizerBase, template: str, values: dict[str, Any], read: dict[str, Any]
) -> None:
    tokenizer = with_template(nano, template)
    expected: Any = tokenizer.apply_chat_template([USER], add_generation_prompt=True, **read)
    assert render(tokenizer, [USER], template_kwargs=values) == expected["input_ids"]


@pytest.mark.parametrize(
    ("template", "values", "words"),
    [
        (ALWAYS, {"reasoning_effort": "none"}, "reasoning_effort='none': this model always reasons"),
        (ALWAYS, {"enable_thinking": False}, "enable_thinking=False: this model always reasons"),
        (GRADED, {"thinking": False}, "give a low reasoning_effort"),
        (QWEN, {"reasoning_effort": "low", "enable_thinking": False}, "contradicts enable_thinking=False"),
        (QWEN, {"content": "x"}, "chat_template_kwargs.content"),
        (QWEN, {"mood": "good"}, "chat_template_kwargs.mood"),
    ],
)
def test_reasoning_that_the_template_cannot_express_is_refused(
    nano: PreTrainedTokenizerBase, template: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        render(with_template(nano, template), [USER], template_kwargs=values)


NAMED = "{% for m in messages %}{{ m.content }}{% if m.FIELD %}<{{ m.FIELD }}>{% endif %}{% endfor %}"


@pytest.mark.parametrize("written", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_earlier_messages_has_the_name_of_the_template(
    nano: PreTrainedTokenizerBase, written: str, given: str
) -> None:
    tokenizer = with_template(nano, NAMED.replace("FIELD", written))
    found = render(tokenizer, [USER, {"role": "assistant", "content": "no", given: "hm"}])
    assert tokenizer.decode(found).endswith("no<hm>")


def test_names_are_shown_where_the_template_shows_them(nano: PreTrainedTokenizerBase) -> None:
    message = {**USER, "name": "anna"}
    assert nano.decode(render(with_template(nano, NAMED.replace("FIELD", "name")), [message])).endswith("<anna>")
    tokenizer = with_template(nano, PLAIN)
    assert render(tokenizer, [message]) == render(tokenizer, [USER])
