"""The data that the parts of the engine exchange: rows, draft trees, scores of a pass, accepted paths.

Everywhere: V is the size of the vocabulary, H that of a hidden state, n the number of nodes of a tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from truedraft.tree_shape import TreeShape, chain_parents, entries_of, keyed_of, members_of, parents_of, shape_of

if TYPE_CHECKING:
    from truedraft.request import Request

# How the children of a node were chosen. certain: fixed by the context (lookup, top-k); one: a single child, drawn;
# independent: drawn with replacement; distinct: drawn in order, without replacement; last: all fixed but the last,
# which is drawn from the law without these.
Draws = Literal["certain", "one", "independent", "distinct", "last"]

# Which drafts a rule accepts most of: likeliest: the drafter's likeliest tokens; noise: tokens drawn from the drafter's
# law with the noise that the target will draw with; law: tokens drawn from that law with independent noise.
PreferredDrafts = Literal["likeliest", "noise", "law"]

CHECKS = os.environ.get("TRUEDRAFT_CHECK", "") not in ("", "0")


def by_node(select: Callable[[Any, Sequence[int]], Any]) -> dict[str, Any]:
    """Metadata of a field with one entry per node. select: (the field's value, node indices) -> its value for these."""
    return {"select": select}


@cache
def _selections(cls: type) -> tuple[tuple[str, Callable[[Any, Sequence[int]], Any]], ...]:
    return tuple((f.name, f.metadata["select"]) for f in fields(cls) if "select" in f.metadata)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft: the pending token (node 0, the root) and candidate tokens below it. A chain is a tree.

    tokens: (n,) token ids; node 0 is the last emitted token, whose KV is not in the cache yet.
    parent: (n,) index of each node's parent; `parent[0] == -1`, `parent[i] < i`.
    dist: entry i is the (V,) distribution that the drawn children of node i were drawn from, None where it has none;
        None for the whole tree where `draws` is "certain" (point masses).
    probes: nodes that are read but never verified (mask tokens, prompt tokens, window entries).
    draws: how children were chosen; see `Draws`.
    confidence: (n,) the drafter's estimate, in [0, 1], that a node is right if its parent is; 1 for the root; or None.
    embeds: probe -> (H,) input embedding that replaces that of its token (trained mask and prompt embeddings).
    """

    tokens: tuple[int, ...] = field(metadata=by_node(entries_of))
    parent: tuple[int, ...] = field(metadata=by_node(parents_of))
    dist: tuple[Tensor | None, ...] | None = field(default=None, metadata=by_node(entries_of))
    probes: frozenset[int] = field(default_factory=frozenset, metadata=by_node(members_of))
    draws: Draws = "certain"
    confidence: tuple[float, ...] | None = field(default=None, metadata=by_node(entries_of))
    embeds: dict[int, Tensor] = field(default_factory=dict, metadata=by_node(keyed_of))

    def __post_init__(self) -> None:
        if CHECKS:
            self.check()

    def check(self) -> None:
        """Raises ValueError where the tree violates its contract; run on every tree when TRUEDRAFT_CHECK is set."""
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
        if self.confidence is not None and (len(self.confidence) != n or not all(0 <= c <= 1 for c in self.confidence)):
            raise ValueError(f"confidence needs one chance per node, got {self.confidence} for {n} nodes")

    def check_embeds(self) -> None:
        """Raises ValueError where a node that is not a probe has an embedding."""
        if self.embeds and not self.embeds.keys() <= self.probes:
            raise ValueError(
                f"embeddings are for probes, {sorted(self.probes)}, and nodes {sorted(self.embeds)} have one"
            )

    @classmethod
    def chain(cls, root: int, draft: Iterable[int] = (), confidence: Iterable[float] | None = None) -> DraftTree:
        """The pending token `root` followed by `draft`, each token the only child of the one before.

        confidence: one per drafted token.
        """
        if draft == () and not confidence:
            return _root(root, None if confidence is None else (1.0,))
        tokens = (root, *draft)
        return cls(tokens, chain_parents(len(tokens)), confidence=None if confidence is None else (1.0, *confidence))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of_shape(cls, tokens: tuple[int, ...], shape: TreeShape) -> DraftTree:
        """The tree of a shape that is at hand."""
        tree = cls(tokens, shape.parent)
        vars(tree)["shape"] = shape
        return tree

    @cached_property
    def shape(self) -> TreeShape:
        return shape_of(self.parent)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return self.parent == chain_parents(len(self.tokens))

    @property
    def drafted(self) -> int:
        """Number of nodes to verify: neither the root nor probes."""
        return len(self.tokens) - 1 - len(self.probes)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with this token, probes excluded; None where there is none."""
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
        """The tree of the first `nodes` nodes."""
        return self if nodes >= len(self.tokens) else self.subtree(range(nodes))

    def bare(self) -> DraftTree:
        """The tree without its probes."""
        return self.subtree([i for i in range(len(self)) if i not in self.probes]) if self.probes else self

    def drafting(self, nodes: int) -> DraftTree:
        """The tree of the first `nodes` nodes to verify, with the probes below these and the root."""
        chosen = [0]
        for i in range(1, len(self)):
            if self.parent[i] in chosen and (i in self.probes or nodes > 0):
                chosen.append(i)
                nodes -= i not in self.probes
        return self if len(chosen) == len(self) else self.subtree(chosen)

    def shallow(self, depth: int) -> DraftTree:
        """The tree of the nodes at depth `depth` or less; deeper probes are dropped too."""
        if len(self.tokens) <= depth or self.shape.height <= depth:
            return self
        return self.subtree([i for i, d in enumerate(self.shape.depth) if d <= depth])

    def with_probes(
        self, tokens: Sequence[int], parent: Sequence[int], embeds: Mapping[int, Tensor] | None = None
    ) -> DraftTree:
        """The tree with more probes after its nodes.

        tokens, parent: of the new probes; parents are indices into all nodes. embeds: by index among the new probes.
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

    def subtree(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes: a range from 0, or ascending indices that include each node's parent."""
        own, cls = self.__dict__, type(self)  # type: Any, Any
        changed: dict[str, Any] = {}
        for name, select in _selections(cls):
            if value := own[name]:
                changed[name] = select(value, nodes)
        return self.replaced(**changed)

    def replaced(self, **changes: Any) -> Self:
        """A copy with some fields changed: `dataclasses.replace` in a third of its time, for every pass."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **changes)
        if "parent" in changes:
            copy.__dict__.pop("shape", None)
        copy.__post_init__()
        return copy


@lru_cache(maxsize=4096)
def _root(token: int, confidence: tuple[float] | None) -> DraftTree:
    """The tree of a root alone; kept, since every row has one in every pass without drafts."""
    return DraftTree((token,), (-1,), confidence=confidence)


@dataclass(frozen=True)
class Prompt:
    """What the target reads before the first pass over drafts.

    ids: (length,) token ids. None where `embeds` are given instead.
    embeds: (length, H) input embeddings.
    states: (source length, H) encoder output; encoder-decoders only.
    source_mask: (source length,) 0 where the source is padding; encoder-decoders only.
    source: token ids of the source, without padding; empty for decoders, and where the source is not text.
    """

    ids: Tensor | None = None
    embeds: Tensor | None = None
    states: Tensor | None = None
    source_mask: Tensor | None = None
    source: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids) if self.ids is not None else len(self.embeds)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Piece:
    """Positions `start` to `end` of a prompt, the end not included, to be read into a slot that holds those before.

    scored: whether the logits of all of them are required, not only those of the prompt's last one.
    """

    prompt: Prompt
    slot: int
    start: int
    end: int
    scored: bool = False

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def last(self) -> bool:
        """Whether it ends the prompt."""
        return self.end == len(self.prompt)

    @property
    def scores(self) -> int:
        """Positions, its last ones, whose logits are returned."""
        return len(self) if self.scored else int(self.last)


@dataclass(frozen=True)
class Taps:
    """What a drafter or rule requires of every pass besides logits. `a | b` is the union.

    hidden: layers of the decoder whose states are required. Layer k >= 0 is the residual stream after k decoder blocks:
        0 the embeddings, n (the number of blocks) the last block's output before the final norm; -1 is that after the
        final norm, which the output head reads. Below -1 they count from the end: -2 is n - 1.
    """

    hidden: tuple[int, ...] = ()

    def __or__(self, other: Taps) -> Taps:
        return Taps(tuple(sorted({*self.hidden, *other.hidden})))


@dataclass(frozen=True, eq=False)
class Scores:
    """The output of one pass of the target.

    logits: (rows, width, V) at every node, before logits processors; rows with fewer nodes are padded at the end.
    hidden: layer -> one (context + n, H) tensor per row, for the tapped layers; node i of row r is entry
        `context[r] + i`.
    context: (rows,) number of positions before node 0: after a prefill the prompt without its last token, else 0.
    part: the scores of all rows of the pass, and these rows among them; None where these are all.
    """

    logits: Tensor
    hidden: dict[int, list[Tensor]]
    context: Sequence[int]
    part: tuple[Scores, Sequence[int]] | None = None

    def features(self, row: int, path: Sequence[int], layers: Sequence[int]) -> Tensor:
        """The states of a row's committed positions of this pass: those before node 0, then those at nodes of a path.

        A view of the pass's states where one layer and adjacent nodes are requested.

        Args:
            row: place of the row in this pass.
            path: ascending node indices.
            layers: tapped layers, concatenated in this order.

        Returns:
            (context + len(path), len(layers) * H).
        """
        before, states = self.context[row], [self.hidden[layer][row] for layer in layers]
        first, last = (path[0], path[-1] + 1) if path else (0, 0)
        if last - first == len(path) and (first == 0 or not before):
            parts = [state[first : before + last] for state in states]
        else:
            at = torch.tensor([*range(before), *(before + node for node in path)], device=states[0].device)
            parts = [state.index_select(0, at) for state in states]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def of(self, places: Sequence[int]) -> Scores:
        """The scores of these rows, in this order; logits are not copied where the rows are adjacent."""
        if len(places) == len(self.context):
            return self
        adjacent = places[-1] - places[0] == len(places) - 1
        logits = self.logits[places[0] : places[-1] + 1] if adjacent else self.logits[list(places)]
        hidden = {layer: [states[i] for i in places] for layer, states in self.hidden.items()}
        whole, rows = self.part or (self, range(len(self.context)))
        return Scores(logits, hidden, [self.context[i] for i in places], (whole, [rows[i] for i in places]))


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of several passes over different rows as those of one."""
    if len(parts) == 1:
        return parts[0]
    return Scores(
        torch.cat([part.logits for part in parts]),
        {layer: [state for part in parts for state in part.hidden[layer]] for layer in parts[0].hidden},
        [n for part in parts for n in part.context],
    )


def continued(parts: Sequence[Scores]) -> Scores:
    """The scores of adjacent pieces of one prompt as those of the whole; the logits are those of the last piece."""
    if len(parts) == 1:
        return parts[0]
    hidden = {layer: [torch.cat([part.hidden[layer][0] for part in parts])] for layer in parts[0].hidden}
    return Scores(parts[-1].logits, hidden, [sum(part.context[0] + 1 for part in parts) - 1])


@dataclass(frozen=True, slots=True)
class Accepted:
    """What was accepted of one row's tree.

    path: node indices from the root (0) on; their KV becomes permanent.
    token: the correction or bonus token, which is the next pending token.
    ended: whether the row leaves the batch.
    """

    path: tuple[int, ...]
    token: int
    ended: bool


@dataclass(eq=False)
class Row:
    """One sequence in the engine.

    index: its index in the caller's batch.
    tokens: prompt and emitted tokens, without left padding; the last one is the pending token.
    prompt: number of prompt tokens.
    room: most tokens that may be emitted.
    references: documents that the output may copy from, as token ids; text is tokenized as it is read.
    ends: token ids that end the row.
    end: length of `tokens` at which the row ended, None while it runs; in lockstep padding may follow.
    namespace: owner of the text: what drafters keep of it is offered only to rows of the same namespace.
    given: its prompt, with the encoder states of an encoder-decoder.
    request: the `Request` that it belongs to, while it runs.
    slot: its slot in the target's cache from its first pass on; it may change when another row leaves.
    drafted_by: by the names of the drafters that a drafter routed the row to, the drafts that each made for it.
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
    drafted_by: dict[str, int] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def step(self) -> int:
        """Number of tokens emitted so far: the step at which `model.generate` would choose the next one."""
        return len(self.tokens) - self.prompt

    def after(self, tokens: Iterable[int]) -> Row:
        """A copy of the row as it will be after it has emitted these tokens."""
        return replace(self, tokens=[*self.tokens, *tokens])

    @property
    def source(self) -> tuple[int, ...]:
        """Token ids of the source of an encoder-decoder; empty for decoders, and where the source is not text."""
        return () if self.given is None else self.given.source
