"""Build the extensions with sanitizers, and run the native tests and the fuzzer with them: python tools/sanitize.py

AddressSanitizer and UndefinedBehaviorSanitizer on Linux, of clang where it is installed, which compiles the passes in a
third of the time, else of gcc. The build goes to a temporary folder; the installed package is not changed. Other
arguments are passed to tools/fuzz.py.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from builds import ROOT, built

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1"]
OF_COMPILER = {  # further flags, and the library of the sanitizers
    "clang": (["-shared-libasan"], f"libclang_rt.asan-{platform.machine()}.so"),
    "gcc": (["-fno-var-tracking", "-fno-var-tracking-assignments"], "libasan.so"),  # these passes take minutes
}
COMPILER = "clang" if shutil.which("clang") else "gcc"
TESTS = (
    "stores",
    "corpus",
    "runtime",
    "kernels",
    "extending",
    "shapes",
    "recurrent",
    "seq2seq_passes",
    "linears",
    "quantize",
    "knobs",
)
TESTS += ("caches", "files", "nest", "compose", "native_checks", "changes", "threads", "prompts", "ranks", "tree")
TESTS += ("packed", "quantised_checkpoints", "generate_pass")


def sanitized(extension: Any) -> None:
    kept, flags = [flag for flag in extension.extra_compile_args if not flag.startswith("-O")], OF_COMPILER[COMPILER][0]
    extension.extra_compile_args = [*kept, *FLAGS, *flags]
    extension.extra_link_args = [*(extension.extra_link_args or []), *FLAGS[:1], *flags]


def source(folder: Path) -> Path:
    """The folder to import a sanitized build from: one that is there already, or a new one."""
    os.environ["CC"] = COMPILER
    return folder / "src" if (folder / "src").exists() else built(folder, sanitized)


def library(name: str) -> str:
    return subprocess.run(
        [COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="the tests alone")
    parser.add_argument("--fuzz", action="store_true", help="the fuzzer alone")
    parser.add_argument("--build", type=Path, help="a folder in which the build is kept and found again")
    options, others = parser.parse_known_args()
    commands = {
        "tests": ["-m", "pytest", *(str(ROOT / "tests" / f"test_{name}.py") for name in TESTS)],
        "fuzz": [str(ROOT / "tools" / "fuzz.py"), *others],
    }
    chosen = [name for name in commands if getattr(options, name)] or list(commands)
    with tempfile.TemporaryDirectory(prefix="truedraft-sanitized-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(source(options.build or Path(folder))),
            "LD_PRELOAD": f"{library(OF_COMPILER[COMPILER][1])} {library('libstdc++.so.6')}",
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
        }
        runs = [subprocess.run([sys.executable, *commands[name]], env=environment, cwd=ROOT) for name in chosen]
    return int(any(run.returncode for run in runs))


if __name__ == "__main__":
    sys.exit(main())
