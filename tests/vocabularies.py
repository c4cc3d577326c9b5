"""Tokenizers of a given size for models of tests, and models that are the same in another vocabulary."""

from __future__ import annotations

import copy
from functools import cache
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import truedraft


@cache
def spelling(size: int, turn: int = 0, pairs: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of letters, a space, and pairs of these; `size` tokens in all, or fewer.

    turn: by how much the ids are rotated. pairs: which pairs there are.
    """
    letters = ["Ġ", *ascii_lowercase][: max(size // 2, 2)]
    count = len(letters)
    apart = [(i, (i + step) % count) for step in range(1 + pairs, count) for i in range(count)]
    merges = [(letters[i], letters[j]) for i, j in apart if j][: size - count]
    pieces = [*letters, *("".join(pair) for pair in merges)]
    ids = {piece: (i + turn) % len(pieces) for i, piece in enumerate(pieces)}
    made = Tokenizer(BPE(ids, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def tokenized(model: PreTrainedModel, **settings: Any) -> Any:
    """`truedraft.accelerate` with a tokenizer of the model's vocabulary, as every command and the server give one."""
    size = model.config.get_text_config(decoder=True).vocab_size
    return truedraft.accelerate(model, spelling(size), **settings)


def turned(model: PreTrainedModel, turn: int) -> PreTrainedModel:
    """The same model with rotated token ids."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for part in {id(p): p for p in (other.get_input_embeddings(), other.get_output_embeddings())}.values():
            part.weight.copy_(part.weight.roll(turn, 0))
    return other
