"""NEST: neighbours against numpy, the law of the output by enumeration, attributed spans against their documents."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import truedraft
from models import V, ragged, tiny
from truedraft import Refused, registry
from truedraft.chance import outcomes
from truedraft.stores import neighbours
from truedraft.stores.corpus import Corpus
from truedraft.stores.neighbours import Neighbours, Search
from truedraft.tree import DraftTree, Prompt, Row, Taps

SIZE, STEPS, PROMPT = 4, 3, [3, 1, 2, 3]
TEXTS = [("one", [1, 2, 3, 1, 2, 0, 3, 3, 1]), ("two", [2]), ("three", [3, 1, 2, 0, 0, 1])]
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


def plain(model: Any, tokens: list[int], layer: int = -2) -> tuple[np.ndarray, np.ndarray]:
    """Logits after a text, and the state there with a mean square of 1."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    state = out.hidden_states[layer][0, -1].double().numpy()
    return out.logits[0, -1].double().numpy(), state / np.sqrt((state**2).mean())


class Direct:
    """An independent implementation of the method in numpy."""

    def __init__(self, model: Any, texts: list[tuple[str, list[int]]], k: int, alpha: float, tau: float):
        self.model, self.k, self.alpha, self.tau = model, k, alpha, tau
        self.texts = [text for _, text in texts]
        self.entries = [
            (plain(model, text[: i + 1])[1], d, i + 1)
            for d, text in enumerate(self.texts)
            for i in range(len(text) - 1)
        ]

    def near(self, state: np.ndarray) -> tuple[float, list[tuple[float, int, int]]]:
        """The model's weight, and (similarity, document, index of the next token), the nearest first."""
        found = sorted(
            ((-((state - key) ** 2).sum(), d, i) for key, d, i in self.entries), key=lambda entry: -entry[0]
        )[: self.k]
        return 1 / (1 + math.exp(-(found[0][0] / found[-1][0] - self.alpha) / self.tau)), found

    def mixture(self, tokens: list[int]) -> np.ndarray:
        logits, state = plain(self.model, tokens)
        weight, found = self.near(state)
        neighbours = np.zeros(len(logits))
        shares = np.exp(np.array([s for s, _, _ in found]) / math.sqrt(len(state)))
        for share, (_, d, i) in zip(shares / shares.sum(), found, strict=True):
            neighbours[self.texts[d][i]] += share
        law = np.exp(logits - logits.max())
        return weight * law / law.sum() + (1 - weight) * neighbours

    def span(self, tokens: list[int], delta: float, length: int) -> list[int]:
        """The draft after a text, from the state before its last token."""
        weight, found = self.near(plain(self.model, tokens[:-1])[1])
        for _, d, i in found:
            if self.texts[d][i] == tokens[-1]:
                return self.texts[d][i + 1 : i + 1 + length] if weight <= delta else []
        return []

    def law(self, gamma: float, delta: float, length: int) -> dict[tuple[int, ...], float]:
        """The law of the next STEPS tokens."""
        law: dict[tuple[int, ...], float] = {}

        def extend(emitted: list[int], draft: list[int], p: float) -> None:
            if len(emitted) == STEPS:
                law[tuple(emitted)] = law.get(tuple(emitted), 0.0) + p
                return
            mixed = self.mixture(PROMPT + emitted)
            kept = 0.0
            if draft:
                kept = 1.0 if gamma == 0 else min(1.0, mixed[draft[0]] / (gamma * mixed.max()))
                extend([*emitted, draft[0]], draft[1:], p * kept)
            for token, q in enumerate(mixed):
                if draft[:1] == [token]:
                    extend([*emitted, token], draft[1:], p * (1 - kept) * q)
                else:
                    fresh = self.span([*PROMPT, *emitted, token], delta, min(length, STEPS - len(emitted) - 2))
                    extend([*emitted, token], fresh, p * (1 - kept) * q)

        extend([], [], 1.0)
        return law


