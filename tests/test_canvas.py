"""Canvases of diffusion models: the text of step-by-step decoding, whatever is verified beside it.

The oracle is a loop of plain forwards, written here; that of sampled text is `canvas/reference.py`, which shares the
choice of tokens with the engine, whose law is tested by itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxTimeCriteria,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import truedraft
from truedraft import registry
from truedraft.audit.canvases import audit_canvases
from truedraft.audit.tokens import FAR, Audit
from truedraft.canvas._base import Draft
from truedraft.canvas.control import CanvasCosts
from truedraft.canvas.engine import CanvasEngine
from truedraft.canvas.layout import Layout
from truedraft.canvas.noise import CanvasNoise
from truedraft.canvas.policies.lossy._filter import Filter
from truedraft.canvas.predicting import Chooser
from truedraft.canvas.reference import step_by_step
from truedraft.canvas.targets import BlockTarget, CanvasTarget, Variant
from truedraft.errors import Refused
from truedraft.runtime.curve import Curve
from truedraft.runtime.nodes import Nodes
from truedraft.stats import PassTimes
from vocabularies import tokenized

MASK, END, PAD = 98, 5, 0
REFERENCES, SPECULATORS = registry.names("canvas.policies"), registry.names("canvas.speculators")
LAYOUTS = [
    Layout(MASK, "blocks", 4), Layout(MASK, "blocks", 8), Layout(MASK, "blocks", 1), Layout(MASK, "blocks", 4, True),
    Layout(MASK, "whole", 8), Layout(MASK, "whole", 5, True),
]  # fmt: skip


def model_of(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=END, pad_token_id=PAD,
        bos_token_id=1, **(sizes | changes),
    )  # fmt: skip
    return sharpened(LlamaForCausalLM(config))


def sharpened(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return model_of()


class Bidirectional(PreTrainedModel):
    """A model that attends to the whole text by itself and takes no mask, as LLaDA's own code does."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.inner = LlamaForCausalLM(config)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: Tensor) -> Any:
        length = input_ids.shape[1]
        seen = torch.ones(len(input_ids), 1, length, length, dtype=torch.bool)
        return self.inner(input_ids, attention_mask=seen, use_cache=False)


