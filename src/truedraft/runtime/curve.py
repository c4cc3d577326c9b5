"""What a pass costs by width, measured once per model and machine and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from truedraft.files import write_whole
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 64  # positions read before the timed passes
ROUNDS = 25  # at most
SECONDS = 1.5  # after which no further round begins
VERSION = 2


@dataclass(frozen=True)
class Curve:
    """Seconds of a pass at a few widths; straight lines between them.

    widths: tokens in a pass, all rows together. seconds: the least seen of each, made non-decreasing.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, tokens: int) -> float:
        """Seconds of a pass over `tokens` tokens."""
        i = min(max(bisect_left(self.widths, tokens), 1), len(self.widths) - 1)
        (w0, w1), (s0, s1) = self.widths[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return s0 + (s1 - s0) * (tokens - w0) / (w1 - w0)

    def learned(self, tokens: int, seconds: float, rate: float, plain: int) -> Curve:
        """The curve after a pass over `tokens` tokens took `seconds`: it may have been measured at a bad moment.

        rate: how far, from 0 to 1, the widths of its kind move: those up to `plain` tokens, or those beyond.
        """
        factor = (seconds / self(tokens)) ** rate
        moved = [
            s * factor if (w > plain) == (tokens > plain) else s for w, s in zip(self.widths, self.seconds, strict=True)
        ]
        return Curve(self.widths, tuple(accumulate(moved, max)))


def measure(target: DecoderTarget) -> Curve:
    """Time passes over a scratch cache, in rounds over all widths; the least counts: other work only adds time."""
    limit = target.hard_limit or CONTEXT + WIDTHS[-1]
    widths = tuple(w for w in WIDTHS if w <= limit // 2)
    context = min(CONTEXT, limit - widths[-1])
    ids = torch.arange(context, device=target.device) % target.vocabulary
    held = target.cache
    target.reserve(1, context + widths[-1])
    target.prefill([target.prompt(ids)])
    trees = {w: DraftTree.chain(0, [i % target.vocabulary for i in range(w - 1)]) for w in widths}
    times: dict[int, list[float]] = {w: [] for w in widths}
    target.score([trees[1]])
    if target.cold:  # sizes are captured when they first come up
        for tree in trees.values():
            target.score([tree])
    begun = time.perf_counter()
    for turn in range(ROUNDS):
        if turn and time.perf_counter() - begun > SECONDS:
            break
        for width in widths:
            start = time.perf_counter()
            target.score([trees[width]])
            target.wait()
            times[width].append(time.perf_counter() - start)
    target.cache = held
    seconds: list[float] = []
    for width in widths:
        seconds.append(max(min(times[width]), seconds[-1] if seconds else 0.0))
    return Curve(widths, tuple(seconds))


def of(target: DecoderTarget) -> Curve:
    """The curve of a target: from disk where this model was measured on this machine before, else measured now."""
    path = _folder() / f"{_key(target)}.json"
    try:
        stored = json.loads(path.read_text())
        return Curve(tuple(stored["widths"]), tuple(stored["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        curve = measure(target)
        said = {"widths": curve.widths, "seconds": curve.seconds, "model": type(target.model).__name__}
        with contextlib.suppress(OSError):  # a folder that cannot be written costs a measurement each time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(said))
        return curve


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "truedraft" / "curves"


def _key(target: DecoderTarget) -> str:
    config = target.config
    machine = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else _processor()
    parts = [
        VERSION, type(target.model).__name__, config.to_json_string(use_diff=False), str(target.dtype),
        target.model.config._attn_implementation, target.runner.name, machine, torch.get_num_threads(),
        torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return f"{names[0]} x {os.cpu_count()}"
    except (OSError, IndexError):
        return f"{platform.processor()} {platform.machine()} x {os.cpu_count()}"
