"""Documents, conversations and namespaces: the texts from which drafters may copy, and their separation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

import truedraft
from models import ragged, tiny
from truedraft import Chat, Drafter, Refused, registry
from truedraft.cli._models import load
from truedraft.drafters._base import PassCost
from truedraft.drafters.lookup._texts import row_text
from truedraft.stores._cursor import SEPARATOR
from truedraft.stores.references import PIECE, References, Text
from truedraft.tree import Row

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
COPYING = [n for n in registry.names("drafters") if registry.method("drafters", n).takes_references is True]


def answer() -> tuple[dict[str, torch.Tensor], list[int]]:
    """A prompt, and the model's output for it."""
    inputs = ragged(tiny(), 1)
    out = tiny().generate(**inputs, max_new_tokens=60, do_sample=False)
    return inputs, out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", COPYING)
def test_copying_drafters_draft_from_documents(name: str) -> None:
    inputs, output = answer()
    fast = truedraft.accelerate(tiny(), draft=name, control="fixed")
    alone = fast.generate(**inputs, max_new_tokens=60, do_sample=False)
    before = len(fast.report().passes)
    fast = truedraft.accelerate(tiny(), draft=name, control="fixed")
    helped = fast.generate(**inputs, max_new_tokens=60, do_sample=False, references=[output])
    assert torch.equal(alone, helped)
    assert len(fast.report().passes) < before


@pytest.mark.parametrize(("name", "lost"), [("input-guided", 2), ("iad-tree", 2), ("iad", 5)])
def test_position_in_the_document_survives_edits(name: str, lost: int) -> None:
    """After each of three edits, few passes until the document, of twelve different tokens, is copied again."""
    pick = random.Random(0)
    truth = [pick.randrange(12) for _ in range(200)]
    document = [*truth[:50], 12, *truth[51:100], *truth[101:150], 13, *truth[150:]]
    drafter = registry.load("drafters", name)
    row, passes = Row(0, [20, *truth[:2]], 1, 999, (tuple(document),)), 0
    drafter.start([row])
    while len(row.tokens) <= len(truth):
        (tree,) = drafter.propose([row], [40])
        rest, node = truth[len(row.tokens) - 1 :], 0
        for token in rest:
            row.tokens.append(token)
            if (child := tree.child(node, token)) is None:
                break
            node = child
        passes += 1
    assert row.tokens[1:] == truth
    assert passes <= len(truth) / 41 + 3 * lost + 1


def test_text_is_tokenised_in_pieces_that_end_at_line_ends() -> None:
    _, tokenizer = load("nano")
    text = "".join(f"It was day {i}, and the dog ran.\n" for i in range(400)) + "x" * 5000
    pieces = list(Text(text, tokenizer, 4096).pieces())
    assert len(pieces) > 5 and all(len(tokenizer.decode(piece)) <= PIECE for piece in pieces)
    assert "".join(map(tokenizer.decode, pieces)) == text
    assert all(tokenizer.decode(piece).endswith("\n") for piece in pieces[:5])
    limit = max(pieces[0])
    limited = list(Text(text, tokenizer, limit).pieces())
    assert {*limited[0]} == {*pieces[0], SEPARATOR} - {limit}, "it is outside the model's vocabulary"


def test_references_are_read_for_the_time_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes a second; time used beyond that granted is subtracted the next time."""
    documents = [tuple(range(1, 3000)), (7, 8), ()]
    given, size, clock = References(documents), PIECE // 4, [0.0]
    extend = given.automaton.extend

    def slowly(tokens: Sequence[int]) -> None:
        clock[0] += 1.0
        extend(tokens)

    monkeypatch.setattr(given.automaton, "extend", slowly)
    monkeypatch.setattr("truedraft.stores.references.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for seconds, pieces in ((2.0, 2), (0.5, 3), (0.25, 3), (0.25, 3), (0.5, 4)):
        given.read(seconds)
        assert len(given.tokens) == pieces * size
    given.read(99.0)
    everything = [*documents[0], SEPARATOR, 7, 8, SEPARATOR, SEPARATOR]
    assert given.tokens == everything == list(given.automaton.text)
    assert list(given) == list(References(documents)) == documents


def test_document_is_copied_once_it_is_read() -> None:
    """A document of 40,000 tokens is read in a twentieth of the passes' time; a pass takes as long as a piece."""
    pick = random.Random(0)
    document = tuple(pick.randrange(500) for _ in range(40_000))
    given = References([document])
    row = Row(0, [1], 1, 10, given)
    text = row_text(row, PassCost(1e-3, 1e-4))
    assert len(given.tokens) < len(document)
    passes = 0
    while len(given.tokens) <= len(document):
        row.tokens.append(1000 + passes)
        text.follow(row)
        passes += 1
        assert passes < 100_000
    assert passes > 10
    row.tokens += document[-30:-20]
    text.follow(row)
    automaton, place = text.place()
    assert automaton.copy(place, 1, 20) == list(document[-20:])


