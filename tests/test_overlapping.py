"""Drafting while the target's pass runs: any progress of the thread, its exceptions, and what is left of it."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from heapq import nlargest
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import truedraft
from models import ragged, sibling, tiny
from nets import SEED, generated
from test_law import chain_rule
from truedraft import DraftTree, registry
from truedraft.chance import Chance, PositionNoise, Replay, StreamNoise, outcomes
from truedraft.drafters._worker import Worker
from truedraft.drafters.models._overlapping import OverlappingDrafter
from truedraft.tree import Row

METHODS = ["pearl", "mirror-sd"]
TOKENS = 30
SIZE, DRAWN = 4, 4  # vocabulary and tokens where all draws are enumerated


class Paced(Worker):
    """Makes random numbers of steps, from none to all, when it is stopped, in the thread that stops it."""

    def __init__(self, seed: int, most: int = 9):
        super().__init__(1)
        self.random, self.most = random.Random(seed), most
        self.steps: Iterator[Any] = iter(())

    def start(self, steps: Iterator[Any]) -> None:
        self.steps = steps

    def stop(self) -> None:
        steps, self.steps = self.steps, iter(())
        for _ in range(self.random.randint(0, self.most)):
            next(steps, None)

    def finish(self) -> None:
        steps, self.steps = self.steps, iter(())
        list(steps)

    def close(self) -> None:
        self.steps = iter(())


class Whole(Paced):
    """Makes all steps."""

    def stop(self) -> None:
        self.finish()


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft model that is often right and often wrong about it."""
    model = tiny(dtype=torch.float32)
    return model, sibling(model)


def drafting(name: str, small: PreTrainedModel | None = None, **knobs: Any) -> Any:
    return registry.load("drafters", name, model=small or models()[1], **knobs)


def accelerated(draft: OverlappingDrafter, **settings: Any) -> Any:
    return truedraft.accelerate(models()[0], draft=draft, **{"control": "fixed", **settings})


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("truedraft-draft")]


def check_text(fast: Any, rows: int, **settings: Any) -> None:
    given = {"max_new_tokens": TOKENS, "pad_token_id": 0, **settings}
    inputs = ragged(models()[0], rows)
    expected = generated(models()[0], inputs, **given)
    torch.manual_seed(SEED)
    assert torch.equal(fast.generate(**inputs, **given), expected.text)
    assert torch.equal(torch.get_rng_state(), expected.state), "the thread has drawn random numbers"


@cache
def continued(tokens: tuple[int, ...], count: int) -> list[int]:
    """What the draft model generates by itself."""
    made = models()[1].generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return made[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}])
