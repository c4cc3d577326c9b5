"""Where an n-gram was first seen: the index behind the copying drafters."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """First occurrence of every n-gram of up to `longest` tokens in texts that only grow at their end.

    A few dictionary operations per token and order; nothing is scanned.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.first: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}
        self.texts: dict[
            int, tuple[Sequence[int], int]
        ] = {}  # id -> the text (held, so the id stays its own), tokens indexed

    def extend(self, text: Sequence[int], end: int) -> None:
        """Index the n-grams that end before position `end` of `text`; a text may be given again when it has grown."""
        done = self.texts.get(id(text), (text, 0))[1]
        for stop in range(done + 1, end + 1):
            for n in range(1, min(self.longest, stop) + 1):
                self.first.setdefault(tuple(text[stop - n : stop]), (text, stop))
        self.texts[id(text)] = (text, max(end, done))

    def continuation(self, suffix: Sequence[int], shortest: int, length: int) -> Sequence[int]:
        """Up to `length` tokens that followed the first occurrence of the longest known n-gram that ends `suffix`."""
        for n in range(min(self.longest, len(suffix)), shortest - 1, -1):
            if found := self.first.get(tuple(suffix[-n:])):
                text, stop = found
                if stop < len(text):
                    return text[stop : stop + length]
        return ()
