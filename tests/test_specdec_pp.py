"""SpecDec++: labels, estimates and ends of drafts against plain forwards, the law of stopped drafts, and training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
)

import seq2seq_models
import truedraft
from models import ragged, sibling, tiny
from test_law import SAMPLING, chain_rule
from test_views import COMPILED
from truedraft import DraftTree, Refused, registry
from truedraft.chance import outcomes
from truedraft.cli.train import _draft
from truedraft.drafters._base import PassCost
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._learned import Batch, read_learnt, save_learnt
from truedraft.drafters.models import _acceptance
from truedraft.drafters.models._acceptance import AcceptanceHead, Training
from truedraft.drafters.models.specdec_pp import AcceptanceReader, RowPace, SpecdecPp
from truedraft.loading import load
from truedraft.train.drafter import train_drafter
from truedraft.train.loop import Plan
from truedraft.tree import Row


@cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    model = tiny("llama", torch.float32)
    return model, sibling(model)


def head_of(model: PreTrainedModel, spread: float = 6.0, blocks: int = 2) -> AcceptanceHead:
    """An untrained head whose estimates are far apart."""
    torch.manual_seed(0)
    made = AcceptanceHead(model.config.hidden_size, blocks, 6.0).requires_grad_(False)
    made.output.weight.mul_(spread)
    made.output.bias[1] += 1.0
    return made


def plain_estimates(model: PreTrainedModel, head: AcceptanceHead, tokens: Sequence[int]) -> tuple[float, float]:
    """The a of the last token by a forward over the text and the paper's formula, and without the weight."""
    with torch.no_grad():
        x = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1]
        for block in head.blocks:
            y = x @ block.weight.T + block.bias
            x = x + y / (1 + (-y).exp())
        out = (x @ head.output.weight.T + head.output.bias).exp()
    a = float(out[1] / out.sum())
    return a, head.weight * a / (head.weight * a + 1 - a)


