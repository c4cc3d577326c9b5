"""S2D: drafts against models cut after each exit, run plainly over whole texts; and its loss against theirs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel

import truedraft
from models import V, sibling, tiny
from test_train import target, tokenizer
from test_views import COMPILED
from truedraft import Refused, registry
from truedraft.drafters.models import _nested_reader
from truedraft.drafters.models._nested_reader import ENOUGH, NestedReader
from truedraft.drafters.models.s2d import SortedLoss
from truedraft.runtime.segment_passes import CompiledSegments, ForwardSegments
from truedraft.train.batches import Reader

EXITS = (1, 3, 4)


def draft_model(architecture: str = "llama") -> PreTrainedModel:
    return sibling(tiny(architecture, torch.float32, layers=4))


def cut(model: Any, layers: int) -> Any:
    """A copy of a model with its first layers alone, and its own norm and output head."""
    made = copy.deepcopy(model)
    decoder = made.transformer if hasattr(made, "transformer") else made.model
    name = "h" if hasattr(decoder, "h") else "layers"
    setattr(decoder, name, getattr(decoder, name)[:layers])
    made.config.num_hidden_layers = layers
    if getattr(made.config, "layer_types", None):
        made.config.layer_types = made.config.layer_types[:layers]
    return made


class Checked:
    """Compares the logits of every drafted token with those of the cut model of its exit; counts tokens by exit.

    exit_of: (text, logits of the last tokens of the cut models) -> the exit at which the next one is drafted.
    """

    def __init__(self, model: PreTrainedModel, exit_of: Any, monkeypatch: pytest.MonkeyPatch):
        self.cut, self.exit_of = [cut(model, exit) for exit in EXITS], exit_of
        self.counts = [0] * len(EXITS)
        expand = NestedReader.expand

        def checked(reader: NestedReader, growing: Sequence[Any]) -> Tensor:
            logits = expand(reader, growing)
            for tree, found in zip(growing, logits, strict=True):
                (node,) = tree.frontier
                self.compare([*tree.row.tokens, *tree.path(node)], found)
            return logits

        monkeypatch.setattr(NestedReader, "expand", checked)

    @torch.no_grad()
    def compare(self, text: Sequence[int], found: Tensor) -> None:
        plain = [model(torch.tensor([text]), use_cache=False).logits[0, -1] for model in self.cut]
        exit = self.exit_of(text, plain)
        torch.testing.assert_close(found, plain[exit], rtol=2e-4, atol=2e-4)
        self.counts[exit] += 1

    def decode(self, target: Any, draft: Any) -> None:
        """Rows of different lengths that leave one by one."""
        fast = truedraft.accelerate(target, draft=draft, control="fixed")
        ids = torch.randint(1, 61, (3, 24), generator=torch.Generator().manual_seed(2))
        mask = torch.tensor([[1] * 24, [0] * 23 + [1], [0] * 2 + [1] * 22])
        given: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=14, do_sample=False, eos_token_id=20)
        expected = target.generate(ids, pad_token_id=0, **given)
        assert torch.equal(fast.generate(ids, pad_token_id=0, **given), expected)
        assert min(self.counts) > 1


@pytest.mark.parametrize(
    ("architecture", "passes"),
    [
        *(pytest.param(name, CompiledSegments, marks=COMPILED) for name in ("llama", "gemma3_text", "cohere")),
        *((name, ForwardSegments) for name in ("llama", "gemma3_text", "gpt2", "bloom", "cohere")),
    ],
)
def test_tokens_that_go_on_are_read_like_those_of_one_depth(
    architecture: str, passes: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the exits of the tokens before; here they change from token to token, and from row to row. Positions
    that are added to embeddings (GPT-2), and norms behind these (Bloom), have no compiled pass from hidden states."""
    if passes is ForwardSegments and architecture not in ("gpt2", "bloom"):
        monkeypatch.setattr(_nested_reader, "begins_anywhere", lambda program: False)
    target, model = tiny(architecture, torch.float32, layers=4), draft_model(architecture)

    def unsure(reader: NestedReader, exit: int, slots: Sequence[int], logits: Tensor) -> list[int]:
        return [slot for slot in slots if exit < exit_of(reader.written[slot])]

    def exit_of(text: Sequence[int], *_: Any) -> int:
        return (0, 0, 2, 1, 0, 2, 0, 1)[len(text) % 8]

    monkeypatch.setattr(NestedReader, "_unsure", unsure)
    draft: Any = registry.load("drafters", "s2d", model=model, exits="1x3x4", confidence=0.0, length=5)
    Checked(model, exit_of, monkeypatch).decode(target, draft)
    assert type(draft.reader._passes) is passes


def test_a_token_is_drafted_at_the_first_exit_that_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model = tiny("gpt2", torch.float32, layers=4)
    thresholds = (0.055, 0.04, 0.0)

    def exit_of(text: Sequence[int], plain: Sequence[Tensor]) -> int:
        sure = [bool(logits.softmax(-1).max() >= least) for logits, least in zip(plain, thresholds, strict=True)]
        return sure.index(True)

    draft = registry.load(
        "drafters", "s2d", model=model, exits="1x3x4", thresholds="0.055x0.04", confidence=0.0, length=5
    )  # fmt: skip
    Checked(model, exit_of, monkeypatch).decode(target, draft)


