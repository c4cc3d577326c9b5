"""Any-subset models: the text of one masked position after another, against loops written here and enumeration."""

from __future__ import annotations

import copy
import inspect
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import XLNetConfig, XLNetForTokenClassification, XLNetLMHeadModel

import truedraft
from test_contributing import clear_registry, install
from truedraft import registry
from truedraft.canvas.noise import CanvasNoise
from truedraft.canvas.subset import AcceleratedSubset, SubsetTarget, ranks_of
from truedraft.canvas.subsets.assd import Assd
from truedraft.errors import Refused
from vocabularies import tokenized

MASK, END = 6, 3
DRAFTERS = [*registry.names("canvas.subsets"), *registry.presets("canvas.subsets")]


def sizes_of(drafter: str) -> list[str]:
    """Specs of a drafter for drafts of several sizes, where it has `k`."""
    knobs = inspect.signature(type(registry.load("canvas.subsets", drafter))).parameters
    return [f"{drafter}:k={k}" for k in range(1, 7)] if "k" in knobs else [drafter]


def model_of(vocabulary: int = 17, scale: float = 15, mask: int | None = MASK, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=vocabulary, d_model=32, n_layer=2, n_head=4, d_inner=48, eos_token_id=END, pad_token_id=0)
    model = XLNetLMHeadModel(XLNetConfig(**sizes | changes)).eval()
    model.config.mask_token_id = mask
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(scale if weight.ndim > 1 and "seg" not in name else 1)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@torch.no_grad()
def conditional(model: Any, canvas: list[int], given: set[int], filled: list[int], position: int) -> torch.Tensor:
    """(V,) logits at a position by a forward of its own: given tokens see each other, filled ones those before them.

    filled: positions in the order in which they were filled.
    """
    length = len(canvas)
    hidden = torch.ones(1, length, length)
    for i in range(length):
        earlier = filled[: filled.index(i)] if i in filled else filled if i == position else []
        for j in [*given, *earlier]:
            hidden[0, i, j] = 0
    target = torch.zeros(1, 1, length)
    target[0, 0, position] = 1
    logits = model(torch.tensor([canvas]), perm_mask=hidden, target_mapping=target).logits[0, 0].float()
    logits[model.config.mask_token_id] = -torch.inf
    return logits


def by_hand(
    model: Any, prompt: list[int], new: int, seed: int | None = None, row: int = 0, temperature: float = 1.0
) -> tuple[list[int], int]:
    """The text up to the end token among the new ones, and how many tokens were filled in."""
    mask = model.config.mask_token_id
    canvas = [*prompt, *[mask] * new]
    given, filled = {i for i, token in enumerate(canvas) if token != mask}, list[int]()
    for position in [i for i, token in enumerate(canvas) if token == mask]:
        scores = torch.log_softmax(conditional(model, canvas, given, filled, position) / temperature, -1)
        if seed is not None:
            scores = scores - CanvasNoise(seed).at(row, [position], 0, len(scores))[0].log()
        canvas[position] = int(scores.argmax())
        filled.append(position)
        if position >= len(prompt) and canvas[position] == END:
            return canvas[: position + 1], len(filled)
    return canvas, len(filled)


def prompt_of(draw: random.Random, vocabulary: int = 17) -> list[int]:
    """Masks at random places, beside one token at least."""
    length, share = draw.randint(1, 12), draw.random()
    words = [token for token in range(vocabulary) if token != MASK]
    prompt = [MASK if draw.random() < share else draw.choice(words) for _ in range(length)]
    prompt[draw.randrange(length)] = draw.choice(words)
    return prompt


