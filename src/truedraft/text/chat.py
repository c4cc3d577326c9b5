"""A conversation with a model; its drafters may copy from all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from truedraft.accelerated import Accelerated
from truedraft.errors import Refused
from truedraft.stats import Pass
from truedraft.text.pieces import Pieces, whole_text
from truedraft.text.templates import render, template_of

OnText = Callable[[str, bool], None]  # called with a piece of text, and whether it was drafted


class Chat:
    """A sequence of messages, formatted by the tokenizer's chat template.

    Drafters copy from the prompt in any case; documents, and messages that the prompt no longer contains, are passed as
    references, so that answers which repeat or edit them are drafted from them too.

    Args:
        fast: an accelerated model with a tokenizer.
        system: a system message at the beginning.
        documents: texts that answers may copy from, for example the file being edited or retrieved pages.
        keep: number of latest messages in the prompt, the system message not counted; None for all.
        **settings: of every call of `generate`, such as `max_new_tokens`.

    Attributes:
        messages: the whole conversation, in the format of chat templates.
        documents, settings: as above; may be changed between calls.

    Raises:
        Refused: there is no tokenizer or no chat template, or `keep` is not positive.
    """

    def __init__(
        self,
        fast: Accelerated,
        system: str | None = None,
        documents: Sequence[str] = (),
        keep: int | None = None,
        **settings: Any,
    ):
        if fast.tokenizer is None:
            raise Refused("a chat is text, and there is no tokenizer: give one to accelerate()")
        if keep is not None and keep < 1:
            raise Refused(f"keep={keep}: the prompt holds at least the latest message")
        self.fast, self.documents, self.keep, self.settings = fast, list(documents), keep, settings
        self.tokenizer: Any = fast.tokenizer
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._check()

    def send(self, text: str, on_text: OnText | None = None, **settings: Any) -> str:
        """Add a message and the model's answer to the conversation, and return the answer.

        Args:
            on_text: called with the pieces of the answer as they come, in whole characters, and whether each was
                drafted; together they are the answer.
            **settings: of `generate`, for this call.

        Raises:
            Refused: a setting that `generate` cannot honour.
            KeyboardInterrupt: Ctrl-C; see `generate`. Once decoding has begun, the exception's `answer` is the text so
                far.
            In either case the conversation is left as it was.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        first = [m for m in messages[:1] if m["role"] == "system"]
        rest = messages[len(first) :]
        shown = rest if self.keep is None else rest[-self.keep :]
        ids = torch.tensor([self._prompt([*first, *shown])], device=self.fast.model.device)
        documents = [*self.documents, *(m["content"] for m in rest[: len(rest) - len(shown)])]
        given: dict[str, Any] = {"references": documents} if documents and self.fast.drafter.takes_references else {}
        pieces = Pieces(self.tokenizer)
        if on_text is not None:
            given["on_pass"] = _streaming(pieces, on_text, settings.pop("on_pass", None))
        try:
            out = self.fast.generate(ids, attention_mask=torch.ones_like(ids), **{**self.settings, **settings, **given})
        except KeyboardInterrupt as interrupt:
            if (partial := getattr(interrupt, "output", None)) is not None:
                vars(interrupt).update(answer=self._text(partial, ids))
            raise
        if on_text is not None:
            on_text(pieces.end(), False)
        answer = self._text(out, ids)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def described(self) -> Iterator[tuple[str, str]]:
        """The figures of the latest answer as text, each with a label.

        Raises:
            Refused: there is none.
        """
        return self.fast.report().described()

    def _check(self) -> None:
        template_of(self.tokenizer)

    def _prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The token ids of a prompt, up to the beginning of an answer."""
        return render(self.tokenizer, messages)

    def _text(self, out: Any, prompt: torch.Tensor) -> str:
        sequences: torch.Tensor = out if isinstance(out, torch.Tensor) else out.sequences
        return whole_text(self.tokenizer, sequences[0, prompt.shape[1] :].tolist())


class Continuation(Chat):
    """A text that the model continues, for models without a chat template; otherwise as `Chat`.

    The prompt is the text so far: an answer follows its message at once, and the next message begins a line.
    """

    def _check(self) -> None:
        pass

    def _prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "system":
            raise Refused("system: a continued text has no roles; begin the first message with it")
        texts = (m["content"] + ("\n" if m["role"] == "assistant" else "") for m in messages)
        ids = list(self.tokenizer("".join(texts))["input_ids"])
        if not ids:
            raise Refused("the message has no token in this model's tokenizer: give some text")
        return ids


def _streaming(pieces: Pieces, on_text: OnText, then: Callable[[Pass], None] | None) -> Callable[[Pass], None]:
    """An `on_pass` that passes on the text of accepted drafts and of the model's own tokens, and calls `then`."""

    def on_pass(done: Pass) -> None:
        for emission in (e for e in done.emitted if e.row == 0):  # num_return_sequences may add others
            for ids, drafted in (
                (emission.tokens[: emission.drafted], True),
                (emission.tokens[emission.drafted :], False),
            ):
                if piece := pieces.feed(ids):
                    on_text(piece, drafted)
        if then is not None:
            then(done)

    return on_pass
