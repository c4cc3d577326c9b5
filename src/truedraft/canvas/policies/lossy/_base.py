"""The contract of a lossy policy, another type than that of a reference."""

from __future__ import annotations

from typing import ClassVar

from truedraft.canvas._base import Policy
from truedraft.card import Guarantee


class LossyPolicy(Policy):
    """A policy whose text is not that of step-by-step decoding."""

    guarantee: ClassVar[Guarantee] = "none"
