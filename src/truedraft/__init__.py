"""Generation with transformers, several tokens per pass, with exactly the output of the model alone."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Accelerated": "accelerated",
    "Card": "card",
    "Chat": "text.chat",
    "Control": "control._base",
    "Corpus": "stores.corpus",
    "DraftTree": "tree",
    "Drafter": "drafters._base",
    "NodeRule": "accept._base",
    "Refused": "errors",
    "Report": "stats",
    "RowwiseProcessor": "sampling",
    "Rule": "accept._base",
    "View": "views._base",
    "accelerate": "accelerated",
    "build_corpus": "stores.building",
    "load": "loading",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from truedraft.accelerated import Accelerated as Accelerated
    from truedraft.accelerated import accelerate as accelerate
    from truedraft.accept._base import NodeRule as NodeRule
    from truedraft.accept._base import Rule as Rule
    from truedraft.card import Card as Card
    from truedraft.control._base import Control as Control
    from truedraft.drafters._base import Drafter as Drafter
    from truedraft.errors import Refused as Refused
    from truedraft.loading import load as load
    from truedraft.sampling import RowwiseProcessor as RowwiseProcessor
    from truedraft.stats import Report as Report
    from truedraft.stores.building import build_corpus as build_corpus
    from truedraft.stores.corpus import Corpus as Corpus
    from truedraft.text.chat import Chat as Chat
    from truedraft.tree import DraftTree as DraftTree
    from truedraft.views._base import View as View


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'truedraft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"truedraft.{_HOMES[name]}"), name)
