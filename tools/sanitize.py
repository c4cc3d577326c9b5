"""Build the extensions with sanitizers, and run the native tests and the fuzzer with them: python tools/sanitize.py

AddressSanitizer and UndefinedBehaviorSanitizer of gcc, on Linux. The build goes to a temporary folder; what is
installed stays as it is. Arguments go to tools/fuzz.py; `--tests` runs the tests alone, `--fuzz` the fuzzer alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools  # noqa: F401  gives distutils its extensions
from setuptools._distutils.core import run_setup

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1"]
TESTS = ("stores", "corpus", "runtime", "pairs", "linears", "quantize", "knobs", "files", "nest", "compose")
APART = "ctrl_c"  # not told apart from others by sanitizers: signals


def built(folder: Path) -> Path:
    """The package with extensions that check themselves; the folder to import it from."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    os.chdir(ROOT)
    setup = run_setup("setup.py", stop_after="init")
    for extension in setup.ext_modules:
        kept = [flag for flag in extension.extra_compile_args if not flag.startswith("-O")]
        extension.extra_compile_args = [*kept, *FLAGS]
        extension.extra_link_args = [*(extension.extra_link_args or []), *FLAGS[:1]]
        extension.optional = False
    build = setup.get_command_obj("build_ext")
    build.build_lib, build.build_temp = str(source), str(folder / "objects")
    build.ensure_finalized()
    build.run()
    return source


def library(name: str) -> str:
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    arguments = sys.argv[1:]
    only = {word for word in arguments if word in ("--tests", "--fuzz")}
    arguments = [word for word in arguments if word not in only]
    with tempfile.TemporaryDirectory(prefix="truedraft-sanitized-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(built(Path(folder))),
            "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "OMP_NUM_THREADS": "1",
        }
        tests = [str(ROOT / "tests" / f"test_{name}.py") for name in TESTS]
        commands = {
            "--tests": ["-m", "pytest", "-x", "-k", f"not {APART}", *tests],
            "--fuzz": [str(ROOT / "tools" / "fuzz.py"), *arguments],
        }
        codes = [
            subprocess.run([sys.executable, *command], env=environment, cwd=ROOT).returncode
            for word, command in commands.items()
            if not only or word in only
        ]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
