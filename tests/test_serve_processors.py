"""What a request of the server does to its tokens: penalties and biases, against formulas applied by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper

import truedraft
from models import V, ragged, tiny
from nets import drafter, generated
from truedraft import RowwiseProcessor
from truedraft.chance import PositionNoise
from truedraft.sampling import History, Laws
from truedraft.serve.processors import OutputPenalties
from truedraft.tree import Row

STEPS, SEED = 30, 11


def penalised(scores: Tensor, output: list[int], frequency: float, presence: float) -> Tensor:
    """(V,) scores by the formula of the API reference, in fp64."""
    counts = [output.count(token) for token in range(len(scores))]
    return scores.double() - torch.tensor([frequency * n + presence * (n > 0) for n in counts], dtype=torch.float64)


def decoded(prompt: Tensor, process: Callable[[Tensor, list[int]], Tensor], sampled: bool) -> list[int]:
    """Plain decoding of one prompt by forwards without a cache; `process`: (raw scores, output) -> scores."""
    model, output = tiny("llama", torch.float32), list[int]()
    noise = PositionNoise([(SEED, 0)])
    while len(output) < STEPS:
        ids = torch.cat([prompt, torch.tensor([output], dtype=torch.long)], 1)
        with torch.no_grad():
            scores = process(model(ids, use_cache=False).logits[0, -1], output).float()
        row = Row(0, ids[0].tolist(), prompt.shape[1], STEPS)
        output.append(noise.pick((scores / 0.8).softmax(-1)[None], [row])[0] if sampled else int(scores.argmax()))
    return output


def prompts() -> list[Tensor]:
    inputs = ragged(tiny("llama", torch.float32), 3)
    return [ids[mask.bool()][None] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


def texts(draft: str, sampled: bool, settings: Callable[[int], dict[str, Any]]) -> list[list[int]]:
    """The outputs for all prompts, in one engine. settings: length of the prompt -> arguments."""
    model = tiny("llama", torch.float32)
    fast = truedraft.accelerate(model, draft=drafter(draft, model), control="fixed")
    own: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sampled else {"do_sample": False}
    with fast.engine(max_rows=3, max_tokens=96) as engine:
        requests = [
            engine.add_request(prompt, max_new_tokens=STEPS, seed=SEED, **own, **settings(prompt.shape[1]))
            for prompt in prompts()
        ]
        while engine.has_unfinished_requests():
            engine.step()
    return [request.result() for request in requests]


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("draft", ["prompt-lookup", "token-recycling", "draft-model"])
@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (-0.4, 1.5)])
def test_penalties_are_those_of_the_api(frequency: float, presence: float, draft: str, sampled: bool) -> None:
    found = texts(draft, sampled, lambda prompt: {"logits_processor": [OutputPenalties(frequency, presence, prompt)]})
    for prompt, text in zip(prompts(), found, strict=True):
        assert text == decoded(prompt, lambda raw, output: penalised(raw, output, frequency, presence), sampled)


def test_penalties_change_texts_and_leave_out_the_prompt() -> None:
    plain = texts("plain", False, lambda prompt: {})
    assert plain != texts("plain", False, lambda prompt: {"logits_processor": [OutputPenalties(0.7, 0.0, prompt)]})
    raw, ids = torch.randn(2, V), torch.tensor([[5, 6, 5, 7, 7, 9], [5, 6, 5, 1, 2, 1]])
    before = raw.clone()
    scores = OutputPenalties(0.5, 0.25, 3)(ids, raw)  # type: ignore[arg-type]
    assert torch.equal(raw, before)
    for line, given, output in zip(scores, raw, ids[:, 3:].tolist(), strict=True):
        assert torch.allclose(line.double(), penalised(given, output, 0.5, 0.25), atol=1e-6, rtol=0)
        changed = (line != given).nonzero().flatten().tolist()
        assert changed == sorted(set(output))
    assert torch.equal(OutputPenalties(0.5, 0.25, 6)(ids, raw), raw)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_bias_of_many_tokens_is_added(sampled: bool) -> None:
    """`logit_bias` of the API is `sequence_bias` of `transformers` with sequences of one token."""
    bias = {(token,): float(b) for token, b in enumerate(torch.linspace(-3, 3, V).tolist()) if token % 3}
    added = torch.tensor([bias.get((token,), 0.0) for token in range(V)])
    found = texts("prompt-lookup", sampled, lambda prompt: {"sequence_bias": bias})
    for prompt, text in zip(prompts(), found, strict=True):
        assert text == decoded(prompt, lambda raw, output: raw + added, sampled)
    assert found != texts("prompt-lookup", sampled, lambda prompt: {})


class Halving(RowwiseProcessor):
    """A user's processor: halves the scores of tokens that the last one divides, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        divided = torch.arange(scores.shape[1]) % input_ids[:, -1:].clamp(min=1) == 0
        return torch.where(divided, scores / 2, scores)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["oracle", "draft-model", "token-recycling", "sampler"])
