"""Says in one sentence why qkv cannot be built here, before anything is downloaded or compiled.

make runs it as a program:

    preflight.py 2.13.0 2.15.0     the system, this Python and these versions of torch
    preflight.py --compiler        the compiler

For pip it is the build backend that pyproject.toml names: each hook checks, and hands on to
setuptools. The syntax is Python 3.6's, so that an old Python reads as far as its sentence."""

import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST_GCC = 12
# Where the oldest Python that torch has wheels for is newer than the oldest that qkv takes.
OLDEST_PYTHON = {"2.15": (3, 11)}
TO_BUILD = ["setuptools>=77", "cmake>=3.22", "ninja"]

# Read, not imported: qkv imports torch, and needs the library that is about to be built.
_version = runpy.run_path(str(ROOT / "torch_ext" / "qkv" / "version.py"))
VERSION, KNOWN = _version["__version__"], _version["TORCH_VERSIONS"]


def refuse(sentence):
    sys.exit(f"\n{sentence}\n")


def check_system():
    name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    if sys.platform != "linux":
        refuse(
            f"qkv runs on Linux alone, and this is {name}. A container, a virtual machine, or WSL "
            "in Windows, is a Linux."
        )
    if platform.libc_ver()[0] != "glibc":
        refuse(
            f"qkv needs glibc, as torch does, and {sys.executable} runs on another C library: "
            "musl, if this is Alpine. Take a system with glibc, such as Debian."
        )


def check_python():
    oldest = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    if sys.version_info[:2] < tuple(map(int, oldest.groups())):
        refuse(
            f"qkv needs Python {oldest[1]}.{oldest[2]} or newer, and {sys.executable} is Python "
            f"{platform.python_version()}. make takes another with PYTHON=python3.12."
        )


def check_compiler():
    """Of the compiler that CMake will take: CXX, else the system's."""
    command = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++")), "c++")
    macros = [*shlex.split(command), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        said = subprocess.check_output(macros, stderr=subprocess.DEVNULL).decode()
    except (OSError, subprocess.CalledProcessError):
        refuse(
            f"qkv needs g++ {OLDEST_GCC} or newer, and {command!r} is no compiler that "
            "works. CXX=g++ takes another one."
        )
    if "__clang__" in said or "__GNUC__" not in said:
        refuse(
            f"qkv shares torch's OpenMP runtime, libgomp, and {command!r} is not g++: build it "
            f"with CXX=g++, version {OLDEST_GCC} or newer."
        )
    version = re.search(r"__GNUC__ (\d+)", said)[1]
    if int(version) < OLDEST_GCC:
        refuse(
            f"qkv needs g++ {OLDEST_GCC} or newer, and {command!r} is g++ {version}. "
            "CXX=g++-12 takes another one."
        )


def check_torch(version, where="TORCH"):
    """Returns its minor version."""
    minor = ".".join(version.split(".")[:2])
    if minor not in KNOWN:
        refuse(
            f"qkv {VERSION} is written for torch {', '.join(KNOWN)}, and {where} is torch "
            f"{version}.\n  pip install 'torch=={KNOWN[-1]}.*'"
        )
    return minor


def check_wheels(minor):
    """Of a torch that is going to be installed into an environment of this Python."""
    oldest = OLDEST_PYTHON.get(minor, (0, 0))
    if sys.version_info[:2] < oldest:
        name = ".".join(map(str, oldest))
        refuse(
            f"torch {minor} has no wheels for Python {platform.python_version()}, which "
            f"{sys.executable} is: they begin with {name}. make takes another Python with "
            f"PYTHON=python{name}, another torch with TORCH={KNOWN[0]}.0."
        )


def torches():
    """The torches to build for, as {minor version: folder}: those that QKV_TORCHES names, each the
    folder of a Python package or of LibTorch, with ":" between them; else the one of this
    environment, if it has one. The versions are those of the headers: this Python need not be able
    to import that torch."""
    if os.environ.get("QKV_TORCHES"):
        folders = [Path(name).resolve() for name in os.environ["QKV_TORCHES"].split(os.pathsep)]
    else:
        spec = importlib.util.find_spec("torch")
        folders = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
    found = {}
    for folder in folders:
        header = folder / "include" / "torch" / "headeronly" / "version.h"
        if not header.is_file():
            refuse(f"qkv: {folder} is no torch that has C++ headers: there is no {header}")
        numbers = dict(re.findall(r"define TORCH_VERSION_(\w+) (\d+)", header.read_text()))
        minor = check_torch("{MAJOR}.{MINOR}.{PATCH}".format(**numbers), folder)
        if minor in found:
            refuse(f"qkv: {found[minor]} and {folder} are both torch {minor}: name one")
        found[minor] = folder
    return found


def get_requires_for_build_wheel(config_settings=None):
    """What pip downloads to build. pyproject.toml requires nothing: that is fetched before this."""
    check_system()
    check_python()
    if not torches():
        refuse(
            "qkv is built against the torch of your environment, and "
            f"{sys.executable} has none.\n"
            "  pip install torch\n"
            f"  pip install {' '.join(map(shlex.quote, TO_BUILD))}\n"
            "  pip install --no-build-isolation .\n"
            "(without --no-build-isolation pip builds in an empty environment)"
        )
    check_compiler()
    return TO_BUILD


def _checked(name):
    """The hook of setuptools of this name, after all checks."""

    def hook(*arguments, **options):
        get_requires_for_build_wheel()
        return _setuptools(name)(*arguments, **options)

    return hook


def _setuptools(name):
    from setuptools import build_meta

    return getattr(build_meta, name)


get_requires_for_build_editable = get_requires_for_build_wheel
build_wheel = _checked("build_wheel")
build_editable = _checked("build_editable")
prepare_metadata_for_build_wheel = _checked("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _checked("prepare_metadata_for_build_editable")


def get_requires_for_build_sdist(config_settings=None):
    """A source distribution can be made anywhere, without a torch or a compiler."""
    return TO_BUILD[:1]


def build_sdist(*arguments, **options):
    return _setuptools("build_sdist")(*arguments, **options)


def main(arguments):
    if arguments == ["--compiler"]:
        return check_compiler()
    check_system()
    check_python()
    minors = [check_torch(version) for version in arguments]
    for minor in minors[:1]:  # which make installs; of the others a wheel takes the headers alone
        check_wheels(minor)


if __name__ == "__main__":
    main(sys.argv[1:])
