"""Tokenizers of every kind: small ones that are made here, that of the embedded model, and the shared checkpoints'."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from truedraft.loading import load

SHARED = Path(__file__).parents[2] / "shared"
TEXTS = [
    "one day, a little girl said: stop! 🙂 naïve café",
    "the dog 🐕 ran. the cat 🐈 sat.\n\nEnd ### of it 漢字",
    '{"name": [1, 2.5, true, null], "yes": "no"}',
] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<|stop|>"]
WORDS = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁"]


def byte_level() -> Any:
    """As in GPT-2: bytes and merges of them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return made


def sentence_pieces() -> Any:
    """As in Llama 2: words with a space in front, single bytes for characters that are unknown."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL[:3], *WORDS])}
    letters = sorted({c for c in "".join(TEXTS) if c.isascii() and c not in " \n"})
    merges = [("▁", "o"), ("▁o", "n"), ("▁on", "e"), ("d", "a"), ("da", "y"), ("▁", "day"), ("t", "h"), ("th", "e")]
    for word in [*letters, *("".join(pair) for pair in merges)]:
        vocabulary.setdefault(word, len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(SPECIAL)
    return made


def unigram() -> Any:
    """As in T5 and Gemma: the likeliest division into pieces, some of which look like special tokens."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=sorted(set("".join(TEXTS)) - {" "})
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def word_pieces() -> Any:
    """As in BERT: words, and pieces that go on a word."""
    letters = sorted(set("".join(TEXTS)) - {" ", "\n"})
    words = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), "day", "##day", "the", "girl"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    made.add_special_tokens(SPECIAL)
    return made


MADE: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level, "sentencepiece": sentence_pieces, "unigram": unigram, "wordpiece": word_pieces,
}  # fmt: skip
FOLDERS = {
    "stories260K": "weights/stories260K",
    "babyllama": "weights/babyllama_tok105",
    "neox": "data/tokenizers/gpt_neox_20B",
}
EVERY = ["nano", *MADE, *FOLDERS]


@cache
def tokenizer_of(kind: str) -> Any:
    """A tokenizer of a kind; skips the test where a shared folder is absent."""
    if kind == "nano":
        return load("nano")[1]
    if kind in FOLDERS:
        if not (SHARED / FOLDERS[kind]).exists():
            pytest.skip(f"shared/{FOLDERS[kind]} is not here")
        found = AutoTokenizer.from_pretrained(SHARED / FOLDERS[kind])
        found.eos_token = found.eos_token or "<|endoftext|>"
        return found
    return PreTrainedTokenizerFast(
        tokenizer_object=MADE[kind](), unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens=["<|stop|>"],
    )  # fmt: skip
