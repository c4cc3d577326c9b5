"""Acceptance rules by themselves: the law of their tokens, by enumeration over drafts, flips and picks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

import truedraft
from matrix import SPELT
from models import ragged, sibling, tiny
from truedraft import registry
from truedraft.accept import optimal_acceptance
from truedraft.accept._base import AttributingRule, NodeRule
from truedraft.accept._verification import Candidates, TargetProbs
from truedraft.chance import Chance, PositionNoise, Replay, StreamNoise, likeliest, outcomes
from truedraft.sampling import History, Laws
from truedraft.tree import DraftTree, Draws, Prompt, Row

SIZE = 4
BY_LAW = [n for n in registry.names("accept") if registry.method("accept", n).guarantee == "distribution"]
BY_NODE = [n for n in BY_LAW if issubclass(registry.method("accept", n), NodeRule)]
LAWS = {
    "alike": ([0.5, 0.2, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "equal": ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
    "apart": ([0.9, 0.1, 0.0, 0.0], [0.0, 0.1, 0.3, 0.6]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
}


def _drafted(q: Tensor, siblings: int, draws: Draws, chance: Replay, row: Row) -> Candidates:
    """The children that a drafter with the law q drafts."""
    if draws == "last" and siblings:
        certain = likeliest(q, siblings - 1)
        rest = q.index_fill(0, torch.tensor(certain, dtype=torch.long), 0.0)
        if rest.sum() == 0:
            return Candidates(tuple(certain), draws)
        return Candidates((*certain, *chance.draw(rest / rest.sum(), row)), draws, rest / rest.sum())
    return Candidates(tuple(chance.draw(q, row, siblings, draws == "distinct")), draws, q)


def _accepts(rule: str, draws: Draws) -> bool:
    accepts_draws = registry.method("accept", rule).accepts_draws
    return accepts_draws is None or draws in accepts_draws


CASES = [
    (rule, draws, siblings)
    for rule in BY_NODE
    for draws in ("one", "independent", "distinct", "last")
    for siblings in ((0, 1) if draws == "one" else (1, 2, 3))
    if _accepts(rule, draws)
]


def _law_of(rule: str, p: Tensor, drafted_children: object, row: Row) -> tuple[list[float], float]:
    """The law of the rule's token, and the probability that it was drafted."""
    verifier, emitted, kept = registry.load("accept", rule), [0.0] * SIZE, 0.0

    def once(chance: Replay) -> tuple[int, bool]:
        children = drafted_children(chance) if callable(drafted_children) else drafted_children
        (token,) = verifier.choose(p.log()[None], [children], [row], chance)
        return token, token in children.tokens

    for (token, drafted), probability in outcomes(once):
        emitted[token] += probability
        kept += probability * drafted
    return emitted, kept


@pytest.mark.parametrize(("rule", "draws", "siblings"), CASES)
@pytest.mark.parametrize("laws", LAWS)
def test_drawn_drafts_keep_the_law(rule: str, laws: str, draws: Draws, siblings: int) -> None:
    p, q = (torch.tensor(law) for law in LAWS[laws])
    row = Row(0, [1], 1, 9)
    emitted, kept = _law_of(rule, p, lambda chance: _drafted(q, siblings, draws, chance, row), row)
    assert emitted == pytest.approx(p.tolist(), abs=1e-6)
    if siblings:
        most = optimal_acceptance(p, [q] * siblings, draws)
        assert kept <= most + 1e-6
        if siblings == 1 or (rule, draws) == ("greedy-multi-draft", "last"):
            assert kept == pytest.approx(most, abs=1e-6), "the optimum of any rule"