def test_references_are_read_in_full_without_a_pass_cost() -> None:
    row = Row(0, [1], 1, 1, References([tuple(range(40_000))]))
    row_text(row, None)
    assert len(row.references.tokens) == 40_001


def ended(drafter: Drafter, namespace: str, text: list[int]) -> None:
    """Run a row that emits a text, from start to end."""
    row = Row(0, text[:2], 2, 99, namespace=namespace)
    drafter.start([row])
    row.tokens += text[2:]
    drafter.end(row)


@pytest.mark.parametrize("name", ["suffix", "lookahead-pia"])
def test_outputs_are_drafted_in_their_namespace_alone(name: str) -> None:
    drafter = registry.load("drafters", name)
    ended(drafter, "mine", [1, 2, 3, 4, 5, 6, 7, 8])
    for namespace, drafted in (("mine", True), ("yours", False), ("", False)):
        row = Row(0, [3, 4, 5], 3, 99, namespace=namespace)
        drafter.start([row])
        (tree,) = drafter.propose([row], [8])
        assert (len(tree) > 1) == drafted
        drafter.end(row)


@pytest.mark.parametrize("name", ["token-recycling", "aded", "codeswift"])
def test_learnt_state_stays_in_its_namespace(name: str) -> None:
    fast = truedraft.accelerate(tiny(), draft=name, control="fixed")
    inputs = ragged(tiny(), 1)
    for _ in range(2):
        fast.generate(**inputs, max_new_tokens=40, do_sample=False, namespace="mine")
    mine = len(fast.report().passes)
    fast.generate(**inputs, max_new_tokens=40, do_sample=False, namespace="yours")
    yours = len(fast.report().passes)
    fresh = truedraft.accelerate(tiny(), draft=name, control="fixed")
    fresh.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert yours == len(fresh.report().passes) >= mine


@pytest.mark.parametrize("name", ["suffix", "lookahead-pia", "token-recycling", "aded", "codeswift", "suffix+aded"])
def test_forget_clears_learnt_state(name: str) -> None:
    fast = truedraft.accelerate(tiny(), draft=name, control="fixed")
    passes = []
    for _ in range(3):
        if len(passes) == 2:
            fast.forget()
        fast.generate(**ragged(tiny(), 1), max_new_tokens=40, do_sample=False)
        passes.append(len(fast.report().passes))
    assert passes[1] < passes[0] == passes[2]


@pytest.mark.parametrize(("namespace", "message"), [(5, "give a text"), (["a"], "has 1 entries"), ([1, 2], "give a")])
def test_namespace_must_be_text(namespace: object, message: str) -> None:
    fast = truedraft.accelerate(tiny())
    with pytest.raises(Refused, match=message):
        fast.generate(**ragged(tiny(), 2), max_new_tokens=4, namespace=namespace)  # type: ignore[arg-type]


def test_chat_drafts_from_earlier_messages() -> None:
    model, tokenizer = load("nano")
    fast = truedraft.accelerate(model, tokenizer)
    with pytest.raises(Refused, match="chat template"):
        Chat(fast)
    tokenizer.chat_template = TEMPLATE
    chat = Chat(fast, system="Tell stories.", keep=1, max_new_tokens=12, do_sample=False)
    answers = [chat.send("Once upon a time"), chat.send("There was a boy")]
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 2]
    assert [m["content"] for m in chat.messages[2::2]] == answers
    shown = "system: Tell stories.\nuser: There was a boy\nassistant:"
    inputs = tokenizer(shown, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert answers[1] == tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    with pytest.raises(Refused, match="num_beams"):
        chat.send("And then", num_beams=2)
    assert len(chat.messages) == 5
    with pytest.raises(Refused, match="keep=0"):
        Chat(fast, keep=0)
    with pytest.raises(Refused, match="no tokenizer"):
        Chat(truedraft.accelerate(model))
