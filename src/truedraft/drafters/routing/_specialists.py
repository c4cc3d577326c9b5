"""Specialists: drafters for one kind of text each, by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft import registry
from truedraft.card import shown
from truedraft.drafters._base import Drafter
from truedraft.drafters._compose import name_of
from truedraft.errors import Refused, why
from truedraft.tree import Row

Examples = Mapping[str, Sequence[Any]]  # by specialist, texts or their token ids


def drafters_of(method: str, given: Any) -> dict[str, Drafter]:
    """Drafters by name, from a mapping of names, from a list, or from specs with ";" between.

    Those of a list have the names of their specs or methods, numbered where two would have the same.

    Raises:
        Refused: one is no drafter, name of one, or draft model.
    """
    if given is None:
        return {}
    if isinstance(given, str):
        given = [spec.strip() for spec in given.split(";")]
    if isinstance(given, Mapping):
        return {str(name): _drafter(method, one) for name, one in given.items()}
    if not isinstance(given, Sequence):
        raise Refused(f"{method}:specialists={shown(given)}: give drafters by name, a list of them, or their names")
    found: dict[str, Drafter] = {}
    for one in given:
        drafter = _drafter(method, one)
        name = one if isinstance(one, str) else name_of(drafter)
        found[name if name not in found else f"{name} {len(found) + 1}"] = drafter
    return found


def _drafter(method: str, given: Any) -> Drafter:
    if isinstance(given, str):
        return registry.load("drafters", given)
    if isinstance(given, PreTrainedModel):
        return registry.load("drafters", "draft-model", model=given)
    if not isinstance(given, Drafter):
        raise Refused(f"{method}:specialists has {shown(given)}: give a drafter, its name, or a draft model")
    return given


def distinct(drafters: Mapping[str, Drafter]) -> list[Drafter]:
    """Each of the drafters once."""
    return list({id(drafter): drafter for drafter in drafters.values()}.values())


def note(row: Row, name: str, drafts: int) -> None:
    """Add to the drafts that a specialist made for a row."""
    row.drafted_by[name] = row.drafted_by.get(name, 0) + drafts


def read_file(method: str, path: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The drafters and example texts of a TOML file, which has a table for each specialist.

    draft: the drafter's name, with its knobs. examples: texts, or the name of a text file in the same folder, a text
    per line.

    Raises:
        Refused: a file cannot be read, or has another form.
    """
    drafts: dict[str, str] = {}
    examples: dict[str, list[str]] = {}
    try:
        for name, table in tomllib.loads(path.read_text(encoding="utf-8-sig")).items():
            if (
                not isinstance(table, dict)
                or not isinstance(table.get("draft"), str)
                or {*table} - {"draft", "examples"}
            ):
                raise Refused(
                    f"{method}: {path} has {name!r}: write a table [{name}] with draft = and examples = alone"
                )
            drafts[name], texts = table["draft"], table.get("examples")
            if isinstance(texts, str):
                texts = [
                    line for line in (path.parent / texts).read_text(encoding="utf-8-sig").split("\n") if line.strip()
                ]
            if texts is not None:
                examples[name] = texts
    except (OSError, ValueError) as e:
        raise e if isinstance(e, Refused) else Refused(f"{method}:file={str(path)!r}: {why(e)}") from e
    return drafts, examples


def token_ids(
    method: str, name: str, texts: Any, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> list[list[int]]:
    """The examples of a specialist as token ids of the target.

    Raises:
        Refused: they are of another form, have no token, or need a tokenizer.
    """
    ids: list[list[int]] = []
    for text in [] if isinstance(texts, str) or not isinstance(texts, Sequence) else texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise Refused(f"{method}: its examples are texts: give accelerate() the tokenizer, or give token ids")
            text = tokenizer(text, add_special_tokens=False)["input_ids"]
        try:
            ids.append([int(token) for token in text])
        except (TypeError, ValueError) as e:
            raise Refused(f"{method}: an example of {name!r} is {shown(text)}: give a text, or its token ids") from e
        if not all(0 <= token < vocabulary for token in ids[-1]):
            raise Refused(f"{method}: an example of {name!r} has tokens outside the model's vocabulary of {vocabulary}")
    if not any(ids):
        raise Refused(f"{method}: {name!r} has no examples: give some texts like those that it is for")
    return ids
