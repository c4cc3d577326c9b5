"""A view that is drafted for: the same drafts as by the view alone, in fewer passes under it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import truedraft
from drafters_for_tests import Noise
from models import V, ragged, sibling, tiny
from nets import PROCESSORS, generated, made, padding_of
from truedraft import Drafter, DraftTree, Refused, registry
from truedraft.drafters._base import PassCost, PerRow
from truedraft.drafters._compose import Fallback, Merge, Review, Route, compose, name_of
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.self_._below import Below
from truedraft.tree import Row

RULES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "seeded": {"do_sample": True, "top_k": 0}}
SKIPPING = "skip-layers:layers=1a,depth=8,nodes=8"


@dataclass
class Guess(PerRow[random.Random]):
    """Drafts a tree of tokens, of which so many in ten are those of the row's true text."""

    card = Noise.card
    answers: dict[int, list[int]] = field(default_factory=dict)
    right: int = 0
    confidence: float = 0.9

    width = 12

    def begin(self, row: Row) -> random.Random:
        return random.Random(row.index)

    def draft(self, row: Row, state: random.Random, after: Sequence[int], budget: int) -> DraftTree:
        text = self.answers.get(row.index, [])[len(row.tokens) + len(after) :]
        tokens, parent, at = [(after or row.tokens)[-1]], [-1], 0
        for token in [*text, *[1] * self.width][: self.width]:
            tokens += [(token + 7) % V, token if state.randrange(10) < self.right else (token + 9) % V]
            parent += [at, at]
            at = len(tokens) - 1
        confidence = (1.0, *[self.confidence] * (len(tokens) - 1))
        return DraftTree(tuple(tokens), tuple(parent), confidence=confidence).cut(1 + budget)


def inner(kind: str, model: Any, answers: dict[int, list[int]]) -> Drafter:
    if kind == "draft-model":
        return registry.load("drafters", kind, model=sibling(model))  # type: ignore[no-any-return]
    if kind.isdigit():
        return Guess(answers=answers, right=int(kind))
    return registry.load("drafters", kind)  # type: ignore[no-any-return]


def texts(plain: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[int, list[int]]:
    """The rows of an output without padding."""
    return {i: row[n:].tolist() for i, (row, n) in enumerate(zip(plain, padding_of(inputs), strict=True))}


def text_and_drafts(
    model: Any, draft: Any, inputs: dict[str, torch.Tensor], control: str = "fixed", **settings: Any
) -> Any:
    """The text, the drafts by row, and the number of passes under a view."""
    fast = truedraft.accelerate(model, draft=draft, control=control)
    drafts, passes = list[tuple[int, int, DraftTree]](), 0
    score, propose = fast.target.score, draft.propose

    def scored(trees: Any, *under: Any) -> Any:
        nonlocal passes
        passes += bool(under)
        return score(trees, *under)

    def proposed(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        found: list[DraftTree] = propose(rows, budget)
        drafts.extend((row.index, row.step, tree) for row, tree in zip(rows, found, strict=True))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast.target, "score", scored)
        patch.setattr(draft, "propose", proposed)
        torch.manual_seed(5)
        text = fast.generate(**inputs, **made(settings))
    return text, drafts, passes


def check_drafts(kind: str, view: str, processors: str, rule: str) -> None:
    """With the same confidences, whatever is drafted for it, right or wrong; in batches of different lengths."""
    model = tiny("llama", torch.float32, sharpen=1.5, layers=4)
    inputs, settings = ragged(model, 3), {"max_new_tokens": 20, **RULES[rule], **PROCESSORS[processors]}
    plain = generated(model, inputs, **settings).text
    answers = texts(plain, inputs)
    text, alone, passes = text_and_drafts(model, registry.load("drafters", view), inputs, **settings)
    assert torch.equal(text, plain)
    draft = Review([registry.load("drafters", view), inner(kind, model, answers)])
    text, drafts, fewer = text_and_drafts(model, draft, inputs, **settings)
    assert torch.equal(text, plain)
    for (*mine, tree), (*theirs, other) in zip(drafts, alone, strict=True):
        assert mine == theirs and tree.tokens == other.tokens and tree.parent == other.parent
        assert tree.confidence == pytest.approx(other.confidence, rel=1e-3)
    assert fewer <= passes if kind != "10" else fewer < passes


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("view", "processors", "rule"),
    [(SKIPPING, "none", "seeded"), ("window-kv:sinks=1,recent=5,depth=8,nodes=6", "penalties", "greedy")],
)
@pytest.mark.parametrize("kind", ["0", "5", "10", "token-recycling", "suffix", "draft-model"])
def test_drafts_are_those_of_the_view_alone(kind: str, view: str, processors: str, rule: str) -> None:
    check_drafts(kind, view, processors, rule)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["10", "draft-model"])
