"""A conversation in a terminal: its commands, and answers printed as they come.

Nothing here knows whether a model of this process answers or a server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from truedraft.cli._settings import FIXED, Settings, as_fields
from truedraft.cli._tables import print_folded
from truedraft.cli._text import console, read, waiting
from truedraft.errors import Refused, why
from truedraft.files import read_lines, write_whole
from truedraft.layout import labelled

DRAFTED = "bold green"
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # a terminal would obey these; their pictures are shown


class Conversation(Protocol):
    """What the commands need of a conversation; see `text.chat.Chat`."""

    messages: list[dict[str, str]]
    documents: list[str]
    settings: dict[str, Any]

    def send(self, text: str, on_text: Callable[[str, bool], None]) -> str: ...

    def described(self) -> Iterable[tuple[str, str]]: ...


@dataclass
class Display:
    """What is shown. terminal: whether a person types; show_drafts: whether accepted drafts have a colour."""

    terminal: bool
    show_drafts: bool


@dataclass
class Session:
    """A conversation and the commands on it.

    display: what is shown.
    settings: of every answer.
    check: raises Refused for settings that the model or server cannot honour.
    refuses_files: why files are of no use here; empty where answers may copy from them.
    failed: whether a message or command was refused.
    """

    chat: Conversation
    display: Display
    settings: Settings
    check: Callable[[Mapping[str, Any]], None]
    refuses_files: str = ""
    failed: bool = False
    _documents: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._configure(self.settings)

    def handle(self, text: str) -> bool:
        """Answer a message or run a command; whether the conversation goes on.

        Raises:
            KeyboardInterrupt: Ctrl-C where nobody sits at the terminal.
        """
        try:
            if text.startswith("/") and not text.startswith("//"):
                return self._command(text)
            if text.strip():
                self._answer(text.removeprefix("/") if text.startswith("//") else text)
        except (Refused, OSError, ValueError) as e:
            self.failed = True
            print(f"error: {' '.join(why(e).split())}", file=sys.stderr)
        return True

    def _command(self, text: str) -> bool:
        name, _, rest = text[1:].partition(" ")
        if name == "exit":
            return False
        if name not in COMMANDS:
            raise Refused(f"/{name} is no command: there are {', '.join('/' + known for known in COMMANDS)}")
        COMMANDS[name].run(self, rest.strip())
        return True

    def _answer(self, text: str) -> None:
        """Send a message and print its answer; what Ctrl-C leaves of it stays in the conversation."""
        out, printed = console(), False
        with waiting("reading the conversation") as show:

            def on_text(piece: str, drafted: bool) -> None:
                nonlocal printed
                show(None)
                printed = True
                style = DRAFTED if drafted and self.display.show_drafts else None
                out.out(piece.translate(CONTROLS) if out.is_terminal else piece, style=style, end="", highlight=False)

            try:
                self.chat.send(text, on_text)
            except KeyboardInterrupt as interrupt:
                if not self.display.terminal:
                    raise
                answer = getattr(interrupt, "answer", "")
                if answer:
                    self.chat.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            finally:
                if printed:
                    out.out("")

    def _configure(self, settings: Settings) -> None:
        """Use settings, or keep the earlier ones where they are refused."""
        values = settings.values()
        self.check(values)
        self.settings, self.chat.settings = settings, values

    def add_document(self, path: str, option: str) -> None:
        """Let answers copy from a file.

        Raises:
            Refused: it cannot be read, or nothing is copied here.
        """
        if self.refuses_files:
            raise Refused(f"{option}: {self.refuses_files}")
        self._documents[path] = read(Path(path).expanduser(), option)
        self.chat.documents = [*self._documents.values()]

    def toggle_drafts(self, rest: str) -> None:
        _check_alone("drafts", rest)
        self.display.show_drafts = not self.display.show_drafts
        _print(f"accepted drafts are {'green' if self.display.show_drafts else 'not marked'}")

    def add_file(self, rest: str) -> None:
        if rest:
            self.add_document(rest, "/file")
        _print(f"answers may copy from: {', '.join(self._documents) or 'no file'}")

    def save(self, rest: str) -> None:
        path = _path("save", rest)
        if not self.chat.messages:
            raise Refused("/save: the conversation is empty")
        write_whole(path, (as_lines if path.suffix == ".jsonl" else as_markdown)(self.chat.messages))
        _print(f"{len(self.chat.messages)} messages in {path}")

    def load(self, rest: str) -> None:
        path = _path("load", rest, (".jsonl",))
        self.chat.messages = from_lines(path)
        _print(f"{len(self.chat.messages)} messages from {path}")

    def reset(self, rest: str) -> None:
        _check_alone("reset", rest)
        self.chat.messages = [m for m in self.chat.messages[:1] if m["role"] == "system"]
        self._documents.clear()
        self.chat.documents = []
        _print("a new conversation")

    def set_system(self, rest: str) -> None:
        others = [m for m in self.chat.messages if m["role"] != "system"]
        self.chat.messages = [*([{"role": "system", "content": rest}] if rest else []), *others]
        _print("the system message is set" if rest else "there is no system message")

    def set(self, rest: str) -> None:
        if rest:
            try:
                self._configure(self.settings.changed(rest))
            except Refused as e:
                raise Refused(f"/set {as_fields(str(e))}") from e
        for name, setting in self.chat.settings.items():
            if name not in FIXED:
                _print(f"{name}={setting!r}")

    def describe(self, rest: str) -> None:
        _check_alone("stats", rest)
        _print(labelled(self.chat.described(), console().width), fold_lines=False)

    def retry(self, rest: str) -> None:
        _check_alone("retry", rest)
        messages = self.chat.messages
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
        if last is None:
            raise Refused("/retry: there is no message to answer again")
        self.chat.messages = messages[:last]
        try:
            self._answer(messages[last]["content"])
        finally:
            if len(self.chat.messages) == last:
                self.chat.messages = messages

    def help(self, rest: str) -> None:
        _check_alone("help", rest)
        rows = [*((f"/{name} {c.argument}".rstrip(), c.help) for name, c in COMMANDS.items()), *KEYS]
        _print(labelled(rows, console().width), fold_lines=False)


@dataclass(frozen=True)
class Command:
    """A command: what runs it, the name of its argument, and its help."""

    run: Callable[[Session, str], None]
    argument: str
    help: str


COMMANDS = {
    "file": Command(Session.add_file, "PATH", "a text that answers may copy from; it is not in the prompt"),
    "system": Command(Session.set_system, "TEXT", "set the system message; without a text, remove it"),
    "set": Command(Session.set, "KEY=VALUE", "a field of GenerationConfig, as temperature=0.7; alone, list them"),
    "drafts": Command(Session.toggle_drafts, "", "show accepted drafts in green, or stop that"),
    "stats": Command(Session.describe, "", "the figures of the latest answer"),
    "retry": Command(Session.retry, "", "answer the latest message again"),
    "save": Command(Session.save, "PATH", "write the conversation: .jsonl (for /load) or .md"),
    "load": Command(Session.load, "PATH", "replace the conversation by a saved one (.jsonl)"),
    "reset": Command(Session.reset, "", "forget the messages and files; system message and settings stay"),
    "help": Command(Session.help, "", "this list"),
    "exit": Command(lambda session, rest: None, "", "end, as Ctrl-D"),
}
KEYS = (
    ("\\", "at the end of a line: the message goes on in the next line"),
    ("```", "begins a block that the next ``` ends; line ends within it belong to the message"),
    ("//", "begins a message with a slash"),
    ("Ctrl-C", "stops an answer, which stays as far as it came; at the prompt, drops the line"),
)


def as_lines(messages: Iterable[Mapping[str, str]]) -> str:
    """Messages as JSON lines."""
    return "".join(json.dumps(dict(message), ensure_ascii=False) + "\n" for message in messages)


def as_markdown(messages: Iterable[Mapping[str, str]]) -> str:
    """Messages as Markdown, a heading for each."""
    return "\n".join(f"## {message['role']}\n\n{message['content'].rstrip()}\n" for message in messages)


def from_lines(path: Path) -> list[dict[str, str]]:
    """Messages from JSON lines.

    Raises:
        Refused: the file cannot be read, or a line is no message.
    """
    messages = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        valid = isinstance(found, dict) and found.keys() == {"role", "content"}
        if not valid or not all(isinstance(value, str) for value in found.values()):
            raise Refused(f"/load {path}: line {number} is no object of role and content, as /save writes them")
        if found["role"] not in ("system", "user", "assistant"):
            raise Refused(f"/load {path}: line {number} has role {found['role']!r}; there are system, user, assistant")
        messages.append(found)
    if not messages:
        raise Refused(f"/load {path}: the file has no messages")
    return messages


def _path(command: str, text: str, suffixes: tuple[str, ...] = (".jsonl", ".md")) -> Path:
    path = Path(text).expanduser()
    if not text or path.suffix not in suffixes:
        raise Refused(f"/{command} {text or 'PATH'}: give a path that ends in {' or '.join(suffixes)}")
    return path


def _check_alone(command: str, rest: str) -> None:
    if rest:
        raise Refused(f"/{command} {rest}: this command has no argument")


def _print(text: str, fold_lines: bool = True) -> None:
    """A note of a command, on standard error: standard output has the answers."""
    out = console(stderr=True)
    if fold_lines:
        print_folded(out, text, "dim")
    else:
        out.print(text, style="dim", soft_wrap=True)
