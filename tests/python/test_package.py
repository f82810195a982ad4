"""The installed package: found from any folder, by Python, by pip and by CMake."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import attempt, fake_torch, run_python
from packaging.requirements import Requirement

import qkv

ROOT = Path(__file__).resolve().parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
LIBRARY = Path(qkv.__file__).parent / "lib" / f"torch-{MINOR}" / "libqkv.so"

# Of the tests, a copy without the sources is run on wheels (tests/package.sh).
HAS_SOURCES = (ROOT / "setup.py").exists()
needs_sources = pytest.mark.skipif(not HAS_SOURCES, reason="no sources here")
# The quick layer runs these on the wheel alone.
on_the_wheel = pytest.mark.long if HAS_SOURCES else lambda test: test


# Runs what it is sent in forks of itself, which have imported torch, and of qkv nothing.
AFTER_TORCH = """
import json, os, sys, torch
for line in sys.stdin:
    code, folder, path, file = json.loads(line)
    if (pid := os.fork()) == 0:
        with open(file, "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(folder)
        sys.path[1:1] = path
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def after_torch(tmp_path_factory):
    """A function that runs code in a folder, as `python -c` would there with `path` in PYTHONPATH,
    and returns what it prints; but torch, which takes seconds to import, is there already."""
    file = tmp_path_factory.mktemp("after_torch") / "output"
    command = [sys.executable, "-c", AFTER_TORCH]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:

        def run(code, folder, path=()):
            sent = code, str(folder), [*map(str, path)], str(file)
            print(json.dumps(sent), file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n", file.read_text()
            return file.read_text()

        yield run
        process.stdin.close()


@on_the_wheel
def test_import_from_another_folder(tmp_path):
    code = "import torch, qkv; x = torch.ones(1, 1, 2, 2); print(qkv.attention(x, x, x).sum())"
    assert run_python(code, cwd=tmp_path) == "tensor(4.)\n"


def test_what_an_import_leaves_for_later(after_torch, tmp_path):
    """Layers and conversion, a third of the time of the import, come when they are asked for."""
    code = """import sys, torch, qkv
early = [x for x in sys.modules if x.startswith(("qkv.nn", "qkv._conversion", "torch._dynamo"))]
print(early, qkv.nn.Rotary.__name__, qkv.convert.__name__, qkv.Conversion.__name__)"""
    assert after_torch(code, tmp_path) == "[] Rotary convert Conversion\n"
    with pytest.raises(AttributeError, match="^module 'qkv' has no attribute 'rotary'$"):
        qkv.rotary  # noqa: B018


@needs_sources
def test_import_from_the_sources_folder(after_torch):
    """The folders in which torch_ext/qkv may hide what is installed, as with an editable
    install."""
    code = "import torch, qkv; print(torch.ops.qkv.attention.default)"
    for folder in (ROOT, ROOT / "torch_ext"):
        assert after_torch(code, folder) == "qkv.attention.default\n"


@pytest.fixture
def decoy(tmp_path):
    """A folder with files that are named like the library, but are no libraries."""
    folder = tmp_path / "anywhere"
    for name in ("", "lib", "qkv", "qkv/lib", f"qkv/lib/{LIBRARY.parent.name}"):
        path = folder / name / "libqkv.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("decoy")
    return folder


@on_the_wheel
def test_the_library_is_the_packages_own(after_torch, decoy):
    code = "import torch, qkv; print(*torch.ops.loaded_libraries)"
    found = after_torch(code, decoy).strip()
    assert found == str(LIBRARY.resolve())


@pytest.fixture
def sources(tmp_path):
    """A copy of the package that was never built."""
    built = shutil.ignore_patterns("lib", "include", "share", "__pycache__")
    shutil.copytree(Path(qkv.__file__).parent, tmp_path / "sources" / "qkv", ignore=built)
    return tmp_path / "sources"


IMPORT_ERROR = """
try:
    import qkv
except ImportError as error:
    print(error)
"""


@on_the_wheel
def test_no_other_library_is_loaded(after_torch, decoy, sources, tmp_path):
    """No other library is loaded where the current folder has one that the sources lack."""
    message = after_torch(IMPORT_ERROR, decoy, [sources])
    library = tmp_path / "sources" / "qkv" / "lib" / LIBRARY.parent.name / "libqkv.so"
    assert message.startswith(f"qkv is not built: there is no {library}. Run `pip install")


@on_the_wheel
def test_a_torch_that_no_library_fits(after_torch, sources, tmp_path):
    for minor in ("2.10", "2.8", "2.9"):
        other = sources / "qkv" / "lib" / f"torch-{minor}" / "libqkv.so"
        other.parent.mkdir(parents=True)
        other.write_text("for another torch")
    assert after_torch(IMPORT_ERROR, tmp_path, [sources]).startswith(
        f"qkv was built for torch 2.8, 2.9, 2.10, but torch {torch.__version__} is installed. "
        "Install a torch that fits, or build qkv for this one: `pip install"
    )


@on_the_wheel
def test_a_library_of_another_version(after_torch, sources, tmp_path):
    shutil.copytree(LIBRARY.parents[1], sources / "qkv" / "lib")
    own = sources / "qkv" / "lib" / LIBRARY.parent.name
    version = sources / "qkv" / "version.py"
    version.write_text(version.read_text().replace(f'"{qkv.__version__}"', '"9.8.7"'))
    assert after_torch(IMPORT_ERROR, tmp_path, [sources]).startswith(
        f"{own / 'libqkv.so'} is of qkv {qkv.__version__}, but the Python package around it is "
        "qkv 9.8.7. Install"
    )


@on_the_wheel
def test_import_before_torch_and_twice():
    code = "import qkv, torch, importlib; importlib.reload(qkv); print(qkv.active_isa())"
    assert run_python(code).strip() in qkv.supported_isas()


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", qkv.__version__)
    assert importlib.metadata.version("qkv") == qkv.__version__


def test_metadata():
    meta = importlib.metadata.metadata("qkv")
    assert meta["License-Expression"] == "Apache-2.0"
    (needed,) = [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires("qkv"))
        if requirement.name == "torch"
    ]
    assert needed.specifier.contains(torch.__version__)
    for minor in ("2.12", "2.16", "3.0", *qkv.version.TORCH_VERSIONS):
        built = (LIBRARY.parents[1] / f"torch-{minor}" / LIBRARY.name).exists()
        assert built or not needed.specifier.contains(f"{minor}.1")


@pytest.mark.skipif(not (ROOT / ".github").exists(), reason="no workflows here")
@pytest.mark.parametrize("workflow", ["tests", "release"])
def test_workflows_try_each_python_and_torch(workflow):
    """Those of the classifiers, and those of TORCH_VERSIONS."""
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text()
    pythons, torches = (re.search(rf"{x}: \[(.*)\]", text)[1] for x in ("python", "torch"))
    classified = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert re.findall(r'"(.*?)"', pythons) == classified
    assert [x.rpartition(".")[0] for x in torches.split(", ")] == [*qkv.version.TORCH_VERSIONS]


def test_public_names():
    for name in qkv.__all__:
        assert hasattr(qkv, name)
    assert {"attention", "cmake_prefix_path", "set_isa"} <= set(qkv.__all__)


def test_cmake_files():
    assert list(Path(qkv.cmake_prefix_path).rglob("qkvConfig.cmake"))


def needed_libraries(library):
    """The libraries that the dynamic loader looks for when it loads this one."""
    if not (readelf := shutil.which("readelf")):
        pytest.skip("readelf is not installed")
    listing = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True)
    return set(re.findall(r"NEEDED.*\[(.*)\]", listing.stdout))