# ---------------------------------------------------------------- drafts


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", [pytest.param("auto", marks=COMPILED), "stock"])
@pytest.mark.parametrize(("threshold", "shortest"), [(0.3, 1), (0.8, 1), (0.3, 4)])
def test_drafts_end_where_the_paper_says(
    runtime: str, threshold: float, shortest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of rows of different lengths, one of which ends early: at every token read, both estimates; and every
    draft has the tokens up to the first at which 1 - the product of the a of those before it exceeds the threshold."""
    model, small = pair()
    head = head_of(small)
    draft = registry.load(
        "drafters", "specdec-pp", model=small, head=head, threshold=threshold, shortest=shortest, length=7
    )
    draft.reader.runtime = runtime
    expand, finished = AcceptanceReader.expand, SpecdecPp.finished
    compared, lengths = 0, set[int]()

    def expanded(self: AcceptanceReader, growing: Sequence[GrowingTree]) -> Tensor:
        nonlocal compared
        frontiers = [list(tree.frontier) for tree in growing]
        logits = expand(self, growing)
        for tree, nodes in zip(growing, frontiers, strict=True):
            for node in (node for node in nodes if node > tree.root):
                found = plain_estimates(small, head, [*tree.row.tokens, *tree.path(node)])
                assert (tree.score[node], tree.chance[node]) == pytest.approx(found, abs=1e-3)
                compared += 1
        return logits

    def ended(self: SpecdecPp, growing: GrowingTree) -> DraftTree:
        tree, row = finished(self, growing), growing.row
        drafted = list(tree.tokens[1:])
        most = min(7, row.room - row.step - 1)
        product = 1.0
        for place in range(len(drafted)):
            complete = place + 1 >= most or drafted[place] in row.ends
            stopped = place + 1 >= shortest and 1 - product > threshold
            assert (complete or stopped) == (place + 1 == len(drafted)), (place, drafted, product)
            product *= plain_estimates(small, head, [*row.tokens, *drafted[: place + 1]])[0]
        lengths.add(len(drafted))
        return tree

    monkeypatch.setattr(AcceptanceReader, "expand", expanded)
    monkeypatch.setattr(SpecdecPp, "finished", ended)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    ids = torch.randint(3, 61, (3, 14), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1] * 14, [0] * 9 + [1] * 5, [0] * 2 + [1] * 12])
    settings: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
    ends = model.generate(ids, **settings)[0, 20].item()
    expected = model.generate(ids, eos_token_id=ends, **settings)
    assert torch.equal(fast.generate(ids, eos_token_id=ends, **settings), expected)
    assert compared > 20 and len(lengths) > 2


def test_confidences_are_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens that were read, before calibration; of the last one the row's rate."""
    model, small = pair()
    head = head_of(small)
    draft = registry.load("drafters", "specdec-pp", model=small, head=head, threshold=0.9, length=5)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    propose, compared = draft.propose, 0

    def proposed(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        nonlocal compared
        trees = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            for node in range(1, len(tree) - 1):
                expected = plain_estimates(small, head, [*row.tokens, *tree.tokens[1 : node + 1]])[1]
                assert tree.confidence is not None and tree.confidence[node] == pytest.approx(expected, abs=1e-3)
                compared += 1
            if len(tree) > 1:
                assert tree.confidence is not None and tree.confidence[-1] == draft._paces[id(row)].rate
        return trees

    draft.propose = proposed
    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "proposed", lambda self, row, tree, after: tree)
        fast.generate(**ragged(model, 2), max_new_tokens=20, do_sample=False)
    assert compared > 20


def choices(batch: int, ids: Tensor) -> list[int]:
    """Tokens that may come next: every second position has one, so that few draws are left to enumerate."""
    return [1] if len(ids) == 3 else [2] if len(ids) == 5 else [0, 3]


@pytest.mark.parametrize("rule", SAMPLING)
def test_the_law_of_drafts_that_end_by_their_own_tokens(rule: str) -> None:
    """The first drafted token decides whether the third is drafted; every draw is enumerated."""
    model = tiny("llama", torch.float32, vocabulary=4, sharpen=1.5)
    small, prompt = sibling(model, 0.4), [3, 1, 2]
    head, lengths = head_of(small, spread=40.0), set[int]()
    processors = LogitsProcessorList([PrefixConstrainedLogitsProcessor(choices, 1), TemperatureLogitsWarper(0.8)])
    expected = chain_rule(model, prompt, processors, steps=5)
    between = sum(plain_estimates(small, head, [*prompt, 1, token])[0] for token in choices(0, torch.zeros(4))) / 2
    draft = registry.load("drafters", "specdec-pp", model=small, head=head, threshold=1 - between, length=3)
    settings: dict[str, Any] = dict(prefix_allowed_tokens_fn=choices, temperature=0.8, top_k=0, do_sample=True)
    propose = draft.propose

    def proposed(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        (tree,) = propose(rows, budget)
        if len(rows[0].tokens) == len(prompt) + 1 and tree.draws == "one":
            lengths.add(tree.drafted)
        return [tree]

    draft.propose = proposed
    fast = truedraft.accelerate(model, draft=draft, control="fixed", rule=rule)
    measured: dict[tuple[int, ...], float] = {}

    def text(chance: Any) -> tuple[int, ...]:
        draft.forget()
        out = fast.generate(torch.tensor([prompt]), max_new_tokens=5, chance=chance, **settings)
        return tuple(out[0, len(prompt) :].tolist())

    for emitted, p in outcomes(text):
        measured[emitted] = measured.get(emitted, 0.0) + p
    assert set(measured) == set(expected)
    assert max(abs(measured[s] - expected[s]) for s in expected) < 1e-6
    drawn = registry.method("accept", rule).preferred_drafts == "law"
    assert lengths == ({2, 3} if drawn else set()), "ends depend on the tokens drawn"


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize("rate", [(0.9, 0.9), (1.0, 0.2), (0.95, 0.4)])
@pytest.mark.parametrize("plain", [0.5, 3.0, 20.0])
def test_the_threshold_of_costs_is_that_of_exhaustive_search(rate: tuple[float, float], plain: float) -> None:
    """Against dynamic programming over all sequences of estimates, of two values with equal chances: to go on pays
    where the value of going on, `per token` seconds for each accepted one less those of the pass, is above 0."""
    mean, level, node = sum(rate) / 2, 1.0, 0.05
    draft = SpecdecPp()
    draft.pass_cost, draft._of_level = PassCost(plain * 3, node), level * 2
    row = Row(0, [1], 1, 99)
    growing = GrowingTree(row, [1], 0, 30, 30)
    pace = RowPace(1, right=mean * 1e9, tried=1e9, seconds=4e9, tokens=1e9)
    draft._paces[id(row)] = pace
    assert pace.per_token(plain) == pytest.approx(4.0, abs=1e-6)
    threshold = draft._by_costs(growing, rows=3, active=2)

    def value(accepted: float, left: int) -> float:
        if not left:
            return 0.0
        later = sum(value(accepted * a, left - 1) for a in rate) / 2
        return max(0.0, 4.0 * accepted * mean**2 - level - node + later)

    for accepted in (0.1 * k + 0.013 for k in range(10)):
        assert (value(accepted, 9) > 0) == (1 - accepted <= threshold)


def test_what_a_row_spent_and_got() -> None:
    pace = RowPace(3, draft=[7, 8, 9], drafting=2.0)
    pace.update([1, 2, 3, 7, 8, 5], 10.0)
    assert (pace.seconds, pace.tokens, pace.length, pace.draft) == (12.0, 3.0, 6, [])
    assert (pace.right, pace.tried) == pytest.approx((0.95 * 1.4 + 2, 0.95 * 2 + 3))
    pace.update([1, 2, 3, 7, 8, 5, 6], 10.0)
    assert pace.per_token(5.0) == pytest.approx((0.95 * 12 + 10 + 5) / (0.95 * 3 + 1 + 1))
    right = pace.right
    pace.draft = [4, 4, 4, 4]
    pace.update([1, 2, 3, 7, 8, 5, 6, 4, 4], 1.0)  # the row ended inside the draft
    assert (pace.right, pace.tried) == pytest.approx((0.95 * right + 2, 0.95**2 * 4.9 + 2))


def test_drafts_follow_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that passes move: where a pass of the draft model costs nearly one of the target, a token or two are
    drafted, and where it costs little, many."""
    model, small = pair()
    lengths = {}
    for ratio in (1.2, 60.0):
        draft = registry.load("drafters", "specdec-pp", model=small, head=head_of(small))
        fast, now = truedraft.accelerate(model, draft=draft, control="fixed"), [0.0]
        propose, extend, drafted = draft.propose, draft.reader.target.extend_tapped, list[int]()

        def proposed(rows: Any, budget: Any, propose: Any = propose, drafted: Any = drafted) -> Any:
            found = propose(rows, budget)
            drafted.append(found[0].drafted)
            return found

        def extended(*given: Any, extend: Any = extend, now: list[float] = now) -> Any:
            now[0] += 1.0
            return extend(*given)

        draft.propose, draft.reader.target.extend_tapped = proposed, extended
        with monkeypatch.context() as patch:
            patch.setattr("time.perf_counter", lambda now=now: now[0])
            patch.setattr(
                SpecdecPp, "pass_cost", property(lambda self, r=ratio: PassCost(r, 0.0), lambda self, c: None)
            )
            fast.generate(torch.tensor([[5, 9, 11, 4]]), max_new_tokens=60, do_sample=False)
        lengths[ratio] = sum(drafted[2:-2]) / len(drafted[2:-2])
    assert lengths[1.2] < 2.2 < 5 < lengths[60.0]


# ---------------------------------------------------------------- training


def learner_of(**knobs: Any) -> Training:
    model, small = pair()
    made = Training(model=small, **knobs)
    torch.manual_seed(0)
    made.begin(model)
    return made


def batch_of(rows: int = 2, length: int = 12, seed: int = 0) -> Batch:
    """Texts of the target, the last of which is shorter; the first four tokens are the prompt."""
    model, _ = pair()
    prompts = torch.randint(3, 61, (rows, 4), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    ids = model.generate(prompts, max_new_tokens=length - 4, min_new_tokens=length - 4, do_sample=True, top_k=0)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[-1, length - 3 :] = False
    learnt = mask.clone()
    learnt[:, :4] = False
    return Batch(ids, mask, learnt, {})


def test_acceptance_is_that_of_speculative_sampling() -> None:
    """Over all tokens drawn from q: sum q min(1, p / q) is the sum of min(p, q)."""
    torch.manual_seed(1)
    target, draft = torch.randn(2, 5, 9).mul(2)
    for temperature in (1.0, 0.6):
        p, q = ((part / temperature).softmax(-1) for part in (target, draft))
        tokens = torch.arange(9).expand(5, 9)
        wide = (part[:, None].expand(5, 9, 9) for part in (target, draft))
        found = _acceptance.acceptance(*wide, tokens, temperature)
        assert torch.allclose((q * found).sum(-1), torch.minimum(p, q).sum(-1))
        drawn = _acceptance.drafted(draft.expand(20_000, 5, 9), temperature)
        shares = torch.stack([(drawn == token).float().mean(0) for token in range(9)], -1)
        assert (shares - q).abs().max() < 0.02
    assert _acceptance.drafted(draft, 0.0).tolist() == draft.argmax(-1).tolist()
    found = _acceptance.acceptance(target, draft, draft.argmax(-1), 0.0)
    assert found.tolist() == (target.argmax(-1) == draft.argmax(-1)).float().tolist()


@pytest.mark.parametrize(("mixing", "texts", "temperature"), [(1.0, 1, 0.0), (0.3, 3, 1.0)])
@torch.no_grad()
def test_what_is_learnt_is_what_plain_forwards_give(
    mixing: float, texts: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward per prefix: the draft model's tokens behind the original text, their probabilities of acceptance, and
    the states at them in texts where they replace its own. They are computed once."""
    model, small = pair()
    learner, batch = learner_of(mixing=mixing, texts=texts, temperature=temperature), batch_of(length=20)
    chosen = list[Tensor]()
    masked = Tensor.masked_scatter

    def scattered(values: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        chosen.append(mask)
        return masked(values, mask, source)

    mixed = list[Tensor]()
    read = small.model.forward

    def forwarded(*given: Any, **named: Any) -> Any:
        mixed.extend(given)
        return read(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "masked_scatter", scattered)
        patch.setattr(small.model, "forward", forwarded)
        states, labels = learner.observed(batch)
        again = learner.observed(batch)
        assert torch.equal(again[0], states) and torch.equal(again[1], labels) and len(mixed) == 1
    places, at = chosen[0] & batch.loss_mask, 0
    assert torch.equal(places, chosen[0]), "tokens of the response alone"
    for row in range(2):
        seen: set[int] = set()
        for ids in mixed[0].unflatten(0, (2, texts))[row]:
            assert torch.equal(ids[~places[row]], batch.ids[row][~places[row]])
            for place in places[row].nonzero().flatten().tolist():
                plain = small(ids[None, : place + 1], output_hidden_states=True).hidden_states[-1][0, -1]
                if at == len(states) or not torch.allclose(states[at], plain, rtol=1e-3, atol=1e-3):
                    assert ids[place] == batch.ids[row, place], "it is replaced, and not learnt"
                    continue
                assert place not in seen, "a token is drafted in one of the texts"
                seen.add(place)
                logits = [one(batch.ids[row : row + 1, :place]).logits[0, -1] for one in (model, small)]
                token = int(ids[place])
                if temperature:
                    p, q = (float(part.softmax(-1)[token]) for part in logits)
                    assert float(labels[at]) == pytest.approx(min(1.0, p / q), abs=1e-4)
                else:
                    assert token == int(logits[1].argmax())
                    assert float(labels[at]) == float(int(logits[0].argmax()) == token)
                at += 1
        assert len(seen) == int(places[row].sum())
    count = int(batch.loss_mask.sum())
    assert at == len(labels) == len(states) and (at == count if mixing == 1 else 0.6 * count < at < count)


def test_the_loss_weighs_rejections() -> None:
    """By hand: the weighted cross-entropy over the sum of weights; its least is where a is w-fold less likely."""
    learner = learner_of(weight=6.0, blocks=0)
    learner.observed = lambda batch: (torch.zeros(4, 32), torch.tensor([1.0, 0.5, 0.0, 0.9]))  # type: ignore[method-assign]
    with torch.no_grad():
        learner.module.output.bias.copy_(torch.tensor([0.2, 0.5]))
    a = 1 / (1 + math.exp(-0.3))
    expected = sum(-p * math.log(a) - 6 * (1 - p) * math.log(1 - a) for p in (1.0, 0.5, 0.0, 0.9))
    assert learner.loss(None).item() == pytest.approx(expected / (2.4 + 6 * 1.6))  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(learner.module.parameters(), 0.05)
    for _ in range(400):
        optimiser.zero_grad()
        learner.loss(None).backward()  # type: ignore[arg-type]
        optimiser.step()
    raw, chance = learner.module.chances(learner.module(torch.zeros(1, 32)))
    assert chance.item() == pytest.approx(0.6, abs=1e-3) and raw.item() == pytest.approx(
        0.6 / (0.6 + 6 * 0.4), abs=1e-3
    )


def test_training_tells_tokens_apart() -> None:
    """On texts that it is not trained on: less divergence than the best constant has, and drafts that pay more."""
    learner, held = learner_of(), batch_of(24, 40, seed=9)
    optimiser = torch.optim.Adam(learner.module.parameters(), 3e-3)
    trained = batch_of(96, 40, seed=1)
    for _ in range(150):
        optimiser.zero_grad()
        learner.loss(trained).backward()
        optimiser.step()
    found = learner.evaluate([held])
    _, label = learner.observed(held)
    mean = label.mean()
    entropy = -(label * mean.log() + (1 - label) * (1 - mean).log()).mean()
    own = torch.nn.functional.binary_cross_entropy(label, label)
    assert 0 < found["divergence"] < float(entropy - own)
    constant = max(_acceptance.tokens_in_time([float(mean)] * len(label), label.tolist(), h / 50) for h in range(50))
    assert found["tokens_per_pass"] > constant


def test_tokens_in_the_time_of_passes() -> None:
    """By hand: at 0.3 two tokens, as a draft has them before an estimate of 0.5 ends it; then a pass of the target."""
    found = _acceptance.tokens_in_time([0.5, 0.9, 0.5, 0.9], [1.0, 0.5, 0.0, 1.0], 0.3)
    assert found == pytest.approx((2 + 1.0 + 0.5 + 0.0 + 0.0) / (2 + 4 * 0.1))
    assert _acceptance.tokens_in_time([0.9, 0.5, 0.9], [1.0, 1.0, 1.0], 0.3) == pytest.approx((3 + 1) / (1 + 3 * 0.1))


def test_a_checkpoint_is_for_its_two_models(tmp_path: Path) -> None:
    model, tokenizer = load("nano")
    learner = Training(model="nano-draft", blocks=1)
    learner.begin(model)
    save_learnt(tmp_path, "specdec-pp", learner.module, model, learner.config())
    draft = registry.load("drafters", "specdec-pp", head=str(tmp_path), length=4)
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
    assert draft.model.config.hidden_size == 128, "it is loaded by the name that the checkpoint has"
    for name, weight in learner.module.state_dict().items():
        assert torch.equal(draft.reader.head.state_dict()[name], weight)
    ids = tokenizer("once upon a time", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), expected)
    with pytest.raises(Refused, match=r"trained beside nano-draft for another model \(a LlamaForCausalLM"):
        truedraft.accelerate(model, tokenizer, draft=f"specdec-pp:model=nano,head={tmp_path}")
    with pytest.raises(Refused, match=r"was trained for another model .*train one for this model"):
        truedraft.accelerate(draft.model, tokenizer, draft=f"specdec-pp:head={tmp_path}")
    stored = read_learnt(tmp_path, "specdec-pp", model)
    for other, why in ((Training(model="nano-draft"), "the same knobs"), (Training(model="nano", blocks=1), "a head")):
        other.begin(model)
        with pytest.raises(Refused, match=why):
            other.resume(*stored)
    learner.resume(*stored)
    assert _draft("specdec-pp", tmp_path) == f"specdec-pp:head={tmp_path}" and _draft("gad", Path("x")) == "gad:x"


def test_refusals(tmp_path: Path) -> None:
    model, small = pair()
    with pytest.raises(Refused, match="specdec-pp needs a draft model"):
        truedraft.accelerate(model, draft="specdec-pp")
    with pytest.raises(Refused, match=r"needs a head: .*made by `truedraft train specdec-pp:model=NAME`"):
        truedraft.accelerate(model, draft=registry.load("drafters", "specdec-pp", model=small))
    with pytest.raises(Refused, match="reads states of size 16, and those of the draft model LlamaForCausalLM have 32"):
        truedraft.accelerate(
            model, draft=registry.load("drafters", "specdec-pp", model=small, head=AcceptanceHead(16, 1, 6.0))
        )
    with pytest.raises(Refused, match="give the folder of a checkpoint, or an AcceptanceHead"):
        registry.load("drafters", "specdec-pp", model=small, head=3)
    with pytest.raises(Refused, match="there is no folder"):
        registry.load("drafters", f"specdec-pp:head={tmp_path / 'none'}")
    learner = learner_of(blocks=1)
    save_learnt(tmp_path, "specdec-pp", AcceptanceHead(32, 2, 6.0), model, learner.config())
    with pytest.raises(Refused, match=r"does not hold the weights that it describes .*train again"):
        truedraft.accelerate(model, draft=registry.load("drafters", "specdec-pp", model=small, head=str(tmp_path)))
    with pytest.raises(Refused, match="needs a draft model: specdec-pp:model=NAME"):
        Training().begin(model)
    other = seq2seq_models.model()
    with pytest.raises(Refused, match="is no decoder language model: its head is trained"):
        Training(model=small).begin(other)
    with pytest.raises(Refused, match=r"(?s)model=.*is no decoder language model"):
        Training(model=other).begin(model)
    with pytest.raises(Refused, match="has another tokenizer than the target"):
        given = load("nano")[0], load("nano-gec")[1]
        train_drafter(Training(model="nano-draft"), *given, ["a"], tmp_path / "new", Plan())
