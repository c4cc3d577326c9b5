"""What a lossy rule is."""

from __future__ import annotations

from typing import ClassVar

from truedraft.accept._base import NodeRule, Rule
from truedraft.card import Guarantee


class LossyRule(Rule):
    """A rule whose text is not the model's own, and which says so in every report."""

    guarantee: ClassVar[Guarantee] = "none"


class LossyNodeRule(LossyRule, NodeRule):
    """One that chooses node by node."""
