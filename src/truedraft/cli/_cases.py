"""The prompts of `truedraft demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truedraft import assets
from truedraft.bench.workloads import requests
from truedraft.cli._text import read
from truedraft.errors import Refused

PROSE = ("question", "summary", "edit")  # kinds of the embedded requests


@dataclass(frozen=True)
class Case:
    """A prompt, and the most tokens to generate.

    shown: what a reader sees of the prompt, where that is less than all of it.
    """

    name: str
    text: str
    tokens: int
    shown: str = ""


def cases(prompt: Path | None, instruction: str | None, tokens: int | None, tokenizer: Any = None) -> list[Case]:
    """The prompts to run: the embedded ones, or a file, with or without an instruction to edit it.

    tokenizer: of the model; one that has a chat template gets requests in it: a question, a summary and an edit of a
        text, or the file.

    Raises:
        Refused: an instruction without a file, or a file that cannot be read or is empty.
    """
    chat = bool(getattr(tokenizer, "chat_template", None))
    if prompt is None:
        if instruction is not None:
            raise Refused("--instruction needs --prompt FILE, the text to edit")
        if chat:
            return [_request(tokenizer, kind, requests()[kind][0], tokens or 400) for kind in PROSE]
        edit = assets.edit_prompt(assets.prompt("edit.py.txt"), assets.prompt("edit_instruction.txt"))
        return [Case("story", assets.prompt("story.txt"), tokens or 200), Case("edit", edit, tokens or 400)]
    text = read(prompt, "--prompt").removesuffix("\n")
    if not text:
        raise Refused(f"--prompt {prompt}: the file is empty")
    if chat:
        return [_request(tokenizer, prompt.name, f"{instruction}\n\n{text}" if instruction else text, tokens or 400)]
    if instruction is not None:
        return [Case(prompt.name, assets.edit_prompt(text, instruction), tokens or 400)]
    return [Case(prompt.name, text, tokens or 200)]


def _request(tokenizer: Any, name: str, text: str, tokens: int) -> Case:
    from truedraft.text.templates import request_text

    return Case(name, request_text(tokenizer, text), tokens, f"{text}\n\n")
