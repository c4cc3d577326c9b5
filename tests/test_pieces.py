"""The text of answers as they arrive, token by token, against what each tokenizer decodes at once."""

from __future__ import annotations

import random

import pytest

from tokenizers_for_tests import EVERY, TEXTS, tokenizer_of
from truedraft.text.pieces import Pieces, whole_text
from truedraft.text.token_text import token_text

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
STRANGE = ["🙂🙃好", "é漢", "a🐈b", "日本\n  x", TEXTS[0]]


def answers(kind: str) -> list[list[int]]:
    """Texts, and random tokens: special ones, and bytes that are no characters."""
    tokenizer, pick = tokenizer_of(kind), random.Random(5)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in STRANGE]
    byte_tokens = [t for t in range(len(tokenizer)) if len(token_text(tokenizer).bytes_of(t)) == 1] or [0]
    found += [pick.choices(range(len(tokenizer)), k=12) for _ in range(20)]
    return found + [pick.choices(byte_tokens, k=8) + found[0] for _ in range(20)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", EVERY)
def test_an_answer_cut_anywhere_has_one_text_however_it_is_read(kind: str, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    context = tokenizer.encode("the day", add_special_tokens=False)
    for ids in answers(kind):
        for cut in range(1, len(ids) + 1):
            texts = set()
            for step in (1, 2, 3, cut):
                pieces = Pieces(tokenizer, context, skip)
                read = [pieces.feed(ids[i : min(i + step, cut)]) for i in range(0, cut, step)]
                texts.add("".join(read) + pieces.end())
            assert len(texts) == 1, (ids[:cut], texts)


@pytest.mark.parametrize("context", ["", "the day"])
@pytest.mark.parametrize("kind", EVERY)
def test_the_text_is_that_which_the_tokenizer_decodes(kind: str, context: str) -> None:
    tokenizer, compared = tokenizer_of(kind), 0
    before = tokenizer.encode(context, add_special_tokens=False)
    start = len(tokenizer.decode(before, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    for ids in answers(kind):
        text = tokenizer.decode([*before, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)[start:]
        pieces = Pieces(tokenizer, before)
        if UNKNOWN not in text:  # where it is, the tokenizer may have lost whole characters next to it
            assert pieces.feed(ids) + pieces.end() == text
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("kind", ["nano", "byte-level", "sentencepiece", "stories260K", "neox"])
def test_an_incomplete_character_costs_none_before_it(kind: str) -> None:
    """Whole characters of an answer that ends within one are those of the answer without that."""
    tokenizer = tokenizer_of(kind)
    for text in STRANGE[:3]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for cut in range(len(ids) + 1):
            found = whole_text(tokenizer, ids[:cut])
            whole = found.rstrip(UNKNOWN)
            assert text.startswith(whole) and len(found) - len(whole) <= 1
            data = b"".join(map(token_text(tokenizer).bytes_of, ids[:cut])).removeprefix(
                b" " * (kind not in ("nano", "byte-level", "neox"))
            )
            assert whole == data.decode(errors="ignore")


def test_bytes_of_a_vocabulary_are_those_of_its_tokens() -> None:
    for kind in EVERY:
        tokenizer = tokenizer_of(kind)
        texts = token_text(tokenizer)
        assert texts is token_text(tokenizer)
        whole = texts.vocabulary(len(tokenizer) + 2)
        assert whole[-2:] == [b"", b""] and whole[:-2] == [texts.bytes_of(token) for token in range(len(tokenizer))]


def test_tokens_that_are_added_later_have_texts() -> None:
    tokenizer = tokenizer_of("byte-level").__class__(tokenizer_object=tokenizer_of("byte-level").backend_tokenizer)
    assert token_text(tokenizer).bytes_of(len(tokenizer)) == b""
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|new|>"]})
    assert token_text(tokenizer).bytes_of(len(tokenizer) - 1) == b"<|new|>"
