"""Messages of OpenAI's chat API, put into the chat template of a tokenizer.

No text of a message is dropped: a field that this model's template has no place for is refused by name. Fields that say
nothing (null, empty) and marks for caches are left out, and so is `name` where the template does not show it. The
template is always the tokenizer's own, which transformers runs in a sandbox of jinja; a request supplies values for it.
Specification: OpenAI's chat completions API (messages, tools), and `documents` and `chat_template_kwargs` as in vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from truedraft.errors import Refused, why
from truedraft.text.thinking import variables, with_reasoning

FIELDS = {
    "system": {"content", "name"},
    "developer": {"content", "name"},
    "user": {"content", "name"},
    "assistant": {"content", "name", "refusal", "tool_calls", "reasoning_content", "reasoning", "thinking", "parsed"},
    "tool": {"content", "name", "tool_call_id"},
}  # role -> the fields of its messages, `role` left out; OpenAI's client adds parsed, what it read from the content
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field in several APIs and templates
CACHE = "cache_control"  # a mark for caches of prompts, of Anthropic's API: prefixes are found by their tokens
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> field
OTHERS = {
    "function_call": "use tool_calls",
    "audio": "this model reads text only",
    "annotations": "no chat template shows them",
}  # fields that OpenAI's schema has, and the remedy
SHOWN = ("tool_calls",)  # fields whose text must be in the prompt, or the message is refused
SET = "set tokenizer.chat_template, or start a server with --chat-template FILE"
REASON = 300  # characters of a template's own message, at most
BETWEEN_PARTS = "\n"  # text parts of one message, as vLLM joins them
RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip  # arguments of apply_chat_template, which are no variables of a template


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, str]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """The token ids of a conversation in the tokenizer's chat template.

    Args:
        messages: as in OpenAI's API. Content is text or a list of text parts; `arguments` of tool calls are JSON text.
        tools: as in OpenAI's API: `{"type": "function", "function": {...}}`.
        documents: for templates of retrieval: each with texts, commonly `title` and `text`.
        template_kwargs: values of variables of this template (`chat_template_kwargs`, for example `enable_thinking`).
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open, to be continued.

    Raises:
        Refused: there is no template, it rejects the messages or has no place for a part of them, or a message is
            not as OpenAI's API has it.
    """
    if add_generation_prompt and continue_final_message:
        raise Refused("add_generation_prompt and continue_final_message are both true: set one of them to false")
    template = template_of(tokenizer, bool(tools))
    values = _values(template, tools, documents, template_kwargs or {})
    normal = normalized(messages, template)
    given: dict[str, Any] = {
        **values,
        "tools": [_tool(tool) for tool in tools] if tools else None,
        "documents": [*documents] if documents else None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    _check_shown(tokenizer, normal, given)
    encoded: Any = _rendered(tokenizer, normal, {**given, "return_dict": True})
    if not (ids := list(encoded["input_ids"])):
        raise Refused("messages: this model's chat template makes an empty prompt of them; give some text")
    return ids


def request_text(tokenizer: PreTrainedTokenizerBase, request: str) -> str:
    """A user's request in the tokenizer's chat template, as a text that the tokenizer reads as the template's tokens.

    Raises:
        Refused: there is no chat template, or it rejects the message.
    """
    message = {"role": "user", "content": request}
    ids = render(tokenizer, [message])
    text = str(_rendered(tokenizer, [message], {"add_generation_prompt": True, "tokenize": False}))
    if tokenizer(text)["input_ids"] != ids and tokenizer.bos_token:  # which it puts before any text
        text = text.removeprefix(str(tokenizer.bos_token))
    return text


def check_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises Refused where prompts are to be put into a chat template by `--chat`, and the tokenizer has none."""
    if not tokenizer.chat_template:
        raise Refused("--chat: the tokenizer of this model has no chat template; drop --chat")


