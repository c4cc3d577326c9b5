"""Knobs: each declares its range, works at both ends of it, and refuses values outside, however it is set."""

from __future__ import annotations

import dataclasses
import math
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, sibling, tiny
from nets import SEED, corpus_of, drafter, generated
from truedraft import Card, DraftTree, Refused, registry
from truedraft.card import Range, Switch, Text, knob, values_of
from truedraft.drafters._base import PerRow
from truedraft.drafters.heads.gad import Filling
from truedraft.drafters.lookup.suffix import Suffix
from truedraft.stores.neighbours import Neighbours
from truedraft.tree import Row

METHODS = [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
QUICK = 5.0  # seconds for three rows of six tokens, on a machine that has other work


def knobs(method: type) -> Iterator[tuple[str, Range | Switch | Text]]:
    """The knobs of a method that are numbers, switches or text; the others are models, files and drafters."""
    for field in dataclasses.fields(method):
        if field.type != "Any" and not field.name.startswith("_"):
            values = values_of(method, field.name)
            assert values is not None, f"{method.__name__}.{field.name} does not declare its values"
            yield field.name, values


def ends(values: Range | Switch | Text) -> list[Any]:
    if isinstance(values, Range):
        step = 1 if values.kind is int else (values.high - values.low) * 1e-9
        return [values.kind(values.low + values.open * step), values.kind(values.high)]
    return [True, False] if isinstance(values, Switch) else []


def outside(values: Range | Switch | Text) -> list[Any]:
    if isinstance(values, Range):
        beyond = [values.low - (0 if values.open else 1), values.high + 1, -(2**31) - 1, 2**63, 10**400, -(10**5000)]
        return [*beyond, math.nan, math.inf, "1", None, True, [1], *([1.5] if values.kind is int else [])]
    return [0, 1, "True", None] if isinstance(values, Switch) else [None, 1.5, True, b"x"]


@pytest.mark.parametrize(("kind", "name"), [*METHODS, ("learner", "gad")])
def test_value_outside_its_range_is_refused_with_the_range(kind: str, name: str) -> None:
    method = Filling if kind == "learner" else registry.method(kind, name)
    made = method()
    for field, values in knobs(method):
        for value in outside(values):
            before = getattr(made, field)
            attempts = [
                lambda: method(**{field: value}),
                lambda: registry.built(method, name, f"{name}:{field}=...", {field: value}),
                lambda: setattr(made, field, value),
            ]
            for attempt in attempts[: 2 if method.__dataclass_params__.frozen else 3]:
                with pytest.raises(Refused) as refused:
                    attempt()
                message = str(refused.value)
                assert message.startswith(f"{name}:{field}=") and message.endswith(f"give {values.expected}")
                assert "\n" not in message and len(message) < 400
            assert getattr(made, field) == before
    if kind != "learner":
        for field, values in knobs(method):
            if isinstance(values, Range):
                with pytest.raises(Refused, match=f"{name}:{field}="):
                    registry.load(kind, f"{name}:{field}={values.high * 10 + 1}")


SETTINGS: dict[bool, dict[str, Any]] = {True: {"do_sample": True, "top_k": 0}, False: {"do_sample": False}}


def same_as_plain(rows: int = 3, sampled: bool = False, **parts: Any) -> bool:
    """Whether a few tokens with these parts are those of plain decoding; in good time."""
    model = tiny(dtype=torch.float32)
    inputs = ragged(model, rows)
    began = time.perf_counter()
    fast = truedraft.accelerate(model, **{"control": "fixed", **parts})
    torch.manual_seed(SEED)
    out = fast.generate(**inputs, max_new_tokens=6, **SETTINGS[sampled])
    assert time.perf_counter() - began < QUICK, parts
    return torch.equal(out, generated(model, inputs, max_new_tokens=6, **SETTINGS[sampled]).text)


UNFIT = {"layer", "ends"}  # whose largest values name layers that small models do not have


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", registry.names("drafters"))
def test_drafters_work_at_both_ends_of_their_ranges(name: str, first: int) -> None:
    """The everyday suite has the lower ends of the first knob, the third ..., the upper ends of the others, and all
    upper ends together."""
    model, method = tiny(dtype=torch.float32), registry.method("drafters", name)
    if "decoder" in method.card.cannot:
        for field, values in knobs(method):
            assert [getattr(method(**{field: end}), field) for end in ends(values)] == ends(values)
        return
    given: dict[str, Any] = {"corpus": corpus_of(model)} if hasattr(method, "corpus") else {}
    if name == "nest":
        given["store"] = Neighbours.built(model, [("a", list(range(3, 40)))])
    for i, (field, values) in enumerate(knobs(method)):
        for end in ends(values)[(first + i) % 2 :: 2]:
            if (name, field) == ("nest", "layer") or (name, field, end) == ("swift", "ends", 64):
                with pytest.raises(Refused, match=f"{field}="):
                    same_as_plain(draft=drafter(name, model, **{field: end}))
                continue
            assert same_as_plain(draft=drafter(name, model, **{field: end}, **given)), (field, end)
    largest = {field: ends(values)[-1] for field, values in knobs(method) if ends(values) and field not in UNFIT}
    assert same_as_plain(draft=drafter(name, model, **largest, **given))


@pytest.mark.parametrize("name", registry.names("accept.lossy"))
def test_lossy_rules_work_at_both_ends_of_their_ranges(name: str) -> None:
    model, method = tiny(dtype=torch.float32), registry.method("accept.lossy", name)
    given = {"store": Neighbours.built(model, [("a", list(range(3, 40)))])} if name == "nest" else {}
    for field, values in knobs(method):
        for end in ends(values):
            if field == "layer" or name == "reflective":
                assert getattr(method(**{field: end}), field) == end
                continue
            rule = method(**{field: end}, **given)
            same_as_plain(sampled=rule.samples, draft=drafter("draft-model", model, small=sibling(model)), rule=rule)


@pytest.mark.parametrize("name", registry.names("control"))
def test_controls_work_at_both_ends_of_their_ranges(name: str) -> None:
    method = registry.method("control", name)
    for field, values in knobs(method):
        for end in ends(values):
            assert same_as_plain(draft="suffix+token-recycling", control=method(**{field: end}))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("gumbel-top-k:branches=2x0", "how many children"),
        ("gumbel-top-k:branches=99x99", "1,024 nodes"),
        (f"gumbel-top-k:branches={'1x' * 2000}1", "1,024 nodes"),
        (f"greedy-multi-draft:branches={'9' * 5000}", "how many children"),
        ("greedy-multi-draft:branches=", "how many children"),
        ("cs-drafting:lengths=9999;3", "1,024 tokens"),
        ("token-recycling:successors=0", "successors=0: give a whole number, 1 to 16"),
        ("codeswift:kept=0", "kept=0: give a whole number, 1 to 16"),
        ("suffix:alpha=1e999", "alpha=inf: give a number, 0 to 1000"),
        ("prompt-lookup:n=" + "(" * 500, "give a whole number, 1 to 1,024"),
        ("prompt-lookup:n=" + "9" * 5000, "give a whole number, 1 to 1,024"),
        ("rest:corpus=5", "corpus=5"),
        ("draft-model:model=5", "model=5"),
        ("cs-drafting:model=5", "model=5"),
        ("nest:store=5", "store=5"),
        ("gad:model=5", "model=5"),
    ],
)
def test_invalid_values_in_a_spec_are_refused_in_one_sentence(spec: str, named: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.load("drafters", spec)
    assert named in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_numbers_of_other_types_are_converted() -> None:
    import numpy as np

    made = registry.load("drafters", "suffix", depth=np.int64(9), alpha=2)
    assert (made.depth, made.alpha) == (9, 2.0) and type(made.depth) is int and type(made.alpha) is float
    assert registry.load("drafters", "gumbel-top-k:branches=4").branches == "4"
    again = pickle.loads(pickle.dumps(registry.load("control", "fixed", nodes=7)))
    assert again.nodes == 7 and again == registry.load("control", "fixed:nodes=7")
    assert repr(again) == "Fixed(nodes=7)" and type(again).nodes == 0


CARD = Card(paper="none", idea="Repeat the last token.", family="test")


@dataclass
class Undeclared(PerRow[None]):
    """A drafter of another package, as CONTRIBUTING has it, that does not declare the ranges of its knobs."""

    card = CARD
    length: int = 4  # tokens drafted
    share: float = 0.5  # of nothing

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> None: ...

    def draft(self, row: Row, state: None, after: Sequence[int], budget: int) -> DraftTree:
        root = (after or row.tokens)[-1]
        return DraftTree.chain(root, [root] * min(self.length, budget))


@dataclass
class Declared(Undeclared):
    length: int = knob(4, 1, 9)  # tokens drafted


@dataclass
class Narrower(Suffix):
    depth: int = 8  # tokens of match and draft together


def test_drafters_of_other_packages_work_with_and_without_ranges() -> None:
    for draft in (Undeclared(), Undeclared(length=0), Declared(9), Narrower()):
        assert same_as_plain(draft=draft)
    assert registry.built(Undeclared, "mine", "mine", {"length": 3}).length == 3
    for value in (-1, "x", 1.0):
        with pytest.raises(Refused, match=r"mine:length=.*give a non-negative int, like 4"):
            registry.built(Undeclared, "mine", "mine", {"length": value})
    for value in (math.nan, math.inf):
        with pytest.raises(Refused, match=r"mine:share=.*give a non-negative float, like 0.5"):
            registry.built(Undeclared, "mine", "mine", {"share": value})
    with pytest.raises(Refused, match="test-knobs:length=10: give a whole number, 1 to 9"):
        Declared(length=10)
    assert values_of(Narrower, "depth") is None and values_of(Narrower, "alpha") == Range(float, 0, 1e3)