def test_tokens_that_were_accepted_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that drafts for itself is always right: a layer reads every token once at most."""
    model = draft_model()
    read = [0] * len(EXITS)
    go_on = NestedReader._go_on

    def counted(self: NestedReader, exit: int, chains: Sequence[Sequence[int]]) -> Tensor:
        read[exit] += sum(map(len, chains))
        return go_on(self, exit, chains)

    monkeypatch.setattr(NestedReader, "_go_on", counted)
    draft = registry.load(
        "drafters", "s2d", model=model, exits="1x3x4", thresholds="1.0", confidence=0.0, length=4
    )  # fmt: skip
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    ids = torch.tensor([[5, 6, 7, 8]])
    out = fast.generate(ids, max_new_tokens=21, do_sample=False, eos_token_id=None)
    assert len(fast.report().passes) == 5  # the prompt's, and four of five tokens each
    assert len({*read}) == 1 and out.shape[1] - 2 <= read[0] + 1 <= out.shape[1]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_the_loss_is_the_sum_of_those_of_the_cut_models(architecture: str) -> None:
    model = deepcopy(draft_model(architecture)).requires_grad_()  # training by another test may have frozen it
    ids = torch.randint(1, 61, (3, 15), generator=torch.Generator().manual_seed(1))
    counted = torch.rand(3, 15, generator=torch.Generator().manual_seed(2)) < 0.5
    found = SortedLoss(model, EXITS)(ids, counted)
    found.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    expected = torch.zeros(())
    for exit in EXITS:
        other = cut(model, exit)
        logits = other(ids, use_cache=False).logits[:, :-1][counted[:, 1:]]
        expected = expected + cross_entropy(logits, ids[:, 1:][counted[:, 1:]])
        if exit == EXITS[-1]:
            expected.backward()
            last = {name: weight.grad for name, weight in other.named_parameters()}
    torch.testing.assert_close(found, expected)
    assert gradients.keys() >= last.keys()
    deepest = [name for name in gradients if ".3." in name]  # layers that the last exit alone reads
    assert deepest
    for name in deepest:
        torch.testing.assert_close(gradients[name], last[name])


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_training_sorts_a_fresh_model_and_keeps_its_exits(loss: str, tmp_path: Path) -> None:
    """The losses of all exits against plain forwards of cut models, and of the target; what is saved has the exits."""
    model = target()
    learner = registry.method("drafters", "s2d").learner(exits="1x3x4", layers=4, width=16, loss_name=loss)
    learner.tokenizer = tokenizer()
    learner.begin(model)
    learner.prepare(torch.ones(V))
    lines = [([3, 1, 4, 1, 5], [9, 2, 6]), ([7, 2], [5, 3, 5, 8])]
    found = learner.loss(Reader(model, learner.needs.hidden)(lines))
    expected = torch.zeros(())
    for exit in EXITS:
        losses = []
        for prompt, response in lines:
            ids = torch.tensor([prompt + response])
            at = slice(len(prompt) - 1, -1)
            q = cut(learner.module, exit)(ids, use_cache=False).logits[0, at].log_softmax(-1)
            p = model(ids).logits[0, at].softmax(-1)
            losses += (
                [kl_div(q, p, reduction="none").sum(-1)] if loss == "kl" else [-q.gather(1, ids[0, -len(q) :, None])]
            )
        expected = expected + torch.cat([one.flatten() for one in losses]).mean()
    torch.testing.assert_close(found, expected)
    learner.save(tmp_path, model)
    draft: Any = registry.load("drafters", "s2d", model=str(tmp_path))
    assert tuple(one.layers for one in draft.reader.exits) == EXITS


def test_exits_that_do_not_pay_are_dropped() -> None:
    """One at which no token leaves, and not one at which all do; the tokens after it are read as before."""
    reader = NestedReader(draft_model(), [])
    draft: Any = registry.load("drafters", "s2d", model=draft_model(), exits="1x3x4", thresholds="0.9x0.1")
    reader, (first, second, last) = draft.reader, draft.reader.exits
    reader.overhead = 1.0
    first.seconds, second.seconds, last.seconds = 2.0, 2.0, 2.0
    first.reached = second.reached = ENOUGH
    first.left, second.left = 1, ENOUGH
    reader.drop_exits()
    assert reader.exits == [second, last]
    assert second.seconds == pytest.approx(3.0)  # both its layers and those before, and one output head
    target = tiny("llama", torch.float32, layers=4)
    fast = truedraft.accelerate(target, draft=draft, control="fixed")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = target.generate(ids, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), expected)
    draft.forget()
    assert [one.layers for one in draft.reader.exits] == list(EXITS)


def test_exits_that_the_model_lacks_are_refused() -> None:
    model = draft_model()
    with pytest.raises(Refused, match="s2d:exits=2x5: the draft model has 4 layers"):
        registry.load("drafters", "s2d", model=model, exits="2x5")
    with pytest.raises(Refused, match="there are 3 exits: give 2 probabilities, or one for all"):
        registry.load("drafters", "s2d", model=model, exits="1x2x3", thresholds="0.5x0.5x0.5")
    with pytest.raises(Refused, match="exits"):
        registry.load("drafters", "s2d", model=model, exits="3x2")
    with pytest.raises(Refused, match="keeps states of all its layers"):
        registry.load("drafters", "s2d", model=tiny("qwen3_5_text", torch.float32))
    assert [one.layers for one in registry.load("drafters", "s2d", model=model).reader.exits] == [2, 3, 4]
