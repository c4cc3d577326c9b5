"""Lines to train on: prompts with the target's own responses, generated once and kept in parts, or with given ones."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from truedraft.accelerated import Accelerated
from truedraft.errors import NoRoom, Refused
from truedraft.runtime.identity import fingerprint
from truedraft.stores import _file as file
from truedraft.train.batches import Line

VERSION = 3
KIND, FOLDER = "target's responses", "responses"
PART = 256  # lines of a file
ROWS = 128  # lines of a batch, at most: wide enough that drafts do not pay
POSITIONS = 1 << 16  # of a batch, at most
REPORT_EVERY = 20.0  # seconds between reports
UNLIMITED = 1 << 30
LEAST = 2  # tokens to predict in a line: the model itself gives the first, and drafts begin with the second

Report = Callable[[str], None]
Given = str | list[int]  # a text, or its token ids as they are


@dataclass(frozen=True)
class Responding:
    """How the target responds to prompts.

    max_new_tokens: of a response, at most.
    max_length: tokens of prompt and response, at most; 0 for the target's context.
    temperature: of sampling; 0 for the likeliest tokens.
    chat: whether prompts are messages for the tokenizer's chat template.
    seed: of sampling; a response depends on it and on the line's number alone.
    """

    max_new_tokens: int = 512
    max_length: int = 0
    temperature: float = 0.0
    chat: bool = False
    seed: int = 0


def target_responses(
    fast: Accelerated,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Given],
    folder: Path,
    report: Report,
    how: Responding,
) -> list[Line]:
    """The target's responses to prompts, in their order. A run that was interrupted is continued from its files.

    A decoder's prompts that leave no room for a response are cut at their beginning. Prompts without a token are left
    out, as are sources that are longer than an encoder-decoder reads, and responses that leave nothing to draft.

    Raises:
        Refused: no prompt or response is left; or the folder holds another target's responses, or those to other
            prompts or settings.
        OSError: a part cannot be written; earlier ones are kept.
    """
    most = longest(fast, how)
    if min(how.max_new_tokens, most - 1) < LEAST:
        raise Refused(
            f"--max-new-tokens {how.max_new_tokens} and texts of at most {most:,} tokens (--max-length) leave nothing "
            f"to draft: drafts begin with the second token of a response; give room for {LEAST}"
        )
    ids = [line for line in _prompts(fast, tokenizer, prompts, how) if line is not None]
    if not ids:
        raise Refused(f"--data has no line of 1 to {most} tokens")
    if len(ids) < len(prompts):
        report(f"{len(prompts) - len(ids):,} lines are empty or longer than {most:,} tokens, and left out")
    digest = hashlib.sha256(json.dumps([*prompts]).encode()).hexdigest()[:16]
    config = {"fingerprint": fingerprint(fast.model), "sources": digest, "settings": asdict(how)}
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    responses: dict[int, list[int]] = {}
    began = reported = time.monotonic()
    generated = 0
    for number, first in enumerate(range(0, len(order), PART)):
        path, places = folder / FOLDER / f"{number:05}.safetensors", order[first : first + PART]
        if path.exists():
            responses.update(zip(places, _read(path, config), strict=True))
            continue
        found = [answer for at in range(0, PART, ROWS) for answer in _answered(fast, ids, places[at : at + ROWS], how)]
        path.parent.mkdir(parents=True, exist_ok=True)
        file.write(path, KIND, VERSION, config, _flat(found))
        responses.update(zip(places, found, strict=True))
        generated += sum(map(len, found))
        if time.monotonic() - reported > REPORT_EVERY:
            reported = time.monotonic()
            rate = generated / (reported - began)
            report(f"the target has responded to {len(responses):,} of {len(ids):,} lines, {rate:,.0f} tokens/s")
    first = 1 if fast.target.reads_sources else 0  # its start token is not predicted
    lines = [(line, responses[i]) for i, line in enumerate(ids) if len(responses[i]) >= first + LEAST]
    if not lines:
        raise Refused(
            f"--data: the model's responses have fewer than {LEAST} tokens each, which leaves nothing to draft: give "
            f"other prompts, or more room (--max-new-tokens {how.max_new_tokens}, texts of at most {most:,} tokens)"
        )
    if len(lines) < len(ids):
        report(f"{len(ids) - len(lines):,} responses have fewer than {LEAST} tokens, and are left out")
    return lines


def given_texts(
    fast: Accelerated, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], report: Report, how: Responding
) -> list[Line]:
    """Texts of their own, for `--texts`; see `given_lines`."""
    alone: list[Given | None] = [None] * len(texts)
    return [line for _, line in given_lines(fast, tokenizer, texts, alone, report, how, "--texts")]


def given_responses(
    fast: Accelerated,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Given],
    responses: Sequence[Given | None],
    report: Report,
    how: Responding,
) -> list[Line]:
    """Prompts with responses that are given; see `given_lines`."""
    return [line for _, line in given_lines(fast, tokenizer, prompts, responses, report, how)]


def given_lines(
    fast: Accelerated,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Given],
    responses: Sequence[Given | None],
    report: Report,
    how: Responding,
    option: str = "--data",
) -> list[tuple[int, Line]]:
    """Prompts with responses that are given, each with its place. A decoder's lines are cut at their end where they
    are too long, and left out where they leave nothing to draft: fewer than two tokens to predict.

    A decoder's prompt without a response (None) is a text of its own: everything after its first token is to be
    predicted. `option` is what gave the lines, for messages.

    Raises:
        Refused: no line is left, or token ids are of another model, or for an encoder-decoder.
    """
    most = longest(fast, how)
    _check_ids(fast, [*prompts, *responses])
    if fast.target.reads_sources:
        start = fast.model.generation_config.decoder_start_token_id
        labels: Any = tokenizer(text_target=[_text(response) for response in responses])["input_ids"]
        inputs = tokenizer([*prompts])["input_ids"]
        lines = [
            (i, (a, [start, *b]))
            for i, (a, b) in enumerate(zip(inputs, labels, strict=True))
            if 1 < len(a) <= most and 1 < len(b) < most
        ]
        fault = f"a side that is empty or longer than {most:,} tokens"
    else:
        lines = _texts(tokenizer, prompts, responses, most, how, _ends(fast))
        fault = f"nothing to predict within {most:,} tokens, or a single token, and drafts begin with the second"
    if not lines:
        raise Refused(f"{option}: every line has {fault}; give other lines")
    if len(lines) < len(prompts):
        report(f"{option}: {len(prompts) - len(lines):,} lines have {fault}: left out")
    return lines


def longest(fast: Accelerated, how: Responding) -> int:
    """Tokens of a text, at most: of a decoder's prompt and response, or of each side of an encoder-decoder's line."""
    target = fast.target
    limits = target.context, target.hard_limit, target.longest_source, how.max_length or None
    return min((limit for limit in limits if limit is not None), default=UNLIMITED)


def _prompts(
    fast: Accelerated, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Given], how: Responding
) -> list[list[int] | None]:
    """Ids of prompts, cut where they leave no room for a response; None for those to be left out."""
    most = longest(fast, how)
    _check_ids(fast, prompts)
    if fast.target.reads_sources:
        return [ids if 1 < len(ids) <= most else None for ids in tokenizer([*prompts])["input_ids"]]
    room = most - min(how.max_new_tokens, most // 2)
    return [ids[-room:] or None for ids in _encoded(tokenizer, prompts, how)]


def _check_ids(fast: Accelerated, given: Sequence[Given | None]) -> None:
    """Raises Refused where lines that are given in token ids cannot be read."""
    ids = [token for one in given if isinstance(one, list) for token in one]
    if ids and fast.target.reads_sources:
        raise Refused("--data has token ids, and an encoder-decoder is trained on texts: give these")
    if (largest := max(ids, default=0)) >= (size := fast.target.vocabulary):
        raise Refused(f"--data has token {largest}, and the model {size:,} tokens: give lines of this model")


def _encoded(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Given], how: Responding) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not how.chat:
        return _merged(prompts, tokenizer(texts)["input_ids"] if texts else [])
    if not tokenizer.chat_template:
        raise Refused("--chat: the tokenizer of this model has no chat template; drop --chat")
    messages = [[{"role": "user", "content": prompt}] for prompt in texts]
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return _merged(prompts, encoded["input_ids"])


def _merged(given: Sequence[Given | None], encoded: Sequence[list[int]]) -> list[list[int]]:
    """Token ids of all, from those of the texts among them."""
    texts = iter(encoded)
    return [one if isinstance(one, list) else next(texts) for one in given]


def _texts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Given], responses: Sequence[Given | None], most: int,
    how: Responding, ends: Sequence[int],
) -> list[tuple[int, Line]]:  # fmt: skip
    """A decoder's lines with something to draft, cut at their end, each with its place. Texts end with an end token,
    unless they are empty; token ids as they do."""
    texts = [_text(response) for response in responses if not isinstance(response, list)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    answers = _merged(responses, [[*answer, *ends[:1]] if answer else [] for answer in encoded])
    alone = [i for i, response in enumerate(responses) if response is None]
    plain = dict(zip(alone, _encoded(tokenizer, [prompts[i] for i in alone], Responding()), strict=True))
    lines: list[tuple[int, Line]] = []
    for i, (prompt, answer) in enumerate(zip(_encoded(tokenizer, prompts, how), answers, strict=True)):
        sides = (plain[i][:1], plain[i][1:]) if i in plain else (prompt, answer)
        lines.append((i, (sides[0], sides[1][: max(most - len(sides[0]), 0)])))
    return [(i, line) for i, line in lines if line[0] and len(line[1]) >= LEAST]


def _text(response: Any) -> str:
    """A response as it is, or an empty text where it has nothing but white space, or is none."""
    return response if response and not response.isspace() else ""


def _ends(fast: Accelerated) -> list[int]:
    found = fast.model.generation_config.eos_token_id
    return found if isinstance(found, list) else [] if found is None else [found]


def _answered(fast: Accelerated, ids: Sequence[list[int]], places: Sequence[int], how: Responding) -> list[list[int]]:
    """The target's responses to some prompts, up to their end tokens; an encoder-decoder's with its start token."""
    if not places:
        return []
    sources = fast.target.reads_sources
    width = max(len(ids[i]) for i in places)
    new = min(how.max_new_tokens, longest(fast, how) - (1 if sources else width))
    if len(places) * (width + new) <= POSITIONS or len(places) == 1:
        try:
            rows = _generated(fast, [ids[i] for i in places], places, new, how)
        except NoRoom:
            if len(places) == 1:
                raise
        else:
            return [_ended(row, _ends(fast), first=1 if sources else 0) for row in rows]
    half = len(places) // 2
    return _answered(fast, ids, places[:half], how) + _answered(fast, ids, places[half:], how)


def _generated(
    fast: Accelerated, prompts: Sequence[list[int]], places: Sequence[int], new: int, how: Responding
) -> list[list[int]]:
    """What `generate` returns for prompts, without the prompts and with padding."""
    sources = fast.target.reads_sources
    pad = fast.model.config.get_text_config(decoder=True).pad_token_id or 0
    tensors = [torch.tensor(prompt, device=fast.target.device) for prompt in prompts]
    side = "right" if sources else "left"
    given = pad_sequence(tensors, True, pad, side)
    mask = pad_sequence([torch.ones_like(prompt) for prompt in tensors], True, 0, side)
    settings: dict[str, Any] = {"do_sample": False}
    if how.temperature:
        seeds = [int.from_bytes(hashlib.sha256(f"{how.seed} {i}".encode()).digest()[:6]) for i in places]
        settings = {"do_sample": True, "temperature": how.temperature, "seed": seeds}
    out = fast.generate(given, attention_mask=mask, num_beams=1, max_new_tokens=new, **settings)
    return out[:, 0 if sources else given.shape[1] :].tolist()


def _ended(row: list[int], ends: Sequence[int], first: int) -> list[int]:
    """A row up to its end token, which is searched from index `first` on."""
    return row[: next((i for i, token in enumerate(row[first:], first + 1) if token in ends), len(row))]


def _flat(answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "tokens": np.array([token for answer in answers for token in answer], dtype=np.int32),
        "lengths": np.array([len(answer) for answer in answers], dtype=np.int32),
    }


def _read(path: Path, config: dict[str, Any]) -> list[list[int]]:
    found, arrays, _ = file.read(path, KIND, VERSION, "truedraft train")
    others = {"fingerprint": "another model's responses", "sources": "responses to other lines"}
    others["settings"] = "responses by other settings"
    for part, other in others.items():
        if found[part] != config[part]:
            raise Refused(f"--out: {str(path)!r} holds {other}: remove its folder, or give another")
    return [answer.tolist() for answer in np.split(arrays["tokens"], arrays["lengths"].cumsum()[:-1])]