def test_library_does_not_link_python():
    needed = needed_libraries(LIBRARY)
    assert {"libgomp.so.1", "libqkv_core.so"} <= needed
    assert not [n for n in needed if "python" in n]


def test_the_kernels_know_no_torch():
    """One libqkv_core.so serves every torch and whichever OpenMP runtime torch has brought."""
    (core,) = [
        found
        for found in LIBRARY.parents[1].rglob("libqkv_core.so")
        if found.parent in (LIBRARY.parent, LIBRARY.parents[1])
    ]
    assert not [n for n in needed_libraries(core) if re.search("torch|c10|omp|qkv", n)]


def configure(folder, commands, *options):
    """CMake's status and output for a project with these commands."""
    project = "cmake_minimum_required(VERSION 3.22)\nproject(user LANGUAGES CXX)\n"
    (folder / "CMakeLists.txt").write_text(project + commands)
    prefix = f"-DCMAKE_PREFIX_PATH={qkv.cmake_prefix_path}"
    done = attempt("cmake", "-S", folder, "-B", folder / "build", prefix, *options)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="find_package(Torch) needs CUDA's toolkit"
)
@pytest.mark.parametrize("packages", [("Torch", "qkv"), ("qkv", "Torch")], ids="+".join)
def test_beside_find_package_torch(packages, tmp_path):
    (tmp_path / "main.cpp").write_text("int main() {}")
    commands = "".join(f"find_package({name} REQUIRED)\n" for name in packages)
    commands += "add_executable(user main.cpp)\n"
    commands += "target_link_libraries(user qkv::qkv ${TORCH_LIBRARIES})\n"
    commands += "message(STATUS at=${QKV_TORCH_FOLDER}=)"
    where = f"-DTorch_DIR={torch.utils.cmake_prefix_path}/Torch"
    status, said = configure(tmp_path, commands, where)
    assert status == 0, said
    assert f"at={Path(torch.__file__).parent}=" in said


