"""What passes between the parts: a draft tree, the scores of its nodes, what was accepted of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from truedraft.request import Request

# How the children of a node come about. certain: fixed by the context (lookup, top-k); one: a single child, drawn;
# independent: each drawn by itself; distinct: drawn in order, without replacement; last: all fixed but the last, which
# is drawn from what they leave.
Draws = Literal["certain", "one", "independent", "distinct", "last"]

# Which drafts serve a rule best: the likeliest tokens, those that the target's own noise draws from the drafter's law,
# or tokens drawn freely from that law, which the rule judges by it.
Wanted = Literal["likeliest", "noise", "law"]

CHECKS = os.environ.get("TRUEDRAFT_CHECK", "") not in ("", "0")


@dataclass(frozen=True, eq=False)
class Shape:
    """What follows from the parents alone; made once per distinct tree shape."""

    parent: tuple[int, ...]
    depth: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]  # 0 for a first child, 1 for a second, ...
    run: tuple[int, ...]  # how many of the first nodes, 0, 1, 2 ..., a node's path begins with
    extras: tuple[tuple[int, ...], ...]  # the rest of its path

    @cached_property
    def mask(self) -> Tensor:
        """(n, n) bool: mask[i, j] where j is i or an ancestor of i."""
        mask = torch.eye(len(self.parent), dtype=torch.bool)
        for i in range(1, len(self.parent)):
            mask[i] |= mask[self.parent[i]]
        return mask


@lru_cache(maxsize=4096)
def shape_of(parent: tuple[int, ...]) -> Shape:
    n = len(parent)
    depth, order, run = [0] * n, [0] * n, [1] * n
    children: list[list[int]] = [[] for _ in range(n)]
    extras: list[tuple[int, ...]] = [()] * n
    for i in range(1, n):
        p = parent[i]
        depth[i] = depth[p] + 1
        order[i] = len(children[p])
        children[p].append(i)
        if not extras[p] and run[p] == i:
            run[i] = i + 1
        else:
            run[i], extras[i] = run[p], (*extras[p], i)
    return Shape(parent, tuple(depth), tuple(map(tuple, children)), tuple(order), tuple(run), tuple(extras))


@dataclass(frozen=True, eq=False)
class DraftTree:
    """The pending token (node 0) and candidate tokens below it. A chain is a tree.

    tokens: (n,) token ids; node 0 is the last emitted token, not yet in the KV cache.
    parent: (n,) index of each node's parent; `parent[0] == -1`, `parent[i] < i`.
    dist: entry i is the (V,) law that the drawn children of node i were drawn from, None where it has none; None for
        the whole where all children are certain, that is, point masses.
    draws: how children come about.
    probes: nodes that are read but never verified (mask tokens, prompt tokens, window entries).
    confidence: (n,) the chance of each node to be right if its parent is, as the drafter has learnt it; None where it
        has not. The root's is 1.
    """

    tokens: tuple[int, ...]
    parent: tuple[int, ...]
    dist: tuple[Tensor | None, ...] | None = None
    probes: frozenset[int] = field(default_factory=frozenset)
    draws: Draws = "certain"
    confidence: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if CHECKS:
            self.check()

    def check(self) -> None:
        """Raises ValueError where the tree breaks its own contract; run on every tree when TRUEDRAFT_CHECK is set."""
        n = len(self.tokens)
        if n == 0 or len(self.parent) != n:
            raise ValueError(f"{n} tokens need as many parents, got {len(self.parent)}")
        if self.parent[0] != -1 or any(not 0 <= p < i for i, p in enumerate(self.parent[1:], 1)):
            raise ValueError(f"parents must be -1 for the root and point backwards, got {self.parent}")
        if 0 in self.probes or any(not 0 < i < n for i in self.probes):
            raise ValueError(f"probes must be nodes below the root, got {sorted(self.probes)} of {n} nodes")
        if any(p in self.probes and i not in self.probes for i, p in enumerate(self.parent)):
            raise ValueError("a verified node cannot hang below a probe")
        if (self.dist is None) != (self.draws == "certain"):
            raise ValueError(f"dist belongs to drawn children, and draws is {self.draws!r}")
        if self.dist is not None and len(self.dist) != n:
            raise ValueError(f"dist needs one law per node, got {len(self.dist)} for {n} nodes")
        if self.confidence is not None and (len(self.confidence) != n or not all(0 <= h <= 1 for h in self.confidence)):
            raise ValueError(f"confidence needs one chance per node, got {self.confidence} for {n} nodes")

    @classmethod
    def chain(cls, root: int, draft: Iterable[int] = (), confidence: Iterable[float] | None = None) -> DraftTree:
        """The pending token `root` followed by `draft`, each token the only child of the one before.

        confidence: of the drafted tokens.
        """
        tokens = (root, *draft)
        return cls(tokens, _chain_parents(len(tokens)), confidence=None if confidence is None else (1.0, *confidence))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> Shape:
        return shape_of(self.parent)

    @property
    def drafted(self) -> int:
        """Nodes that stand for verification: neither the root nor probes."""
        return len(self.tokens) - 1 - len(self.probes)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one to verify."""
        child = node
        for _ in range(self.parent.count(node)):
            child = self.parent.index(node, child + 1)
            if self.tokens[child] == token and child not in self.probes:
                return child
        return None

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root to `node`, both included."""
        steps = [node]
        while (node := self.parent[node]) >= 0:
            steps.append(node)
        return tuple(reversed(steps))

    def cut(self, nodes: int) -> DraftTree:
        """The first `nodes` nodes: closed under parents, since parents come first."""
        if nodes >= len(self):
            return self
        return DraftTree(
            self.tokens[:nodes],
            self.parent[:nodes],
            None if self.dist is None else self.dist[:nodes],
            frozenset(i for i in self.probes if i < nodes) if self.probes else self.probes,
            self.draws,
            None if self.confidence is None else self.confidence[:nodes],
        )

    def bare(self) -> DraftTree:
        """The nodes that stand for verification alone."""
        return self._kept([i for i in range(len(self)) if i not in self.probes]) if self.probes else self

    def drafting(self, nodes: int) -> DraftTree:
        """The first `nodes` nodes that stand for verification, and the probes below them and the root."""
        chosen = [0]
        for i in range(1, len(self)):
            if self.parent[i] in chosen and (i in self.probes or nodes > 0):
                chosen.append(i)
                nodes -= i not in self.probes
        return self if len(chosen) == len(self) else self._kept(chosen)

    def shallow(self, depth: int) -> DraftTree:
        """The nodes at most `depth` below the root; probes of kept nodes may be lost with their depth."""
        if len(self) <= depth or max(self.shape.depth) <= depth:
            return self
        return self._kept([i for i, d in enumerate(self.shape.depth) if d <= depth])

    def _kept(self, nodes: Sequence[int]) -> DraftTree:
        """Some of the nodes; a node whose parent is left out must be left out too."""
        new = {old: i for i, old in enumerate(nodes)}
        return DraftTree(
            tuple(self.tokens[i] for i in nodes),
            tuple(new.get(self.parent[i], -1) for i in nodes),
            None if self.dist is None else tuple(self.dist[i] for i in nodes),
            frozenset(new[i] for i in self.probes if i in new),
            self.draws,
            None if self.confidence is None else tuple(self.confidence[i] for i in nodes),
        )


@lru_cache(maxsize=1024)
def _chain_parents(n: int) -> tuple[int, ...]:
    return tuple(range(-1, n - 1))


@dataclass(frozen=True)
class Prompt:
    """What a row begins with: token ids, or embeddings (length, H) in their place.

    states, heard: of an encoder-decoder, (source length, H) what the encoder made of the row's source, and (source
        length,) 0 where that is padding.
    source: the token ids of that source, without padding; empty where there is none, or it is no text.
    """

    ids: Tensor | None = None
    embeds: Tensor | None = None
    states: Tensor | None = None
    heard: Tensor | None = None
    source: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids) if self.ids is not None else len(self.embeds)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Taps:
    """What a drafter asks to see of every pass, besides the logits.

    hidden: layers whose output is wanted, as in `output_hidden_states`: 0 the embeddings, -1 the last, normed.
    """

    hidden: tuple[int, ...] = ()

    def __or__(self, other: Taps) -> Taps:
        return Taps(tuple(sorted({*self.hidden, *other.hidden})))


@dataclass(frozen=True, eq=False)
class Scores:
    """What one pass of the target says.

    logits: (rows, width, V) raw logits at every node; rows with fewer nodes are padded at the end.
    hidden: layer -> one (m, H) tensor per row, for the layers tapped; the nodes are its last entries.
    context: (rows,) positions in `hidden` before node 0: the prompt but its last token after a prefill, else 0.
    """

    logits: Tensor
    hidden: dict[int, list[Tensor]]
    context: Sequence[int]

    def of(self, places: Sequence[int]) -> Scores:
        """Those of some rows, in their order; without a copy where they are neighbours."""
        if len(places) == len(self.context):
            return self
        together = places[-1] - places[0] == len(places) - 1
        logits = self.logits[places[0] : places[-1] + 1] if together else self.logits[list(places)]
        hidden = {layer: [states[i] for i in places] for layer, states in self.hidden.items()}
        return Scores(logits, hidden, [self.context[i] for i in places])


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of prompts that were read one after another, in their order."""
    if len(parts) == 1:
        return parts[0]
    return Scores(
        torch.cat([part.logits for part in parts]),
        {layer: [state for part in parts for state in part.hidden[layer]] for layer in parts[0].hidden},
        [n for part in parts for n in part.context],
    )


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of one row's tree and the token that follows it.

    path: node indices from the root (0) on; their KV becomes permanent.
    token: the correction or bonus token, the next pending token.
    ended: the row leaves the batch.
    """

    path: tuple[int, ...]
    token: int
    ended: bool


@dataclass(eq=False)
class Row:
    """One sequence in the engine.

    index: its place in the caller's batch.
    tokens: prompt and emitted tokens, without padding; the last one is the pending token.
    prompt: how many of them are prompt.
    room: how many more tokens may be emitted, at most.
    references: token ids of documents that the output may copy from; `stores/references.py` reads them bit by bit.
    ends: tokens that end the row.
    end: length of `tokens` where the row ended; padding may stand behind it while other rows go on.
    namespace: whose row it is; what is kept of it for later rows is offered to rows of the same namespace alone.
    given: what the target reads before the first pass; of an encoder-decoder with the states of its source.
    request: what it came with, a `Request`, while it runs.
    slot: its slot in the target's cache while it runs; it changes when another row leaves.
    """

    index: int
    tokens: list[int]
    prompt: int
    room: int
    references: Sequence[tuple[int, ...]] = ()
    ends: frozenset[int] = frozenset()
    end: int | None = None
    namespace: str = ""
    given: Prompt | None = None
    request: Request = None  # type: ignore[assignment]
    slot: int = -1

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def step(self) -> int:
        """Tokens emitted so far: the step of `transformers` generate that samples the next one."""
        return len(self.tokens) - self.prompt

    @property
    def source(self) -> tuple[int, ...]:
        """Token ids of the source of an encoder-decoder; empty where there is none, or it is no text."""
        return () if self.given is None else self.given.source