@pytest.mark.parametrize("spec", [spec for drafter in DRAFTERS for spec in sizes_of(drafter)])
def test_the_text_is_that_of_one_position_per_call(model: Any, spec: str) -> None:
    draw, calls = random.Random(spec), list[int]()
    fast: Any = tokenized(model, draft=spec)
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    for seed in range(12):
        prompt, new = prompt_of(draw), draw.randint(0, 8)
        sampled = dict(do_sample=True, temperature=0.7, seed=seed) if seed % 3 else {}
        expected, filled = by_hand(model, prompt, new, *((seed, 0, 0.7) if sampled else ()))
        calls.clear()
        found = fast.generate(torch.tensor([prompt]), max_new_tokens=new, **sampled)
        assert found.tolist() == [expected]
        report = fast.report()
        assert len(calls) == len(report.passes) <= filled == report.tokens
        assert all(one.emitted[0].offered <= getattr(fast.method, "k", filled) for one in report.passes)
    hook.remove()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_accepted(drafter: str) -> None:
    """Where positions depend little on each other, or tokens repeat, most passes fix several."""
    model = model_of(scale=1)
    fast: Any = truedraft.accelerate(model, draft=drafter)
    prompt = [1, 2, *[MASK] * 12, 1, 2]
    expected, filled = by_hand(model, prompt, 4)
    assert fast.generate(torch.tensor([prompt]), max_new_tokens=4).tolist() == [expected]
    assert filled == fast.report().tokens > 11 and len(fast.report().passes) <= filled / 2


