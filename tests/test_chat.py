"""`truedraft chat`: the text of `model.generate`, its commands, a terminal of its own, and servers."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import truedraft
from truedraft import Refused, assets
from truedraft.cli import main
from truedraft.cli._conversation import COMMANDS, Display, Session
from truedraft.cli._remote import RemoteChat
from truedraft.cli._settings import FIELDS, Settings
from truedraft.loading import load
from truedraft.text.chat import Chat, Continuation

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TOKENS = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured curves do not land in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def nano() -> truedraft.Accelerated:
    model, tokenizer = load("nano")
    tokenizer.chat_template = TEMPLATE
    return truedraft.accelerate(model, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded nano with a chat template."""
    copy = tmp_path_factory.mktemp("chat") / "nano"
    shutil.copytree(assets.path("nano"), copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return str(copy)


def session_of(chat: Any, terminal: bool = False, **more: Any) -> Session:
    fields = FIELDS | {"max_new_tokens": TOKENS}
    return Session(chat, Display(terminal, show_drafts=False), Settings(fields), lambda _: None, **more)


def plain(fast: truedraft.Accelerated, prompt: str, special: bool = False, **settings: Any) -> str:
    """The continuation by `model.generate`; `special` begins the prompt as a text, not as a template."""
    tokenizer: Any = fast.tokenizer
    ids = tokenizer(prompt, add_special_tokens=special, return_tensors="pt")["input_ids"]
    given = {"max_new_tokens": TOKENS, "do_sample": False} | settings
    out: Any = fast.model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_piped_conversation_prints_the_answers_of_generate(
    folder: str, nano: truedraft.Accelerated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one day\\\na cat\nthe end\n//x\n```\ny\n```\n"))
    assert main(["chat", folder, "--max-new-tokens", str(TOKENS), "--system", "tell", "--show-drafts"]) == 0
    out, err = capsys.readouterr()
    prompt, expected = "system: tell\n", []
    for text in ("one day\na cat", "the end", "/x", "```\ny\n```"):
        expected.append(plain(nano, f"{prompt}user: {text}\nassistant:"))
        prompt += f"user: {text}\nassistant: {expected[-1]}\n"
    assert out == "".join(answer + "\n" for answer in expected) and err == ""


def test_sampling_repeats_with_its_seed(
    folder: str, nano: truedraft.Accelerated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one day\n"))
    args = ["--sample", "--temperature", "0.9", "--seed", "3", "--set", "min_new_tokens=9", "--draft", "none"]
    assert main(["chat", folder, "--max-new-tokens", str(TOKENS), *args]) == 0
    torch.manual_seed(3)
    settings = dict(do_sample=True, temperature=0.9, min_new_tokens=9)
    assert capsys.readouterr().out == plain(nano, "user: one day\nassistant:", **settings) + "\n"


def test_a_model_without_a_template_continues_text(
    nano: truedraft.Accelerated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "nano"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "'nano' has no chat template" in err and "--plain" in err
    chat = Continuation(nano, max_new_tokens=TOKENS, do_sample=False)
    first = chat.send("one day, a")
    assert first == plain(nano, "one day, a", special=True)
    assert chat.send("she") == plain(nano, f"one day, a{first}\nshe", special=True)
    with pytest.raises(Refused, match="no roles"):
        Continuation(nano, system="Be brief.").send("x")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "MODEL is missing"),
        (["nano", "--api-key", "x"], "--api-key is for a server"),
        (["--url", "http://127.0.0.1:9", "--plain"], "--plain is for a model of this process"),
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype is for a model of this process"),
        (["--url", "file:///etc/passwd"], "--url file:///etc/passwd: give http"),
        (["--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9: Connection refused"),
        (["nano", "--temperature", "0.5"], "--temperature needs --sample"),
        (["nano", "--seed", "1"], "--seed 1 needs --sample"),
        (["nano", "--set", "colour=1"], "--set colour: GenerationConfig has no such field"),
        (["nano-gec"], "is an encoder-decoder"),
        (["nano", "--plain", "--set", "suppress_tokens=[9999]"], "suppress_tokens 9999: this model has 4,096 tokens"),
        (["nano", "--plain", "--keep", "0"], "keep=0"),
        (["nano", "--plain", "--file", "/nowhere"], "--file /nowhere: No such file"),
    ],
)
def test_bad_arguments_are_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err, err


class Forced(LogitsProcessor):
    """Leaves one token possible at each position."""

    def __init__(self, start: int, ids: list[int]):
        self.start, self.ids = start, ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[min(input_ids.shape[1] - self.start, len(self.ids) - 1)]] = 0
        return forced


def test_streamed_pieces_are_whole_characters(nano: truedraft.Accelerated) -> None:
    tokenizer: Any = nano.tokenizer
    text = " snow ☃ and 🙂 né"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text.split()) + 4  # characters of several tokens
    start = len(tokenizer("user: x\nassistant:", add_special_tokens=False)["input_ids"])
    pieces: list[str] = []
    settings: dict[str, Any] = dict(max_new_tokens=len(ids), do_sample=False, logits_processor=[Forced(start, ids)])
    answer = Chat(nano).send("x", lambda piece, drafted: pieces.append(piece), **settings)
    assert "".join(pieces) == answer == text and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_drafted_pieces_are_those_of_accepted_drafts(nano: truedraft.Accelerated) -> None:
    fast = truedraft.accelerate(nano.model, nano.tokenizer, draft="prompt-lookup", control="fixed")
    pieces: list[tuple[str, bool]] = []
    passes: list[Any] = []
    chat = Chat(fast, max_new_tokens=40, do_sample=False)
    answer = chat.send("a cat a cat a cat a cat", lambda *piece: pieces.append(piece), on_pass=passes.append)
    assert "".join(text for text, _ in pieces) == answer
    drafted = [e.tokens[: e.drafted] for done in passes for e in done.emitted if e.drafted]
    assert drafted and sum(mark for _, mark in pieces) == len(drafted)
    assert dict(chat.described())["tokens"].startswith("40 in ")


