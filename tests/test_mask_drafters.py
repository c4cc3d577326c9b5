"""Drafters with a diffusion model: what they predict equals plain forwards with a mask written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

import truedraft
from models import V, ragged, tiny
from nets import diffusion_of
from test_canvas import Bidirectional, plain
from truedraft import Refused, registry
from truedraft.canvas.layout import Layout
from truedraft.cli._models import load
from truedraft.cli._options import CANVASES
from truedraft.drafters.models import diffuspec
from truedraft.drafters.models._mask_reader import MaskReader
from vocabularies import tokenized

NAMES = [n for n in registry.names("drafters") if "diffusion model" in registry.method("drafters", n).card.needs]
MASK, BLOCK = V, 4


def drafting(name: str, model: Any, diffusing: Any = None, **knobs: Any) -> truedraft.Accelerated:
    draft = registry.load("drafters", name, model=diffusing or diffusion_of(model), **knobs)
    return tokenized(model, draft=draft, control="fixed")


def attended(length: int, known: int, attention: str) -> Tensor:
    """(length, length) bool: complete blocks see themselves and all before, the rest is one block."""
    seen = torch.ones(length, length, dtype=torch.bool)
    first = (known - 1) // BLOCK * BLOCK
    for i in range(first if attention == "blocks" else 0):
        seen[i, (i // BLOCK + 1) * BLOCK :] = False
    return seen


def by_hand(model: Any, text: Sequence[int], masks: int, attention: str) -> Tensor:
    """(masks, V) logits of the model's own forward at masks behind a text."""
    whole = torch.tensor([[*text, *[MASK] * masks]])
    seen = attended(whole.shape[1], len(text), attention)
    with torch.no_grad():
        logits = model(whole, attention_mask=seen[None, None], use_cache=False).logits[0]
    return logits[len(text) - 1 : -1, :V]


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("attention", ["blocks", "whole"])
@pytest.mark.parametrize("rows", [1, 4])
def test_predictions_are_those_of_plain_forwards(
    rows: int, attention: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that draft by turns, and end one by one, in slots that move."""
    model = tiny("llama", torch.float32)
    diffusing = diffusion_of(model, attention)
    fast = drafting("deer", model, diffusing, depth=5)
    fast.drafter.reader.runtime = runtime
    compared, passes = 0, 0
    filled, propose = MaskReader.filled, fast.drafter.propose

    def checked(reader: MaskReader, some: Sequence[Any], counts: Sequence[int]) -> Tensor:
        nonlocal compared
        found = filled(reader, some, counts)
        for row, count, logits in zip(some, counts, found, strict=True):
            expected = by_hand(diffusing, row.tokens, count, attention)
            assert torch.allclose(logits[:count], expected, atol=1e-3 * float(expected.std()))
            compared += count
        return found

    def by_turns(some: Sequence[Any], budget: Sequence[int]) -> Any:
        nonlocal passes
        passes += 1
        return propose(some, [most * bool((row.index + passes) % 3) for row, most in zip(some, budget, strict=True)])

    monkeypatch.setattr(MaskReader, "filled", checked)
    monkeypatch.setattr(fast.drafter, "propose", by_turns)
    inputs = ragged(model, rows)
    settings: dict[str, Any] = dict(
        max_new_tokens=30, do_sample=True, temperature=2.0, eos_token_id=[5, 9], pad_token_id=0
    )
    torch.manual_seed(3)
    expected = model.generate(**inputs, **settings)
    torch.manual_seed(3)
    assert torch.equal(fast.generate(**inputs, **settings), expected)
    assert compared > 20 * rows
    assert fast.drafter.reader.target.cache is None and not fast.drafter.reader._rows, "everything is released"


@pytest.mark.parametrize("name", [*NAMES, "deer-tree", "diffuspec-tree"])
def test_right_predictions_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With predictions of the true text all drafts are accepted, up to the end of the row."""
    model = tiny("llama", torch.float32)
    inputs = ragged(model, 1)
    answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()

    def true_text(reader: MaskReader, rows: Sequence[Any], counts: Sequence[int]) -> Tensor:
        logits = torch.zeros(len(rows), max(counts), V)
        for row, line in zip(rows, logits, strict=True):
            for i, token in enumerate(answer[len(row.tokens) :][: len(line)]):
                line[i, token] = 50.0
        return logits

    monkeypatch.setattr(MaskReader, "filled", true_text)
    fast = drafting(name, model, depth=9, **({"shortest": 9} if name.startswith("diffuspec") else {}))
    assert fast.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist() == answer
    assert len(fast.report().passes) == 1 + 4, "nine tokens and one more in a pass"


def test_masks_are_as_many_as_the_context_has_room_for() -> None:
    model = tiny("llama", torch.float32)
    diffusing = copy.deepcopy(diffusion_of(model))
    diffusing.config.max_position_embeddings = 30
    fast = drafting("deer", model, diffusing, depth=8)
    inputs = ragged(model, 1)
    got = fast.generate(**inputs, max_new_tokens=60, do_sample=False)
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=60, do_sample=False))
    at, offered = inputs["input_ids"].shape[1], []
    for done in fast.report().passes:
        (emitted,) = done.emitted
        offered.append((at, emitted.offered))
        at += len(emitted.tokens)
    assert all(count <= max(30 - length, 0) for length, count in offered[1:])
    assert any(count == 8 for _, count in offered)