def measured(fast: truedraft.Accelerated, **kwargs: Any) -> dict[tuple[int, ...], float]:
    """The law of the next tokens by enumeration over every flip and draw."""

    def once(chance: Any) -> tuple[int, ...]:
        out = fast.generate(torch.tensor([PROMPT]), max_new_tokens=STEPS, **SAMPLED, chance=chance, **kwargs)
        return tuple(out[0, len(PROMPT) :].tolist())

    law: dict[tuple[int, ...], float] = {}
    for emitted, p in outcomes(once):
        law[emitted] = law.get(emitted, 0.0) + p
    return law


def both(store: Any, gamma: float = 5e-4, delta: float = 0.5, **knobs: Any) -> dict[str, Any]:
    """Drafter and rule with the same texts."""
    return {
        "draft": registry.load("drafters", "nest", store=store, delta=delta, **knobs),
        "rule": registry.load("accept", "lossy/nest", store=store, gamma=gamma, **knobs),
        "control": "fixed",
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("gamma", [0.0, 5e-4, 0.7, 1.0, 1e9])
@pytest.mark.parametrize("drafts", [False, True])
def test_law_is_that_of_the_relaxed_mixture(gamma: float, drafts: bool) -> None:
    model = tiny(vocabulary=SIZE, sharpen=1.5)
    direct = Direct(model, TEXTS, k=5, alpha=0.5, tau=0.2)
    parts = both(Neighbours.built(model, TEXTS), gamma, delta=1.0, k=5, alpha=0.5, tau=0.2)
    found = measured(truedraft.accelerate(model, **(parts if drafts else {**parts, "draft": None})))
    expected = direct.law(gamma, 1.0, 64 if drafts else 0)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    assert found == pytest.approx({s: p for s, p in expected.items() if p > 0}, abs=1e-5)
    if drafts and gamma == 1e9:  # a drafted token is kept only where it is drawn anyway: the plain mixture
        assert found == pytest.approx(direct.law(1.0, 1.0, 0), abs=1e-5)


def test_weight_and_law_of_the_neighbours_equal_numpy() -> None:
    model = tiny(vocabulary=SIZE, sharpen=1.5)
    store, row = Neighbours.built(model, TEXTS), Row(0, list(PROMPT), 4, 9)
    for k, alpha, tau in ((1024, 0.3, 0.1), (3, 0.5, 0.4), (1, 0.3, 0.1)):
        search, direct = Search(store, -1, k, alpha, tau), Direct(model, TEXTS, k, alpha, tau)
        with torch.no_grad():
            state = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-2][0, -1]
        weight, found = direct.near(plain(model, PROMPT)[1])
        at = search.at(row, state[None])
        assert at is not None
        near = at(0)
        assert near.doubt == pytest.approx(weight, rel=1e-4)
        places = [(0, 9)[d > 0] + i for _, d, i in found]
        assert near.places.tolist() == places
        shares = np.exp(np.array([s for s, _, _ in found]) / math.sqrt(32))
        counts = np.bincount([direct.texts[d][i] for _, d, i in found], shares / shares.sum(), SIZE)
        assert near.law(SIZE).tolist() == pytest.approx(counts.tolist(), abs=1e-5)


@pytest.mark.parametrize("runtime", ["stock", "auto"])
def test_text_is_its_own_nearest_neighbour(runtime: str) -> None:
    model = tiny("llama", torch.float32)
    text = ragged(model, 4)["input_ids"][3].tolist()
    store = Neighbours.built(model, [("other", text[::-1]), ("same", text)])
    target = truedraft.accelerate(model, runtime=runtime).target
    target.reserve(1, 40)
    target.taps = Taps((-2,))
    states = target.prefill([Prompt(torch.tensor(text[:-3]))]).hidden[-2][0]
    target.commit([[0]])
    states = torch.cat([states, target.score([DraftTree.chain(text[-3], text[-2:])]).hidden[-2][0]])
    target.cache = None
    for i, state in enumerate(states[:-1], 1):
        (close,), (place,) = store.nearest(store.compared(state[None])[0], 1)
        assert store.source(int(place)) == ("same", i) and -1e-3 < close <= 0


