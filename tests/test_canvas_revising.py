"""Lossy policies that go over their tokens again, verify their drafts or have a guide: each against a loop of plain
forwards over whole texts, written out here, on random models, in batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

import truedraft
from test_canvas import END, LAYOUTS, MASK, by_hand, model_of, plain, ragged, texts_of
from truedraft import registry
from truedraft.canvas.layout import Layout
from truedraft.canvas.noise import CanvasNoise
from truedraft.canvas.predicting import Chooser
from truedraft.canvas.reference import step_by_step
from truedraft.errors import Refused
from truedraft.loading import load

NEW, SEED, TEMPERATURE = 17, 11, 0.7
BLOCKS, SHIFTED = Layout(MASK, "blocks", 8), Layout(MASK, "blocks", 4, True)
WHOLE = Layout(MASK, "whole", 8)
SAMPLED = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "seed": SEED}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A random model that is sure of much."""
    found = model_of()
    with torch.no_grad():
        found.lm_head.weight.mul_(4)
    return found


@pytest.fixture(scope="module")
def guide(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A causal model without a mask token, which often agrees."""
    found = model_of(vocab_size=98)
    with torch.no_grad():
        for own, other in zip(found.parameters(), model.parameters(), strict=True):
            own.copy_(other[: len(own)])
    return found


class Text:
    """A canvas of a plain loop: the text, the positions without a token, and the blocks to fill."""

    def __init__(self, model: Any, prompt: Sequence[int], layout: Layout, row: int = 0):
        first, last = (0 if layout.attention == "blocks" else len(prompt)), len(prompt) + NEW
        starts = [a for a in range(first, last, layout.block) if a + layout.block > len(prompt)]
        ends = [a + layout.block if layout.attention == "blocks" else min(a + layout.block, last) for a in starts]
        self.blocks = [[i for i in range(*span) if i >= len(prompt)] for span in zip(starts, ends, strict=True)]
        self.starts, self.prompt, self.layout, self.model, self.row = starts, len(prompt), layout, model, row
        self.tokens = [*prompt, *[MASK] * (ends[-1] - len(prompt))]
        self.steps = 0

    def laws(self, places: Sequence[int], end: int) -> dict[int, Tensor]:
        """Logits at these positions, from a forward over the whole, or over the text up to the end of a block."""
        given = self.tokens if self.layout.attention == "whole" else self.tokens[:end]
        logits = plain(self.model, given, self.layout)
        return {i: logits[i - self.layout.shifted] for i in places}

    def ended(self, block: Sequence[int]) -> bool:
        return END in self.tokens[self.prompt : block[-1] + 1]

    @property
    def answer(self) -> list[int]:
        found = self.tokens[self.prompt : self.prompt + NEW]
        return found[: found.index(END) + 1] if END in found else found


def choice(logits: Tensor) -> tuple[int, float]:
    """The likeliest token but the mask, and its probability in the model's own law."""
    token = int(logits[:MASK].argmax())
    return token, float(torch.softmax(logits, -1)[token])


def drawn(scores: Tensor, row: int, place: int, step: int) -> int:
    """The token that the noise of a position and a step draws from softmax(scores / temperature), but the mask."""
    noise = CanvasNoise(SEED).at(row, [place], step, len(scores))[0]
    return int((torch.softmax(scores / TEMPERATURE, -1) / noise)[:MASK].argmax())


def edited(
    text: Text, fill: Callable[[dict[int, float]], int], sure: float, passes: int, counts: dict[str, int]
) -> list[int]:
    """Blocks of which tokens are replaced; fill: how many masks are filled, by the probabilities at them."""
    for block in text.blocks:
        masks, post = set(block), 0
        while True:
            if not masks and (post := post + 1) > passes:
                counts["exhausted"] += 1
                break
            found = {i: choice(logits) for i, logits in text.laws(block, block[-1] + 1).items()}
            filled = sorted(masks, key=lambda i: (-found[i][1], i))[: fill({i: found[i][1] for i in masks})]
            edits = [i for i in block if i not in masks and found[i][0] != text.tokens[i] and found[i][1] > sure]
            counts["edits"] += len(edits)
            if not masks and not edits:
                break
            for i in (*filled, *edits):
                text.tokens[i] = found[i][0]
                masks.discard(i)
        if text.ended(block):
            break
    return text.answer


EDITING: dict[str, tuple[str, Callable[[dict[int, float]], int], float, int]] = {
    "llada2": ("llada2", lambda p: max(sum(x > 0.95 for x in p.values()), 1), 0.9, 16),
    "llada2-often": (
        "llada2:threshold=0.3,editing_threshold=0.2,max_post_steps=2",
        lambda p: max(sum(x > 0.3 for x in p.values()), 1), 0.2, 2,
    ),
    "llada2-no-more": (
        "llada2:threshold=0.3,least=2,editing_threshold=0.2,max_post_steps=0",
        lambda p: max(sum(x > 0.3 for x in p.values()), 2), 0.2, 0,
    ),
    "rediff": ("rediff:sure=0.3", lambda p: 4, 0.3, 1),
    "rediff-long": ("rediff:tokens=2,sure=0.2,refine=3", lambda p: 2, 0.2, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITING)
def test_tokens_of_a_block_are_replaced_until_it_is_final(model: Any, case: str) -> None:
    spec, fill, sure, passes = EDITING[case]
    counts = {"edits": 0, "exhausted": 0}
    for layout in (BLOCKS, SHIFTED, WHOLE):
        prompts, ids, mask = ragged(random.Random(2), (3, 8, 13))
        expected = [edited(Text(model, prompt, layout), fill, sure, passes, counts) for prompt in prompts]
        for runtime in ("auto", "stock"):
            fast: Any = truedraft.accelerate(model, rule=f"lossy/{spec}", layout=layout, runtime=runtime)
            output = fast.generate(ids, attention_mask=mask, max_new_tokens=NEW, suppress_tokens=[MASK])
            assert texts_of(output, ids.shape[1]) == expected
    assert counts["edits"] > 0 or case == "llada2"
    assert counts["exhausted"] > 0 or case == "llada2"


def test_a_token_is_handed_out_when_it_is_final(model: Any) -> None:
    """Also where tokens are replaced after they were written."""

    class Streamer:
        tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.tolist()

        def end(self) -> None:
            pass

    seen: list[tuple[list[int], list[bool]]] = []
    fast: Any = truedraft.accelerate(model, rule=f"lossy/{EDITING['rediff-long'][0]}", layout=BLOCKS)
    output = fast.generate(
        torch.tensor([[7, 8, 9]]), max_new_tokens=NEW, suppress_tokens=[MASK], streamer=Streamer(),
        on_canvas=lambda rows: seen.append((list(rows[0].canvas.tokens), list(rows[0].canvas.known))),
    )  # fmt: skip
    assert Streamer.tokens == output[0].tolist()
    last, _ = seen[-1]
    assert all(token == last[i] for tokens, known in seen for i, token in enumerate(tokens) if known[i])
    assert any(token not in (MASK, last[i]) for tokens, _ in seen for i, token in enumerate(tokens))


def causal_scores(guide: Any, tokens: Sequence[int], places: Sequence[int]) -> Tensor:
    """(n, V) log-probabilities under a causal model of what stands at some positions; it has no mask token."""
    with torch.no_grad():
        logits = guide(torch.tensor([tokens])).logits[0]
    found = torch.log_softmax(logits[[i - 1 for i in places]], -1)
    return torch.cat([found, torch.full((len(places), 1), -math.inf)], -1)


def guided(text: Text, guide: Any, sampled: bool, runs: set[int]) -> list[int]:
    for block in text.blocks:
        masks = set(block)
        while masks:
            laws = text.laws(sorted(masks), block[-1] + 1)
            found = {i: choice(logits) for i, logits in laws.items()}
            if sampled:
                tokens = {i: drawn(logits, text.row, i, text.steps) for i, logits in laws.items()}
                found = {i: (token, float(torch.softmax(laws[i], -1)[token])) for i, token in tokens.items()}
            filled = [found[i][0] if i in masks else token for i, token in enumerate(text.tokens[: block[-1] + 1])]
            scores = causal_scores(guide, filled, sorted(masks))
            agreed = {i for i, line in zip(sorted(masks), scores, strict=True) if int(line.argmax()) == found[i][0]}
            agreed.add(min(masks, key=lambda i: (-found[i][1], i)))
            runs.add(len(agreed))
            for i in agreed:
                text.tokens[i] = found[i][0]
                masks.discard(i)
            text.steps += 1
        if text.ended(block):
            break
    return text.answer


def adaptive(text: Text, guide: Any, sampled: bool, runs: set[int], weight: float = 0.7, ahead: int = 100) -> list[int]:
    at = text.prompt
    while at < len(text.tokens):
        block = next(block for block in text.blocks if at in block)
        if text.ended([block[0] - 1]):
            break
        end = len(text.tokens) if text.layout.attention == "whole" else block[-1] + 1
        places = list(range(at, min(at + ahead, end)))
        laws = text.laws(places, end)

        def chosen(scores: Tensor, place: int) -> int:
            return drawn(scores, text.row, place, text.steps) if sampled else int(scores[:MASK].argmax())

        draft = [chosen(laws[i], i) for i in places]
        scores = causal_scores(guide, [*text.tokens[:at], *draft], places)
        run = 1
        while run < len(places):
            own = torch.log_softmax(laws[places[run]], -1)
            if chosen(weight * own + (1 - weight) * scores[run], places[run]) != draft[run]:
                break
            run += 1
        text.tokens[at : at + run] = draft[:run]
        at, text.steps = at + run, text.steps + 1
        runs.add(run)
    return text.answer


GUIDED: dict[str, Callable[..., list[int]]] = {
    "guided": guided,
    "apd": adaptive,
    "apd:weight=0.4,ahead=3": partial(adaptive, weight=0.4, ahead=3),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("spec", GUIDED)
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_guide_decides_which_predictions_are_fixed(model: Any, guide: Any, spec: str, settings: Any) -> None:
    runs = set[int]()
    for layout in (BLOCKS, SHIFTED, WHOLE, LAYOUTS[5]):
        prompts, ids, mask = ragged(random.Random(4), (3, 8, 13))
        expected = [
            GUIDED[spec](Text(model, prompt, layout, i), guide, bool(settings), runs)
            for i, prompt in enumerate(prompts)
        ]
        policy = registry.load("canvas.policies.lossy", spec, model=guide)
        fast: Any = truedraft.accelerate(model, rule=policy, layout=layout)
        output = fast.generate(ids, attention_mask=mask, max_new_tokens=NEW, suppress_tokens=[MASK], **settings)
        assert texts_of(output, ids.shape[1]) == expected
    assert len(runs) > 2, "as many as the guide agrees with"


def test_guides_of_other_vocabularies_are_refused(model: Any, guide: Any) -> None:
    def made(given: Any, own: Any = model, words: Any = None, layout: Any = WHOLE) -> Any:
        return truedraft.accelerate(
            own, words, rule=registry.load("canvas.policies.lossy", "guided", model=given), layout=layout
        )

    for given in (None, 3):
        with pytest.raises(Refused, match="give the guide"):
            made(given)
    with pytest.raises(Refused, match="its vocabulary is not the model's"):
        made(model_of(vocab_size=97))
    with pytest.raises(Refused, match="its vocabulary is not the model's"):
        made(guide, layout=Layout(3, "whole", 8))
    with pytest.raises(Refused, match="give a decoder"):
        made("nano-gec")
    own, words = load("nano-diffusion")
    fast = made("nano", own, words, None)
    assert fast.generate(words("one day", return_tensors="pt").input_ids, max_new_tokens=8).shape[1] > 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], BLOCKS, SHIFTED, Layout(MASK, "blocks", 8, True)])
