"""The installed package: found from any folder, by Python, by pip and by CMake."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import run_python

import qkv

ROOT = Path(__file__).resolve().parents[2]


def test_import_from_another_folder(tmp_path):
    code = "import torch, qkv; x = torch.ones(1, 1, 2, 2); print(qkv.attention(x, x, x).sum())"
    assert run_python(code, cwd=tmp_path) == "tensor(4.)\n"


def test_import_from_the_sources_folder():
    """Where torch_ext/qkv lies next to, and may hide, what is installed."""
    code = "import torch, qkv; print(torch.ops.qkv.attention.default)"
    for folder in (ROOT, ROOT / "torch_ext"):
        assert run_python(code, cwd=folder) == "qkv.attention.default\n"


@pytest.fixture
def decoy(tmp_path):
    """A folder with files that are named like the library, and are none."""
    folder = tmp_path / "anywhere"
    for name in ("libqkv.so", "lib/libqkv.so", "qkv/libqkv.so", "qkv/lib/libqkv.so"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("decoy")
    return folder


def test_the_library_is_the_packages_own(decoy):
    code = "import torch, qkv; print(*torch.ops.loaded_libraries)"
    found = run_python(code, cwd=decoy).strip()
    assert found == str((Path(qkv.__file__).parent / "lib" / "libqkv.so").resolve())


def test_no_other_library_is_loaded(decoy, tmp_path):
    """Sources that were never built, imported where the current folder has what they lack."""
    package = Path(qkv.__file__).parent
    built = shutil.ignore_patterns("lib", "include", "share", "__pycache__")
    shutil.copytree(package, tmp_path / "sources" / "qkv", ignore=built)
    code = """
try:
    import qkv
except ImportError as error:
    print(error)
"""
    message = run_python(code, cwd=decoy, env={"PYTHONPATH": str(tmp_path / "sources")})
    library = tmp_path / "sources" / "qkv" / "lib" / "libqkv.so"
    assert message.startswith(f"qkv is not built: there is no {library}. Run `pip install")


def test_import_before_torch_and_twice():
    code = "import qkv, torch, importlib; importlib.reload(qkv); print(qkv.active_isa())"
    assert run_python(code).strip() in qkv.supported_isas()


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", qkv.__version__)
    assert importlib.metadata.version("qkv") == qkv.__version__


def test_metadata():
    meta = importlib.metadata.metadata("qkv")
    assert meta["License-Expression"] == "Apache-2.0"
    minor = ".".join(torch.__version__.split(".")[:2])
    requirements = importlib.metadata.requires("qkv")
    assert any(r.replace(" ", "").startswith(f"torch=={minor}") for r in requirements)


def test_public_names():
    for name in qkv.__all__:
        assert hasattr(qkv, name)
    assert {"attention", "cmake_prefix_path", "set_isa"} <= set(qkv.__all__)


def test_cmake_files():
    assert list(Path(qkv.cmake_prefix_path).rglob("qkvConfig.cmake"))


def test_library_does_not_link_python():
    library = Path(qkv.__file__).parent / "lib" / "libqkv.so"
    if not (readelf := shutil.which("readelf")):
        pytest.skip("readelf is not installed")
    listing = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", listing.stdout)
    assert "libgomp.so.1" in needed
    assert not [n for n in needed if "python" in n]


def run(*command, **options):
    """stdout. Programs that pip installed next to this Python come first: cmake, for one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options["env"] = {**os.environ, "PATH": path, **options.get("env", {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def cpp_example(tmp_path_factory):
    """examples/cpp, built with plain CMake against the installed package."""
    build = tmp_path_factory.mktemp("cpp")
    prefixes = f"{torch.utils.cmake_prefix_path};{qkv.cmake_prefix_path}"
    source = ROOT / "examples" / "cpp"
    run("cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={prefixes}")
    run("cmake", "--build", build)
    programs = [p for p in build.iterdir() if p.is_file() and os.access(p, os.X_OK)]
    assert len(programs) == 1
    return programs[0]


def test_cpp_example_converges(cpp_example, tmp_path):
    output = run(cpp_example, cwd=tmp_path, env={"OMP_NUM_THREADS": "2"})
    losses = [float(x) for x in re.findall(r"loss[ :=]+([\d.eE+-]+)", output)]
    assert len(losses) >= 2, output
    assert losses[-1] < losses[0] / 4, output


def test_cpp_example_has_no_python(cpp_example):
    assert "libpython" not in run("ldd", cpp_example)
