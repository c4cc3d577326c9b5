"""Acceptance rules: which path of a draft is accepted, and the token that follows it. One file per rule."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from truedraft.accept._optimum import optimal_acceptance as optimal_acceptance

__all__ = ["optimal_acceptance"]


def __getattr__(name: str) -> Any:
    """Imported when first used: torch takes seconds."""
    if name != "optimal_acceptance":
        raise AttributeError(f"module 'truedraft.accept' has no attribute {name!r}")
    from truedraft.accept._optimum import optimal_acceptance

    return optimal_acceptance
