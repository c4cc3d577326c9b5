"""A conversation with a model, all of which its drafters may copy from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from truedraft.accelerated import Accelerated
from truedraft.errors import Refused


class Chat:
    """Messages to and fro, by the tokenizer's chat template.

    What stands in the prompt is copied from anyway; documents, and messages too old for the prompt, are given as
    references, so that an answer which repeats or edits them is drafted from them too.

    Args:
        fast: an accelerated model with a tokenizer.
        system: a first message of the system's.
        documents: texts at hand that answers may copy from: the file being edited, pages that were retrieved.
        keep: how many of the latest messages the prompt holds, the system's not counted; None for all.
        **settings: of every call of `generate`, as `max_new_tokens`.

    Attributes:
        messages: the whole conversation, as chat templates take it.
        documents: texts at hand; may be changed between calls.

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

    def say(self, text: str, **settings: Any) -> str:
        """The model's answer to one more message; both then belong to the conversation.

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
