"""`/v1/chat/completions`: messages, rendered by the model's chat template; and `/tokenize`."""

from __future__ import annotations

import time
from typing import Any

from truedraft.serve.errors import ApiError
from truedraft.serve.formats import ChatFormat, Format
from truedraft.serve.model import ServedModel
from truedraft.serve.protocol import ChatBody, TokenizeBody
from truedraft.serve.settings import Plan, constraint_of, planned
from truedraft.text.templates import render
from truedraft.text.token_text import token_text
from truedraft.text.tool_calls import ToolParser, markers, parser_for
from truedraft.text.tool_grammar import answer_grammar, call_grammar


def prepare(model: ServedModel, body: ChatBody, namespace: str, id: str) -> tuple[Plan, Format]:
    """The rows of a request, and the format of its response.

    Raises:
        ApiError, Refused: a parameter cannot be honoured.
    """
    ids = rendered(model, body)
    prompt = str(model.tokenizer.decode(ids))
    callable_tools = [] if body.tool_choice == "none" else body.tools or []
    forced = _forced_call(model, body, prompt)

    def parser() -> ToolParser | None:
        return parser_for(model.tokenizer, callable_tools, prompt)

    kept = markers(model.tokenizer) if parser() is not None else ()
    around = None
    if forced is None and constraint_of(body, None, None) is not None:
        around = answer_grammar(model.tokenizer, callable_tools, prompt=prompt)
    plan = planned(model, body, [ids], namespace, id, forced, kept, around)
    return plan, ChatFormat(id, int(time.time()), model.name, plan, bool(body.return_tokens), parser=parser)


def _forced_call(model: ServedModel, body: ChatBody, prompt: str) -> str | None:
    """The grammar of the calls that `tool_choice` demands, None where it demands none.

    Raises:
        ApiError: it is not OpenAI's, or there are no tools.
        Refused: the template's format of calls is unknown.
    """
    choice = body.tool_choice
    if choice is None and body.parallel_tool_calls is None:
        return None
    if not body.tools and choice != "none":
        raise ApiError(400, "tool_choice and parallel_tool_calls need tools: give some, or leave them out", "tools")
    if choice in (None, "none", "auto"):
        if body.parallel_tool_calls is False:
            raise ApiError(
                400, "parallel_tool_calls=false needs tool_choice='required', which enforces it: use that",
                "parallel_tool_calls",
            )  # fmt: skip
        return None
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise ApiError(400, "tool_choice: give 'none', 'auto', 'required' or a function by its name", "tool_choice")
    parallel = body.parallel_tool_calls is not False
    return call_grammar(model.tokenizer, body.tools or [], name=name, parallel=parallel, prompt=prompt)


def rendered(model: ServedModel, body: ChatBody | TokenizeBody) -> list[int]:
    """The prompt of a chat: its messages in the model's template.

    Raises:
        Refused: the template cannot show them.
    """
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return render(
        model.tokenizer, body.messages or [], tools=body.tools, documents=getattr(body, "documents", None),
        template_kwargs=body.chat_template_kwargs, add_generation_prompt=begins, continue_final_message=continues,
    )  # fmt: skip


def tokenized(model: ServedModel, body: TokenizeBody) -> dict[str, Any]:
    """The response of `/tokenize`."""
    if body.prompt is not None:
        ids = model.encoded(body.prompt, body.add_special_tokens is not False)
    else:
        ids = rendered(model, body)
    found = {"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len}
    if not body.return_token_strs:
        return found
    return found | {"token_strs": token_text(model.tokenizer).names(ids)}