def template_of(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> str:
    """The text of the chat template; `with_tools` selects the one for tools, where a tokenizer has several.

    Raises:
        Refused: there is none, or none for conversations.
    """
    if not tokenizer.chat_template:
        raise Refused(f"messages: the tokenizer of this model has no chat template: {SET}")
    try:
        return str(tokenizer.get_chat_template(None, [{}] if with_tools else None))
    except ValueError as e:
        raise Refused(f"messages: this model has several chat templates, none of them called default: {SET}") from e


def normalized(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages in the form that templates expect: text as content, arguments of tool calls as objects.

    Raises:
        Refused: a message is not as OpenAI's API has it.
    """
    if not messages:
        raise Refused("messages is empty: give at least one message")
    calls: set[str] = set()
    normal = []
    for at, message in enumerate(messages):
        place = f"messages[{at}]"
        role, fields = _fields(message, place)
        if role == "developer" and "developer" not in template:
            role = "system"
        found: dict[str, Any] = {"role": role}
        if (content := _content(fields, place)) is not None:
            found["content"] = content
        if "name" in fields:
            found["name"] = _text(fields["name"], f"{place}.name")
        if thought := [field for field in REASONING if field in fields]:
            found[_reasoning_field(template)] = _text(fields[thought[0]], f"{place}.{thought[0]}")
        if "tool_calls" in fields:
            found["tool_calls"] = _tool_calls(fields["tool_calls"], f"{place}.tool_calls")
            calls.update(call["id"] for call in found["tool_calls"])
        if role == "tool":
            found["tool_call_id"] = _answered(fields.get("tool_call_id"), calls, place)
        if "content" not in found and not ("tool_calls" in found or thought):
            if role != "assistant" or "content" not in message:
                raise Refused(f"{place}.content is missing: give a text")
            found["content"] = ""  # an answer without text
        normal.append(found)
    return normal


def _fields(message: Mapping[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """The role, and the fields that say something."""
    if not isinstance(message, Mapping):
        raise Refused(f"{place} is no object: give a message with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in FIELDS:
        raise Refused(f"{place}.role {role!r} is unknown: there are {', '.join(FIELDS)}")
    fields = {k: v for k, v in _without_empty(message).items() if k != "role"}
    for field in fields:
        if field not in FIELDS[role]:
            remedy = OTHERS.get(field, f"messages of this role have {', '.join(sorted(FIELDS[role]))}")
            raise Refused(f"{place}.{field} is not supported in a message of role {role}: {remedy}")
    return role, fields


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an object that say something: clients return messages with all fields, most of them empty."""
    return {k: v for k, v in fields.items() if k != CACHE and not (_is_empty(v) and (v is None or k != "content"))}


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, false, an empty text or list, an object of such values."""
    return (
        value is None
        or value is False
        or value in ("", [])
        or (isinstance(value, dict) and all(map(_is_empty, value.values())))
    )


def _reasoning_field(template: str) -> str:
    """The name by which a template reads the reasoning of earlier messages."""
    read = (name for name in REASONING if re.search(rf"(\w\.|['\"]){name}\b", template))
    return next(read, REASONING[0])


def _tool(tool: Any) -> Any:
    """A tool as its template shows it: without marks for caches."""
    if not isinstance(tool, Mapping):
        return tool
    kept = {k: v for k, v in tool.items() if k != CACHE}
    function = kept.get("function")
    if isinstance(function, Mapping) and CACHE in function:
        kept["function"] = {k: v for k, v in function.items() if k != CACHE}
    return kept


def _content(fields: Mapping[str, Any], place: str) -> str | None:
    """The text of a message; that of a refusal is what the assistant had answered."""
    content, refusal = fields.get("content"), fields.get("refusal")
    if refusal is not None:
        if content:
            raise Refused(f"{place} has content and a refusal: give one of them")
        return _text(refusal, f"{place}.refusal")
    if content is None or isinstance(content, str):
        return None if content is None else _text(content, f"{place}.content")
    if not isinstance(content, list) or not content:
        raise Refused(f"{place}.content is no text: give a text or a list of text parts")
    return BETWEEN_PARTS.join(_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise Refused(f"{place} is of type {kind!r}: this model reads text; give parts of type 'text'")
    if more := sorted(_without_empty(part).keys() - {"type", field}):
        raise Refused(f"{place}.{more[0]} is not supported in a part of type {kind}: leave it out")
    return _text(part.get(field), f"{place}.{field}")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{place} is no text: give a string")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        code = ord(value[e.start])
        raise Refused(f"{place} has half of a surrogate pair (U+{code:04X}), which is no text: remove it") from e
    return value


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not calls:
        raise Refused(f"{place} is no list of tool calls: give at least one, or leave it out")
    return [_tool_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    """A call with its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or (call.get("type") or "function") != "function":
        raise Refused(f"{place} is no call of a function: give id, type 'function' and function")
    for found, known, where in (
        (call, {"id", "type", "function", "index"}, ""),
        (function, {"name", "arguments", "parsed_arguments"}, ".function"),
    ):
        if more := sorted(_without_empty(found).keys() - known):
            raise Refused(f"{place}{where}.{more[0]} is not supported: leave it out")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(_text(arguments, f"{place}.function.arguments"))
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{place}.function.arguments is no JSON object: give its arguments by name")
    name = _text(function.get("name"), f"{place}.function.name")
    own = {"name": name, "arguments": arguments}
    return {"id": _text(call.get("id"), f"{place}.id"), "type": "function", "function": own}


def _answered(call_id: Any, calls: set[str], place: str) -> str:
    """The id of the call that a tool message answers."""
    if not isinstance(call_id, str) or call_id not in calls:
        raise Refused(f"{place}.tool_call_id {call_id!r} is the id of no tool call in the messages before it")
    return call_id


def _values(
    template: str,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, str]] | None,
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """The values of a template's variables; raises Refused for what the template does not read."""
    for name, given in (("tools", tools), ("documents", documents)):
        if given and not re.search(rf"\b{name}\b", template):
            raise Refused(f"{name}: this model's chat template has no place for them; leave them out")
    for name in values:
        if name in RESERVED:
            raise Refused(f"chat_template_kwargs.{name} is no variable of a template: leave it out")
    found = with_reasoning(template, values)
    for name, value in [*found.items()]:
        if name not in variables(template):
            if value is not None:
                raise Refused(f"chat_template_kwargs.{name}: this model's chat template does not read it; leave it out")
            del found[name]
    return found


def _check_shown(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], given: dict[str, Any]) -> None:
    """Raises Refused for an optional field that the prompt does not depend on in messages of a role."""
    found = {(message["role"], field): at for at, message in enumerate(messages) for field in SHOWN if field in message}
    for (role, field), at in found.items():
        without = [_without(message, field) if message["role"] == role else message for message in messages]
        try:
            ignored = _rendered(tokenizer, without, {**given, "tokenize": False}) == _rendered(
                tokenizer, messages, {**given, "tokenize": False}
            )
        except Refused:
            ignored = False
        if ignored:
            raise Refused(f"messages[{at}].{field}: this model's chat template has no place for it; leave it out")


def _without(message: dict[str, Any], field: str) -> dict[str, Any]:
    return {"content": "", **{k: v for k, v in message.items() if k != field}}


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], given: dict[str, Any]) -> Any:
    """What `apply_chat_template` returns; a template that concatenates arguments as text gets them as JSON text.

    Raises:
        Refused: the template rejects the messages.
    """
    try:
        try:
            return tokenizer.apply_chat_template([*messages], **given)
        except TypeError:
            if not any("tool_calls" in message for message in messages):
                raise
            return tokenizer.apply_chat_template([_with_json_arguments(message) for message in messages], **given)
    except (TemplateError, ValueError, TypeError, KeyError, ArithmeticError, AttributeError, RecursionError) as e:
        reason = " ".join(why(e).split())[:REASON]
        raise Refused(f"messages are rejected by this model's chat template: {reason}") from e


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message