def test_a_diffusion_model_is_accepted_as_the_draft() -> None:
    model, tokenizer = load("nano")
    diffusing, _ = load("nano-diffusion", runs=CANVASES)
    fast = truedraft.accelerate(model, draft=diffusing, control="fixed")
    inputs = tokenizer("one day, a little girl", return_tensors="pt", return_token_type_ids=False)
    got = fast.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=40, do_sample=False))
    assert fast.report().drafter == "deer" and fast.report().mean_acceptance_length > 1.3


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_draft_is_refused(name: str) -> None:
    model = tiny("llama", torch.float32)
    with pytest.raises(Refused, match=f"{name} needs a diffusion model: draft='{name}:model=NAME'"):
        truedraft.accelerate(model, draft=name)
    with pytest.raises(Refused, match="is no diffusion model: its configuration declares no canvas_config"):
        drafting(name, model, tiny("llama", torch.float32))
    with pytest.raises(Refused, match=f"{name} has 62 tokens, the model 33"):
        drafting(name, tiny("llama", torch.float32, vocabulary=33), diffusion_of(model))
    gec, tokenizer = load("nano-gec")
    with pytest.raises(Refused, match=f"{name} cannot draft for .*: a diffusion model continues a text"):
        drafting(name, gec, diffusion_of(gec))
    with pytest.raises(Refused, match=f"the tokenizer of {name} .* differs from the model's"):
        truedraft.accelerate(load("nano")[0], tokenizer, draft=f"{name}:nano-diffusion")
    causal = copy.deepcopy(diffusion_of(model))
    causal.forward = lambda input_ids, **_: type(causal).forward(causal, input_ids)  # ignores every mask
    with pytest.raises(Refused, match="its forward attends to earlier positions only"):
        drafting(name, model, causal)


def test_a_model_that_takes_no_mask_drafts() -> None:
    model = tiny("llama", torch.float32)
    inner = diffusion_of(model, "whole")
    diffusing = Bidirectional(inner.config)
    diffusing.inner = inner
    fast = drafting("deer", model, diffusing, depth=4)
    inputs = ragged(model, 2)
    got = fast.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=20, do_sample=False))
    assert any(emitted.offered for done in fast.report().passes for emitted in done.emitted)


# ---------------------------------------------------------------- the search of DiffuSpec


def test_counted_strings_back_off_to_shorter_ones() -> None:
    ngrams = diffuspec.NGrams(3)
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3]
    ngrams.follow(text[:4])
    ngrams.follow(text)
    assert ngrams.score([1, 2], 3) == pytest.approx(log(2 / 3))
    assert ngrams.score([7, 2], 4) == pytest.approx(log(0.4 * 1 / 3))
    assert ngrams.score([7, 7], 1) == pytest.approx(log(0.16 * 3 / 9))
    assert ngrams.score([1, 2], 9) == pytest.approx(log(0.064 / 10))


def lattice_of(seed: int, width: int = 3, depth: int = 4) -> list[list[tuple[int, float]]]:
    torch.manual_seed(seed)
    laws = (2 * torch.randn(depth, 6)).softmax(-1)
    return [sorted(enumerate(law.tolist()), key=lambda one: -one[1])[:width] for law in laws]


