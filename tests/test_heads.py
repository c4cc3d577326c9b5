"""Learned heads: their passes against a head run plainly over whole texts, and training against serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import truedraft
from models import tiny
from test_knobs import knobs
from truedraft import registry
from truedraft.drafters._base import PassCost
from truedraft.drafters._candidates import DraftVocabulary
from truedraft.drafters._learned import Batch
from truedraft.drafters._shapes import branched
from truedraft.drafters.heads._head import Head
from truedraft.drafters.heads._reader import HeadReader
from truedraft.drafters.heads._unroll import StepwiseLearner, UnrolledLearner
from truedraft.errors import Refused
from truedraft.runtime import linears, native
from truedraft.runtime.heads import TorchHeadPass
from truedraft.tree import DraftTree

LEARNERS = {name: registry.method("drafters", name).learner for name in registry.names("drafters")}
UNROLLED, STEPWISE = (
    [name for name, learner in LEARNERS.items() if learner is not None and issubclass(learner, kind)]
    for kind in (UnrolledLearner, StepwiseLearner)
)
SEVERAL = ("gad", "specdec-pp")  # for an encoder-decoder, and a draft model beside the target
OF_DECODERS = [name for name, learner in LEARNERS.items() if learner is not None and name not in SEVERAL]
COPIED = [name for name in OF_DECODERS if "quantize" in dict(knobs(registry.method("drafters", name)))]
STEPS = 4


def target() -> PreTrainedModel:
    return tiny(dtype=torch.float32)


def learner_of(name: str, model: PreTrainedModel, **knobs: Any) -> Any:
    torch.manual_seed(3)
    learner = registry.method("drafters", name).learner(**knobs)
    learner.begin(model)
    for parameter in learner.module.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return learner


def batch_of(model: PreTrainedModel, layers: Sequence[int], texts: Sequence[Sequence[int]], prompt: int) -> Batch:
    """Texts of one length, with the hidden states of a plain forward; `layers` without the raw last block."""
    ids = torch.tensor(texts)
    blocks = model.config.num_hidden_layers
    raw: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _, __, out: raw.append(out))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    hook.remove()
    features = {layer: raw[0] if layer == blocks else states[layer] for layer in layers}
    mask = torch.ones_like(ids, dtype=torch.bool)
    return Batch(ids, mask, mask & (torch.arange(ids.shape[1]) >= prompt), features)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


@torch.no_grad()
def plain_logits(head: Head, features: Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """(1 + drafted, draft vocabulary) logits after `tokens` and after each drafted one, without a cache.

    features: (len(tokens) - 1, size), of all tokens but the last.
    """
    known, found = list(head.fuse(features)), []
    for count in range(len(drafted) + 1):
        embeds = head.embed(torch.tensor([*tokens[1:], *drafted[:count]]))[None]
        rotary = head.rotary(embeds, torch.arange(embeds.shape[1])[None])
        states = head(embeds, torch.stack(known)[None], rotary, [plain_attention] * len(head.blocks))[0]
        found.append(head.logits(states[-1]))
        known.append(states[-1])
    return torch.stack(found)


@pytest.mark.parametrize("name", UNROLLED)
@pytest.mark.parametrize("vocabulary", [0, 20])
def test_unrolled_step_is_that_of_drafting(name: str, vocabulary: int) -> None:
    """The logits of every pair at every step equal those of a chain drafted there, of the text's tokens."""
    model, learner_class = target(), registry.method("drafters", name).learner
    if vocabulary and "vocabulary" not in [knob for knob, _ in knobs(learner_class)]:
        pytest.skip(f"{name} drafts by the target's output head")
    learner = learner_of(name, model, **({"vocabulary": vocabulary} if vocabulary else {}))
    texts = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0)).tolist()
    batch = batch_of(model, learner.needs.hidden, texts, 5)
    with torch.no_grad():
        steps = [logits for _, logits, *_ in learner._unrolled(batch, STEPS)]
    features = torch.cat([batch.features[layer] for layer in learner.module.layers], -1)
    for row, text in enumerate(texts):
        for pair in range(len(text) - 1 - STEPS):
            drafted = text[pair + 2 : pair + 1 + STEPS]
            plain = plain_logits(learner.module, features[row, : pair + 1], text[: pair + 2], drafted)
            trained = torch.stack([logits[row, pair] for logits in steps])
            torch.testing.assert_close(trained, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STEPWISE)
