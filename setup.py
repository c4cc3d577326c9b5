"""The compiled parts, built where they can be: without them truedraft works as well, only slower."""

import platform
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

native = "src/truedraft/runtime/native"
FILES = "linear", "panels", "recurrent", "streams", "team", "neon", "neon_bf16"


class Build(build_ext):
    """Builds without OpenMP where the compiler has none: the pass then starts threads of its own."""

    def build_extension(self, extension):
        try:
            super().build_extension(extension)
        except Exception:
            if OPENMP not in extension.extra_compile_args:
                raise
            for flags in (extension.extra_compile_args, extension.extra_link_args):
                flags.remove(OPENMP)
            super().build_extension(extension)


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
            "truedraft.runtime.native._pass",
            sources=[f"{native}/pass.c"],
            depends=glob(f"{native}/*.inc"),
            # products and sums stay apart where the source keeps them apart: results are to be the same everywhere;
            # debug symbols, which Python's own flags ask for, take 9 of 10 bytes and two fifths of the time
            extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-pthread", OPENMP],
            extra_link_args=["-pthread", OPENMP],
            libraries=["m"],
            optional=True,
        )
    )
setup(ext_modules=extensions, cmdclass={"build_ext": Build})
