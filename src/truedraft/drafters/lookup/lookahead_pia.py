"""Lookahead (Alipay): draft a tree of many continuations of the last tokens in the prompt and in earlier outputs.

Zhao et al., "Lookahead: An Inference Acceleration Framework for Large Language Model with Lossless Generation
Accuracy", 2023 (arXiv 2312.12728). Branches are what followed the last tokens in the row's own text and in the outputs
of earlier rows (of the same namespace), most frequent first, the own text before all others. It gains with requests
that resemble each other: templates, retrieval over the same pages. Branches are held in suffix automata, which contain
the windows that the paper inserts into tries, and are evicted by age instead of being pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._trees import frequency_tree, root_of
from truedraft.drafters.lookup._copying import WithMemory
from truedraft.drafters.lookup._texts import RowText
from truedraft.stores.memory import Places
from truedraft.stores.union import union
from truedraft.tree import DraftTree, Row


@dataclass
class LookaheadPia(WithMemory):
    card = Card(
        paper="arXiv 2312.12728 (2023)",
        idea="Draft all branches that followed the last tokens, here first, then in earlier outputs.",
        family="retrieval",
        presets={"lookahead-pia-12": {"branch": 12}},
        published="2.66x to 6.26x; Llama 2 7B 2.0x to 2.8x on Dolly and GSM8K, up to 5.36x in production (A100).",
    )
    branch: int = knob(8, 1, 128)  # tokens of a branch; published 8 in the code, 12 to 32 in runs
    nodes: int = knob(64, 1, 1024)  # of the tree, the paper's decoding length; published 64
    outputs: float = knob(1e-4, 0, 1)  # weight of earlier outputs, relative to the row's own text; published 1e-4
    memory: int = knob(4_000_000, 1, 1_000_000_000)  # tokens of earlier outputs kept; published 65,536 nodes a trie

    @property
    def width(self) -> int:
        return self.nodes

    def draft(self, row: Row, state: tuple[RowText, Places], after: Sequence[int], budget: int) -> DraftTree:
        text, places = state
        text.follow(row)
        sources = text.places(after, self.branch)
        weights = [1 - self.outputs] * len(sources)
        for automaton, cursor in places.following(self._outputs.of(row.namespace), row.tokens, after):
            automaton.shorten(cursor, self.branch)
            sources.append((automaton, cursor))
            weights.append(self.outputs)
        nodes = min(self.nodes, budget)
        enough = min(self.branch, nodes)
        matches = [automaton.suffixes(cursor) for automaton, cursor in sources]
        root = root_of(row, after)
        lengths = sorted({length for suffixes in matches for length, _ in suffixes}, reverse=True)
        for length in lengths:
            counts = [_times(suffixes, length) for suffixes in matches]
            last = length == lengths[-1]
            if not last and sum(counts) * self.branch <= enough:
                continue
            trees = [DraftTree.chain(root, (), ()) for _ in sources]
            for k, ((automaton, cursor), count) in enumerate(zip(sources, counts, strict=True)):
                if count:
                    automaton.shorten(cursor, length)
                    trees[k] = frequency_tree(root, automaton.grow(cursor, nodes, deep=self.branch), count, length)
            if last or sum(tree.drafted for tree in trees) > enough:
                tree = union(trees, nodes, weights).tree
                if last or tree.drafted >= enough:
                    return tree
        return DraftTree.chain(root, (), ())


def _times(suffixes: Sequence[tuple[int, int]], length: int) -> int:
    """Occurrences of the last `length` tokens in a text, from the lengths and counts of the matched suffixes."""
    return next((count for found, count in reversed(suffixes) if found >= length), 0)
