"""Per-thread overrides of methods of a model's modules, for the duration of a pass.

Other threads that call the model at the same time, by a plain `model.generate` or another accelerated one, are not
affected; after the last block the modules have no trace of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Override = tuple[nn.Module, str, Callable[..., Any]]  # module, method name, replacement
_Key = tuple[int, str]

_lock = threading.Lock()
_in_use: dict[_Key, int] = {}  # number of open blocks, of all threads, by method
_thread = threading.local()  # .active: the replacements of this thread


@contextmanager
def overridden(overrides: Iterable[Override]) -> Iterator[None]:
    """Within the block, this thread calls the replacements; methods already set on an instance are left alone."""
    active: dict[_Key, Callable[..., Any]] = vars(_thread).setdefault("active", {})
    entered: list[tuple[nn.Module, _Key, Callable[..., Any] | None]] = []
    try:
        with _lock:
            for module, name, replacement in overrides:
                key = (id(module), name)
                if key not in _in_use:
                    if name in vars(module):
                        continue
                    vars(module)[name] = Dispatcher(module, key)
                _in_use[key] = _in_use.get(key, 0) + 1
                entered.append((module, key, active.get(key)))
                active[key] = replacement
        yield
    finally:
        with _lock:
            for module, key, before in reversed(entered):
                if before is None:
                    del active[key]
                else:
                    active[key] = before
                _in_use[key] -= 1
                if not _in_use[key]:
                    del _in_use[key], vars(module)[key[1]]


class Dispatcher:
    """Calls the current thread's override of a method, or else the method of the module's class."""

    def __init__(self, module: nn.Module, key: _Key):
        self._module, self._key = module, key
        self._own = getattr(type(module), key[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replacement = getattr(_thread, "active", {}).get(self._key)
        return self._own(self._module, *args, **kwargs) if replacement is None else replacement(*args, **kwargs)