@pytest.mark.parametrize("knobs", [{}, {"serial": 2, "length": 3}], ids=["", "serial"])
@pytest.mark.parametrize("name", METHODS)
def test_texts_and_drafts_do_not_depend_on_how_far_the_thread_gets(
    name: str, knobs: dict[str, int], settings: dict[str, Any]
) -> None:
    """At any progress the text is the target's, and a draft is what the draft model generates behind the text."""
    draft = drafting(name, **knobs)
    propose, seen = draft.propose, list[tuple[tuple[int, ...], tuple[int, ...]]]()

    def noted(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        trees: list[DraftTree] = propose(rows, budget)
        seen.extend((tuple(row.tokens), tree.tokens[1:]) for row, tree in zip(rows, trees, strict=True))
        return trees

    draft.propose = noted
    fast = accelerated(draft)
    for seed in range(4):
        draft._worker = Paced(seed)
        check_text(fast, 1 + seed % 3, **settings)
    lengths = {len(drafted) for _, drafted in seen}
    assert 0 < draft.ready < draft.requested and len(lengths) > 2, "progress differs"
    if not settings["do_sample"]:
        wrong = [
            (text, drafted) for text, drafted in seen if continued(text, draft.length)[: len(drafted)] != [*drafted]
        ]
        assert not wrong


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_draft_is_ready_whenever_the_draft_model_was_right(name: str, sample: bool) -> None:
    """The target drafts for itself, by the same noise, and a pass ends when the thread has nothing left to do."""
    draft = drafting(name, models()[0], length=4, serial=0)
    draft._worker = Whole(0)
    check_text(fast := accelerated(draft), 1, do_sample=sample)
    assert draft.ready == draft.requested - 1, "all but the first"
    assert len(fast.report().passes) == 2 + -(-(TOKENS - 2) // (4 + 1))  # the prompt, one without a draft, full ones


class Alternating(Whole):
    """Makes all steps of every second job, and none of the others."""

    whole = False

    def start(self, steps: Iterator[Any]) -> None:
        self.whole = not self.whole
        super().start(steps if self.whole else iter(()))


def test_what_the_thread_had_no_time_to_read_is_read_with_the_text() -> None:
    """The target drafts for itself; of a draft that no level continued, what a pass left over is verified next."""
    draft = drafting("pearl", models()[0], length=4)
    draft._worker = Alternating(0)
    check_text(fast := accelerated(draft), 1, do_sample=False)
    assert fast.report().acceptance_rate == 1.0 and len(fast.report().passes) < TOKENS / 2


def test_the_likeliest_corrections_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is ready if a pass ends with one of the likeliest pairs of accepted prefix and correction, by a plain
    forward of the draft model over the draft."""
    small = copy.deepcopy(models()[1])
    with torch.no_grad():
        for parameter in small.parameters():  # often wrong
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))
    draft = drafting("mirror-sd", small, length=3, branches=2, serial=0)
    draft._worker = Whole(0)
    continued_ = OverlappingDrafter._continued
    calls: list[tuple[list[int], list[int]]] = []

    def noted(self: OverlappingDrafter, row: Row, tree: DraftTree) -> Any:
        calls.append((list(row.tokens), list(tree.tokens[1:])))
        return continued_(self, row, tree)

    monkeypatch.setattr(OverlappingDrafter, "_continued", noted)
    check_text(accelerated(draft), 1, do_sample=False, max_new_tokens=60)
    found, corrected = [], 0
    for (text, drafted), (later, ready) in pairwise(calls):
        with torch.no_grad():
            logits = small(torch.tensor([text + drafted])).logits[0, len(text) - 1 :]
        laws, right, pairs = logits.float().softmax(-1), 1.0, []
        chain = [*drafted, int(laws[-1].argmax())]
        for place, (law, token) in enumerate(zip(laws, chain, strict=True)):
            pairs += [(right * float(p), (*chain[:place], t)) for t, p in enumerate(law) if t != token]
            right *= float(law[token])
        emitted = tuple(later[len(text) :])
        likely = {emitted for _, emitted in nlargest(2, pairs)}
        found.append((bool(ready), emitted == tuple(chain[: len(emitted)]) or emitted in likely))
        corrected += emitted in likely
    assert all(was == expected for was, expected in found)
    assert corrected >= 2 and not all(was for was, _ in found), "there were both outcomes"


@pytest.mark.parametrize("name", METHODS)
def test_texts_are_right_at_random_delays_of_both_sides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = drafting(name, length=4)
    fast, delays = accelerated(draft), random.Random(3)
    score, level = fast.target.score, draft._level

    def delayed(f: Callable[..., Any], most: float) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            time.sleep(delays.choice([0.0, 0.0, 0.3, 1.0]) * most)
            result = f(*args)
            time.sleep(delays.choice([0.0, 0.0, 0.3, 1.0]) * most)
            return result

        return call

    monkeypatch.setattr(fast.target, "score", delayed(score, 0.004))
    monkeypatch.setattr(draft, "_level", delayed(level, 0.001))
    for turn in range(12):
        check_text(fast, 1 + turn % 3, do_sample=turn % 2 == 1)
        assert not threads()
    assert 0 < draft.ready < draft.requested


def test_the_thread_drafts_while_the_pass_runs_and_stops_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that waits for three levels ends, whatever is left to do, and no level begins afterwards."""
    draft = drafting("pearl", models()[0], length=64)
    fast, reached, made = accelerated(draft), threading.Semaphore(0), list[int]()
    score, level = fast.target.score, draft._level

    def counted(active: Any) -> None:
        assert threading.current_thread() in threads()
        assert not torch.is_grad_enabled() and torch.get_num_threads() == draft.threads
        level(active)
        made.append(1)
        reached.release()
        time.sleep(0.01)

    def waiting(trees: Any) -> Any:
        if passes.append(1) or len(passes) <= 3:
            assert all(reached.acquire(timeout=20) for _ in range(3)), "no thread runs beside the pass"
        return score(trees)

    def stopped(*args: Any) -> None:
        observe(*args)
        before = len(made)
        time.sleep(0.03)
        assert len(made) == before, "a level began after the pass"
        while reached.acquire(blocking=False):
            pass

    observe, passes = draft.observe, list[int]()
    monkeypatch.setattr(draft, "_level", counted)
    monkeypatch.setattr(fast.target, "score", waiting)
    monkeypatch.setattr(draft, "observe", stopped)
    check_text(fast, 1, do_sample=False)
    assert len(passes) > 3


@pytest.mark.parametrize("where", ["level", "pass", "interrupted pass"])
def test_exceptions_are_raised_and_leave_no_thread(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = drafting("pearl")
    fast = accelerated(draft)
    error = KeyboardInterrupt() if where == "interrupted pass" else RuntimeError("planted")
    of, name = (draft, "_level") if where == "level" else (fast.target, "score")
    working, calls, alive = getattr(of, name), [0], list[int]()

    def failing(*args: Any) -> Any:
        calls[0] += 1
        alive.append(len(threads()))
        if calls[0] == 4:
            raise error
        return working(*args)

    with monkeypatch.context() as patch:
        patch.setattr(of, name, failing)
        with pytest.raises(type(error)):
            fast.generate(**ragged(models()[0], 2), max_new_tokens=TOKENS, do_sample=False)
    assert max(alive) == 1 and not threads()
    assert not draft._trees and not draft._noise and not draft._running and not draft.reader.slot_rows
    check_text(fast, 2, do_sample=False)


def test_an_exception_of_the_thread_ends_its_own_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = models()[0], drafting("pearl")
    ids = ragged(model, 1)["input_ids"]
    given: dict[str, Any] = dict(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **given)[0, ids.shape[1] :].tolist()

    def broken(active: Any) -> None:
        raise RuntimeError("planted")

    with truedraft.accelerate(model, draft=None).engine(max_rows=3, max_tokens=256) as engine:
        monkeypatch.setattr(draft, "_level", broken)
        failed, other = (engine.add_request(ids[0], **given, draft=one) for one in (draft, drafting("pearl")))
        while engine.has_unfinished_requests():
            engine.step()
    assert str(failed.error) == "planted" and other.tokens == expected and not threads()


def test_rows_that_leave_stop_the_thread() -> None:
    model, draft = models()[0], drafting("pearl")
    with truedraft.accelerate(model, draft=None).engine(max_rows=2, max_tokens=256) as engine:
        ids = ragged(model, 1)["input_ids"][0]
        requests = [engine.add_request(ids, max_new_tokens=99, do_sample=False, draft=draft) for _ in range(2)]
        for request in requests:
            for _ in range(5):  # the prompt's, and three without drafts
                engine.step()
            assert len(threads()) == 1
            engine.abort_request(request)
        assert not threads()


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("rejection", {"do_sample": True, "repetition_penalty": 1.3}),
        ("greedy", {"do_sample": False, "repetition_penalty": 1.3}),
    ],
)
def test_where_a_text_would_depend_on_time_drafts_are_made_before_the_pass(
    rule: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processors that read the text, as with `draft-model`, to the pass."""
    monkeypatch.setattr(Worker, "start", lambda worker, steps: pytest.fail("a thread has begun"))
    given = {**ragged(models()[0], 2), "max_new_tokens": TOKENS, "pad_token_id": 0, **settings}
    outcomes = []
    for draft in (drafting("pearl", length=4), drafting("draft-model", length=4)):
        fast = accelerated(draft, rule=rule)
        outcomes.append((fast.generate(**given, seed=7).tolist(), fast.report().passes))
    assert outcomes[0] == outcomes[1]


def test_the_number_of_threads_elsewhere_is_not_changed() -> None:
    before, counts = torch.get_num_threads(), dict[str, int]()
    try:
        torch.set_num_threads(3)
        worker = Worker(2)
        counted = threading.Event()
        worker.start(counts.update(own=torch.get_num_threads()) or counted.set() for _ in range(1))
        assert counted.wait(20)
        worker.stop()
        other = threading.Thread(target=lambda: counts.update(other=torch.get_num_threads()))
        other.start()
        other.join()
        assert counts == {"own": 2, "other": 3} and torch.get_num_threads() == 3
        worker.close()
        assert not threads()
    finally:
        torch.set_num_threads(before)


class Inline(Whole):
    """Makes all steps when it is started: draws of the thread come before those of the pass."""

    def start(self, steps: Iterator[Any]) -> None:
        list(steps)

    def finish(self) -> None:
        """Nothing is left to do."""


class Beside(Replay):
    """Draws for the thread are among those that are enumerated."""

    def beside(self) -> Chance:
        return self


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "rule"),
    [("pearl", "rejection"), ("pearl", "block"), ("mirror-sd", "rejection"), ("mirror-sd", "multi-round")],
)
def test_the_law_is_the_targets_where_the_thread_draws(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration of all draws, those of the thread included."""
    monkeypatch.setattr("truedraft.chance.Replay", Beside)
    model = tiny("llama", torch.float32, vocabulary=SIZE, sharpen=1.5)
    prompt = torch.tensor([[3, 1, 2, 3, 1]])
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(2)])
    expected, drafts = chain_rule(model, prompt[0].tolist(), processors, DRAWN), [0, 0]

    def text(chance: Beside) -> tuple[int, ...]:
        draft = drafting(name, sibling(model, 0.5), length=1)
        draft._worker = Inline(0)
        fast = truedraft.accelerate(model, draft=draft, control="fixed", rule=rule)
        out = fast.generate(prompt, max_new_tokens=DRAWN, do_sample=True, temperature=0.8, top_k=2, chance=chance)[
            0, len(prompt[0]) :
        ]
        drafts[0] += draft.requested
        drafts[1] += draft.ready
        return tuple(out.tolist())

    measured: dict[tuple[int, ...], float] = {}
    for emitted, p in outcomes(text):
        measured[emitted] = measured.get(emitted, 0.0) + p
    assert measured.keys() == expected.keys()
    assert max(abs(measured[one] - expected[one]) for one in expected) < 1e-6
    assert 0 < drafts[1] < drafts[0], "ready drafts were verified"


