"""Drives CMake, which knows how to build; see CMakeLists.txt. MAX_JOBS limits the compile jobs."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent.resolve()
PRODUCTS = ("lib", "include", "share")  # what CMake installs inside the Python package

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(
        f"\nqkv is built against the torch of your environment, and {sys.executable} has none.\n"
        "  pip install torch\n"
        "  pip install setuptools cmake ninja\n"
        "  pip install --no-build-isolation .\n"
        "(without --no-build-isolation pip builds in an empty environment)\n"
    )
TORCH = Path(spec.origin).parent
TORCH_MINOR = ".".join(importlib.metadata.version("torch").split(".")[:2])


def tool(name):
    """The program of this environment, which need not be activated, before the system's."""
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)


class build_cmake(Command):
    """Configure, build and install libqkv.so into the package."""

    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self):
        cmake = tool("cmake") or sys.exit("cmake is missing: pip install cmake ninja")
        where = ROOT / "build" / f"torch-{TORCH_MINOR}"  # tests/run builds there too
        configure = [cmake, "-S", ROOT, "-B", where, "-DQKV_TORCH=ON"]
        configure += [f"-DTorch_DIR={TORCH / 'share' / 'cmake' / 'Torch'}"]
        if ninja := tool("ninja"):
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = ["--parallel", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        where.mkdir(parents=True, exist_ok=True)
        subprocess.check_call(configure, cwd=where)  # ninja leaves a log in the current folder
        subprocess.check_call([cmake, "--build", where, "--target", "qkv", *jobs])
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
        shutil.rmtree(self.build_lib, ignore_errors=True)  # modules that are gone from the sources
        super().run()


class wheel(bdist_wheel):
    def get_tag(self):
        """One wheel for every Python 3: the library does not link Python."""
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    install_requires=[f"torch=={TORCH_MINOR}.*"],  # the C++ autograd ABI changes with the minor
    cmdclass={"build": build_all, "build_cmake": build_cmake, "bdist_wheel": wheel},
    distclass=BinaryDistribution,
)
