"""One object in the place of another: what is not overridden is the other's, class attributes and settings included."""

from __future__ import annotations

from typing import Any, ClassVar


class Delegate:
    """Stands in for `inner`. Subclasses override methods, and annotate the attributes that are their own.

    Every other attribute is read from `inner` and written to it, and `isinstance` sees the class of `inner`: a
    subclass of that class would have its class attributes in the place of what `inner` says.
    """

    inner: Any
    _own: ClassVar[frozenset[str]] = frozenset({"inner"})

    def __init_subclass__(cls) -> None:
        cls._own = cls._own.union(cls.__annotations__ if "__annotations__" in vars(cls) else ())

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, where it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in self._own else self.inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.inner.__class__
