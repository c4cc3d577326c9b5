"""The engine over a scripted target, compared with plain decoding: texts, ends of rows, recorded passes, failures."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as Criteria

from scripted import END, PAD, Likeliest, Lockstep, Plain, Pruning, RandomDrafts, Target, V, next_token
from truedraft import DraftTree
from truedraft.accept._base import ArgmaxRule, ProbingRule, Rule
from truedraft.accept._verification import Candidates, Verification
from truedraft.accept.greedy import Greedy
from truedraft.chance import Chance, Replay
from truedraft.engine import Engine
from truedraft.request import Request
from truedraft.sampling import History, Laws
from truedraft.stats import PARTS, Pass, percentages, shares
from truedraft.stopping import Stops
from truedraft.stopwatch import Stopwatch
from truedraft.tree import Accepted, Prompt, Row, Scores, Taps

ROOM, SEEDS = 9, 12
EARLY = 3  # tokens of the first row in lockstep


class Steps(Replay):
    """A source of noise that records the steps given to `reached` and `passed`."""

    def __init__(self) -> None:
        super().__init__([])
        self.reached_steps: list[int] = []
        self.passed_steps: list[int] = []

    def reached(self, step: int) -> None:
        self.reached_steps.append(step)

    def passed(self, step: int) -> None:
        self.passed_steps.append(step)


class Parts(Stopwatch):
    """A stopwatch with the name of the part that is being timed."""

    part = ""

    def timed(self, part: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, part
            try:
                return f(*args, **kwargs)
            finally:
                self.part = before

        return super().timed(part, within)

    def timed_drafts(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            before, self.part = self.part, "draft"
            try:
                return f(*args)
            finally:
                self.part = before

        return super().timed_drafts(within)


class Setting:
    """An engine with a scripted target, drafter and control, one request, and a log of the calls of its parts."""

    def __init__(
        self,
        seed: int,
        rows: int = 3,
        lockstep: bool = False,
        pads: bool = True,
        rule: Rule | None = None,
        drawn: bool = False,
        begins_with_drafts: bool = False,
        width: int = 6,
    ):
        rng = random.Random(seed)
        self.events: list[str] = []
        self.parts: dict[str, str] = {}
        self.watch = Parts()
        lengths = [rng.randint(1, 4) for _ in range(rows)]
        self.rows = [Row(i, [rng.randrange(V - 1) for _ in range(n)], n, ROOM) for i, n in enumerate(lengths)]
        self.prompts = [Prompt(torch.tensor(row.tokens)) for row in self.rows]
        self.plain = [Plain(list(row.tokens), row.prompt + ROOM, END if pads else None) for row in self.rows]
        self.history = History(torch.zeros(rows, 4), ROOM, PAD, self.rows)
        laws = Laws(LogitsProcessorList(), self.history)
        criteria = Criteria([MaxLengthCriteria(4 + ROOM)])
        if pads:
            criteria.append(EosTokenCriteria(END))
        if lockstep:
            criteria.append(Lockstep(4 + EARLY))
            self.plain[0].longest = self.rows[0].prompt + EARLY
        stops = Stops(criteria, self.history, laws)
        assert stops.lockstep == lockstep
        self.target = Target(self.note, begins_with_drafts)
        self.drafter = RandomDrafts(self.note, seed, drawn, width)
        self.control, self.chance = Pruning(self.note, seed), Steps()
        self.rule = rule or Likeliest()
        self.request = Request(self.rows, self.prompts, self.drafter, self.rule, laws, stops, self.chance, self.history)
        self.engine = Engine(self.target, self.control)  # type: ignore[arg-type]
        self.watch.attach(self.engine)
        self.lockstep, self.pads = lockstep, pads

    def note(self, event: str) -> None:
        self.events.append(event)
        self.parts[event] = self.watch.part

    def decode(self) -> list[Pass]:
        return list(self.engine.run(self.request))

    def expected(self) -> list[tuple[list[int], int | None]]:
        """Plain decoding; in lockstep until the last row has ended."""
        if not self.lockstep:
            for row in self.plain:
                while row.end is None:
                    row.emit(next_token(row.tokens))
        while any(row.end is None for row in self.plain):
            for row in self.plain:
                row.emit(PAD if row.end and self.pads else next_token(row.tokens))
        return [(row.tokens, row.end) for row in self.plain]

    def found(self) -> list[tuple[list[int], int | None]]:
        return [(row.tokens, row.end) for row in self.rows]


MODES: dict[str, dict[str, Any]] = {
    "independent rows": {},
    "one row": {"rows": 1},
    "no end of text": {"pads": False},
    "lockstep": {"lockstep": True},
    "lockstep without padding": {"lockstep": True, "pads": False},
    "all nodes decided at once": {"rule": Greedy()},
    "lockstep, all nodes decided at once": {"rule": Greedy(), "lockstep": True},
    "drawn drafts": {"drawn": True},
    "drafts before the first pass": {"begins_with_drafts": True},
    "no drafts": {"width": 0},
}


@pytest.mark.parametrize("mode", MODES)
def test_text_equals_plain_decoding(mode: str) -> None:
    most = 0
    for seed in range(SEEDS):
        setting = Setting(seed, **MODES[mode])
        passes = setting.decode()
        assert setting.found() == setting.expected()
        assert setting.target.slots == [] and setting.engine.rows == []
        assert sorted(setting.drafter.ended) == sorted(setting.control.ended) == list(range(len(setting.rows)))
        emitted: dict[int, list[int]] = {row.index: [] for row in setting.rows}
        for done in passes:
            for emission in done.emitted:
                emitted[emission.row] += emission.tokens
                assert 0 <= emission.drafted <= min(emission.offered, len(emission.tokens))
                most = max(most, emission.drafted)
        assert emitted == {row.index: row.tokens[row.prompt : row.end] for row in setting.rows}
    assert (most > 0) == (mode != "no drafts")


def test_passes_record_emitted_tokens() -> None:
    for seed in range(SEEDS):
        for mode in ("independent rows", "lockstep", "lockstep without padding"):
            setting = Setting(seed, **MODES[mode])
            passes = setting.decode()
            ends = {row.index: row.step if row.end is None else row.end - row.prompt for row in setting.rows}
            steps = Counter[int]()
            for done, (rows, trees, accepted) in zip(passes, setting.drafter.seen, strict=True):
                assert done.width == max(map(len, trees))
                expected = []
                for row, tree, one in zip(rows, trees, accepted, strict=True):
                    text = [*(tree.tokens[i] for i in one.path[1:]), one.token]
                    text = text[: max(ends[row] - steps[row], 0)]
                    steps[row] += len(one.path)
                    if text:
                        verified = len(tree) - 1 - len(tree.probes)
                        expected.append((row, tuple(text), min(len(one.path) - 1, len(text)), verified))
                assert [(e.row, e.tokens, e.drafted, e.offered) for e in done.emitted] == expected


def test_drafts_are_cut_to_the_tokens_that_can_be_emitted() -> None:
    cut = 0
    for seed in range(SEEDS):
        for mode in ("independent rows", "lockstep without padding", "drawn drafts"):
            setting = Setting(seed, **MODES[mode])
            given: list[tuple[Row, DraftTree, int]] = []
            propose = setting.drafter.propose

            def noted(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
                trees = propose(rows, budget)
                given.extend((row, tree, row.step) for row, tree in zip(rows, trees, strict=True))
                return trees

            setting.drafter.propose = noted  # type: ignore[method-assign]
            setting.decode()
            fitted = [tree for trees in setting.control.before for tree in trees]
            for (_, tree, step), kept in zip(given, fitted, strict=True):
                within = [i for i in range(min(7, len(tree))) if len(tree.path(i)) - 1 <= ROOM - step - 1]
                assert kept.tokens == tuple(tree.tokens[i] for i in within)
                cut += len(within) < min(7, len(tree))
            passes = setting.drafter.seen[1:]
            assert len(passes) == len(setting.control.pruned)
            for before, kept_trees, (_, trees, _) in zip(
                setting.control.before, setting.control.pruned, passes, strict=True
            ):
                for full, kept, tree in zip(before, kept_trees, trees, strict=True):
                    assert tree is (full if mode == "drawn drafts" else kept)
    assert cut > 5


def test_drafters_receive_the_budgets_of_the_control() -> None:
    setting = Setting(3)
    setting.decode()
    shown = setting.drafter.seen
    assert setting.drafter.budgets == [[10 + i for i in rows] for rows, _, _ in shown[1:]]


def test_ended_rows_in_lockstep_draft_padding_to_the_deepest_tree() -> None:
    waited = 0
    for seed, pads in itertools.product(range(SEEDS), (True, False)):
        setting = Setting(seed, lockstep=True, pads=pads)
        setting.decode()
        steps = [row.prompt for row in setting.rows]
        for pass_, (rows, trees, accepted) in enumerate(setting.drafter.seen):
            depth = max(max(tree.shape.depth) for tree in trees)
            for i, tree, one in zip(rows, trees, accepted, strict=True):
                if (end := setting.rows[i].end) is not None and steps[i] >= end and pads:
                    waited += depth > 0
                    assert tree.tokens[1:] == (PAD,) * depth and tree.parent == tuple(range(-1, depth))
                elif pass_:
                    assert tree is setting.control.pruned[pass_ - 1][i]
                steps[i] += len(one.path)
    assert waited > SEEDS


def test_parts_are_initialised_before_the_first_pass() -> None:
    rule = Likeliest()
    rule.needs = Taps((2,))
    for lockstep in (False, True):
        setting = Setting(1, lockstep=lockstep, rule=rule)
        setting.decode()
        assert setting.target.taps.hidden == (1, 2)
        assert all(row.request is None for row in setting.rows), "no reference cycle"
        assert setting.control.opened == [(setting.target, setting.drafter, 3, lockstep, ROOM)]
        assert [row.index for row in setting.drafter.under_way] == [0, 1, 2]
        assert [row.index for row in setting.control.started] == [0, 1, 2]
        assert len(setting.control.learnt) == len(setting.drafter.seen) - 1  # prefills are not observed by the control


def test_order_and_timing_of_the_calls_in_a_pass() -> None:
    setting = Setting(1, rows=1)
    passes = setting.engine.run(setting.request)
    next(passes)
    assert setting.events == ["open", "start", "admit", "wait", "commit", "observe"]
    next(passes)
    assert setting.events[6:] == ["propose", "prune", "score", "wait", "commit", "observe", "learn"]
    list(passes)
    assert setting.events[-3:] == ["drafter ends", "control ends", "release"]
    of = setting.parts
    assert of["open"] == "measure" and of["prune"] == of["learn"] == "control"
    assert of["admit"] == "prefill" and of["propose"] == "draft"
    assert of["start"] == of["observe"] == "observe" and of["score"] == of["wait"] == "target"
    assert set(setting.watch.seconds) == {
        "all",
        "measure",
        "control",
        "prefill",
        "draft",
        "draft_prefill",
        "observe",
        "target",
        "verify",
        "commit",
    }
    assert setting.control.times is setting.watch.times
    assert setting.control.drafting == {id(setting.drafter): setting.watch.times.draft}
    setting = Setting(1, rows=1, begins_with_drafts=True)
    next(setting.engine.run(setting.request))
    assert setting.events[:6] == ["open", "start", "admit", "propose", "prune", "score"]
    decided = Setting(1, rule=Greedy())
    decided.decode()
    assert "wait" not in decided.events, "reading the logits has waited already"


class Slow(Likeliest):
    """Notes each choice, which then takes time by the clock of `Ticking`."""

    note: Callable[[str], None]

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        self.note("choose")
        return super().choose(scores, candidates, rows, chance)


class Ticking(Setting):
    """A setting whose clock only its events move: by the power of two of their place in EVENTS."""

    EVENTS = (
        "open", "start", "admit", "wait", "commit", "observe", "propose", "prune", "score", "learn", "choose",
        "drafter ends", "control ends", "release",
    )  # fmt: skip
    now = 0.0

    def note(self, event: str) -> None:
        super().note(event)
        self.now += 2 ** self.EVENTS.index(event)

    def spent(self, *events: str) -> float:
        return sum(2.0 ** self.EVENTS.index(event) for event in self.events if event in events)


def test_parts_of_steps_add_up_to_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Ticking(1, rule=(rule := Slow()))
    rule.note = setting.note
    monkeypatch.setattr(time, "perf_counter", lambda: setting.now)
    setting.engine.step = setting.watch.timed_steps(setting.engine.step)  # type: ignore[method-assign]
    setting.decode()
    of = setting.watch.times
    assert of.measure == setting.spent("open") and of.prefill == setting.spent("admit")
    assert of.target == setting.spent("score", "wait"), "the wait within the verification is the target's"
    assert of.verify == setting.spent("choose") and of.commit == setting.spent("commit")
    assert of.draft == setting.spent("propose") and of.observe == setting.spent("start", "observe")
    assert of.control == setting.spent("prune", "learn")
    assert of.all == setting.now
    parts = shares({**setting.watch.seconds, "call": 2 * setting.now})
    assert sum(parts.values()) == pytest.approx(1) and parts["outside"] == 0.5
    assert parts["loop"] == setting.spent("drafter ends", "control ends", "release") / (2 * setting.now)
    assert {*PARTS, "loop", "outside"} == {*parts}


def test_percentages_add_up_to_a_hundred() -> None:
    assert percentages({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 34, "b": 33, "c": 33}
    assert percentages({"a": 0.996, "b": 0.004}) == {"a": 100, "b": 0}
    rng = random.Random(0)
    for _ in range(200):
        parts = {str(i): rng.random() ** 4 for i in range(rng.randint(1, 9))}
        whole = sum(parts.values())
        found = percentages({part: share / whole for part, share in parts.items()})
        assert sum(found.values()) == 100
        assert all(abs(found[part] - 100 * share / whole) < 1 for part, share in parts.items())


def test_noise_is_notified_of_the_steps_of_rows() -> None:
    for seed in range(SEEDS):
        setting = Setting(seed)
        steps, passed = [0] * 3, []
        most = []
        setting.decode()
        left = {0, 1, 2}
        for rows, _, accepted in setting.drafter.seen:
            for i, one in zip(rows, accepted, strict=True):
                steps[i] += len(one.path)
            most.append(max(steps[i] for i in rows))
            left -= {i for i, one in zip(rows, accepted, strict=True) if one.ended}
            if left:
                passed.append(min(steps[i] for i in left))
        assert setting.chance.reached_steps == most and setting.chance.passed_steps == passed


class Probing(Likeliest, ProbingRule):
    """Adds a probe below every root, and records every pass."""

    def extra_probes(self, width: int) -> int:
        return 1

    def add_probes(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return [
            DraftTree((*tree.tokens, 3), (*tree.parent, 0), probes=frozenset({*tree.probes, len(tree)}))
            for tree in trees
        ]

    def verify(self, pass_: Verification) -> list[Accepted]:
        self.seen = [*getattr(self, "seen", ()), pass_]
        return super().verify(pass_)


def test_rule_adds_probes_and_verifies_every_pass() -> None:
    rule = Probing()
    setting = Setting(5, rule=rule)
    setting.decode()
    assert setting.found() == setting.expected()
    request = setting.request
    for (rows, trees, accepted), pass_ in zip(setting.drafter.seen, rule.seen, strict=True):
        assert rows == [row.index for row in pass_.rows] and trees == pass_.trees and len(accepted) == len(rows)
        assert pass_.scores.logits.shape[1] == max(map(len, trees)) and pass_.tokens is None
        assert (pass_.laws, pass_.stops, pass_.chance) == (request.laws, request.stops, request.chance)
    for _, trees, _ in setting.drafter.seen[1:]:
        assert all(len(tree) - 1 in tree.probes for tree in trees)


class DecidesAllNodes(Likeliest, ArgmaxRule):
    """Decides all nodes at once, and records the arguments."""

    def decide_all_nodes(self, scores: Scores, rows: Any, trees: Any, laws: Any, chance: Any) -> list[list[int]]:
        self.given = ([row.index for row in rows], len(trees), laws, chance)
        return scores.logits.argmax(-1).tolist()

    def keys(self, scores: Tensor, chance: Any) -> Tensor:
        return scores


def test_rule_that_decides_all_nodes_is_not_called_per_node() -> None:
    rule = DecidesAllNodes()
    setting = Setting(4, rule=rule, rows=1)
    setting.decode()
    assert setting.found() == setting.expected() and rule.calls == []
    assert rule.given == ([0], 1, setting.request.laws, setting.chance)


def test_draft_without_the_pending_token_as_root_raises() -> None:
    setting = Setting(1, rows=1)
    setting.drafter.propose = lambda rows, budget: [DraftTree.chain(7)]  # type: ignore[method-assign]
    passes = setting.engine.run(setting.request)
    next(passes)
    pending = setting.rows[0].tokens[-1]
    with pytest.raises(ValueError, match=f"^a draft must begin with the pending token {pending}, got 7$"):
        next(passes)
    assert setting.drafter.ended == setting.control.ended == [0], "rows are ended although the step raised"


def test_rows_of_embedding_prompts_begin_without_tokens() -> None:
    setting = Setting(1, rows=2)
    for row in setting.rows:
        row.tokens, row.prompt = [], 0
    setting.target._begin = lambda prompts: setting.target.slots.extend([] for _ in prompts)  # type: ignore[method-assign]
    setting.request.prompts = [Prompt(embeds=torch.zeros(2, 3))] * 2
    passes = setting.engine.run(setting.request)
    first = next(passes)
    assert first.width == 1 and [e.tokens for e in first.emitted] == [(next_token([0]),)] * 2
    assert [tree.tokens for tree in setting.drafter.seen[0][1]] == [(0,), (0,)]


def test_remaining_rows_are_ended_once() -> None:
    for passes in (0, 1, 3):
        setting = Setting(0)
        running = setting.engine.run(setting.request)
        for _ in range(passes):
            next(running)
        running.close()
        if passes:
            assert sorted(setting.drafter.ended) == sorted(setting.control.ended) == [0, 1, 2]
        setting.engine.close()
        assert setting.engine.rows == [] and len(setting.drafter.ended) == (3 if passes else 0)


def test_interrupted_close_is_completed_by_another() -> None:
    setting = Setting(0)
    running = setting.engine.run(setting.request)
    next(running)
    end, failing = setting.control.end, [True]

    def cut_short(row: Row) -> None:
        if row.index == 1 and failing:
            failing.pop()
            raise KeyboardInterrupt
        end(row)

    setting.control.end = cut_short  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        running.close()
    assert 1 in [row.index for row in setting.engine.rows]
    setting.engine.close()
    assert setting.engine.rows == [] and sorted(setting.control.ended) == [0, 1, 2]


def test_row_list_of_the_request_is_not_modified() -> None:
    setting = Setting(2)
    given = list(setting.rows)
    setting.decode()
    assert setting.rows == given, "the engine removes rows from a list of its own"


@pytest.mark.parametrize("part", ["drafter", "control"])
def test_missing_draft_of_a_row_raises(part: str) -> None:
    setting = Setting(1)
    if part == "drafter":
        propose = setting.drafter.propose
        setting.drafter.propose = lambda rows, budget: propose(rows, budget)[1:]  # type: ignore[method-assign]
    else:
        setting.control.prune = lambda rows, trees: list(trees)[1:]  # type: ignore[method-assign]
        setting.engine = Engine(setting.target, setting.control)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zip"):
        setting.decode()


class RecordingRule(Likeliest):
    """A rule that records the rows and trees of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[list[Row], list[DraftTree]]] = []

    def verify(self, pass_: Verification) -> list[Accepted]:
        assert len(pass_.rows) == len(pass_.trees) == len(pass_.scores.logits)
        self.recorded.append((list(pass_.rows), list(pass_.trees)))
        return super().verify(pass_)


