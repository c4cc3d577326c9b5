"""Which model something was fitted to, as its file has it: compared with the model that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from truedraft.errors import Refused

FEWER = "fewer of its drafts may be accepted"


@dataclass(frozen=True)
class Identity:
    """Which model something was fitted to, as its file has it.

    What is fitted to a model drafts for any of the same sizes and tokens, such as the same model after a fine-tune: the
    target verifies, and only how often drafts are accepted depends on its weights.

    target: class of the model. fingerprint: see `runtime.identity`. sizes: its vocabulary, hidden size and layers; none
    in files of earlier versions, which serve models of the same weights alone. tokens: of the tokenizer's vocabulary,
    see `stores.corpus.fingerprint`; empty where not known.
    """

    target: str
    fingerprint: str
    sizes: tuple[int, ...] = ()
    tokens: str = ""

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Identity:
        """That in the description of a file."""
        sizes, tokens = record.get("sizes", ()), record.get("tokens", "")
        return cls(str(record.get("target", "model")), str(record.get("fingerprint")), tuple(sizes), str(tokens))

    def record(self) -> dict[str, Any]:
        """For the description of a file."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.sizes:
            return f"a {self.target}, fingerprint {self.fingerprint}"
        tokens, hidden, layers = self.sizes
        return f"a {self.target} of {tokens:,} tokens, hidden size {hidden} and {layers} layers"

    def compared(self, own: Identity, fitted: str, remedy: str, effect: str = FEWER) -> str:
        """The sentence of a report where this model has other weights; empty where they are the same.

        Args:
            own: the model that is there.
            fitted: the beginning of sentences, as in "the head was trained".
            remedy, effect: the end of refusals, and of the sentence.

        Raises:
            Refused: the model has other sizes or tokens.
        """
        if self.fingerprint == own.fingerprint:
            return ""
        if self.sizes != own.sizes:  # or not known
            raise Refused(f"{fitted} for another model ({self}; this is {own}): {remedy}")
        if self.tokens and own.tokens and self.tokens != own.tokens:
            raise Refused(f"{fitted} for a model with other tokens ({self.tokens}; these are {own.tokens}): {remedy}")
        return (
            f"{fitted} for other weights (a {self.target}, fingerprint {self.fingerprint}; this is a {own.target}, "
            f"{own.fingerprint}): {effect}"
        )
