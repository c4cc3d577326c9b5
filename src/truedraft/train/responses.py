"""A target's responses to given sources: the training data of its drafters, generated once and kept in a file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from truedraft.accelerated import Accelerated
from truedraft.drafters._learned import Line, fingerprint
from truedraft.errors import Refused
from truedraft.stores import _file as file

VERSION = 2
KIND, NAME = "target's responses", "responses.safetensors"
LONGEST = 120  # tokens of a source and of a response, at most
ROWS = 128  # sources of a batch: wide enough that drafts do not pay
REPORT_EVERY = 20.0  # seconds between reports


def target_responses(
    fast: Accelerated,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    folder: Path,
    report: Callable[[str], None],
) -> list[Line]:
    """The target's greedy responses to sources, in their order, read from the folder if they are there.

    Sources that are empty or too long are left out.

    Raises:
        Refused: the folder holds another target's responses, or those to other sources.
    """
    path, digest = folder / NAME, hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]
    config = {"fingerprint": fingerprint(fast.model), "sources": digest}
    if path.exists():
        return _read(path, config)
    most = longest(fast)
    lines = [ids for ids in tokenizer(list(sources))["input_ids"] if 1 < len(ids) <= most]
    if not lines:
        raise Refused(f"--data has no line of 1 to {most} tokens")
    if len(lines) < len(sources):
        report(f"{len(sources) - len(lines):,} lines are empty or longer than {most} tokens, and left out")
    order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
    answers: dict[int, list[int]] = {}
    began = reported = time.monotonic()
    for at in range(0, len(order), ROWS):
        places = order[at : at + ROWS]
        answers.update(zip(places, _answered(fast, [lines[i] for i in places]), strict=True))
        if time.monotonic() - reported > REPORT_EVERY:
            reported = time.monotonic()
            report(f"the target has answered {len(answers):,} of {len(lines):,} lines, {reported - began:.0f} s")
    found = [(line, answers[i]) for i, line in enumerate(lines)]
    file.write(path, KIND, VERSION, config, _flat(found))
    return found


def longest(fast: Accelerated) -> int:
    """Tokens of a source, and of its response with the start token, at most."""
    return min(LONGEST, fast.target.longest_source or LONGEST, fast.target.hard_limit or LONGEST)


def _answered(fast: Accelerated, sources: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The target's response to each source, with the decoder's start token and its end token."""
    config = fast.model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad, width = fast.model.config.pad_token_id or 0, max(map(len, sources))
    given = torch.tensor([[*line, *[pad] * (width - len(line))] for line in sources], device=fast.target.device)
    mask = torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in sources], device=given.device)
    most = longest(fast) - 1
    out = fast.generate(given, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=most)
    for row in out.tolist():
        yield row[: next((i for i, token in enumerate(row[1:], 2) if token in ends), len(row))]


def _flat(lines: Sequence[Line]) -> dict[str, Any]:
    return {
        f"{name}_{part}": np.array(values, dtype=np.int32)
        for name, side in zip(("source", "answer"), zip(*lines, strict=True), strict=True)
        for part, values in (("tokens", [t for line in side for t in line]), ("lengths", [len(line) for line in side]))
    }


def _read(path: Path, config: dict[str, Any]) -> list[Line]:
    found, arrays, _ = file.read(path, KIND, VERSION, "truedraft train")
    for part, other in (("fingerprint", "another model's responses"), ("sources", "responses to other lines")):
        if found[part] != config[part]:
            raise Refused(f"--out: {str(path)!r} holds {other}: remove it, or give another folder")
    sides = [
        [line.tolist() for line in np.split(arrays[f"{name}_tokens"], arrays[f"{name}_lengths"].cumsum()[:-1])]
        for name in ("source", "answer")
    ]
    return list(zip(*sides, strict=True))
