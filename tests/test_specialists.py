"""Specialists: each row has the drafter whose examples are like its text, or each pass the most confident draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import truedraft
from models import V, ragged, sibling, tiny
from nets import SEED, drafter
from truedraft import Card, Drafter, DraftTree, Refused, registry
from truedraft.cli import main
from truedraft.drafters._base import PerRow
from truedraft.drafters.routing._votes import UNSEEN, Votes
from truedraft.drafters.routing.confidence_routing import ConfidenceRouting
from truedraft.drafters.routing.text_routing import TextRouting
from truedraft.errors import NoRoom
from truedraft.loading import load
from truedraft.targets.hosting import hosted
from truedraft.tree import Accepted, Row, Scores, Taps

LOW, HIGH = range(3, 30), range(30, V)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@dataclass(eq=False)
class Recorder(PerRow[None]):
    """Drafts a token repeatedly, and records its calls: the name of each, and the rows given."""

    card = Card(paper="none", idea="For tests.", family="test")
    token: int = 7
    confidence: tuple[float, ...] = (0.5, 0.5)
    calls: list[tuple[str, list[int]]] = field(default_factory=list)
    width = 2

    def noted(self, call: str, rows: Sequence[Row]) -> None:
        self.calls.append((call, [row.index for row in rows]))

    def start(self, rows: Sequence[Row]) -> None:
        self.noted("start", rows)
        super().start(rows)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self.noted("propose", rows)
        return super().propose(rows, budget)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self.noted("observe", rows)
        assert len(scores.context) == len(rows) == len(trees) == len(accepted)
        assert [tree.tokens[0] for tree in trees] == [
            row.tokens[-1 - len(one.path)] for row, one in zip(rows, accepted, strict=True)
        ]
        super().observe(rows, trees, scores, accepted)

    def end(self, row: Row) -> None:
        self.noted("end", [row])
        super().end(row)

    def begin(self, row: Row) -> None: ...

    def draft(self, row: Row, state: None, after: Sequence[int], budget: int) -> DraftTree:
        size = min(budget, len(self.confidence))
        return DraftTree.chain((after or row.tokens)[-1], [self.token] * size, self.confidence[:size])

    def rows_of(self, call: str) -> set[int]:
        return {index for name, rows in self.calls if name == call for index in rows}


def routed(low: Drafter, high: Drafter, otherwise: Any = "none", **knobs: Any) -> TextRouting:
    named = {"low": low, "high": high, "otherwise": otherwise}
    return TextRouting(named, {"low": [LOW], "high": [HIGH]}, **knobs)


def counted(examples: Sequence[Sequence[Sequence[int]]], text: Sequence[int], longest: int) -> list[float]:
    """The votes of a text for each class, counted anew at each token by comparing slices."""

    def occurrences(texts: Sequence[Sequence[int]], ngram: Sequence[int]) -> int:
        n = len(ngram)
        return sum(list(one[i : i + n]) == list(ngram) for one in texts for i in range(len(one) - n + 1))

    votes = [0.0] * len(examples)
    for end in range(1, len(text) + 1):
        for n in range(min(longest, end), 0, -1):
            found = [occurrences(texts, text[end - n : end]) for texts in examples]
            if any(found):
                rates = [(f + UNSEEN) / sum(map(len, texts)) for f, texts in zip(found, examples, strict=True)]
                votes = [vote + rate / sum(rates) for vote, rate in zip(votes, rates, strict=True)]
                break
    return [vote / len(text) for vote in votes]


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_votes_are_those_of_plain_counts(longest: int) -> None:
    rng = random.Random(longest)

    def texts(count: int) -> list[list[int]]:
        return [[rng.randrange(6) for _ in range(rng.randint(1, 9))] for _ in range(count)]

    clear = unclear = 0
    for _ in range(60):
        examples = [texts(rng.randint(1, 4)) for _ in range(rng.randint(1, 4))]
        classifier, text = Votes(examples, longest), [rng.randrange(8) for _ in range(rng.randint(1, 12))]
        expected = counted(examples, text, longest)
        assert classifier.of(text) == pytest.approx(expected) or (not any(expected) and not classifier.of(text))
        best, *others = sorted(expected, reverse=True)
        lead = best - max(others, default=0.0)
        assert classifier.clear(text, lead + 1e-9) is None
        if lead > 1e-9:
            assert expected[classifier.clear(text, lead - 1e-9) or 0] == best
        clear, unclear = clear + (lead > 0.1), unclear + (lead <= 0.1)
    assert clear > 5 and unclear > 5 and Votes([[[1]]], 2).clear([], 0.1) is None


def batch(*rows: Sequence[int]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


PROMPTS = ([5, 6, 7, 8, 9, 4], [40, 41, 42, 43], [1, 2, 1, 2, 0, 1], [11, 12, 13, 14, 15, 50], [50, 51, 52, 53, 54])


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_of_a_batch_are_drafted_for_by_their_own_specialists_together(sampled: bool) -> None:
    low, high, other = Recorder(7), Recorder(40), Recorder(1)
    model, inputs = tiny("llama", torch.float32), batch(*PROMPTS)
    fast = truedraft.accelerate(model, draft=routed(low, high, other, every=0), control="fixed")
    way = {"do_sample": True, "top_k": 0} if sampled else {}
    torch.manual_seed(SEED)
    expected = model.generate(**inputs, **{**GREEDY, **way})
    torch.manual_seed(SEED)
    assert torch.equal(fast.generate(**inputs, **{**GREEDY, **way}), expected)
    for part, own in ((low, {0, 3}), (high, {1, 4}), (other, {2})):
        for call in ("start", "propose", "observe"):
            assert part.rows_of(call) == own
            assert (call, sorted(own)) in part.calls, "rows of one specialist are given to it together"
    report = fast.report()
    assert [list(drafts) for drafts in report.drafted_by] == [["low"], ["high"], ["otherwise"], ["low"], ["high"]]
    proposals = [sum(0 in rows for name, rows in low.calls if name == "propose"), report.drafted_by[0]["low"]]
    assert 0 < proposals[1] <= proposals[0]
    assert "high: " in str(report) and "for rows 1, 4" in str(report) and "for row 2" in str(report)
    assert report.as_dict()["drafted_by"] == [dict(drafts) for drafts in report.drafted_by]


def driven(draft: TextRouting, prompt: Sequence[int], passes: Sequence[Sequence[int]]) -> list[str]:
    """The specialist of a row after each of its passes, which emit these tokens."""
    target = hosted(tiny("llama", torch.float32))
    draft.bind(target)
    draft.read(None)
    row = Row(0, list(prompt), len(prompt), 10**6)
    draft.start([row])
    found = []
    for emitted in passes:
        (tree,) = draft.propose([row], [2])
        row.tokens += emitted
        path = tuple(range(len(emitted)))
        full = DraftTree.chain(tree.tokens[0], emitted[:-1])
        draft.observe(
            [row], [full], Scores(torch.zeros(1, len(full), V), {}, [0]), [Accepted(path, emitted[-1], False)]
        )
        found.append(draft._chosen[id(row)])
    draft.end(row)
    assert not draft._chosen and not draft._due
    return found


def test_a_row_moves_where_its_last_tokens_are_clearly_of_another_specialist() -> None:
    low, high = Recorder(7), Recorder(40)
    mixed, unclear = [5, 40], [1, 2]
    passes = [[5, 6], [7, 40], [41, 42], [43, 44], unclear, unclear, [8, 9], mixed, [9, 8], [8, 7]]
    # evaluated after 4 tokens each: 5 6 7 40 (low), 41 42 43 44 (high), none of them, 8 9 5 40 (low), 9 8 8 7 (low)
    found = driven(routed(low, high, every=4), [5, 6, 7], passes)
    assert found == ["low", "low", "low", "high", "high", "high", "high", "low", "low", "low"]
    stay = ["propose", "observe"]
    assert [name for name, _ in high.calls] == ["start", *stay * 4, "end", "end"]
    assert [name for name, _ in low.calls] == ["start", *stay * 4, "end", "start", *stay * 2, "end"]
    assert set(driven(routed(Recorder(), Recorder(), every=0), [5, 6, 7], [[41, 42]] * 9)) == {"low"}
    for window, name in ((2, "low"), (7, "high")):
        assert driven(routed(Recorder(), Recorder(), window=window), [40, 41, 42, 43, 44, 5, 6], [[1]]) == [name]


def test_a_row_does_not_move_to_a_head_or_where_there_is_no_memory() -> None:
    head, full = Recorder(), Recorder()
    head.needs = Taps((-1,))  # type: ignore[misc]
    assert set(driven(routed(Recorder(), head, every=2), [5, 6, 7], [[41, 42]] * 3)) == {"low"}
    assert not head.rows_of("start") | head.rows_of("propose")

    def refuse(rows: Sequence[Row]) -> None:
        raise NoRoom("there is no room")

    full.start = refuse  # type: ignore[method-assign]
    assert set(driven(routed(Recorder(), full, every=2), [5, 6, 7], [[41, 42]] * 3)) == {"low"}
    assert not full.rows_of("propose")


def test_a_budget_of_a_row_is_that_of_its_specialist() -> None:
    draft = routed(Recorder(7, (0.5,) * 4), Recorder(40, (0.5,) * 4))
    draft.bind(hosted(tiny("llama", torch.float32)))
    draft.read(None)
    rows = [Row(i, prompt, len(prompt), 99) for i, prompt in enumerate(([40, 41], [5, 6], [42, 43]))]
    draft.start(rows)
    trees = draft.propose(rows, [1, 2, 3])
    assert [tree.tokens[1:] for tree in trees] == [(40,), (7, 7), (40, 40, 40)]


def test_confidences_of_an_opt_tree_are_the_draft_models_probabilities() -> None:
    model = tiny("llama", torch.float32)
    small = sibling(model)
    draft: Any = registry.load("drafters", "opt-tree", model=small, gain=1e-9)
    draft._calibration.proposed = lambda row, tree: tree
    trees: list[tuple[list[int], DraftTree]] = []
    propose = draft.propose

    def noted(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        found = propose(rows, budget)
        trees.extend((list(row.tokens), tree) for row, tree in zip(rows, found, strict=True))
        return found  # type: ignore[no-any-return]

    draft.propose = noted
    truedraft.accelerate(model, draft=draft, control="fixed").generate(**ragged(model, 1), **GREEDY)
    compared = 0
    for text, tree in trees[:4]:
        for node in range(1, len(tree)):
            path = [tree.tokens[i] for i in tree.path(node)]
            with torch.no_grad():
                logits = small(torch.tensor([text[:-1] + path[:-1]]), use_cache=False).logits[0, -1]
            assert tree.confidence is not None
            assert tree.confidence[node] == pytest.approx(float(logits.softmax(-1)[path[-1]]), rel=1e-3)
            compared += tree.shape.depth[node] > 1
    assert compared > 20


class Drawn(Recorder):
    """Records what its drafts have to be for the rule of its rows."""

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self.calls += [(self.preferred(row), [row.index]) for row in rows]
        return super().propose(rows, budget)


def test_drafts_of_a_specialist_are_drawn_unless_they_are_merged() -> None:
    for merged, preferred in ((False, "law"), (True, "likeliest")):
        part = Drawn()
        draft: Any = routed(part, Recorder())
        if merged:
            draft = registry.load("drafters", "suffix+token-recycling").__class__([Recorder(), draft])
        fast = truedraft.accelerate(tiny("llama", torch.float32), draft=draft, rule="rejection", control="fixed")
        fast.generate(**batch(PROMPTS[0]), max_new_tokens=4, do_sample=True, pad_token_id=0)
        assert {name for name, _ in part.calls} & {"law", "likeliest"} == {preferred}


def test_a_rule_that_cannot_verify_the_drafts_of_one_specialist_is_refused() -> None:
    model = tiny("llama", torch.float32)
    small = registry.load("drafters", "draft-model", model=sibling(model))
    settings = {**GREEDY, "do_sample": True}
    with pytest.raises(Refused, match=r"rule='k-seq' cannot verify the drafts of test-specialists, which are certain"):
        truedraft.accelerate(model, draft=routed(small, Recorder()), rule="k-seq").generate(
            **ragged(model, 1), **settings
        )
    fast = truedraft.accelerate(model, draft=routed(small, small), rule="k-seq")
    assert fast.generate(**ragged(model, 1), **settings).shape[1] > 12


@pytest.mark.parametrize(
    ("specialists", "examples", "message"),
    [
        (None, None, "text-routing needs specialists: draft='text-routing:file="),
        ({"a": "suffix"}, {}, "'a' has no examples"),
        ({"a": "suffix"}, {"a": []}, "'a' has no examples"),
        ({"a": "suffix"}, {"a": [[]]}, "'a' has no examples"),
        ({"a": "suffix"}, {"a": [[1]], "b": [[2]]}, "examples of 'b', and no such specialist"),
        ({"a": "suffix"}, {"a": ["a text"]}, r"give accelerate\(\) the tokenizer"),
        ({"a": "suffix"}, {"a": [[V]]}, f"outside the model's vocabulary of {V}"),
        ({"a": "suffix"}, {"a": [["x"]]}, "an example of 'a' is"),
        ({"a": 5}, {"a": [[1]]}, "text-routing:specialists has 5"),
        ({"a": "suffiks"}, {"a": [[1]]}, "did you mean 'suffix'"),
        (5, {"a": [[1]]}, "text-routing:specialists=5"),
    ],
)
def test_what_cannot_be_routed_is_refused(specialists: Any, examples: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(
            tiny(), draft=registry.load("drafters", "text-routing", specialists=specialists, examples=examples)
        )


def nano_file(folder: Path) -> Path:
    (folder / "code.txt").write_text("def f(x):\n    return x + 1\n\nimport os\nclass A(B):\n    def __init__(self):\n")
    stories = ["One day, a little girl named Lily went to the park.", "Tom and his mother saw a big tree."]
    file = folder / "subjects.toml"
    file.write_text(
        f'[story]\ndraft = "draft-model:nano-draft"\nexamples = {stories}\n'
        '[code]\ndraft = "token-recycling+suffix"\nexamples = "code.txt"\n[otherwise]\ndraft = "none"\n'
    )
    return file


def test_a_file_names_specialists_and_their_examples(tmp_path: Path) -> None:
    model, tokenizer = load("nano")
    fast = truedraft.accelerate(model, tokenizer, draft=f"text-routing:file={nano_file(tmp_path)}", control="fixed")
    texts = [
        "Once there was a little dog. One day, it went",
        "class Tree:\n    def __init__(self, x):\n        self",
        "%%%%",
    ]
    for text, name in zip(texts, ("story", "code", "otherwise"), strict=True):
        ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False).input_ids
        out = fast.generate(ids, max_new_tokens=16, do_sample=False)
        assert torch.equal(out, model.generate(ids, max_new_tokens=16, do_sample=False))
        assert list(fast.report().drafted_by[0]) == [name]
    assert fast.report().mean_acceptance_length == 1
    with fast.engine(max_rows=3, max_tokens=64) as engine:
        ids = [tokenizer(text).input_ids for text in texts]
        requests = [engine.add_request(torch.tensor(one), max_new_tokens=8, do_sample=False) for one in ids]
        while engine.has_unfinished_requests():
            engine.step()
        assert [list(one.report().drafted_by[0]) for one in requests] == [["story"], ["code"], ["otherwise"]]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[a]\n", r"write a table \[a\] with draft = and examples = alone"),
        ('a = "suffix"\n', r"write a table \[a\]"),
        ('[a]\ndraft = "suffix"\nweights = 5\n', r"write a table \[a\]"),
        ('[a]\ndraft = "suffix"\nexamples = "none.txt"\n', "No such file"),
        ('[a]\ndraft = "suffix"\nexamples = 5\n', "'a' has no examples"),
        ("[a\n", "text-routing:file="),
        ("\ud800", "text-routing:file="),
    ],
)
def test_a_file_of_another_form_is_refused(written: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "parts.toml"
    file.write_bytes(written.encode("utf-8", "surrogatepass"))
    with pytest.raises(Refused, match=message) as refusal:
        truedraft.accelerate(tiny(), draft=f"text-routing:file={file}")
    assert "\n" not in str(refusal.value)
    with pytest.raises(Refused, match="leave one out"):
        TextRouting({"a": "suffix"}, {"a": [[1]]}, file=str(file))


def test_the_command_line_prints_which_specialist_drafted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"input-guided+multilingual-drafters:file={nano_file(tmp_path)}"
    assert (
        main(["generate", "nano", "One day, a little girl", "--draft", spec, "--max-new-tokens", "8", "--report"]) == 0
    )
    printed = capsys.readouterr()
    assert "story:" in printed.out + printed.err


def test_a_server_routes_requests_by_their_text(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    openai = pytest.importorskip("openai")
    from served import running

    spec = f"text-routing:file={nano_file(tmp_path)}"
    model, tokenizer = load("nano")
    plain = truedraft.accelerate(model, tokenizer, draft=None)
    with running(truedraft.accelerate(model, tokenizer, control="fixed"), allow_draft=(spec,)) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        prompt = "One day, a little girl named"
        answer = api.completions.create(
            model="nano", prompt=prompt, max_tokens=12, temperature=0, extra_body={"draft": spec}
        )
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = plain.generate(ids, max_new_tokens=12, do_sample=False)
    assert answer.choices[0].text == tokenizer.decode(out[0, ids.shape[1] :])


def test_the_draft_of_the_highest_mean_path_confidence_is_kept() -> None:
    """Means by hand: 0.5 and 0.25 of a path; 0.6 alone; 0.9, 0.45 and 0.225; nothing."""
    parts = {
        "a": Recorder(5, (0.5, 0.5)),
        "b": Recorder(6, (0.6,)),
        "c": Recorder(7, (0.9, 0.5, 0.5)),
        "d": Recorder(8, ()),
    }
    for part in parts.values():
        part._calibration.proposed = lambda row, tree, after=(): tree  # type: ignore[method-assign,assignment]
    kept = {}
    for budget in (1, 2, 3):
        draft = ConfidenceRouting(parts)
        row = Row(0, [1, 2], 2, 99)
        draft.start([row])
        (tree,) = draft.propose([row], [budget])
        kept[budget] = tree.tokens[1:]
        assert sum(row.drafted_by.values()) == 1 and list(row.drafted_by) == [{7: "c", 6: "b"}[tree.tokens[1]]]
    assert kept == {1: (7,), 2: (7, 7), 3: (6,)}, "0.9; (0.9 + 0.45) / 2; 0.6 over (0.9 + 0.45 + 0.225) / 3"
    same = ConfidenceRouting([Recorder(5), Recorder(6)])
    row = Row(0, [1, 2], 2, 99)
    same.start([row])
    assert same.propose([row], [2])[0].tokens[1] == 5, "the first among equals"
    assert list(row.drafted_by) == ["test-specialists"]


def test_all_specialists_draft_and_observe_every_pass() -> None:
    parts = [Recorder(5), Recorder(6, (0.9, 0.9)), Recorder(7)]
    model, inputs = tiny("llama", torch.float32), ragged(tiny("llama", torch.float32), 2)
    fast = truedraft.accelerate(model, draft=ConfidenceRouting(parts), control="fixed")
    assert torch.equal(fast.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    calls = [[(name, rows) for name, rows in part.calls if name not in ("start", "end")] for part in parts]
    assert calls[0] == calls[1] == calls[2] and {name for name, _ in calls[0]} == {"propose", "observe"}
    with pytest.raises(Refused, match="confidence-routing needs specialists"):
        truedraft.accelerate(model, draft="confidence-routing")
    with pytest.raises(Refused, match="joins two drafters or more, got 1"):
        truedraft.accelerate(model, draft="confidence-routing:specialists=suffix")
    made = registry.load("drafters", "confidence-routing:specialists=suffix;token-recycling")
    assert [type(part).__name__ for part in made.parts] == ["Suffix", "TokenRecycling"]


@pytest.mark.parametrize("name", ["eagle2", "draft-model", "skip-layers", "suffix", "lookahead"])
def test_a_row_that_moves_between_drafters_keeps_its_text(name: str) -> None:
    """Every four tokens a row goes to the other specialist, whatever its text is."""
    model = tiny("llama", torch.float32)
    inputs = ragged(model, 3)
    one = drafter(name, model)
    assert one is not None
    draft = routed(one, Recorder(), every=4)
    names = iter(["low", "high"] * 10**4)
    draft.like = lambda tokens: next(names)  # type: ignore[method-assign]
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    settings = {**GREEDY, "max_new_tokens": 40}
    assert torch.equal(fast.generate(**inputs, **settings), model.generate(**inputs, **settings))
    moved = [set(drafts) for drafts in fast.report().drafted_by]
    assert all(found == {"low", "high"} for found in moved) or one.needs.hidden
