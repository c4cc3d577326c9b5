"""Rules on whole passes and at single nodes, by enumeration of every draw, flip and pick on tiny vocabularies.

The oracles are the laws themselves: the text of a pass must have the target's law, and drafts must be accepted with the
probabilities of the papers' formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

import truedraft.accept
from truedraft import Refused, registry
from truedraft.accept._base import ArgmaxRule, Rule
from truedraft.accept._rounds import as_law, in_order
from truedraft.accept._verification import Candidates, Verification, first_children
from truedraft.accept.block import _verified
from truedraft.chance import Chance, Replay, StreamNoise, outcomes
from truedraft.sampling import History, Laws
from truedraft.stopping import Stops
from truedraft.tree import DraftTree, Draws, Row, Scores

V, ROOM = 3, 6
BY_LAW = ("rejection", "multi-round", "k-seq", "greedy-multi-draft")
PAIRS = [
    ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), ([0.6, 0.4, 0.0], [0.1, 0.2, 0.7]), ([0.25, 0.25, 0.5], [0.25, 0.25, 0.5]),
    ([0.0, 1.0, 0.0], [0.5, 0.0, 0.5]), ([0.1, 0.8, 0.1], [0.45, 0.1, 0.45]), ([0.4, 0.4, 0.2], [0.1, 0.3, 0.6]),
]  # fmt: skip


@cache
def law(kind: str, prefix: tuple[int, ...]) -> Tensor:
    """(V,) the law of the target, or of the drafter, after a prefix."""
    seed = int("1" + "".join(map(str, prefix)), 4) + (10_000 if kind == "drafter" else 0)
    return (1.2 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)


def emitted(
    rule: Rule, rows: Sequence[Row], trees: Sequence[DraftTree], chance: Chance, *processors: LogitsProcessor
) -> list[tuple[int, ...]]:
    """The tokens that each row emits in one pass. Rows have the same length."""
    logits = torch.zeros(len(rows), max(map(len, trees)), V, dtype=torch.float64)
    for b, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        for node in range(len(tree)):
            drafted = [tree.tokens[i] for i in tree.path(node)[1:]]
            logits[b, node] = law("target", (*row.tokens, *drafted)).log()
    history = History(torch.zeros(len(rows), rows[0].prompt), ROOM, 0, rows)
    laws = Laws(LogitsProcessorList(processors), history)
    stops = Stops(StoppingCriteriaList([MaxLengthCriteria(rows[0].prompt + ROOM)]), history, laws)
    before = [len(row.tokens) for row in rows]
    scores = Scores(logits, {}, [0] * len(rows))
    tokens = rule.decide_all_nodes(scores, rows, trees, laws, chance) if isinstance(rule, ArgmaxRule) else None
    rule.verify(Verification(rows, trees, scores, laws, stops, chance, 0, tokens))
    return [tuple(row.tokens[n:]) for row, n in zip(rows, before, strict=True)]


Drafting = Callable[[Replay, Row], DraftTree]


def chain(depth: int) -> Drafting:
    """Chains drawn token by token."""

    def drafted(chance: Replay, row: Row) -> DraftTree:
        tokens, laws = [row.tokens[-1]], list[Tensor | None]()
        for _ in range(depth):
            laws.append(law("drafter", (*row.tokens, *tokens[1:])))
            tokens += chance.draw(laws[-1], row)  # type: ignore[arg-type]
        return DraftTree(tuple(tokens), tuple(range(-1, depth)), (*laws, None), draws="one")

    return drafted


def certain(*tokens: int) -> Drafting:
    return lambda chance, row: DraftTree.chain(row.tokens[-1], tokens)


def last(chance: Replay, row: Row) -> DraftTree:
    """A certain token and one drawn from the rest of the law; below the first, one drawn token."""
    q = law("drafter", tuple(row.tokens))
    rest = q.index_fill(0, q.argmax(), 0.0) / (1 - q.max())
    first, below = int(q.argmax()), law("drafter", (*row.tokens, int(q.argmax())))
    tokens = (row.tokens[-1], first, *chance.draw(rest, row), *chance.draw(below, row))
    return DraftTree(tokens, (-1, 0, 0, 1), (rest, below, None, None), draws="last")


def two(chance: Replay, row: Row) -> DraftTree:
    """Two siblings, drawn independently."""
    q = law("drafter", tuple(row.tokens))
    return DraftTree((row.tokens[-1], *chance.draw(q, row, 2)), (-1, 0, 0), (q, None, None), draws="independent")


def law_of_texts(
    rule: Rule, drafting: Drafting, start: Row, *processors: LogitsProcessor
) -> dict[tuple[int, ...], float]:
    """The law of three tokens: those of the pass, continued by plain sampling."""
    found: dict[tuple[int, ...], float] = {}

    def once(chance: Replay) -> tuple[int, ...]:
        row = Row(0, list(start.tokens), start.prompt, ROOM)
        return emitted(rule, [row], [drafting(chance, row)], chance, *processors)[0]

    for text, probability in outcomes(once):
        for rest in itertools.product(range(V), repeat=3 - len(text)):
            whole = text + rest
            weight = probability
            for i in range(len(text), 3):
                weight *= float(target(start, whole[:i], *processors)[whole[i]])
            found[whole] = found.get(whole, 0.0) + weight
    return found


def target(start: Row, text: tuple[int, ...], *processors: LogitsProcessor) -> Tensor:
    """The law after a text, after processors."""
    prefix = (*start.tokens, *text)
    ids = torch.tensor([[0] * (start.prompt - 1) + [start.tokens[0], *prefix[start.prompt :]]])
    ids[0, : start.prompt] = 0  # the prompt as `History` was given it
    return LogitsProcessorList(processors)(ids, law("target", prefix).log()[None].float())[0].softmax(-1)  # type: ignore[arg-type]


STARTS = [Row(0, [1], 1, ROOM), Row(0, [2, 1], 1, ROOM)]


@pytest.mark.parametrize(
    ("rule", "drafting"),
    [
        *(("block", d) for d in (chain(0), chain(1), chain(2), certain(1, 2), certain(0), last, two)),
        *((rule, chain(2)) for rule in ("rejection", "multi-round", "k-seq", "greedy-multi-draft", "seeded")),
        *((rule, last) for rule in ("rejection", "multi-round", "greedy-multi-draft")),
        *((rule, certain(1, 2)) for rule in ("rejection", "multi-round", "greedy-multi-draft", "seeded")),
    ],
)
def test_texts_have_the_law_of_the_target(rule: str, drafting: Drafting) -> None:
    for start in STARTS:
        found = law_of_texts(registry.load("accept", rule), drafting, start)
        for text in itertools.product(range(V), repeat=3):
            expected = 1.0
            for i in range(3):
                expected *= float(law("target", (*start.tokens, *text[:i]))[text[i]])
            assert found.get(text, 0.0) == pytest.approx(expected, abs=1e-6)


def accepted_of_chains(start: Row, depth: int, drafter: Callable[[tuple[int, ...]], Tensor]) -> float:
    """By the paper, i tokens x of a chain are accepted with E[w_i], w_i = min(w_(i-1) p(x_i) / q(x_i), 1)."""
    mean = 0.0
    for text in itertools.chain.from_iterable(itertools.product(range(V), repeat=i + 1) for i in range(depth)):
        chance, weight = 1.0, 1.0
        for i, token in enumerate(text):
            p, q = law("target", (*start.tokens, *text[:i]))[token], drafter((*start.tokens, *text[:i]))[token]
            chance *= float(q)
            weight = min(weight * float(p / q), 1.0) if q > 0 else 0.0
        mean += chance * weight
    return mean


def accepted_by_block(drafting: Drafting, start: Row) -> float:
    """The mean number of accepted tokens along the first children."""

    def once(chance: Replay) -> int:
        tree = drafting(chance, start)
        nodes = first_children(tree)
        prefixes = [(*start.tokens, *(tree.tokens[i] for i in tree.path(node)[1:])) for node in nodes]
        p = torch.stack([law("target", prefix) for prefix in prefixes])
        return _verified(p, tree, nodes, start, chance)[0]

    return sum(kept * probability for kept, probability in outcomes(once))


def test_block_accepts_as_much_as_the_paper_states() -> None:
    for start in STARTS:
        n = len(start.tokens)
        likeliest = torch.eye(V)[law("drafter", tuple(start.tokens)).argmax()]
        points = {n: torch.eye(V)[2], n + 1: torch.eye(V)[0]}
        cases: list[tuple[Drafting, int, Callable[[tuple[int, ...]], Tensor]]] = [
            *((chain(depth), depth, lambda prefix: law("drafter", prefix)) for depth in range(3)),
            (certain(2, 0), 2, lambda prefix, points=points: points[len(prefix)]),  # type: ignore[misc]
            (two, 1, lambda prefix: law("drafter", prefix)),
            (last, 2, lambda prefix, n=n, q=likeliest: q if len(prefix) == n else law("drafter", prefix)),  # type: ignore[misc]
        ]
        for drafting, depth, drafter in cases:
            expected = accepted_of_chains(start, depth, drafter)
            assert accepted_by_block(drafting, start) == pytest.approx(expected, abs=1e-6)


def test_pass_emits_the_accepted_block_and_one_token() -> None:
    start, verifier = STARTS[1], registry.load("accept", "block")

    def once(chance: Replay) -> int:
        row = Row(0, list(start.tokens), start.prompt, ROOM)
        return len(emitted(verifier, [row], [chain(2)(chance, row)], chance)[0])

    mean = sum(length * probability for length, probability in outcomes(once))
    assert mean == pytest.approx(1 + accepted_by_block(chain(2), start), abs=1e-6)


def test_blocks_of_several_rows_are_independent() -> None:
    """In lockstep, with one ended row: the text of each other row has its own law."""
    verifier = registry.load("accept", "block")
    starts = [(1,), (2, 0), (0, 2)]
    found: list[dict[int, float]] = [{}, {}]

    def once(chance: Replay) -> list[tuple[int, ...]]:
        rows = [Row(i, list(tokens), len(tokens), ROOM) for i, tokens in enumerate(starts)]
        rows[1].end = 2
        trees = [chain(1)(chance, rows[0]), DraftTree.chain(0, [0, 0]), certain(1)(chance, rows[2])]
        history = History(torch.zeros(3, 2), ROOM, 0, rows)
        laws = Laws(LogitsProcessorList(), history)
        stops = Stops(
            StoppingCriteriaList([MaxLengthCriteria(2 + ROOM), EosTokenCriteria(V), Lockstep()]), history, laws
        )
        assert stops.lockstep and stops.pads
        logits = torch.zeros(3, 3, V, dtype=torch.float64)
        for b, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            for node in range(len(tree)):
                logits[b, node] = law("target", (*row.tokens, *tree.tokens[1 : node + 1])).log()
        recorded = RecordingNoise(chance)
        verifier.verify(Verification(rows, trees, Scores(logits, {}, [0] * 3), laws, stops, recorded, 0))
        assert 1 not in recorded.flipped and rows[1].tokens[2:] == [0] * len(rows[0].tokens[1:])
        assert len({row.step for row in rows}) == 1, "rows emit the same number of tokens"
        return [(rows[0].tokens[1],), (rows[2].tokens[2],)]

    for texts, probability in outcomes(once):
        for counts, (token,) in zip(found, texts, strict=True):
            counts[token] = counts.get(token, 0.0) + probability
    for counts, start in zip(found, (starts[0], starts[2]), strict=True):
        assert [counts[t] for t in range(V)] == pytest.approx(law("target", start).tolist(), abs=1e-6)


def test_block_verifies_against_processed_laws() -> None:
    verifier, start = registry.load("accept", "block"), STARTS[1]
    processors = (RepetitionPenaltyLogitsProcessor(2.0), TemperatureLogitsWarper(0.7))
    found = law_of_texts(verifier, chain(2), start, *processors)
    for text in itertools.product(range(V), repeat=3):
        expected = 1.0
        for i in range(3):
            expected *= float(target(start, text[:i], *processors)[text[i]])
        assert found.get(text, 0.0) == pytest.approx(expected, abs=1e-6)


def test_block_accepts_a_chain_whose_residual_is_rounding() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    q = p[0] - torch.tensor([1e-8, 0.0])
    tree = DraftTree((1, 0, 1), (-1, 0, 1), (q, p[1] - torch.tensor([1e-20, 0.0]), None), draws="one")
    kept, left = _verified(p, tree, [0, 1, 2], Row(0, [1], 1, 9), StreamNoise(1))
    assert kept == 2 and left.tolist() == [0.5, 0.5]


def test_chain_ends_before_a_token_of_probability_zero() -> None:
    p, row = torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), Row(0, [1], 1, 9)
    kept, left = _verified(p, DraftTree.chain(1, [2, 0]), [0, 1, 2], row, StreamNoise(1))
    assert kept == 0 and left.tolist() == [0.75, 0.25, 0.0]
    tree = DraftTree((1, 0, 0), (-1, 0, 1), (p[0], p[1], None), draws="one")
    kept, left = _verified(p, tree, [0, 1, 2], row, Rejecting())
    assert kept == 0 and left.tolist() == p[0].tolist(), "rejected by rounding alone: the law is unchanged"


def test_residual_mass_below_rounding_of_one_counts() -> None:
    p = torch.tensor([[1.0, 0.0], [1.0, 1e-30], [1.0, 0.0]])
    tree = DraftTree((1, 0, 0), (-1, 0, 1), (torch.tensor([1.0, 0.0]),) * 2 + (None,), draws="one")
    assert _verified(p, tree, [0, 1, 2], Row(0, [1], 1, 9), StreamNoise(1))[0] == 2


class Lockstep(StoppingCriteria):
    """An unknown criterion, which forces lockstep."""

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Unknown(LogitsProcessor):
    pass


def test_block_refuses_unknown_processors() -> None:
    verifier, history = registry.load("accept", "block"), History(torch.zeros(1, 1), 3, 0, [Row(0, [1], 1, 3)])
    sentence = (
        "^rule='block' needs the laws after drafted tokens before these are emitted, and Unknown may count its calls "
        "or look across rows: use rule='rejection'$"
    )
    with pytest.raises(Refused, match=sentence):
        verifier.begin_call(Laws(LogitsProcessorList([Unknown()]), history))
    verifier.begin_call(Laws(LogitsProcessorList([TemperatureLogitsWarper(0.7)]), history))


# one node: the probability of acceptance


def at_a_node(rule: str, p: Tensor, drafted_children: Callable[[Replay], Candidates]) -> tuple[list[float], float]:
    """The law of the token at a node, and the probability that it is one of the children."""
    verifier, row = registry.load("accept", rule), Row(0, [1], 1, ROOM)
    found, kept = [0.0] * len(p), 0.0

    def once(chance: Replay) -> tuple[int, bool]:
        children = drafted_children(chance)
        (token,) = verifier.choose(p.log()[None], [children], [row], chance)
        return token, token in children.tokens

    for (token, drafted), probability in outcomes(once):
        found[token] += probability
        kept += probability * drafted
    return found, kept


def siblings(q: Tensor, count: int, draws: Draws) -> Callable[[Replay], Candidates]:
    row = Row(0, [1], 1, ROOM)
    return lambda chance: Candidates(tuple(chance.draw(q, row, count, draws == "distinct")), draws, q)


def without(q: Tensor, token: int) -> Tensor:
    rest = q.index_fill(0, torch.tensor(token), 0.0)
    return rest / rest.sum() if rest.sum() > 0 else rest


def residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp_min(0)
    return rest / rest.sum() if rest.sum() > 1e-12 else p


def rejected(p: Tensor, q: Tensor, count: int, distinct: bool) -> float:
    """The probability that recursive rejection accepts no sibling, by its recursion over the residual law."""
    if count == 0 or q.sum() == 0:
        return 1.0
    refused = 0.0
    for token in range(len(p)):
        chance = float(q[token]) - min(float(p[token]), float(q[token]))
        if chance > 0:
            refused += chance * rejected(residual(p, q), without(q, token) if distinct else q, count - 1, distinct)
    return refused


def pairs() -> list[tuple[Tensor, Tensor]]:
    made = [(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)) for p, q in PAIRS]
    return made + [(law("target", (i,)), law("drafter", (i, i))) for i in range(3)]


class RecordingNoise(Chance):
    """Another source of noise, with a record of flips by row, and of picks by row and law."""

    def __init__(self, chance: Chance):
        self.chance = chance
        self.picked: list[tuple[int, list[float]]] = []
        self.flipped: list[int] = []

    def flip(self, probability: float, row: Row) -> bool:
        assert 0 <= probability <= 1
        self.flipped.append(row.index)
        return self.chance.flip(probability, row)

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        self.picked += [(row.index, line.tolist()) for row, line in zip(rows, law, strict=True)]
        return self.chance.pick(law, rows)


@pytest.mark.parametrize("rule", BY_LAW)
def test_drawn_children_keep_the_law(rule: str) -> None:
    accepts_draws = registry.method("accept", rule).accepts_draws
    kinds: list[tuple[Draws, int]] = [("one", 1), ("independent", 2), ("independent", 3), ("distinct", 2)]
    for (p, q), (draws, count) in itertools.product(pairs(), kinds):
        if accepts_draws is None or draws in accepts_draws:
            found, _ = at_a_node(rule, p, siblings(q, count, draws))
            assert found == pytest.approx(p.tolist(), abs=1e-6), (p, q, draws, count)


def test_one_draft_is_accepted_with_the_overlap_of_the_laws() -> None:
    for (p, q), rule in itertools.product(pairs(), BY_LAW):
        agree = float(p.minimum(q).sum())
        accepted = at_a_node(rule, p, siblings(q, 1, "one"))[1]
        assert accepted == pytest.approx(agree, abs=1e-6)


def test_rejection_verifies_only_the_first_sibling() -> None:
    """The second sibling does not change the law of the token."""
    for (p, q), first, second in itertools.product(pairs(), range(V), range(V)):
        if q[first] > 0:
            one, two = (Candidates(tokens, "independent", q) for tokens in ((first,), (first, second)))
            alone, beside = (at_a_node("rejection", p, lambda chance, o=o: o)[0] for o in (one, two))  # type: ignore[misc]
            assert alone == pytest.approx(beside)


def test_multi_round_accepts_with_the_recursion_of_the_paper() -> None:
    row = Row(0, [1], 1, ROOM)
    for (p, q), (draws, count) in itertools.product(pairs(), [("independent", 2), ("independent", 3), ("distinct", 2)]):
        verifier = registry.load("accept", "multi-round")
        refused = none_accepted(verifier, p, siblings(q, count, draws), row)
        assert refused == pytest.approx(rejected(p, q, count, draws == "distinct"), abs=1e-6)


def none_accepted(verifier: Rule, p: Tensor, drafted_children: Callable[[Replay], Candidates], row: Row) -> float:
    """The probability that no draft is accepted, so that a token is drawn."""

    def once(chance: Replay) -> bool:
        recorded = RecordingNoise(chance)
        verifier.choose(p.log()[None], [drafted_children(chance)], [row], recorded)
        return bool(recorded.picked)

    return sum(probability for drawn, probability in outcomes(once) if drawn)


def test_k_seq_accepts_each_draft_with_the_probability_of_the_paper() -> None:
    """With the least g for which 1 - (1 - b)^k <= g b, b = sum of min(q, p/g), all k are rejected with (1 - b)^k."""
    verifier, row = registry.load("accept", "k-seq"), Row(0, [1], 1, ROOM)
    for (p, q), k in itertools.product(pairs(), (1, 2, 3)):

        def kept(g: float) -> float:
            return float(q.minimum(p / g).sum())

        def excess(g: float) -> float:
            return 1 - (1 - kept(g)) ** k - g * kept(g)

        g = 1.0 if excess(1.0) <= 1e-12 else brentq(excess, 1.0, k)
        refused = none_accepted(verifier, p, siblings(q, k, "independent"), row)
        assert refused == pytest.approx((1 - kept(g)) ** k, abs=1e-5)


def test_certain_and_one_drawn_child_are_accepted_optimally() -> None:
    for p, q in pairs():
        first = int(q.argmax())
        rest = without(q, first)
        if rest.sum() == 0:
            continue

        def drafted_children(chance: Replay) -> Candidates:
            return Candidates((first, *chance.draw(rest, Row(0, [1], 1, ROOM))), "last", rest)

        for rule in ("greedy-multi-draft", "multi-round"):
            found, kept = at_a_node(rule, p, drafted_children)
            assert found == pytest.approx(p.tolist(), abs=1e-6)
            best = truedraft.accept.optimal_acceptance(p, [q, q], "last")
            assert kept == pytest.approx(best, abs=1e-6) if rule == "greedy-multi-draft" else kept <= best + 1e-6


@pytest.mark.parametrize("rule", ["rejection", "multi-round", "greedy-multi-draft"])
def test_certain_children_keep_the_law(rule: str) -> None:
    for (p, _), tokens in itertools.product(pairs(), [(), (0,), (2, 1), (1, 1, 0), (0, 1, 2)]):
        found, kept = at_a_node(rule, p, lambda chance, t=tokens: Candidates(t))  # type: ignore[misc]
        assert found == pytest.approx(p.tolist(), abs=1e-6)
        if rule != "rejection":
            assert kept == pytest.approx(sum(float(p[t]) for t in set(tokens)), abs=1e-6)


class Accepting(Chance):
    """Accepts whatever has a probability above 0; picks the likeliest token."""

    def flip(self, probability: float, row: Row) -> bool:
        return probability > 0

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        best, token = law.max(-1)
        return token.masked_fill(best.isnan(), -1).tolist()


@pytest.mark.parametrize("rule", BY_LAW)
def test_rows_are_verified_against_their_own_laws(rule: str) -> None:
    """Of five rows one accepts its draft, one cannot, one has none, and two have NaN."""
    nan = [torch.nan] * V
    laws = [[1.0, 0.0, 0.0], nan, [0.0, 0.25, 0.75], [0.4, 0.6, 0.0], nan]
    q = torch.tensor([1.0, 0.0, 0.0])
    half = torch.tensor([0.5, 0.5, 0.0])
    candidates = [
        Candidates((0,), "one", half),
        Candidates((0,), "one", q),
        Candidates((0,), "one", q),
        Candidates(()),
        Candidates(()),
    ]
    rows = [Row(i, [1], 1, ROOM) for i in range(5)]
    chance = RecordingNoise(Accepting())
    assert registry.load("accept", rule).choose(torch.tensor(laws).log(), candidates, rows, chance) == [0, -1, 2, 1, -1]
    picked = dict(chance.picked)
    assert [row for row, _ in chance.picked] == [1, 2, 3, 4], "one call, without the row that accepts its draft"
    assert picked[2] == pytest.approx([0, 0.25, 0.75]) and picked[3] == pytest.approx([0.4, 0.6, 0.0])


def test_accepted_draft_needs_no_draw() -> None:
    q = torch.tensor([1.0, 0.0, 0.0])
    for rule in BY_LAW:
        verifier, row, chance = registry.load("accept", rule), Row(0, [1], 1, ROOM), RecordingNoise(Accepting())
        assert verifier.choose(q.log()[None], [Candidates((0,), "one", q)], [row], chance) == [0] and not chance.picked


class Rejecting(Accepting):
    """Rejects whatever has a probability below 1, as rounding may."""

    def flip(self, probability: float, row: Row) -> bool:
        return False


def test_empty_residual_is_replaced_by_the_law_itself() -> None:
    q, row = torch.tensor([1.0, 0.0, 0.0]), Row(0, [1], 1, ROOM)
    for rule in ("greedy-multi-draft", "k-seq"):
        chance = RecordingNoise(Rejecting())
        registry.load("accept", rule).choose(q.log()[None], [Candidates((0,), "one", q)], [row], chance)
        assert chance.picked == [(0, q.tolist())]
    almost = torch.tensor([1 - 2**-24, 0.0, 0.0])
    verifier = in_order()
    token, law = verifier(almost, Candidates((0,)), row, Rejecting())
    assert token is None and torch.equal(law, almost)
    only = torch.tensor([1.0, 0.0, 0.0])
    token, law = verifier(almost, Candidates((0,), "one", only), row, Rejecting())
    assert token is None and torch.equal(law, almost)
    half = torch.tensor([0.5, 0.5, 0.0])
    token, law = verifier(half, Candidates((0, 0), "distinct", only), row, Rejecting())
    assert token is None and law.tolist() == [0.0, 1.0, 0.0]


def test_rules_keep_the_device_of_the_laws() -> None:
    """Whatever torch's default device is."""
    row, p = Row(0, [1], 1, ROOM), torch.tensor([0.5, 0.3, 0.2])
    tree = DraftTree.chain(1, [0, 1])
    with torch.device("meta"):
        for tokens in ((0,), (0, 1)):
            found = in_order()(p, Candidates(tokens), row, Rejecting())[1]
            assert found.device == p.device
        assert _verified(p.expand(3, V), tree, [0, 1, 2], row, Rejecting())[1].tolist() == pytest.approx([0, 0.6, 0.4])


