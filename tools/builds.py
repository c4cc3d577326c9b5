"""Build the package's compiled parts in other ways, and run the tests of them: python tools/builds.py clang own-threads

clang: by clang, with its OpenMP. own-threads: by gcc without OpenMP, where the pass starts threads itself, as with
Apple's compiler. Each build goes to a temporary folder; the installed package is not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import setuptools  # noqa: F401  it provides distutils

from distutils.core import run_setup  # isort: skip

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("kernels", "linears", "native_checks", "threads", "stores", "extending")
OPENMP = "-fopenmp"


def built(folder: Path, change: Callable[[Any], None]) -> Path:
    """Build the package with changed extensions, none of which may fail; returns the folder to import it from."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    os.chdir(ROOT)
    setup = run_setup("setup.py", stop_after="init")
    for extension in setup.ext_modules:
        change(extension)
        extension.optional = False
    build = setup.get_command_obj("build_ext")
    build.build_lib, build.build_temp = str(source), str(folder / "objects")
    build.ensure_finalized()
    build.run()
    return source


def without_openmp(extension: Any) -> None:
    for flags in (extension.extra_compile_args, extension.extra_link_args):
        if OPENMP in flags:
            flags.remove(OPENMP)


BUILDS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "clang": ("clang", lambda extension: None),
    "own-threads": ("gcc", without_openmp),
}


def tested(name: str, arguments: list[str]) -> int:
    """The exit status of the tests of a build, by these arguments of pytest."""
    compiler, change = BUILDS[name]
    with tempfile.TemporaryDirectory(prefix=f"truedraft-{name}-") as folder:
        os.environ["CC"] = compiler
        environment = {**os.environ, "PYTHONPATH": str(built(Path(folder), change)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, env=environment, cwd=ROOT).returncode


def main() -> int:
    tests = [f"tests/test_{test}.py" for test in TESTS]
    return max(tested(name, tests) for name in sys.argv[1:] or BUILDS)


if __name__ == "__main__":
    sys.exit(main())