def test_text_that_is_verified_everywhere_is_that_of_blocks_of_one_position(layout: Layout, settings: Any) -> None:
    """Token by token, left to right, with keys and values of that."""
    model = model_of()
    one = layout.of_length(1)
    chooser = Chooser(LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)]), CanvasNoise(SEED))
    rule = registry.load("canvas.policies", "left-to-right")
    for seed in range(2):
        prompts, ids, mask = ragged(random.Random(seed), (3, 8, 13))
        expected = [by_hand(model, prompt, NEW, one, "left-to-right") for prompt in prompts]
        if settings:
            rows = enumerate(prompts)
            args = partial(plain, model), one
            expected = [step_by_step(*args, p, NEW, rule, chooser, frozenset([END]), i).text for i, p in rows]
        for runtime in ("auto", "stock"):
            fast: Any = truedraft.accelerate(model, rule="lossy/s2d2-always", layout=layout, runtime=runtime)
            output = fast.generate(ids, attention_mask=mask, max_new_tokens=NEW, **settings)
            assert texts_of(output, ids.shape[1]) == expected


def seen_by(text: Text, at: int, causal: bool, causal_cache: bool, size: int) -> Tensor:
    """What positions of a text read while a block is filled."""
    seen = torch.zeros(1, 1, size, size, dtype=torch.bool)
    for i in range(size):
        alone = causal if i >= text.starts[at] else causal_cache
        seen[0, 0, i, : i + 1 if alone else (i // text.layout.block + 1) * text.layout.block] = True
    return seen


def speculated(text: Text, cached: bool, worth: Callable[..., bool], threshold: float, counts: dict[str, int]) -> Any:
    """Drafts of a block, verified where it is worth it; each position of a verified run by a forward of its own."""

    def logits(at: int, tokens: Sequence[int], causal: bool) -> Tensor:
        seen = seen_by(text, at, causal, cached, len(tokens))
        with torch.no_grad():
            return text.model(torch.tensor([tokens]), attention_mask=seen, use_cache=False).logits[0]

    shifted, state = int(text.layout.shifted), {"on": False}
    for at, block in enumerate(text.blocks):
        while masks := [i for i in block if text.tokens[i] == MASK]:
            scored = logits(at, text.tokens[: block[-1] + 1], False)
            found = {i: choice(scored[i - shifted]) for i in masks}
            run = [i for k, i in enumerate(masks) if i == masks[0] + k]
            above = [i for i in masks if found[i][1] > threshold]
            gaps = []
            for i in run:
                law = torch.softmax(torch.cat([scored[i - shifted][:MASK], torch.tensor([-math.inf])]), -1)
                first, second = law.topk(2).values.tolist()
                gaps.append(first - second)
            sure = next((k for k, gap in enumerate(gaps) if gap <= 0.05), len(gaps))
            if worth(len(run), sure, len(above), state):
                counts["verified"] += 1
                for i in run:
                    token, _ = choice(logits(at, [*text.tokens[:i], MASK], True)[i - shifted])
                    text.tokens[i] = token
                    if token != found[i][0]:
                        counts["rejected"] += 1
                        break
                continue
            counts["plain"] += 1
            for i in above or [min(masks, key=lambda i: (-found[i][1], i))]:
                text.tokens[i] = found[i][0]
        if text.ended(block):
            break
    return text.answer


def hysteresis(run: int, sure: int, above: int, state: dict[str, bool]) -> bool:
    gain = sure - 0.5 * above
    state["on"] = gain >= 1 if state["on"] else gain > 2
    return state["on"]


SPECULATED: dict[str, tuple[str, Callable[..., bool], float, bool]] = {
    "bound": ("bound=2,threshold=0.5", lambda run, sure, above, state: sure - 1 >= 2, 0.5, True),
    "bound-blocks": ("causal_cache=False,bound=2", lambda run, sure, above, state: sure - 1 >= 2, 0.85, False),
    "span": ("router=span,span=3,threshold=0.5", lambda run, sure, above, state: run >= 3, 0.5, True),
    "hysteresis": ("router=hysteresis,dynamic=True,cost=0.5,on=2,off=1,threshold=0.5", hysteresis, 0.5, True),
}


@pytest.mark.parametrize("case", SPECULATED)
def test_drafts_are_verified_where_it_seems_worth_a_pass(model: Any, case: str) -> None:
    spec, worth, threshold, cached = SPECULATED[case]
    counts = {"verified": 0, "rejected": 0, "plain": 0}
    for layout in (BLOCKS, SHIFTED, Layout(MASK, "blocks", 8, True)):
        prompts, ids, mask = ragged(random.Random(3), (3, 8, 13))
        expected = [speculated(Text(model, p, layout), cached, worth, threshold, counts) for p in prompts]
        for runtime in ("auto", "stock"):
            fast: Any = truedraft.accelerate(model, rule=f"lossy/s2d2:{spec}", layout=layout, runtime=runtime)
            output = fast.generate(ids, attention_mask=mask, max_new_tokens=NEW, suppress_tokens=[MASK])
            assert texts_of(output, ids.shape[1]) == expected
    assert all(counts.values())


def test_a_model_of_the_whole_canvas_cannot_verify_itself(model: Any) -> None:
    fast: Any = truedraft.accelerate(model, rule="lossy/s2d2", layout=WHOLE)
    with pytest.raises(Refused, match="this model attends to the whole canvas"):
        fast.generate(torch.tensor([[7, 8]]), max_new_tokens=8)
    with pytest.raises(Refused, match="give bound, hysteresis or span"):
        truedraft.accelerate(model, rule="lossy/s2d2:router=bandit", layout=BLOCKS)


def test_tokens_that_are_suppressed_are_not_chosen_by_other_scores() -> None:
    chooser = Chooser(LogitsProcessorList([SuppressTokensLogitsProcessor([2])]))
    [found] = chooser.predictions(torch.tensor([[0.0, 1.0, 3.0]]), 0, [0], [[4]], [range(4, 5)])
    assert found.again is not None and found.again(torch.tensor([[0.5, 0.2, 4.0]])) == (0,)


COVERED = {spec.partition(":")[0] for spec in (*GUIDED, *(case[0] for case in EDITING.values()), "s2d2")}