@pytest.mark.parametrize(
    "view",
    ["d3:layers=1a;2f;2a,alpha=0.9", "top-kv:entries=4,chunk=2,recent=3", "skip-layers:layers=1a+window-kv:recent=4"],
)
def test_the_text_is_that_of_model_generate_where_drafts_have_to_pay(view: str, kind: str) -> None:
    model = tiny("llama", torch.float32, sharpen=1.5, layers=4)
    inputs, settings = ragged(model, 3), {"max_new_tokens": 30, "do_sample": False}
    plain = generated(model, inputs, **settings).text
    answers = texts(plain, inputs)
    draft = Review([registry.load("drafters", view), inner(kind, model, answers)])
    for control in ("fixed", "cost"):
        assert torch.equal(text_and_drafts(model, draft, inputs, control, **settings)[0], plain)


def test_a_repeating_text_takes_fewer_passes_under_the_view() -> None:
    """The whole view is right, and so is what is drafted for it: a pass reads all that a draft may have."""
    model = tiny("llama", torch.float32)
    phrase = (3 + torch.randperm(50, generator=torch.Generator().manual_seed(1))[:9]).tolist()
    follows = dict(zip(phrase, phrase[1:] + phrase[:1], strict=True))
    settings: dict[str, Any] = dict(
        max_new_tokens=56, do_sample=False, prefix_allowed_tokens_fn=lambda batch, ids: [follows[int(ids[-1])]]
    )
    counts = {}
    for spec in ("window-kv:depth=10,nodes=10", "window-kv:depth=10,nodes=10<suffix"):
        inputs = {"input_ids": torch.tensor([phrase * 3])}
        text, drafts, counts[spec[27:]] = text_and_drafts(model, registry.load("drafters", spec), inputs, **settings)
        assert text[0].tolist() == (phrase * 10)[: 27 + 56]
        assert [tree.drafted for *_, tree in drafts] == [10] * 5
    assert counts == {"": 50, "<suffix": 5}


def test_a_draft_model_reads_each_token_of_a_draft_once() -> None:
    """The target itself as the draft model: one pass under the view per draft, and one of the draft model per token."""
    model = tiny("llama", torch.float32)
    draft = Review(
        [registry.load("drafters", "window-kv:depth=6,nodes=6"), registry.load("drafters", "draft-model", model=model)]
    )
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    small: Any = draft.parts[1]
    unread: list[int] = []
    drafted: list[int] = []
    fast.generate(**ragged(model, 1), max_new_tokens=2, do_sample=False)
    chains = small.reader.target.extend_greedily

    def counted(trees: Any, written: Any, wanted: Any) -> Any:
        unread.extend(len(tree) - known for tree, known in zip(trees, written, strict=True))
        found = chains(trees, written, wanted)
        drafted.extend(map(len, found))
        return found

    small.reader.target.extend_greedily = counted
    inputs = ragged(model, 2)
    text, drafts, under = text_and_drafts(model, draft, inputs, max_new_tokens=29, do_sample=False)
    assert torch.equal(text, generated(model, inputs, max_new_tokens=29, do_sample=False).text)
    assert under == len(drafts) / 2 == 4 and drafted == [5] * 8 and max(unread) <= 3


