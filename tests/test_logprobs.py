"""Log-probabilities of emitted tokens and of prompts in a running engine, against plain forwards over the text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper

import seq2seq_models
import truedraft
from drafters_for_tests import Oracle
from models import V, ragged, tiny
from truedraft import reading
from truedraft.engine_request import EngineRequest
from truedraft.logprobs import Logprobs, TokenLogprobs
from truedraft.sampling import History, Laws
from truedraft.tree import Row

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "logprobs": 5},
    "sampled": {"do_sample": True, "temperature": 0.6, "top_k": 8, "seed": 3, "logprobs": 0},
    "penalised": {"do_sample": True, "repetition_penalty": 1.5, "seed": 4, "logprobs": 20},
    "without drafts": {"do_sample": False, "draft": None, "logprobs": 1},
    "by a rule for whole paths": {"do_sample": True, "rule": "rejection", "seed": 5, "logprobs": 2},
    "all tokens": {"do_sample": False, "logprobs": V + 3},
}


def prompts(count: int) -> list[torch.Tensor]:
    inputs = ragged(tiny("llama", torch.float32), count)
    return [ids[mask.bool()][None] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


def plain(model: PreTrainedModel, prompt: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """(len(tokens), V) log-probabilities at the places of the tokens: one forward, no cache."""
    ids = torch.cat([prompt, torch.tensor([tokens], dtype=torch.long)], 1)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    return logits.double().log_softmax(-1)


def check(model: PreTrainedModel, prompt: torch.Tensor, request: EngineRequest, count: int) -> None:
    found = request.logprobs
    assert found is not None and [place.token for place in found] == request.tokens
    for place, law in zip(found, plain(model, prompt, request.tokens), strict=True):
        values, tokens = law.topk(min(count, V))
        assert place.logprob == pytest.approx(float(law[place.token]), abs=2e-4)
        assert [value for _, value in place.top] == pytest.approx(values.tolist(), abs=2e-4)
        assert [float(law[token]) for token, _ in place.top] == pytest.approx(values.tolist(), abs=2e-4)
        assert len({token for token, _ in place.top}) == len(tokens)


def test_logprobs_of_requests_that_run_together_are_those_of_plain_forwards() -> None:
    model = tiny("llama", torch.float32)
    fast = truedraft.accelerate(model, draft="prompt-lookup", control="fixed")
    with fast.engine(max_rows=4, max_tokens=96) as engine:
        given = list(zip(prompts(len(SETTINGS)), SETTINGS.values(), strict=True))
        requests = [engine.add_request(prompt, max_new_tokens=30, **settings) for prompt, settings in given]
        others = [
            engine.add_request(prompt, max_new_tokens=30, **{k: v for k, v in settings.items() if k != "logprobs"})
            for prompt, settings in given
        ]
        while engine.has_unfinished_requests():
            for request in engine.step():
                if request.logprobs is not None:
                    assert [place.token for place in request.logprobs] == request.tokens
    for (prompt, settings), request, other in zip(given, requests, others, strict=True):
        check(model, prompt, request, settings["logprobs"])
        assert request.tokens == other.tokens and other.logprobs is None
    assert any(request.report().mean_acceptance_length > 1 for request in requests if request.logprobs)


class Failing(LogitsProcessor):
    """Raises at its fifth token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 9:
            raise RuntimeError("a fault")
        return scores


@pytest.mark.parametrize("ending", ["stop", "length", "abort", "error"])
def test_logprobs_end_where_the_text_ends_inside_a_draft(ending: str) -> None:
    model = tiny("llama", torch.float32)
    prompt = prompts(1)[0]
    whole = model.generate(prompt, max_new_tokens=30, do_sample=False)[0].tolist()
    text = whole[prompt.shape[1] :]
    settings: dict[str, Any] = {"max_new_tokens": 7 if ending == "length" else 30, "do_sample": False}
    if ending == "stop":
        settings |= {"eos_token_id": max(set(text[5:]), key=text.index), "pad_token_id": 0}
    if ending == "error":
        settings["logits_processor"] = [Failing()]
    fast = truedraft.accelerate(model, draft=Oracle(vocabulary=V, answers={0: whole}), control="fixed")
    with fast.engine(max_rows=1, max_tokens=64) as engine:
        request = engine.add_request(prompt, logprobs=2, **settings)
        assert request.logprobs == []
        for _ in range(4 if ending == "abort" else 99):
            if engine.has_unfinished_requests():
                engine.step()
        engine.abort_request(request)
    assert request.finish_reason == ending
    assert 0 < len(request.tokens) < 30 and request.tokens == text[: len(request.tokens)]
    assert request.report().mean_acceptance_length > 1
    check(model, prompt, request, 2)


def test_one_tensor_is_kept() -> None:
    row = Row(0, [1, 2], 2, 9)
    kept = Logprobs(row, 1)
    assert kept.places() == []
    for step, token in enumerate((3, 0, 2)):
        logits = torch.zeros(5)
        kept.add(logits)
        logits[step] = 1.0
        kept.add(logits)  # the same step again: scored anew
        logits.fill_(9.0)
        row.tokens.append(token)
    lse = torch.tensor([1.0, 0, 0, 0, 0]).logsumexp(0).item()
    first, second, third = kept.places()
    assert first == TokenLogprobs(3, pytest.approx(-lse), ((0, pytest.approx(1 - lse)),))
    assert second == TokenLogprobs(0, pytest.approx(-lse), ((1, pytest.approx(1 - lse)),))
    assert third.token == 2 and third.logprob == pytest.approx(1 - lse)
    assert not any(isinstance(value, torch.Tensor) for value in vars(kept).values())
    row.end = 4
    assert kept.places() == [first, second]
    row.end = None
    del row.tokens[3:]  # a pass that was not completed
    assert kept.places() == [first]
    kept.add(torch.zeros(5))
    row.tokens.append(4)
    assert [place.token for place in kept.places()] == [3, 4] and kept.places()[1].logprob == pytest.approx(
        -math.log(5)
    )


