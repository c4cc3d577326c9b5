"""What a rule is, and the walk that applies it to a batch of trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from truedraft.card import Card, Guarantee
from truedraft.chance import Chance
from truedraft.sampling import History, Laws
from truedraft.stopping import Stops
from truedraft.tree import Accepted, DraftTree, Row, Scores


@dataclass
class Offer:
    """What the draft offers below a node: the children's tokens and the law that they were drawn from, if any."""

    tokens: tuple[int, ...]
    dist: Tensor | None


class Rule(ABC):
    """Says the next token at a node; the draft is accepted as far as it says the same.

    guarantee: `tokens` (identical to the reference for a given seed), `distribution`, or `none` (lossy).
    samples: whether the rule draws from the law, as `do_sample=True` asks.
    """

    card: ClassVar[Card]
    guarantee: ClassVar[Guarantee]
    samples: ClassVar[bool]

    @abstractmethod
    def choose(self, scores: Tensor, offers: Sequence[Offer], rows: Sequence[Row], chance: Chance) -> list[int]:
        """The next token of each row.

        scores: (k, V) processed scores at the node where each row stands.
        offers: the k nodes' children.
        """


def walk(
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    scores: Scores,
    laws: Laws,
    rule: Rule,
    stops: Stops,
    chance: Chance,
    history: History,
) -> list[Accepted]:
    """Follow every row's tree from its root for as long as the rule says what the draft says; emit as it goes.

    Only nodes on accepted paths are ever judged, each after the tokens before it were emitted, so processors and
    criteria see the prefixes that plain decoding would show them.
    """
    in_step = laws.in_step or stops.in_step
    paths: list[list[int]] = [[0] for _ in rows]
    alive = list(range(len(rows)))
    while alive:
        standing = [rows[i] for i in alive]
        nodes = [paths[i][-1] for i in alive]
        raw = scores.logits[0, nodes[0]][None] if len(rows) == 1 else scores.logits[alive, nodes]
        offers = [_offer(trees[i], node) for i, node in zip(alive, nodes, strict=True)]
        tokens = rule.choose(laws(standing, raw), offers, standing, chance)
        for row, token in zip(standing, tokens, strict=True):
            history.append(row, token)
        stops(standing)
        goes_on = [not row.ended for row in standing]
        if stops.keep_ended and any(goes_on):
            goes_on = [True] * len(standing)
        below = {
            i: trees[i].child(node, token)
            for i, node, token, on in zip(alive, nodes, tokens, goes_on, strict=True)
            if on
        }
        if in_step and None in below.values():
            break
        alive = [i for i, child in below.items() if child is not None]
        for i in alive:
            paths[i].append(below[i])  # type: ignore[arg-type]
    if stops.keep_ended and not all(row.ended for row in rows):
        ended = [False] * len(rows)
    else:
        ended = [row.ended for row in rows]
    return [Accepted(tuple(path), row.tokens[-1], e) for path, row, e in zip(paths, rows, ended, strict=True)]


def _offer(tree: DraftTree, node: int) -> Offer:
    children = [c for c in tree.shape.children[node] if c not in tree.probes]
    return Offer(tuple(tree.tokens[c] for c in children), None if tree.dist is None else tree.dist[node])
