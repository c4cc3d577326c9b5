"""EESD: drafts against the target's first layers and the trained layer run plainly over whole texts, and its bandit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import truedraft
from models import tiny
from test_heads import learner_of, plain_attention, rounded_forward
from test_views import COMPILED, begun, target_of
from truedraft import DraftTree, Refused, registry
from truedraft.drafters._learned import Batch, save_learnt
from truedraft.drafters.heads._exits import ExitReader, FirstLayers
from truedraft.drafters.heads.eesd import Bandit, EesdHead, Training
from truedraft.runtime import linears
from truedraft.runtime.heads import TorchHeadPass
from truedraft.tree import Taps
from truedraft.views.early_exit import EarlyExit

LAYERS, EXIT = 4, 2
RUNTIMES = [pytest.param("auto", marks=COMPILED), "stock", "graphs"]


def target() -> PreTrainedModel:
    return tiny(dtype=torch.float32, layers=LAYERS)


def trained(model: PreTrainedModel, exit: int = EXIT, **knobs: Any) -> EesdHead:
    return learner_of("eesd", model, exit=exit, **knobs).module.eval()


@torch.no_grad()
def plain_logits(model: PreTrainedModel, head: EesdHead, tokens: Sequence[int], exit: int = EXIT) -> Tensor:
    """(len(tokens), draft vocabulary) by a forward of the model over the text, and one of the head."""
    exits = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[exit]
    rotary = head.rotary(exits, torch.arange(len(tokens))[None])
    return head.logits(head(exits, exits, rotary, [plain_attention]))[0]


def check_drafts(passes: str = "compiled", runtime: str = "auto", **knobs: Any) -> None:
    """At every node that is expanded, in batches of rows of different lengths that leave one by one."""
    model, compared = target(), 0
    head = trained(model)
    forward = rounded_forward if passes == "int8" else torch.nn.Linear.forward
    if passes == "torch":
        head.runner = TorchHeadPass(head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "SMALLEST", 1)
        expand = ExitReader.expand

        def checked(self: ExitReader, growing: Sequence[Any]) -> Tensor:
            nonlocal compared
            logits, at = expand(self, growing), 0
            for tree in growing:
                for node in tree.frontier:
                    tokens = [*tree.row.tokens, *tree.path(node)]
                    with pytest.MonkeyPatch.context() as rounded:
                        for layer in (m for m in head.modules() if isinstance(m, torch.nn.Linear)):
                            rounded.setattr(layer, "forward", lambda x, layer=layer: forward(layer, x))
                        plain = plain_logits(model, head, tokens)[-1]
                    torch.testing.assert_close(logits[at], plain, rtol=2e-4, atol=2e-4)
                    at, compared = at + 1, compared + 1
            assert at == len(logits)
            return logits

        patch.setattr(ExitReader, "expand", checked)
        draft = registry.load(
            "drafters", "eesd", model=head, depth=5, quantize="int8" if passes == "int8" else "none", **knobs
        )
        fast = truedraft.accelerate(model, draft=draft, control="fixed", runtime=runtime)
        ids = torch.randint(1, 61, (3, 24), generator=torch.Generator().manual_seed(2))
        mask = torch.tensor([[1] * 24, [0] * 19 + [1] * 5, [0] * 2 + [1] * 22])
        given: dict[str, Any] = dict(max_new_tokens=10, do_sample=False, eos_token_id=20, pad_token_id=0)
        expected = model.generate(ids, attention_mask=mask, **given)
        assert torch.equal(fast.generate(ids, attention_mask=mask, **given), expected)
    assert compared > 30
    assert draft.reader.name == ("torch" if passes == "torch" else "compiled pass")


@COMPILED
@pytest.mark.parametrize("passes", ["compiled", "int8", "torch"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_drafts_are_those_of_the_plain_layers(passes: str, top_k: int) -> None:
    check_drafts(passes, top_k=top_k)


@COMPILED
def test_drafts_beside_the_models_own_forward() -> None:
    check_drafts(runtime="stock", top_k=2)


def test_training_computes_what_drafts_do() -> None:
    """At every pair and step: the logits after the text up to there, of drafts that are right so far."""
    model = target()
    learner = learner_of("eesd", model, exit=EXIT, vocabulary=20)
    learner.prepare(torch.arange(61))
    texts = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(texts, output_hidden_states=True).hidden_states
    ones = torch.ones_like(texts, dtype=torch.bool)
    batch = Batch(texts, ones, ones, {EXIT: states[EXIT], -1: states[-1]})
    for step, (_, logits, *_) in enumerate(learner._unrolled(batch, 3)):
        for row, text in enumerate(texts.tolist()):
            plain = plain_logits(model, learner.module, text)
            torch.testing.assert_close(logits[row, : 11 - step], plain[1 + step :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("runtime", RUNTIMES)
@torch.no_grad()
def test_a_pass_without_the_output_head(runtime: str) -> None:
    """Its hidden states are those with it, and it leaves no trace."""
    made = begun(target_of(target(), runtime), [[3, 1, 4], [1, 5]])
    trees, taps = [DraftTree.chain(9, [2, 6]), DraftTree.chain(5)], Taps((EXIT,))
    found, whole = (made.score(trees, kind(EXIT).tapping(taps)) for kind in (FirstLayers, EarlyExit))
    assert found.logits.shape[:2] == (2, 0) or found.logits.shape == (2, 3, 0)
    assert whole.logits.shape == (2, 3, 61)
    for one, other in zip(found.hidden[EXIT], whole.hidden[EXIT], strict=True):
        assert torch.equal(one, other)
    made.rewind()
    again = begun(target_of(target(), runtime), [[3, 1, 4], [1, 5]])
    assert torch.equal(made.score(trees).logits, again.score(trees).logits)
    head, rest = made.model.get_output_embeddings().weight.numel(), sum(p.numel() for p in made.model.parameters())
    rest -= made.model.get_input_embeddings().weight.numel()
    assert made.share(EarlyExit(EXIT)) - made.share(FirstLayers(EXIT)) == pytest.approx(head / rest)
    made.cache = again.cache = None


def test_tokens_are_drafted_while_drawn_rates_say_so() -> None:
    def mean(bandit: Bandit) -> float:
        return sum(bandit.continues() for _ in range(2000)) / 2000

    bandit = Bandit()
    assert mean(bandit) == pytest.approx(0.5, abs=0.05)
    bandit.update(7, 1)
    assert mean(bandit) == pytest.approx(8 / 10, abs=0.05)
    bandit.update(0, 30)
    assert mean(bandit) == pytest.approx(8 / 40, abs=0.05)


def test_a_rows_bandit_counts_its_drafts() -> None:
    model = target()
    draft = registry.load("drafters", "eesd-published", model=trained(model))
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    seen: list[tuple[float, float]] = []
    observe = draft.observe

    def noted(rows: Any, trees: Sequence[DraftTree], scores: Any, accepted: Sequence[Any]) -> None:
        observe(rows, trees, scores, accepted)
        for row, tree, one in zip(rows, trees, accepted, strict=True):
            if id(row) in draft._bandits:
                bandit, right = draft._bandits[id(row)], len(one.path) - 1
                seen.append((bandit.accepted + bandit.rejected, float(len(tree) - 1)))
                assert 0 <= right <= len(tree) - 1

    draft.observe = noted
    ids = torch.tensor([[5, 6, 7, 8]])
    out = fast.generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=30, do_sample=False))
    totals = [total for total, _ in seen]
    assert [b - a for a, b in pairwise(totals)] == [count for _, count in seen[1:]]
    assert len({count for _, count in seen}) > 1 and not draft._bandits


@pytest.mark.parametrize("architecture", ["lfm2", "gemma3n_text"])
def test_targets_that_cannot_exit_are_refused(architecture: str) -> None:
    model = tiny(architecture, torch.float32)
    with pytest.raises(Refused, match=r"cannot run under eesd|cannot be skipped"):
        truedraft.accelerate(model, draft=registry.load("drafters", "eesd", model=trained(model, exit=1)))


def test_exits_beyond_the_decoder_are_refused() -> None:
    model = target()
    with pytest.raises(Refused, match="eesd:exit=4: the decoder has 4 layers, leave out at least one"):
        Training(exit=4).begin(model)
    other = tiny(dtype=torch.float32, layers=2)
    draft = registry.load("drafters", "eesd", model=trained(model, exit=3))
    with pytest.raises(Refused, match="eesd:exit=3: the decoder has 2 layers"):
        truedraft.accelerate(other, draft=draft)


def test_a_checkpoint_is_of_one_model(tmp_path: Path) -> None:
    """It gives the drafts of the head that was saved, and is refused for a target of other sizes."""
    model, drafts = target(), list[list[tuple[int, ...]]]()
    learner = learner_of("eesd", model, exit=EXIT, vocabulary=20)
    learner.prepare(torch.arange(61).flip(0))
    save_learnt(tmp_path, "eesd", learner.module, model, learner.config())
    for source in (learner.module.eval(), str(tmp_path)):
        fast = truedraft.accelerate(model, draft=registry.load("drafters", "eesd", model=source), control="fixed")
        propose, drafted = fast.drafter.propose, list[tuple[int, ...]]()

        def noted(*given: Any, propose: Any = propose, drafted: Any = drafted) -> list[DraftTree]:
            made: list[DraftTree] = propose(*given)
            drafted += [tree.tokens for tree in made]
            return made

        fast.drafter.propose = noted  # type: ignore[method-assign]
        fast.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False)
        drafts.append(drafted)
    assert drafts[0] == drafts[1] and max(map(len, drafts[0])) > 2
    with pytest.raises(Refused, match="was trained for another model"):
        truedraft.accelerate(tiny("llama", torch.float32, layers=LAYERS, vocabulary=53), draft=f"eesd:{tmp_path}")
