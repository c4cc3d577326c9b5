"""The compiled pass, built where it can be: without it truedraft works as well, on the model's own forward."""

import platform
import sys

from setuptools import Extension, setup

x86 = platform.machine().lower() in ("x86_64", "amd64") and sys.platform == "linux"
native = "src/truedraft/runtime/native"

setup(
    ext_modules=[
        Extension(
            "truedraft.runtime.native._pass",
            sources=[f"{native}/pass.c"],
            depends=[f"{native}/linear.inc"],
            # products and sums stay apart where the source keeps them apart: results are to be the same everywhere
            extra_compile_args=["-O3", "-ffp-contract=off", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            libraries=["m"],
            optional=True,
        )
    ]
    if x86
    else []
)
