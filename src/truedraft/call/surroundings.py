"""The context of a call: exclusive use of the objects involved, and torch's default settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from truedraft.errors import Refused
from truedraft.runtime.releasing import in_call


class CallLock:
    """A lock held during a call: calls of other threads wait, and a call within a call is refused.

    A copy of the object that it belongs to gets a lock of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # identifier of the thread

    @property
    def mine(self) -> bool:
        """Whether this thread holds it."""
        return self._holder == threading.get_ident()

    def acquire(self, wait: bool) -> None:
        """Hold it until `release`.

        Raises:
            Refused: another thread holds it, and this one may not wait.
        """
        if not self._lock.acquire(blocking=wait):
            raise Refused("a call inside a call needs what another thread is using: make it outside the first call")
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Let other threads have it; no effect where this one does not hold it."""
        if self.mine:
            self._holder = None
            self._lock.release()

    def __reduce__(self) -> tuple[type[CallLock], tuple[()]]:
        return CallLock, ()


class _Thread(threading.local):
    calls = 0  # that it is in, one inside the other


_thread = _Thread()


@contextmanager
def exclusive(parts: Sequence[Any]) -> Iterator[None]:
    """Exclusive use of objects during a call; other accelerated models may share them.

    A thread that is in another call already (from a streamer, say) never waits: what it holds could be waited for.

    Raises:
        Refused: this thread is in a call with one of them already, or is in another call and would have to wait.
    """
    _thread.calls += 1
    try:
        with also_exclusive(parts), in_call():
            yield
    finally:
        _thread.calls -= 1


@contextmanager
def also_exclusive(parts: Sequence[Any]) -> Iterator[None]:
    """The same for further objects of a call that has begun; see `exclusive`."""
    locks = {id(lock): lock for lock in map(_lock_of, parts)}
    held: list[CallLock] = []
    try:
        for key in sorted(locks):  # one global order, against deadlocks
            if (lock := locks[key]).mine:
                raise Refused(
                    "a call inside a call that uses the same accelerated model or drafter: "
                    "use another accelerate(model) with a drafter of its own for the inner one"
                )
            held.append(lock)  # before it is acquired: an interruption may follow at once
            lock.acquire(wait=_thread.calls < 2)
        yield
    finally:
        for lock in reversed(held):
            lock.release()


def _lock_of(part: Any) -> CallLock:
    lock: CallLock | None = vars(part).get("_call_lock")
    return vars(part).setdefault("_call_lock", CallLock()) if lock is None else lock


@contextmanager
def defaults() -> Iterator[None]:
    """torch's default settings in place of the caller's: the CPU as default device, and no inference mode, because
    later calls write to tensors that are created here."""
    with in_call(), ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