def test_rows_of_a_batch_have_the_texts_that_they_have_alone(model: Any) -> None:
    prompts = [[1, MASK, 4, MASK, 9], [7, MASK, 8]]
    ids = torch.tensor([prompts[0], [0, 0, *prompts[1]]])
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    fast: Any = truedraft.accelerate(model)
    out = fast.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=True, seed=4, num_return_sequences=2)
    for i, line in enumerate(out.tolist()):
        text, pads = by_hand(model, prompts[i // 2], 6, 4, i)[0], 2 * (i // 2)
        assert line[pads:] == text + [0] * (len(line) - pads - len(text))


def test_without_drafts_each_pass_fixes_one(model: Any) -> None:
    fast: Any = truedraft.accelerate(model, draft=None)
    prompt = [4, MASK, MASK, 5]
    expected, filled = by_hand(model, prompt, 5)
    assert fast.generate(torch.tensor([prompt]), max_new_tokens=5).tolist() == [expected]
    assert len(fast.report().passes) == filled and fast.report().drafter == "none"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_samples_have_the_law_of_the_conditionals(drafter: str) -> None:
    """300 samples of 3 masks over 4 tokens; a true law is rejected with probability 1e-4."""
    model = model_of(5, scale=15, mask=4, eos_token_id=None)
    prompt, places, samples = [1, 4, 0, 4, 4, 2], [1, 3, 4], 300
    laws = dict[tuple[int, ...], float]()
    for text in product(range(4), repeat=3):
        canvas, chance = list(prompt), 1.0
        for i, (place, token) in enumerate(zip(places, text, strict=True)):
            logits = conditional(model, canvas, {0, 2, 5}, places[:i], place)
            chance *= float(torch.softmax(logits, -1)[token])
            canvas[place] = token
        laws[text] = chance
    assert abs(sum(laws.values()) - 1) < 1e-5
    fast: Any = truedraft.accelerate(model, draft=drafter)
    settings = dict(max_new_tokens=0, do_sample=True, seed=1, num_return_sequences=samples)
    found = fast.generate(torch.tensor([prompt]), **settings)[:, places].tolist()
    counts = np.array([found.count(list(text)) for text in laws])
    expected = samples * np.array(list(laws.values()))
    rare = expected < 5
    assert (~rare).sum() > 8
    pairs = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    observed, wanted = pairs if pairs[1][-1] > 5 else [np.append(p[:-2], p[-2:].sum()) for p in pairs]
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


@torch.no_grad()
def test_no_query_reads_a_mask_behind_the_draft(model: Any) -> None:
    target, known = SubsetTarget(model, MASK), [True, False, False, False, True, False]
    texts = [[1, MASK, token, token, 2, token] for token in (MASK, 9)]
    first, second = (target.score(text, [0, 1, 2, 3, 0, 4], [8], [1, 2, 3, 5]) for text in texts)
    assert torch.equal(first, second) and ranks_of(known) == [0, 1, 2, 3, 0, 4]


def test_a_draft_that_reads_too_little_is_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: queries of a draft do not read what is drafted before them."""
    score = SubsetTarget.score
    monkeypatch.setattr(
        SubsetTarget, "score", lambda self, tokens, ranks, draft, queries: score(self, tokens, ranks, [], queries)
    )
    with pytest.raises(Refused, match="a pass over a draft differs"):
        truedraft.accelerate(model)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rule": "left-to-right"}, "rule='left-to-right' is not for XLNet"),
        ({"view": "lossy/dual-cache"}, "view='lossy/dual-cache' is not for XLNet"),
        ({"layout": 3}, "layout=3 is not for XLNet"),
        ({"control": "gamma"}, "control='gamma'"),
        ({"strict": True}, "strict=True"),
        ({"draft": "freedave"}, "there is no drafter of any-subset models 'freedave'"),
        ({"draft": 3}, "draft=3: give the name of a drafter of any-subset models"),
        ({"draft": "assd:k=0"}, "assd:k=0: give a whole number, 1 to 64"),
        ({"draft": "assd:drafter=trigram"}, "give one of marginals, bigram"),
        ({"draft": "assd:size=3"}, "assd has no knob 'size'"),
    ],
)
def test_arguments_that_are_refused(model: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as caught:
        truedraft.accelerate(model, **given)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"stop_strings": ["a"]}, "stop_strings=['a'] is not supported"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_token": 3}, "max_new_token=3"),
        ({"block_length": 4}, "block_length=4 is not supported"),
        ({"steps": 4}, "steps=4 is not supported"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"input_ids": torch.tensor([[1, 2], [MASK, MASK]])}, "row 1 has nothing but masks"),
        ({"input_ids": torch.tensor([[1, 99]])}, "outside the model's vocabulary"),
        ({"streamer": object()}, "streamer"),
    ],
)
def test_calls_that_are_refused(model: Any, given: dict[str, Any], why: str) -> None:
    fast: Any = truedraft.accelerate(model)
    with pytest.raises(Refused) as caught:
        fast.generate(**{"input_ids": torch.tensor([[1, MASK, 2]]), **given})
    assert why in str(caught.value)


def test_models_that_are_refused(model: Any) -> None:
    other: Any = XLNetForTokenClassification(model.config).eval()
    for given, why in (
        (other, "is no any-subset model"),
        (model_of(mask=None), "no mask token"),
        (model_of(mask=40), "outside its vocabulary"),
        (model_of().train(), "training mode"),
        (model_of(attn_type="uni"), "reads earlier positions only"),
    ):
        with pytest.raises(Refused, match=why):
            AcceleratedSubset(given)


FOREIGN = """
from dataclasses import dataclass

from truedraft.canvas.subsets._base import SubsetDrafter
from truedraft.card import Card, knob
from vocabularies import tokenized
from vocabularies import tokenized


@dataclass
class Repeating(SubsetDrafter):
    card = Card(paper="none", idea="Repeat one token.", family="chain")
    token: int = knob(1, 0, 16)  # that is drafted

    def draft(self, canvas, masks, chosen):
        return [self.token] * (len(masks) + 2)
"""


def test_a_drafter_of_another_package(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts by its name, also more tokens than there are masks."""
    (tmp_path / "repeating.py").write_text(FOREIGN)
    install(tmp_path, monkeypatch, "truedraft.canvas.subsets", "repeating = repeating:Repeating")
    prompt = [1, MASK, MASK, 4, MASK]
    expected, filled = by_hand(model, prompt, 3)
    fast: Any = truedraft.accelerate(model, draft=f"repeating:token={expected[1]}")
    monkeypatch.undo()
    clear_registry()
    assert fast.generate(torch.tensor([prompt]), max_new_tokens=3).tolist() == [expected]
    report = fast.report()
    assert report.drafter == "repeating" and report.passes[0].emitted[0].offered == 6
    assert len(report.passes) < filled == report.tokens


def test_the_proxy(model: Any) -> None:
    fast: Any = truedraft.accelerate(model, draft=Assd(k=2))
    with pytest.raises(Refused, match="nothing to report"):
        fast.report()
    copied: Any = copy.deepcopy(fast)
    assert type(copied) is AcceleratedSubset and copied.model is not model and copied.method.k == 2
    assert "drafter assd" in repr(fast) and fast.config is model.config
    streamed = list[int]()

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            streamed.extend(value.tolist())

        def end(self) -> None:
            streamed.append(-1)

    out = fast.generate(torch.tensor([[1, 2]]), max_new_tokens=6, streamer=Streamer())
    assert streamed == [*out[0].tolist(), -1]
