"""What a view is: the weights of a target run lighter, for drafts that the whole target verifies."""

from __future__ import annotations

from truedraft.tree import Taps


class View:
    """A target's own weights, run lighter: what of the model a pass under it leaves out.

    `target.score(trees, view=...)` makes such a pass. It reads the KV that the whole model has committed, in the layers
    that it runs, and writes scratch KV behind it: of these layers alone, dropped by `rewind` and by every pass of the
    whole model. What a view computes can therefore not change the target's output.

    A subclass is a frozen dataclass and overrides what it changes; whatever it leaves alone is as in the whole model.
    Passes keep what they prepare for a view by its value, so equal views must be the same.

    taps: what passes under it yield besides logits. Hidden states are numbered as in the whole model; the state behind
        a layer that is skipped is the one before it.
    """

    taps: Taps = Taps()

    def skipped(self, layers: int) -> frozenset[int]:
        """The layers that do not run, of a decoder with so many.

        Raises:
            Refused: the view is not one of such a decoder.
        """
        return frozenset()
