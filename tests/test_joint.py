"""Drafters made of others: every method is called on each part, and their `needs` may depend on what they load."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import truedraft
from drafters_for_tests import Noise
from models import V, ragged, sibling, tiny
from truedraft import Card, DraftTree, registry
from truedraft.audit.tracer import Tracer
from truedraft.drafters._base import Drafter, PassCost, PerRow
from truedraft.drafters._compose import KINDS, Merge
from truedraft.drafters._joint import Joint
from truedraft.tree import Accepted, Row, Scores, Taps

# attributes of the whole, not of its parts
OF_THE_WHOLE = {
    "card",
    "learner",
    "prior_confidence",
    "bound",
    "alone",
    "draws",
    "preferred",
    "width",
    "propose",
    "own_tokens",
    "target_tokenizer",
}
PUBLIC = {name for name in {*vars(Drafter), *Drafter.__annotations__} if not name.startswith("_")}


class Pair(Joint):
    card = Card(paper="none", idea="Two drafters.", family="none")

    def __init__(self, *parts: Drafter):
        self.parts = parts

    @property
    def width(self) -> int:
        return 4

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return self.parts[0].propose(rows, budget)


def test_every_member_is_delegated_or_of_the_whole() -> None:
    assert PUBLIC - set(vars(Joint)) == OF_THE_WHOLE


def test_methods_without_a_result_are_called_on_every_part() -> None:
    calls: list[Any] = []
    parts = [Noise(vocabulary=V), Noise(vocabulary=V)]
    pair = Pair(*parts)
    assert [part.alone for part in parts] == [False, False] and pair.alone
    delegated = [n for n in PUBLIC & set(vars(Joint)) if inspect.isfunction(getattr(Joint, n)) and n != "memories"]
    assert {"bind", "read", "open", "start", "observe", "end", "forget"} <= set(delegated)
    for name in delegated:
        given = tuple(object() for _ in list(inspect.signature(getattr(Drafter, name)).parameters)[1:])
        for i, part in enumerate(parts):
            setattr(part, name, lambda *args, i=i: calls.append((i, args)))
        getattr(pair, name)(*given)
        assert calls[-2:] == [(0, given), (1, given)]
    pair.pass_cost = cost = PassCost(1.0, 0.1)
    assert parts[0].pass_cost is parts[1].pass_cost is pair.pass_cost is cost


class Loaded(PerRow[None]):
    """A drafter whose checkpoint determines the layers that it reads; asserts that it receives them."""

    card = Card(paper="none", idea="Nothing.", family="none")
    width = 1  # type: ignore[assignment]

    def __init__(self, layers: tuple[int, ...]):
        super().__post_init__()
        self.checkpoint, self.shown = {"layers": layers}, 0

    def bind(self, target: Any) -> None:
        self.needs = Taps(self.checkpoint["layers"])

    def begin(self, row: Row) -> None: ...

    def draft(self, row: Row, state: None, after: Sequence[int], budget: int) -> DraftTree:
        return DraftTree.chain((after or row.tokens)[-1])

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        assert set(self.checkpoint["layers"]) <= set(scores.hidden)
        self.shown += 1


JOINED = [sign for sign in KINDS if sign != "<"]  # whose parts are any drafters


def wholes(first: Loaded, second: Loaded) -> dict[str, Any]:
    """Every wrapper and composition of drafters."""
    model = tiny("llama", torch.float32)
    cascade = registry.load("drafters", "cs-drafting", model=[sibling(model)], bottom=second)
    return {
        **{sign: KINDS[sign]([first, second]) for sign in JOINED},
        "nested": Merge([Merge([first, Noise(vocabulary=V)]), second]),
        "cs-drafting": Merge([first, cascade]),
        "traced": Tracer(Merge([first, second])),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("way", [*JOINED, "nested", "cs-drafting", "traced"])
def test_needs_of_parts_are_read_after_loading(way: str) -> None:
    model = tiny("llama", torch.float32)
    first, second = Loaded((1,)), Loaded((0, -1))
    whole = wholes(first, second)[way]
    assert whole.needs == Taps(), "nothing is loaded yet"
    fast = truedraft.accelerate(model, draft=whole, control="fixed")
    assert set(whole.needs.hidden) == {-1, 0, 1}
    inputs = ragged(model, 2)
    settings = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(**inputs, **settings), model.generate(**inputs, **settings))
    assert set(fast.target.taps.hidden) == {-1, 0, 1} and first.shown > 2 and second.shown == first.shown
    second.checkpoint["layers"] = (2,)
    other = truedraft.accelerate(tiny("qwen2", torch.float32), draft=whole, control="fixed")
    assert set(other.drafter.needs.hidden) == {1, 2}, "another checkpoint for another target"
