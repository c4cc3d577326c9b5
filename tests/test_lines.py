"""Lines rewritten by an encoder-decoder: all kept, in order, each equal to `model.generate`, white space unchanged."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import truedraft
from models import tiny
from seq2seq_models import POSITIONS, TEXTS, Scripted, model, tokenizer
from truedraft import Refused
from truedraft.cli import _diff
from truedraft.errors import NoRoom, Note
from truedraft.text import sentences
from truedraft.text.lines import Rewriter, RewrittenLine

ALPHABET = [*"abc ABC 12.!?\"'()", " ", "  ", ". ", "? B", "\t", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029",
            "\ufeff", "\xa0", "é", "日本。", "🐈\u200d⬛", "\udcff", "Mr. B"]  # fmt: skip


def texts_of(fast: Any, lines: list[str], **knobs: Any) -> list[str]:
    return [line.text for line in Rewriter(fast, **knobs).run(lines)]


def random_lines(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    lines = ["".join(rng.choices(ALPHABET, k=rng.choice((0, 0, 1, 3, 9, 25)))) for _ in range(count)]
    return [line + rng.choice(("\n", "\n", "\r\n")) for line in lines[:-1]] + [lines[-1]]


@pytest.mark.parametrize("split", [True, False], ids=["sentences", "whole"])
@pytest.mark.parametrize("seed", range(4))
def test_unchanged_pieces_leave_lines_unchanged(seed: int, split: bool) -> None:
    lines = random_lines(300, seed)
    done = list(Rewriter(Scripted(lambda text: text), batch=7, split=split).run(lines))
    assert [line.text for line in done] == lines == [line.source for line in done]
    assert [line.number for line in done] == list(range(1, 301))


@pytest.mark.parametrize("output", ["two\nlines", "a\r\nb\u2028c\x0b", "\n", "", " padded "])
def test_line_structure_is_kept_for_any_output(output: str) -> None:
    lines = random_lines(60, 1)
    for careful, split in itertools.product((True, False), repeat=2):
        found = texts_of(Scripted(lambda _: output), lines, batch=5, careful=careful, split=split)
        assert len(found) == len(lines)
        for before, after in zip(lines, found, strict=True):
            assert after.count("\n") == before.count("\n") and after.endswith("\n") == before.endswith("\n")
            assert [c for c in before if c in "\t\r\x0b\x0c\u2028"] == [c for c in after if c in "\t\r\x0b\x0c\u2028"]


def test_white_space_between_sentences_is_kept() -> None:
    lines = ["\ufeff  one.  Two?\u00a0Three!\tfour \r\n", "\n", " \t \n", "a\u2028b"]
    fast = Scripted(str.upper)
    assert texts_of(fast, lines, split=True) == [
        "\ufeff  ONE.  TWO?\u00a0THREE!\tFOUR \r\n", "\n", " \t \n", "A\u2028B",
    ]  # fmt: skip
    assert texts_of(fast, ["one.  Two?\n"], prefix="fix: ") == ["FIX: ONE.  TWO?\n"]


@pytest.mark.parametrize(("split", "draft", "batch"), [(False, "iad", 4), (True, "auto", 3), (False, None, 16)])
def test_every_line_equals_generate_alone(split: bool, draft: str | None, batch: int) -> None:
    fast = truedraft.accelerate(model(), tokenizer(), draft=draft, control="fixed")
    lines = [
        *TEXTS,
        "",
        "a",
        "the red ball. The dog",
        "they is here",
        *(text[k:].strip() for text in TEXTS for k in (3, 9)),
    ]
    done = Rewriter(fast, batch=batch, split=split, check=True)
    found = [line.text for line in done.run(lines)]
    assert done.tally.differs is None and done.tally.plain_seconds > 0
    assert found == ["".join(map(alone, pieces(line, split))) for line in lines]
    assert len(set(found)) > 5, "the model has one output for all lines"


def pieces(line: str, split: bool) -> list[str]:
    return sentences.split(line) if split else [line]


def alone(piece: str) -> str:
    """The output of model.generate for one source, within the limit of lines."""
    if not piece.strip():
        return piece
    encoded = tokenizer()(piece, return_tensors="pt", return_token_type_ids=False)
    most = min(2 * encoded["input_ids"].shape[1] + 32, POSITIONS - 1)
    output = tokenizer().decode(model().generate(**encoded, max_new_tokens=most)[0], skip_special_tokens=True)
    return "".join(" " if c in "\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029" else c for c in output).strip()


@pytest.mark.parametrize(("batch", "first"), [(2, 5), (None, 1)], ids=["one differs", "all differ"])
def test_first_differing_line_is_recorded(batch: int | None, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = truedraft.accelerate(model(), tokenizer(), draft="iad")
    generate = fast.generate

    def wrong(**given: Any) -> torch.Tensor:
        out = generate(**given)
        if batch in (None, len(out)):  # the shortest lines come first, line 1 and line 5 last
            out[0, 1] += 1
            out[-1, 1] += batch is None
        return out

    monkeypatch.setattr(fast, "generate", wrong)
    done = Rewriter(fast, batch=3, check=True)
    lines = ["One day a cat saw a red ball.", "a", "the dog", "the cat", "She said that the cat"]
    assert len(list(done.run(lines))) == 5
    assert done.tally.differs is not None and done.tally.differs.line == first
    assert done.tally.differs.expected != done.tally.differs.got


def test_lines_that_cannot_be_rewritten_are_kept_and_counted() -> None:
    long = "A cat " * 60
    lines = ["a cat", long, "x\udcff", "a dog", "---", f"One. {long}Two.  {long}"]
    for careful in (True, False):
        done = Rewriter(Scripted(str.upper), careful=careful, split=True)
        assert [line.text for line in done.run(lines)] == [
            "A CAT",
            long,
            "x\udcff",
            "A DOG",
            "---",
            "ONE. " + lines[5][5:],
        ]
        too_long, no_text = (done.tally.notes[f"left as it is: {why}"] for why in (
            "longer than the 80 tokens that the model reads", "not UTF-8",
        ))  # fmt: skip
        assert (too_long.count, too_long.lines) == (3, [2, 6]) and (no_text.count, no_text.lines) == (1, [3])
        assert (done.tally.lines, done.tally.changed, done.tally.pieces) == (6, 3, 3)


def test_output_without_an_end_is_kept_or_cut_and_counted() -> None:
    careful = Rewriter(Scripted(lambda text: text + " and", ends=False), careful=True)
    assert [line.text for line in careful.run(["a cat\n"])] == ["a cat\n"]
    assert careful.tally.notes["left as it is: the output had not ended at the limit of new tokens"].lines == [1]
    cut = Rewriter(Scripted(str.upper), max_new_tokens=3)
    assert [line.text for line in cut.run(["\n", "abcdef\n"])] == ["\n", "ABC\n"]
    assert cut.tally.notes["cut: the output had not ended at the limit of new tokens"].lines == [2]


@pytest.mark.parametrize(("careful", "text"), [(True, "a cat\n"), (False, "\n")])
def test_empty_output_is_counted(careful: bool, text: str) -> None:
    done = Rewriter(Scripted(lambda _: ""), careful=careful)
    assert [line.text for line in done.run(["a cat\n"])] == [text]
    (why,) = done.tally.notes
    assert why == ("left as it is" if careful else "empty") + ": the model generated nothing"


def test_limit_of_a_line_is_independent_of_its_batch() -> None:
    """The limit of a batch is that of its longest source; a short one is cut at its own."""
    fast = Scripted(lambda text: "ab" * 90 if len(text) < 3 else text)
    (short, _) = texts_of(fast, ["a", "abcdefgh" * 9])
    assert short == texts_of(fast, ["a"])[0] != "ab" * 90


class MissingLetter:
    """A tokenizer without the letter x."""

    unk_token_id = tokenizer().convert_tokens_to_ids("x")

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def __call__(self, texts: list[str], **settings: Any) -> Any:
        return tokenizer()(texts, **settings)


def test_lines_with_unknown_characters_are_kept_when_careful() -> None:
    """Their text would be lost in the output."""
    fast = Scripted(str.upper)
    fast.tokenizer = MissingLetter()
    done = Rewriter(fast, careful=True)
    assert [line.text for line in done.run(["a x", "a cat"])] == ["a x", "A CAT"]
    assert done.tally.notes["left as it is: the tokenizer has no tokens for some of its characters"].lines == [1]
    assert texts_of(fast, ["a x"]) == ["A X"]


def test_batches_have_sources_of_similar_lengths() -> None:
    fast = Scripted(lambda text: text)
    rng = random.Random(0)
    lines = ["ab " * rng.randrange(1, 20) for _ in range(400)]
    assert texts_of(fast, lines, batch=8) == lines
    padding = sum(max(batch) * len(batch) - sum(batch) for batch in fast.batches)
    assert padding < 0.15 * sum(map(sum, fast.batches)) and max(map(len, fast.batches)) == 8


def test_lines_are_read_lazily() -> None:
    """An endless file: output begins soon, and the lines read in advance are bounded."""
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for read in itertools.count(1):
            yield f"line {read}\n" if read % 3 else "\n"

    seen: list[int] = []
    done = Rewriter(Scripted(str.upper), batch=4, progress=seen.append).run(endless())
    assert next(done) == RewrittenLine(1, (("line 1", "LINE 1"), ("\n", "\n")))
    assert read <= 16
    for line in itertools.islice(done, 3000):
        assert line.text in (f"LINE {line.number}\n", "\n")
    assert read < 3000 + 4 * 32 * 2 and seen == sorted(seen) and seen[-1] <= read


def test_long_runs_take_linear_time() -> None:
    lines = ["a" + " " * 200_000 + "b", "\t" * 100_000, "a. " * 100_000]
    assert texts_of(Scripted(str.upper), lines, split=True) == lines
    assert _diff.marked([(line, line) for line in lines]) == "".join(lines)


def test_ctrl_c_comes_after_complete_lines() -> None:
    fast = Scripted(str.upper)
    done = Rewriter(fast, batch=1).run(f"line {i}\n" for i in range(10))
    assert [next(done).text, next(done).text] == ["LINE 0\n", "LINE 1\n"]
    fast.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        next(done)


def test_special_tokens_in_lines_are_text() -> None:
    received: list[str] = []
    fast = Scripted(lambda text: received.append(text) or "output")  # type: ignore[func-returns-value]
    texts_of(fast, ["a </s> b <pad> c"])
    texts_of(fast, ["a </s> b"], prefix="x </s> ")
    assert received[0] == "a </s> b <pad> c" and "</s>" not in received[1]


def test_careful_ignores_changes_of_spaces() -> None:
    fast = Scripted(lambda text: " ".join(text.split()))
    assert texts_of(fast, ["one   two  three"], careful=True) == ["one   two  three"]
    assert texts_of(fast, ["one   two  three"]) == ["one two three"]


def test_generation_config_of_the_model_is_overridden() -> None:
    expected = texts_of(truedraft.accelerate(model(), tokenizer(), control="fixed"), TEXTS)
    own = copy.deepcopy(model())
    own.generation_config.update(
        return_dict_in_generate=True, num_return_sequences=2, output_attentions=True, use_cache=False, do_sample=True,
        num_beams=3,
    )  # fmt: skip
    with pytest.warns(Note, match="num_beams=3"):
        done = Rewriter(truedraft.accelerate(own, tokenizer(), control="fixed"), check=True)
    assert [line.text for line in done.run(TEXTS)] == expected and done.tally.differs is None


@pytest.mark.parametrize("careful", [True, False])
def test_batches_are_halved_without_memory(careful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Scripted(str.upper)
    generate = fast.generate

    def short(input_ids: Any, **given: Any) -> torch.Tensor:
        if input_ids.numel() > 20:
            raise NoRoom("more than there is")
        return generate(input_ids, **given)

    monkeypatch.setattr(fast, "generate", short)
    lines = ["the red ball", "a cat", "the dog", "one day", "he go to school", "they was"]
    done = Rewriter(fast, batch=6, careful=careful)
    assert [line.text for line in done.run(lines)] == [line.upper() for line in lines] and len(fast.batches) > 1
    long = "The cat saw a red ball and a dog. " * 3
    if careful:
        assert [line.text for line in done.run([*lines, long])] == [*map(str.upper, lines), long]
        assert list(done.tally.notes) == ["left as it is: too long for the memory that is free"]
    else:
        with pytest.raises(NoRoom):
            list(done.run([*lines, long]))


def test_lines_with_tokens_beyond_the_vocabulary_are_kept() -> None:
    fast = Scripted(str.upper)
    inside, *_, outside = sorted(
        ["one day", "the red ball", "school"], key=lambda text: max(tokenizer()(text)["input_ids"])
    )
    fast.target.vocabulary = max(tokenizer()(inside)["input_ids"]) + 1
    done = Rewriter(fast)
    assert [line.text for line in done.run([inside, outside])] == [inside.upper(), outside]
    assert list(done.tally.notes) == ["left as it is: the model's vocabulary lacks some of its tokens"]


def test_tally_adds_up() -> None:
    fast = truedraft.accelerate(model(), tokenizer(), draft="iad", control="fixed")
    done = Rewriter(fast, batch=2)
    lengths = [len(tokenizer()(line.text)["input_ids"]) for line in done.run(TEXTS)]
    t = done.tally
    assert t.pieces == t.lines == 3 and t.row_passes <= t.tokens and t.passes <= t.row_passes and t.seconds > 0
    assert t.tokens > 0 and all(lengths) and t.report is not None and t.report.drafter == "iad"


def test_invalid_models_and_numbers_are_refused() -> None:
    with pytest.raises(Refused, match="is no encoder-decoder"):
        Rewriter(truedraft.accelerate(tiny("llama", torch.float32), tokenizer(), draft=None))
    with pytest.raises(Refused, match="no tokenizer"):
        Rewriter(truedraft.accelerate(model()))
    for knobs in ({"batch": 0}, {"max_new_tokens": 0}):
        with pytest.raises(Refused, match="at least 1"):
            Rewriter(Scripted(str.upper), **knobs)
    with pytest.raises(Refused, match=f"max_new_tokens={POSITIONS}: .* at most {POSITIONS - 1} "):
        Rewriter(truedraft.accelerate(model(), tokenizer()), max_new_tokens=POSITIONS)


@pytest.mark.parametrize(
    "parts",
    [
        ["I go home.", " ", "Then I sleep.", "  ", 'He said: "Go!"', " ", "Fine?"],
        ["Mr. Smith met Dr. J. R. Brown, e.g. in the U.S. Army.", " ", "He left!", "\u00a0", "Yes."],
        ["It costs 3.5 million.", " ", "No. 5 is alive.", " ", "See fig. 3 and p. 7.", " ", "Well... I think so."],
        ['"I am here. You are there," he said.', " ", '"Stop!" John said.', " ", '"Stop!"', " ", "The man ran."],
        ["1. Introduction.", " ", "The end (this is one. This too.)", " ", "And more…"],
        ["He was born in Jan. 1990.", " ", "What?!", " ", "No. 5?", " ", "Yes."],
        ["today i go. then i sleep"],
        ["do this .", " ", "And that ."],
        ["他走了。", "", "她来了！", "", "好"],
        ["It is over (…) now.", " ", "«Bien.»", " ", "Oui."],
        [""],
    ],
    ids=lambda parts: parts[0][:20],
)
def test_split_at_sentence_ends(parts: list[str]) -> None:
    assert sentences.split("".join(parts)) == parts


def test_split_joins_to_the_text() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices([*ALPHABET, "He said. ", '."', "U.S. "], k=rng.randrange(40)))
        parts = sentences.split(text)
        assert "".join(parts) == text and len(parts) % 2 and all(not gap.strip() for gap in parts[1::2])


def test_split_takes_linear_time() -> None:
    """Runs of marks, spaces and quotes on which a pattern with backtracking takes quadratic time."""
    for text in ("." * 200_000, "!" * 50_000 + " " * 50_000, "! " + "(" * 50_000, '"' * 100_000, "A. " * 20_000):
        assert "".join(sentences.split(text)) == text