@pytest.mark.parametrize("tokens", [(), (0,), (3, 1), (2, 2, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("rule", [rule for rule in BY_NODE if _accepts(rule, "certain")])
def test_certain_drafts_keep_the_law(rule: str, laws: str, tokens: tuple[int, ...]) -> None:
    p, row = torch.tensor(LAWS[laws][0]), Row(0, [1], 1, 9)
    emitted, kept = _law_of(rule, p, Candidates(tokens), row)
    assert emitted == pytest.approx(p.tolist(), abs=1e-6)
    if rule in ("multi-round", "greedy-multi-draft"):  # the optimum of any rule
        assert kept == pytest.approx(sum(p[t].item() for t in set(tokens)), abs=1e-6)


def test_siblings_without_replacement_are_accepted_more_often() -> None:
    p, q = (torch.tensor(law) for law in LAWS["alike"])
    row = Row(0, [1], 1, 9)
    kept = [
        _law_of("multi-round", p, lambda chance, d=draws: _drafted(q, 2, d, chance, row), row)[1]
        for draws in ("independent", "distinct")
    ]
    assert torch.minimum(p, q).sum() < kept[0] < kept[1]


def test_k_seq_accepts_more_with_each_draft() -> None:
    p, q = (torch.tensor(law) for law in LAWS["alike"])
    row = Row(0, [1], 1, 9)
    kept, most = [], []
    for k in (1, 2, 3):
        kept.append(_law_of("k-seq", p, lambda chance, k=k: _drafted(q, k, "independent", chance, row), row)[1])
        most.append(optimal_acceptance(p, [q] * k))
    assert kept[0] < kept[1] < kept[2]
    assert all(k >= (1 - 1 / math.e) * m for k, m in zip(kept, most, strict=True))


@pytest.mark.parametrize("rule", BY_NODE)
def test_nan_scores_give_token_minus_one(rule: str) -> None:
    scores = torch.full((1, SIZE), torch.nan)
    row = Row(0, [1], 1, 9)
    assert registry.load("accept", rule).choose(scores, [Candidates((2,))], [row], StreamNoise(1)) == [-1]


def test_fresh_noise_does_not_depend_on_neighbours() -> None:
    law, one, other = torch.full((50,), 0.02), Row(0, [1], 1, 9), Row(1, [1], 1, 9)
    alone, beside = PositionNoise([(7, 0), (7, 1)]), PositionNoise([(7, 0), (7, 1)])
    first = [(alone.draw(law, one)[0], alone.flip(0.5, one)) for _ in range(8)]
    second = []
    for _ in range(8):
        beside.flip(0.5, other)
        second.append((beside.draw(law, one)[0], beside.flip(0.5, one)))
    assert first == second and len({token for token, _ in first}) > 4


@pytest.mark.parametrize("made", [lambda: StreamNoise(1), lambda: PositionNoise([(3, 0)])])
def test_tokens_drawn_at_once_follow_their_laws(made: Callable[[], Chance]) -> None:
    """Several from each law, independent of each other (a chi-square test of pairs), and never one without weight;
    laws need not add up to one."""
    torch.manual_seed(5)
    chance, row, turns = made(), Row(0, [1], 1, 9), 3000
    laws = torch.tensor([[0.0, 0.5, 0.2, 0.3, 0.0], [0.7, 0.0, 0.0, 0.2, 0.1], [0.0, 0.0, 0.0, 0.0, 1.0]])
    pairs = torch.zeros(3, 5, 5)
    for _ in range(turns):
        found = chance.draw_each(laws * 0.9, row, [2, 3, 1])
        assert [len(tokens) for tokens in found] == [2, 3, 1]
        for k, tokens in enumerate(found):
            pairs[k, tokens[0], tokens[-1]] += 1
    assert pairs[2, 4, 4] == turns
    for law, counts in zip(laws[:2], pairs[:2], strict=True):
        expected = turns * law[:, None] * law
        possible = expected > 0
        assert not counts[~possible].any()
        square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert square < 26.1  # 8 degrees of freedom, one in a thousand


def _block(p: list[Tensor], q: list[Tensor], rule: str) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of three tokens, after verification of two drafted ones, and the mean number of emitted tokens.

    p, q: next-token laws of target and drafter by step, the same after any prefix.
    """
    verifier = registry.load("accept", rule)
    laws, row = torch.stack([law.log() for law in p]), Row(0, [1], 1, 9)
    emitted: dict[tuple[int, ...], float] = {}
    mean = 0.0

    def once(chance: Replay) -> tuple[int, ...]:
        (one,), (two,) = chance.draw(q[0], row), chance.draw(q[1], row)
        tree = DraftTree((1, one, two), (-1, 0, 1), (q[0], q[1], None), draws="one")
        probs = TargetProbs(row, tree, laws, Laws(LogitsProcessorList(), History(torch.tensor([[1]]), 9, 0, [row])))
        path, token = verifier.accept(tree, probs, row, chance)
        assert row.tokens == [1], "accept does not emit"
        return *(tree.tokens[node] for node in path[1:]), token

    for tokens, probability in outcomes(once):
        mean += probability * len(tokens)
        for last in _continued(tokens, p):
            emitted[last[0]] = emitted.get(last[0], 0.0) + probability * last[1]
    return emitted, mean


def _continued(tokens: tuple[int, ...], p: list[Tensor]) -> list[tuple[tuple[int, ...], float]]:
    """The tokens, continued to three by plain sampling: (text, probability)."""
    found = [(tokens, 1.0)]
    for i in range(len(tokens), 3):
        found = [((*emitted, t), w * float(p[i][t])) for emitted, w in found for t in range(SIZE)]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_block_keeps_the_law_and_accepts_more_than_rejection(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p, q = ([torch.randn(SIZE, generator=g, dtype=torch.float64).softmax(-1) for _ in range(3)] for _ in range(2))
    (block, longer), (_, shorter) = _block(p, q, "block"), _block(p, q, "rejection")
    for tokens in itertools.product(range(SIZE), repeat=3):
        expected = float(p[0][tokens[0]] * p[1][tokens[1]] * p[2][tokens[2]])
        assert block[tokens] == pytest.approx(expected, abs=1e-6)
    assert longer > shorter + 1e-3


def _lossy(spec: str, p: list[float], drafted_children: Candidates) -> int:
    (token,) = registry.load("accept.lossy", spec).choose(
        torch.tensor([p]).log(), [drafted_children], [Row(0, [1], 1, 9)], Replay([])
    )
    return token


def test_tokens_accepted_by_lossy_rules() -> None:
    p = [0.5, 0.3, 0.15, 0.05]  # exp(-entropy) is 0.32
    assert _lossy("typical:delta=0.5", p, Candidates((2, 1))) == 1, "the likelier of two above the threshold"
    assert _lossy("typical:epsilon=0.2,delta=1.0", p, Candidates((2,))) == 0, "0.15 is below the threshold"
    assert _lossy("top-beta:beta=2", p, Candidates((1,))) == 1 and _lossy("top-beta:beta=2", p, Candidates((2,))) == 0
    assert _lossy("top-beta:gap=0.4", p, Candidates((1,))) == 0, "the gap to the likeliest is too large"


@pytest.mark.parametrize("laws", LAWS)
def test_lenience_bounds_the_probability_of_every_token(laws: str) -> None:
    p, q = (torch.tensor(law) for law in LAWS[laws])
    row, emitted, kept = Row(0, [1], 1, 9), {}, {}
    for lenience in (1.0, 0.5):
        verifier, found = registry.load("accept.lossy", "lenient", lenience=lenience), [0.0] * SIZE
        kept[lenience] = 0.0
        for (token, drafted), probability in outcomes(lambda chance, j=verifier: _once(j, p, q, row, chance)):
            found[token] += probability
            kept[lenience] += probability * drafted
        emitted[lenience] = found
    assert emitted[1.0] == pytest.approx(p.tolist(), abs=1e-6), "lenience 1 is exact"
    assert all(s <= 2 * float(x) + 1e-6 for s, x in zip(emitted[0.5], p, strict=True))
    assert kept[0.5] >= kept[1.0] - 1e-9


def _once(verifier: NodeRule, p: Tensor, q: Tensor, row: Row, chance: Replay) -> tuple[int, bool]:
    drafted_children = Candidates(tuple(chance.draw(q, row)), "one", q)
    (token,) = verifier.choose(p.log()[None], [drafted_children], [row], chance)
    return token, token in drafted_children.tokens


@pytest.mark.parametrize("name", registry.names("accept.lossy"))
def test_lossy_rules_need_their_prefix_and_are_reported(name: str) -> None:
    model = tiny()
    with pytest.raises(truedraft.Refused, match=f"lossy/{name}"):
        truedraft.accelerate(model, rule=name)
    fast = truedraft.accelerate(model, SPELT, draft=sibling(model), rule=f"lossy/{name}", control="fixed")
    rule = fast.rule
    assert rule is not None
    texts = {"references": [[*range(3, 30)]]} if isinstance(rule, AttributingRule) else {}
    fast.generate(**ragged(model, 3), max_new_tokens=20, do_sample=rule.samples, **texts)
    assert fast.report().guarantee == "none" and "lossy" in str(fast.report())


@pytest.mark.parametrize("runtime", ["stock", "auto"])
def test_reflective_mixes_the_laws_of_two_plain_forwards(runtime: str) -> None:
    """The token at each node is the likeliest of the mixture of two plain forwards: one after the row, and one after
    the row, the draft, the prompt and the draft up to the node."""
    model, share = tiny("llama", torch.float32), 0.5
    target = truedraft.accelerate(model, runtime=runtime).target
    rule = registry.load("accept.lossy", "reflective", prompt="abc", share=share)
    rule.bind(model, SPELT)

    def plain(*tokens: int) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([[3, 1, 4, *tokens]])).logits[0, -1].softmax(-1)

    row, prompt = Row(0, [3, 1, 4], 3, 9), SPELT("abc")["input_ids"]
    laws = Laws(LogitsProcessorList(), History(torch.tensor([[3, 1, 4]]), 9, 0, [row]))
    target.reserve(1, 30)
    first, kept, changed = [plain()], [], 0
    for token in range(model.config.vocab_size):
        draft = (token, 8, 9)
        agrees = int(torch.lerp(first[0], plain(*draft, *prompt), share).argmax()) == token
        if not agrees and token > 3:
            continue
        first[1:] = [plain(*draft[:depth]) for depth in (1, 2, 3)]
        second = [plain(*draft, *prompt, *draft[:depth]) for depth in range(3)]
        mixed = [torch.lerp(a, b, share) for a, b in zip(first, second, strict=False)] + first[3:]
        expected = [int(law.argmax()) for law in mixed]
        changed += expected != [int(law.argmax()) for law in first]
        (tree,) = rule.add_probes([DraftTree((4, *draft, 0), (-1, 0, 1, 2, 3), probes=frozenset({4}))])
        assert tree.drafted == 3 and len(tree) == 5 + len(prompt) + 2 <= 5 + rule.extra_probes(3)
        target.prefill([Prompt(torch.tensor([3, 1, 4]))])
        scores = target.score([tree])
        target.release(0)
        path, found = rule.accept(tree, TargetProbs(row, tree, scores.logits[0], laws), row, Replay([]))
        kept.append(next((i for i in range(3) if draft[i] != expected[i]), 3))
        assert (path, found) == (list(range(kept[-1] + 1)), expected[kept[-1]])
    target.cache = None
    assert changed and len(set(kept)) > 1, "the second law changed what is accepted"


def test_reflective_with_share_zero_is_greedy() -> None:
    model = tiny()
    rule = registry.load("accept.lossy", "reflective", share=0.0)
    fast = truedraft.accelerate(model, SPELT, draft=sibling(model), rule=rule, control="fixed")
    inputs = ragged(model, 3)
    got = fast.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=30, do_sample=False))
    assert fast.report().mean_acceptance_length > 1.3
