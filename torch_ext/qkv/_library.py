"""Finds and loads libqkv.so, which holds the operators."""

import os
import sys
from pathlib import Path

import torch


def _package_dir() -> Path:
    """The folder with lib/: this one, or the installed package's when the sources shadow it."""
    here = Path(__file__).resolve().parent
    for folder in (here, *(Path(entry or ".").resolve() / "qkv" for entry in sys.path)):
        if (folder / "lib" / "libqkv.so").is_file():
            return folder
    raise ImportError(
        f"qkv is not built: there is no lib/libqkv.so in {here}. Run "
        "`pip install --no-build-isolation .` in its repository, in this environment."
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


PACKAGE_DIR = _package_dir()

# Where find_package(qkv) looks: pass it in CMAKE_PREFIX_PATH, beside torch.utils.cmake_prefix_path.
cmake_prefix_path = str(PACKAGE_DIR / "share" / "cmake")


def load() -> None:
    """Loads the package's library, or the build of it that QKV_LIBRARY names: for tests of builds
    that nobody installs, with sanitizers or emulated instruction sets, say."""
    if other := os.environ.get("QKV_LIBRARY"):
        torch.ops.load_library(Path(other).resolve())
        return
    built = (PACKAGE_DIR / "lib" / "torch_version.txt").read_text().strip()
    if _minor(built) != _minor(torch.__version__):
        raise ImportError(
            f"qkv was built for torch {_minor(built)}, but torch {torch.__version__} is installed. "
            "Run `pip install --no-build-isolation .` in its repository again, in this environment."
        )
    torch.ops.load_library(PACKAGE_DIR / "lib" / "libqkv.so")
