"""What qkv cannot be built on is refused in a sentence, before anything is downloaded."""

import ast
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from common import fake_torch

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "preflight.py").exists():
    pytest.skip("no sources here", allow_module_level=True)
preflight = importlib.import_module("preflight")


def refused(check, *arguments):
    with pytest.raises(SystemExit) as refusal:
        check(*arguments)
    return refusal.value.code


@pytest.mark.parametrize("system, name", [("darwin", "macOS"), ("win32", "Windows")])
def test_another_system(system, name, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    assert f"runs on Linux alone, and this is {name}." in refused(preflight.check_system)


def test_another_c_library(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))  # as on Alpine
    assert f"{sys.executable} runs on another C library: musl" in refused(preflight.check_system)


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.18")
    said = refused(preflight.check_python)
    assert f"needs Python 3.10 or newer, and {sys.executable} is Python 3.9.18." in said


def test_a_torch_without_wheels_for_this_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.13")
    said = refused(preflight.main, ["2.15.0", "2.13.0"])
    assert "torch 2.15 has no wheels for Python 3.10.13" in said and "begin with 3.11." in said
    preflight.main(["2.13.0", "2.15.0"])  # a wheel for both, made in an environment of the first
    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    preflight.main(["2.15.0"])


def test_an_old_python_reads_as_far_as_that():
    ast.parse((ROOT / "preflight.py").read_text(), feature_version=(3, 6))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A function that puts a compiler with these macros where CXX says."""

    def put(*macros):
        program = tmp_path / "some-c++"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '#define {x}'\n" for x in macros))
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        return program

    return put


def test_an_old_compiler(compiler):
    program = compiler("__GNUC__ 11", "__GNUC_MINOR__ 4")
    said = refused(preflight.check_compiler)
    assert f"needs g++ 12 or newer, and '{program}' is g++ 11." in said
    compiler("__GNUC__ 12")
    preflight.check_compiler()


def test_another_compiler(compiler):
    program = compiler("__clang__ 1", "__GNUC__ 4")
    assert f"'{program}' is not g++: build it with CXX=g++" in refused(preflight.check_compiler)


@pytest.mark.parametrize("broken", [False, True])
def test_no_compiler(broken, compiler, monkeypatch):
    if broken:
        compiler().write_text("#!/bin/sh\nexit 1\n")
    else:
        monkeypatch.setenv("CXX", "no-such-c++ -m64")
    said = refused(preflight.check_compiler)
    assert f"needs g++ 12 or newer, and '{os.environ['CXX']}' is no compiler that works." in said
    if not broken:
        assert run(".ci/packages", "compiler") == (
            0,
            "",
        )  # which cannot mend it


def test_a_compiler_may_have_arguments(compiler, monkeypatch):
    monkeypatch.setenv("CXX", f"{compiler('__GNUC__ 12')} -m64")
    preflight.check_compiler()
    assert run(".ci/packages", "compiler") == (0, "")


@pytest.mark.parametrize(
    "thing, python, package",
    [
        ("python", "python3.99", "python3.99-venv"),
        ("python", "no-such-python", "python3-venv"),
        ("python.h", "python3.99", "python3.99-dev"),
    ],
)
def test_no_python(thing, python, package, tmp_path, monkeypatch):
    """Someone who is not root is told what to install."""
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHON", python)
    status, said = run(".ci/packages", thing)
    assert status == 1
    assert f"apt-get install {package}\n" in said and f"'{python}'" in said


@pytest.fixture
def torches(monkeypatch):
    """A function that refuses to build for the torches in these folders, and returns why."""

    def refused_torches(*folders):
        monkeypatch.setenv("QKV_TORCHES", os.pathsep.join(map(str, folders)))
        return refused(preflight.torches)

    return refused_torches


def test_torches_that_do_not_fit(torches, tmp_path):
    other = fake_torch(tmp_path / "other", "2.9")
    assert f"is written for torch 2.13, 2.14, 2.15, and {other} is torch 2.9.1." in torches(other)
    assert f"{tmp_path} is no torch that has C++ headers" in torches(tmp_path)
    minor = preflight.KNOWN[0]
    one, two = (fake_torch(tmp_path / name, minor) for name in ("one", "two"))
    assert f"{one} and {two} are both torch {minor}: name one" in torches(one, two)


def test_all_that_fits_passes(tmp_path, compiler, monkeypatch):
    known = [fake_torch(tmp_path / minor, minor) for minor in preflight.KNOWN]
    monkeypatch.setenv("QKV_TORCHES", os.pathsep.join(map(str, known)))
    compiler("__GNUC__ 15")
    assert {re.match("[a-z]+", x)[0] for x in preflight.get_requires_for_build_wheel()} == {
        "setuptools",
        "cmake",
        "ninja",
    }
    assert preflight.torches() == dict(zip(preflight.KNOWN, known, strict=True))


@pytest.mark.parametrize("check", ["check_system", "check_python", "check_compiler", "torches"])
@pytest.mark.parametrize("hook", ["build_wheel", "prepare_metadata_for_build_editable"])
def test_hooks_check_before_setuptools_is_asked(check, hook, tmp_path, monkeypatch):
    monkeypatch.setenv("QKV_TORCHES", str(fake_torch(tmp_path, preflight.KNOWN[0])))
    monkeypatch.setattr(preflight, check, lambda: preflight.refuse(check))
    monkeypatch.setitem(sys.modules, "setuptools", None)  # to import it is an error
    assert check in refused(getattr(preflight, hook), str(tmp_path))


def run(*command):
    """The status and output of a command that gets no package from anywhere."""
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    env = {name: value for name, value in env.items() if name not in ("QKV_TORCHES", "MAKEFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_pip_says_it_before_it_downloads(tmp_path):
    """An environment of its own, which pip builds in unless told otherwise, has no torch."""
    status, said = run(sys.executable, "-m", "pip", "install", "--target", str(tmp_path), ".")
    assert status != 0
    assert "qkv is built against the torch of your environment, and" in said
    assert "No matching distribution" not in said


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_says_it_before_it_makes_an_environment():
    status, said = run("make", f"PYTHON={sys.executable}", "TORCH=2.9.1", "lint")
    assert status != 0
    assert "is written for torch 2.13, 2.14, 2.15, and TORCH is torch 2.9.1." in said
    assert not (ROOT / ".venv-2.9.1").exists()
