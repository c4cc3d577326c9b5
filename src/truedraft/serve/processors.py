"""The penalties of the OpenAI API for tokens that the output already has.

OpenAI, "API reference: Create chat completion", frequency_penalty and presence_penalty.
"""

from __future__ import annotations

from torch import FloatTensor, LongTensor

from truedraft.sampling import RowwiseProcessor


class OutputPenalties(RowwiseProcessor):
    """Lowers the score of each token by `frequency` for every occurrence in the output, and by `presence` if any.

    Args:
        frequency, presence: in units of logits; negative values favour repetition.
        prompt: tokens of the prompt, padding included, which do not count.
    """

    def __init__(self, frequency: float, presence: float, prompt: int):
        self.frequency, self.presence, self.prompt = frequency, presence, prompt

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        processed = scores.clone()
        for row, output in zip(processed, input_ids[:, self.prompt :], strict=True):
            tokens, counts = output.unique(return_counts=True)
            row[tokens] -= self.frequency * counts + self.presence
        return processed  # type: ignore[return-value]