def overlapping(seed: int) -> tuple[Engine, list[Setting], list[int]]:
    """Three requests with three drafters, admitted one after another; the numbers of running rows after each step."""
    rng = random.Random(seed)
    second = Setting(seed + 50, rows=2, rule=Greedy(), pads=False)
    settings = [Setting(seed, rule=RecordingRule()), second, Setting(seed + 90, rows=1)]
    engine, ran = settings[0].engine, []
    for setting in settings:
        engine.admit(setting.request)
        for _ in range(rng.randint(1, 2)):
            engine.step()
            ran.append(len(engine.rows))
    return engine, settings, ran


def test_concurrent_requests_have_the_text_of_plain_decoding() -> None:
    most = 0
    for seed in range(SEEDS):
        engine, settings, ran = overlapping(seed)
        while engine.running:
            advanced = engine.step()
            assert advanced and all(request.passes for request in advanced)
        most = max(most, *ran)
        for setting in settings:
            assert setting.found() == setting.expected()
            assert sorted(setting.drafter.ended) == list(range(len(setting.rows)))
            emitted = [e for done in setting.request.passes for e in done.emitted]
            assert sum(len(e.tokens) for e in emitted) == sum(
                (row.end or len(row.tokens)) - row.prompt for row in setting.rows
            )
        assert settings[0].target.slots == [] and engine.rows == []
        rule: Any = settings[0].rule
        for (rows, trees), (mine, same, _) in zip(rule.recorded, settings[0].drafter.seen, strict=True):
            assert [row.index for row in rows] == mine and all(a is b for a, b in zip(trees, same, strict=True))
    assert most == 6