def test_weights_are_normalised() -> None:
    otherwise = torch.tensor([0.0, 1.0, 0.0])
    assert as_law(torch.tensor([3.0, -1.0, 1.0]), otherwise).tolist() == [0.75, 0.0, 0.25]
    assert as_law(torch.tensor([0.25, 0.0, 0.25]), otherwise).tolist() == [0.5, 0.0, 0.5]
    assert as_law(torch.tensor([0.0, -0.5, 0.0]), otherwise) is otherwise


# rules whose token does not depend on drafts


class GivenNoise(StreamNoise):
    """Noise that is given at every node at once, as on an accelerator."""

    noise = torch.tensor([[[0.5, 1.0, 2.0], [3.0, 0.1, 1.0]]])

    def noise_at_nodes(self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree]) -> Tensor | None:
        assert logits.shape[:2] == (len(rows), max(map(len, trees)))
        return self.noise


def test_seeded_decides_all_nodes_if_their_noise_is_given() -> None:
    verifier, row, tree = registry.load("accept", "seeded"), Row(0, [1], 1, ROOM), DraftTree.chain(1, [2])
    history = History(torch.zeros(1, 1), ROOM, 0, [row])
    logits = torch.tensor([[[1.0, 2.0, 2.5], [4.0, 0.5, 0.0]]])
    scores = Scores(logits, {}, [0])
    warped = Laws(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), history)
    for laws, scale in ((Laws(LogitsProcessorList(), history), 1.0), (warped, 2.0)):
        expected = ((scale * logits).softmax(-1) / GivenNoise.noise).argmax(-1).tolist()
        assert verifier.decide_all_nodes(scores, [row], [tree], laws, GivenNoise(1)) == expected
        assert verifier.decide_all_nodes(scores, [row], [tree], laws, StreamNoise(1)) is None
    logits[0, 1, 2] = torch.nan
    assert verifier.decide_all_nodes(scores, [row], [tree], warped, GivenNoise(1))[0][1] == -1
    for laws in (
        Laws(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]), history),
        Laws(LogitsProcessorList(), history, keep_scores=True),
    ):
        assert verifier.decide_all_nodes(scores, [row], [tree], laws, GivenNoise(1)) is None