def test_laws_give_the_raw_logits_of_every_step() -> None:
    row = Row(0, [5, 6], 2, 9)
    kept = Logprobs(row, V)
    laws = Laws(
        LogitsProcessorList([TemperatureLogitsWarper(0.5)]), History(torch.tensor([[5, 6]]), 9, 0, [row]), logprobs=kept
    )
    assert laws.keeps and not (laws.apart or laws.raw or laws.lockstep)
    first, again, second = torch.randn(3, 1, V, dtype=torch.float64)
    assert torch.equal(laws([row], first), first.float() / 0.5)
    laws.again(row, again)
    laws.of_drafts([row], [[3]], second)
    row.tokens.append(4)
    laws([row], second)
    row.tokens.append(3)
    for place, logits in zip(kept.places(), (again, second), strict=True):
        law = logits[0].log_softmax(-1)
        assert dict(place.top) == pytest.approx(dict(enumerate(law.tolist())), abs=1e-5)


@pytest.mark.parametrize("count", [-1, True, 2.0, "3"])
def test_invalid_counts_are_refused(count: Any) -> None:
    model = tiny("llama", torch.float32)
    with (
        truedraft.accelerate(model, draft=None).engine(max_rows=1, max_tokens=32) as engine,
        pytest.raises(truedraft.Refused, match="logprobs="),
    ):
        engine.add_request(prompts(1)[0], max_new_tokens=3, logprobs=count)


# ---------------------------------------------------------------- of prompts

READ = {"llama": "auto", "gpt2": "stock", "gemma2": "auto", "mixtral": "stock", "mamba2": "auto", "lfm2": "auto"}


@pytest.mark.parametrize("architecture", READ)
def test_log_probabilities_of_prompts_are_those_of_plain_forwards(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SCORED", 4 * V * 16)  # 16 positions of a piece, or one span
    model = tiny(architecture, torch.float32)
    texts = [torch.randint(6, V, (1, n), generator=torch.Generator().manual_seed(n)) for n in (2, 3, 41, 90, 17)]
    fast = truedraft.accelerate(model, draft="prompt-lookup", runtime=READ[architecture])
    with fast.engine(max_rows=3, max_tokens=120, prefix_bytes=1 << 20) as engine:
        requests = [engine.add_request(ids, max_new_tokens=6, do_sample=False, prompt_logprobs=4) for ids in texts * 2]
        others = [engine.add_request(ids, max_new_tokens=6, do_sample=False) for ids in texts]
        while engine.has_unfinished_requests():
            engine.step()
    for request, other, ids in zip(requests, [*others, *others], texts * 2, strict=True):
        found = request.prompt_logprobs
        assert found is not None and [place.token for place in found] == ids[0, 1:].tolist()
        for place, law in zip(found, plain(model, ids[:, :1], ids[0, 1:].tolist()), strict=True):
            assert place.logprob == pytest.approx(float(law[place.token]), abs=2e-4)
            assert [value for _, value in place.top] == pytest.approx(law.topk(4).values.tolist(), abs=2e-4)
            assert abs(place.rank - 1 - int((law > law[place.token]).sum())) <= 1  # of two that are nearly equal
        assert request.tokens == other.tokens and other.prompt_logprobs is None and request.cached_tokens == 0


def test_one_token_has_no_log_probabilities_and_a_prompt_that_is_read_has_some() -> None:
    with truedraft.accelerate(tiny("llama", torch.float32), draft=None).engine(max_rows=1, max_tokens=32) as engine:
        request = engine.add_request(torch.tensor([[7]]), max_new_tokens=1, prompt_logprobs=2)
        assert request.prompt_logprobs == []
        while engine.has_unfinished_requests():
            engine.step()
        assert request.prompt_logprobs == [] and len(request.tokens) == 1


def test_log_probabilities_of_prompts_that_have_none_are_refused() -> None:
    model = tiny("llama", torch.float32)
    with truedraft.accelerate(model, draft=None).engine(max_rows=1, max_tokens=32) as engine:
        for count in (-1, True, 2.5):
            with pytest.raises(truedraft.Refused, match="prompt_logprobs="):
                engine.add_request(prompts(1)[0], max_new_tokens=3, prompt_logprobs=count)  # type: ignore[arg-type]
        embeds: Any = model.get_input_embeddings()(prompts(1)[0])
        with pytest.raises(truedraft.Refused, match="embeddings"):
            engine.add_request(None, inputs_embeds=embeds, max_new_tokens=3, prompt_logprobs=1)  # type: ignore[arg-type]
    encoder_decoder = truedraft.accelerate(seq2seq_models.model(), draft=None)
    with (
        encoder_decoder.engine(max_rows=1, max_tokens=32) as engine,
        pytest.raises(truedraft.Refused, match="encoder"),
    ):
        engine.add_request(torch.tensor([[5, 6, 7]]), max_new_tokens=3, prompt_logprobs=1)
