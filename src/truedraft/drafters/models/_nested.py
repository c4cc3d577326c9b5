"""Nested verification: a draft model verifies in one pass what was drafted for it, and does not decode by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from truedraft.chance import likeliest
from truedraft.drafters._base import Drafter
from truedraft.drafters._candidates import keys_of
from truedraft.drafters._growing import by_logits, laws_of
from truedraft.drafters.models._reader import Reader
from truedraft.tree import DraftTree, Row


@dataclass(eq=False)
class GrowingChain:
    """One row's draft while it grows.

    most: most tokens of it. drafted: its tokens. over: whether it has ended, so that no token may follow.
    """

    row: Row
    most: int
    drafted: list[int] = field(default_factory=list)
    over: bool = False

    @property
    def last(self) -> int:
        """The last token of the row and the draft."""
        return self.drafted[-1] if self.drafted else self.row.tokens[-1]

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens up to one that ends the text, or to -1, which ends the draft."""
        for token in tokens:
            if not self.over:
                self.over = token < 0 or token in self.row.ends
                self.drafted += [token] if token >= 0 else []

    def truncate(self, length: int) -> list[int]:
        """Remove and return its tokens beyond the first `length`."""
        later, self.drafted, self.over = self.drafted[length:], self.drafted[:length], False
        return later

    def readable(self, reader: Reader) -> bool:
        """Whether a draft model can read the row with a full draft."""
        return self.row in reader.slot_rows and reader.fits(self.row, self.most)


class Verified(NamedTuple):
    """What a draft model accepted of a tree.

    tokens: those accepted, and the one that it predicts after them, -1 where it allows none.
    logits: (nodes, V) raw, at all nodes of the tree.
    """

    tokens: list[int]
    logits: Tensor


def verified(
    drafter: Drafter, reader: Reader, drafts: Sequence[GrowingChain], trees: Sequence[DraftTree], lenience: float = 1.0
) -> list[Verified]:
    """Verify a tree behind each draft by a draft model, in one pass.

    A token is accepted, or predicted, if it has the largest probability after multiplication of those of drafted ones
    by `lenience`; with the target's noise where the row's rule draws by it.
    """
    slots = [reader.slot_rows.index(draft.row) for draft in drafts]
    texts: list[list[int] | None] = [None] * len(reader.slot_rows)
    for slot, draft in zip(slots, drafts, strict=True):
        texts[slot] = draft.row.tokens + draft.drafted
    reader.follow(texts)
    unread: list[list[int]] = [
        [] if text is None else text[len(written) :] for text, written in zip(texts, reader.written, strict=True)
    ]
    read = [DraftTree.chain(0)] * len(texts)
    for slot, tree in zip(slots, trees, strict=True):
        read[slot] = _behind(unread[slot][:-1], tree)
    logits = reader.score(read)
    at_nodes = [logits[slot, len(unread[slot]) - 1 : len(read[slot])] for slot in slots]
    paths, tokens = _walked(drafter, drafts, trees, at_nodes, lenience)
    kept: list[list[int]] = [[] for _ in texts]
    for slot, path, accepted in zip(slots, paths, tokens, strict=True):
        before = len(unread[slot]) - 1
        kept[slot] = [*range(before), *(before + node for node in path)]
        unread[slot] += accepted[:-1]
    reader.keep(unread, kept)
    return [Verified(*each) for each in zip(tokens, at_nodes, strict=True)]


def _behind(tokens: Sequence[int], tree: DraftTree) -> DraftTree:
    """A tree below the last of some tokens, all of it nodes."""
    n = len(tokens)
    below = tree.parent[1:] if n == 0 else [n + parent for parent in tree.parent[1:]]
    return DraftTree((*tokens, *tree.tokens), (*range(-1, n), *below))


def _walked(
    drafter: Drafter, drafts: Sequence[GrowingChain], trees: Sequence[DraftTree], logits: Sequence[Tensor],
    lenience: float,
) -> tuple[list[list[int]], list[list[int]]]:  # fmt: skip
    """By draft, the accepted path from the root on, and the tokens that were predicted along it."""
    paths, tokens = [[0] for _ in drafts], [list[int]() for _ in drafts]
    walking = []
    for k, (draft, tree) in enumerate(zip(drafts, trees, strict=True)):
        if lenience == 1.0 and by_logits(drafter, draft.row):
            paths[k], tokens[k] = _likeliest(tree, logits[k])
        else:
            walking.append(k)
    while walking:
        rows, contexts = [drafts[k].row for k in walking], [drafts[k].drafted + tokens[k] for k in walking]
        laws = laws_of(rows, contexts, torch.stack([logits[k][paths[k][-1]] for k in walking]))
        moved = []
        for k, law, row, context in zip(walking, laws, rows, contexts, strict=True):
            tree, node = trees[k], paths[k][-1]
            proposed = [tree.tokens[child] for child in tree.shape.children[node] if child not in tree.probes]
            law[proposed] *= lenience
            tokens[k] += likeliest(keys_of(drafter, row, law[None], [len(context)])[0], 1) or [-1]
            if (child := tree.child(node, tokens[k][-1])) is not None:
                paths[k].append(child)
                moved.append(k)
        walking = moved
    return paths, tokens


def _likeliest(tree: DraftTree, logits: Tensor) -> tuple[list[int], list[int]]:
    """The path along the largest logits, and the tokens that have them, -1 where there is none."""
    path, tokens = [0], list[int]()
    while True:
        best, token = logits[path[-1]].max(-1)
        tokens.append(int(token) if best.isfinite() else -1)
        if (child := tree.child(path[-1], tokens[-1])) is None:
            return path, tokens
        path.append(child)
