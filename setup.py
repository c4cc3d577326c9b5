"""The compiled parts, built where they can be: without them truedraft works as well, only slower."""

import platform
import sys

from setuptools import Extension, setup

x86 = platform.machine().lower() in ("x86_64", "amd64") and sys.platform == "linux"
native = "src/truedraft/runtime/native"

stores = Extension(
    "truedraft.stores._compiled",
    sources=[f"src/truedraft/stores/{name}.c" for name in ("automaton", "likeliest", "trigrams")],
    extra_compile_args=["-O3"],
    libraries=[] if sys.platform == "win32" else ["m"],
    optional=True,
)
trees = Extension(
    "truedraft.stores._trees", sources=["src/truedraft/stores/_trees.c"], extra_compile_args=["-O3"], optional=True
)
setup(
    ext_modules=[
        stores,
        trees,
        Extension(
            "truedraft.runtime.native._pass",
            sources=[f"{native}/pass.c"],
            depends=[f"{native}/{name}.inc" for name in ("linear", "panels", "recurrent")],
            # products and sums stay apart where the source keeps them apart: results are to be the same everywhere
            extra_compile_args=["-O3", "-ffp-contract=off", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            libraries=["m"],
            optional=True,
        ),
    ]
    if x86
    else [stores, trees]
)
