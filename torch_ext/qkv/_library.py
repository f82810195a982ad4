"""Finds and loads libqkv.so, which holds the operators."""

import os
from pathlib import Path

import torch

# Absolute, and nowhere else: a folder that happens to be in sys.path, such as the current one, may
# hold anything by the name of qkv/lib/libqkv.so.
PACKAGE_DIR = Path(__file__).resolve().parent

# Where find_package(qkv) looks: pass it in CMAKE_PREFIX_PATH, beside torch.utils.cmake_prefix_path.
cmake_prefix_path = str(PACKAGE_DIR / "share" / "cmake")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def load() -> None:
    """Loads the package's library, or the build of it that QKV_LIBRARY names: for tests of builds
    that nobody installs, with sanitizers or emulated instruction sets, say."""
    if other := os.environ.get("QKV_LIBRARY"):
        torch.ops.load_library(Path(other).resolve())
        return
    library = PACKAGE_DIR / "lib" / "libqkv.so"
    if not library.is_file():
        raise ImportError(
            f"qkv is not built: there is no {library}. Run `pip install --no-build-isolation .` in "
            "its repository, in this environment, and import it from a folder whose sources do not "
            "hide what is installed; or add -e, which builds beside the sources."
        )
    built = (PACKAGE_DIR / "lib" / "torch_version.txt").read_text().strip()
    if _minor(built) != _minor(torch.__version__):
        raise ImportError(
            f"qkv was built for torch {_minor(built)}, but torch {torch.__version__} is installed. "
            "Run `pip install --no-build-isolation .` in its repository again, in this environment."
        )
    torch.ops.load_library(library)
