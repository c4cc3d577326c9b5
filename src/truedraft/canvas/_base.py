"""What the parts of the canvas loop exchange, and the contracts of policies and speculators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from math import exp
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria

from truedraft.canvas.ending import first_end
from truedraft.canvas.layout import Layout
from truedraft.card import Card, Guarantee

Fixed = frozenset[tuple[int, int]]  # positions with their tokens
NOTHING: Fixed = frozenset()


@dataclass(frozen=True)
class Draft:
    """A canvas that a row may reach.

    fixed: what it fixes beyond the row's own.
    steps: of the policy that lead to it.
    chance: of being reached, as far as what proposes it knows.
    """

    fixed: Fixed
    steps: int
    chance: float = field(default=1.0, compare=False)


OWN = Draft(NOTHING, 0)


@dataclass
class Canvas:
    """A text with masks.

    tokens: ids, that of the mask where a position is not known, or what a policy has written there for now.
    known: whether each position is known; such ones are final.
    """

    tokens: list[int]
    known: list[bool]

    @classmethod
    def behind(cls, prompt: Sequence[int], mask: int, length: int) -> Canvas:
        """A prompt and masks up to a length."""
        masks = length - len(prompt)
        return cls([*prompt, *[mask] * masks], [True] * len(prompt) + [False] * masks)

    def __len__(self) -> int:
        return len(self.tokens)

    def masked(self, span: range) -> list[int]:
        """The positions of a span that are not known."""
        return [i for i in span if not self.known[i]]

    def fix(self, fixed: Fixed) -> None:
        """Make positions known."""
        for position, token in fixed:
            self.tokens[position], self.known[position] = token, True

    def write(self, tokens: Fixed) -> None:
        """Write at positions that remain unknown: later passes read what stands there, and predict it again."""
        for position, token in tokens:
            self.tokens[position] = token

    def after(self, fixed: Fixed) -> Canvas:
        """A copy in which more positions are known."""
        copied = Canvas(list(self.tokens), list(self.known))
        copied.fix(fixed)
        return copied


@dataclass
class CanvasRow:
    """A row of a call.

    canvas: the prompt, what is fixed so far, and masks.
    prompt: length of the prompt.
    blocks: the blocks to fill, in order.
    ends: tokens that end the text.
    stops: criteria of stop strings, which end it too.
    new: most tokens behind the prompt.
    at: index of the block that is being filled; len(blocks) when all are.
    taken: what each step of the policy so far has fixed.
    reach: index of the last block whose masks the next pass predicts; `at` where it is smaller.
    causal: how the next pass reads the canvas, see `Policy.causal`.
    committed: tokens whose keys and values are kept.
    predictions: those at the latest canvas of the row that was scored, without the positions fixed since; at the start
        of a block those of another canvas, for drafts alone, or None.
    emitted: new tokens that are known without a gap, up to the end of the text.
    ended: whether these end the text.
    memory: of a policy or speculator, by its id.
    """

    index: int
    canvas: Canvas
    prompt: int
    blocks: list[range]
    ends: frozenset[int]
    new: int
    stops: Sequence[StopStringCriteria] = ()
    at: int = 0
    taken: list[Fixed] = field(default_factory=list)
    reach: int = 0
    causal: bool = False
    committed: int = 0
    predictions: Predictions | None = None
    emitted: int = 0
    ended: bool = False
    memory: dict[int, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps of the policy that led to this canvas."""
        return len(self.taken)

    @property
    def block(self) -> range:
        """The block that is being filled."""
        return self.blocks[self.at]

    @property
    def finished(self) -> bool:
        """Whether the text that was emitted has ended within complete blocks, or the canvas is full."""
        filled = self.blocks[self.at - 1].stop if self.at else self.prompt
        return self.at == len(self.blocks) or (self.ended and self.prompt + self.emitted <= filled)

    def finishes(self, fixed: Fixed) -> bool:
        """Whether nothing is left to score when these positions are fixed."""
        places, tokens, known = dict(fixed), self.canvas.tokens, self.canvas.known
        full = list(takewhile(lambda block: all(known[i] or i in places for i in block), self.blocks[self.at :]))
        if not full or len(full) == len(self.blocks) - self.at:
            return bool(full)
        filled, emitted = full[-1].stop, self.prompt + self.emitted
        text = [places.get(i, tokens[i]) for i in range(filled)]
        return emitted <= filled if self.ended else first_end(text, emitted, self.ends, self.stops) is not None

    def reached(self, fixed: Fixed) -> tuple[Canvas, range, list[int]]:
        """The canvas when these positions are fixed, the block to fill then, and the masked positions of its span."""
        canvas = self.canvas.after(fixed) if fixed else self.canvas
        block = next(block for block in self.blocks[self.at :] if canvas.masked(block))
        return canvas, block, canvas.masked(self.span(block))

    def span(self, block: range) -> range:
        """What a pass predicts when a block is to be filled: its positions, and those up to the end of the reach."""
        return range(block.start, max(block.stop, self.blocks[self.reach].stop))

    def advance(self) -> None:
        """Go on to the next block with masks when the block is full."""
        while self.at < len(self.blocks) and not self.canvas.masked(self.block):
            self.at, self.predictions = self.at + 1, None

    def emit(self) -> tuple[int, ...]:
        """The new tokens that have become known without a gap, up to the end of the text, since this was called."""
        first = self.prompt + self.emitted
        if self.ended:
            return ()
        known = zip(self.canvas.tokens[first : self.prompt + self.new], self.canvas.known[first:], strict=False)
        found = [token for token, _ in takewhile(lambda pair: pair[1], known)]
        end = first_end([*self.canvas.tokens[:first], *found], first, self.ends, self.stops)
        if end is not None:
            self.ended, found = True, found[: end + 1 - first]
        self.emitted += len(found)
        return tuple(found)

    @property
    def text(self) -> list[int]:
        """The new tokens so far, up to the first end, included."""
        return self.canvas.tokens[self.prompt : self.prompt + self.emitted]


