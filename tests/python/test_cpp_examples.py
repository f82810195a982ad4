"""examples/cpp: built with plain CMake against the installed package, and run."""

import fcntl
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
from common import attempt

import qkv

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples" / "cpp"

# The quick layer builds them once, where the wheel is installed and there are no sources
# (tests/package.sh). Beside the sources they are built in the long layer.
if (ROOT / "setup.py").exists():
    pytestmark = pytest.mark.long


def run(*command):
    """The output of a command that must end well."""
    done = attempt(*command, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# The others take torch's headers as phone_book does, for ten seconds each.
QUICK = ("phone_book", "run_exported")
LONG = ("train", "generate")
WITHOUT_PRECOMPILED = ROOT / "tests" / "cpp_examples.cmake"


@pytest.fixture(scope="module")
def programs(tmp_path_factory, request):
    """The folder of the programs, in the quick layer of QUICK alone. The workers of pytest-xdist
    share it: the first one builds them, and the others find that there is nothing left to do. The
    linker is told to drop the libraries that nothing calls, which is the default of many systems.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    options = [f"-DCMAKE_PREFIX_PATH={qkv.cmake_prefix_path}"]
    options += ["-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed"]
    wanted = QUICK
    if request.config.getoption("--long"):
        wanted += LONG
    else:
        options += [f"-DCMAKE_PROJECT_qkv_examples_INCLUDE={WITHOUT_PRECOMPILED}"]
    with (folder / "examples.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build = folder / "examples"
        run("cmake", "-S", SOURCE, "-B", build, *options)
        run("cmake", "--build", build, "--parallel", "2", "--target", *wanted)
    return build


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model and the samples that export_model.py writes."""
    folder = tmp_path_factory.mktemp("exported")
    files = folder / "model.pt2", folder / "samples.pt"
    run(sys.executable, SOURCE / "export_model.py", *files)
    return files


def test_an_exported_model(exported, programs):
    """The package names the operator, and the program, which does not, has it all the same."""
    with zipfile.ZipFile(exported[0]) as package:
        described = [package.read(x).decode() for x in package.namelist() if x.endswith(".json")]
    assert any('"target": "qkv::attention' in text for text in described)
    output = run(programs / "run_exported", *exported)
    assert output.count("differs by at most") == 2


def test_phone_book(programs):
    output = run(programs / "phone_book")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) >= 2, output
    assert losses[-1] < losses[0] / 4, output


@pytest.mark.long
def test_training_saving_loading_and_decoding(programs, tmp_path):
    saved = tmp_path / "letters.pt"
    output = run(programs / "train", saved)
    assert "saved to" in output
    output = run(programs / "generate", saved)
    assert len(output.splitlines()) == 6
    assert "query>eqruy\n" in output
    assert run(programs / "generate", saved, "z", "backgroundsh").startswith("z>z\n")


@pytest.mark.long
@pytest.mark.parametrize("arguments", [[], ["file", "Word"], ["file", "a" * 13]], ids=str)
def test_generate_says_how_it_is_called(arguments, programs):
    done = attempt(programs / "generate", *arguments)
    assert done.returncode == 2
    assert "usage: generate FILE [WORD...]" in done.stderr


@pytest.mark.parametrize(
    "program", [*QUICK, *(pytest.param(program, marks=pytest.mark.long) for program in LONG)]
)
def test_no_program_has_python(program, programs):
    """Each loads the library, run_exported too, which calls nothing of it."""
    loaded = run("ldd", programs / program)
    assert "libqkv.so" in loaded
    assert "libpython" not in loaded
