"""What a call gives back, as `model.generate` gives it: to a streamer on the way, and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from truedraft.sampling import History, Laws
from truedraft.tree import Row


class Stream:
    """Feeds a streamer as `generate` does: one token per row and step, once every row has reached the step."""

    def __init__(self, streamer: Any, rows: Sequence[Row], history: History):
        self.streamer, self.rows, self.history, self.sent = streamer, rows, history, 0

    def put(self) -> None:
        if self.streamer is None:
            return
        going = [row.step for row in self.rows if not row.ended]
        reached = min(going) if going else max(row.step for row in self.rows)
        for step in range(self.sent, reached):
            self.streamer.put(self.history.column(step).cpu())
        self.sent = reached

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


def output_of(model: PreTrainedModel, rows: Sequence[Row], history: History, laws: Laws, returns: bool) -> Any:
    """What `generate` returns: ids, or with `returns` an object with the scores and logits that were kept."""
    steps = max(row.step for row in rows)
    sequences: Any = history.batch(steps).clone()
    if not returns:
        return sequences
    scores, logits = (None if kept is None else tuple(kept[:steps]) for kept in (laws.scores, laws.logits))
    kind: Any = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
    return kind(sequences=sequences, scores=scores, logits=logits)
