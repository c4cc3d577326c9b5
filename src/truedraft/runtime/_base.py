"""What makes passes: the contract of the model's own forward, of captured graphs and of compiled code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from truedraft.tree import DraftTree, Prompt, Scores, Taps
from truedraft.views._base import View


class Runner(ABC):
    """Runs the passes of one model over the slots of the cache that is attached.

    name: how it makes passes, as reports show it.
    batch_invariant: whether the logits of a node have the same bits whatever else is in the pass.
    cold: whether the last pass took longer than others of its size will, because it was captured first.
    """

    name: str
    batch_invariant: ClassVar[bool] = False
    cold: bool = False

    @abstractmethod
    def attach(self, cache: Any) -> None:
        """The cache (`RowCache` or `Seq2SeqCache`) of the passes that follow; None detaches the one before.

        Raises:
            NotCompilable: there is no such pass over this cache.
        """

    @abstractmethod
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        """Read the prompts of new rows into the next free slots.

        Returns:
            Logits (rows, 1, V) of their last tokens. These are not committed: each is the root of its row's next tree.
        """

    @abstractmethod
    def skipped(self, view: View) -> frozenset[int]:
        """The layers that passes under a view leave out.

        Raises:
            Refused: passes of this model cannot be made under it.
        """

    @abstractmethod
    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        """Logits (rows, width, V) at every node of one tree per slot in use, of the whole model or under a view; what
        is written is not committed.

        Raises:
            NotCompilable: the pass could not be made; nothing was committed.
            Refused: see `skipped`.
        """