def test_one_control_budgets_the_rows_of_all_drafters() -> None:
    mixed = 0
    for seed in range(SEEDS):
        engine, settings, _ = overlapping(seed)
        control: Any = settings[0].control
        while engine.running:
            running = list(engine.rows)
            done, prompts = len(control.budgeted), bool(engine._waiting)
            engine.step()
            assert prompts or control.budgeted[done:] == [running], "all rows in the order of their slots, in one call"
        assert [(drafter, room) for _, drafter, *_, room in control.opened] == [(s.drafter, ROOM) for s in settings]
        assert control.started == [row for setting in settings for row in setting.rows]
        assert sorted(control.ended) == sorted(i for setting in settings for i in setting.drafter.ended)
        for budgeted, before, pruned, (rows, _, accepted) in zip(
            control.budgeted, control.before, control.pruned, control.learnt, strict=True
        ):
            assert budgeted == rows and len(before) == len(pruned) == len(rows) == len(accepted)
            mixed += len({id(setting) for setting in settings for row in setting.rows if row in rows}) > 1
        assert set(settings[0].watch.drafting) <= {id(setting.drafter) for setting in settings}
        assert sum(settings[0].watch.drafting.values()) == pytest.approx(settings[0].watch.times.draft)
        assert not any(setting.control.budgeted for setting in settings[1:])
    assert mixed > SEEDS


