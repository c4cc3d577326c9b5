"""Servers of models whose rotary embeddings change with the length of a text: defaults that can be honoured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import truedraft
from served import running
from truedraft.loading import load_tokenizer

LAST, CONTEXT = 40, 96  # the last length before the change, and that of the model
SIZES: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=0, eos_token_id=4095, pad_token_id=4094, max_position_embeddings=CONTEXT,
)  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": LAST, "factor": CONTEXT / LAST,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MODELS: dict[str, Any] = {
    "phi3": lambda: Phi3ForCausalLM(
        Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=LAST)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LONGROPE)),
    "dynamic": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=DYNAMIC)),
}


@pytest.fixture(params=MODELS, scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any, Any]]:
    torch.manual_seed(0)
    fast = truedraft.accelerate(MODELS[request.param]().eval(), load_tokenizer("nano"))
    with running(fast, chat_template="plain") as server:
        yield request.param, fast, server


def post(server: Any, path: str, **body: Any) -> tuple[int, Any]:
    data = json.dumps({"temperature": 0, "return_tokens": True, **body}).encode()
    try:
        answer = urlopen(Request(server.url + path, data, {"content-type": "application/json"}), timeout=60)
        return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def prompt_of(fast: Any, length: int) -> str:
    """A text of a number of tokens, the first of which is that of its beginning."""
    text = "a" + " a" * (length - 2)
    assert len(fast.tokenizer(text).input_ids) == length
    return text


def plain(fast: Any, text: str, new: int) -> list[int]:
    ids = torch.tensor([fast.tokenizer(text).input_ids])
    out = fast.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("length", [3, 25, LAST - 1, LAST, LAST + 1, 60])
def test_chats_without_max_tokens_get_what_can_be_honoured(length: int, served: tuple[str, Any, Any]) -> None:
    """Up to the length at which the embeddings change, or all of the context where the prompt is past it."""
    kind, fast, server = served
    text = prompt_of(fast, length)
    most = LAST - length + 1 if kind != "dynamic" and length <= LAST else CONTEXT - length
    status, answer = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": text}])
    assert status == 200 and answer["usage"]["prompt_tokens"] == length
    expected = plain(fast, text, most)
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert answer["choices"][0]["finish_reason"] == ("length" if len(expected) == most else "stop")
    status, answer = post(server, "/v1/completions", prompt=text)
    assert status == 200 and [t["id"] for t in answer["choices"][0]["tokens"]] == plain(fast, text, min(most, 16))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_sentence_names_the_parameter_that_was_given(name: str, served: tuple[str, Any, Any]) -> None:
    kind, fast, server = served
    messages = [{"role": "user", "content": prompt_of(fast, 20)}]
    if kind == "dynamic":
        assert post(server, "/v1/chat/completions", messages=messages, **{name: CONTEXT - 20})[0] == 200
        return
    status, answer = post(server, "/v1/chat/completions", messages=messages, **{name: 22})
    error = answer["error"]
    assert status == 400 and error["param"] == name
    assert error["message"].startswith(f"{name}=22: a prompt of 20 tokens and 22 new ones reach past 40, where this ")
    assert error["message"].endswith(f"set {name} to at most 21") and "max_new_tokens" not in error["message"]
    assert post(server, "/v1/chat/completions", messages=messages, **{name: 21})[0] == 200
    if name == "max_tokens":
        status, answer = post(server, "/v1/completions", prompt=prompt_of(fast, 20), max_tokens=22, n=2)
        assert status == 400 and answer["error"]["param"] == "max_tokens"