@needs_sources
def test_beside_the_sources(tmp_path):
    (tmp_path / "main.cpp").write_text("int main() {}")
    commands = f"add_subdirectory({ROOT} qkv)\nadd_executable(user main.cpp)\n"
    commands += "target_link_libraries(user qkv::qkv)\n"
    torch_here = f"-DQKV_TORCHES={Path(torch.__file__).parent}"
    status, said = configure(tmp_path, commands, torch_here)
    assert status == 0, said


def test_cmake_refuses_a_torch_that_does_not_fit(tmp_path):
    other = fake_torch(tmp_path / "other", "2.9")
    status, said = configure(tmp_path, "find_package(qkv REQUIRED)", f"-DTorch_ROOT={other}")
    assert status != 0
    assert re.search(f"built for torch [0-9., ]*{MINOR}[0-9., ]*, and torch 2.9.1 was", said)
    assert f"found in {other}" in said


def kernel_command(folder, build, *options):
    """How CMake compiles the smallest file of the kernels."""
    command = ["cmake", "-S", folder, "-B", build, "-DQKV_TORCH=OFF", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    files = json.loads((build / "compile_commands.json").read_text())
    return next(f["command"] for f in files if f["file"].endswith("/old_libstdcxx.cpp"))


@needs_sources
def test_sources_may_be_in_a_folder_with_a_space_in_its_name(tmp_path):
    folder = tmp_path / "it's in a folder"
    folder.symlink_to(ROOT)
    command = kernel_command(folder, tmp_path / "build")
    subprocess.run(f"{command} -fsyntax-only", shell=True, check=True, cwd=tmp_path / "build")


@needs_sources
@pytest.mark.parametrize(
    "options, checks",
    [
        (["-DCMAKE_BUILD_TYPE=Release"], False),
        (["-DCMAKE_BUILD_TYPE=debug"], True),  # CMake does not tell it from Debug
        (["-DQKV_SANITIZE=ON"], True),
    ],
)
def test_builds_that_look_for_mistakes_check_scores(tmp_path, options, checks):
    command = kernel_command(ROOT, tmp_path / "build", *options)
    assert ("QKV_CHECK_SCORES" in command) == checks


@needs_sources
def test_a_program_may_be_linked_statically(tmp_path):
    """As the one that tests/emulation/avx512.sh runs."""
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text("#include <vector>\nint main(int n, char**) { std::vector<int>(n).at(0); }")
    ours = ROOT / "csrc" / "old_libstdcxx.cpp"
    subprocess.run(["c++", "-std=c++17", "-static", source, ours, "-o", program], check=True)
    subprocess.run([program], check=True)
