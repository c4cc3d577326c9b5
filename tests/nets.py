"""The nets: each compares a drafter, rule and model with plain `model.generate` or plain forwards."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

import truedraft
from drafters_for_tests import HiddenReader, Noise, Oracle, ProbeReader, Sampler, SelfDrafter
from models import V, ragged, sibling, tiny
from remote_code import relu_routed, supernet
from truedraft import Drafter, DraftTree, Refused, registry
from truedraft.drafters._compose import compose
from truedraft.drafters.heads._mtp import MtpHead
from truedraft.drafters.heads._unroll import layer_like
from truedraft.drafters.self_._drafter import ViewDrafter
from truedraft.runtime import native
from truedraft.runtime.experts import shares
from truedraft.runtime.placements import choices
from truedraft.serve.processors import OutputPenalties
from truedraft.stores.corpus import Corpus
from truedraft.tree import Row, Scores
from truedraft.views._base import Experts
from truedraft.views._neurons import Predictors
from vocabularies import spelling, tokenized

REVIEWED = ["skip-layers<token-recycling", "window-kv<draft-model"]
ROUTED = "input-guided+text-routing"
COMPOSED = ["suffix+token-recycling", "sam|lookahead", "input-guided>aded", "copyspec?draft-model", ROUTED, *REVIEWED]
VIEWS = registry.names("views")
NAMES = [*registry.names("drafters"), *VIEWS, *COMPOSED]
PRESETS = registry.presets("drafters") | registry.presets("views")
REGISTERED = [*NAMES, *PRESETS]
BITS = ("quantized", "quantized-kv")
COMPILED = {name for name in REGISTERED if PRESETS.get(name, (name,))[0] in BITS}  # by the compiled pass alone
TRIALS = ["oracle", "noise", "sampler", "sampler-distinct", "probes", "taps", "view"]
EVERY = [*NAMES, *TRIALS, "plain"]  # without presets: the code of a method under other knobs
VIEWED = {*VIEWS, *(n for n in registry.names("drafters") if issubclass(registry.method("drafters", n), ViewDrafter))}
FEW: dict[str, dict[str, Any]] = {  # knobs by which drafters differ from tiny models and short texts, and are quick
    "skip-layers": {"layers": "1a"},
    "ffn-skipllm": {"layers": "0-1", "similarity": 0.8},
    "skipdecode": {"most": 1.0, "least": 0.5, "levels": 2},
    "window-kv": {"sinks": 1, "recent": 3},
    "top-kv": {"entries": 2, "chunk": 1, "recent": 2, "refresh": 5},
    "swift": {"ends": 0, "window": 3, "enough": 1.0, "effort": 1000.0},
    "text-routing": {"every": 4},
    "specexec": {"nodes": 96, "beam": 16},
}
# models that have what these drafters need
SUITED = {"fewer-experts": partial(tiny, "mixtral"), "blockffn": relu_routed, "super-apriel": supernet}
RULES: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"do_sample": True, "top_k": 0}}
SEED = 5
T = TypeVar("T")


def turn(name: str, options: Sequence[T], count: int = 1) -> list[T]:
    """`count` of the options, by the index of a registered drafter, so that together the drafters cover all options."""
    first = count * REGISTERED.index(name)
    return [options[(first + i) % len(options)] for i in range(count)]


class Counting(LogitsProcessor):
    """A user's processor with state: its effect depends on the number of calls, and on all rows."""

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


def two_in_three(batch: int, ids: torch.Tensor) -> list[int]:
    """Tokens that may come next, of a vocabulary of V."""
    return [t for t in range(V) if (t + batch + len(ids)) % 3]


PROCESSORS: dict[str, dict[str, Any]] = {  # processors and criteria as factories: they have state
    "none": {},
    "warpers": {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7], [8, 9]],
        "logits_processor": lambda: [OutputPenalties(0.6, 0.3, 7)],  # of the API, each row's ids from the seventh on
    },
    "constrained": {"prefix_allowed_tokens_fn": two_in_three, "min_new_tokens": 5},
    "stranger": {"logits_processor": lambda: [Counting()], "stopping_criteria": lambda: [Alternating()]},
}