def test_long_documents_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny(), [*range(3, 40)]
    whole = Neighbours.built(model, [("a", text)])
    monkeypatch.setattr(neighbours, "PART", 10)
    parts = Neighbours.built(model, [("a", text), ("b", text[:2])])
    assert len(parts.keys) == 37 and torch.allclose(parts.keys[:10], whole.keys[:10], atol=1e-5)
    assert torch.allclose(parts.keys[10:15], neighbours._scaled(_states(model, text[5:15])[5:]), atol=1e-5)
    assert parts.source(36) == ("a", 36) and parts.source(38) == ("b", 1) and parts.behind(35, 9) == text[35:]


def _states(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-2][0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", ["nest", "nest:delta=1.0", "nest>prompt-lookup", "prompt-lookup>nest", "nest+llma"])
@pytest.mark.parametrize("way", [{"do_sample": False}, SAMPLED])
def test_exact_rules_change_no_token(draft: str, way: dict[str, Any]) -> None:
    model, inputs = tiny(), ragged(tiny(), 3)
    torch.manual_seed(5)
    expected = model.generate(**inputs, max_new_tokens=40, **way)
    answers = [row.tolist() for row in expected]
    for references in (answers, [[a] for a in answers], [[answers[0]], [], [[7]]]):
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        torch.manual_seed(5)
        got = fast.generate(**inputs, max_new_tokens=40, references=references, **way)
        assert torch.equal(got, expected) and fast.report().guarantee == "tokens"
        assert fast.report().mean_acceptance_length > (1.1 if references[-1] == [[7]] else 2.5)
        assert fast.report().attributions == ()


def test_attributed_spans_are_in_their_documents() -> None:
    model, inputs = tiny(), ragged(tiny(), 3)
    texts = [row.tolist() for row in torch.randint(3, V, (4, 30))]
    texts += [row[-20:] for row in model.generate(**inputs, max_new_tokens=30, do_sample=False).tolist()]
    fast = truedraft.accelerate(model, draft="nest:delta=0.9", rule="lossy/nest", control="fixed")
    out = fast.generate(**inputs, max_new_tokens=40, references=texts, **SAMPLED)
    report, start = fast.report(), inputs["input_ids"].shape[1]
    assert {a.row for a in report.attributions} == {0, 1, 2}
    ends = dict.fromkeys(range(3), 0)
    for a in report.attributions:
        source = texts[int(a.source.removeprefix("references[").removesuffix("]"))]
        assert a.end - a.start > 1 and a.start >= ends[a.row]
        assert out[a.row, start + a.start : start + a.end].tolist() == source[a.offset : a.offset + a.end - a.start]
        ends[a.row] = a.end
    copied = sum(a.end - a.start for a in report.attributions)
    assert copied >= sum(e.drafted for p in report.passes for e in p.emitted) > 30
    assert report.guarantee == "none" and f"{copied} tokens copied" in str(report) and "lossy" in str(report)
    assert report.as_dict()["attributions"][0]["source"].startswith("references[")


def test_row_without_texts_equals_the_model() -> None:
    model, ids = tiny(), torch.tensor([[5, 6, 7], [5, 6, 7]])
    fast = truedraft.accelerate(model, draft=None, rule="lossy/nest:alpha=2.0", control="fixed")
    out = fast.generate(ids, max_new_tokens=15, references=[[[9] * 20], []], seed=[3, 4], **SAMPLED)
    alone = truedraft.accelerate(model, draft=None).generate(ids[1:], max_new_tokens=15, seed=[4], **SAMPLED)
    assert torch.equal(out[1:], alone) and (out[0, 3:] == 9).sum() > 3


def test_tokens_excluded_by_processors_are_not_copied() -> None:
    model, text = tiny(), [7, 8, 9, 7, 8, 9, 7, 8, 9, 10] * 3
    fast = truedraft.accelerate(model, draft="nest:delta=1.0", rule="lossy/nest", control="fixed")
    out = fast.generate(
        torch.tensor([[7, 8, 9, 7]]), max_new_tokens=30, references=[text], bad_words_ids=[[8], [9, 7]], **SAMPLED
    )[0, 4:].tolist()
    assert 8 not in out and [9, 7] not in [out[i : i + 2] for i in range(29)] and {9, 10} & set(out)


def test_neighbours_are_saved_and_damage_is_refused(tmp_path: Path) -> None:
    model, path = tiny(vocabulary=SIZE), tmp_path / "texts"
    made = Neighbours.built(model, TEXTS, layer=1)
    made.save(path)
    kept = Neighbours.open(path)
    assert (kept.layer, kept.names, kept.starts) == (1, ("one", "three"), (0, 9, 15))
    assert torch.equal(kept.keys, made.keys) and torch.equal(kept.text, made.text)
    opened, fresh = (measured(truedraft.accelerate(model, **both(store))) for store in (path, made))
    assert opened == pytest.approx(fresh, abs=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-5] ^= 1
    for content, why in ((bytes(damaged), "checksum of 'keys'"), (whole[:-9], "damaged"), (b"", "damaged")):
        path.write_bytes(content)
        with pytest.raises(Refused, match=why):
            Neighbours.open(path)
    Corpus.built([[1, 2]]).save(path)
    with pytest.raises(Refused, match="is no datastore, but a corpus: leave it as it is, and build one"):
        registry.load("accept", "lossy/nest", store=path)
    with pytest.raises(Refused, match="no such file"):
        registry.load("drafters", f"nest:store={tmp_path / 'none'}")


NEST = {"draft": "nest", "rule": "lossy/nest", "control": "fixed"}
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("samples, and do_sample is False", lambda: _generated(do_sample=False)),
    ("no text to search", lambda: _generated()),
    ("no text to search", lambda: _generated(references=[[5]])),
    (r"layer=3: give 0 .* to 2 .* or -1 .* to -3", lambda: truedraft.accelerate(tiny(), draft="nest:layer=3")),
    ("layer=-4", lambda: _generated(rule="lossy/nest:layer=-4", draft=None, references=[[5, 6]])),
    ("layer=9", lambda: Neighbours.built(tiny(), TEXTS, layer=9)),
    ("vocabulary of 4", lambda: Neighbours.built(tiny(vocabulary=SIZE), [("a", [1, 5])])),
    ("nothing to look for", lambda: Neighbours.built(tiny(), [("a", [1]), ("b", [])])),
    ("32 numbers, the model's 16", lambda: Search(Neighbours.built(tiny(), TEXTS), -1, 9, 0.3, 0.1).fit(_narrow())),
    ("k=0", lambda: registry.load("drafters", "nest", k=0)),
    ("tau=0.0", lambda: registry.load("accept", "lossy/nest", tau=0.0)),
    ("a whole number, -1,024 to 1,024", lambda: registry.load("accept", "lossy/nest", layer=-2.5)),
]


def _generated(references: Any = None, **other: Any) -> None:
    parts = {key: other.pop(key, value) for key, value in NEST.items()}
    fast = truedraft.accelerate(tiny(), **parts)
    fast.generate(torch.tensor([[5, 6]]), max_new_tokens=3, references=references, **{**SAMPLED, **other})


def _narrow() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=9
    ))  # fmt: skip


@pytest.mark.parametrize(("why", "call"), REFUSED, ids=[why for why, _ in REFUSED])
def test_invalid_settings_are_refused_in_one_sentence(why: str, call: Callable[[], Any]) -> None:
    with pytest.raises(Refused, match=why) as caught:
        call()
    assert "\n" not in str(caught.value)
