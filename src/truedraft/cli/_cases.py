"""The prompts of `truedraft demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from truedraft import assets
from truedraft.cli._text import read
from truedraft.errors import Refused


@dataclass(frozen=True)
class Case:
    """A prompt, and the most tokens to generate."""

    name: str
    text: str
    tokens: int


def cases(prompt: Path | None, instruction: str | None, tokens: int | None) -> list[Case]:
    """The prompts to run: the embedded ones, or a file, with or without an instruction to edit it.

    Raises:
        Refused: an instruction without a file, or a file that cannot be read or is empty.
    """
    if prompt is None:
        if instruction is not None:
            raise Refused("--instruction needs --prompt FILE, the text to edit")
        edit = assets.edit_prompt(assets.prompt("edit.py.txt"), assets.prompt("edit_instruction.txt"))
        return [Case("story", assets.prompt("story.txt"), tokens or 200), Case("edit", edit, tokens or 400)]
    text = read(prompt, "--prompt").removesuffix("\n")
    if not text:
        raise Refused(f"--prompt {prompt}: the file is empty")
    if instruction is not None:
        return [Case(prompt.name, assets.edit_prompt(text, instruction), tokens or 400)]
    return [Case(prompt.name, text, tokens or 200)]
