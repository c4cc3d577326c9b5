"""What a rule is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.accept._verification import Candidates, TargetProbs, Verdict, Verification, candidates
from truedraft.card import Card, Guarantee
from truedraft.chance import Chance
from truedraft.errors import Refused
from truedraft.sampling import Laws
from truedraft.stats import Attribution
from truedraft.tree import Accepted, DraftTree, Draws, PreferredDrafts, Row, Taps


class Rule(ABC):
    """Decides how much of a row's draft is kept, and the token behind it.

    guarantee: `tokens` (identical to the reference for a given seed), `distribution`, or `none` (lossy: a rule under
        `accept/lossy`, reached by asking for it).
    samples: whether the rule draws from the target's distribution, as `do_sample=True` asks.
    preferred_drafts: the drafts that serve it best.
    accepts_draws: the kinds of drafts that it can judge; None for all.
    needs: what it asks to see of every pass.
    """

    card: ClassVar[Card]
    guarantee: ClassVar[Guarantee]
    samples: ClassVar[bool]
    preferred_drafts: ClassVar[PreferredDrafts]
    accepts_draws: ClassVar[frozenset[Draws] | None] = None
    needs: Taps = Taps()

    def bind(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Before a call: the target's model, and its tokenizer where that was given.

        Raises:
            Refused: it cannot judge this model's text, needs a tokenizer, or a knob makes no sense.
        """

    def begin_call(self, laws: Laws) -> None:
        """Before the first pass of a call, with the logits processors that it asks for.

        Raises:
            Refused: what the call asks for cannot be had with this rule.
        """
        if laws.unknown_processors:
            raise Refused(
                f"rule={_name(self)!r} must know the laws behind drafted tokens before they are said, and "
                f"{laws.unknown_processors[0]} may count its calls or look across rows: use rule="
                f"{'rejection' if self.samples else 'greedy'!r}"
            )

    @abstractmethod
    def accept(self, tree: DraftTree, probs: TargetProbs, row: Row, chance: Chance) -> Verdict:
        """The path of nodes that are kept, from the root (0) on, and the token behind the last of them.

        The token is -1 where its distribution is NaN. What would follow a token that ends the row may be part of the
        path: it is not emitted. The row stands at the root; `row.after(tokens)` is as it will stand further on, which
        `chance.pick` must be given there.

        tree: of at least the root. probs: the target's distributions at its nodes.
        """

    def verify(self, pass_: Verification) -> list[Accepted]:
        """A pass over drafts of rows of one request: what is accepted of each is emitted, up to where the row ends."""
        return pass_.emitted(lambda i: self.accept(pass_.trees[i], pass_.probs(i), pass_.rows[i], pass_.chance))


class NodeRule(Rule):
    """A rule that chooses the next token node by node; the draft is kept as far as it is the same.

    Rows are judged together, each node after the tokens before it were emitted, so that any processor may be in play.
    """

    def begin_call(self, laws: Laws) -> None:
        pass

    @abstractmethod
    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        """The next token of each of k rows, -1 where its scores are NaN.

        scores: (k, V) processed scores at the node where each row stands.
        candidates: the k nodes' children.
        """

    def accept(self, tree: DraftTree, probs: TargetProbs, row: Row, chance: Chance) -> Verdict:
        path, standing = [0], row
        while True:
            node = path[-1]
            offered = candidates(tree, node, probs.hidden)
            (token,) = self.choose(probs.scores([node]), [offered], [standing], chance)
            if (below := tree.child(node, token)) is None:
                return path, token
            path.append(below)
            standing = standing.after([token])

    def verify(self, pass_: Verification) -> list[Accepted]:
        return pass_.walked(self.choose)


class ArgmaxRule(NodeRule):
    """A rule whose token at a node is the one with the largest key: its score, or its probability over noise."""

    def decide_all_nodes(
        self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> list[list[int]] | None:
        """The token at every node at once, where that can be had before anything is emitted and costs less; else None.

        logits: (rows, nodes, V) raw.
        """
        return None

    @abstractmethod
    def keys(self, scores: Tensor, chance: Chance) -> Tensor | None:
        """Like the scores, what the tokens just chosen have the largest of; None where the noise shows none.

        scores: (k, V) that `choose` was given, or (rows, nodes, V) that `decide_all_nodes` was.
        """

    def floor(self, best: Tensor, margin: float) -> Tensor:
        """What the largest keys might fall to if scores fell by `margin`."""
        return best - margin

    def verify(self, pass_: Verification) -> list[Accepted]:
        return super().verify(pass_) if pass_.tokens is None else pass_.followed(pass_.tokens)


class ProbingRule(Rule):
    """A rule that reads more of a pass than drafts: positions of its own, which it adds as probes."""

    @abstractmethod
    def extra_probes(self, width: int) -> int:
        """Nodes that `add_probes` adds to a draft of `width` nodes, at most."""

    @abstractmethod
    def add_probes(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Drafts with the rule's probes; the drafted nodes and their order stay."""


class AttributingRule(Rule):
    """A rule that looks into documents that the caller gives (`row.references`), and reports what comes from them."""

    @abstractmethod
    def attributions(self) -> tuple[Attribution, ...]:
        """After a call: which spans of the output stand where in the documents."""


def _name(rule: Rule) -> str:
    return type(rule).__module__.rpartition(".")[2].replace("_", "-")


def extra_probes(rule: Rule, width: int) -> int:
    """Nodes that a rule adds to a draft of `width` nodes, at most."""
    return rule.extra_probes(width) if isinstance(rule, ProbingRule) else 0