def every_path(lattice: list[list[tuple[int, float]]]) -> list[list[tuple[int, float]]]:
    paths: list[list[tuple[int, float]]] = [[]]
    for some in lattice:
        paths = [[*path, one] for path in paths for one in some]
    return paths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_wide_beam_finds_the_best_of_all_paths(weight: float, seed: int) -> None:
    text, lattice = [0, 1, 2, 3, 0, 1, 4, 2, 0, 1], lattice_of(seed)
    ngrams = diffuspec.NGrams(3)
    ngrams.follow(text)

    def total(path: list[tuple[int, float]]) -> float:
        tokens = [token for token, _ in path]
        return sum(
            (1 - weight) * log(p) + weight * ngrams.score([*text, *tokens[:i]], token)
            for i, (token, p) in enumerate(path)
        )

    best = max(every_path(lattice), key=total)
    score = diffuspec.PathScore(text, ngrams, weight)
    assert diffuspec.best_path(score, lattice, beam=81) == [token for token, _ in best]
    if weight == 0:
        assert diffuspec.best_path(score, lattice, beam=1) == [some[0][0] for some in lattice]


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_has_the_likeliest_of_all_paths(seed: int) -> None:
    """Without n-grams these are products of the positions' probabilities."""
    lattice, ends, ngrams = lattice_of(seed), frozenset([2]), diffuspec.NGrams(3)
    ngrams.follow([0, 1])
    tree = diffuspec.best_tree(diffuspec.PathScore([0, 1], ngrams, 0.0), lattice, 9, ends)
    found = {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))}
    chances: dict[tuple[int, ...], float] = {}
    for path in every_path(lattice):
        p = 1.0
        for i, (token, chance) in enumerate(path):
            p *= chance
            chances[tuple(one for one, _ in path[: i + 1])] = p
            if token in ends:
                break
    assert found == set(sorted(chances, key=lambda path: -chances[path])[:9])


def test_candidates_cover_the_mass_and_end_with_the_text() -> None:
    found = [[(1, 0.5), (9, 0.2), (2, 0.2), (3, 0.1)], [(4, 0.9), (5, 0.1)], [(9, 0.6), (6, 0.4)], [(7, 1.0)]]
    kept = diffuspec.pruned(found, 0.8, frozenset([9]))
    assert kept == [[(1, 0.5), (2, 0.2)], [(4, 0.9)], [(9, 0.6), (6, 0.4)]]
    assert diffuspec.pruned([[(1, 1.0)], [], [(2, 1.0)]], 0.8, frozenset()) == [[(1, 1.0)]]


def test_the_length_of_drafts_follows_their_ends_and_grows_where_all_is_accepted() -> None:
    draft = registry.load(
        "drafters", "diffuspec", model=diffusion_of(tiny("llama", torch.float32)), shortest=3, depth=9
    )
    draft.reader.reach = lambda row: 100
    row: Any = object()
    draft._rows[row] = state = diffuspec.RowState(diffuspec.NGrams(3), 3.0)
    lengths = []

    def verified(drafted: int, accepted: int) -> None:
        state.drafted = drafted
        nodes: Any = type("Accepted", (), {"path": tuple(range(accepted + 1))})()
        draft._calibration.update = lambda rows: None
        draft.observe([row], [], None, [nodes])
        lengths.append(draft.deepest(row))

    for _ in range(60):
        verified(draft.deepest(row), draft.deepest(row))
    assert lengths == sorted(lengths) and lengths[-1] == 9, "all is accepted"
    lengths.clear()
    for _ in range(60):
        verified(5, 1)
    assert lengths[-1] == 5, "the text ends after five tokens"
    for _ in range(60):
        verified(1, 1)
    assert lengths[-1] == 3, "at least"


def test_layouts_are_compared_by_the_same_oracle_as_canvases() -> None:
    """The mask written out here is that of test_canvas.py where the last block is a usual one."""
    model = diffusion_of(tiny("llama", torch.float32))
    text = list(range(1, 7))
    other = plain(model, [*text, MASK, MASK], Layout(MASK, "blocks", BLOCK))[5:7, :V]
    assert torch.allclose(by_hand(model, text, 2, "blocks"), other, atol=1e-5)
