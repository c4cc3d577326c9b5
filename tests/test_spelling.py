"""The places, bytes and names of single tokens, against what each tokenizer decodes."""

from __future__ import annotations

import random

import pytest

from tokenizers_for_tests import EVERY, TEXTS, tokenizer_of
from truedraft.text.spelling import Spelling, spelled
from truedraft.text.token_text import token_text

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
GIVEN = ["one day, a girl", "naïve café 🙂!", "the 漢字 </s> of it", " two  spaces\n", TEXTS[1]]


def sequences(kind: str) -> list[list[int]]:
    """Texts, and random tokens, special ones among them."""
    tokenizer, pick = tokenizer_of(kind), random.Random(3)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in GIVEN]
    return found + [pick.choices(range(len(tokenizer)), k=9) for _ in range(40)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", EVERY)
def test_bytes_concatenate_to_the_text_and_places_are_those_in_it(kind: str, skip: bool) -> None:
    tokenizer, compared = tokenizer_of(kind), 0
    texts = token_text(tokenizer)
    for ids in sequences(kind):
        text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        if UNKNOWN in text:  # the tokenizer may have lost whole characters next to it
            continue
        spelling = Spelling(texts, texts.left_out(skip))
        spelling.add(ids)
        spelling.end()
        assert b"".join(one.bytes for one in spelling.tokens).decode() == text
        assert [one.token for one in spelling.tokens] == ids
        for one in spelling.tokens:
            assert text[one.start :].startswith(one.text) and one.end - one.start - len(one.text) in (0, 1)
        cut = len(text) // 2
        assert "".join(one.cut(cut).text for one in spelling.tokens) == text[:cut]
        assert all(one.cut(cut).start <= cut for one in spelling.tokens)
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("kind", EVERY)
def test_a_token_has_one_name_and_different_tokens_mostly_different_ones(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts, named = token_text(tokenizer), dict[str, list[int]]()
    for token in range(len(tokenizer) + 2):
        name = texts.name(token)
        named.setdefault(name, []).append(token)
        if token in texts.special:
            assert name == texts.added[token]
        elif name.startswith("bytes:"):
            assert UNKNOWN in tokenizer.decode([token])
            escaped = name.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")
            assert escaped == texts.bytes_of(token)
        elif not texts.bytes_of(token):
            assert name == f"token_id:{token}"
        else:
            assert name.encode() == texts.bytes_of(token)
    for tokens in named.values():  # but for a byte and the piece of this one character
        assert len({texts.bytes_of(token) for token in tokens}) == 1 and len(tokens) <= 2


def test_parts_of_a_character_have_names_as_in_openais_api() -> None:
    texts = token_text(tokenizer_of("nano"))
    ids = tokenizer_of("nano").encode(" ☃", add_special_tokens=False)
    assert [texts.name(token) for token in ids] == [" ", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83"]
    spelling = Spelling(texts)
    spelling.add(ids)
    assert [(one.text, one.start, one.end) for one in spelling.tokens] == [
        (" ", 0, 1), ("", 1, 2), ("", 1, 2), ("☃", 1, 2),
    ]  # fmt: skip
    spelling = Spelling(texts)
    spelling.add(ids[:-1])
    spelling.end()
    assert [one.text for one in spelling.tokens] == [" ", "", UNKNOWN]
    assert b"".join(one.bytes for one in spelling.tokens) == " ☃".encode()[:-1]


@pytest.mark.parametrize("kind", ["sentencepiece", "stories260K", "unigram", "wordpiece"])
def test_the_space_of_a_first_word_is_its_own_unless_it_begins_the_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts = token_text(tokenizer)
    ids = tokenizer.encode("the day", add_special_tokens=False)
    hidden = texts.left_out(True)
    for context, first in (([], "t"), ([tokenizer.bos_token_id], "t"), (ids, " t")):
        spelling = Spelling(texts, hidden, context)
        spelling.add([tokenizer.bos_token_id, *ids])
        text = "".join(one.text for one in spelling.tokens)
        assert text.startswith(first) and text.lstrip() == "the day"
        assert spelling.tokens[0].bytes == b"" and spelling.tokens[1].begins == (first == "t")


@pytest.mark.parametrize("kind", EVERY)
def test_a_given_text_is_spelled_with_the_special_tokens_that_it_has(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    special = tokenizer.eos_token
    text = f"the day{special}the day"
    ids = tokenizer.encode("the day", add_special_tokens=False)
    given = [tokenizer.eos_token_id, *ids, tokenizer.eos_token_id, *ids]  # the first was put there by the tokenizer
    places = spelled(token_text(tokenizer), given, text)
    assert "".join(one.text for one in places) == text
    assert [one.text for one in places].count(special) == 1 and places[0].text == ""
    assert places[0].start == 0 and places[len(ids) + 1].text == special
    assert places[len(ids) + 1].start == text.index(special)
    assert all(one.end <= len(text) for one in places)


def test_tokens_are_found_in_a_text_that_the_tokenizer_reads_as_another_one() -> None:
    tokenizer = tokenizer_of("wordpiece")
    text = "the  day, the\tday."
    places = spelled(token_text(tokenizer), tokenizer.encode(text, add_special_tokens=False), text)
    assert [one.text for one in places] == ["the", "  day", ",", " the", "\tday", "."]
    assert [one.start for one in places] == [0, 3, 8, 9, 13, 17]
    capital = "The Day."
    ids = tokenizer.encode(capital.lower(), add_special_tokens=False)  # as a tokenizer of lower case has it
    assert [one.text for one in spelled(token_text(tokenizer), ids, capital)] == ["The", " Day", "."]
    unknown = [ids[0], tokenizer.unk_token_id, *ids[1:]]
    assert [one.text for one in spelled(token_text(tokenizer), unknown, "The ☃ Day.")] == ["The", "", " ☃ Day", "."]