def plain(model: Any, text: Sequence[int], layout: Layout) -> Tensor:
    """(length, V) of a forward over a text, with a mask written out by hand."""
    length = len(text)
    seen = torch.zeros(1, 1, length, length, dtype=torch.bool)
    for i in range(length):
        reach = length if layout.attention == "whole" else (i // layout.block + 1) * layout.block
        seen[0, 0, i, :reach] = True
    with torch.no_grad():
        return model(torch.tensor([list(text)]), attention_mask=seen, use_cache=False).logits[0].float()


def by_hand(model: Any, prompt: Sequence[int], new: int, layout: Layout, policy: str, tokens: int = 1) -> list[int]:
    """Greedy step-by-step decoding as the models' own loops have it; up to the first end, included."""
    first = 0 if layout.attention == "blocks" else len(prompt)
    last = len(prompt) + new
    starts = [a for a in range(first, last, layout.block) if a + layout.block > len(prompt)]
    spans = [(a, a + layout.block if layout.attention == "blocks" else min(a + layout.block, last)) for a in starts]
    text = [*prompt, *[MASK] * (spans[-1][1] - len(prompt))]
    unknown = set(range(len(prompt), len(text)))
    for start, end in spans:
        while inside := sorted(i for i in unknown if start <= i < end):
            given = text if layout.attention == "whole" else text[:end]
            logits = plain(model, given, layout)
            scored = {}
            for i in inside:
                probs = torch.softmax(logits[i - 1 if layout.shifted else i], -1)
                scored[i] = (float(probs.max()), int(probs.argmax()))
            order = sorted(inside, key=lambda i: -scored[i][0]) if policy == "low-confidence" else inside
            for i in order[:tokens]:
                text[i] = scored[i][1]
                unknown.discard(i)
        if END in text[len(prompt) : end]:
            break
    answer = text[len(prompt) : len(prompt) + new]
    return answer[: answer.index(END) + 1] if END in answer else answer


def ragged(rng: random.Random, lengths: Sequence[int]) -> tuple[list[list[int]], Tensor, Tensor]:
    """Prompts, and the same padded at the left with their mask."""
    prompts = [[rng.randrange(6, 98) for _ in range(length)] for length in lengths]
    longest = max(lengths)
    ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return prompts, ids, mask


def texts_of(output: Tensor, start: int) -> list[list[int]]:
    rows = [row[start:].tolist() for row in output]
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every pass is compared with plain forwards over the texts of its canvases; their numbers, by row and pass."""
    score, counts = CanvasEngine.score, list[int]()

    def checked(self: CanvasEngine, rows: Sequence[Sequence[Variant]]) -> list[Tensor]:
        found = score(self, rows)
        layout = self.target.layout
        for row, variants, logits in zip(self.rows, rows, found, strict=True):
            expected = []
            for variant in variants:
                text = [*row.canvas.tokens[: variant.start], *variant.tokens]
                scored = plain(self.target.model, text, layout)
                expected.append(scored[[place - layout.shifted for place in variant.masked]])
            torch.testing.assert_close(logits, torch.cat(expected), atol=2e-3, rtol=1e-3)
            counts.append(len(variants))
        return found

    monkeypatch.setattr(CanvasEngine, "score", checked)
    return counts


IDS = [f"{x.attention}{x.block}{'+1' * x.shifted}" for x in LAYOUTS]


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("policy", REFERENCES)
def test_text_is_that_of_step_by_step_decoding(model: Any, policy: str, layout: Layout, runtime: str) -> None:
    prompts, ids, mask = ragged(random.Random(1), (3, 8, 13))
    expected = [by_hand(model, prompt, 17, layout, policy) for prompt in prompts]
    for draft, control in [(None, "fixed"), *((name, "fixed") for name in SPECULATORS), (SPECULATORS[0], "cost")]:
        fast: Any = tokenized(model, draft=draft, rule=policy, control=control, runtime=runtime, layout=layout)
        output = fast.generate(ids, attention_mask=mask, max_new_tokens=17)
        assert texts_of(output, ids.shape[1]) == expected
        assert fast.report().guarantee == "tokens"


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("speculator", SPECULATORS)
def test_every_canvas_of_a_pass_is_scored_as_by_a_plain_forward(
    model: Any, speculator: str, layout: Layout, compared: list[int]
) -> None:
    prompts, ids, mask = ragged(random.Random(3), (2, 8, 21))
    for runtime in ("auto", "stock"):
        fast: Any = truedraft.accelerate(model, draft=speculator, control="fixed", runtime=runtime, layout=layout)
        output = fast.generate(ids, attention_mask=mask, max_new_tokens=13)
        assert texts_of(output, ids.shape[1]) == [by_hand(model, p, 13, layout, "low-confidence") for p in prompts]
    assert layout.block == 1 or max(compared) > 2


@pytest.mark.parametrize("speculator", SPECULATORS)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]], ids=lambda x: f"{x.attention}{x.block}")
def test_several_positions_per_step(model: Any, speculator: str, layout: Layout) -> None:
    prompts, ids, mask = ragged(random.Random(2), (4, 8))
    fast: Any = truedraft.accelerate(model, draft=speculator, control="fixed", layout=layout)
    output = fast.generate(ids, attention_mask=mask, max_new_tokens=16, steps=8)
    assert texts_of(output, ids.shape[1]) == [by_hand(model, p, 16, layout, "low-confidence", 2) for p in prompts]


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("speculator", SPECULATORS)
def test_sampled_text_is_a_function_of_the_seed(model: Any, speculator: str, layout: Layout) -> None:
    """Whatever is verified beside it, and whatever rows it has beside it."""
    prompts, ids, mask = ragged(random.Random(4), (3, 9))
    settings: dict[str, Any] = dict(do_sample=True, temperature=0.7, top_k=20, seed=11, max_new_tokens=12)
    chooser = Chooser(LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)]), CanvasNoise(11))
    for policy in REFERENCES:
        scorer, part = partial(plain, model), registry.load("canvas.policies", policy)
        expected = [
            step_by_step(scorer, layout, prompt, 12, part, chooser, frozenset([END]), i).text
            for i, prompt in enumerate(prompts)
        ]
        for draft in (None, speculator):
            fast: Any = truedraft.accelerate(model, draft=draft, rule=policy, control="fixed", layout=layout)
            output = fast.generate(ids, attention_mask=mask, **settings)
            assert texts_of(output, ids.shape[1]) == expected


def test_sampled_tokens_have_the_law_of_the_model(model: Any) -> None:
    """1,000 draws at the only mask; the hypothesis that they follow softmax(logits / 2) is rejected by chance once in
    a thousand runs of other seeds."""
    layout = Layout(MASK, "blocks", 4)
    prompt = [7, 8, 9]
    law = torch.softmax(plain(model, [*prompt, MASK], layout)[3] / 2, -1).double()
    fast: Any = truedraft.accelerate(model, layout=layout)
    seen = Counter(
        int(fast.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=True, temperature=2.0, seed=seed)[0, -1])
        for seed in range(1000)
    )
    frequent = [token for token in range(99) if law[token] * 1000 >= 5]
    counts = [seen[token] for token in frequent]
    expected = [float(law[token]) * 1000 for token in frequent]
    rest = 1000 - sum(expected)
    assert chisquare([*counts, 1000 - sum(counts)], [*expected, rest]).pvalue > 1e-3


@pytest.mark.parametrize("shifted", [False, True])
def test_a_model_that_attends_to_the_whole_by_itself(shifted: bool) -> None:
    torch.manual_seed(1)
    model = sharpened(Bidirectional(model_of().config))
    layout = Layout(MASK, "whole", 4, shifted)
    fast: Any = truedraft.accelerate(model, layout=layout)
    prompt = [7, 8, 9, 10, 11]
    output = fast.generate(torch.tensor([prompt]), max_new_tokens=12)
    assert texts_of(output, 5) == [by_hand(model.inner, prompt, 12, layout, "low-confidence")]


def test_layouts_are_declared_by_configurations(tmp_path: Any) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, eos_token_id=END, pad_token_id=PAD, bos_token_id=1,
    )  # fmt: skip
    config.canvas_config = {"mask": MASK, "attention": "blocks", "block": 4}
    model = sharpened(Qwen3ForCausalLM(config))
    model.save_pretrained(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path).eval()
    fast: Any = truedraft.accelerate(loaded)
    assert isinstance(vars(fast)["target"], CanvasTarget) and fast.layout == Layout(MASK, "blocks", 4)
    output = fast.generate(torch.tensor([[7, 8, 9, 10]]), max_new_tokens=9)
    assert texts_of(output, 4) == [by_hand(model, [7, 8, 9, 10], 9, fast.layout, "low-confidence")]


def test_streamed_tokens_are_those_known_without_a_gap(model: Any) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.tokens += value.tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    fast: Any = truedraft.accelerate(model, layout=Layout(MASK, "blocks", 8))
    output = fast.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=20, streamer=streamer)
    assert streamer.tokens == output[0].tolist() and streamer.ended
    assert fast.report().tokens == len(output[0]) - 3


LETTERS = "abcdefghij"
SPELT = [*LETTERS, *map("".join, product(LETTERS, repeat=2))][:99]  # the text of each token


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]], ids=["blocks", "shifted", "whole"])
def test_a_text_ends_with_the_token_that_completes_a_stop_string(model: Any, layout: Layout) -> None:
    """The oracle looks for the strings in the text, token by token; a string may begin in the prompt."""
    speller = Tokenizer(BPE({text: i for i, text in enumerate(SPELT)}, []))
    speller.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=speller)
    prompts, ids, mask = ragged(random.Random(8), (3, 8, 13))
    texts = [by_hand(model, prompt, 24, layout, "low-confidence") for prompt in prompts]
    places = set()
    for row, share in [(0, 0.3), (1, 0.5), (2, 0), (2, 0.8)]:
        at = int(share * len(texts[row]))
        before = [*prompts[row], *texts[row]][len(prompts[row]) + at - 1]
        strings = [SPELT[before][-1] + SPELT[texts[row][at]][0], "ahah"]
        expected = []
        for prompt, text in zip(prompts, texts, strict=True):
            spelt = ["".join(SPELT[token] for token in [*prompt, *text[: i + 1]]) for i in range(len(text))]
            added = [len(SPELT[token]) for token in text]
            met = [any(s in one[-len(s) - n + 1 :] for s in strings) for one, n in zip(spelt, added, strict=True)]
            expected.append(text[: met.index(True) + 1] if any(met) else text)
        places |= {len(text) for text in expected}
        for draft in (None, *SPECULATORS):
            fast: Any = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed", layout=layout)
            output = fast.generate(ids, attention_mask=mask, max_new_tokens=24, stop_strings=strings)
            lengths = [len(text) for text in expected]
            assert [row[ids.shape[1] :][:n].tolist() for row, n in zip(output, lengths, strict=True)] == expected
            assert all((row[ids.shape[1] + n :] == PAD).all() for row, n in zip(output, lengths, strict=True))
            assert output.shape[1] == ids.shape[1] + max(lengths) and fast.report().tokens == sum(lengths)
        streamed = list[int]()
        streamer = SimpleNamespace(put=lambda value: streamed.extend(value.tolist()), end=lambda: None)
        fast.generate(torch.tensor([prompts[row]]), max_new_tokens=24, stop_strings=strings, streamer=streamer)
        assert streamed == [*prompts[row], *expected[row]]
        scorer, chooser = partial(plain, model), Chooser(LogitsProcessorList())
        rule, stops = registry.load("canvas.policies", "low-confidence"), [StopStringCriteria(tokenizer, strings)]
        alone = step_by_step(scorer, layout, prompts[row], 24, rule, chooser, frozenset([END]), row, stops)
        assert alone.text == expected[row]
        assert len(alone.taken) < len(expected[row]) + layout.block
    assert len(places) > 3


LOSSY = [
    f"lossy/{name}" for name in (*registry.names("canvas.policies.lossy"), *registry.presets("canvas.policies.lossy"))
]


@pytest.mark.parametrize("policy", LOSSY)
def test_lossy_policies_fill_every_canvas_and_are_labelled(model: Any, policy: str) -> None:
    """The text is that of single passes without a cache, greedy and sampled, but for policies that score guesses
    or read in ways of their own."""
    rule = registry.load("canvas.policies", policy)
    if "training" in rule.card.needs:
        torch.manual_seed(0)
        rule.model = Filter(8)
    if "guide" in rule.card.needs:
        rule.model = model_of(vocab_size=98)
    sampled: dict[str, Any] = dict(do_sample=True, temperature=0.7, top_k=0, seed=11)
    ways = [(LAYOUTS[1], {}), (LAYOUTS[3], sampled)], [(LAYOUTS[4], {}), (LAYOUTS[5], sampled)]  # in turn
    for layout, settings in ways[LOSSY.index(policy) % 2]:
        prompts, ids, mask = ragged(random.Random(5), (3, 8, 9))
        fast: Any = tokenized(model, rule=rule, layout=layout)
        if layout.attention == "whole" and "attention to the whole" in rule.card.cannot:
            with pytest.raises(Refused, match="attends to the whole"):
                fast.generate(ids, attention_mask=mask)
            continue
        output = fast.generate(ids, attention_mask=mask, max_new_tokens=14, suppress_tokens=[MASK], **settings)
        report = fast.report()
        assert MASK not in output and report.guarantee == "none"
        assert sum("is lossy" in note for note in report.notes) == 1
        lacks = rule.card.lacks.get(policy.removeprefix("lossy/"))
        assert [note for note in report.notes if "part of its paper" in note] == [
            f"{policy.removeprefix('lossy/')} holds a part of its paper: {lacks}"
        ][: lacks is not None]
        assert report.rule.startswith("lossy/") and len(report.passes) <= 2 * (14 + layout.block)
        if not getattr(rule, "canvases", 0) and not policy.startswith("lossy/s2d2"):
            scorer, ends = partial(plain, model), frozenset([END])
            warpers = LogitsProcessorList([SuppressTokensLogitsProcessor([MASK])])
            warpers += [TemperatureLogitsWarper(0.7)] if settings else []
            chooser = Chooser(warpers, CanvasNoise(11) if settings else None)
            expected = [step_by_step(scorer, layout, p, 14, rule, chooser, ends, i) for i, p in enumerate(prompts)]
            assert texts_of(output, ids.shape[1]) == [row.text for row in expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: give a whole number"),
        ({"max_new_tokens": 300}, "the model's context has 256"),
        ({"block_length": 0}, "block_length=0: give"),
        ({"steps": 5}, "steps=5: give a divisor of the 128 positions"),
        ({"stop_strings": ["a"]}, "stop_strings=['a'] need a tokenizer"),
        ({"stopping_criteria": [MaxTimeCriteria(1.0)]}, "stopping_criteria MaxTimeCriteria is not supported"),
        ({"max_time": 1.0}, "max_time=1.0 is not supported for diffusion models: a canvas that is cut off"),
        ({"num_beams": 2}, "beams grow from left to right"),
        ({"repetition_penalty": 1.3}, "repetition_penalty=1.3 is not supported for diffusion models"),
        ({"stopping_criteria": 5}, "stopping_criteria=5: give a list"),
        ({"stop_strings": [""]}, "stop_strings=['']: give a text"),
        ({"logits_processor": 5}, "logits_processor=5: give a list"),
        ({"eos_token_id": "x"}, "eos_token_id='x': give token ids"),
        ({"suppress_tokens": [99]}, "suppress_tokens=[99]: give token ids"),
        ({"num_return_sequences": 0}, "num_return_sequences=0: give a whole number"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask=[[1, 1, 1]]: give a tensor"),
        ({"return_dict_in_generate": True}, "tokens alone are returned"),
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size=1"),
        ({"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, "NoRepeatNGramLogitsProcessor"),
        ({"seed": -1, "do_sample": True}, "seed=-1: give an integer"),
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"temperature": 0.0, "do_sample": True}, "temperature=0.0"),
    ],
)
def test_settings_that_cannot_be_honoured(model: Any, arguments: dict[str, Any], message: str) -> None:
    tokenizer: Any = object() if "stop_strings" in arguments and "" in arguments["stop_strings"] else None
    fast: Any = truedraft.accelerate(model, tokenizer, layout=Layout(MASK, "blocks", 4))
    with pytest.raises(Refused) as refused:
        fast.generate(torch.tensor([[7, 8, 9]]), **arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([[7, MASK]], "contains the mask token"),
        ([[7, 99]], "outside the model's vocabulary"),
        ([[]], "at least one token"),
        ([[-1]], "outside the model's vocabulary"),
    ],
)
def test_prompts_that_cannot_be_read(model: Any, inputs: list[list[int]], message: str) -> None:
    fast: Any = truedraft.accelerate(model, layout=Layout(MASK, "blocks", 4))
    with pytest.raises(Refused, match=message):
        fast.generate(torch.tensor(inputs, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "lossy/fast-dllm", "draft": "freedave"}, "verifies step-by-step decoding"),
        ({"rule": "fast-dllm"}, "it is lossy: choose it with rule='lossy/fast-dllm'"),
        (
            {"rule": "greedy"},
            "there is no policy of diffusion models 'greedy': it is an acceptance rule of models that write",
        ),
        (
            {"draft": "suffix"},
            "there is no speculator of diffusion models 'suffix': it is a drafter of models that write",
        ),
        (
            {"view": "lossy/window-kv"},
            "there is no view of diffusion models 'window-kv': it is a view of models that write",
        ),
        ({"ties": "recheck"}, "is for autoregressive models"),
        ({"control": "x"}, "diffusion models have 'cost' and 'fixed'"),
        ({"layout": Layout(200)}, "outside the vocabulary"),
    ],
)
def test_parts_that_do_not_fit(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(model, **{"layout": Layout(MASK, "blocks", 4), **arguments})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_prompts_of_another_dtype(model: Any, dtype: torch.dtype) -> None:
    fast: Any = truedraft.accelerate(model, layout=Layout(MASK, "blocks", 4))
    with pytest.raises(Refused, match="token ids of at least one token"):
        fast.generate(torch.ones(1, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("declared", "message"),
    [({"attention": "blocks"}, "has no mask token: set config"), ({"mask": 98, "blok": 3}, "has 'blok': a layout")],
)
def test_configurations_that_declare_no_layout(declared: dict[str, Any], message: str) -> None:
    other = model_of()
    other.config.canvas_config = declared
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(other)


def test_a_diffusion_model_without_masks_is_refused(model: Any) -> None:
    other = model_of()
    other.config.model_type = "diffusion_gemma"
    with pytest.raises(Refused, match="no text with masks"):
        truedraft.accelerate(other)


def test_a_model_that_attends_backwards_only_is_refused() -> None:
    class Causal(Bidirectional):
        def forward(self, input_ids: Tensor) -> Any:
            return self.inner(input_ids, use_cache=False)

    with pytest.raises(Refused, match="attends to earlier positions only"):
        truedraft.accelerate(sharpened(Causal(model_of().config)), layout=Layout(MASK))


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_a_model_that_is_changed_is_hosted_anew(runtime: str) -> None:
    model, layout, prompt = model_of(), Layout(MASK, "blocks", 4), [7, 8, 9]
    fast: Any = truedraft.accelerate(model, layout=layout, runtime=runtime)
    fast.generate(torch.tensor([prompt]), max_new_tokens=9)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    for change in (lambda: model, model.double):
        before, _ = fast.target, change()
        output = fast.generate(torch.tensor([prompt]), max_new_tokens=9)
        assert texts_of(output, 3) == [by_hand(model, prompt, 9, layout, "low-confidence")]
        assert (fast.target is before) == (model.dtype == torch.float32)


@pytest.mark.parametrize(("cost", "fewest", "most"), [(0.2, 5, 20), (0.02, 150, 170), (0.0, 320, 320)])
def test_drafts_that_do_not_pay_are_proposed_as_often_as_their_cost_allows(cost: float, fewest: int, most: int) -> None:
    """No draft is right; then all are, and a canvas costs a third of a pass.

    cost: of a proposal, in passes.
    """
    control = CanvasCosts()
    control.times, control._curve = PassTimes(), Curve((8, 16, 24), (1.0, 4 / 3, 5 / 3))
    drafts = [[Draft(frozenset([(0, 1)]), 1, 0.6), Draft(frozenset([(0, 1), (1, 1)]), 2, 0.4)]]

    def passes(count: int, right: bool) -> tuple[int, int]:
        proposed = scored = 0
        for _ in range(count):
            offered = drafts if control.drafting() else [[]]
            control.times.draft += cost * bool(offered[0])
            [kept] = control.cut(offered, [[8, 8, 8][: len(offered[0]) + 1]])
            proposed, scored = proposed + bool(offered[0]), scored + kept
            control.times.target += 1 + kept / 3
            steps = [draft.fixed for draft in drafts[0]] if right else [frozenset([(2, 2)])]
            control.observe(offered, [steps[: kept + 1]])
        return proposed, scored

    passes(100, False)
    proposed, scored = passes(320, False)
    assert fewest <= proposed <= most and scored <= 4
    passes(600, True)
    proposed, scored = passes(100, True)
    assert proposed >= 96 and scored == 2 * proposed


def test_a_call_ends_with_the_cache_released(model: Any) -> None:
    fast: Any = truedraft.accelerate(model, layout=Layout(MASK, "blocks", 4))

    def fail(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fast.generate(torch.tensor([[7, 8, 9]]), on_pass=fail)
    assert fast.target.cache is None
    expected = [by_hand(model, [7, 8, 9], 9, fast.layout, "low-confidence")]
    assert texts_of(fast.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=9), 3) == expected


# ---------------------------------------------------------------- the audit, and planted faults


class Words:
    """A tokenizer of numbers."""

    def __call__(self, texts: Sequence[str], **_: Any) -> Any:
        rows = [[int(word) for word in text.split()] for text in texts]
        longest = max(map(len, rows))
        return SimpleNamespace(
            input_ids=torch.tensor([[PAD] * (longest - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
        )


def audited(model: Any, layout: Layout, plant: Callable[[], None] = lambda: None, tokens: int = 16) -> Audit:
    sides: Any = {name: truedraft.accelerate(model, draft=name, control="fixed", layout=layout) for name in SPECULATORS}
    plant()
    prompts = [" ".join(map(str, prompt)) for prompt in ragged(random.Random(6), (3, 9, 14))[0]]
    return audit_canvases(model, Words(), sides, prompts, tokens=tokens, batches=(1, 3))


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]], ids=["blocks", "shifted", "whole"])
def test_an_audit_finds_nothing_in_what_is_exact(model: Any, layout: Layout) -> None:
    found = audited(model, layout)
    assert found.exact and not found.found and found.tokens > 150 and found.rows > 100 and found.worst_row < FAR


def leaking_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canvas beside the row's own reads an entry of the one before it."""
    add = BlockTarget._add

    def leaked(self: Any, nodes: Nodes, slot: int, tokens: Any, start: int, place: int, before: Any, *how: Any) -> None:
        beside = place > self.cache.lengths[slot] and not before and start > 0
        add(self, nodes, slot, tokens, start, place, range(place - 1, place) if beside else before, *how)

    monkeypatch.setattr(BlockTarget, "_add", leaked)


def other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two positions with near confidences the second is fixed, beside the first canvas of a pass."""
    verify = CanvasEngine._verify

    def swapped(self: Any, slot: int, batch: Any, variants: Any, logits: Tensor) -> Any:
        scored, choose = 0, self.policy.choose

        def second(predictions: Any, of_row: Any) -> Any:
            nonlocal scored
            scored += 1
            return predictions.fix(
                predictions.order[1:2] if scored == 2 and len(predictions) > 1 else predictions.order[:1]
            )

        self.policy.choose = second
        try:
            return verify(self, slot, batch, variants, logits)
        finally:
            self.policy.choose = choose

    monkeypatch.setattr(CanvasEngine, "_verify", swapped)


def stale_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a complete block are kept as they were when it had a mask."""
    commit = BlockTarget.commit

    def stale(self: Any, slot: int, variant: int) -> int:
        before = self.cache.lengths[slot]
        length = commit(self, slot, variant)
        if length > before:
            for layer in self.cache.layers:
                layer.keys[slot, :, length - 1] *= 0.9
        return length

    monkeypatch.setattr(BlockTarget, "commit", stale)


def wrong_remasking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy itself, and so the oracle, fixes the second of the most confident positions after a few steps."""
    kind = registry.method("canvas.policies", "low-confidence")

    def second(self: Any, predictions: Any, row: Any) -> Any:
        late = row.step > 2 and len(predictions) > 1
        return predictions.fix(predictions.order[1:2] if late else predictions.order[:1])

    monkeypatch.setattr(kind, "choose", second)


@pytest.mark.parametrize("fault", [leaking_mask, other_order, stale_block, wrong_remasking])
def test_an_audit_finds_a_planted_fault(model: Any, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not audited(model, LAYOUTS[1], partial(fault, monkeypatch), tokens=8).exact


def test_a_model_whose_passes_are_wrong_is_not_hosted(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leaking_mask(monkeypatch)
    with pytest.raises(Refused, match="differs from its plain forward"):
        truedraft.accelerate(model, layout=LAYOUTS[1])