@pytest.mark.parametrize(("name", "seeded"), [("pearl", False), ("mirror-sd", True)], ids=["stream", "positions"])
def test_the_law_is_the_targets_with_the_noise_of_a_call(name: str, seeded: bool) -> None:
    """With the real thread, and guesses by the noise that the pass draws by: by the frequencies of texts."""
    model = tiny("llama", torch.float32, vocabulary=SIZE, sharpen=1.5)
    prompt = torch.tensor([[3, 1, 2, 3, 1]])
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(2)])
    expected = chain_rule(model, prompt[0].tolist(), processors, 5)
    draft = drafting(name, sibling(model, 0.5), length=1, serial=0)
    fast = truedraft.accelerate(model, draft=draft, control="fixed", rule="rejection")
    found: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(4)
    for seed in range(2):
        given = {"seed": seed} if seeded else {}
        out = fast.generate(prompt.expand(600, -1), max_new_tokens=5, do_sample=True, temperature=0.8, top_k=2, **given)
        found.update(map(tuple, out[:, len(prompt[0]) :].tolist()))
    count = found.total()
    texts = [text for text in expected if count * expected[text] >= 5]
    counts, odds = [found[text] for text in texts], [count * expected[text] for text in texts]
    counts, odds = [*counts, count - sum(counts)], [*odds, count - sum(odds)]  # the rare ones together
    assert chisquare(counts, odds, sum_check=False).pvalue > 1e-3
    assert found.keys() <= expected.keys() and 0 < draft.ready < draft.requested