def test_cancelled_request_keeps_its_tokens_and_others_continue() -> None:
    for seed in range(SEEDS):
        engine, settings, _ = overlapping(seed)
        waiting = Setting(seed + 130, rows=1)
        engine.admit(waiting.request)
        left = settings[1]
        here = [row for row in engine.rows if row.request is left.request]
        texts = [list(row.tokens) for row in left.rows]
        engine.cancel(left.request)
        engine.cancel(waiting.request)
        assert all(row.request is not left.request for row in engine.rows)
        assert len(engine.rows) == len(settings[0].target.slots)
        assert {row.index for row in here} <= set(left.drafter.ended) and sorted(left.drafter.ended) == [0, 1]
        while engine.running:
            engine.step()
        assert [row.tokens for row in left.rows] == texts and waiting.request.passes == []
        for setting in (settings[0], settings[2]):
            assert setting.found() == setting.expected()


def test_taps_are_the_union_of_drafters_and_rules() -> None:
    first, second = Setting(0), Setting(1)
    first.rule.needs, second.rule.needs = Taps((2,)), Taps((4, 1))
    engine = first.engine
    engine.admit(first.request)
    engine.step()
    assert first.target.taps.hidden == (1, 2)
    engine.admit(second.request)
    engine.step()
    assert first.target.taps.hidden == (1, 2, 4)
    engine.close()
    assert engine.rows == [] and not engine.running


