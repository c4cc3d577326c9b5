"""Documents, conversations and namespaces: what drafters may copy from, and whose it is."""

from __future__ import annotations

import random

import pytest
import torch

import truedraft
from models import ragged, tiny
from truedraft import Chat, Drafter, Refused, registry
from truedraft.cli._models import load
from truedraft.tree import Row

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
COPYING = [n for n in registry.names("drafters") if registry.method("drafters", n).takes_references]


def answer() -> tuple[dict[str, torch.Tensor], list[int]]:
    """A prompt, and what the model says to it."""
    inputs = ragged(tiny(), 1)
    out = tiny().generate(**inputs, max_new_tokens=60, do_sample=False)
    return inputs, out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", COPYING)
def test_what_a_document_says_is_drafted_from_it(name: str) -> None:
    inputs, said = answer()
    fast = truedraft.accelerate(tiny(), draft=name, control="fixed")
    alone = fast.generate(**inputs, max_new_tokens=60, do_sample=False)
    before = len(fast.report().passes)
    fast = truedraft.accelerate(tiny(), draft=name, control="fixed")
    helped = fast.generate(**inputs, max_new_tokens=60, do_sample=False, references=[said])
    assert torch.equal(alone, helped)
    assert len(fast.report().passes) < before


def test_a_place_in_the_input_survives_edits() -> None:
    """Behind each of three changes one pass, or two, until the document is copied again."""
    pick = random.Random(0)
    truth = [pick.randrange(12) for _ in range(200)]
    document = [*truth[:50], 12, *truth[51:100], *truth[101:150], 13, *truth[150:]]
    drafter = registry.load("drafters", "input-guided")
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
    assert passes <= len(truth) / 41 + 3 * 2 + 1


def ended(drafter: Drafter, namespace: str, text: list[int]) -> None:
    """A row that said a text, from its beginning to its end."""
    row = Row(0, text[:2], 2, 99, namespace=namespace)
    drafter.start([row])
    row.tokens += text[2:]
    drafter.end(row)


@pytest.mark.parametrize("name", ["suffix", "lookahead-pia"])
def test_nobody_is_offered_what_another_said(name: str) -> None:
    drafter = registry.load("drafters", name)
    ended(drafter, "mine", [1, 2, 3, 4, 5, 6, 7, 8])
    for namespace, drafted in (("mine", True), ("yours", False), ("", False)):
        row = Row(0, [3, 4, 5], 3, 99, namespace=namespace)
        drafter.start([row])
        (tree,) = drafter.propose([row], [8])
        assert (len(tree) > 1) == drafted
        drafter.end(row)


@pytest.mark.parametrize("name", ["token-recycling", "aded", "codeswift"])
def test_what_is_learnt_of_a_row_stays_in_its_namespace(name: str) -> None:
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
def test_what_was_learnt_is_forgotten_when_asked(name: str) -> None:
    fast = truedraft.accelerate(tiny(), draft=name, control="fixed")
    passes = []
    for _ in range(3):
        if len(passes) == 2:
            fast.forget()
        fast.generate(**ragged(tiny(), 1), max_new_tokens=40, do_sample=False)
        passes.append(len(fast.report().passes))
    assert passes[1] < passes[0] == passes[2]


@pytest.mark.parametrize(("namespace", "message"), [(5, "give a text"), (["a"], "has 1 entries"), ([1, 2], "give a")])
def test_a_namespace_is_a_text(namespace: object, message: str) -> None:
    fast = truedraft.accelerate(tiny())
    with pytest.raises(Refused, match=message):
        fast.generate(**ragged(tiny(), 2), max_new_tokens=4, namespace=namespace)  # type: ignore[arg-type]


def test_a_chat_offers_what_it_was_told() -> None:
    model, tokenizer = load("nano")
    fast = truedraft.accelerate(model, tokenizer)
    with pytest.raises(Refused, match="chat template"):
        Chat(fast)
    tokenizer.chat_template = TEMPLATE
    chat = Chat(fast, system="Tell stories.", keep=1, max_new_tokens=12, do_sample=False)
    answers = [chat.say("Once upon a time"), chat.say("There was a boy")]
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 2]
    assert [m["content"] for m in chat.messages[2::2]] == answers
    shown = "system: Tell stories.\nuser: There was a boy\nassistant:"
    inputs = tokenizer(shown, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert answers[1] == tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    with pytest.raises(Refused, match="num_beams"):
        chat.say("And then", num_beams=2)
    assert len(chat.messages) == 5
    with pytest.raises(Refused, match="keep=0"):
        Chat(fast, keep=0)
    with pytest.raises(Refused, match="no tokenizer"):
        Chat(truedraft.accelerate(model))
