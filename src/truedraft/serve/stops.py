"""Stop strings of a request: its row ends with the token that completes one in the text of the output.

`StopStringCriteria` of `transformers` decides by tables over the whole vocabulary, which are computed in Python for
every new set of strings, while running streams wait (0.4 s for 50,000 tokens), and takes 0.2 ms a token. Here the text
is read as the response shows it, token by token. Strings that begin in the prompt do not count, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import BoolTensor, FloatTensor, LongTensor, tensor

from truedraft.stopping import RowwiseCriterion
from truedraft.text.pieces import Pieces, StopText


class StopStrings(RowwiseCriterion):
    """Ends one row after the token that completes a stop string.

    Args:
        pieces: of the row, at the end of its prompt.
        strings: the stop strings.
        prompt: tokens of the prompt.
    """

    def __init__(self, pieces: Pieces, strings: Sequence[str], prompt: int):
        self._pieces, self._text, self._read = pieces, StopText(strings), prompt

    def __call__(self, input_ids: LongTensor, scores: FloatTensor, **kwargs: Any) -> BoolTensor:
        """(1,) whether the row has ended. input_ids: (1, length) prompt and output."""
        new = input_ids[0, self._read :].tolist()
        self._read += len(new)
        if new:
            self._text.feed(self._pieces.feed(new))
        return tensor([self._text.found is not None])  # type: ignore[return-value]
