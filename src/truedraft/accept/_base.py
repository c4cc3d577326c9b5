"""What a rule is, and the walk that applies it to a batch of trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.card import Card, Guarantee
from truedraft.chance import Chance
from truedraft.errors import Refused
from truedraft.sampling import Laws
from truedraft.stats import Attribution
from truedraft.stopping import Stops
from truedraft.tree import Accepted, DraftTree, Draws, Row, Scores, Taps, Wanted


@dataclass
class Candidates:
    """What the draft offers below a node.

    tokens: the children's, in the order in which they came about.
    draws: how they did.
    dist: (V,) the law that those were drawn from that were drawn; None where none was.
    """

    tokens: tuple[int, ...]
    draws: Draws = "certain"
    dist: Tensor | None = None

    @property
    def fixed(self) -> int:
        """How many of the first tokens are certain."""
        if self.dist is None:
            return len(self.tokens)
        return max(len(self.tokens) - 1, 0) if self.draws == "last" else 0


class Rule(ABC):
    """Says the next token at a node; the draft is accepted as far as it says the same.

    guarantee: `tokens` (identical to the reference for a given seed), `distribution`, or `none` (lossy: a rule under
        `accept/lossy`, reached by asking for it).
    samples: whether the rule draws from the law, as `do_sample=True` asks.
    preferred_drafts: the drafts that serve it best.
    takes: what it can judge; None for whatever is drafted.
    needs: what it asks to see of every pass.
    takes_references: whether it looks into documents that the caller gives.
    """

    card: ClassVar[Card]
    guarantee: ClassVar[Guarantee]
    samples: ClassVar[bool]
    preferred_drafts: ClassVar[Wanted]
    takes: ClassVar[frozenset[Draws] | None] = None
    needs: Taps = Taps()
    takes_references: ClassVar[bool] = False

    def fit(self, model: PreTrainedModel) -> None:
        """Once it is known whose text it judges.

        Raises:
            Refused: it cannot judge this model's.
        """

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Before a call: texts of its own, in the model's tokens.

        Raises:
            Refused: it needs a tokenizer, or a knob makes no sense.
        """

    def ready(self, laws: Laws) -> None:
        """Before the first pass of a call.

        Raises:
            Refused: what the call asks for cannot be had with this rule.
        """

    def extra(self, width: int) -> int:
        """Nodes that `add_probes` adds to a draft of so many, at most."""
        return 0

    def add_probes(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Drafts with what the rule wants to read besides: probes."""
        return list(trees)

    def see(self, scores: Scores, rows: Sequence[Row], trees: Sequence[DraftTree]) -> None:
        """Every pass before anything of it is accepted, with what the rule `needs` of it."""

    @abstractmethod
    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        """The next token of each row, -1 where its scores are NaN.

        scores: (k, V) processed scores at the node where each row stands.
        candidates: the k nodes' children.
        """

    def ahead(
        self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> list[list[int]] | None:
        """The token at every node at once, where it can be known before the walk and that costs less; else None.

        A rule that judges drafts as a whole looks at them here.

        logits: (rows, nodes, V) raw.
        """
        return None

    def keys(self, scores: Tensor, chance: Chance) -> Tensor | None:
        """Like the scores, what the tokens just chosen are the largest of; None where they are not so chosen.

        scores: (k, V) that `choose` was given, or (rows, nodes, V) that `ahead` was.
        """
        return None

    def floor(self, best: Tensor, margin: float) -> Tensor:
        """What the largest keys might fall to if scores fell by `margin`."""
        return best - margin

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        """Every pass as it was, after the walk."""

    def attributions(self) -> tuple[Attribution, ...]:
        """After a call: which spans of what was said stand where in given documents."""
        return ()


def walk(
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    scores: Scores,
    said: Sequence[Sequence[int]] | None,
    laws: Laws,
    rule: Rule,
    stops: Stops,
    chance: Chance,
    pad: int,
) -> list[Accepted]:
    """Follow every row's tree from its root for as long as the rule says what the draft says; emit as it goes.

    Only nodes on accepted paths are ever judged, each after the tokens before it were emitted, so processors and
    criteria see the prefixes that plain decoding would show them.

    said: the rule's token at every node, where it is known already.
    """
    if said is not None and not stops.lockstep:
        return [_followed(row, tree, tokens, stops) for row, tree, tokens in zip(rows, trees, said, strict=True)]
    paths: list[list[int]] = [[0] for _ in rows]
    alive = list(range(len(rows)))
    while alive:
        standing = [rows[i] for i in alive]
        nodes = [paths[i][-1] for i in alive]
        if said is not None:
            tokens = [said[i][node] for i, node in zip(alive, nodes, strict=True)]
        else:
            candidates = [_candidates(trees[i], node) for i, node in zip(alive, nodes, strict=True)]
            tokens = rule.choose(laws(standing, scores.logits[alive, nodes]), candidates, standing, chance)
        _check(min(tokens))
        for row, token in zip(standing, tokens, strict=True):
            row.tokens.append(pad if row.ended and stops.pads else token)
        stops(standing)
        below = [
            None if row.ended and not stops.lockstep else trees[i].child(node, row.tokens[-1])
            for row, i, node in zip(standing, alive, nodes, strict=True)
        ]
        if stops.lockstep and (None in below or all(row.ended for row in standing)):
            break
        alive = [i for i, child in zip(alive, below, strict=True) if child is not None]
        for i, child in zip(alive, filter(None, below), strict=True):
            paths[i].append(child)
    over = all(row.ended for row in rows)
    return [
        Accepted(tuple(path), row.tokens[-1], over if stops.lockstep else row.ended)
        for path, row in zip(paths, rows, strict=True)
    ]


def _followed(row: Row, tree: DraftTree, said: Sequence[int], stops: Stops) -> Accepted:
    """The same for one row by itself, where the token at every node is known."""
    path: list[int] = []
    below: int | None = 0
    while below is not None:
        path.append(below)
        token = said[below]
        _check(token)
        row.tokens.append(token)
        stops((row,))
        below = None if row.ended else tree.child(path[-1], token)
    return Accepted(tuple(path), row.tokens[-1], row.ended)


def _check(token: int) -> None:
    if token < 0:
        raise Refused("the target's logits are NaN: check its weights and dtype (float16 overflows)")


def first_children(tree: DraftTree) -> list[int]:
    """The nodes from the root down the first children, probes left out."""
    nodes = [0]
    while below := [c for c in tree.shape.children[nodes[-1]] if c not in tree.probes]:
        nodes.append(below[0])
    return nodes


def _candidates(tree: DraftTree, node: int) -> Candidates:
    children = [c for c in tree.shape.children[node] if c not in tree.probes]
    return Candidates(
        tuple(tree.tokens[c] for c in children), tree.draws, None if tree.dist is None else tree.dist[node]
    )
