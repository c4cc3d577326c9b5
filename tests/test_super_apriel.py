"""A lighter placement of a supernet's mixers drafts, sharing all weights; the placement of the model verifies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, tiny
from nets import RULES, SEED
from remote_code import place, supernet
from test_runtime import words
from test_views import begun, error
from truedraft import DraftTree, Refused, registry
from truedraft.runtime.placements import choices, placed
from truedraft.targets.hosting import hosted


def storages(*models: Any) -> int:
    """Bytes of the weights and buffers of models, those that they share once."""
    kept = [tensor.untyped_storage() for model in models for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


def test_a_lighter_placement_shares_all_weights() -> None:
    model: Any = supernet()
    lighter = placed(model, ["window", "attention"])
    assert [choice.active for choice in choices(lighter)] == ["window", "attention"]
    assert [choice.active for choice in choices(model)] == ["attention", "attention"]
    assert storages(model, lighter) == storages(model)
    ids = torch.arange(2, 22)[None]
    expected = place(model, "window", "attention")(ids).logits
    assert torch.equal(lighter(ids).logits, expected) and not torch.equal(model(ids).logits, expected)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        assert torch.equal(lighter(ids).logits, 2 * expected)
        model.lm_head.weight.div_(2)


def two_chains(rng: random.Random, root: int, nodes: int) -> DraftTree:
    """Two chains in turn, longer than a window, so that the places of nodes are not their positions."""
    return DraftTree((root, *words(rng, nodes - 1)), (-1, *(max(i - 2, 0) for i in range(1, nodes))))


@torch.no_grad()
@pytest.mark.parametrize("names", [("window", "window"), ("attention", "window")])
def test_nodes_of_placements_with_windows(names: tuple[str, str]) -> None:
    rng, model = random.Random(5), place(supernet(), *names)
    prompts = [words(rng, n) for n in (13, 1, 6)]
    target = begun(hosted(model), prompts)
    for _ in range(2):
        trees = [two_chains(rng, prompt[-1], n) for prompt, n in zip(prompts, (5, 19, 13), strict=True)]
        scores = target.score(trees)
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                path = [tree.tokens[i] for i in tree.path(node)]
                plain = model(torch.tensor([prompts[row][:-1] + path])).logits[0, -1]
                assert error(scores.logits[row, node], plain) < 1e-6
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.commit(paths)
        for prompt, tree, path in zip(prompts, trees, paths, strict=True):
            prompt[-1:] = [*(tree.tokens[i] for i in path), 3]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("placement", ["", "attention;window"])
def test_a_text_drafted_by_a_placement_is_that_of_model_generate(placement: str, rule: str) -> None:
    model = supernet()
    inputs = ragged(model, 3)
    plain = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert not torch.equal(place(model, "window", "window").generate(**inputs, max_new_tokens=30), plain)
    draft = registry.load("drafters", f"super-apriel:placement={placement}" if placement else "super-apriel")
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    torch.manual_seed(SEED)
    expected = model.generate(**inputs, max_new_tokens=30, **RULES[rule])
    torch.manual_seed(SEED)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=30, **RULES[rule]), expected)
    assert fast.report().acceptance_rate is not None


def test_what_is_drafted_is_the_text_of_the_lighter_placement() -> None:
    model, lighter = supernet(), place(supernet(), "window", "window")
    drafter = registry.load("drafters", "super-apriel:length=6")
    seen: list[tuple[list[int], Any]] = []

    def propose(rows: Any, budget: Any, own: Any = drafter.propose) -> Any:
        trees = own(rows, budget)
        seen.extend((list(row.tokens), tree) for row, tree in zip(rows, trees, strict=True))
        return trees

    drafter.propose = propose  # type: ignore[method-assign]
    fast = truedraft.accelerate(model, draft=drafter, control="fixed")
    fast.generate(torch.arange(3, 20)[None], max_new_tokens=24, do_sample=False)
    drafted = [(tokens, tree) for tokens, tree in seen if len(tree) > 1]
    for tokens, tree in drafted:
        own = lighter.generate(torch.tensor([tokens]), max_new_tokens=len(tree) - 1, do_sample=False)[0].tolist()
        assert list(tree.tokens) == own[len(tokens) - 1 :]
    assert len(drafted) > 5


def test_refusals() -> None:
    for model, draft, why in (
        (
            tiny("llama", torch.float32),
            "super-apriel",
            "those of LlamaForCausalLM have one each",
        ),
        (supernet(), "super-apriel:placement=attention", "that of the model itself"),
        (
            supernet(),
            "super-apriel:placement=window;mamba",
            "no mixer 'mamba' in a layer",
        ),
        (
            supernet(),
            "super-apriel:placement=states",
            "cannot draft with placement=states: Supernet",
        ),
    ):
        with pytest.raises(Refused, match=why):
            truedraft.accelerate(model, draft=draft)
    with pytest.raises(Refused, match="names of mixers"):
        registry.load("drafters", "super-apriel:placement=;")
