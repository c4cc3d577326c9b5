"""Workloads of a benchmark: a small embedded set, or prompts from files given by path."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truedraft import assets
from truedraft.errors import Refused, why

# eight categories of MT-Bench are one kind of Spec-Bench
CHAT = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass(frozen=True)
class Item:
    """A prompt, and documents from which its output may copy."""

    text: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Prompts of one kind, and the limit of new tokens of each."""

    name: str
    items: tuple[Item, ...]
    tokens: int = 128


def embedded(sources: bool = False, tokenizer: Any = None) -> list[Workload]:
    """Tasks that the embedded models were trained on: stories, edits, files to shorten, changes to earlier answers.

    Args:
        sources: for an encoder-decoder, English sentences with mistakes.
        tokenizer: of the model; one that has a chat template gets requests to an assistant instead, in that template.
    """
    if getattr(tokenizer, "chat_template", None) and not sources:
        return _requests(tokenizer)
    if sources:
        return [Workload("mistakes", tuple(Item(line) for line in assets.prompt("mistakes.txt").split("\n")))]
    stories = assets.prompt("stories.txt").strip().split("\n\n")
    code = assets.prompt("edit.py.txt")
    edits = [_edit(code, rename) for rename in assets.prompt("edit_instructions.txt").strip().split("\n")]
    shortened = [_edit(part, "Remove the comments.") for part in assets.prompt("shorten.py.txt").split("\n\n\n")]
    return [
        Workload("story", tuple(Item(story) for story in stories)),
        Workload("edit", tuple(edits), 300),
        Workload("shorten", tuple(shortened), 300),
        Workload("chat", tuple(_chat()), 300),
    ]


def requests() -> dict[str, list[str]]:
    """By kind, embedded requests to an assistant: questions, summaries, edits of texts, and files of code."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for line in assets.prompt("requests.jsonl").split("\n"):
        row = json.loads(line)
        kinds[row["kind"]].append(row["request"])
    return kinds


def _requests(tokenizer: Any) -> list[Workload]:
    """The embedded requests, each a user's message."""
    from truedraft.text.templates import request_text

    made = {kind: tuple(Item(request_text(tokenizer, one)) for one in texts) for kind, texts in requests().items()}
    return [Workload(kind, items, 300) for kind, items in made.items()]


def _edit(text: str, instruction: str, *before: str) -> Item:
    return Item(assets.edit_prompt(text, instruction), (*before, text))


def _chat() -> Iterator[Item]:
    """Conversations in which each turn requests a change of the last answer; without the first turns."""
    for text, renames in (
        (assets.prompt("edit.py.txt"), (("total", "amount"), ("value", "change"), ("note", "reason"))),
        (assets.prompt("chat_story.txt"), (("lily", "sara"), ("spot", "max"))),
    ):
        earlier: list[str] = []
        for old, new in renames:
            if earlier:
                yield _edit(text, f"Rename {old} to {new}.", *earlier)
            earlier.append(text)
            text = re.sub(rf"\b{old}\b", new, text)


def from_file(path: Path, limit: int, tokens: int = 128, sources: bool = False) -> list[Workload]:
    """Prompts from a file, by kind where the file has kinds, at most `limit` of each; see `items_of`."""
    kinds: dict[str, list[Item]] = defaultdict(list)
    for kind, item in items_of(path, sources):
        kinds[kind].append(item)
    return [Workload(kind, tuple(items[:limit]), tokens) for kind, items in kinds.items()]


def items_of(path: Path, sources: bool = False) -> list[tuple[str, Item]]:
    """Prompts from a file, in its order, each with its kind.

    Read are: Spec-Bench and MT-Bench questions (`turns`, `category`; the first turn), HumanEval (`prompt`), files to
    edit (`text`, `instruction`), recorded conversations (`messages`), any other JSON lines with a `prompt` or `text`
    (and `references`, a list of texts), gzipped or not; and plain text with prompts separated by empty lines.

    sources: for an encoder-decoder, each line of plain text.

    Raises:
        Refused: the file cannot be read, or a line of it has no prompt.
    """
    text = text_of(path, "--prompts")
    if ".jsonl" in path.name:
        name = path.name.split(".")[0]
        found = [_item(name, where, row) for where, row in objects(path, text, "--prompts")]
    else:
        parts = text.split("\n" if sources else "\n\n")
        found = [(path.stem, Item(part.strip())) for part in parts if part.strip()]
    if not found:
        raise Refused(f"--prompts {path}: there are no prompts in it")
    return found


def text_of(path: Path, option: str) -> str:
    """The text of a file, gzipped or not, that was given as `option`.

    Raises:
        Refused: it cannot be read, or is not UTF-8.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise Refused(f"{option} {path} cannot be read: it is not UTF-8 text") from e
    except (OSError, EOFError, zlib.error) as e:
        raise Refused(f"{option} {path} cannot be read: {why(e)}") from e


def objects(path: Path, text: str, option: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object of a file of JSON lines, after its location for messages.

    Raises:
        Refused: a line is not JSON, or is no object.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{option} {path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as e:
                raise Refused(f"{where}: not JSON ({e})") from e
            if not isinstance(row, Mapping):
                raise Refused(f'{where}: give an object, such as {{"prompt": ...}}')
            yield where, row


def _item(name: str, where: str, row: Mapping[str, Any]) -> tuple[str, Item]:
    if isinstance(turns := row.get("turns"), list) and turns:
        category = str(row.get("category", name))
        return "chat" if category in CHAT else category, Item(str(turns[0]))
    if "instruction" in row and "text" in row:
        return name, Item(f"{row['text']}\n\n{row['instruction']}\n", (str(row["text"]),))
    if isinstance(messages := row.get("messages"), list) and messages:
        valid = [m for m in messages if isinstance(m, Mapping)]
        return name, Item(_conversation(valid), tuple(str(m.get("content", "")) for m in valid))
    for key in ("prompt", "text"):
        if isinstance(row.get(key), str) and row[key].strip():
            return name, Item(row[key], tuple(map(str, row.get("references") or ())))
    if empty := [key for key in ("prompt", "text", "turns", "messages") if key in row]:
        raise Refused(f"{where}: its {empty[0]} is empty, or of another type: give a text")
    raise Refused(f"{where}: no prompt, text, turns or messages in it")


def _conversation(messages: list[Mapping[str, Any]]) -> str:
    return "".join(f"{m.get('role', 'user')}: {m.get('content', '')}\n" for m in messages) + "assistant:"
