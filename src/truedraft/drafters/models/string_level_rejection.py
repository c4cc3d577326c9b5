"""String-level rejection sampling (SLRS): drafts the target's tokens by the probabilities that a draft model of another
tokenizer gives to their strings.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
ICML 2025 (arXiv 2502.05202). psi(t) is the probability that the draft model goes on with the string of the target's
token t, summed over the ways to split it into its own tokens; t is accepted as in speculative sampling, with psi as the
draft's distribution. Here psi is the distribution that t is in fact drawn from, so that every rule is exact, whatever
part of the splits was summed: the first token of the target that the draft model's text begins with, the longest one.
A text that goes on to a longer token does not count for its beginnings, and a draft model's token that reaches beyond
the string of t counts for t. Splits begin where the last word of the row does, and may cross the row's end.

It wins where the tokenizers have few tokens in common and drafts are sampled, as `string-level-exact` has no
probabilities, and most where the draft model's tokens are the longer ones. It is for short tokens: one of the target
costs as many passes of the draft model as it has tokens of that, several in each, and Python work for each new string.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree, laws_of
from truedraft.drafters.models._strings import StringDrafter
from truedraft.drafters.models._vocabularies import (
    RenderedTexts,
    Vocabularies,
    by_bytes,
    token_bytes,
)
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Draws, Row

LAST_WORD = 64  # tokens of the draft model in the row's last word, read again for each draft; a longer one has no draft
ENTRIES = 1 << 22  # of the tables that are kept, one per string


class Place(NamedTuple):
    """Where a text of the draft model is: it still has to spell `awaited`, or has gone on with `beyond` after it."""

    awaited: bytes
    beyond: bytes = b""


class Table(NamedTuple):
    """What the next token of the draft model makes of a text: the first token of the target behind the row. V where it
    is not begun, V + 1 where the text is another than the row's.

    own: (n,) tokens of the draft model. first: (n,) by these. other: by all others.
    unfinished: (m,) indices into `own` of tokens behind which that may change.
    """

    own: Tensor
    first: Tensor
    other: int
    unfinished: Tensor


class FirstTokens:
    """The target's tokens that texts of the draft model begin with: of those that do, the longest.

    Args:
        size, own_size: logits of the target, and of the draft model.
    """

    def __init__(self, vocabularies: Vocabularies, size: int, own_size: int):
        self.size, self.own_size = size, own_size
        texts = token_bytes(vocabularies.target)
        self._tokens = {text: t for text, t in by_bytes(vocabularies.target, texts).items() if t < size}
        self._beginnings = {text[:n] for text in self._tokens for n in range(len(text))}
        self._target = sorted(self._tokens)
        self._texts = {own: text for own, text in token_bytes(vocabularies.draft).items() if own < own_size}
        order = sorted(self._texts, key=self._texts.__getitem__)
        self._sorted, self._own = [self._texts[own] for own in order], torch.tensor(order, dtype=torch.long)
        specials = {own: vocabularies.reverse.special(own) for own in range(own_size) if own not in self._texts}
        self._specials = {own: t for own, t in specials.items() if t is not None and t < size}
        self._begun = self._beyond(b"")  # made before the first draft: it has all tokens
        self._tables: dict[Place, Table] = {}
        self._entries = 0  # of the tables

    def advanced(self, place: Place, own: int) -> Place | None:
        """The place after one more token; None where the text is then another than the row's, or ends."""
        (awaited, beyond), text = place, self._texts.get(own, b"")
        if not text or not (text.startswith(awaited) or awaited.startswith(text)):
            return None
        return Place(awaited[len(text) :], beyond + text[len(awaited) :])

    def unfinished(self, place: Place) -> bool:
        """Whether further tokens may change the first token."""
        return bool(place.awaited) or place.beyond in self._beginnings

    def first(self, place: Place) -> int:
        """The longest token that the text behind the row begins with; V where there is none."""
        beyond = place.beyond
        ends = range(len(beyond), 0, -1)
        return next((self._tokens[beyond[:n]] for n in ends if beyond[:n] in self._tokens), self.size)

    def spelled(self, place: Place, tokens: Sequence[int]) -> bool:
        """Whether these tokens spell what is awaited, or a beginning of it."""
        for own in tokens:
            later = self.advanced(place, own)
            if later is None or later.beyond:
                return False
            place = later
        return True

    def table(self, place: Place) -> Table:
        if (kept := self._begun if place == Place(b"") else self._tables.get(place)) is not None:
            return kept
        made = self._awaiting(place.awaited) if place.awaited else self._beyond(place.beyond)
        if self._entries > ENTRIES:
            self._tables.clear()
            self._entries = 0
        self._tables[place] = made
        self._entries += len(made.own)
        return made

    def _awaiting(self, awaited: bytes) -> Table:
        """The table of a text that still has to spell these bytes."""
        first, unfinished = dict[int, int](), list[int]()
        begun = [self._spelled(awaited[:n], exactly=True) for n in range(1, len(awaited))]
        for at in (i for some in (*begun, self._spelled(awaited)) for i in some):
            beyond = self._sorted[at][len(awaited) :]
            if beyond in self._beginnings:
                unfinished.append(len(first))
            first[at] = self.first(Place(b"", beyond))
        places, tokens, later = (
            torch.tensor([*some], dtype=torch.long) for some in (first, first.values(), unfinished)
        )
        return Table(self._own[places], tokens, self.size + 1, later)

    def _beyond(self, beyond: bytes) -> Table:
        """The table of a text that has gone on with these bytes: of the tokens that lead to longer ones of the target,
        and where there are no bytes of all."""
        longer = [text[len(beyond) :] for text in self._target[slice(*_range(self._target, beyond))] if text != beyond]
        other = self.first(Place(b"", beyond))
        first, changes = torch.full((len(self._sorted),), other), set[int]()
        for rest in sorted(longer, key=len):
            start, end = _range(self._sorted, rest)
            first[start:end] = self._tokens[beyond + rest]
        for begun in {rest[:n] for rest in longer for n in range(1, len(rest))}:
            changes.update(self._spelled(begun, exactly=True))
        at, unfinished = first != other, torch.tensor(sorted(changes), dtype=torch.long)
        at[unfinished] = True
        if not beyond:
            at[:] = True
        (places,) = at.nonzero(as_tuple=True)
        table = Table(self._own[places], first[places], other, torch.searchsorted(places, unfinished))
        if beyond:
            return table
        own, tokens = (torch.tensor([*some], dtype=torch.long) for some in (self._specials, self._specials.values()))
        return Table(torch.cat([table.own, own]), torch.cat([table.first, tokens]), self.size + 1, table.unfinished)

    def _spelled(self, text: bytes, exactly: bool = False) -> range:
        """Where, in the order of texts, the tokens are whose texts begin with, or are, a text."""
        start, end = _range(self._sorted, text)
        return range(start, bisect_right(self._sorted, text, start, end) if exactly else end)


