"""The contract of an acceptance rule, and its variants: by node, by argmax, with probes, with attributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.accept._verification import Candidates, TargetProbs, Verdict, Verification, candidates
from truedraft.card import Card, Guarantee, method_name
from truedraft.chance import Chance
from truedraft.errors import Refused
from truedraft.sampling import Laws
from truedraft.stats import Attribution
from truedraft.tree import Accepted, DraftTree, Draws, PreferredDrafts, Row, Scores, Taps


class Rule(ABC):
    """An acceptance rule: accepts a path of a row's draft tree, and chooses the token that follows it.

    A rule implements `accept`, for one row; or `choose`, for one node of each of several rows (`NodeRule`).

    guarantee: `tokens` (identical to the reference, for a given seed), `distribution` (same law), or `none` (lossy;
        such rules are under `accept/lossy`).
    samples: whether tokens are drawn (`do_sample=True`) or chosen without noise.
    preferred_drafts: the drafts of which it accepts most; see `PreferredDrafts`.
    accepts_draws: the kinds of drafts that it can verify; None for all.
    needs: what it requires of every pass besides logits.
    """

    card: ClassVar[Card]
    guarantee: ClassVar[Guarantee]
    samples: ClassVar[bool]
    preferred_drafts: ClassVar[PreferredDrafts]
    accepts_draws: ClassVar[frozenset[Draws] | None] = None
    needs: Taps = Taps()

    def bind(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Called before each call, with the target's model and its tokenizer, None where none was given.

        Raises:
            Refused: the rule does not support the model, requires a tokenizer, or has an invalid knob.
        """

    def begin_call(self, laws: Laws) -> None:
        """Called before the first pass of a call, with its logits processors.

        Raises:
            Refused: the rule does not support a setting of the call. By default: processors that may count their
                calls or look across rows, since `accept` evaluates drafted prefixes that may not be emitted.
        """
        if laws.unknown_processors:
            name = f"{'lossy/' if self.guarantee == 'none' else ''}{method_name(self)}"
            raise Refused(
                f"rule={name!r} needs the laws after drafted tokens before these are emitted, and "
                f"{laws.unknown_processors[0]} may count its calls or look across rows: use rule="
                f"{'rejection' if self.samples else 'greedy'!r}"
            )

    @abstractmethod
    def accept(self, tree: DraftTree, probs: TargetProbs, row: Row, chance: Chance) -> Verdict:
        """The accepted path of one row's tree, and the token that follows it.

        Args:
            tree: the row's draft; at least a root.
            probs: the target's distribution at each node, `probs[node]`, (V,), after all logits processors.
            row: the row as it is at the root. Below the root `chance.pick` must be given `row.after(drafted tokens)`.
            chance: the source of all random numbers.

        Returns:
            The indices of the accepted nodes, from the root (0) down, and the token after the last of them: -1 where
            its distribution is NaN. The path may go on after a token that ends the row; such tokens are not emitted.
        """

    def verify(self, pass_: Verification) -> list[Accepted]:
        """Accept and emit for all rows of one request, each up to where it ends; one `Accepted` per row."""
        return pass_.emitted(lambda i: self.accept(pass_.trees[i], pass_.probs(i), pass_.rows[i], pass_.chance))


class NodeRule(Rule):
    """A rule that chooses the next token at one node at a time; a path is accepted as far as its tokens were chosen.

    All rows of a request are verified together, and a node only after the tokens before it were emitted: so any logits
    processor is supported.
    """

    def begin_call(self, laws: Laws) -> None:
        pass

    @abstractmethod
    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        """The next token of each of k rows; -1 where its scores are NaN.

        scores: (k, V) scores after all logits processors, at the current node of each row.
        candidates: the children of these k nodes.
        rows: the k rows, with the tokens up to these nodes.
        """

    def accept(self, tree: DraftTree, probs: TargetProbs, row: Row, chance: Chance) -> Verdict:
        path, current = [0], row
        while True:
            node = path[-1]
            children = candidates(tree, node, probs.hidden)
            (token,) = self.choose(probs.scores([node]), [children], [current], chance)
            if (below := tree.child(node, token)) is None:
                return path, token
            path.append(below)
            current = current.after([token])

    def verify(self, pass_: Verification) -> list[Accepted]:
        return pass_.walked(self.choose)


class ArgmaxRule(NodeRule):
    """A rule that chooses the token with the largest key: its score, or its probability divided by noise."""

    def decide_all_nodes(
        self, scores: Scores, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> Sequence[Sequence[int]] | None:
        """The token at every node, where each depends on its logits alone; else None. They may be found when read."""
        return None

    @abstractmethod
    def keys(self, scores: Tensor, chance: Chance) -> Tensor | None:
        """The keys of the last choice, in the shape of `scores`; None where the source of noise does not give them.

        scores: the argument of the last `choose`, (k, V), or `decide_all_nodes`, (rows, nodes, V).
        """

    def floor(self, best: Tensor, margin: float) -> Tensor:
        """The largest keys, lowered as if their scores were lower by `margin`."""
        return best - margin

    def verify(self, pass_: Verification) -> list[Accepted]:
        return super().verify(pass_) if pass_.tokens is None else pass_.followed(pass_.tokens)


class ProbingRule(Rule):
    """A rule that adds probes of its own to drafts, and reads the logits there."""

    @abstractmethod
    def extra_probes(self, width: int) -> int:
        """Most nodes that `add_probes` adds to a draft of `width` nodes."""

    @abstractmethod
    def add_probes(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The drafts with the rule's probes; drafted nodes keep their indices."""


class AttributingRule(Rule):
    """A rule that uses documents of the caller (`row.references`), and reports which output comes from them."""

    @abstractmethod
    def attributions(self) -> tuple[Attribution, ...]:
        """The spans of the output of the last call that are copies, with their places in the documents."""


def extra_probes(rule: Rule, width: int) -> int:
    """Most nodes that a rule adds to a draft of `width` nodes."""
    return rule.extra_probes(width) if isinstance(rule, ProbingRule) else 0
