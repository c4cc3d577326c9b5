"""`/v1/chat/completions`: messages, rendered by the model's chat template; and `/tokenize`."""

from __future__ import annotations

import time
from typing import Any

from truedraft.serve.formats import ChatFormat, Format
from truedraft.serve.model import ServedModel
from truedraft.serve.protocol import ChatBody, TokenizeBody
from truedraft.serve.settings import Plan, planned


def prepare(model: ServedModel, body: ChatBody, namespace: str, id: str) -> tuple[Plan, Format]:
    """The rows of a request, and the format of its response.

    Raises:
        ApiError, Refused: a parameter cannot be honoured.
    """
    text = rendered(model, body)
    plan = planned(model, body, [model.encoded(text, False)], namespace, id)
    return plan, ChatFormat(id, int(time.time()), model.name, plan, bool(body.return_tokens))


def rendered(model: ServedModel, body: ChatBody | TokenizeBody) -> str:
    """The prompt of a chat: its messages in the model's template."""
    tokenizer: Any = model.tokenizer
    return str(
        tokenizer.apply_chat_template(
            body.messages, tools=body.tools, chat_template=model.chat_template, tokenize=False,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message), **(body.chat_template_kwargs or {}),
        )
    )  # fmt: skip


def tokenized(model: ServedModel, body: TokenizeBody) -> dict[str, Any]:
    """The response of `/tokenize`."""
    if body.prompt is not None:
        ids = model.encoded(body.prompt, body.add_special_tokens is not False)
    else:
        ids = model.encoded(rendered(model, body), bool(body.add_special_tokens))
    texts = {"token_strs": [str(model.tokenizer.decode([token])) for token in ids]} if body.return_token_strs else {}
    return {"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len} | texts