@pytest.mark.parametrize("rule", [None, "rejection", "block", "seeded"])
def test_a_rowwise_processor_of_a_user_does_not_put_rows_into_lockstep(name: str, rule: str | None) -> None:
    model = tiny("llama", torch.float32)
    inputs = ragged(model, 4)
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": rule is not None, "top_k": 0}
    plain = generated(model, inputs, **settings, logits_processor=lambda: [Halving()])
    draft = drafter(name, model, plain.text, (inputs["attention_mask"] == 0).sum(-1).tolist())
    if rule == "block" and draft is not None and draft.draws == "independent":
        pytest.skip("not drafts that the rule verifies")
    fast = truedraft.accelerate(model, draft=draft, control="fixed", rule=rule)
    torch.manual_seed(5)
    text = fast.generate(**inputs, **settings, logits_processor=[Halving()])
    assert not any("one token" in note or "together" in note for note in fast.report().notes)
    if rule in (None, "seeded"):
        assert torch.equal(text, plain.text)
    assert text.shape == plain.text.shape


def test_laws_of_rowwise_processors() -> None:
    """At the prefix of each row and of each draft, alone and among processors of every other kind."""

    class Summing(TemperatureLogitsWarper):
        """Unknown: it may look across rows."""

    rows = [Row(0, [5, 6, 4], 2, 5), Row(1, [7, 8, 9, 3], 3, 5)]
    history = History(torch.tensor([[0, 5, 6], [7, 8, 9]]), 5, 0, rows)
    raw = torch.randn(2, V)
    laws = Laws(LogitsProcessorList([Halving(), TemperatureLogitsWarper(0.5)]), history)
    assert not laws.lockstep and not laws.unknown_processors
    assert not (laws.pointwise or laws.apart or laws.raw or laws.drafts_pointwise)
    expected = Halving()(torch.tensor([[4], [3]]), raw) / 0.5
    assert torch.equal(laws(rows, raw), expected)
    of_drafts = laws.of_drafts(rows, [[9, 2], []], raw)
    assert torch.equal(of_drafts, Halving()(torch.tensor([[2], [3]]), raw) / 0.5)
    strange = Laws(LogitsProcessorList([Halving(), Summing(0.5)]), history)
    assert strange.lockstep and strange.unknown_processors == ["Summing"] and not strange.drafts_pointwise
    assert torch.equal(strange.of_drafts(rows, [[9, 2], []], raw), Halving()(torch.tensor([[2], [3]]), raw))
    assert Laws(LogitsProcessorList([Summing(0.5)]), history).drafts_pointwise


class Refusing(RowwiseProcessor):
    """Raises after the token 9."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if bool((input_ids[:, -1] == 9).any()):
            raise RuntimeError("never after 9")
        return scores + 1


def test_an_error_at_a_draft_concerns_the_target_alone() -> None:
    rows = [Row(0, [5, 6, 4], 2, 5), Row(1, [8, 9], 2, 5)]
    laws = Laws(LogitsProcessorList([Refusing()]), History(torch.tensor([[5, 6], [8, 9]]), 5, 0, rows))
    raw = torch.randn(3, V)
    assert torch.equal(laws.of_drafts([rows[0]] * 3, [[9], [], [9, 3]], raw), raw + torch.tensor([[0.0], [1.0], [1.0]]))
    assert torch.equal(laws.of_nodes(rows[0], [[3], [], [9, 3]], raw), raw + 1)
    with pytest.raises(RuntimeError, match="never after 9"):
        laws.of_nodes(rows[0], [[9], [], [9, 3]], raw)
    with pytest.raises(RuntimeError, match="never after 9"):
        laws(rows[1:], raw[:1])


def test_a_rowwise_processor_has_to_be_written() -> None:
    with pytest.raises(NotImplementedError):
        RowwiseProcessor()(torch.ones(1, 1), torch.ones(1, 3))  # type: ignore[arg-type]