@pytest.mark.parametrize("rule", ["seeded", "rejection"])
def test_what_was_verified_is_not_verified_again_where_drafts_are_drawn(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correction may be the very token that was drafted there; what follows in the draft was verified with it."""
    draft = drafting("pearl", models()[0], length=3, serial=3)
    draft._worker = Inline(0)
    fast, seen = accelerated(draft, rule=rule), list[int]()
    continued_ = OverlappingDrafter._continued

    def noted(self: OverlappingDrafter, row: Row, tree: DraftTree) -> Any:
        growing = continued_(self, row, tree)
        if tree.drafted == 3 and not seen:
            list(self._levels([growing]))
            for emitted in (1, 3, 4):
                seen.append(draft._drafted(row.after(growing.path(len(growing.tokens) - 1)[:emitted])).drafted)
        return growing

    monkeypatch.setattr(OverlappingDrafter, "_continued", noted)
    draft._trees = Anyones()
    fast.generate(ragged(models()[0], 1)["input_ids"], max_new_tokens=TOKENS, do_sample=True, pad_token_id=0)
    assert seen == ([6, 4, 3] if rule == "seeded" else [0, 0, 3])


class Anyones(dict[Row, Any]):
    """The latest value, for every key."""

    def __contains__(self, key: object) -> bool:
        return bool(len(self))

    def __missing__(self, key: Row) -> Any:
        return [*self.values()][-1]


def test_a_stream_for_the_thread_repeats_no_noise() -> None:
    """Of the rules' own draws, which go on where they were, and of the noise at any step."""
    row = Row(0, [1, 2], 1, 9)
    for chance in (StreamNoise(1), PositionNoise([(3, 0)])):
        torch.manual_seed(0)
        beside, like = chance.beside(), torch.empty(0, 64)
        assert beside is not None and beside is chance.beside()
        noise = chance.target_noise(row, [0, 1, 2], like)
        chance.flip(0.5, row)
        state = torch.get_rng_state()
        chance.reached(2)
        assert torch.equal(torch.get_rng_state(), state)
        law, drawn = torch.ones(64), list[list[int]]()
        for source in (chance, beside):
            drawn.append([source.draw(law, row)[0] for _ in range(20)])
        assert drawn[0] != drawn[1] and noise is not None
        assert len({*drawn[1][:3], *noise.argmin(-1).tolist()}) > 3


@pytest.mark.parametrize("name", METHODS)
def test_the_text_of_a_seed_does_not_depend_on_the_threads_pace(name: str) -> None:
    """Under a rule whose text depends on the drafts: with the real thread, and all work before or after the pass."""
    texts, given = [], {"max_new_tokens": TOKENS, "pad_token_id": 0, "do_sample": True, "temperature": 1.5}
    for worker in (None, None, Inline(0), Paced(1), Paced(2)):
        draft = drafting(name, length=3, serial=0)
        draft._worker, ready = worker or draft._worker, draft._drafted

        def checked(row: Row, ready: Callable[[Row], DraftTree] = ready) -> DraftTree:
            tree = ready(row)
            assert tree.drafted <= 3, "more was drafted than will be verified"
            return tree

        draft._drafted = checked
        fast = accelerated(draft, rule="rejection")
        texts.append(fast.generate(**ragged(models()[0], 3), **given, seed=5).tolist())
        assert 0 < draft.ready < draft.requested
        torch.manual_seed(5)
        texts.append(fast.generate(**ragged(models()[0], 3), **given).tolist())
    assert texts[0] != texts[1] and all(text == texts[i % 2] for i, text in enumerate(texts))


def test_a_drafter_for_itself_is_always_right_where_the_thread_draws() -> None:
    """Its law is that of the target, and its guess has the noise of the pass: every draft is accepted and ready. The
    laws that come with a draft are those of plain forwards."""
    model, draft, laws = models()[0], drafting("pearl", models()[0], length=4), 0
    fast, propose = accelerated(draft, rule="rejection"), draft.propose

    def checked(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        nonlocal laws
        (tree,) = trees = propose(rows, budget)
        with torch.no_grad():
            logits = model(torch.tensor([rows[0].tokens + list(tree.tokens[1:])])).logits[0, len(rows[0].tokens) - 1 :]
        for law, expected in zip((tree.dist or ())[: tree.drafted], logits.softmax(-1), strict=False):
            torch.testing.assert_close(law, expected, atol=1e-5, rtol=0)
            laws += 1
        return trees  # type: ignore[no-any-return]

    draft.propose = checked
    ids = ragged(model, 1)["input_ids"]
    fast.generate(ids, max_new_tokens=TOKENS, do_sample=True, top_k=0, seed=1, pad_token_id=0)
    assert draft.ready == draft.requested - 1, "all but the first"
    assert fast.report().acceptance_rate == 1.0 and laws > 10