class Costs:
    """Nine tokens that are all right or all wrong, drafted for passes of a second, and what became of it."""

    def __init__(self, right: bool, seconds: float, monkeypatch: pytest.MonkeyPatch, tokens: int = 9):
        self.now, self.seconds, self.calls, self.drafted = 0.0, seconds, 0, 0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.below = Below(self)  # type: ignore[arg-type]
        self.below.cost = PassCost(1.0, 0.02)
        self.row = Row(0, [5, 6], 2, 100)
        for _ in range(400):
            tree = GrowingTree(self.row, [6], 0, 20, 20)
            (draft,) = self.below.drafts([self.row], [tree], [tokens])
            self.drafted += len(draft) - 1
            self.below.reviewed([draft], [len(draft) - 1 if right else 0])

    prior_confidence, autoregressive, reads_texts = 0.7, False, False

    def extend_each(self, rows: Any, after: Any, budget: Sequence[int]) -> list[DraftTree]:
        assert list(after) == [[]]
        self.calls += 1
        self.now += self.seconds * (budget[0] if self.autoregressive else 1)
        return [DraftTree.chain(6, [7] * budget[0])]


class ModelCosts(Costs):
    autoregressive = True


def test_what_is_right_is_drafted_for_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Costs(True, 0.1, monkeypatch)
    assert found.calls == 400 and found.drafted > 8 * 400


@pytest.mark.parametrize(("kind", "seconds"), [(Costs, 0.05), (ModelCosts, 0.3)])
def test_what_is_never_right_costs_little(kind: type[Costs], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a thirtieth of the passes' time, and hardly a token is read."""
    found = kind(False, seconds, monkeypatch)
    assert 3 < found.calls < 100 and found.now + 0.02 * found.drafted < 400 / 30


def test_a_draft_model_drafts_as_long_as_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its passes takes as long as one under the view: it never pays; half as long: what is right does."""
    assert ModelCosts(True, 1.1, monkeypatch).calls < 50
    found = ModelCosts(True, 0.5, monkeypatch)
    assert found.calls == 400 and found.drafted > 8 * 350


def test_precedence() -> None:
    """`<` binds closest, and views that are joined by `+` are one."""
    made = compose("skip-layers:layers=1+window-kv<suffix:alpha=2.0+token-recycling|sam?int8-self<sam", load)
    assert isinstance(made, Route)
    merge, fallback = made.parts
    assert isinstance(merge, Merge) and isinstance(fallback, Fallback)
    review, other = merge.parts
    assert isinstance(review, Review) and name_of(other) == "token-recycling"
    assert merge.name == "skip-layers+window-kv<suffix+token-recycling"


def test_it_is_called_as_the_view_alone() -> None:
    """Whatever stands behind the sign, a model too."""
    view, draft = load("window-kv"), Review([load("window-kv"), load("draft-model:nano-draft")])
    for name in ("prior_confidence", "autoregressive", "adaptive", "draws"):
        assert getattr(draft, name) == getattr(view, name)


def load(part: str) -> Drafter:
    return registry.load("drafters", part)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("suffix<suffix", "suffix is no view, and reviews no drafts"),
        ("window-kv<eagle", "cannot continue the drafts of a view: put a lookup or draft-model after the '<'"),
        ("window-kv<int8-self", "int8-self cannot continue the drafts of a view"),
        ("window-kv<none", "plain cannot continue the drafts of a view"),
        ("window-kv<auto", "cannot continue the drafts of a view"),
        ("window-kv<int8-self<suffix", "'<' stands between a view and one drafter, got window-kv<int8-self<suffix"),
        ("window-kv:top_k=2<suffix", "window-kv drafts a chain of its likeliest tokens .* leave out top_k and drawn"),
        ("window-kv:drawn=True<suffix", "leave out top_k and drawn"),
        ("window-kv<", "there is no drafter on one side of '<'"),
        ("window-kv<suffix+int8-self", "views that draft together stand together before the '<'"),
        ("suffix>window-kv<suffix", "window-kv<suffix cannot continue another's draft"),
        ("window-kv<draft-model", "draft-model needs a draft model"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(tiny(), draft=spec)
