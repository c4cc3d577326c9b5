"""The compiled parts, built where they can be: without them truedraft works as well, only slower."""

import hashlib
import os
import platform
import sys
import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

native = "src/truedraft/runtime/native"
FILES = "linear", "panels", "recurrent", "streams", "team", "neon", "neon_bf16"


class Build(build_ext):
    """Builds without OpenMP where the compiler has none: the pass then starts threads of its own."""

    def build_extension(self, extension):
        try:
            self._built(extension)
        except Exception:
            if OPENMP not in extension.extra_compile_args:
                raise
            for flags in (extension.extra_compile_args, extension.extra_link_args):
                flags.remove(OPENMP)
            self._built(extension)

    def _built(self, extension):
        if extension.name != PASS:
            return super().build_extension(extension)
        sources = extension.sources
        extension.extra_objects, extension.sources = [str(self._compiled(extension))], []
        try:
            super().build_extension(extension)
        finally:
            extension.extra_objects, extension.sources = [], sources

    def _compiled(self, extension):
        """The object file of the pass. It takes a minute or two and knows nothing of Python, so that it is kept, and
        found again by installations for another Python, or with other extras."""
        flags = extension.extra_compile_args
        chosen = [os.environ.get(name, "") for name in ("CC", "CFLAGS", "CPPFLAGS", "ARCHFLAGS")]
        command = [platform.machine(), self.compiler.compiler_so[0], *chosen, *flags]
        digest = hashlib.sha256("\n".join(command).encode())
        for path in sorted({*extension.sources, *extension.depends}):
            digest.update(Path(path).read_bytes())
        kept = Path("build", "pass", f"{digest.hexdigest()[:16]}.o")
        if self.force or not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                (made,) = self.compiler.compile(extension.sources, output_dir=folder, extra_postargs=flags)
                Path(made).replace(kept)
        return kept


PASS = "truedraft.runtime.native._pass"
OPENMP = "-fopenmp"
extensions = [
    Extension(
        "truedraft.stores._compiled",
        sources=[f"src/truedraft/stores/{name}.c" for name in ("automaton", "likeliest", "trigrams")],
        extra_compile_args=["-O3", "-fno-trapping-math", "-fno-math-errno"],  # or comparisons are not vectorised
        libraries=[] if sys.platform == "win32" else ["m"],
        optional=True,
    ),
    *(
        Extension(
            f"truedraft.{module}",
            sources=[f"src/truedraft/{module.replace('.', '/')}.c"],
            extra_compile_args=["-O3", "-ffp-contract=off"],  # the same figures as in Python, everywhere
            optional=True,
        )
        for module in ("stores._trees", "stores._drafts", "caches._entries", "runtime._curve")
    ),
]
if sys.platform in ("linux", "darwin") and platform.machine() in ("x86_64", "aarch64", "arm64"):
    extensions.append(
        Extension(
            PASS,
            sources=[f"{native}/pass.c"],
            depends=[*glob(f"{native}/*.inc"), f"{native}/pass.c"],
            # products and sums stay apart where the source keeps them apart: results are to be the same everywhere;
            # debug symbols, which Python's own flags ask for, take 9 of 10 bytes and two fifths of the time
            extra_compile_args=["-O3", "-g0", "-fwrapv", "-ffp-contract=off", "-pthread", OPENMP],
            extra_link_args=["-pthread", OPENMP],
            libraries=["m"],
            optional=True,
        )
    )
setup(ext_modules=extensions, cmdclass={"build_ext": Build})
