"""`truedraft chat`: a conversation in the terminal, with a model or with a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from truedraft.cli._conversation import Display, Session
from truedraft.cli._models import accelerated
from truedraft.cli._options import Dtype, Quantize, Threads, check_names
from truedraft.cli._remote import RemoteChat
from truedraft.cli._request import check_seed, check_tokens
from truedraft.cli._settings import FIELDS, Settings
from truedraft.cli._tables import print_folded
from truedraft.cli._text import BOM, console
from truedraft.errors import Refused
from truedraft.packaged import MODEL_HELP

if TYPE_CHECKING:
    from truedraft.accelerated import Accelerated

KEY_VARIABLE = "TRUEDRAFT_API_KEY"
FENCE = "```"
PROMPT, FURTHER = "> ", ". "


def chat(
    model: Annotated[str | None, Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    system: Annotated[str | None, Option(help="A system message.")] = None,
    file: Annotated[list[Path] | None, Option(help="A text that answers may copy from; repeatable.")] = None,
    keep: Annotated[int | None, Option(help="Latest messages in the prompt; by default all.")] = None,
    draft: Annotated[
        str | None, Option(help="A drafter, `name:knob=value`, auto, or none (see `truedraft methods`).")
    ] = None,
    show_drafts: Annotated[bool, Option("--show-drafts", help="Show accepted drafts in green.")] = False,
    plain: Annotated[bool, Option("--plain", help="Continue the whole text, without a chat template.")] = False,
    max_new_tokens: Annotated[int, Option(help="Most new tokens of an answer.")] = FIELDS["max_new_tokens"],
    sample: Annotated[bool, Option("--sample/--greedy", help="Sample, or choose the likeliest token.")] = False,
    temperature: Annotated[float | None, Option(help="Above 1 flattens the distribution, below 1 sharpens it.")] = None,
    top_k: Annotated[int | None, Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Sample among the likeliest tokens of this total mass.")] = None,
    min_p: Annotated[float | None, Option(help="Drop tokens below this share of the likeliest one.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the conversation.")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Another GenerationConfig field; repeatable.")
    ] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    threads: Threads = None,
    url: Annotated[str | None, Option(help="A server of OpenAI's API instead, as http://127.0.0.1:8000/v1.")] = None,
    api_key: Annotated[str | None, Option(help="The key of that server; by default TRUEDRAFT_API_KEY.")] = None,
) -> int:
    """Talk with a model: answers as they come, each that of model.generate. /help lists the commands.

    \f
    Returns the exit code: 2 where standard input is no terminal and a message or command was refused. Raises Refused
    for a bad argument.
    """
    fields = FIELDS | {
        "max_new_tokens": max_new_tokens, "do_sample": sample, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p,
    }  # fmt: skip
    check_seed(seed, sample)
    chosen = _settings(fields, settings or ())
    display = Display(sys.stdin is not None and sys.stdin.isatty(), show_drafts)
    if url is None:
        if model is None:
            raise Refused("MODEL is missing: give nano, a folder or a name on the hub, or a server by --url")
        if api_key is not None:
            raise Refused("--api-key is for a server: leave it out, or give --url")
        check_names(model, dtype, quantize, drafts=[draft or "auto"])
        fast = accelerated(model, dtype, draft or "auto", quantize=quantize, threads=threads)
        session = _local(fast, model, plain, keep, seed, display, chosen)
    else:
        given = {"--plain": plain, "--quantize": quantize, "--threads": threads, "--keep": keep}
        given["--dtype"] = dtype != "auto"
        if local := [option for option, value in given.items() if value]:
            raise Refused(f"{local[0]} is for a model of this process: leave it out, or --url")
        remote = RemoteChat(url, api_key or os.environ.get(KEY_VARIABLE), model, draft, seed, display)
        session = Session(remote, display, chosen, remote.check)
    for path in file or ():
        session.add_document(str(path), "--file")
    if system:
        session.chat.messages = [{"role": "system", "content": system}]
    return converse(session)


def _settings(fields: Mapping[str, Any], more: Sequence[str]) -> Settings:
    """The settings by options.

    Raises:
        Refused: a value or combination is invalid.
    """
    settings = Settings(fields)
    settings.values()
    try:
        for text in more:
            settings = settings.changed(text)
    except Refused as e:
        raise Refused(f"--set {e}") from e
    return settings


def _local(
    fast: Accelerated,
    name: str,
    plain: bool,
    keep: int | None,
    seed: int | None,
    display: Display,
    settings: Settings,
) -> Session:
    """A session with a model of this process.

    Raises:
        Refused: the model has no chat template, and none was renounced; or it is an encoder-decoder.
    """
    import torch

    from truedraft.text.chat import Chat, Continuation

    if fast.target.reads_sources:
        raise Refused(f"MODEL {name!r} is an encoder-decoder: use `truedraft correct`, `translate` or `generate`")
    if not plain and not getattr(fast.tokenizer, "chat_template", None):
        raise Refused(f"MODEL {name!r} has no chat template: give a model for chats, or --plain to continue a text")
    if seed is not None:
        torch.manual_seed(seed)
    conversation = (Continuation if plain else Chat)(fast, keep=keep)
    session = Session(conversation, display, settings, lambda given: check_tokens(given, fast.target.vocabulary))
    if not fast.drafter.takes_references:
        session.refuses_files = "this drafter copies from no texts; start with --draft auto"
    return session


def converse(session: Session) -> int:
    """Read messages and commands, and answer them, up to the end of the input; returns the exit code.

    Raises:
        Refused: standard input is no text in UTF-8.
        KeyboardInterrupt: Ctrl-C where standard input is no terminal.
    """
    terminal = session.display.terminal
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then has line editing and a history
        print_folded(console(stderr=True), "/help lists the commands; Ctrl-D ends.", "dim")
    going = True
    while going:
        try:
            text = read_message(terminal)
            if text is None:
                break
            going = session.handle(text)
        except KeyboardInterrupt:
            if not terminal:
                raise
            print()
    return 2 if session.failed and not terminal else 0


def read_message(terminal: bool) -> str | None:
    """The next message, which may have several lines; None at the end of the input.

    Raises:
        Refused: it is no text in UTF-8.
        KeyboardInterrupt: Ctrl-C, which drops the message.
    """
    text = ""
    while True:
        try:
            line = _read_line((FURTHER if text else PROMPT) if terminal else "").removeprefix(BOM)
        except EOFError:
            if terminal:
                print()
            return text or None
        except UnicodeDecodeError as e:
            raise Refused("standard input is not UTF-8 text") from e
        text += line
        if text.count(FENCE) % 2:
            text += "\n"
        elif text.endswith("\\"):
            text = text[:-1] + "\n"
        else:
            return text


def _read_line(prompt: str) -> str:
    """A line of standard input; the prompt goes to standard error where standard output is no terminal."""
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()
