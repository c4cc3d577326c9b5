"""Per-thread overrides of methods of a model's modules, and of functions that they call, for the duration of a pass.

Other threads that call the model at the same time, by a plain `model.generate` or another accelerated one, are not
affected; after the last block the modules have no trace of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from truedraft.runtime.padded import Padded

Owner = nn.Module | ModuleType  # of a method, or of a function
Override = tuple[Owner, str, Callable[..., Any]]  # owner, name, replacement
Rule = Callable[[Padded, int], Override]  # nodes of a pass, positions that it reads -> what it overrides
_Key = tuple[int, str]

_lock = threading.Lock()
_in_use: dict[_Key, int] = {}  # number of open blocks, of all threads, by method
_thread = threading.local()  # .active: the replacements of this thread


@contextmanager
def overridden(overrides: Iterable[Override]) -> Iterator[None]:
    """Within the block, this thread calls the replacements; methods already set on an instance are left alone."""
    active: dict[_Key, Callable[..., Any]] = vars(_thread).setdefault("active", {})
    entered: list[tuple[Owner, _Key, Callable[..., Any] | None]] = []
    try:
        with _lock:
            for owner, name, replacement in overrides:
                key = (id(owner), name)
                if key not in _in_use:
                    if isinstance(owner, nn.Module) and name in vars(owner):
                        continue
                    vars(owner)[name] = Dispatcher(owner, key)
                _in_use[key] = _in_use.get(key, 0) + 1
                entered.append((owner, key, active.get(key)))
                active[key] = replacement
        yield
    finally:
        with _lock:
            for owner, key, before in reversed(entered):
                if before is None:
                    del active[key]
                else:
                    active[key] = before
                _in_use[key] -= 1
                if not _in_use[key]:
                    del _in_use[key]
                    vars(owner)[key[1]].leave()


class Dispatcher:
    """Calls the current thread's override of a method or a function, or else the owner's own."""

    def __init__(self, owner: Owner, key: _Key):
        self._owner, self._key = owner, key
        self.own = own(owner, key[1])

    def leave(self) -> None:
        """Restore what it took the place of."""
        if isinstance(self._owner, ModuleType):
            vars(self._owner)[self._key[1]] = self.own
        else:
            del vars(self._owner)[self._key[1]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(_thread, "active", {}).get(self._key, self.own)(*args, **kwargs)


def own(owner: Owner, name: str) -> Callable[..., Any]:
    """An owner's method or function as it is without overrides."""
    if isinstance(owner, nn.Module):
        return partial(getattr(type(owner), name), owner)
    found: Any = vars(owner)[name]
    return found.own if isinstance(found, Dispatcher) else found
