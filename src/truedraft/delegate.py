"""A wrapper of an object: attributes that it does not override are those of the object, class attributes included."""

from __future__ import annotations

from typing import Any, ClassVar


class Delegate:
    """A wrapper of `inner`. Subclasses override methods, and annotate the attributes that are their own.

    Every other attribute is read from `inner` and written to it, and `isinstance` gives the class of `inner`. (A
    subclass of that class would have its class attributes instead of those that `inner` has set.)
    """

    inner: Any
    _own: ClassVar[frozenset[str]] = frozenset({"inner"})

    def __init_subclass__(cls) -> None:
        cls._own = cls._own.union(cls.__annotations__ if "__annotations__" in vars(cls) else ())

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in self._own else self.inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.inner.__class__