def _range(texts: Sequence[bytes], beginning: bytes) -> tuple[int, int]:
    """The first and the last of sorted texts that begin with these bytes, and one more."""
    start, kept = bisect_left(texts, beginning), beginning.rstrip(b"\xff")
    behind = kept[:-1] + bytes([kept[-1] + 1]) if kept else b""  # the least text that is behind all of these
    return start, bisect_left(texts, behind, start) if behind else len(texts)


@dataclass(eq=False)
class Splits:
    """A row's draft: the target's tokens, and the draft model's tokens that spell them.

    drafted: the target's tokens. node: the last of them. text: the draft model's tokens up to the root of its tree.
    below: node of that tree -> token -> the child with it.
    unread: nodes of the draft model's tree, where the splits of the next token begin or go on, each with its place and
        the probability of its path; their distributions are not in `psi` yet.
    psi: (V + 2,) probabilities of the next token, by the splits that have been read, not normalised.
    unfinished: tokens of the draft model behind which its first token may change, the likeliest of each node: their
        probabilities, nodes and ids, their places, and the token that they count for.
    left: nodes that may still be read to follow these.
    """

    drafted: GrowingTree
    text: list[int]
    node: int = 0
    below: dict[int, dict[int, int]] = field(default_factory=dict)
    unread: list[tuple[int, Place, float]] = field(default_factory=list)
    psi: Tensor = field(default_factory=lambda: torch.empty(0))
    unfinished: list[tuple[float, int, int, Place, int]] = field(default_factory=list)
    left: int = 0


