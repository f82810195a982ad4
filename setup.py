"""Drives CMake, which knows how to build; see CMakeLists.txt. MAX_JOBS limits the compile jobs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

from preflight import KNOWN, VERSION, torches

ROOT = Path(__file__).parent.resolve()
PRODUCTS = ("lib", "include", "share")  # what CMake installs inside the Python package
TORCHES = torches()
REPOSITORY = re.search(r'^repository = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def tool(name):
    """The program of this environment, which need not be activated, before the system's."""
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)


def tree():
    """The folder in which CMake builds for these torches, and tests/gate does too. Another kind of
    machine has a tree of its own; _PYTHON_HOST_PLATFORM names it, as in builds of Python."""
    name = "torch-" + "-".join(TORCHES)
    machine = sysconfig.get_platform().rpartition("-")[2]
    return ROOT / "build" / (name if machine == os.uname().machine else f"{name}-{machine}")


class build_cmake(Command):
    """Configure, build and install libqkv.so into the package."""

    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self):
        cmake = tool("cmake") or sys.exit("cmake is missing: pip install cmake ninja")
        where = tree()
        configure = [cmake, "-S", ROOT, "-B", where, "-DQKV_TORCH=ON"]
        configure += ["-DQKV_TORCHES=" + ";".join(map(str, TORCHES.values()))]
        configure += [f"-DQKV_RELOCATABLE={'OFF' if self.editable_mode else 'ON'}"]
        if ninja := tool("ninja"):
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = ["--parallel", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        where.mkdir(parents=True, exist_ok=True)
        subprocess.check_call(configure, cwd=where)  # ninja leaves a log in the current folder
        subprocess.check_call([cmake, "--build", where, "--target", "operators", *jobs])
        subprocess.check_call([cmake, "--install", where, "--prefix", self.package_dir()])

    def package_dir(self):
        return ROOT / "torch_ext" / "qkv" if self.editable_mode else Path(self.build_lib) / "qkv"

    def get_source_files(self):
        return []

    def get_outputs(self):
        found = (f for p in PRODUCTS for f in (self.package_dir() / p).rglob("*") if f.is_file())
        return [str(f) for f in found]

    def get_output_mapping(self):
        return {}


class build_all(build):
    sub_commands = [*build.sub_commands, ("build_cmake", None)]

    def run(self):
        # A module that is gone from the sources must not stay in the build.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class wheel(bdist_wheel):
    def get_tag(self):
        """The tag of one wheel for every Python 3, since the library does not link Python."""
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


def requirement():
    """The minor versions of torch that were built for, since torch's C++ interface changes with the
    minor version. An sdist may still be built for any version that it knows."""
    if len(TORCHES) == 1:
        return f"torch=={next(iter(TORCHES))}.*"
    minors = sorted(tuple(map(int, minor.split("."))) for minor in TORCHES or KNOWN)
    (first, low), (last, high) = minors[0], minors[-1]
    return f"torch>={first}.{low},<{last}.{high + 1}"


def description():
    """The README for PyPI, which has none of the files that its links lead to: they lead to the
    repository, and are only names while pyproject.toml names none."""
    link = rf"[\1]({REPOSITORY}/blob/v{VERSION}/\2)" if REPOSITORY else r"\1"
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", link, (ROOT / "README.md").read_text())


def urls():
    """The project's links on PyPI."""
    if not REPOSITORY:
        return {}
    at_this_version = f"{REPOSITORY}/blob/v{VERSION}"
    return {
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Documentation": f"{at_this_version}/README.md",
        "Changelog": f"{at_this_version}/CHANGELOG.md",
    }


setup(
    project_urls=urls(),
    long_description=description(),
    long_description_content_type="text/markdown",
    install_requires=[requirement()],
    cmdclass={"build": build_all, "build_cmake": build_cmake, "bdist_wheel": wheel},
    distclass=BinaryDistribution,
)
