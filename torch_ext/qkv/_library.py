"""Finds and loads libqkv.so, which holds the operators."""

import os
from importlib import metadata
from pathlib import Path

import torch

from qkv.version import __version__

# Absolute, and nowhere else: a folder that happens to be in sys.path, such as the current one, may
# hold anything by the name of qkv/lib/libqkv.so.
PACKAGE_DIR = Path(__file__).resolve().parent

# Where find_package(qkv) looks: pass it in CMAKE_PREFIX_PATH.
cmake_prefix_path = str(PACKAGE_DIR / "share" / "cmake")

BUILD = "`pip install --no-build-isolation .` in qkv's repository, in this environment"


def _fitting() -> Path:
    """The library for this torch: the C++ interface of torch changes with every minor version."""
    folder, minor = PACKAGE_DIR / "lib", ".".join(torch.__version__.split(".")[:2])
    library = folder / f"torch-{minor}" / "libqkv.so"
    if library.is_file():
        return library
    built = sorted(
        (found.parent.name.removeprefix("torch-") for found in folder.glob("torch-*/libqkv.so")),
        key=lambda minor: [int(number) for number in minor.split(".")],
    )
    if built:
        raise ImportError(
            f"qkv was built for torch {', '.join(built)}, but torch {torch.__version__} is "
            f"installed. Install a torch that fits, or build qkv for this one: {BUILD}."
        )
    raise ImportError(
        f"qkv is not built: there is no {library}. Run {BUILD}, and import it from a folder whose "
        "sources do not hide what is installed; or add -e, which builds beside the sources."
    )


def library() -> Path:
    """The package's library, or the build of it that QKV_LIBRARY names: for tests of builds that
    nobody installs, with sanitizers or emulated instruction sets, say."""
    other = os.environ.get("QKV_LIBRARY")
    return Path(other).resolve() if other else _fitting()


def version_of(package: str) -> str:
    """That of what is installed by this name; "" if nothing is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def load() -> None:
    torch.ops.load_library(library())
    if (version := torch.ops.qkv._version()) != __version__:
        raise ImportError(
            f"{library()} is of qkv {version}, but the Python package around it is qkv "
            f"{__version__}. Install one of them anew: {BUILD}."
        )
