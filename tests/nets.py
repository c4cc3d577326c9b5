"""The nets: each holds a drafter, a rule and a model to plain `model.generate` or to plain forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

import truedraft
from drafters_for_tests import HiddenReader, Noise, Oracle, ProbeReader, Sampler
from models import V, ragged, sibling
from truedraft import Corpus, Drafter, DraftTree, registry
from truedraft.tree import Row, Scores

REGISTERED = [*registry.names("drafters"), *registry.presets("drafters")]
TRIALS = ["oracle", "noise", "sampler", "sampler-distinct", "probes", "taps"]
DRAFTERS = [*REGISTERED, *TRIALS, "plain"]
RULES: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"do_sample": True, "top_k": 0}}


class Counting(LogitsProcessor):
    """A user's processor with a memory: its effect depends on how often and with what it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(input_ids.shape))
        scores = scores.clone()
        scores[:, len(self.calls) % scores.shape[1]] += 5.0
        scores[:, input_ids[:, -1].sum() % scores.shape[1]] += 2.0  # looks across rows
        return scores


class Alternating(StoppingCriteria):
    """A user's criterion that ends a row at its second token divisible by seven."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -12:] % 7 == 0).sum(-1) >= 4


PROCESSORS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "warpers": lambda: {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "penalties": lambda: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [8, 9]]},
    "constrained": lambda: {
        "prefix_allowed_tokens_fn": lambda b, ids: [t for t in range(V) if (t + b + len(ids)) % 3],
        "min_new_tokens": 5,
    },
    "stranger": lambda: {"logits_processor": [Counting()], "stopping_criteria": [Alternating()]},
}


def drafter(
    name: str,
    model: PreTrainedModel,
    answers: torch.Tensor | None = None,
    padding: Any = None,
    small: Any = None,
    **other: Any,
) -> Drafter | None:
    """A registered drafter, or one of the trial drafters made for this model and its true output.

    small: the model that drafts, for drafters that need one; else one much like the model.
    other: knobs of a registered drafter.
    """
    vocabulary = model.config.vocab_size
    if name == "oracle":
        assert answers is not None
        lines = {b: row[padding[b] :].tolist() for b, row in enumerate(answers)}
        return Oracle(vocabulary=vocabulary, answers=lines)
    if name == "noise":
        return Noise(vocabulary=vocabulary)
    if name.startswith("sampler"):
        return Sampler(vocabulary=vocabulary, drawn=name.partition("-")[2] or "independent")  # type: ignore[arg-type]
    if name == "probes":
        return ProbeReader(vocabulary=vocabulary)
    if name == "taps":
        return HiddenReader(vocabulary=vocabulary, head=model.get_output_embeddings())
    if name == "plain":
        return None
    base, knobs = registry.presets("drafters").get(name, (name, {}))
    needs = registry.method("drafters", base).card.needs
    if "draft model" in needs:
        return registry.load("drafters", base, model=small or sibling(model), **{**knobs, **other})
    if "corpus" in needs:
        other = {"corpus": corpus_of(vocabulary, answers), **other}
    return registry.load("drafters", name, **other)


def corpus_of(vocabulary: int, answers: torch.Tensor | None = None) -> Corpus:
    """A corpus of true outputs, and of babble."""
    babble = torch.randint(vocabulary, (200,), generator=torch.Generator().manual_seed(9)).tolist()
    return Corpus.built([*([] if answers is None else answers.tolist()), babble])


def padding_of(inputs: dict[str, torch.Tensor]) -> list[int]:
    return (inputs["attention_mask"] == 0).sum(-1).tolist()


def eos_inside(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> int:
    """A token that the first row says somewhere in the middle, to serve as end of text inside drafts."""
    torch.manual_seed(5)
    said = model.generate(**inputs, max_new_tokens=30, **kwargs)[0, inputs["input_ids"].shape[1] :].tolist()
    return max(set(said[5:]), key=said.index)


def text_net(
    model: PreTrainedModel,
    name: str,
    inputs: dict[str, torch.Tensor],
    control: str = "fixed",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **kwargs: Any,
) -> truedraft.Report:
    """Output and random stream equal those of `model.generate`; processors given as makers are made for each side."""
    made = [
        {k: v() if k in ("logits_processor", "stopping_criteria") and callable(v) else v for k, v in kwargs.items()}
        for _ in range(2)
    ]
    torch.manual_seed(5)
    expected = model.generate(**inputs, **made[0])
    state = torch.get_rng_state()
    draft = drafter(name, model, expected, padding_of(inputs))
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control=control)
    torch.manual_seed(5)
    got = fast.generate(**inputs, **made[1])
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, plain {tuple(expected.shape)}"
    assert torch.equal(got, expected), f"first difference at {(got != expected).nonzero()[0].tolist()}"
    assert torch.equal(torch.get_rng_state(), state), "the random stream stands elsewhere"
    for mine, theirs in zip(made[1].get("logits_processor", []), made[0].get("logits_processor", []), strict=True):
        if isinstance(mine, Counting):
            assert mine.calls == theirs.calls, "a processor was called otherwise"
    report = fast.report()
    assert report.tokens == sum(len(e.tokens) for p in report.passes for e in p.emitted)
    return report


def node_net(
    model: PreTrainedModel, name: str, rows: int = 3, tolerance: float = 1e-6, steps: int = 16, **kwargs: Any
) -> int:
    """At every pass every node's logits equal a plain forward over its path, no cache; returns the nodes compared."""
    inputs = ragged(model, rows)
    expected = model.generate(**inputs, max_new_tokens=steps, do_sample=False, **kwargs)
    fast = truedraft.accelerate(model, draft=drafter(name, model, expected, padding_of(inputs)), control="fixed")
    compared = 0
    standing: list[Any] = []  # the rows of the pass, in the order of their slots
    score = fast.target.score

    def checked(trees: Sequence[DraftTree]) -> Scores:
        nonlocal compared
        scores = score(trees)
        for b, tree in enumerate(trees):
            for leaf in (i for i, below in enumerate(tree.shape.children) if not below):
                path = list(tree.path(leaf))
                ids = standing[b].tokens[:-1] + [tree.tokens[i] for i in path]
                with torch.no_grad():
                    plain = model(torch.tensor([ids]), use_cache=False).logits[0, -len(path) :].double()
                error = (scores.logits[b, path].double() - plain).abs().amax(-1) / plain.std(-1)
                assert error.max() <= tolerance, f"a node of {tree.parent} is off by {error.max():.2g}"
                compared += len(path)
        return scores

    propose = fast.drafter.propose

    def noted(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        standing[:] = rows
        return propose(rows, budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast.target, "score", checked)
        patch.setattr(fast.drafter, "propose", noted)
        got = fast.generate(**inputs, max_new_tokens=steps, do_sample=False, **kwargs)
    assert torch.equal(got, expected)
    return compared
