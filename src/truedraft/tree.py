"""What passes between the parts: a draft tree, the scores of its nodes, what was accepted of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

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
PreferredDrafts = Literal["likeliest", "noise", "law"]

T = TypeVar("T")
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


def _first(nodes: Sequence[int]) -> bool:
    """Whether some nodes are the first ones, which keep their numbers."""
    return isinstance(nodes, range)


def _entries(values: tuple[T, ...], nodes: Sequence[int]) -> tuple[T, ...]:
    return values[: len(nodes)] if _first(nodes) else tuple(values[i] for i in nodes)


def _parents(parent: tuple[int, ...], nodes: Sequence[int]) -> tuple[int, ...]:
    if _first(nodes):
        return parent[: len(nodes)]
    new = {old: i for i, old in enumerate(nodes)}
    return tuple(new.get(parent[i], -1) for i in nodes)


def _members(members: frozenset[int], nodes: Sequence[int]) -> frozenset[int]:
    return frozenset(i for i, old in enumerate(nodes) if old in members)


def _keyed(values: dict[int, T], nodes: Sequence[int]) -> dict[int, T]:
    return {i: values[old] for i, old in enumerate(nodes) if old in values}


def by_node(select: Callable[[Any, Sequence[int]], Any]) -> dict[str, Any]:
    """Metadata of a tree's field with values of its nodes. select: (value, some of the nodes) -> the value of these."""
    return {"select": select}


@cache
def _selections(kind: type) -> tuple[tuple[str, Callable[[Any, Sequence[int]], Any]], ...]:
    return tuple((f.name, f.metadata["select"]) for f in fields(kind) if "select" in f.metadata)


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
    embeds: probe -> (H,) the input embedding that is read there in the place of its token's, for probes that are no
        tokens (trained mask and prompt embeddings).
    """

    tokens: tuple[int, ...] = field(metadata=by_node(_entries))
    parent: tuple[int, ...] = field(metadata=by_node(_parents))
    dist: tuple[Tensor | None, ...] | None = field(default=None, metadata=by_node(_entries))
    probes: frozenset[int] = field(default_factory=frozenset, metadata=by_node(_members))
    draws: Draws = "certain"
    confidence: tuple[float, ...] | None = field(default=None, metadata=by_node(_entries))
    embeds: dict[int, Tensor] = field(default_factory=dict, metadata=by_node(_keyed))

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
        self.check_embeds()
        if (self.dist is None) != (self.draws == "certain"):
            raise ValueError(f"dist belongs to drawn children, and draws is {self.draws!r}")
        if self.dist is not None and len(self.dist) != n:
            raise ValueError(f"dist needs one law per node, got {len(self.dist)} for {n} nodes")
        if self.confidence is not None and (len(self.confidence) != n or not all(0 <= h <= 1 for h in self.confidence)):
            raise ValueError(f"confidence needs one chance per node, got {self.confidence} for {n} nodes")

    def check_embeds(self) -> None:
        """Raises ValueError where nodes that are to be verified have embeddings: they are tokens."""
        if self.embeds and not self.embeds.keys() <= self.probes:
            raise ValueError(
                f"embeddings are for probes, {sorted(self.probes)}, and nodes {sorted(self.embeds)} have one"
            )

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
        return self._kept(range(nodes))

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

    def with_probes(
        self, tokens: Sequence[int], parent: Sequence[int], embeds: Mapping[int, Tensor] | None = None
    ) -> DraftTree:
        """The tree with probes behind its nodes.

        parent: of each, among all nodes. embeds: by place among the new probes.
        """
        n, more = len(self), len(tokens)
        return self.replaced(
            tokens=(*self.tokens, *tokens),
            parent=(*self.parent, *parent),
            dist=None if self.dist is None else (*self.dist, *[None] * more),
            probes=self.probes.union(range(n, n + more)),
            confidence=None if self.confidence is None else (*self.confidence, *[0.0] * more),
            embeds=self.embeds | {n + i: vector for i, vector in (embeds or {}).items()},
        )

    def _kept(self, nodes: Sequence[int]) -> DraftTree:
        """Some of the nodes, a range of the first or a list; one whose parent is left out must be left out too."""
        kind: Any = type(self)
        values = ((name, getattr(self, name), select) for name, select in _selections(kind))
        return self.replaced(**{name: select(value, nodes) for name, value, select in values if value})

    def replaced(self, **changes: Any) -> Self:
        """A copy with some fields changed: `dataclasses.replace` in a third of its time, for every pass."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **changes)
        copy.__post_init__()
        return copy


@lru_cache(maxsize=1024)
def _chain_parents(n: int) -> tuple[int, ...]:
    return tuple(range(-1, n - 1))


@dataclass(frozen=True)
class Prompt:
    """What a row begins with: token ids, or embeddings (length, H) in their place.

    states, source_mask: of an encoder-decoder, the encoder's output (source length, H) for the source, and (source
        length,) 0 where that is padding.
    source: the token ids of that source, without padding; empty where there is none, or it is no text.
    """

    ids: Tensor | None = None
    embeds: Tensor | None = None
    states: Tensor | None = None
    source_mask: Tensor | None = None
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

    def after(self, tokens: Iterable[int]) -> Row:
        """A copy of the row as it will stand once it has emitted these tokens."""
        return replace(self, tokens=[*self.tokens, *tokens])

    @property
    def source(self) -> tuple[int, ...]:
        """Token ids of the source of an encoder-decoder; empty where there is none, or it is no text."""
        return () if self.given is None else self.given.source
