"""Drafts of the continuations of the last tokens in several texts, held to counting in the texts themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from test_stores import FORMS, occurrences, texts
from truedraft.drafters import _trees
from truedraft.drafters._trees import MATCH_CONFIDENCE, likeliest_continuations
from truedraft.stores._cursor import Cursor, Sizes
from truedraft.stores._native import drafts
from truedraft.stores.automaton import Automaton, best_tree
from truedraft.tree import DraftTree

LAST = 10  # tokens that are looked up


def sources(
    made: Callable[[int], Automaton], some: Sequence[list[int]], last: list[int]
) -> list[tuple[Automaton, Cursor]]:
    found = []
    for text in some:
        automaton, cursor = made(128), Cursor()
        automaton.extend(text)
        automaton.follow(cursor, last)
        found.append((automaton, cursor))
    return found


def after(text: Sequence[int], match: Sequence[int], tree: DraftTree) -> list[int]:
    """How often each path of a tree follows a match in a text; first the occurrences of the match itself."""
    return [
        len(occurrences(text, [*match, *(tree.tokens[i] for i in tree.path(node)[1:])])) for node in range(len(tree))
    ]


def promised(text: Sequence[int], match: Sequence[int], tree: DraftTree, sizes: Sizes) -> float:
    """Tokens expected of a tree after a match; 0 where it does not grow from it."""
    times = after(text, match, tree)
    grows = times[0] and all(times) and len(tree) - 1 <= sizes.alpha * len(match) + sizes.offset
    return sum(times[1:]) / times[0] if grows else 0.0


@pytest.mark.parametrize("form", FORMS)
def test_the_draft_is_the_tree_with_the_most_expected_tokens_of_all_texts(form: str) -> None:
    """The confidence of a node is the share of its parent's occurrences that it follows, times the match's prior."""
    pick, second, shorter = random.Random(1), 0, 0
    for _ in range(60):
        some = [text[:120] for text in pick.sample(texts(), 2)]
        start = pick.randrange(100)
        last = [token for token in pick.choice(some)[start : start + LAST] if token >= 0]
        sizes = Sizes(pick.choice([1, 5, 40]), pick.choice([0.5, 1.0]), pick.choice([0.0, 8.0]), 0.1, 8, 64)
        longest = pick.choice([2, 4, 32])
        given = sources(FORMS[form], some, last)
        before = [bytes(cursor) for _, cursor in given]
        tree = likeliest_continuations(7, given, sizes, longest)
        assert [bytes(cursor) for _, cursor in given] == before, "cursors are not changed"
        alone = [likeliest_continuations(7, [one], sizes, longest) for one in given]
        matches = [last[-length:] for length in range(min(len(last), longest), 0, -1)]
        gains = []
        for text, one in zip(some, alone, strict=True):
            gains.append(max([promised(text, match, one, sizes) for match in matches], default=0.0))
        best = gains.index(max(gains, default=0.0))
        if not max(gains):
            assert len(tree) == 1
            continue
        chosen = alone[best]
        assert (tree.tokens, tree.parent, tree.confidence) == (chosen.tokens, chosen.parent, chosen.confidence)
        match = next(match for match in matches if promised(some[best], match, tree, sizes) == gains[best])
        times = after(some[best], match, tree)
        for node in range(1, len(tree)):
            sure = MATCH_CONFIDENCE[len(match) + len(tree.path(node)) - 2]
            assert tree.confidence is not None
            assert tree.confidence[node] == pytest.approx(times[node] / times[tree.parent[node]] * sure)
        second, shorter = second + best, shorter + (len(match) < len(matches[0]))
    assert second > 9 and shorter > 9, "another text, and a shorter match, are often the best"


@pytest.mark.skipif(drafts() is None, reason="the compiled code was not built on this machine")
def test_the_compiled_form_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as the loop over the texts in Python, for extreme sizes too."""
    pick = random.Random(2)
    for _ in range(150):
        some = [text[:150] for text in pick.sample(texts(), pick.randint(0, 3))]
        last = [pick.randrange(4) for _ in range(LAST)]
        sizes = Sizes(
            pick.choice([0, 3, 300]), pick.choice([0.0, 1.0, 900.0]), pick.choice([0.0, 8.0]),
            pick.choice([0.0, 0.1, 1.0]), pick.randint(1, 8), pick.choice([2, 64, 1024]),
        )  # fmt: skip
        given = sources(FORMS["native"], some, last)
        compiled = likeliest_continuations(3, given, sizes, 12)
        with monkeypatch.context() as without:
            without.setattr(_trees, "drafts", lambda: None)
            other = likeliest_continuations(3, given, sizes, 12)
        assert (compiled.tokens, compiled.parent, compiled.confidence) == (other.tokens, other.parent, other.confidence)


@pytest.mark.skipif(drafts() is None, reason="the compiled code was not built on this machine")
def test_the_compiled_form_refuses_too_few_confidences() -> None:
    with pytest.raises(ValueError, match="every length of a match needs a confidence"):
        drafts().frequent(best_tree(), [], 8, 1, 10, 1.0, 0.0, 0.1, 8, 64, bytes(8 * 256))