class SettledTexts(RenderedTexts):
    """The complete words of rows in a draft model's tokens; how the last one is split is left open, unless it is the
    only one."""

    def length(self, row: Row) -> int:
        return self.settled(row) or super().length(row)

    def text(self, row: Row, after: Sequence[int] = ()) -> list[int]:
        rendering = self.rendering(row, after)
        return rendering.ids or rendering.whole


@dataclass
class StringLevelRejection(StringDrafter):
    card = Card(
        paper="arXiv 2502.05202 (2025)",
        idea="A smaller model with another tokenizer drafts tokens by the probabilities of their strings.",
        family="draft model",
        needs=("draft model", "tokenizer"),
        cannot={"encoder-decoder": "its sources are in the target's tokens"},
        published="Described, and not measured: the splits of a string grow exponentially with its length.",
        also={
            "slrs": "",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(4, 1, 32)  # tokens of the target
    nodes: int = knob(16, 1, 256)  # tokens of the draft model read to follow the splits of one of them, at most
    beam: int = knob(4, 1, 64)  # of these in one pass
    least: float = knob(0.1, 0, 1)  # share of the probability that a beginning of a string needs to be followed

    @property
    def draws(self) -> Draws:
        return "one"

    @property
    def notes(self) -> list[str]:
        return ["the draft model has another tokenizer: it drafts by the probabilities of strings"]

    def room(self, budget: int) -> int:
        return LAST_WORD + self.nodes * min(budget, self.length) if budget > 0 else 0

    def _rendered(self, vocabularies: Vocabularies, target: Target) -> RenderedTexts:
        self._first = FirstTokens(vocabularies, target.vocabulary, self.reader.vocab_size)
        return SettledTexts(vocabularies, self.reader.vocab_size)

    def laws(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        return super().laws(rows, drafts, logits).cpu()

    def _growing(self, row: Row, budget: int, after: Sequence[int] = ()) -> GrowingTree:
        growing = super()._growing(row, budget, after)
        if growing.frontier:
            pending, text = [(after or row.tokens)[-1]], self._texts.text(row, after)
            drafted = GrowingTree(row, pending, 0, growing.budget, growing.deepest, after=after)
            context = self.reader.target.context
            growing.deepest = len(after) + (growing.room if context is None else context - len(text))
            growing.state = Splits(drafted, text)
            growing.frontier = self._begun(growing)
        return growing

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        growing.laws.update(zip(nodes, laws, strict=True))
        growing.frontier = []
        while not growing.frontier:
            growing.frontier = self._psi(growing)
            if not growing.frontier:
                path = self._drafted(growing)
                if not path:
                    return
                growing.frontier = [node for node in path if node not in growing.laws]

    def _begun(self, growing: GrowingTree) -> list[int]:
        """Begin the splits of the next token where the last word does; returns the nodes of the text as it is split so
        far, which have to be read; none where the draft ends."""
        splits = growing.state
        rendering = self._texts.rendering(growing.row, splits.drafted.path(splits.node))
        whole, begun, words = rendering.whole, len(splits.text), len(rendering.ids)
        if whole[:begun] != splits.text:
            return []
        path = [growing.root]
        for token in whole[begun:]:
            if (child := self._child(growing, path[-1], token)) is None:
                return []
            path.append(child)
        base, place = path[-1], Place(b"")
        if words >= begun:
            stripped = rendering.first and rendering.word and rendering.vocabularies.reverse.strips
            awaited = Place(b" " + rendering.word if stripped else rendering.word)
            if self._first.spelled(awaited, whole[words:]):
                base, place = path[words - begun], awaited
        splits.unread, splits.unfinished, splits.left = [(base, place, 1.0)], [], self.nodes
        splits.psi = torch.zeros(self._first.size + 2, dtype=torch.float64)
        return path

    def _child(self, growing: GrowingTree, node: int, own: int) -> int | None:
        """The node behind another with a token of the draft model; None where there is no room for it."""
        below = growing.state.below.setdefault(node, {})
        if own not in below:
            if growing.room == 0 or growing.depth[node] >= growing.deepest:
                return None
            (below[own],) = growing.add(node, [own])
        found: int = below[own]
        return found

    def _psi(self, growing: GrowingTree) -> list[int]:
        """Add the nodes that have been read to `psi`; returns those to read before the next token is drafted."""
        splits = growing.state
        for node, place, probability in splits.unread:  # which grows
            self._add(growing, node, place, probability)
        splits.unread.clear()
        least = self.least * float(splits.psi[: self._first.size + 1].sum())
        followed = []
        for one in sorted(splits.unfinished, reverse=True)[: min(self.beam, splits.left)]:
            value, node, own, place, token = one
            if value > 0 and value >= least and (child := self._child(growing, node, own)) is not None:
                followed.append(child)
                splits.unfinished.remove(one)
                splits.unread.append((child, place, value))
                splits.psi[token] -= value
        splits.left -= len(followed)
        return followed

    def _add(self, growing: GrowingTree, node: int, place: Place, probability: float) -> None:
        """Add the distribution at a node to `psi`, but for the tokens that were read behind it."""
        splits, law, table = growing.state, growing.laws[node], self._first.table(place)
        weights = law[table.own].double() * probability
        other = float(law.sum(dtype=torch.float64)) * probability - float(weights.sum())
        values, at = weights[table.unfinished].topk(
            min(self.nodes + len(splits.below.get(node, ())), len(table.unfinished))
        )
        places = table.unfinished[at]
        found = zip(values.tolist(), table.own[places].tolist(), table.first[places].tolist(), strict=True)
        likeliest = {own: (value, token) for value, own, token in found}
        for own, child in splits.below.get(node, {}).items():
            later = self._first.advanced(place, own)
            if child in growing.laws and later is not None and self._first.unfinished(later):
                value = float(law[own]) * probability
                splits.unread.append((child, later, value))
                weights[table.own == own] = 0.0
                likeliest.pop(own, None)
        splits.psi.index_add_(0, table.first, weights)
        splits.psi[table.other] += max(other, 0.0)
        for own, (value, token) in likeliest.items():
            later = self._first.advanced(place, own)
            assert later is not None
            splits.unfinished.append((value, node, own, later, token))

    def _drafted(self, growing: GrowingTree) -> list[int]:
        """Draft a token by `psi`, and begin the splits of the one behind it; see `_begun`."""
        splits, row = growing.state, growing.row
        drafted, node, psi = splits.drafted, splits.node, splits.psi[: self._first.size].clamp_(min=0.0)
        scores = (psi / psi.max()).float().log().to(self.reader.device)
        law = laws_of([row], [drafted.path(node)], scores[None])[0]
        drafted.end_level(drafted.add(node, self.chosen(drafted, node, law), law))
        if not drafted.frontier:
            return []
        (splits.node,) = drafted.frontier
        return self._begun(growing)

    def finished(self, growing: GrowingTree) -> DraftTree:
        if growing.state is None:
            return DraftTree.chain((growing.after or growing.row.tokens)[-1])
        return super().finished(growing.state.drafted)
