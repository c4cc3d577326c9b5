"""The contract of views: the target's weights run lighter, for drafts that the whole target verifies."""

from __future__ import annotations

from truedraft.tree import Taps


class View:
    """A lighter way to run a target's own weights: which parts of the model a pass leaves out.

    `target.score(trees, view=...)` makes such a pass. It reads the KV that the whole model has committed, in the layers
    that it runs, and writes scratch KV behind it: for these layers only, dropped by `rewind` and by every pass of the
    whole model. A view can therefore not change the target's output.

    A subclass is a frozen dataclass and overrides what it changes; the defaults are those of the whole model. What
    passes prepare for a view is cached by its value, so equal views must behave alike.

    taps: what passes under it yield besides logits. Hidden states are numbered as in the whole model; the state behind
        a layer that is skipped is the one before it.
    """

    taps: Taps = Taps()

    def skipped(self, layers: int) -> frozenset[int]:
        """The layers, of a decoder with `layers` of them, that do not run.

        Raises:
            Refused: the view does not fit such a decoder.
        """
        return frozenset()
