"""A long run of the server with clients of every kind: who got what, and what the server's process holds at the end.

    python benchmarks/soak.py [--minutes 32] [--json FILE]

Good clients send random requests and compare every answer with the text of `generate`; others cancel, stall, send
garbage, and exceed limits. In the first quarter the server is ended by SIGTERM, and once by SIGKILL, and started again
with its file of earlier outputs; then one process runs to the end. Reported are requests by outcome, wrong answers, and
memory, threads and file descriptors of that process after its first minutes and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import truedraft
from loadclient import request
from truedraft.files import write_whole
from truedraft.loading import load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from api_requests import expected, random_body

PORT = 8290
BODIES = 120
DRAFT = "input-guided+suffix-wide:memory=200000+token-recycling"  # the default, with outputs that are soon complete
GOOD, BAD = 8, 4  # clients at once
FIRST_MINUTES = 6.0  # after which memory is read first
SETTLE = 20.0  # seconds without requests before memory is read


class Soak:
    """One run.

    outcomes: requests by what became of them.
    """

    def __init__(self, minutes: float):
        self.minutes, self.outcomes, self.wrong = minutes, Counter[str](), list[Any]()
        plain = truedraft.accelerate(*load("nano"), draft=None)
        chooser = random.Random(5)
        self.bodies = [random_body(chooser, chat=i % 3 == 0) for i in range(BODIES)]
        self.expected = [expected(plain, body) for body in self.bodies]
        self.process: subprocess.Popen[bytes] | None = None
        self.up, self.paused, self.over = asyncio.Event(), False, False
        self.figures: dict[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp())

    async def start(self) -> None:
        command = [sys.executable, "-m", "truedraft", "serve", "nano", "--port", str(PORT), "--log-level", "error"]
        options = [
            "--draft",
            DRAFT,
            "--max-rows",
            "6",
            "--max-waiting",
            "4",
            "--prefix-bytes",
            "32M",
            "--idle-seconds",
            "5",
        ]
        options += ["--write-seconds", "5", "--memory", str(self.folder / "outputs")]
        self.process = subprocess.Popen([*command, *options])
        while True:
            await asyncio.sleep(0.2)
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", PORT)
                writer.close()
                break
            except OSError:
                assert self.process.poll() is None, "the server did not start"
        self.up.set()

    async def end(self, sig: int) -> None:
        assert self.process is not None
        self.up.clear()
        os.kill(self.process.pid, sig)
        code = await asyncio.to_thread(self.process.wait, 150)
        self.outcomes[f"server ended by {signal.Signals(sig).name} with {code}"] += 1

    async def good(self, seed: int) -> None:
        """Random requests, streamed and whole, each compared."""
        chooser = random.Random(seed)
        while not self.over:
            await self.ready()
            which = chooser.randrange(BODIES)
            body = self.bodies[which] | {"stream": chooser.random() < 0.5}
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            process = self.process
            try:
                answer = await request(PORT, path, body)
            except (OSError, IndexError, ValueError, asyncio.IncompleteReadError):
                self.outcomes["cut off by the end of a server"] += 1
                assert self.process is not process or not self.up.is_set(), "a connection broke without a cause"
                continue
            if answer.status != 200:
                self.outcomes[f"answered {answer.status}"] += 1
                await asyncio.sleep(0.1)
                continue
            whole = "truedraft" in answer.last
            if not whole:
                ended = self.process is not process or not self.up.is_set()
                self.outcomes["cut off by the end of a server" if ended else "not whole"] += 1
                continue
            found = self.expected[which]
            same = _by_choice(answer.texts) == found.texts
            self.outcomes["right" if same else "wrong"] += 1
            if not same:
                self.wrong.append({"body": body, "got": answer.texts, "expected": found.texts})

    async def bad(self, seed: int) -> None:
        """Cancelled, stalled, malformed and oversized requests, and connections that send nothing."""
        chooser = random.Random(seed)
        while not self.over:
            await self.ready()
            kind = chooser.choice(("cancel", "stall", "garbage", "oversized", "silent", "half"))
            body = json.dumps(self.bodies[0] | {"prompt": "a", "max_tokens": 1500, "stream": True, "ignore_eos": True})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
            sent = {
                "cancel": head.format(len(body)) + body, "stall": head.format(len(body)) + body,
                "garbage": chooser.randbytes(2000).decode("latin1"), "silent": "", "half": head.format(900) + "{",
                "oversized": head.format(1 << 40),
            }[kind]  # fmt: skip
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
                writer.write(sent.encode("latin1"))
                if kind == "cancel":
                    await asyncio.wait_for(reader.read(chooser.choice((1, 3000))), 20)
                else:
                    await asyncio.sleep(chooser.uniform(0.05, 7.0))
                writer.close()
                self.outcomes[f"bad client: {kind}"] += 1
            except (TimeoutError, OSError):
                self.outcomes[f"bad client: {kind}, refused"] += 1

    async def ready(self) -> None:
        await self.up.wait()
        while self.paused:
            await asyncio.sleep(0.1)

    async def measured(self) -> dict[str, Any]:
        """What the server's process holds while nothing runs."""
        assert self.process is not None
        self.paused = True
        await asyncio.sleep(SETTLE)
        held = psutil.Process(self.process.pid)
        found = {
            "rss_mib": round(held.memory_info().rss / 2**20, 1), "threads": held.num_threads(), "files": held.num_fds()
        }  # fmt: skip
        self.paused = False
        return found

    async def run(self) -> dict[str, Any]:
        started = time.monotonic()
        await self.start()
        tasks = [asyncio.create_task(self.good(i)) for i in range(GOOD)]
        tasks += [asyncio.create_task(self.bad(100 + i)) for i in range(BAD)]
        for sig in (signal.SIGTERM, signal.SIGKILL):
            await asyncio.sleep(self.minutes * 60 / 16)
            await self.end(sig)
            await self.start()
        await asyncio.sleep(min(FIRST_MINUTES, self.minutes / 4) * 60)
        early = await self.measured()
        await asyncio.sleep(max(self.minutes * 60 - (time.monotonic() - started) - SETTLE, 1))
        late = await self.measured()
        self.over = True
        _, pending = await asyncio.wait(tasks, timeout=30)
        for task in pending:
            task.cancel()
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception():
                self.outcomes[f"client failed: {task.exception()!r}"] += 1
        await self.end(signal.SIGTERM)
        return {
            "minutes": round((time.monotonic() - started) / 60, 1), "outcomes": dict(sorted(self.outcomes.items())),
            "after_first_minutes": early, "at_the_end": late,
            "memory_change": round(late["rss_mib"] / early["rss_mib"] - 1, 4), "wrong": self.wrong[:5],
        }  # fmt: skip


def _by_choice(texts: dict[int, str]) -> list[str]:
    return [texts[i] for i in sorted(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(Soak(args.minutes).run())
    print(json.dumps(found, indent=2))
    if args.json is not None:
        write_whole(args.json, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