def test_seeded_draws_as_torch_multinomial() -> None:
    verifier, rows = registry.load("accept", "seeded"), [Row(i, [1], 1, ROOM) for i in range(2)]
    scores = torch.randn(2, 50)
    torch.manual_seed(3)
    expected = torch.multinomial(scores.softmax(-1), 1).flatten().tolist()
    torch.manual_seed(3)
    assert verifier.choose(scores, [Candidates(()), Candidates((3,))], rows, StreamNoise(2)) == expected


def test_greedy_chooses_the_first_of_the_likeliest_tokens() -> None:
    verifier, row, tree = registry.load("accept", "greedy"), Row(0, [1], 1, ROOM), DraftTree.chain(1, [2])
    history = History(torch.zeros(1, 1), ROOM, 0, [row])
    logits = torch.tensor([[[1.0, 2.0, 2.0], [4.0, 0.5, 0.0]]])
    scores = Scores(logits, {}, [0])
    assert verifier.choose(logits[0], [Candidates(()), Candidates(())], [row, row], StreamNoise(1)) == [1, 0]
    (tokens,) = verifier.decide_all_nodes(scores, [row], [tree], Laws(LogitsProcessorList(), history), StreamNoise(1))
    assert list(tokens) == [1, 0]
    warped = Laws(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), history)
    assert verifier.decide_all_nodes(scores, [row], [tree], warped, StreamNoise(1)) is None


def test_accept_exports_the_optimal_acceptance() -> None:
    from truedraft.accept._optimum import optimal_acceptance

    assert truedraft.accept.optimal_acceptance is optimal_acceptance
    with pytest.raises(AttributeError, match=r"^module 'truedraft\.accept' has no attribute 'best'$"):
        _ = truedraft.accept.best