class Scripted:
    """A conversation that answers "<number>: <message>"; `interrupt` raises Ctrl-C after this many pieces."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.documents: list[str] = []
        self.settings: dict[str, Any] = {}
        self.interrupt: int | None = None
        self.answers = 0

    def send(self, text: str, on_text: Callable[[str, bool], None]) -> str:
        self.answers += 1
        pieces = [(f"{self.answers}: ", False), (text, True)]
        for count, piece in enumerate(pieces):
            if count == self.interrupt:
                error = KeyboardInterrupt()
                vars(error).update(answer="".join(text for text, _ in pieces[:count]))
                raise error
            on_text(*piece)
        answer = "".join(text for text, _ in pieces)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return answer

    def described(self) -> list[tuple[str, str]]:
        return [("answers", str(self.answers))]


@pytest.fixture
def session() -> Session:
    return session_of(Scripted(), terminal=True)


def run(session: Session, *texts: str) -> None:
    for text in texts:
        assert session.handle(text)


def test_history_can_be_changed(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    run(session, "a", "/retry", "/system Be brief.", "b", "/system", "/reset", "/retry", "/stats")
    out, err = capsys.readouterr()
    assert out == "1: a\n2: a\n3: b\n" and session.chat.messages == []
    assert "error: /retry: there is no message" in err and "answers  3" in err
    run(session, "/system Be brief.", "c", "/retry")
    assert [m["content"] for m in session.chat.messages] == ["Be brief.", "c", "5: c"]
    assert not session.handle("/exit")


@pytest.mark.parametrize("pieces", [0, 1])
def test_ctrl_c_keeps_the_partial_answer(session: Session, pieces: int, capsys: pytest.CaptureFixture[str]) -> None:
    run(session, "a")
    session.chat.interrupt = pieces  # type: ignore[attr-defined]
    run(session, "b")
    expected = ["a", "1: a", *(["b", "2: "] if pieces else [])]
    assert [m["content"] for m in session.chat.messages] == expected
    run(session, "/retry")
    kept = expected[: 2 if pieces else 0]
    assert [m["content"] for m in session.chat.messages] == [*kept, *((["b", "3: "]) if pieces else expected)]
    session.display.terminal = False
    with pytest.raises(KeyboardInterrupt):
        session.handle("c")


def test_conversations_are_saved_and_loaded(session: Session, tmp_path: Path) -> None:
    run(session, "a ☃\nb", f"/save {tmp_path}/x.jsonl", f"/save {tmp_path}/x.md")
    messages = list(session.chat.messages)
    assert (tmp_path / "x.md").read_text() == "## user\n\na ☃\nb\n\n## assistant\n\n1: a ☃\nb\n"
    run(session, "/reset", f"/load {tmp_path}/x.jsonl")
    assert session.chat.messages == messages and not session.failed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.jsonl", "x.md"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/frob", "/frob is no command: there are /file, /system"),
        ("/", "/ is no command"),
        ("/save x.txt", "/save x.txt: give a path that ends in .jsonl or .md"),
        ("/save", "/save PATH: give a path"),
        ("/save /nowhere/x.md", "the conversation is empty"),
        ("/load x.md", "/load x.md: give a path that ends in .jsonl"),
        ("/load /nowhere.jsonl", "/nowhere.jsonl cannot be read: No such file"),
        ("/file /nowhere", "/file /nowhere: No such file"),
        ("/reset now", "/reset now: this command has no argument"),
        ("/set colour=1", "/set colour: GenerationConfig has no such field"),
        ("/set temperature", "/set temperature: write KEY=VALUE"),
        ("/set temperature=0.5", "/set temperature needs do_sample=True"),
        ("/set temperature=hot", "/set temperature=hot: give a number"),
        ("/set max_new_tokens=0", "/set max_new_tokens 0 must be at least 1"),
        ("/set max_new_tokens=1.5", "max_new_tokens=1.5: give an integer"),
        ("/set do_sample=1", "do_sample=1: give True or False"),
        ("/set num_return_sequences=2", "one answer to each message"),
    ],
)
def test_bad_commands_change_nothing(
    session: Session, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = session.chat.settings
    run(session, text)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert session.chat.settings == before and session.failed and session.chat.answers == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line", ["{}", "[", '{"role": "user", "content": 1}', '{"role": "tool", "content": "x"}', "[" * 9999]
)
def test_damaged_conversations_are_refused(
    session: Session, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text('{"role": "user", "content": "a"}\n' + line + "\n")
    run(session, "a", f"/load {tmp_path}/x.jsonl")
    assert "line 2" in capsys.readouterr().err and len(session.chat.messages) == 2


def test_settings_are_set_listed_and_reset(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    run(session, "/set do_sample=True", "/set temperature=0.5", "/set top_h=0.9", "/set stop_strings=END", "/set")
    found = session.chat.settings
    assert (found["temperature"], found["top_h"], found["stop_strings"]) == (0.5, 0.9, ["END"])
    assert "temperature=0.5" in capsys.readouterr().err
    run(session, "/set temperature=None", "/set top_h=None", "/set max_new_tokens=None", "/set eos_token_id=[1, 2]")
    found = session.chat.settings
    assert "temperature" not in found and "top_h" not in found and not session.failed
    assert (found["max_new_tokens"], found["eos_token_id"]) == (FIELDS["max_new_tokens"], [1, 2])


def test_files_are_references(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text {name}")
        run(session, f"/file {tmp_path / name}")
    (tmp_path / "a").write_text("text a 2")
    run(session, f"/file {tmp_path / 'a'}")
    assert session.chat.documents == ["text a 2", "text b"]
    run(session, "/reset")
    assert session.chat.documents == [] and not session.failed
    run(session_of(Scripted(), refuses_files="nothing is copied"), "/file x")
    assert "error: /file: nothing is copied" in capsys.readouterr().err


def test_drafts_are_coloured_and_control_characters_shown(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(session, "a", "/drafts", "b\x1b[2J\x9b", "/drafts", "c")
    out = capsys.readouterr().out
    assert out == "1: a\n2: \x1b[1;32mb␛[2J\N{REPLACEMENT CHARACTER}\x1b[0m\n3: c\n"


@pytest.mark.parametrize("width", [24, 40, 120])
def test_help_fits_any_width(session: Session, width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run(session, "/help")
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= width and all(any(f"/{name}" in line for line in lines) for name in COMMANDS)


class Terminal:
    """A program in a pseudo-terminal of its own."""

    def __init__(self, args: list[str], columns: int):
        self.pid, self.fd = pty.fork()
        if not self.pid:
            environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
            environment |= {"TERM": "xterm"}
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored in the background of a shell, and inherited
            os.execve(sys.executable, [sys.executable, "-m", "truedraft", *args], environment)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What is shown up to a match, which is consumed; escape sequences are left out."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            ready, _, _ = select.select([self.fd], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {pattern!r} in {self.text!r}"
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                data = b""
            assert data, f"ended without {pattern!r}: {self.text!r}"
            self.text += re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\r", "", data.decode("utf-8", "replace"))
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def ended(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(folder: str) -> Iterator[Terminal]:
    settings = ["--max-new-tokens", "1900", "--set", "min_new_tokens=1900", "--draft", "none", "--threads", "1"]
    program = Terminal(["chat", folder, *settings], columns=30)
    yield program
    os.close(program.fd)


def test_a_terminal(terminal: Terminal, nano: truedraft.Accelerated, tmp_path: Path) -> None:
    """Ctrl-C at the prompt and in an answer, line editing, history, several lines, a narrow screen, the end."""
    terminal.until("> ")
    terminal.type("nonsense")
    terminal.until("nonsense")
    time.sleep(0.2)  # readline waits for input again: a signal just before that is noticed at the next key
    terminal.type("\x03")
    terminal.until("> ")
    terminal.type("onf\x7fe dat\x1b[D\x04y\n")  # delete backwards; left, delete forwards
    terminal.until("lily")
    terminal.type("\x03")
    terminal.until("\n> ")
    terminal.type("/help\n")
    shown = terminal.until(r"the line\n> ")
    assert max(map(len, shown.splitlines())) <= 30
    terminal.type("/set min_new_tokens=None\n")
    terminal.until("\n> ")
    terminal.type("/set max_new_tokens=5\n")
    terminal.until("max_new_tokens=5\n[^>]+\n> ")
    terminal.type("two\\\n")
    terminal.until(r"\n\. ")
    terminal.type("lines\n")
    terminal.until("lines\n[^>]+\n> ")
    terminal.type("\x1b[A\n")  # the latest line again
    terminal.until("lines\n[^>]+\n> ")
    terminal.type(f"/save {tmp_path}/x.jsonl\n")
    terminal.until("jsonl\n> ")
    terminal.type("\x04")
    assert terminal.ended() == 0
    messages = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [m["content"] for m in messages[::2]] == ["one day", "two\nlines", "lines"]
    partial = messages[1]["content"]
    most = len(nano.tokenizer(partial)["input_ids"])  # type: ignore[misc]
    expected = plain(nano, "user: one day\nassistant:", max_new_tokens=most, min_new_tokens=most)
    assert len(expected) > 4 and (expected.startswith(partial) or partial.startswith(expected))


Reply = Callable[[dict[str, Any]], Iterator[Any]]


class Server(ThreadingHTTPServer):
    """A server of chat completions: `reply` yields the chunks, or text to be sent as it is."""

    def __init__(self, reply: Reply, status: int = 200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.status = reply, status
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer(b'{"data": [{"id": "theirs"}]}', 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        chunks = self.server.reply(body)
        lines = (c if isinstance(c, str) else f"data: {json.dumps(c)}\n\n" for c in chunks)
        self.answer("".join(lines).encode(), self.server.status)

    def answer(self, data: bytes, status: int) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(reply: Reply, status: int = 200) -> Server:
        servers.append(Server(reply, status))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **choice}]}


def counting(body: dict[str, Any]) -> Iterator[Any]:
    yield chunk(delta={"role": "assistant", "content": ""})
    if body.get("return_tokens"):
        tokens = [{"id": 1, "text": "né", "drafted": True}, {"id": 2, "text": "!", "drafted": False}]
        yield chunk(delta={"content": "né!"}, tokens=tokens)
    else:
        yield chunk(delta={"content": "né"})
        yield ": a comment\n\n"
        yield chunk(delta={"content": "!"}, finish_reason="stop")
    yield {"choices": [], "usage": {"completion_tokens": 2}, "truedraft": {"passes": 1}}
    yield "data: [DONE]\n\n"


def failing(*chunks: Any) -> Reply:
    return lambda body: iter(chunks)


def remote(server: Server, **given: Any) -> tuple[Session, RemoteChat]:
    display = Display(terminal=True, show_drafts=False)
    chosen = {"key": None, "model": None, "draft": None, "seed": None} | given
    chat = RemoteChat(server.url, chosen["key"], chosen["model"], chosen["draft"], chosen["seed"], display)
    return Session(chat, display, Settings(FIELDS), chat.check), chat


def test_a_server_answers(serve: Any, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(counting)
    session, chat = remote(server, key="secret", seed=7)
    (tmp_path / "a").write_text("text a")
    run(
        session, "a", "/drafts", "/set do_sample=True", "/set top_p=0.5", "/set stop_strings=END", f"/file {tmp_path}/a"
    )
    run(session, "b", "c", "/stats", "/set top_h=0.5")
    out, err = capsys.readouterr()
    assert out == "né!\n" * 3 and server.keys == ["Bearer secret"] * 3
    assert "completion tokens  2" in err and "passes             1" in err and "/set top_h: a server takes" in err
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "né!"}]
    first, second, third = server.bodies
    common = {"model": "theirs", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 512}
    assert first == {**common, "messages": history[:1], "temperature": 0}
    assert second == {
        **common, "messages": [*history, {"role": "user", "content": "b"}], "seed": 7, "top_p": 0.5, "stop": ["END"],
        "references": ["text a"], "return_tokens": True,
    }  # fmt: skip
    assert third["seed"] == 8 and len(chat.messages) == 6


def test_drafts_of_a_server_are_coloured(serve: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    session, _ = remote(serve(counting))
    run(session, "/drafts", "a")
    assert capsys.readouterr().out == "\x1b[1;32mné\x1b[0m!\n"
    held = [{"id": 1, "text": "n", "drafted": True}]  # whose text is not all of the chunk's
    session, _ = remote(serve(failing(chunk(delta={"content": "né"}, tokens=held), "data: [DONE]\n\n")))
    run(session, "/drafts", "a")
    assert capsys.readouterr().out == "né\n"


def test_a_piped_conversation_with_a_server(serve: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(counting)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n/frob\n"))
    monkeypatch.setenv("TRUEDRAFT_API_KEY", "secret")
    args = ["chat", "mine", "--url", server.url, "--draft", "suffix", "--show-drafts", "--system", "Be brief."]
    assert main(args) == 2
    assert capsys.readouterr().out == "né!\n" and server.keys == ["Bearer secret"]
    (body,) = server.bodies
    assert (body["model"], body["draft"], body["messages"][0]["role"]) == ("mine", "suffix", "system")


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        (failing('{"error": {"message": "no such model", "param": "model"}}'), 404, "answers 404: no such model"),
        (failing("<html>"), 502, "answers 502: Bad Gateway"),
        (
            failing(chunk(delta={"content": "a"}), {"error": {"message": "out of memory"}}),
            200,
            "answers: out of memory",
        ),
        (failing(chunk(delta={"content": "a"})), 200, "broke off the answer before its end"),
        (failing("data: {]\n\n"), 200, "sent no JSON"),
    ],
)
def test_failures_of_a_server_are_one_sentence(
    serve: Any, reply: Reply, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    session, chat = remote(serve(reply, status))
    run(session, "x")
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and chat.messages == []


def test_ctrl_c_ends_a_servers_answer(serve: Any, monkeypatch: Any) -> None:
    session, chat = remote(serve(counting))
    pieces: list[str] = []

    def on_text(piece: str, drafted: bool) -> None:
        if pieces:
            raise KeyboardInterrupt
        pieces.append(piece)

    send = chat.send
    monkeypatch.setattr(chat, "send", lambda text, _: send(text, on_text))
    run(session, "a")
    assert [m["content"] for m in chat.messages] == ["a", "né!"] and pieces == ["né"]