def made(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for one call of `generate`."""
    factories = ("logits_processor", "stopping_criteria")
    return {k: v() if k in factories and callable(v) else v for k, v in settings.items()}


@dataclass(frozen=True)
class Generated:
    """The output of `model.generate`, the state of the random stream after it, and the processors that it called."""

    text: torch.Tensor
    state: torch.Tensor
    processors: list[LogitsProcessor]


_GENERATED: dict[Any, Generated] = {}


def generated(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **settings: Any) -> Generated:
    """Plain `model.generate` under SEED, cached by model, inputs and settings."""
    key = _key((model, inputs, settings))
    if key not in _GENERATED:
        given = made(settings)
        torch.manual_seed(SEED)
        text = model.generate(**inputs, **given)
        _GENERATED[key] = Generated(text, torch.get_rng_state(), given.get("logits_processor", []))
    return replace(_GENERATED[key], text=_GENERATED[key].text.clone())


def _key(value: Any) -> Any:
    """A hashable key of a value; other objects are their own key."""
    if isinstance(value, torch.Tensor):
        return value.dtype, _key(value.tolist())
    if isinstance(value, GenerationConfig):
        return _key(value.to_dict())
    if isinstance(value, Mapping):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else value


ACROSS = " across vocabularies"


def drafter(
    name: str,
    model: PreTrainedModel,
    answers: torch.Tensor | None = None,
    padding: Any = None,
    small: Any = None,
    **other: Any,
) -> Drafter | None:
    """A registered drafter, or one of the trial drafters made for this model and its true output.

    Skips the test for a model that the drafter's card excludes. A drafter that needs training has random weights.

    small: the draft model, for drafters that need one; by default one similar to the model.
    other: knobs of a registered drafter.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
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
    if name.startswith("view"):
        return SelfDrafter(skipped=() if name == "view-whole" else (1,))
    if name == "plain":
        return None
    if name.endswith(ACROSS):
        made = drafter(name.removesuffix(ACROSS), model, answers, padding, small, **other)
        return across(made, vocabulary)
    if name in COMPOSED:
        return compose(name, lambda part: drafter(part, model, small=small))  # type: ignore[arg-type,return-value]
    base, knobs = PRESETS.get(name, (name, {}))
    if base in VIEWS:
        if name in COMPILED and native.library() is None:
            pytest.skip(f"{name}: the compiled pass was not built on this machine")
        if "experts" in needs_of(base) and not shares(model, Experts(1)):
            pytest.skip(f"{base}: {type(model).__name__} has no experts")
        needs, cannot = registry.method("views", base).card.needs, registry.method("views", base).card.cannot
        if model.config.is_encoder_decoder and "encoder-decoder" in cannot:
            pytest.skip(f"{base}: {cannot['encoder-decoder']}")
        found = FEW.get(base, {"layers": "1a"} if "calibration" in needs else {})
        if "training" in needs:
            other = {"model": predictors_of(model, turn(name, (1, 16))[0]), **other}
        return registry.load("drafters", base, **{**knobs, **found, **other})
    method = registry.method("drafters", base)
    if why := method.card.cannot.get("encoder-decoder" if model.config.is_encoder_decoder else "decoder"):
        pytest.skip(f"{base}: {why}")
    needs = method.card.needs
    if "draft model" in needs:
        small, count = small or sibling(model), str(knobs.get("lengths", "")).count(";")
        other = {"model": [small] * count if count > 1 else small, **other}
    if "tokenizer" in needs:
        return across(registry.load("drafters", base, **{**knobs, **FEW.get(base, {}), **other}), vocabulary)
    if "diffusion model" in needs:
        other = {"model": diffusion_of(model), **other}
    if "mixers" in needs and not choices(model):
        pytest.skip(f"{base}: the layers of {type(model).__name__} have one mixer each")
    if "training" in needs:
        beside = "draft model" in needs
        learner = method.learner(**({"model": small} if beside else {}))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            learner.begin(model)
        other = {"head" if beside else "model": learner.module, **other}
    if "MTP layers" in needs:
        other = {"model": mtp_head(model), **other}
    if "corpus" in needs:
        other = {"corpus": corpus_of(model), **other}
    if "specialists" in needs:
        other = {**specialists_of(base, small or sibling(model), vocabulary), **other}
    return registry.load("drafters", base, **{**knobs, **FEW.get(base, {}), **other})


def specialists_of(name: str, small: PreTrainedModel, vocabulary: int) -> dict[str, Any]:
    """A draft model, and drafters that copy; for routing by text, each for other tokens."""
    named = {"low": small, "high": "suffix", "otherwise": "token-recycling"}
    if name != "text-routing":
        return {"specialists": named}
    half = vocabulary // 2
    return {"specialists": named, "examples": {"low": [range(half)], "high": [range(half, vocabulary)]}}


def across(drafter: Any, vocabulary: int) -> Drafter:
    """A drafter with a draft model, which gets another tokenizer than the target, that has so many tokens."""
    getattr(drafter, "distributions", drafter).own_tokenizer = spelling(vocabulary, turn=7, pairs=1)
    drafter.translate(spelling(vocabulary))
    return drafter  # type: ignore[no-any-return]


def needs_of(name: str) -> tuple[str, ...]:
    """What a registered drafter needs; nothing for others."""
    base, _ = PRESETS.get(name, (name, {}))
    kind = "views" if base in VIEWS else "drafters"
    return registry.method(kind, base).card.needs if base in registry.names(kind) else ()


def model_for(name: str, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """A tiny Llama, or a model that has what a drafter needs; arguments as of `tiny` behind the architecture."""
    return SUITED.get(name, partial(tiny, "llama"))(*args, **kwargs)


@cache
def diffusion_of(model: PreTrainedModel, attention: str = "blocks") -> PreTrainedModel:
    """A tiny masked-diffusion model with a target's vocabulary and a mask; a sibling of the target where that is a
    Llama, so that its drafts are right now and then."""
    size = model.config.get_text_config(decoder=True).vocab_size
    like = sibling(model) if model.config.model_type == "llama" else tiny("llama", torch.float32, vocabulary=size)
    made = copy.deepcopy(like).float()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made.resize_token_embeddings(size + 1, mean_resizing=False)
    made.config.canvas_config = {"mask": size, "attention": attention, "block": 4, "shifted": True}
    return made


def mtp_head(model: PreTrainedModel, depths: int = 3) -> MtpHead:
    """Untrained modules for multi-token prediction, of plain layers, for any model."""
    layer = layer_like(model.config.get_text_config(decoder=True))
    record = dict(layers=(-1,), depths=depths, layer=layer, head_norms=False, raw_states=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MtpHead(record, model)


def predictors_of(model: PreTrainedModel, group: int = 1) -> Predictors:
    """Untrained predictors of the neurons of a model; where these cannot be chosen, of some other."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner = registry.method("views", "deja-vu").learner(rank=16, group=group)
        try:
            learner.begin(model)
        except Refused:
            return Predictors(16, [1], 1, 16)
        return learner.module.requires_grad_(False)


@cache
def corpus_of(model: PreTrainedModel) -> Corpus:
    """A corpus of a model's outputs for a few prompts."""
    texts = generated(model, ragged(model, 5), max_new_tokens=60, do_sample=False).text
    return Corpus.built([text.tolist() for text in texts])


def padding_of(inputs: dict[str, torch.Tensor]) -> list[int]:
    return (inputs["attention_mask"] == 0).sum(-1).tolist()


def documents(draft: Drafter | None, answers: torch.Tensor) -> dict[str, Any]:
    """References for a drafter that uses them, one per row: its true text with every sixth token changed."""
    if draft is None or not draft.takes_references:
        return {}
    answers = answers.clone()
    answers[:, ::6] = (answers[:, ::6] + 1) % V
    return {"references": [[row] for row in answers]}


def eos_inside(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> int:
    """A token that occurs late in the first row's output, to be the end of text inside drafts."""
    text = generated(model, inputs, max_new_tokens=30, **kwargs).text[0, inputs["input_ids"].shape[1] :].tolist()
    return max(set(text[5:]), key=text.index)


def text_net(
    model: PreTrainedModel,
    name: str,
    inputs: dict[str, torch.Tensor],
    control: str = "fixed",
    runtime: str = "auto",
    **settings: Any,
) -> truedraft.Report:
    """Output and random stream equal those of `model.generate`; processors are created anew for each side."""
    plain = generated(model, inputs, **settings)
    draft = drafter(name, model, plain.text, padding_of(inputs))
    fast = tokenized(model, draft=draft, control=control, runtime=runtime)
    given = made(settings)
    torch.manual_seed(SEED)
    got = fast.generate(**inputs, **given, **documents(draft, plain.text))
    assert got.shape == plain.text.shape, f"shape {tuple(got.shape)}, plain {tuple(plain.text.shape)}"
    assert torch.equal(got, plain.text), f"first difference at {(got != plain.text).nonzero()[0].tolist()}"
    assert torch.equal(torch.get_rng_state(), plain.state), "the random stream is in another state"
    for mine, theirs in zip(given.get("logits_processor", []), plain.processors, strict=True):
        if isinstance(mine, Counting):
            assert mine.calls == theirs.calls, "a processor was called differently"
    report = fast.report()
    assert report.tokens == sum(len(e.tokens) for p in report.passes for e in p.emitted)
    return report


def node_net(
    model: PreTrainedModel, name: str, rows: int = 3, tolerance: float = 1e-6, steps: int = 12,
    inputs: dict[str, torch.Tensor] | None = None, **kwargs: Any,
) -> int:  # fmt: skip
    """At every pass every node's logits equal a plain forward over its path, no cache; returns the nodes compared.

    inputs: by default prompts of different lengths.
    """
    inputs = inputs or ragged(model, rows)
    kwargs = dict(max_new_tokens=steps, do_sample=False, **kwargs)
    expected = generated(model, inputs, **kwargs).text
    draft = drafter(name, model, expected, padding_of(inputs))
    fast = tokenized(model, draft=draft, control="fixed")
    compared = 0
    current_rows: list[Any] = []  # in the order of their slots
    score = fast.target.score

    def checked(trees: Sequence[DraftTree], *under: Any) -> Scores:
        nonlocal compared
        scores = score(trees, *under)
        if under:
            return scores
        texts: dict[int, list[tuple[list[int], int, list[int]]]] = {}  # by length: (text, row, path to a leaf)
        for b, tree in enumerate(trees):
            for leaf in (i for i, below in enumerate(tree.shape.children) if not below):
                path = list(tree.path(leaf))
                ids = current_rows[b].tokens[:-1] + [tree.tokens[i] for i in path]
                texts.setdefault(len(ids), []).append((ids, b, path))
        for alike in texts.values():  # without padding
            with torch.no_grad():
                found = model(torch.tensor([ids for ids, _, _ in alike]), use_cache=False).logits
            for (_, b, path), logits in zip(alike, found, strict=True):
                plain = logits[-len(path) :].double()
                error = (scores.logits[b, path].double() - plain).abs().amax(-1) / plain.std(-1)
                assert error.max() <= tolerance, f"a node of {trees[b].parent} is off by {error.max():.2g}"
                compared += len(path)
        return scores

    propose = fast.drafter.propose

    def noted(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        current_rows[:] = rows
        return propose(rows, budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast.target, "score", checked)
        patch.setattr(fast.drafter, "propose", noted)
        got = fast.generate(**inputs, **kwargs, **documents(draft, expected))
    assert torch.equal(got, expected)
    return compared
