"""Ctrl-C for a command that runs in the process of the tests, where torch is loaded already."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

from truedraft.cli import main


def interrupted(args: Sequence[str], ready: Callable[[], object]) -> int:
    """The exit code of a command that gets SIGINT as soon as `ready` returns something true."""
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.02):
            if ready():
                os.kill(os.getpid(), signal.SIGINT)
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    try:
        return main(args)
    finally:
        ended.set()
        waiting.join()
        signal.signal(signal.SIGINT, before)
