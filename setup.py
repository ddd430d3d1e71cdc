"""The one native part; all else is in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile().install()
setup(
    ext_modules=[
        Pybind11Extension(
            "stoker._native._core",
            sorted(glob("src/stoker/_native/*.cc")),
            depends=sorted(glob("src/stoker/_native/*.h")),
            cxx_std=17,
            extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
        )
    ]
)
