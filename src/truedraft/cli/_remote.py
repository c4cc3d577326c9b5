"""A conversation with a server of OpenAI's chat API, streamed by server-sent events."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from typing import Any

from truedraft.cli._conversation import Display
from truedraft.errors import Refused, why

TIMEOUT = 600.0  # seconds without a byte
SETTINGS = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "stop_strings": "stop", "eos_token_id": "stop_token_ids",
    "min_new_tokens": "min_tokens", "max_time": "deadline",
}  # fmt: skip  # fields of GenerationConfig -> those of a request


class RemoteChat:
    """A conversation as `text.chat.Chat` keeps it; a server answers.

    Args:
        url: of the API, as "http://127.0.0.1:8000/v1".
        key: of the server; None where it needs none.
        model: its name; None for the first that the server lists.
        draft: a drafter that the server allows; None for the server's own.
        seed: of the first request; each further one has the next.
        display: drafted tokens are requested while they are shown, which other servers than truedraft's may refuse.

    Attributes:
        messages, documents, settings: see `Chat`.

    Raises:
        Refused: the server cannot be reached, or has no model.
    """

    def __init__(
        self, url: str, key: str | None, model: str | None, draft: str | None, seed: int | None, display: Display
    ):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise Refused(f"--url {url}: give http://HOST:PORT/v1 or https://")
        self.url, self.key, self.draft, self.seed, self.display = url.rstrip("/"), key, draft, seed, display
        self.messages: list[dict[str, str]] = []
        self.documents: list[str] = []
        self.settings: dict[str, Any] = {}
        self._figures: dict[str, Any] = {}
        self.model = model or self._first_model()

    def send(self, text: str, on_text: Callable[[str, bool], None]) -> str:
        """Add a message and the server's answer to the conversation; see `Chat.send`.

        Raises:
            Refused: the server refuses the request, cannot be reached, or breaks off.
            KeyboardInterrupt: Ctrl-C; its `answer` is the text so far. The connection is closed, which ends the answer.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for event in self._events(self._request(messages)):
                self._figures |= {name: event[name] for name in ("usage", "truedraft") if event.get(name)}
                for piece, drafted in _pieces(event):
                    pieces.append(piece)
                    on_text(piece, drafted)
        except KeyboardInterrupt as interrupt:
            vars(interrupt).update(answer="".join(pieces))
            raise
        answer = "".join(pieces)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def described(self) -> Iterator[tuple[str, str]]:
        """The figures of the latest answer, as far as the server gave them.

        Raises:
            Refused: it gave none.
        """
        if not self._figures:
            raise Refused("/stats: the server gave no figures, or there is no answer yet")
        yield "model", self.model
        for figures in self._figures.values():
            yield from ((name.replace("_", " "), str(value)) for name, value in figures.items() if value is not None)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises Refused for a setting that requests have no field for."""
        for name in settings.keys() - SETTINGS.keys() - {"do_sample", "num_return_sequences"}:
            raise Refused(f"--set {name}: a server takes {', '.join(SETTINGS)}; leave it out")

    def _request(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        body |= {SETTINGS[name]: value for name, value in self.settings.items() if name in SETTINGS}
        if not self.settings.get("do_sample"):
            body["temperature"] = 0
        elif self.seed is not None:
            body["seed"] = self.seed
            self.seed += 1
        if self.documents:
            body["references"] = self.documents
        if self.draft is not None:
            body["draft"] = self.draft
        if self.display.show_drafts:
            body["return_tokens"] = True
        return body

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer."""
        self._figures = {}
        ended = False
        with self._open("/chat/completions", body) as response:
            try:
                for line in response:
                    data = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
                    if data == "[DONE]":
                        ended = True
                        break
                    if line.startswith(b"data:"):
                        yield _event(data)
            except (OSError, HTTPException) as e:
                raise Refused(f"the server broke off the answer: {why(e)}") from e
        if not ended:
            raise Refused("the server broke off the answer before its end; /retry sends the message again")

    def _first_model(self) -> str:
        with self._open("/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as e:
                raise Refused(f"--url {self.url}: no list of models as OpenAI's API has it; give MODEL") from e

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The response to a GET, or to a POST of JSON.

        Raises:
            Refused: the server refuses it, or cannot be reached.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        if self.key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as e:
            with e:
                raise Refused(f"the server answers {e.code}: {_message(e.read(1 << 16)) or e.reason}") from e
        except (OSError, HTTPException) as e:
            reason = getattr(e, "reason", e)
            raise Refused(f"--url {self.url}: {why(reason) if isinstance(reason, Exception) else reason}") from e


def _event(data: str) -> dict[str, Any]:
    """A chunk; raises Refused where it is an error, or none."""
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Refused(f"the server sent no JSON: {data[:80]!r}")
    if "error" in found:
        raise Refused(f"the server answers: {_message(data.encode()) or 'an error'}")
    return found


def _pieces(event: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """The texts in a chunk, and whether each was drafted, where its tokens are listed and are all of its text."""
    for choice in event.get("choices") or ():
        content, tokens = (choice.get("delta") or {}).get("content") or "", choice.get("tokens") or ()
        if "".join(token["text"] for token in tokens) == content:
            yield from ((token["text"], bool(token["drafted"])) for token in tokens if token["text"])
        else:
            yield content, False


def _message(data: bytes) -> str:
    """The message of an error in OpenAI's form."""
    try:
        error = json.loads(data)["error"]
        return " ".join(str(error["message"] if isinstance(error, dict) else error).split())
    except (ValueError, LookupError, TypeError):
        return ""
