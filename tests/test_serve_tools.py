"""Tools by the server, for templates of several families: forced calls are whole, of the schema, and streamed alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

import truedraft  # noqa: E402
from served import running  # noqa: E402
from tool_families import FAMILIES, HARMONY  # noqa: E402
from truedraft.accelerated import Accelerated  # noqa: E402
from truedraft.loading import load  # noqa: E402

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ tools | tojson }}<assistant>{# FORM #}"
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["c", "7"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "on": {"type": "boolean"},
    },
    "required": ["unit", "n", "on"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("add", "drop")
]


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.mark.parametrize("family", ["qwen3_coder", "glm", "lfm2", "kimi_k2", "gemma4", "llama3", "harmony"])
def test_forced_calls_are_valid_and_streamed_as_they_are_returned(
    fast: Accelerated, tmp_path: Path, family: str
) -> None:
    form = HARMONY if family == "harmony" else FAMILIES[family][0]
    (tmp_path / "template").write_text(TEMPLATE.replace("FORM", form))
    with running(fast, chat_template=str(tmp_path / "template")) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        named = {"type": "function", "function": {"name": "drop"}}
        for choice, parallel in (("required", False), ("required", True), (named, True)):
            asked: dict[str, Any] = {
                "model": "nano", "messages": [{"role": "user", "content": "a cat"}], "tools": TOOLS, "seed": 3,
                "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 120,
            }  # fmt: skip
            answer = api.chat.completions.create(**asked).choices[0]
            calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
            events = api.chat.completions.create(**asked, stream=True)
            deltas = [call for event in events if event.choices for call in event.choices[0].delta.tool_calls or []]
            assert [(call.function.name, call.function.arguments) for call in deltas] == calls
            if choice != "required" or not parallel:
                assert answer.finish_reason == "tool_calls" and len(calls) == 1 and answer.message.content is None
            for name, arguments in calls:
                assert name == "drop" or choice == "required"
                jsonschema.validate(json.loads(arguments), SCHEMA)
