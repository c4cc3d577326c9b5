"""Lossy policies of diffusion models: each against its published rule, written out here in plain Python, over made-up
logits; and the canvases and files of those that have any."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

import truedraft
from test_canvas import END, MASK, model_of, plain, texts_of
from test_canvas_revising import COVERED
from truedraft import registry
from truedraft.canvas._base import Canvas, CanvasRow, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.noise import CanvasNoise
from truedraft.canvas.policies.lossy._filter import Filter
from truedraft.canvas.predicting import Chooser
from truedraft.errors import Refused
from truedraft.train.filters import traces_of, train_filter
from truedraft.train.loop import Plan

SIZE = 6  # tokens of the made-up vocabulary, the last of which, the mask, is never chosen
BLOCKS, WHOLE, SHIFTED = Layout(5, "blocks", 6), Layout(5, "whole", 6), Layout(5, "blocks", 6, True)
CHOOSER = Chooser(LogitsProcessorList([SuppressTokensLogitsProcessor([5])]))

Table = dict[int, list[float]]  # masked position -> logits
Rule = Callable[[Table, "State"], dict[int, int]]


class State:
    """What a rule may read: the blocks, the known positions, and a memory of its own."""

    def __init__(self, row: CanvasRow):
        self.blocks = [list(block) for block in row.blocks]
        self.known: dict[int, int] = dict(enumerate(row.canvas.tokens[: row.prompt]))
        self.prompt, self.memory = row.prompt, dict[Any, Any]()

    @property
    def at(self) -> int:
        return next(i for i, block in enumerate(self.blocks) if not self.full(i))

    def full(self, at: int) -> bool:
        return self.share(at) == 1

    def share(self, at: int) -> float:
        return sum(i in self.known for i in self.blocks[at]) / len(self.blocks[at])

    def masked(self, first: int, last: int) -> list[int]:
        return [i for block in self.blocks[first : last + 1] for i in block if i not in self.known]


def softmax(logits: Sequence[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def choice(logits: Sequence[float]) -> int:
    return argmax(logits[: SIZE - 1])


def sure(table: Table) -> dict[int, float]:
    return {i: softmax(logits)[choice(logits)] for i, logits in table.items()}


def tokens(table: Table, places: Sequence[int]) -> dict[int, int]:
    return {i: choice(table[i]) for i in places}


def surest(table: Table) -> list[int]:
    return [max(table, key=lambda i: sure(table)[i])]


def gap(logits: Sequence[float]) -> float:
    *_, second, first = sorted(logits)
    return first - second


def entropy(law: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in law if p > 0)


def early_exit(enough: Callable[[Table, State, float], bool], whole: bool) -> Rule:
    def rule(table: Table, state: State) -> dict[int, int]:
        block = state.masked(state.at, state.at)
        assert sorted(table) == (state.masked(0, len(state.blocks)) if whole else block)
        span = [i for b in (state.blocks if whole else [state.blocks[state.at]]) for i in b if i >= state.prompt]
        done = (sum(i in state.known for i in span) + 1) / len(span)
        inside = {i: table[i] for i in block}
        return tokens(table, [*table] if enough(table, state, done) else surest(inside))

    return rule


def prophet(table: Table, state: State, done: float) -> bool:
    inside = [gap(table[i]) for i in state.masked(state.at, state.at)]
    return sum(inside) / len(inside) >= (7.5 if done < 0.33 else 5.0 if done < 0.67 else 2.5)


def sched(shape: str) -> Callable[[Table, State, float], bool]:
    def enough(table: Table, state: State, done: float) -> bool:
        left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "exponential": math.exp(-4 * done)}
        return sum(map(gap, table.values())) / len(table) >= 7.5 * left[shape]

    return enough


def localleap(table: Table, state: State) -> dict[int, int]:
    p = sure(table)
    anchors = [i for i in table if p[i] >= 0.9]
    near = [i for i in table if p[i] >= 0.75 and any(a - 4 <= i <= a + 4 for a in anchors)]
    return tokens(table, sorted({*anchors, *near}) or surest(table))


def dparallel(table: Table, state: State) -> dict[int, int]:
    nats = {i: entropy(softmax(logits)) for i, logits in table.items()}
    return tokens(table, [i for i in table if nats[i] <= 0.45] or [min(table, key=lambda i: nats[i])])


def llada2(least: int) -> Rule:
    def rule(table: Table, state: State) -> dict[int, int]:
        p = sure(table)
        above = [i for i in table if p[i] > 0.95]
        return tokens(table, above if len(above) >= least else sorted(table, key=lambda i: -p[i])[:least])

    return rule


def fast_dllm_v2(shifted: bool) -> Rule:
    def rule(table: Table, state: State) -> dict[int, int]:
        block = state.blocks[state.at]
        if shifted and block[0] in table:
            return tokens(table, block[:1])
        part = next(p for p in (block[:4], block[4:]) if any(i in table for i in p))
        inside = {i: table[i] for i in part if i in table}
        return tokens(table, sorted({*(i for i in inside if sure(inside)[i] > 0.9), *surest(inside)}))

    return rule


def fast_dllm_factor(table: Table, state: State) -> dict[int, int]:
    order, p = sorted(table, key=lambda i: -sure(table)[i]), sure(table)
    count = 0
    while count < len(order) and (count + 2) * (1 - p[order[count]]) < 1:
        count += 1
    return tokens(table, order[: max(count, 1)])


def creditdecoding(table: Table, state: State) -> dict[int, int]:
    credit = state.memory.setdefault(state.at, {(i, v): 0.0 for i in state.blocks[state.at] for v in range(SIZE)})
    for key in credit:
        credit[key] *= 0.8
    raised = {}
    for i, logits in table.items():
        credit[i, choice(logits)] += softmax(logits)[choice(logits)] ** 0.2
        raised[i] = [x + 0.7 * math.log(1 + credit[i, v]) for v, x in enumerate(logits)]
    return tokens(raised, [i for i in raised if sure(raised)[i] >= 0.9] or surest(raised))


def ccd(table: Table, state: State) -> dict[int, int]:
    nats, stable = {}, {}
    for i, logits in table.items():
        law = softmax(logits)
        kept = sorted(range(SIZE), key=lambda v: -law[v])[:3]
        state.memory.setdefault(i, []).append([law[v] if v in kept else 0.0 for v in range(SIZE)])
        latest = state.memory[i][-2:]
        mean = [sum(step[v] for step in latest) / len(latest) for v in range(SIZE)]
        nats[i] = entropy([*mean, 1 - sum(mean)])
        stable[i] = argmax(mean) == choice(logits) and mean[argmax(mean)] > 1 - sum(mean)
    found = [i for i in table if nats[i] <= 0.8 and stable[i]]
    return tokens(table, found or [min(table, key=lambda i: nats[i])])


def d2f(active: float) -> Rule:
    """One more block per pass once the last one is a tenth full; a block waits until that before it is full enough."""

    def rule(table: Table, state: State) -> dict[int, int]:
        last = max(state.memory.get("last", 0), state.at)
        ended = any(token == 0 for i, token in state.known.items() if i >= state.prompt)
        if not ended and last + 1 < len(state.blocks) and state.share(last) >= 0.1:
            last += 1
        state.memory["last"] = last
        assert sorted(table) == state.masked(state.at, last)
        found: list[int] = []
        for at in range(state.at, last + 1):
            inside = {i: table[i] for i in state.masked(at, at)}
            above = [i for i in inside if sure(inside)[i] > 0.9]
            urgent = at == state.at or state.share(at - 1) >= active
            found += above or (surest(inside) if inside and urgent else [])
        return tokens(table, found)

    return rule


def ete(table: Table, state: State) -> dict[int, int]:
    assert sorted(table) == state.masked(state.at, state.at + 1)
    above = [i for i in table if sure(table)[i] >= 0.9]
    inside = {i: table[i] for i in state.masked(state.at, state.at)}
    return tokens(table, above or surest(inside))


def learn2pd(found: Filter) -> Rule:
    first, second = (
        [*zip(w.weight.tolist(), w.bias.tolist(), strict=True)] for w in found.layers if hasattr(w, "bias")
    )

    def layer(weights: Any, x: Sequence[float]) -> list[float]:
        return [bias + sum(w * value for w, value in zip(line, x, strict=True)) for line, bias in weights]

    def rule(table: Table, state: State) -> dict[int, int]:
        block, p = state.blocks[state.at], sure(table)
        x = [p.get(i, 1.0) for i in block] + [1.0] * (8 - len(block))
        out = layer(second, [max(h, 0.0) for h in layer(first, x)])
        accepted = {i for i in table if 1 / (1 + math.exp(-out[block.index(i)])) > 0.5}
        return tokens(table, sorted(accepted | set(surest(table))))

    return rule


def learn2pd_ends(found: Filter) -> Rule:
    """The rest is filled with end tokens from the first end that is fixed, or the surest one that is predicted."""
    alone = learn2pd(found)

    def rule(table: Table, state: State) -> dict[int, int]:
        fixed = alone({i: table[i] for i in state.masked(state.at, state.at)}, state)
        ends = sorted(i for i, token in fixed.items() if token == 0)
        predicted = [i for i in table if choice(table[i]) == 0]
        if not predicted:
            return fixed
        at = ends[0] if ends else max(predicted, key=lambda i: sure(table)[i])
        return {i: 0 for block in state.blocks for i in block if i >= at and i not in state.known} | fixed

    return rule


def filter_of() -> Filter:
    torch.manual_seed(0)
    found = Filter(8, 5)
    for weight in found.parameters():
        weight.data.mul_(3)
    return found


CASES: dict[str, tuple[str, Mapping[str, Any], Layout, Rule]] = {
    "prophet": ("prophet", {}, WHOLE, early_exit(prophet, True)),
    "prophet-blocks": ("prophet", {}, BLOCKS, early_exit(prophet, False)),
    "sched": ("sched", {}, WHOLE, early_exit(sched("exponential"), True)),
    "sched-linear": ("sched", {"form": "linear"}, WHOLE, early_exit(sched("linear"), True)),
    "sched-cosine": ("sched", {"form": "cosine"}, BLOCKS, early_exit(sched("cosine"), False)),
    "localleap": ("localleap", {}, WHOLE, localleap),
    "dparallel": ("dparallel", {}, BLOCKS, dparallel),
    "llada2": ("llada2", {"editing_threshold": 0.0}, BLOCKS, llada2(1)),
    "llada2-least": ("llada2", {"least": 3, "editing_threshold": 0.0}, BLOCKS, llada2(3)),
    "fast-dllm-v2": ("fast-dllm-v2", {"part": 4}, BLOCKS, fast_dllm_v2(False)),
    "fast-dllm-v2-shifted": ("fast-dllm-v2", {"part": 4}, SHIFTED, fast_dllm_v2(True)),
    "fast-dllm-factor": ("fast-dllm", {"factor": 1.0}, WHOLE, fast_dllm_factor),
    "creditdecoding": ("creditdecoding", {}, WHOLE, creditdecoding),
    "ccd": ("ccd", {"entropy": 0.8, "history": 2, "kept": 3}, BLOCKS, ccd),
    "d2f": ("d2f", {}, BLOCKS, d2f(0.95)),
    "d2f-active": ("d2f", {"active": 0.5}, BLOCKS, d2f(0.5)),
    "ete": ("ete", {}, WHOLE, ete),
    "learn2pd": ("learn2pd", {"model": filter_of(), "threshold": 0.5}, BLOCKS, learn2pd(filter_of())),
    "learn2pd-ends": (
        "learn2pd",
        {"model": filter_of(), "threshold": 0.5, "ends": True},
        WHOLE,
        learn2pd_ends(filter_of()),
    ),
    "learn2pd-ends-blocks": (
        "learn2pd",
        {"model": filter_of(), "threshold": 0.5, "ends": True},
        BLOCKS,
        learn2pd_ends(filter_of()),
    ),
}


def steps(policy: Any, layout: Layout, seed: int) -> Iterator[tuple[CanvasRow, Table, Predictions]]:
    """The steps of a row with logits of its own at each, which resemble those of the step before.

    The vocabulary's first token ends a text; the row goes on to the end of its canvas.
    """
    rng = random.Random(seed)
    prompt = [rng.randrange(SIZE) for _ in range(rng.randrange(5, 13))]
    blocks = layout.blocks(len(prompt), 14)
    row = CanvasRow(0, Canvas.behind(prompt, layout.mask, blocks[-1].stop), len(prompt), blocks, frozenset([0]), 14)
    policy.begin(row, layout)
    scale, change = rng.choice([2, 4, 8]), rng.choice([0.5, 2])
    likely = {i: [rng.gauss(0, scale) for _ in range(SIZE)] for i in range(len(row.canvas))}
    while row.at < len(row.blocks):
        row.reach = policy.reach(row)
        places = row.canvas.masked(row.span(row.block))
        table = {i: [x + rng.gauss(0, change) for x in likely[i]] for i in places}
        logits = torch.tensor([table[i] for i in places])
        yield row, table, CHOOSER.predictions(logits, 0, [row.step], [places], [row.block])[0]
        row.taken.append(frozenset())
        row.advance()


@pytest.mark.parametrize("case", CASES)
def test_a_rule_fixes_what_its_publication_does(case: str) -> None:
    name, knobs, layout, rule = CASES[case]
    policy = registry.load("canvas.policies.lossy", name, **knobs)
    state, counts = None, set[int]()
    for seed in range(25):
        for row, table, predictions in steps(policy, layout, seed):
            state = State(row) if row.step == 0 or state is None else state
            fixed = policy.choose(predictions, row)
            assert dict(fixed) == rule(table, state), (seed, row.step)
            counts |= {len(fixed)} if len(predictions) > 4 else set()
            state.known.update(fixed)
            row.canvas.fix(fixed)
    assert len(counts) > 1, "of several positions few are fixed, and more"


def test_every_lossy_policy_has_a_case() -> None:
    assert {name for name, *_ in CASES.values()} | COVERED == set(registry.names("canvas.policies.lossy"))


def test_the_first_token_behind_a_block_is_the_likeliest_one_also_where_tokens_are_drawn() -> None:
    policy = registry.load("canvas.policies.lossy", "fast-dllm-v2")
    row = CanvasRow(0, Canvas.behind([1] * 6, 5, 12), 6, [range(6, 12)], frozenset(), 6)
    policy.begin(row, SHIFTED)
    logits = torch.tensor([[0.5, 1.0, 0.0, 0.2, 0.7, 0.9]] * 6)
    drawn = Chooser(CHOOSER.warpers, CanvasNoise(3)).predictions(logits, 0, [0], [range(6, 12)], [row.block])[0]
    assert drawn.tokens[0] != 1 and policy.choose(drawn, row) == {(6, 1)}


def test_blocks_that_are_full_ahead_are_passed_over() -> None:
    blocks = [range(4), range(4, 8), range(8, 12)]
    row = CanvasRow(0, Canvas.behind([1, 2, 3], 5, 12), 3, blocks, frozenset([0]), 9, reach=1)
    row.canvas.fix(frozenset((i, 4) for i in (4, 5, 6, 7, 9)))
    assert row.reached(frozenset())[1:] == (blocks[0], [3])
    assert row.reached(frozenset({(3, 1)}))[1:] == (blocks[2], [8, 10, 11])
    assert row.finishes(frozenset({(3, 0)})) and not row.finishes(frozenset({(3, 1), (8, 0)}))
    assert row.finishes(frozenset((i, 1) for i in (3, 8, 10, 11)))
    row.canvas.fix(frozenset({(3, 1)}))
    row.advance()
    assert row.at == 2 and not row.finished


def test_guesses_are_the_likeliest_tokens_at_the_most_uncertain_position() -> None:
    policy: Any = registry.load("canvas.policies.lossy", "ete:explored=2,candidates=2,few=1")
    tried = False
    for seed in range(10):
        for row, table, predictions in steps(policy, WHOLE, seed):
            fixed = policy.choose(predictions, row)
            row.canvas.fix(fixed)
            row.predictions = predictions.after(fixed, 1)
            left = {i: table[i] for i in row.canvas.masked(row.block)}
            places = sorted(left, key=lambda i: -entropy(softmax(left[i])))[:2]
            guesses = [(i, v) for i in places for v in sorted(range(SIZE - 1), key=lambda v: -left[i][v])[:2]]
            if left and sum(p >= 0.9 for p in sure(table).values()) <= 1:
                assert [draft.fixed for draft in policy.hypotheses(row)] == [frozenset({guess}) for guess in guesses]
                tried = True
            elif left:
                assert policy.hypotheses(row) == []
    assert tried


def explored(model: Any, prompt: Sequence[int], new: int, layout: Layout, threshold: float) -> tuple[list[int], int]:
    """ETE with two blocks at a time and up to three guesses at one position, by plain forwards; the text up to the
    first end, and how many steps led to a canvas of a pass that was a guess."""
    blocks = [list(block) for block in layout.blocks(len(prompt), new)]
    text = [*prompt, *[MASK] * (blocks[-1][-1] + 1 - len(prompt))]
    unknown, guesses, kept = set(range(len(prompt), len(text))), [], 0

    def first(masks: set[int]) -> int:
        return next(at for at, block in enumerate(blocks) if masks & {*block})

    def scored(at: int, guess: tuple[int, int] | None) -> tuple[dict[int, tuple[float, int, list[float]]], list[int]]:
        tried, masks = list(text), unknown - ({guess[0]} if guess else set())
        if guess:
            tried[guess[0]] = guess[1]
        here = first(masks)
        last = max(min(at + 1, len(blocks) - 1), here)
        given = tried if layout.attention == "whole" else tried[: blocks[last][-1] + 1]
        logits = plain(model, given, layout)
        laws = {i: softmax(logits[i].tolist()) for b in blocks[here : last + 1] for i in b if i in masks}
        return {i: (max(law), argmax(law), law) for i, law in laws.items()}, blocks[here]

    while unknown:
        at = first(unknown)
        if END in text[len(prompt) : blocks[at][0]]:
            break
        results = [scored(at, guess) for guess in (None, *guesses)]
        best = max(range(len(results)), key=lambda k: sum(p >= threshold for p, *_ in results[k][0].values()))
        fixed = dict([guesses[best - 1]]) if best else {}
        kept += best > 0
        while True:
            found, block = results[best]
            above = [i for i in found if found[i][0] >= threshold]
            chosen = above or [max((i for i in found if i in block), key=lambda i: found[i][0])]
            alone = not fixed
            fixed |= {i: found[i][1] for i in chosen}
            if not (alone and len(fixed) == 1 and next(iter(fixed.items())) in guesses):
                break
            best, kept = 1 + guesses.index(next(iter(fixed.items()))), kept + 1
        for i, token in fixed.items():
            text[i] = token
            unknown.discard(i)
        left = [i for i in block if i in unknown]
        guesses = []
        if left and len(above) <= 1:
            place = max(left, key=lambda i: entropy(found[i][2]))
            guesses = [(place, v) for v in sorted(range(99), key=lambda v: -found[place][2][v])[:3]]
            rest = unknown - {place}
            done = [i for b in blocks[: first(rest)] for i in b if i >= len(prompt)] if rest else []
            ends = {END} & {text[i] for i in done if i != place}
            guesses = [(p, v) for p, v in guesses if rest and not ends and not (p in done and v == END)]
    answer = text[len(prompt) : len(prompt) + new]
    return (answer[: answer.index(END) + 1] if END in answer else answer), kept


@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("layout", [Layout(MASK, "whole", 8), Layout(MASK, "blocks", 4)], ids=["whole", "blocks"])
def test_of_several_guesses_the_one_that_makes_most_confident_is_kept(layout: Layout, runtime: str) -> None:
    model, total = model_of(), 0
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    fast: Any = truedraft.accelerate(model, rule="lossy/ete", layout=layout, runtime=runtime)
    for prompt in ([7, 8, 9], [11, 40, 62, 31, 17, 80, 22, 9]):
        text, kept = explored(model, prompt, 17, layout, 0.9)
        assert texts_of(fast.generate(torch.tensor([prompt]), max_new_tokens=17), len(prompt)) == [text]
        emitted = [emission for done in fast.report().passes for emission in done.emitted]
        assert sum(emission.drafted for emission in emitted) == kept
        total += kept
    assert total > 0, "a guess was kept"


@pytest.mark.parametrize(
    ("spec", "layout", "message"),
    [
        ("d2f", WHOLE, "this model attends to the whole canvas"),
        ("ete:ahead=2", BLOCKS, "at most one block ahead"),
        ("sched:form=steep", WHOLE, "give linear, cosine or exponential"),
        ("learn2pd", WHOLE, "give the file of a trained filter"),
        ("learn2pd:model=/nowhere", WHOLE, "there is no such file"),
    ],
)
def test_what_a_policy_cannot_do_is_refused(spec: str, layout: Layout, message: str) -> None:
    with pytest.raises(Refused, match=message):
        next(steps(registry.load("canvas.policies.lossy", spec), layout, 0))


def test_a_filter_learns_which_predictions_are_final(tmp_path: Path) -> None:
    layout, rng = Layout(MASK, "blocks", 4), random.Random(0)
    prompts = [[rng.randrange(6, 98) for _ in range(5)] for _ in range(6)]
    reference = registry.load("canvas.policies", "low-confidence")
    traces = traces_of(model_of(), layout, prompts, 12, reference)
    lengths = traces.masked.sum(-1).tolist()
    assert lengths[:7] == [3, 2, 1, 4, 3, 2, 1] and (traces.confidences[~traces.masked] == 1).all()
    alone = traces.masked & (traces.masked.sum(-1) == 1)[:, None]
    assert traces.final[alone].all(), "the last prediction of a block is its text"
    assert not traces.final[traces.masked].all() and not traces.final[~traces.masked].any()

    lines: list[str] = []
    found = train_filter(traces, tmp_path / "filter", Plan(minutes=1, steps=150, lr=0.02), report=lines.append)
    torch.manual_seed(0)
    assert traces.loss(found) < 0.8 * traces.loss(Filter(4)) and lines
    again = registry.load("canvas.policies", f"lossy/learn2pd:model={tmp_path / 'filter'}").filter
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), again.parameters(), strict=True))
    fast: Any = truedraft.accelerate(model_of(), rule=f"lossy/learn2pd:model={tmp_path / 'filter'}", layout=layout)
    assert fast.generate(torch.tensor([prompts[0]]), max_new_tokens=12).shape[1] <= 17
    with pytest.raises(Refused, match="blocks of up to 4 positions, and there are 8"):
        fast.generate(torch.tensor([prompts[0]]), max_new_tokens=12, block_length=8)
    (tmp_path / "filter").write_bytes(b"x" * 100)
    with pytest.raises(Refused, match="damaged"):
        Filter.read(tmp_path / "filter")
