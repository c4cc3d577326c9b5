"""The compiled code as other compilers, other processors and installations without a compiler have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import arm64
import builds
from truedraft.runtime import native

pytestmark = pytest.mark.slow
SOME = "(product and 53) or (scored and fp32)"


def run(*command: str, **given: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=builds.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **given}
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", builds.BUILDS)
def test_other_builds_have_the_same_tests(name: str) -> None:
    if shutil.which(builds.BUILDS[name][0]) is None:
        pytest.skip(f"there is no {builds.BUILDS[name][0]} here")
    run(sys.executable, str(builds.ROOT / "tools/builds.py"), name)


@pytest.mark.skipif(bool(arm64.missing()), reason="no cross-compiler for arm64 here, or no emulator of it")
@pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
@pytest.mark.parametrize("options", [["--plain"], []], ids=["neon", "bf16"])
def test_arm64_has_the_same_bits_at_any_width(options: list[str]) -> None:
    """Without bf16's instruction they are also those of AVX2."""
    out = run(sys.executable, "tools/arm64.py", *options, "tests/test_kernels.py", "-k", SOME, PYTHONPATH="src:tests")
    compared = int(out.splitlines()[-1].partition(" ")[0])
    assert compared > 100 if options else "passed" in out


def test_an_installation_without_a_compiler_works_and_says_what_is_lost(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    ignored = shutil.ignore_patterns("*.so", "build", ".git", ".venv", "*.egg-info", "__pycache__")
    shutil.copytree(builds.ROOT, source, ignore=ignored)
    install = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(installed))
    run(*install, str(source), CC="/nonexistent")
    assert not list(installed.rglob("*.so"))
    told = run(sys.executable, "-m", "truedraft", "--version", PYTHONPATH=str(installed)).splitlines()
    assert "were not built" in told[1] and "were not built" in told[2] and len(told) == 3
    out = run(sys.executable, "-m", "truedraft", "generate", "nano", "one day", PYTHONPATH=str(installed))
    assert out == run(sys.executable, "-m", "truedraft", "generate", "nano", "one day")
