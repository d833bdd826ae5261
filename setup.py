"""Builds what runs on CPUs alone (`pallas_kernels/cpu/src`) where there is a C++17 compiler.

Everything else about the package is in pyproject.toml. Without a compiler, or where building
fails, the package is installed without it. SPECJAX_NO_EXTENSION=1 leaves it out.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup

_FOLDER = Path("pallas_kernels/cpu/src")
_FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-Wno-maybe-uninitialized"]


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    if named:
        return shutil.which(named.split()[0])
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _headers() -> list[str]:
    """The folder of XLA's headers; jaxlib is not there while its need is only asked for."""
    found = importlib.util.find_spec("jaxlib")
    folders = found.submodule_search_locations if found else None
    return [str(Path(folder) / "include") for folder in folders or ()]


def _extension() -> Extension:
    return Extension(
        "pallas_kernels.cpu._native",
        [str(file) for file in sorted(_FOLDER.glob("*.cc"))],
        depends=[str(file) for file in sorted(_FOLDER.glob("*.h"))],
        include_dirs=_headers(),
        extra_compile_args=_FLAGS,
        language="c++",
        optional=True,
    )


if sys.platform == "win32" or os.environ.get("SPECJAX_NO_EXTENSION") or _compiler() is None:
    setup()
else:
    setup(ext_modules=[_extension()], setup_requires=["jaxlib>=0.10"])
