"""Layers that are found while decoding: scores against cut models, the search against planted answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, tiny
from test_runtime import random_tree, words
from test_views import COMPILED, LAYERS, RUNTIMES, CutModel, begun, deep, error, skipping, target_of
from truedraft import Refused, registry
from truedraft.drafters.self_._search import SkipSearch
from truedraft.drafters.self_.swift import Swift
from truedraft.targets.decoder import DecoderTarget
from truedraft.views.window_kv import WindowKv

LENGTHS = (17, 9, 12)  # of prompts
MOST = dict(window=6, enough=1.0, effort=1000.0)  # knobs with which every pass is followed by a trial


# ---------------------------------------------------------------- committed tokens that are read again


@torch.no_grad()
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_logits_of_a_replay_are_those_of_a_cut_model(runtime: str) -> None:
    """Behind the whole model's keys and values of what is before, beside rows of other lengths."""
    rng, skipped = random.Random(1), (0, 2)
    prompts = [words(rng, n) for n in LENGTHS]
    target = begun(target_of(deep("llama", torch.float32), runtime), prompts)
    for slot, count in ((1, 5), (0, 16), (2, 1)):
        tokens, before = prompts[slot][-count - 1 : -1], prompts[slot][: -count - 1]
        mine = target.replayed(skipping(skipped), slot, tokens)
        plain = CutModel(target.model, skipped, [*before, 0]).logits(tokens)
        assert mine.shape == plain.shape and error(mine, plain) < 1e-4


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_committed_has_the_same_bits_after_a_replay(
    runtime: str, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, model = random.Random(2), deep("llama", torch.float32)
    prompts = [words(rng, n) for n in LENGTHS]
    target, plain = (begun(target_of(model, runtime), prompts) for _ in range(2))
    for _ in range(3):
        cache: Any = target.cache
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        target.score([random_tree(rng, 3, 4)], skipping((1,)), [2])
        target.advance(skipping((1,)), [[0]], [2])
        if interrupted:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                scored = target.runner.score
                patch.setattr(target.runner, "score", lambda *given: (scored(*given), raised(KeyboardInterrupt())))
                target.replayed(skipping((1,)), 0, prompts[0][-6:-1])
        else:
            target.replayed(skipping((1,)), 0, prompts[0][-6:-1])
        assert cache.lengths == plain.cache.lengths and cache.cursor.scratch == []  # type: ignore[union-attr]
        for layer, kept in zip(cache.layers, before, strict=True):
            for slot, length in enumerate(cache.lengths):
                assert torch.equal(layer.keys[slot, :, :length], kept[0][slot, :, :length])
                assert torch.equal(layer.values[slot, :, :length], kept[1][slot, :, :length])
        trees = [random_tree(rng, 3, n) for n in (4, 7, 1)]
        assert torch.equal(target.score(trees).logits, plain.score(trees).logits)
        for both in (target, plain):
            both.commit([[0] for _ in trees])
        prompts = [[*prompt, 3] for prompt in prompts]


def raised(error: BaseException) -> None:
    raise error


def test_views_of_chosen_entries_read_nothing_again() -> None:
    target = begun(DecoderTarget(deep("llama", torch.float32)), [[5, 6, 7, 8]])
    with pytest.raises(Refused, match="window-kv cannot read committed tokens again: what it reads of the cache"):
        target.replayed(WindowKv(sinks=1, recent=2), 0, [6, 7])


# ---------------------------------------------------------------- the search


def test_a_search_keeps_the_best_set_and_its_model_finds_the_parts_that_matter() -> None:
    rng = random.Random(3)
    weights = [rng.random() for _ in range(12)]  # lost where a part is skipped
    score = lambda chosen: 1 - sum(weights[i] for i in chosen) / 12  # noqa: E731
    search, best = SkipSearch(12, 5, modelled=25), 0.0
    for _ in range(100):
        chosen = search.propose()
        assert len(set(chosen)) == 5 and set(chosen) <= set(range(12)) and list(chosen) == sorted(chosen)
        better = search.record(chosen, score(chosen))
        assert better == (score(chosen) > best) and search.score == max(best, score(chosen))
        assert search.score == score(search.best)
        best = search.score
    assert search.best == tuple(sorted(sorted(range(12), key=weights.__getitem__)[:5]))
    tried = [chosen for chosen, _ in search.tried]
    assert tried[0] == (1, 3, 6, 8, 10) and len(set(tried)) > 60
    assert all(score(tried[i]) > 0.97 * best for i in (49, 74, 99)), "drawn from the model"


def searched(draft: Swift, namespace: str = "") -> SkipSearch:
    return draft._streams.of(namespace).search


def run(model: Any, tokens: int = 40, rows: int = 3, **knobs: Any) -> Swift:
    draft = Swift(**{**MOST, **knobs})
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    inputs, settings = ragged(model, rows), dict(max_new_tokens=tokens, do_sample=False)
    assert torch.equal(fast.generate(**inputs, **settings), model.generate(**inputs, **settings))
    return draft


@COMPILED
@torch.no_grad()
def test_the_score_of_a_set_is_the_agreement_of_a_cut_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the text decoded, at its last positions; of a model whose halves cannot be skipped, so that layers are."""
    model, trials = tiny("gpt_neox", torch.float32, layers=6), list[tuple[list[int], int]]()
    attempt = Swift._try
    monkeypatch.setattr(
        Swift, "_try", lambda *given: (trials.append((given[2].tokens[:], given[2].slot)), attempt(*given))
    )
    draft = run(model)
    assert len(searched(draft).tried) == len(trials) > 10
    assert {len(chosen) for chosen, _ in searched(draft).tried} == {3} and len(dict(searched(draft).tried)) == 4
    assert len({slot for _, slot in trials}) > 1
    for (tokens, _), (chosen, score) in zip(trials, searched(draft).tried, strict=True):
        cut = CutModel(model, [1 + i for i in chosen], [*tokens[:-7], 0])
        assert score == float((cut.logits(tokens[-7:-1]).argmax(-1) == torch.tensor(tokens[-6:])).float().mean())
    assert len({score for _, score in searched(draft).tried}) > 2
    assert draft.found() == draft.without(searched(draft).best)


def test_sampled_text_is_scored_by_what_the_model_finds_likeliest() -> None:
    """A set whose layers do nothing agrees with all tokens, though few of those drawn are the likeliest."""
    model: Any = tiny.__wrapped__("llama", torch.float32, sharpen=1.5, layers=LAYERS)
    for layer in model.model.layers[1:3]:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(linear.weight)
    draft = Swift(**MOST, top_k=1, depth=1)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    fast.generate(**ragged(model, 2), max_new_tokens=20, do_sample=True, top_k=0)
    assert searched(draft).score == 1.0 and fast.report().acceptance_rate == 1.0


def test_the_search_belongs_to_the_stream() -> None:
    """It goes on in the next call, and `forget` ends it."""
    model = tiny("llama", torch.float32, layers=LAYERS)
    draft = Swift(**MOST)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    counts = []
    for _ in range(2):
        fast.generate(**ragged(model, 3), max_new_tokens=20, do_sample=False)
        counts.append(len(searched(draft).tried))
        assert not draft._decoded, "rows that have ended are kept"
    assert 0 < counts[0] < counts[1]
    assert registry.load("views", draft.found().name).reduction(LAYERS) == draft.found().reduction(LAYERS)
    draft.forget()
    assert not searched(draft).tried and draft.found() == draft.without(searched(draft).best)


def test_namespaces_search_for_themselves() -> None:
    """In one batch, whose rows draft under different views; each has the set that its own texts found."""
    model, seen = tiny("gpt_neox", torch.float32, layers=6), list[int]()
    inputs, settings = ragged(model, 3), dict(max_new_tokens=40, do_sample=False)
    draft = Swift(**MOST, depth=2)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    propose = draft.propose
    draft.propose = lambda rows, budget: (seen.append(len(set(map(draft.view_of, rows)))), propose(rows, budget))[1]  # type: ignore[method-assign]
    for _ in range(2):
        out = fast.generate(**inputs, **settings, namespace=["a", "b", "a"])
        assert torch.equal(out, model.generate(**inputs, **settings))
    assert max(seen) == 2 and searched(draft, "a").tried and searched(draft, "b").tried
    assert not searched(draft).tried and draft.found("a") != draft.found("b")


def test_the_search_ends() -> None:
    model = tiny("llama", torch.float32, layers=LAYERS)
    assert len(searched(run(model, trials=3)).tried) == 3
    assert searched(run(model, patience=2)).stale == 2
    good = searched(run(model, enough=0.0))
    assert good.score > 0 and good.tried[-1][1] == good.score
    assert not searched(run(model, effort=0.0)).tried
    assert not searched(run(model, window=50)).tried, "no row has so many tokens"
    apart, usual = (len(searched(run(model, interval=n)).tried) for n in (4, 1))
    assert 0 < apart < usual


@pytest.mark.parametrize("effort", [0.02, 0.3])
def test_its_time_is_a_share_of_that_of_decoding(effort: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a pass advances by a second, and a set that is scored by two."""
    model, now, spent = tiny("llama", torch.float32, layers=LAYERS), [0.0], list[float]()
    monkeypatch.setattr("truedraft.drafters.self_.swift.time.perf_counter", lambda: now[0])
    attempt, score = Swift._try, DecoderTarget.score

    def counted(*given: Any) -> None:
        monkeypatch.setattr(DecoderTarget, "replayed", lambda *of: (ticked(2.0), replayed(*of))[1])
        attempt(*given)
        spent.append(now[0])

    def ticked(seconds: float) -> None:
        now[0] += seconds

    replayed = DecoderTarget.replayed
    monkeypatch.setattr(Swift, "_try", counted)
    whole = lambda self, trees, *under: (ticked(0.0 if under else 1.0), score(self, trees, *under))[1]  # noqa: E731
    monkeypatch.setattr(DecoderTarget, "score", whole)
    run(model, tokens=120, rows=1, effort=effort)
    assert spent and all(2 * i <= effort * at + 2 for i, at in enumerate(spent, 1))
    assert effort < 0.1 or len(spent) > 4


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(Refused, match="swift:ends=1 keeps all of the 2 layers: skip some of them, or draft by"):
        truedraft.accelerate(tiny("llama", torch.float32), draft="swift")


@pytest.mark.parametrize("layers", [3, 4])
def test_the_first_and_the_last_layer_are_kept(layers: int) -> None:
    draft = Swift(share=1.0)
    truedraft.accelerate(tiny("llama", torch.float32, layers=layers), draft=draft)
    left_out = draft.found().reduction(layers)
    assert left_out.attention == left_out.feed_forward == set(range(1, layers - 1))


def test_drafts_are_combs() -> None:
    """Of the children of a node only one has children of its own."""
    model, trees = tiny("llama", torch.float32, layers=LAYERS), list[Any]()
    draft = Swift(effort=0.0, top_k=3)
    finished = draft.finished
    draft.finished = lambda growing: trees.append(finished(growing)) or trees[-1]  # type: ignore[method-assign,func-returns-value]
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    fast.generate(**ragged(model, 2), max_new_tokens=20, do_sample=False)
    assert any(len(tree) > 4 for tree in trees)
    for tree in trees:
        parents = {(tree.shape.depth[p], p) for p in tree.parent[1:]}
        assert len(parents) == len({depth for depth, _ in parents}) and max(map(tree.parent.count, tree.parent)) <= 3
