"""The contract of a speculator (`canvas/_base.py`), where the registry looks for it."""

from truedraft.canvas._base import Speculator

__all__ = ["Speculator"]