@pytest.mark.parametrize("hook", ["open", "start", "propose", "observe", "end"])
def test_failing_drafter_ends_only_its_request(hook: str) -> None:
    """Its drafter raises at any call: its rows leave with the tokens so far, and the others are not affected."""
    for seed, calls in itertools.product(range(4), range(5)):
        settings = [Setting(seed + 40 * i, rows=1 + i) for i in range(3)]
        engine, broken = settings[0].engine, settings[1]
        inner, made = getattr(broken.drafter, hook), []

        def fail(*given: Any, inner: Any = inner, made: Any = made, calls: int = calls) -> Any:
            made.append(None)
            if len(made) == calls + 1:
                raise RuntimeError
            return inner(*given)

        setattr(broken.drafter, hook, fail)
        advanced = []
        for setting in settings:
            engine.admit(setting.request)
            advanced += engine.step()
        while engine.running:
            advanced += engine.step()
        assert isinstance(broken.request.error, RuntimeError) == (len(made) > calls)
        assert broken.request in advanced
        for row, (text, _) in zip(broken.rows, broken.expected(), strict=True):
            assert row.tokens == text[: len(row.tokens)] and (row.tokens == text or broken.request.error)
        for setting in (settings[0], settings[2]):
            assert setting.found() == setting.expected() and setting.request.error is None
        assert settings[0].target.slots == engine.rows == []


def test_run_raises_the_error_of_its_request() -> None:
    setting = Setting(1, rows=2)
    setting.drafter.observe = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        setting.decode()
    assert setting.engine.rows == setting.target.slots == [] and setting.request.error is None
