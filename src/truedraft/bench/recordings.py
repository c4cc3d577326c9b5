"""Recorded outputs of models, read from files and tokenised: the input of `replay.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truedraft.bench.workloads import objects, text_of
from truedraft.errors import Refused

OPTION = "--replay"
TURNS = ("first turn", "second turn")


@dataclass(frozen=True)
class Part:
    """A part of a conversation, tokenised separately, so that an output has the tokens in which it was generated.

    kind: of a recorded output; None for parts of prompts.
    document: whether drafters may copy from it as a separate document.
    """

    text: str
    kind: str | None = None
    document: bool = True


Conversation = tuple[Part, ...]


@dataclass(frozen=True)
class Recording:
    """One recorded output, in compact token ids.

    kind: its turn, or its sort.
    prompt: the conversation before it.
    output: not empty.
    references: the messages before it, each a document.
    """

    kind: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    references: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Recordings:
    """The recorded outputs of one file, in its order, over a vocabulary of the tokens that occur in it.

    ids: compact id -> id of the tokenizer; entry 0 is -1, which occurs in no output.
    """

    name: str
    outputs: tuple[Recording, ...]
    ids: tuple[int, ...]


def conversations(path: Path, questions: Path | None = None) -> list[Conversation]:
    """The conversations of a file of JSON lines, gzipped or not.

    Read are: objects with a `prompt` and an `output`; with `messages`, where every message of the role `assistant`
    is a recorded output; and answers to MT-Bench (`question_id`, `choices`), of which the first choice counts, and
    for a question answered several times the last answer.

    Args:
        questions: the questions to such answers; by default the one `question*.jsonl` in the folder above that has
            "redundant" in its name if the answers do.

    Raises:
        Refused: the file cannot be read, holds no recorded output, or one without its question.
    """
    found: dict[str, Conversation] = {}
    turns: dict[str, Sequence[str]] | None = None
    for where, row in objects(path, text_of(path, OPTION), OPTION):
        if "choices" in row:
            if turns is None:
                questions = questions or _questions_beside(path, where)
                turns = _turns(questions)
            found[f"question {row.get('question_id')}"] = _answers(where, row, turns, questions)
        else:
            found[where] = _conversation(where, row)
    if not any(part.kind and part.text for parts in found.values() for part in parts):
        raise Refused(f"{OPTION} {path}: there are no recorded outputs in it")
    return list(found.values())


def _conversation(where: str, row: Mapping[str, Any]) -> Conversation:
    if isinstance(messages := row.get("messages"), list):
        return _talk(_message(f"{where}, message {number}", m) for number, m in enumerate(messages, 1))
    prompt, output = row.get("prompt"), row.get("output")
    if not (isinstance(prompt, str) and isinstance(output, str)):
        raise Refused(f"{where}: give a prompt and an output, messages, or answers to MT-Bench (question_id, choices)")
    return Part(prompt), Part(output, "output")


def _message(where: str, message: Any) -> tuple[str, Part]:
    content = message.get("content", "") if isinstance(message, Mapping) else message
    if not isinstance(message, Mapping) or not isinstance(content, str | None):
        raise Refused(f"{where}: give an object with a role and a content of text")
    role = str(message.get("role", "user"))
    return role, Part(content or "", "reply" if role == "assistant" else None)


def _answers(where: str, row: Mapping[str, Any], turns: Mapping[str, Sequence[str]], questions: Any) -> Conversation:
    number = str(row.get("question_id"))
    try:
        outputs = row["choices"][0]["turns"]
    except (LookupError, TypeError) as e:
        raise Refused(f"{where}: choices[0].turns, the answers, are missing") from e
    if not isinstance(outputs, list) or not all(isinstance(answer, str) for answer in outputs):
        raise Refused(f"{where}: choices[0].turns must be a list of texts")
    if len(turns.get(number, ())) < len(outputs):
        raise Refused(
            f"{where}: question {number} with {len(outputs)} turns is not in {questions}: give --questions FILE"
        )
    messages = []
    for turn, (question, answer) in enumerate(zip(turns[number], outputs, strict=False)):
        kind = TURNS[turn] if turn < len(TURNS) else f"turn {turn + 1}"
        messages += [("user", Part(question)), ("assistant", Part(answer, kind))]
    return _talk(messages)


def _talk(messages: Iterable[tuple[str, Part]]) -> Conversation:
    """Messages as text, `role: content` line by line."""
    parts: list[Part] = []
    for role, part in messages:
        parts += [Part(f"{role}: ", document=False), part, Part("\n", document=False)]
    return tuple(parts)


def _questions_beside(path: Path, where: str) -> Path:
    folder = path.resolve().parent.parent
    found = [f for f in folder.glob("question*.jsonl") if ("redundant" in f.name) == ("redundant" in path.name)]
    if len(found) != 1:
        count = "no" if not found else "more than one"
        raise Refused(f"{where}: {count} file of questions for it (question*.jsonl in {folder}): give --questions FILE")
    return found[0]


def _turns(path: Path) -> dict[str, Sequence[str]]:
    """The turns of every question, by its id."""
    found: dict[str, Sequence[str]] = {}
    for where, row in objects(path, text_of(path, "--questions"), "--questions"):
        turns = row.get("turns")
        if "question_id" not in row or not isinstance(turns, list):
            raise Refused(f"{where}: give an object with question_id and turns")
        found[str(row["question_id"])] = [str(turn) for turn in turns]
    return found


def tokenized(name: str, conversations: Sequence[Conversation], tokenizer: Any) -> Recordings:
    """Every recorded output with its prompt, in compact ids; outputs without tokens are left out.

    Args:
        tokenizer: of transformers; no special tokens are added.
    """
    texts = list(dict.fromkeys(part.text for parts in conversations for part in parts))
    batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
    compact: dict[int, int] = {-1: 0}
    encoded = {
        text: tuple(compact.setdefault(i, len(compact)) for i in ids) for text, ids in zip(texts, batch, strict=True)
    }
    outputs = [output for parts in conversations for output in _recorded(parts, encoded)]
    return Recordings(name, tuple(outputs), tuple(compact))


def _recorded(parts: Conversation, encoded: Mapping[str, tuple[int, ...]]) -> Iterator[Recording]:
    before: list[int] = []
    documents: list[tuple[int, ...]] = []
    for part in parts:
        ids = encoded[part.text]
        if part.kind and ids:
            yield Recording(part.kind, tuple(before), ids, tuple(documents))
        before += ids
        if part.document and ids:
            documents.append(ids)
