"""A conversation with a model; its drafters may copy from all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from truedraft.accelerated import Accelerated
from truedraft.errors import Refused


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
        documents: as above; may be changed between calls.

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
        if not fast.tokenizer.chat_template:
            raise Refused("the tokenizer of this model has no chat template: set tokenizer.chat_template")
        if keep is not None and keep < 1:
            raise Refused(f"keep={keep}: the prompt holds at least the latest message")
        self.fast, self.documents, self.keep, self.settings = fast, list(documents), keep, settings
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def send(self, text: str, **settings: Any) -> str:
        """Add a message and the model's answer to the conversation, and return the answer.

        settings: of `generate`, for this call.

        Raises:
            Refused: a setting that `generate` cannot honour.
            KeyboardInterrupt: Ctrl-C; see `generate`.
            In either case the conversation is left as it was.
        """
        tokenizer: Any = self.fast.tokenizer
        messages = [*self.messages, {"role": "user", "content": text}]
        first = [m for m in messages[:1] if m["role"] == "system"]
        rest = messages[len(first) :]
        shown = rest if self.keep is None else rest[-self.keep :]
        inputs = tokenizer.apply_chat_template(
            [*first, *shown], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.fast.model.device)
        documents = [*self.documents, *(m["content"] for m in rest[: len(rest) - len(shown)])]
        given = {"references": documents} if documents and self.fast.drafter.takes_references else {}
        out = self.fast.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], **{**self.settings, **settings, **given}
        )
        sequences: torch.Tensor = out if isinstance(out, torch.Tensor) else out.sequences
        answer = str(tokenizer.decode(sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer
