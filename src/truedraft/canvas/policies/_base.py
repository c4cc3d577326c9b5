"""The contract of a reference: decoding step by step, as models define it."""

from __future__ import annotations

from typing import ClassVar

from truedraft.canvas._base import Policy
from truedraft.card import Guarantee, knob


class Reference(Policy):
    """A policy that fixes a number of positions per step, `tokens`."""

    guarantee: ClassVar[Guarantee] = "tokens"
    tokens: int = knob(1, 1, 1024)
