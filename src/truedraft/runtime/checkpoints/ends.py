"""The tokens that end a model's texts, as its files name them: without one, a text goes on to the limit of its length.

`transformers` reads them from the generation config alone; some checkpoints name them elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

GGUF = re.compile(r"tokenizer\.ggml\.(eos|eot|eom|eog)_token_ids?")  # metadata: ends of a text, a turn and a message


def complete(model: Any, tokenizer: Any, config: Any, every: bool = False) -> None:
    """Give a model's generation config the tokens that end its texts.

    Args:
        config: the configuration of its files. Its tokens, those of its language model or that of the tokenizer are
            taken where the generation config names none.
        every: the generation config was made from the same files, which may name more: those are added.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    own = _listed(generation.eos_token_id)
    others = [_listed(config.eos_token_id), _listed(config.get_text_config(decoder=True).eos_token_id)]
    if every:
        found = _unique([*own, *others[0]])
    else:
        found = own or next(filter(None, [*others, _listed(tokenizer.eos_token_id)]), [])
    if found != own:
        generation.eos_token_id = _one_or_more(found)


def of_metadata(fields: Iterable[tuple[str, Any]]) -> int | list[int] | None:
    """The token, or the tokens, that the metadata of a file of GGUF names as ends."""
    return _one_or_more(_unique(token for name, value in fields if GGUF.fullmatch(name) for token in _listed(value)))


def _one_or_more(tokens: list[int]) -> int | list[int] | None:
    return tokens if len(tokens) > 1 else next(iter(tokens), None)


def _listed(given: Any) -> list[int]:
    return [] if given is None else [*given] if isinstance(given, list | tuple) else [given]


def _unique(tokens: Iterable[int]) -> list[int]:
    return [*dict.fromkeys(int(token) for token in tokens)]