@dataclass(frozen=True)
class Predictions:
    """What a pass predicts at the masked positions of a block and of later ones within the reach of a policy, n in all.

    positions: (n,) in order.
    logits: (n, V), warped.
    scores: (n, V) log-probabilities in the model's own law, before warpers.
    tokens: (n,) the token chosen at each: the likeliest, or one that is drawn.
    confidence: (n,) log-probabilities of these tokens in the model's own law.
    block: the block that is being filled.
    drawn: chooses tokens anew at some of the positions, with the noise of a number of steps later: (indices, steps) ->
        their tokens and confidence; None where tokens are chosen without noise.
    again: chooses tokens at the first positions by other scores, (n, V) log-probabilities up to a constant, with the
        same warpers and the same noise.
    """

    positions: tuple[int, ...]
    logits: Tensor
    scores: Tensor
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    block: range
    drawn: Callable[[Sequence[int], int], tuple[tuple[int, ...], tuple[float, ...]]] | None = None
    again: Callable[[Tensor], tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices by falling confidence; of equal ones the first position comes first."""
        return tuple(sorted(range(len(self)), key=lambda i: -self.confidence[i]))

    @cached_property
    def inside(self) -> tuple[int, ...]:
        """Those of the block alone, in the same order."""
        return tuple(i for i in self.order if self.positions[i] in self.block)

    @cached_property
    def probability(self) -> tuple[float, ...]:
        """(n,) of the tokens, in the model's own law."""
        return tuple(map(exp, self.confidence))

    @cached_property
    def likeliest(self) -> tuple[int, ...]:
        """(n,) the likeliest tokens, also where others are drawn."""
        return tuple(self.logits.argmax(-1).tolist())

    @cached_property
    def margin(self) -> tuple[float, ...]:
        """(n,) differences of the two largest logits of the model."""
        first, second = self.scores.topk(2).values.unbind(-1)
        return tuple((first - second).tolist())

    @cached_property
    def entropy(self) -> tuple[float, ...]:
        """(n,) of the model's own law, in nats."""
        return tuple(torch.special.entr(self.scores.exp()).sum(-1).tolist())

    def fix(self, indices: Sequence[int]) -> Fixed:
        """The choices at these indices."""
        return frozenset((self.positions[i], self.tokens[i]) for i in indices)

    def after(self, fixed: Fixed, steps: int) -> Predictions:
        """The rest as the draft of a later step, when some positions are fixed."""
        known = {position for position, _ in fixed}
        rest = [i for i, position in enumerate(self.positions) if position not in known]
        if self.drawn is None:
            tokens, confidence = tuple(self.tokens[i] for i in rest), tuple(self.confidence[i] for i in rest)
        else:
            tokens, confidence = self.drawn(rest, steps)
        positions, origin = tuple(self.positions[i] for i in rest), self.drawn
        scores = self.scores[rest]
        logits = scores if self.logits is self.scores else self.logits[rest]
        drawn = None if origin is None else lambda indices, later: origin([rest[i] for i in indices], steps + later)
        return replace(
            self, positions=positions, logits=logits, scores=scores, tokens=tokens, confidence=confidence, drawn=drawn,
            again=None,
        )  # fmt: skip

    @property
    def probs(self) -> Tensor:
        """(n, V)."""
        return torch.softmax(self.logits, -1)


class Policy(ABC):
    """Decides which positions of a block a step fixes, from the predictions of one pass over the canvas before it.

    guarantee: `tokens` of a reference, decoding step by step as models define it (`policies/`); `none` where more is
        fixed at a time than the reference would fix (`policies/lossy/`).
    ordered: whether the first masked positions of the block are fixed next, whatever is predicted.
    causal_cache: whether each position of the prompt and of complete blocks reads those before it alone, with attention
        in blocks.
    """

    card: ClassVar[Card]
    guarantee: ClassVar[Guarantee]
    ordered: ClassVar[bool] = False
    causal_cache: bool = False

    @abstractmethod
    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        """The positions that are fixed next, at least one, with their tokens.

        A policy that goes over tokens again writes them into the canvas instead (`Canvas.write`), and fixes them when
        they are final: until then a block is not complete, nothing of it is kept, and nothing is handed out.
        """

    def bind(self, vocabulary: int, layout: Layout, tokenizer: Any) -> None:
        """A model is accelerated with this policy; tokenizer: the model's, or None.

        Raises:
            Refused: the policy needs another model.
        """

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        """A row begins.

        Raises:
            Refused: canvases of this layout cannot be filled so.
        """

    def reach(self, row: CanvasRow) -> int:
        """Index of the last block whose masked positions the next pass predicts; the positions to fix are among them.
        With attention in blocks, later blocks make the pass longer."""
        return row.at

    def causal(self, row: CanvasRow) -> bool:
        """Whether the next pass predicts each position from those before it alone, as blocks of one position would be:
        with attention in blocks only."""
        return False

    def hypotheses(self, row: CanvasRow) -> list[Draft]:
        """Canvases of one more step that the next pass scores beside the row's own, of which one is kept."""
        return []

    def preferred(self, predictions: Sequence[Predictions], row: CanvasRow) -> int:
        """Which canvas of a pass is kept: the row's own, 0, or a hypothesis, counted from 1."""
        return 0


class Rates:
    """How often each of several outcomes was met, from a prior on.

    prior: before any observation, whose weight is `doubt`. memory: weight that an observation keeps at each later one.
    """

    def __init__(self, prior: Sequence[float], doubt: float = 4.0, memory: float = 0.97):
        self._met, self._of = [rate * doubt for rate in prior], [doubt] * len(prior)
        self._memory = memory

    def __getitem__(self, outcome: int) -> float:
        return self._met[outcome] / self._of[outcome]

    def observe(self, outcome: int, met: bool) -> None:
        self._met[outcome] = self._memory * self._met[outcome] + met
        self._of[outcome] = self._memory * self._of[outcome] + 1


class Speculator(ABC):
    """Proposes canvases that a row may reach, to be scored in one pass with its own."""

    card: ClassVar[Card]

    @abstractmethod
    def propose(self, row: CanvasRow, policy: Policy, least: float) -> list[Draft]:
        """Later canvases of a row, by falling chance.

        Args:
            least: chance below which a canvas does not pay for its part of a pass.
        """

    def observe(self, row: CanvasRow, policy: Policy, drafts: Sequence[Draft], path: Sequence[Fixed]) -> None:
        """What the row, as it was when these drafts were proposed, has fixed after each step since."""
