"""What users of other servers complain about, one test per complaint, by the served API.

The oracle is `generate`: plain, or with the same seed and without drafts. The control is "fixed", so that every pass of
a request with a drafter has drafts.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

import truedraft  # noqa: E402
from api_requests import PROMPTS, Expected, expected  # noqa: E402
from served import Running, running  # noqa: E402
from truedraft.accelerated import Accelerated  # noqa: E402
from truedraft.loading import load  # noqa: E402
from truedraft.serve import plan  # noqa: E402
from truedraft.serve.config import ServeConfig  # noqa: E402

HYBRID = "suffix+eagle3"  # n-grams, and the learned heads that are embedded with the model
DRAFTS = ("auto", "suffix", "token-recycling", "eagle3", HYBRID)
COPIED = {"type": "content", "content": "one day, a little girl named lily went to the park. she saw a big tree and"}
P = PROMPTS[0]


@pytest.fixture(scope="module")
def plain() -> Accelerated:
    return truedraft.accelerate(*load("nano"), draft=None)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    fast = truedraft.accelerate(*load("nano"), control="fixed")
    with running(fast, allow_draft=DRAFTS[1:], max_rows=8) as made:
        yield made


@pytest.fixture(scope="module")
def api(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def created(api: Any, stream: bool = False, **body: Any) -> Any:
    """The response to a completion; or the list of its chunks."""
    known = {"prompt", "max_tokens", "temperature", "seed", "stop", "n", "logprobs"}
    given = {"model": "nano", "prompt": P, "max_tokens": 24, "temperature": 0}
    given |= {name: value for name, value in body.items() if name in known}
    extra = {name: value for name, value in body.items() if name not in known}
    if not stream:
        return api.completions.create(**given, extra_body=extra)
    return list(api.completions.create(**given, extra_body=extra, stream=True, stream_options={"include_usage": True}))


def compare(api: Any, plain: Accelerated, **body: Any) -> Expected:
    """Check a response, whole and streamed, against `generate`; returns what it has to be."""
    full: dict[str, Any] = {"prompt": P, "max_tokens": 24, "temperature": 0, "seed": 5, **body}
    correct = expected(plain, full)
    whole = created(api, **full, return_tokens=True)
    chunks = created(api, True, **full, return_tokens=True)
    streamed = Expected([[] for _ in correct.tokens], [""] * len(correct.tokens), [""] * len(correct.tokens))
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed.texts[choice.index] += choice.text
        streamed.tokens[choice.index] += [token["id"] for token in choice.tokens]
        streamed.reasons[choice.index] = choice.finish_reason or streamed.reasons[choice.index]
    found = Expected(
        [[token["id"] for token in choice.tokens] for choice in whole.choices],
        [choice.text for choice in whole.choices],
        [choice.finish_reason for choice in whole.choices],
    )
    assert found == streamed == correct, body
    usages = [whole.usage, *(chunk.usage for chunk in chunks if chunk.usage is not None)]
    assert [usage.completion_tokens for usage in usages] == [sum(map(len, correct.tokens))] * 2
    return correct


def figures(server: Running) -> dict[str, float]:
    """The values of `/metrics`, by name and labels other than the model's."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {re.sub(r'(model_name="nano"|engine="0"),?', "", name): float(value) for name, value in pairs}


def schema(most: int) -> dict[str, Any]:
    properties = {"n": {"type": "integer", "minimum": 0, "maximum": most}, "s": {"enum": ["cat", "dog"]}}
    return {"type": "object", "properties": properties, "required": ["n", "s"], "additionalProperties": False}


def form(most: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(most)}}


# ---------------------------------------------------------------- output differs from plain decoding


def test_drafts_change_greedy_output_in_twenty_of_twenty_pairs(api: Any, plain: Accelerated) -> None:
    """N-gram drafts changed the greedy text of every one of twenty prompts."""
    pairs = [(prompt, draft) for prompt in PROMPTS[:4] for draft in DRAFTS]
    assert len(pairs) == 20
    correct = {prompt: expected(plain, {"prompt": prompt, "max_tokens": 24, "temperature": 0}) for prompt in PROMPTS}
    accepted = 0
    for prompt, draft in pairs:
        response = created(api, prompt=prompt, draft=draft)
        assert [response.choices[0].text] == correct[prompt].texts, (prompt, draft)
        accepted += response.truedraft["accepted_tokens"]
    assert accepted > 60


def test_the_guarantee_is_documented_nowhere(api: Any) -> None:
    """Users asked what is guaranteed, and found it in no document: it is in every response."""
    for draft in (*DRAFTS, "none"):
        assert created(api, draft=draft, max_tokens=2).truedraft["guarantee"] == "tokens"


def test_text_depends_on_how_many_tokens_are_verified_at_once(api: Any, plain: Accelerated) -> None:
    """Up to 80 % of requests differed, by the group of widths that a pass had; and with what else was running."""
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 10, "temperature": temperature, "seed": 3, "draft": draft}
        for prompt in PROMPTS[:2]
        for temperature in (0, 1.0)
        for draft in (*DRAFTS, "none")
    ]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda body: created(api, **body).choices[0].text, bodies))
    without = {(b["prompt"], b["temperature"]): expected(plain, {**b, "draft": "none"}).texts[0] for b in bodies[5::6]}
    for body, text in zip(bodies, texts, strict=True):
        assert text == without[body["prompt"], body["temperature"]], body


