"""Two builds of qkv, by the setup.py of each: the working tree as it is, and a commit."""

import io
import os
import re
import subprocess
import sys
import tarfile

import torch

from ..processes import ROOT

BUILDS = ROOT / "build" / "against"
TORCH = "torch-" + ".".join(torch.__version__.split(".")[:2])


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def short_hash(commit):
    """Raises ValueError."""
    found = git("rev-parse", "--verify", "--short", "--end-of-options", commit + "^{commit}")
    if found.returncode:
        raise ValueError(f"--against: git knows no commit '{commit}': {found.stderr.strip()}")
    return found.stdout.strip()


def working_tree():
    """Its commit, and whether it differs from that."""
    return git("describe", "--always", "--dirty", "--exclude=*").stdout.strip()


def build_now():
    """Brings the build tree that setup.py has up to date. Returns a folder with the Python package
    and its library."""
    return build(ROOT, BUILDS / "now", {})


def build_then(commit):
    """The same of a commit, by its short hash. It stays: a second time there is nothing to do."""
    package, tree = BUILDS / commit / "package", BUILDS / commit / "tree"
    if not (package / "qkv" / "lib" / TORCH / "libqkv.so").exists():
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(tree, filter="data")
        build(tree, package, same_compiler())
    return package


def same_compiler():
    """What tells CMake to compile as in the build tree of the working tree."""
    cache = (ROOT / "build" / TORCH / "CMakeCache.txt").read_text()
    match = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", cache, re.M)
    return {"CXX": match[1]} if match else {}


def build(source, package, environment):
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(package)]
    env = os.environ | environment
    subprocess.run(command, cwd=source, env=env, stdout=sys.stderr, check=True)
    return package
