"""The contract of views: the target's weights run lighter, for drafts that the whole target verifies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from truedraft.card import Card, lacking, method_name
from truedraft.errors import Refused
from truedraft.identity import Identity
from truedraft.tree import Taps
from truedraft.views._neurons import PANEL, Neurons

NONE: frozenset[int] = frozenset()
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Selection:
    """The committed entries of a row that a pass reads: some that are chosen, and the most recent ones.

    kept: the first positions; or where there is a `chunk`, positions by layer and head, chosen before the first pass
        over a row that has more than `kept` and `recent`, by the attention of its pending token.
    recent: positions at the end, one or more.
    chunk: adjacent positions that are chosen together, by their mean key; `kept` is a multiple of it.
    refresh: committed positions after which they are chosen anew, before the next draft; 0 for never.
    """

    kept: int
    recent: int
    chunk: int = 0
    refresh: int = 0

    def __str__(self) -> str:
        return f"{self.kept} {'chosen' if self.chunk else 'first'} and {self.recent} recent positions"


@dataclass(frozen=True)
class Rounded:
    """The committed entries of a row that a pass reads in fewer bits: all but the most recent ones.

    bits: 8 or 4.
    recent: positions at the end that are read as they are, one or more.
    """

    bits: int
    recent: int

    def __str__(self) -> str:
        return f"all but {self.recent} recent positions in {self.bits} bits"


@dataclass(frozen=True)
class Sparing:
    """The feed-forwards that a pass leaves out at each node by itself, from what it has computed there.

    layers: whose feed-forwards these are. In their order each is computed, until one has changed the node's hidden
        state little; the node skips those after it, which leave its hidden state as it is.
    similarity: the cosine of the hidden states before and after a feed-forward, above which it has changed little.
    share: of these feed-forwards, those that are expected to be skipped.
    warm: the first generated tokens of a row, which compute all of them.
    """

    layers: frozenset[int]
    similarity: float
    share: float
    warm: int = 0

    def __str__(self) -> str:
        return f"behind a similarity of {self.similarity:.4g} in layers {min(self.layers)} to {max(self.layers)}"


@dataclass(frozen=True)
class Experts:
    """The experts that a token is given, in each mixture of them: those with the largest router weights.

    most: how many at most, one or more.
    least: the least weight, over that of the token's strongest expert, where a router gives as many as are active; 0
        for any.
    """

    most: int
    least: float = 0.0

    def joined(self, other: Experts) -> Experts:
        return Experts(min(self.most, other.most), max(self.least, other.least))


@dataclass(frozen=True)
class Reduction:
    """What passes under a view leave out of the target; what passes prepare for it is kept by its value.

    attention, feed_forward: decoder layers without this half: the hidden states pass it unchanged.
    bits: of the weights of linear layers, 8 or 4; 0 for weights as they are.
    entries: the entries of the KV cache that are read, or are read in fewer bits; None for all of them as they are.
    experts: those of mixtures that run; None for all that a token is given.
    output_head: whether the output head is left out; of a pass there are hidden states then, and its logits are empty.
    sparing: what nodes skip by their own hidden states; None for nothing.
    neurons: of feed-forwards that run, for each node by itself; None for all.
    """

    attention: frozenset[int] = NONE
    feed_forward: frozenset[int] = NONE
    bits: int = 0
    entries: Selection | Rounded | None = None
    experts: Experts | None = None
    output_head: bool = False
    sparing: Sparing | None = None
    neurons: Neurons | None = None

    def __post_init__(self) -> None:
        if self.bits and self.neurons is not None and self.neurons.predictors.size < PANEL:
            raise Refused(
                f"neurons that are chosen by {self.neurons.predictors.size} are read from weights as they are, not in "
                f"{self.bits} bits: train predictors of groups of {PANEL} (deja-vu:group={PANEL})"
            )
        if self.sparing and self.neurons is not None:
            raise Refused(f"one view skips feed-forwards by node ({self.sparing}), another some neurons: use one")

    @property
    def layers(self) -> frozenset[int]:
        """Layers that do not run at all."""
        return self.attention & self.feed_forward

    @property
    def halves(self) -> frozenset[int]:
        """Layers that run one half."""
        return self.attention ^ self.feed_forward

    @property
    def skips(self) -> bool:
        """Whether any layer does not run whole."""
        return bool(self.attention or self.feed_forward or self.sparing)

    @property
    def spared(self) -> list[int]:
        """The layers whose feed-forwards nodes compute or skip, in order."""
        return sorted(self.sparing.layers - self.feed_forward) if self.sparing else []

    def joined(self, other: Reduction) -> Reduction:
        """Without what either leaves out.

        Raises:
            Refused: both say what is read of the KV cache, which feed-forwards nodes skip, or which neurons run.
        """
        if self.entries is not None and other.entries is not None:
            raise Refused(f"two views say what is read of the KV cache ({self.entries}; {other.entries}): use one")
        if self.sparing and other.sparing:
            raise Refused(f"two views skip feed-forwards by node ({self.sparing}; {other.sparing}): use one")
        if self.neurons is not None and other.neurons is not None:
            raise Refused(f"two views say which neurons run ({self.neurons}; {other.neurons}): use one")
        return Reduction(
            self.attention | other.attention,
            self.feed_forward | other.feed_forward,
            min(filter(None, (self.bits, other.bits)), default=0),
            self.entries or other.entries,
            self.experts.joined(other.experts) if self.experts and other.experts else self.experts or other.experts,
            self.output_head or other.output_head,
            self.sparing or other.sparing,
            self.neurons or other.neurons,
        )


WHOLE = Reduction()


class View:
    """A lighter way to run a target's own weights: which parts of the model a pass leaves out.

    `target.score(trees, view=...)` makes such a pass. It reads the KV that the whole model has committed, or entries of
    it that are chosen, in the layers that it runs, and writes scratch KV behind it: for these layers only, dropped by
    `rewind` and by every pass of the whole model. A view can therefore not change the target's output.

    A subclass is a frozen dataclass whose fields are its knobs, and overrides what it changes; the defaults are those
    of the whole model. Equal views must behave alike.

    fitted_to: the target that it was calibrated on, or trained for; None where it serves any.
    learner: its training (a `Learner`), if it is trained (`truedraft train`).
    taps: what passes under it yield besides logits. Hidden states are numbered as in the whole model; the state behind
        a layer that is skipped is the one before it.
    """

    card: ClassVar[Card] = Card(paper="none", idea="The whole model.", family="none")
    learner: ClassVar[Any] = None
    fitted_to: Identity | None = None
    taps: Taps = Taps()

    @property
    def name(self) -> str:
        """Its name in reports and messages: that of a preset whose knobs it has, if there is one."""
        alike = (preset for preset, knobs in self.card.presets.items() if knobs.items() <= vars(self).items())
        return next(alike, method_name(self))

    @property
    def fitted(self) -> Sequence[View]:
        """The views in it that were fitted to a target."""
        return [] if self.fitted_to is None else [self]

    @property
    def notes(self) -> list[str]:
        """Sentences for the report of a call that a model drafts or generates under it in."""
        return lacking(self)

    @property
    def lossy(self) -> str:
        """Its name as what a target generates under, for those who choose the approximation itself."""
        return f"lossy/{self.name}"

    @property
    def varies(self) -> bool:
        """Whether it depends on the depth of a token."""
        return any(self.at(depth) != self for depth in range(64))

    def reduction(self, layers: int) -> Reduction:
        """What is left out of a decoder with `layers` layers.

        Raises:
            Refused: the view does not fit such a decoder.
        """
        return WHOLE

    def at(self, depth: int) -> View:
        """The view for drafted tokens at a depth, the children of the pending token at 0; none may run a layer that
        those before it do not."""
        return self

    @property
    def alternatives(self) -> Sequence[View]:
        """What `behind` may return besides the view itself; where there are none, all rows have this view."""
        return ()

    def behind(self, state: Tensor) -> View:
        """The view for a row, by the (H,) hidden state after the final norm at the last token of its prompt."""
        return self

    def tapping(self, taps: Taps) -> Self:
        """The same view with other taps."""
        other = copy.copy(self)
        object.__setattr__(other, "taps", taps)
        return other