def test_labels_and_teacher_are_those_of_the_token_after_the_pair(name: str) -> None:
    model, text = target(), torch.randint(0, 61, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    learner = learner_of(name, model)
    batch = batch_of(model, learner.needs.hidden, [text], 6)
    laws = model(torch.tensor([text])).logits[0].softmax(-1)
    for step, (_, _, teacher, labels, _) in enumerate(learner._unrolled(batch, STEPS)):
        counted = [pair for pair in range(13) if 6 <= pair + 2 + step < 14]
        assert (labels[0] != -100).nonzero().flatten().tolist() == counted
        assert [int(labels[0, pair]) for pair in counted] == [text[pair + 2 + step] for pair in counted]
        torch.testing.assert_close(teacher(labels != -100), laws[[pair + 1 + step for pair in counted]])


@pytest.mark.parametrize("name", OF_DECODERS)
def test_loss_with_products_in_bf16_is_that_in_fp32(name: str) -> None:
    """Near random weights, whose loss is some nats; gradients reach every weight that has one in fp32."""
    model = target()
    learner = learner_of(name, model, **({"noise": 0.0} if "noise" in dict(knobs(LEARNERS[name])) else {}))
    texts = torch.randint(0, 61, (3, 14), generator=torch.Generator().manual_seed(5)).tolist()
    batch = batch_of(model, learner.needs.hidden, texts, 5)
    losses, reached = [], []
    for enabled in (False, True):
        learner.module.zero_grad()
        torch.manual_seed(0)  # of the anchors of blocks
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = learner.loss(batch)
        loss.backward()
        gradients = {n: p.grad for n, p in learner.module.named_parameters() if p.grad is not None}
        assert all(bool(g.isfinite().all()) for g in gradients.values())
        losses.append(loss.item())
        reached.append({n for n, g in gradients.items() if g.any()})
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert reached[1] == reached[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", UNROLLED)
@pytest.mark.parametrize("passes", ["compiled", "int8", "torch"])
def test_drafts_are_those_of_the_plain_head(name: str, passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of rows of different lengths, with rows that leave: the logits at every node of every drafted tree.

    With copies in int8, those of layers whose weights are rounded.
    """
    model = target()
    learner = learner_of(name, model)
    forward = rounded_forward if passes == "int8" else torch.nn.Linear.forward
    monkeypatch.setattr(linears, "SMALLEST", 1)
    head = learner.module.eval()
    if passes == "torch":
        head.runner = TorchHeadPass(head)
    compared = 0
    expand = HeadReader.expand

    def checked(self: HeadReader, growing: Sequence[Any]) -> Tensor:
        nonlocal compared
        logits = expand(self, growing)
        at = 0
        for tree in growing:
            tokens = tree.row.tokens
            batch = batch_of(model, head.layers, [tokens], 0)
            features = torch.cat([batch.features[layer][0] for layer in head.layers], -1)[:-1]
            for node in tree.frontier:
                with monkeypatch.context() as patched:
                    patched.setattr(torch.nn.Linear, "forward", forward)
                    plain = plain_logits(head, features, tokens, tree.path(node))[-1]
                torch.testing.assert_close(logits[at], plain, rtol=2e-4, atol=2e-4)
                at, compared = at + 1, compared + 1
        assert at == len(logits)
        return logits

    monkeypatch.setattr(HeadReader, "expand", checked)
    draft = registry.load("drafters", name, model=head, quantize="int8" if passes == "int8" else "none")
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    ids = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] * 2 + [1] * 7])
    out = fast.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(out, expected)
    assert compared > 30
    assert draft.reader.name == ("torch" if passes == "torch" else "compiled pass")


SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01)


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", [{"do_sample": False}, SAMPLED, {**SAMPLED, "repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("name", [name for name in OF_DECODERS if "vocabulary" in dict(knobs(LEARNERS[name]))])
def test_drafts_over_a_draft_vocabulary_are_those_over_all_tokens(
    name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target()
    learner = learner_of(name, model, vocabulary=20)
    learner.prepare(torch.arange(61))
    found: list[list[Any]] = []
    for narrow in (True, False):
        asked: list[bool] = []
        suffices = DraftVocabulary.suffices

        def limited(self: Any, rows: Any, narrow: bool = narrow, asked: Any = asked, suffices: Any = suffices) -> bool:
            asked.append(suffices(self, rows))
            return narrow and asked[-1]

        with monkeypatch.context() as patched:
            patched.setattr(DraftVocabulary, "suffices", limited)
            draft = registry.load("drafters", name, model=learner.module.eval())
            fast, trees = truedraft.accelerate(model, draft=draft, control="fixed"), list[DraftTree]()
            propose = draft.propose
            draft.propose = lambda *args, trees=trees, propose=propose: trees.extend(made := propose(*args)) or made
            torch.manual_seed(0)
            fast.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=16, **given)
        assert set(asked) == {"repetition_penalty" not in given}
        found.append([(tree.tokens, tree.parent) for tree in trees])
    assert found[0] == found[1] and max(len(tokens) for tokens, _ in found[0]) > 2


def rounded_forward(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    scale = layer.weight.abs().amax(1, keepdim=True) / 127
    return torch.nn.functional.linear(x, (layer.weight / scale).round() * scale, layer.bias)


@pytest.mark.skipif(native.library() is None, reason="no compiled pass here")
@pytest.mark.parametrize("name", UNROLLED)
def test_copies_in_int8_follow_their_weights(name: str) -> None:
    model = target()
    head = learner_of(name, model).module.eval()
    draft = registry.load("drafters", name, model=head)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    given: dict[str, Any] = dict(max_new_tokens=9, do_sample=False)
    ids, logits = torch.tensor([[5, 6, 7, 8]]), []
    expand = draft.reader.expand
    draft.reader.expand = lambda growing: logits.append(expand(growing)) or logits[-1]
    fast.generate(ids, **given)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(0.5)
    first = logits.pop(0)
    logits.clear()
    fast.generate(ids, **given)
    again = registry.load("drafters", name, model=head)
    other = truedraft.accelerate(model, draft=again, control="fixed")
    expand = again.reader.expand
    afresh: list[Tensor] = []
    again.reader.expand = lambda growing: afresh.append(expand(growing)) or afresh[-1]
    other.generate(ids, **given)
    assert torch.equal(logits[0], afresh[0]) and not torch.equal(logits[0], first)


@pytest.mark.skipif(native.library() is None, reason="no compiled pass here")
@pytest.mark.parametrize("name", OF_DECODERS)
def test_drafts_are_those_of_weights_written_between_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 1)
    model = target()
    head = learner_of(name, model).module.eval()

    def drafts(draft: Any, fast: Any) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        propose = type(draft).propose

        def recorded(*args: Any) -> list[DraftTree]:
            made: list[DraftTree] = propose(draft, *args)
            found.extend(tree.tokens for tree in made)
            return made

        draft.propose = recorded
        fast.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=16, do_sample=False)
        return found

    copied = {"quantize": "int8"} if name in COPIED else {}
    draft = registry.load("drafters", name, model=head, **copied)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    first = drafts(draft, fast)
    with torch.no_grad():
        for weight in (parameter for parameter in head.parameters() if parameter.ndim > 1):
            torch.nn.init.normal_(weight, 0.0, 0.1, torch.Generator().manual_seed(8))
    fast.forget()  # how often its confidences were right
    again = drafts(draft, fast)
    other = registry.load("drafters", name, model=head, **copied)
    assert again == drafts(other, truedraft.accelerate(model, draft=other, control="fixed")) != first


@pytest.mark.parametrize("name", COPIED)
def test_copies_that_no_pass_reads_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    head = learner_of(name, model).module.eval()
    monkeypatch.setattr(native, "library", lambda: None)
    truedraft.accelerate(model, draft=registry.load("drafters", name, model=head, quantize="auto"))
    with pytest.raises(Refused, match=f"{name}:quantize=int8: no pass of its head is compiled here"):
        truedraft.accelerate(model, draft=registry.load("drafters", name, model=head, quantize="int8"))


@pytest.mark.parametrize("name", STEPWISE)
def test_acceptance_in_training_is_that_in_serving(name: str) -> None:
    """The reach of a greedy chain at each place where a pass begins: measured by the trainer, and by the engine."""
    model = target()
    learner = learner_of(name, model)
    head = learner.module
    rows: Any = model.get_output_embeddings().weight
    with torch.no_grad():  # drafts that are right now and then
        for module in (m for m in head.modules() if isinstance(m, torch.nn.Linear)):
            module.weight.mul_(0.05)
        if hasattr(head, "lm_head"):
            head.lm_head.weight.copy_(rows)
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    ids = torch.randint(1, 61, (6, 5), generator=torch.Generator().manual_seed(4))
    texts = model.generate(ids, max_new_tokens=26, do_sample=False, eos_token_id=None)
    batch = batch_of(model, learner.needs.hidden, texts.tolist(), 5)
    for _ in range(60):
        optimizer.zero_grad()
        learner.loss(batch).backward()
        optimizer.step()
    head.eval()
    with torch.no_grad():  # without the noise of training
        reach = learner._reach(batch)
    static = "branches" in [name for name, _ in knobs(registry.method("drafters", name))]
    chain = {"branches": "1x1x1x1"} if static else {"nodes": 4, "depth": 4, "top_k": 1}
    draft = registry.load("drafters", name, model=head, **chain)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    accepted = right = 0
    for row, text in enumerate(texts):
        fast.generate(ids[row : row + 1], max_new_tokens=26, do_sample=False, eos_token_id=None)
        at = 5  # the pending token's place
        for one in fast.report().passes[1:]:
            (emitted,) = one.emitted
            expected = min(int(reach[row, at - 1]), 4, len(text) - at - 2)
            assert emitted.drafted == expected, (row, at)
            accepted, right, at = accepted + emitted.drafted, right + expected, at + len(emitted.tokens)
    assert accepted == right > 5


def test_features_that_a_head_has_read_are_not_kept() -> None:
    model = target()
    learner = learner_of("eagle3", model)
    draft = registry.load("drafters", "eagle3", model=learner.module.eval())
    kept: list[int] = []
    propose = draft.propose

    def proposed(rows: Any, budget: Sequence[int]) -> Any:
        trees = propose(rows, budget)
        kept.append(sum(map(len, draft.reader._unread.values())) if any(budget) else 0)
        return trees

    draft.propose = proposed
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    fast.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False)
    assert kept and not any(kept[:-1]), "but for the last pass, which has no room for a draft"
    assert draft.reader._cache is None and not draft.reader._unread


def test_reports_have_the_time_in_which_a_head_reads_the_prompt() -> None:
    model = target()
    learner = learner_of("eagle3", model)
    fast = truedraft.accelerate(
        model, draft=registry.load("drafters", "eagle3", model=learner.module.eval()), control="fixed"
    )
    ids = torch.randint(1, 61, (1, 40), generator=torch.Generator().manual_seed(5))
    fast.generate(ids, max_new_tokens=12, do_sample=False)
    seconds = fast.report().seconds
    assert 0 < seconds["draft_prefill"] < seconds["draft"]
    fast.generate(ids, max_new_tokens=2, do_sample=False)  # one draft
    seconds = fast.report().seconds
    assert seconds["draft_prefill"] == seconds["draft"]


PUBLISHED = (
    """0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"""  # paths of ranks
)


def test_published_tree_of_eagle_has_its_paths() -> None:
    model = target()
    draft = registry.load("drafters", "eagle-published", model=learner_of("eagle", model).module.eval())
    fast, found = truedraft.accelerate(model, draft=draft, control="fixed"), list[DraftTree]()
    propose = draft.propose

    def proposed(rows: Any, budget: Sequence[int]) -> Any:
        found.extend(propose(rows, budget))
        return found[-len(rows) :]

    draft.propose = proposed
    fast.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False)
    tree = found[0]
    ranks = [str(tree.parent[:node].count(parent)) for node, parent in enumerate(tree.parent)]
    paths = ["".join(ranks[at] for at in tree.path(node)[1:]) for node in range(1, len(tree))]
    assert sorted(paths) == sorted(PUBLISHED.split())


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("4", ((4,),)),
        ("2x3x1", ((2,), (3, 3), (1,) * 6)),
        ("3x2.1x2", ((3,), (2, 1, 0), (2, 2, 2))),
        ("2x0.1x1", ((2,), (0, 1), (1,))),
        ("1024", ((1024,),)),
    ],
)
def test_shapes_of_trees(text: str, shape: tuple[tuple[int, ...], ...]) -> None:
    assert branched(text) == shape


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "2x", "2x0", "2x0.0", "2x1.1.1", "2x-1.2", "2x.1", "2x1.", "1025", "32x32", "1x" * 1024 + "1"],
)
def test_shapes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        branched(text)


@pytest.mark.parametrize(("level", "node", "ends"), [(0.0, 0.0, False), (50.0, 0.0, True), (0.0, 50.0, True)])
def test_a_draft_ends_where_another_level_would_not_pay(level: float, node: float, ends: bool) -> None:
    """By the seconds of a level, and of a node in the verifying pass, beside a plain pass of ten seconds."""
    model = target()
    learner = learner_of("eagle3", model)
    draft = registry.load("drafters", "eagle3", model=learner.module.eval(), depth=5)
    grown = draft._level

    def timed(active: Sequence[Any]) -> None:
        grown(active)
        draft._of_level = level

    draft._of_level, draft._level = level, timed
    fast, found = truedraft.accelerate(model, draft=draft, control="fixed"), list[DraftTree]()
    propose = draft.propose

    def proposed(*args: Any) -> list[DraftTree]:
        draft.pass_cost = PassCost(10.0, node)
        found.extend(trees := propose(*args))
        return trees

    draft.propose = proposed
    ids = torch.randint(1, 61, (1, 8), generator=torch.Generator().manual_seed(5))
    out = fast.generate(ids, max_new_tokens=20, do_sample=False)
    assert out.equal(model.generate(ids, max_new_tokens=20, do_sample=False))
    assert {max(tree.shape.depth) == 1 for tree in found[:5]} == {ends}


def test_levels_that_were_interrupted_do_not_end_drafts_for_good() -> None:
    model = target()
    draft = registry.load("drafters", "eagle3", model=learner_of("eagle3", model).module.eval(), depth=5)
    draft._of_level = 50.0
    fast, found = truedraft.accelerate(model, draft=draft, control="fixed"), list[DraftTree]()
    propose = draft.propose

    def proposed(*args: Any) -> list[DraftTree]:
        draft.pass_cost = PassCost(10.0, 0.0)
        found.extend(trees := propose(*args))
        return trees

    draft.propose = proposed
    ids = torch.randint(1, 61, (1, 8), generator=torch.Generator().manual_seed(5))
    fast.generate(ids, max_new_tokens=20, do_sample=False)
    assert min(max(tree.shape.depth) for tree in found[:4]) > 1 and draft._of_level < 5
