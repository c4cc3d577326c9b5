"""The contract of a lossy rule."""

from __future__ import annotations

from typing import ClassVar

from truedraft.accept._base import NodeRule, Rule
from truedraft.card import Guarantee


class LossyRule(Rule):
    """A rule that changes the distribution of the text; every report of it states so."""

    guarantee: ClassVar[Guarantee] = "none"


class LossyNodeRule(LossyRule, NodeRule):
    """A lossy rule that chooses the next token at one node at a time."""
