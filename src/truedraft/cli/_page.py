"""HTML pages written by a command: checks of the path, and the origin of the figures."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from truedraft import __version__
from truedraft.errors import Refused, why
from truedraft.files import check_file, write_whole


def check_page(path: Path | None) -> None:
    """Raises Refused, before anything is measured, for a path that cannot be written."""
    if path is not None:
        check_file(path, f"--html {path}")


def write_page(path: Path, text: str) -> None:
    """Write a page atomically; raises Refused where that fails."""
    try:
        write_whole(path, text)
    except OSError as e:
        raise Refused(f"--html {path}: {why(e)}") from e


def origin(command: Sequence[str]) -> dict[str, str]:
    """The origin of the figures of this process, by name: command, date, machine, versions."""
    import torch
    import transformers

    return {
        "command": shlex.join(["truedraft", *command]),
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": f"truedraft {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    }


def processor() -> str:
    """The name of the processor, or of its architecture where the system does not give it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
