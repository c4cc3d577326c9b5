"""Replay of recorded outputs: emits them, in as many passes as a plain simulation."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from conftest import SHARED
from drafters_for_tests import Noise, Oracle
from truedraft import Card, Drafter, DraftTree, Refused, loading, registry
from truedraft.bench.recordings import Recording, Recordings, conversations, tokenized
from truedraft.bench.replay import ReplayTarget, replay, replayed
from truedraft.cli import main
from truedraft.drafters._views import ViewTree
from truedraft.stopwatch import Stopwatch
from truedraft.tree import Prompt, Row, Taps

VOCABULARY = 9
ANSWERS = SHARED / "data" / "llm_outputs_mtbench" / "model_answer"


def recorded(seed: int, count: int = 12) -> Recordings:
    """Random texts of few tokens, with repetitions."""
    rng = random.Random(seed)
    outputs = []
    for number in range(count):
        text = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 30))]
        while len(text) < 90:
            at = rng.randrange(len(text))
            text += text[at : at + rng.randint(1, 12)] if rng.random() < 0.5 else [rng.randrange(1, VOCABULARY)]
        prompt = rng.randint(0, 40)
        outputs.append(Recording("odd" if number % 2 else "even", tuple(text[:prompt]), tuple(text[prompt:])))
    return Recordings("babble", tuple(outputs), tuple(range(-1, VOCABULARY - 1)))


def simulated(recording: Recording, n: int, length: int) -> int:
    """Passes of prompt lookup, by scanning."""
    reached, passes = 1, 1
    while reached < len(recording.output):
        seen = [*recording.prompt, *recording.output[:reached]]
        draft = next(
            (
                seen[at + k : at + k + length]
                for k in range(min(n, len(seen)), 0, -1)
                for at in range(len(seen) - k)
                if seen[at : at + k] == seen[-k:]
            ),
            [],
        )
        right = 0
        while right < len(draft) and recording.output[reached + right : reached + right + 1] == (draft[right],):
            right += 1
        reached, passes = reached + right + 1, passes + 1
    return passes


def emitted(recording: Recording, target: ReplayTarget, drafter: Drafter) -> list[tuple[int, ...]]:
    control = registry.load("control", "fixed")
    passes = replayed(recording, target, drafter, control, Stopwatch())
    return [e.tokens for p in passes for e in p.emitted]


@pytest.mark.parametrize(("n", "length", "budget"), [(3, 10, 0), (1, 4, 0), (2, 10, 3)])
def test_passes_equal_a_plain_simulation(n: int, length: int, budget: int) -> None:
    recordings = recorded(n)
    figures = replay(recordings, f"prompt-lookup:n={n},length={length}", budget)
    assert [f.kind for f in figures] == ["even", "odd"]
    for f in figures:
        rows = [r for r in recordings.outputs if r.kind == f.kind]
        assert f.passes == sum(simulated(r, n, budget or length) for r in rows)
        assert (f.outputs, f.tokens) == (len(rows), sum(len(r.output) for r in rows))
        assert f.mean_acceptance_length == f.tokens / f.passes > 1
        assert f.accepted_share is not None and 0 < f.accepted_share < 1 and f.drafting_microseconds > 0
        assert f.drafted_per_pass * f.accepted_share <= f.mean_acceptance_length


@pytest.mark.parametrize("draft", ["prompt-lookup", "llma", "noise", "oracle"])
def test_emitted_tokens_are_the_recording(draft: str) -> None:
    recordings = recorded(7)
    target = ReplayTarget(len(recordings.ids))
    for recording in recordings.outputs:
        whole = [*recording.prompt, *recording.output]
        ours = {"noise": Noise(vocabulary=VOCABULARY), "oracle": Oracle(vocabulary=VOCABULARY, answers={0: whole})}
        drafter = ours.get(draft) or registry.load("drafters", draft)
        reached = emitted(recording, target, drafter)
        assert sum(reached, ()) == recording.output
        assert draft != "oracle" or len(reached) < 0.6 * len(recording.output)


def test_a_node_predicts_the_next_recorded_token_where_its_path_agrees() -> None:
    rng = random.Random(0)
    output = [rng.randrange(1, 4) for _ in range(60)]
    target = ReplayTarget(5)
    target.play(output)
    assert target.admit([Prompt(ids=None, embeds=[0])]).logits.argmax(-1).tolist() == [[output[0]]]
    target.commit([(0,)])
    reached = 1
    while reached < len(output):
        size = rng.randint(1, 40)
        parent = (-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, size)))
        tree = DraftTree((output[reached - 1], *(rng.randrange(1, 4) for _ in range(size - 1))), parent)
        expected = []
        for node in range(size):
            path = [tree.tokens[i] for i in tree.path(node)][1:]
            agrees = path == output[reached : reached + len(path)] and reached + len(path) < len(output)
            expected.append(output[reached + len(path)] if agrees else 0)
        logits = target.score([tree]).logits
        assert logits.shape == (1, size, 5) and logits.argmax(-1).tolist() == [expected]
        assert int((logits == 0).sum()) == sum(token > 0 for token in expected)
        path = (0, *(i for i in tree.shape.children[0][:1] if tree.tokens[i] == output[reached]))
        target.commit([path])
        reached += len(path)


@dataclass
class FollowersDrafter(Drafter):
    """Drafts the tokens that followed the last one in rows that ended."""

    card = Card(paper="none", idea="For tests.", family="test")
    takes_references = True
    followed: dict[int, list[int]] = field(default_factory=dict)
    given: list[Any] = field(default_factory=list)

    @property
    def width(self) -> int:
        return 4

    def start(self, rows: Sequence[Row]) -> None:
        self.given.append((tuple(rows[0].tokens), rows[0].references))

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain(row.tokens[-1], self.followed.get(row.tokens[-1], [])) for row in rows]

    def end(self, row: Row) -> None:
        for at, token in enumerate(row.tokens):
            self.followed[token] = row.tokens[at + 1 : at + 5]


def test_a_drafter_keeps_its_state_and_a_name_makes_a_new_one() -> None:
    text = tuple(range(1, 31))
    twice = Recordings("t", tuple(Recording(kind, (), text) for kind in ("first", "again")), tuple(range(-1, 30)))
    first, again = replay(twice, FollowersDrafter())
    assert (first.passes, again.passes) == (30, 7) and first.way == "FollowersDrafter"
    assert first.accepted_share is None and first.drafted_per_pass == 0
    assert [f.passes for f in replay(twice, "prompt-lookup")] == [f.passes for f in replay(twice, "prompt-lookup")]


def test_prompts_and_references_are_the_conversation_so_far(tmp_path: Path) -> None:
    reached = [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "bye"),
        ("assistant", "so long"),
    ]
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in reached]}))
    tokenizer = loading.load_tokenizer("nano")
    recordings = tokenized("talk", conversations(talk), tokenizer)
    memory = FollowersDrafter()
    (figures,) = replay(recordings, memory)
    assert (figures.kind, figures.outputs) == ("reply", 2)

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([recordings.ids[i] for i in ids]))

    assert [(text(prompt), [text(r) for r in documents]) for prompt, documents in memory.given] == [
        ("system: be brief\nuser: hi\nassistant: ", ["be brief", "hi"]),
        ("system: be brief\nuser: hi\nassistant: hello\nuser: bye\nassistant: ", ["be brief", "hi", "hello", "bye"]),
    ]
    assert [text(r.output) for r in recordings.outputs] == ["hello", "so long"]
    assert recordings.ids[0] == -1 and len(set(recordings.ids)) == len(recordings.ids)


def mt_bench(folder: Path, name: str = "model-redundant.jsonl", turns: int = 2) -> Path:
    """Answers to two questions, one of them answered twice, and other files of questions."""
    for kind in ("", "_redundant"):
        rows = [{"question_id": i, "turns": [f"q{i}{kind}", f"more{kind}"][:turns]} for i in (81, 82)]
        (folder / f"question{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "answers").mkdir()
    rows = [
        {"question_id": i, "choices": [{"turns": [f"a {i} {t}", "b"]}]} for i, t in ((81, "old"), (82, ""), (81, ""))
    ]
    (folder / "answers" / name).write_text("\n".join(map(json.dumps, rows)))
    return folder / "answers" / name


def test_answers_are_joined_with_questions_and_the_last_answer_counts(tmp_path: Path) -> None:
    answers = mt_bench(tmp_path)
    talks = conversations(answers)
    assert [[part.text for part in talk if part.kind] for talk in talks] == [["a 81 ", "b"], ["a 82 ", "b"]]
    assert (
        "".join(part.text for part in talks[0])
        == "user: q81_redundant\nassistant: a 81 \nuser: more_redundant\nassistant: b\n"
    )
    assert [part.kind for part in talks[0] if part.kind] == ["first turn", "second turn"]
    plain = answers.rename(answers.with_name("model.jsonl"))
    assert conversations(plain)[0][1].text == "q81"
    assert conversations(plain, tmp_path / "question_redundant.jsonl") == talks


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a", "output": "b"}\n{"prompt"', "line 2: not JSON"),
        ("[]", "line 1: give an object"),
        ('{"prompt": "a"}', "line 1: give a prompt and an output"),
        ('{"prompt": "a", "output": ""}', "no recorded outputs in it"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no recorded outputs in it"),
        ('{"messages": [{"role": "assistant", "content": ["a"]}]}', "line 1, message 1: give an object with a role"),
        ('{"question_id": 81, "choices": []}', "choices[0].turns, the answers, are missing"),
        ('{"question_id": 81, "choices": [{"turns": "a"}]}', "must be a list of texts"),
        ('{"question_id": 83, "choices": [{"turns": ["a"]}]}', "line 1: question 83 with 1 turns is not in"),
    ],
)
def test_a_damaged_recording_is_refused_by_line(tmp_path: Path, content: str, words: str) -> None:
    path = mt_bench(tmp_path)
    path.write_text(content)
    with pytest.raises(Refused) as refused:
        conversations(path)
    assert words in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_answers_without_their_questions_are_refused(tmp_path: Path) -> None:
    answers = mt_bench(tmp_path, turns=1)
    with pytest.raises(Refused, match=r"line 1: question 81 with 2 turns is not in .*give --questions FILE"):
        conversations(answers)
    (tmp_path / "question_redundant.jsonl").rename(tmp_path / "others.jsonl")
    with pytest.raises(Refused, match=r"line 1: no file of questions .*give --questions FILE"):
        conversations(answers)
    with pytest.raises(Refused, match="cannot be read"):
        conversations(answers, tmp_path / "nowhere.jsonl")
    (tmp_path / "others.jsonl").write_text("{}")
    with pytest.raises(Refused, match="line 1: give an object with question_id and turns"):
        conversations(answers, tmp_path / "others.jsonl")


def test_a_drafter_that_needs_a_model_is_refused() -> None:
    for name in registry.names("drafters"):
        if set(registry.method("drafters", name).card.needs) - {"references"}:
            with pytest.raises(Refused, match=f"{name} cannot be replayed"):
                replay(recorded(0), name)
    tapping = Noise()
    tapping.needs = Taps(hidden=(-1,))
    with pytest.raises(Refused, match="hidden states"):
        replay(recorded(0), tapping)

    class ReadingTheModel(FollowersDrafter):
        def bind(self, target: Any) -> None:
            target.model.lm_head(None)

    with pytest.raises(Refused, match="no 'model'"):
        replay(recorded(0), ReadingTheModel())


def test_every_drafter_that_needs_no_model_can_be_replayed() -> None:
    recordings = recorded(3)
    for name in registry.names("drafters"):
        method = registry.method("drafters", name)
        needs = set(method.card.needs) - {"references"}
        if not needs and not issubclass(method, ViewTree) and registry.load("drafters", name).needs == Taps():
            assert sum(f.tokens for f in replay(recordings, name)) == sum(len(r.output) for r in recordings.outputs)


def test_the_command_loads_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load", load)
    answers = mt_bench(tmp_path)
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "one day", "output": "a cat, a cat, a cat"}\n{"prompt": "x", "output": "y"}')
    files = ["--replay", str(answers), "--replay", str(plain), "--draft", "prompt-lookup", "--draft", "llma"]
    assert main(["bench", *files, "--tokenizer", "nano", "--limit", "1", "--budget", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(f["file"], f["kind"], f["way"]) for f in found["replay"]] == [
        (file, kind, way)
        for file, kinds in (("model-redundant", ("first turn", "second turn")), ("plain", ("output",)))
        for way in ("prompt-lookup", "llma")
        for kind in kinds
    ]
    assert (
        found["tokenizer"] == "nano" and "rejected" in found["note"] and all(f["outputs"] == 1 for f in found["replay"])
    )
    assert main(["bench", "nano", "--replay", str(plain)]) == 0
    reached = capsys.readouterr().out
    assert "Replay" in reached and "prompt-lookup-long" in reached and "auto" in reached


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replay", "FILE"], "give --tokenizer NAME, or MODEL"),
        (["nano", "--replay", "FILE", "--tokenizer", "nano"], "needs one tokenizer"),
        (["nano", "--replay", "FILE", "--batch", "1"], "--batch has no meaning together with --replay"),
        (["nano", "--replay", "FILE", "--roofline"], "--roofline has no meaning together with --replay"),
        (["nano", "--budget", "3"], "--budget has no meaning without --replay"),
        (["nano", "--replay", "FILE", "--budget", "0"], "--budget 0 must be at least 1"),
        (["nano", "--limit", "0"], "--limit 0 must be at least 1"),
        (["nano", "--replay", "FILE", "--draft", "draft-model"], "draft-model cannot be replayed"),
        (["nano", "--replay", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["--tokenizer", "/nowhere", "--replay", "FILE"], "--tokenizer '/nowhere' does not exist"),
        (["--tokenizer", "FILE", "--replay", "FILE"], "cannot be loaded"),
        (["--tokenizer", "FOLDER", "--replay", "FILE"], "cannot be loaded"),
    ],
)
def test_an_invalid_option_is_refused_in_one_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "a", "output": "b"}')
    places = {"FILE": str(file), "FOLDER": str(tmp_path)}
    assert main(["bench", *(places.get(option, option) for option in options)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_gpt2_tokenizer_loads_from_its_two_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(["abcab cab abc"], trainer)
    tokenizer.model.save(str(tmp_path))
    loaded = loading.load_tokenizer(str(tmp_path))
    assert loaded.decode(loaded("ab cab")["input_ids"]) == "ab cab"


@pytest.mark.skipif(not ANSWERS.is_dir(), reason="no folder ../shared/data/llm_outputs_mtbench")
def test_recorded_answers_of_a_real_model() -> None:
    talks = conversations(ANSWERS / "llama3-70B-experiments-large-redundant.jsonl")
    assert len(talks) == 80
    recordings = tokenized("llama3", talks[:4], loading.load_tokenizer("nano"))
    figures = replay(recordings, "prompt-lookup")
    assert [f.kind for f in figures] == ["first turn", "second turn"]
    for f in figures:
        rows = [r for r in recordings.outputs if r.kind == f.kind]
        assert f.passes == sum(simulated(r, 3, 10) for r in rows)
    assert figures[1].mean_acceptance_length > figures[0].mean_acceptance_length