def test_sampled_requests_are_verified_greedily(api: Any, plain: Accelerated) -> None:
    """On some devices, sampled requests silently had the greedy text."""
    greedy = compare(api, plain, draft=HYBRID).texts
    sampled = {compare(api, plain, temperature=1.2, draft=HYBRID, seed=seed).texts[0] for seed in range(3)}
    assert len({*greedy, *sampled}) == 4


# ---------------------------------------------------------------- parameters that stop working


@pytest.mark.parametrize(
    "given",
    [
        {"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.4},
        {"min_p": 0.3, "temperature": 1.4}, {"logit_bias": {"16": -100.0}}, {"min_tokens": 20, "stop_token_ids": [16]},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_parameters_are_ignored_or_refused_with_drafts(api: Any, plain: Accelerated, given: dict[str, Any]) -> None:
    """Penalties were ignored, and min_p and logit_bias refused, once there were drafts."""
    (name, *_) = given
    body: dict[str, Any] = {"prompt": P, "max_tokens": 24, "temperature": 0, "seed": 5, **given, "prediction": COPIED}
    applied = compare(api, plain, **body)
    without = expected(plain, {key: value for key, value in body.items() if key != name})
    assert applied.tokens != without.tokens, f"{name} changes nothing here: the test is blind"


def test_json_is_invalid_with_drafts_under_concurrency(api: Any) -> None:
    """Constrained requests had invalid JSON, up to all of them when several ran at once, or were not constrained."""

    def response(i: int) -> Any:
        given = {
            "prompt": P,
            "max_tokens": 120,
            "temperature": 1.0,
            "seed": i // 3,
            "response_format": form(10 + i // 3),
        }
        return created(api, **given, draft=(HYBRID, "auto", "none")[i % 3])

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(response, range(12)))
    for i, each in enumerate(responses):
        (choice,) = each.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), schema(10 + i // 3))
        assert choice.text == responses[i - i % 3].choices[0].text


def test_log_probabilities_are_zero(api: Any, plain: Accelerated) -> None:
    """Log-probabilities of drafted tokens were 0, wrong, or refused."""
    tokenizer: Any = plain.tokenizer
    choice = created(api, draft=HYBRID, logprobs=2, return_tokens=True).choices[0]
    assert sum(token["drafted"] for token in choice.tokens) > 5
    ids, prompt = [token["id"] for token in choice.tokens], tokenizer(P).input_ids
    with torch.no_grad():
        logits = plain.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    given = torch.tensor(choice.logprobs.token_logprobs)
    assert torch.allclose(given, logits[range(len(ids)), ids], atol=1e-4) and bool((given < 0).all())
    top = torch.tensor([sorted(each.values(), reverse=True) for each in choice.logprobs.top_logprobs])
    assert torch.allclose(top, logits.topk(2).values, atol=1e-4)


def test_a_seed_has_no_effect(api: Any, plain: Accelerated) -> None:
    """A seed did nothing with drafts, and never gave the sample that it gives without."""
    texts = []
    for seed in (7, 7, 8):
        texts += [created(api, temperature=1.0, seed=seed, draft=draft).choices[0].text for draft in DRAFTS]
    correct = [expected(plain, {"prompt": P, "max_tokens": 24, "temperature": 1.0, "seed": s}).texts[0] for s in (7, 8)]
    assert texts == [correct[0]] * 2 * len(DRAFTS) + [correct[1]] * len(DRAFTS) and correct[0] != correct[1]


@pytest.mark.parametrize(
    "end", [{"stop": [" park"]}, {"stop": [". she saw"]}, {"stop_token_ids": [16]}, {"stop": ["the"], "n": 2}]
)
def test_text_after_the_end_leaks(api: Any, plain: Accelerated, end: dict[str, Any]) -> None:
    """Text behind a stop string or an end of text came out where the end was within an accepted draft."""
    for temperature in (0, 0.3):
        correct = compare(api, plain, **end, temperature=temperature, prediction=COPIED)
        assert set(correct.reasons) == {"stop"}, "the text never ends: the test is blind"


def test_an_end_of_text_in_a_draft(api: Any, plain: Accelerated) -> None:
    """As above, by the model's own end of text; its position in the drafts moves with the seed."""
    reasons = set()
    for seed in range(4):
        given: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 40}
        given["logit_bias"] = {str(plain.model.generation_config.eos_token_id): 7.0}
        reasons |= set(compare(api, plain, **given, draft=HYBRID).reasons)
    assert "stop" in reasons


def test_a_cached_prefix_changes_the_text(api: Any, plain: Accelerated) -> None:
    """Prefix reuse together with drafts corrupted texts silently, or never reused anything."""
    prompt = "the old man had a small boat and a very big fish. one day he said"
    for extra in ("", " to the fish", " to the fish", ""):
        body = {"prompt": prompt + extra, "max_tokens": 12, "temperature": 0}
        response = created(api, **body)
        assert [response.choices[0].text] == expected(plain, body).texts
    assert response.usage.prompt_tokens_details.cached_tokens >= response.usage.prompt_tokens - 2


# ---------------------------------------------------------------- what can be chosen, and combined


def test_drafts_cannot_be_turned_off_or_chosen_for_a_request(api: Any) -> None:
    """Users want drafts chosen, and turned off, for each request; and drafts by default without any knob."""
    off = created(api, draft="none").truedraft
    assert (off["mean_acceptance_length"], off["drafted_tokens"], off["passes"]) == (1, 0, off["tokens"])
    assert created(api).truedraft["accepted_tokens"] > 0
    for draft in DRAFTS[1:]:
        assert created(api, draft=draft).truedraft["drafter"] == draft
    with pytest.raises(openai.BadRequestError, match="draft='medusa'"):
        created(api, draft="medusa")


def test_n_grams_and_a_learned_drafter_exclude_each_other(api: Any) -> None:
    """Users want both at once: heads for new text, n-grams for what repeats."""
    body: dict[str, Any] = {"prompt": P, "max_tokens": 60, "temperature": 0}
    texts, passes = zip(*(
        (response.choices[0].text, response.truedraft["passes"])
        for response in (created(api, **body, draft=draft) for draft in ("none", HYBRID))
    ), strict=True)  # fmt: skip
    assert texts[0] == texts[1] and passes[1] < passes[0] / 1.5
    with_text = created(api, **body, draft=HYBRID, prediction={"type": "content", "content": texts[0]})
    assert with_text.choices[0].text == texts[0] and with_text.truedraft["passes"] < passes[1]


def test_batches_and_choices_are_refused_with_drafts(api: Any, plain: Accelerated) -> None:
    """Drafts were for one row: several prompts and choices, which accept different numbers, were refused."""
    prompts = list(PROMPTS[:3])
    response = created(api, prompt=prompts, n=2, temperature=1.0, seed=9, draft=HYBRID)
    bodies = [{"prompt": p, "n": 2, "max_tokens": 24, "temperature": 1.0, "seed": 9} for p in prompts]
    correct = [text for body in bodies for text in expected(plain, body).texts]
    assert [choice.text for choice in response.choices] == correct and len(set(correct)) == 6


def test_predicted_outputs_do_not_exist(api: Any) -> None:
    """No open server has OpenAI's `prediction`."""
    plain = created(api, draft="none", max_tokens=40)
    prediction = {"type": "content", "content": plain.choices[0].text}
    response = created(api, max_tokens=40, prediction=prediction)
    details = response.usage.completion_tokens_details
    assert response.choices[0].text == plain.choices[0].text
    assert details.accepted_prediction_tokens > 30 and details.rejected_prediction_tokens <= 2
    assert response.truedraft["passes"] < 20


# ---------------------------------------------------------------- figures


def test_acceptance_of_a_request_is_not_known(api: Any) -> None:
    """Acceptance was known for the whole server only: each response has its own, and they agree with its tokens."""
    response = created(api, draft=HYBRID, return_tokens=True)
    mine, tokens = response.truedraft, response.choices[0].tokens
    assert mine["tokens"] == len(tokens) == response.usage.completion_tokens
    assert mine["accepted_tokens"] == sum(token["drafted"] for token in tokens) <= mine["drafted_tokens"]
    assert mine["mean_acceptance_length"] == round(len(tokens) / mine["passes"], 4) > 1.5


def test_latency_between_tokens_is_measured_by_chunk(api: Any, server: Running) -> None:
    """Latency was counted per chunk, so that drafts made it look worse; and counters did not add up."""
    before = figures(server)
    responses = [created(api, draft=draft) for draft in (HYBRID, "auto", "none")]
    responses.append(created(api, prediction={"type": "content", "content": responses[0].choices[0].text}))
    after = figures(server)

    def added(name: str) -> float:
        return after[name + "{}"] - before[name + "{}"]

    total = sum(response.usage.completion_tokens for response in responses)
    assert added("vllm:generation_tokens_total") == total
    assert added("vllm:inter_token_latency_seconds_count") == total - len(responses)
    assert added("vllm:time_to_first_token_seconds_count") == len(responses)
    for metric, figure in (("draft", "drafted_tokens"), ("accepted", "accepted_tokens")):
        mine = sum(response.truedraft[figure] for response in responses)
        assert added(f"vllm:spec_decode_num_{metric}_tokens_total") == mine > 0


def test_the_memory_plan_forgets_the_drafter() -> None:
    """Memory was planned without the drafter, and ran out."""
    with_heads = plan.planned(ServeConfig(model="nano", draft=HYBRID))
    without = plan.planned(ServeConfig(model="nano", draft="none"))
    planned = {part.name: part.bytes for part in with_heads.parts}
    assert planned["head weights"] > 3_000_000 and planned["head KV cache"] > 0
    assert all(planned[part.name] >= part.bytes for part in without.parts if part.name != plan.KV)  # what is left
