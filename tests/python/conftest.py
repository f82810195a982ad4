"""Fixtures for every test; what the quick layer leaves to the long one; hypothesis' settings."""

import contextlib
import os
import time
import zlib
from pathlib import Path

# This is set before torch is imported: threads sleep, and do not spin, between the thousands of
# short parallel regions here. Spinning makes the tests many times slower where something else wants
# the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The cache of compiled backward passes is off: its key does not know which version of the operators
# one was made for.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
# Whether the compiler knows the CPU's vectors: Inductor compiles a program to see, which takes a
# new machine four seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import hypothesis
import pytest
import torch
import torchvision_operators  # noqa: F401
from costs import Costs
from hypothesis.internal.detection import is_hypothesis_test

import qkv
from qkv._conversion import scores

# Some files import torch's own tests, which load a profile of hypothesis where they are imported
# first: here, before ours. Which one depends on variables of the environment, such as CI.
with contextlib.suppress(ImportError):  # they need expecttest
    import torch.testing._internal.common_utils  # noqa: F401

# The models of tests are small, and their attention is to be qkv's.
scores.SMALL = 0

# torch.manual_seed is called 40,000 times in the quick layer. Of each kind of device that is not
# there torch remembers what to seed it with, and the whole stack of the call, which takes longer
# than most tests do.
for absent in (torch.cuda, torch.xpu, torch.mtia):
    if not absent.is_available():
        absent.manual_seed_all = lambda seed: None

# Of a property, in the quick layer, with each of its parameters: with five instruction sets and two
# dtypes that is 120.
EXAMPLES = 12
BEGAN = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="the long layer: see CONTRIBUTING.md")
    parser.addoption("--only-bf16", action="store_true", help="tests that run in bf16, no others")
    parser.addoption("--part", metavar="K/N", help="one in N of the tests, K = 0 up to N - 1")
    parser.addoption("--most-seconds", type=float, help="tests that begin later are skipped")


def pytest_configure(config):
    """The quick layer draws the same few examples each time, so that a change is judged by the
    change; the long one draws many new ones. QKV_TEST_EXAMPLES=<n> draws n new ones in either.
    A test draws other examples with other parameters, so that few of each are many."""
    config.addinivalue_line("markers", "bf16: runs in bf16, though no parameter says so")
    config.addinivalue_line("markers", "long: in the long layer only")
    config.addinivalue_line("markers", "one_in(n): in the quick layer one in n of its parameters")
    long, examples = config.getoption("--long"), os.environ.get("QKV_TEST_EXAMPLES")
    hypothesis.settings.register_profile(
        "qkv",
        deadline=None,
        derandomize=not (long or examples),
        database=None,
        max_examples=int(examples or (200 if long else EXAMPLES)),
        print_blob=True,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
            # A class has another instance for each parameter of its tests.
            hypothesis.HealthCheck.differing_executors,
        ],
    )
    hypothesis.settings.load_profile("qkv")
    if folder := os.environ.get("QKV_TEST_COSTS"):
        config.pluginmanager.register(Costs(folder))


def multiplies_pairs(isa):
    """Instruction sets with kernels for bf16 alone: for the other types they call those of the
    instruction set below (csrc/dispatch/kernel_table.h, `others`)."""
    return "bf16" in isa or "amx" in isa


def is_bf16(parameter):
    if isinstance(parameter, tuple):
        return any(map(is_bf16, parameter))
    return parameter is torch.bfloat16 or parameter == "bf16"


def parameters_of(item):
    return getattr(item, "callspec", None) and item.callspec.params or {}


def runs_in_bf16(item):
    return any(map(is_bf16, parameters_of(item).values())) or item.get_closest_marker("bf16")


def repeats_another(item):
    """Whether the test would run the kernels of another instruction set, which has a test of its
    own."""
    parameters = parameters_of(item)
    directly = any("isa" in mark.args[0] for mark in item.iter_markers("parametrize"))
    if directly or not multiplies_pairs(parameters.get("isa", "")):
        return False
    return not runs_in_bf16(item)


def thinned_out(items):
    """Yields the tests that one_in does not keep. A test is kept by its name, so that it has
    nothing to do with the order of dtypes, shapes and instruction sets; of each function at least
    one is kept."""
    functions = {}
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            functions.setdefault(item.nodeid.split("[")[0], []).append((item, mark.args[0]))
    for parametrized in functions.values():
        found = [item for item, n in parametrized if zlib.crc32(item.name.encode()) % n]
        yield from found if len(found) < len(parametrized) else found[1:]


def pytest_runtest_setup(item):
    limit = item.config.getoption("--most-seconds")
    if limit and time.monotonic() - BEGAN > limit:
        pytest.skip(f"no time left of {limit:.0f} seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Lets a property draw its own examples with each instruction set, dtype or other parameter.
    They follow from the test's name, and in the long layer from --hypothesis-seed as well."""
    test = getattr(item, "function", None)
    if is_hypothesis_test(test) and not os.environ.get("QKV_TEST_EXAMPLES"):
        seed = item.config.getoption("--hypothesis-seed")
        hypothesis.seed(f"{item.nodeid} {seed}")(test)


def in_another_part(config, items):
    """The tests that --part leaves out."""
    part, _, parts = (config.getoption("--part") or "0/1").partition("/")
    return {x for x in items if zlib.crc32(x.nodeid.encode()) % int(parts) != int(part)}


def pytest_collection_modifyitems(config, items):
    # A property has the examples of the profile that is loaded where it is defined.
    ours = hypothesis.settings.get_profile("qkv")
    assert hypothesis.settings.default == ours, "a file has loaded another profile"
    left_out = in_another_part(config, items)
    if config.getoption("--only-bf16"):
        left_out |= {x for x in items if not runs_in_bf16(x)}
    if not config.getoption("--long"):
        left_out |= {x for x in items if x.get_closest_marker("long") or repeats_another(x)}
        left_out |= set(thinned_out([x for x in items if x not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=[x for x in items if x in left_out])
        items[:] = [x for x in items if x not in left_out]
    if config.getoption("--most-seconds"):  # other files have no time left with another seed
        seed = config.getoption("--hypothesis-seed")
        items.sort(key=lambda x: zlib.crc32(f"{x.path.name} {seed}".encode()))


# QKV_TEST_ISAS=avx2,generic runs the tests on these instruction sets. They may be emulated ones, of
# the library that QKV_LIBRARY names (tests/emulation/twins.sh).
ISAS = [x for x in os.environ.get("QKV_TEST_ISAS", "").split(",") if x] or qkv.supported_isas()
# Elsewhere the quick layer leaves out what stands between the first and the last instruction set
# with kernels for every dtype: AVX2, on a CPU with AVX-512.
BETWEEN = [isa for isa in ISAS if not multiplies_pairs(isa)][1:-1]
ARITHMETIC = Path(__file__).with_name("arithmetic.txt").read_text().split()


def pytest_generate_tests(metafunc):
    if "isa" not in metafunc.fixturenames:
        return
    if any("isa" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return
    every = metafunc.config.getoption("--long") or metafunc.definition.path.name in ARITHMETIC
    isas = [isa for isa in ISAS if every or isa not in BETWEEN]
    metafunc.parametrize("isa", isas, indirect=True, scope="module")


@pytest.fixture(scope="module")
def isa(request):
    """Runs the test on the instruction sets of this host: on all of them in the long layer and in
    files that are about arithmetic."""
    before = qkv.active_isa()
    qkv.set_isa(request.param)
    yield request.param
    qkv.set_isa(before)


@pytest.fixture
def nothing_compiled():
    """What torch.compile has made is not taken for another test's function."""
    torch.compiler.reset()


@pytest.fixture
def onednn():
    """Whatever oneDNN can multiply, on any CPU."""
    torch.ops.qkv._set_projections("oneDNN")
    if torch.ops.qkv._projections() != "oneDNN":
        pytest.skip("torch was built without oneDNN")
    yield
    torch.ops.qkv._set_projections(None)


@pytest.fixture
def few_rows():
    """The core library multiplies few rows, on any CPU, and torch all else."""
    torch.ops.qkv._set_projections("qkv")
    yield
    torch.ops.qkv._set_projections(None)


@pytest.fixture
def no_isa_asked_for(monkeypatch):
    """Removes QKV_ISA from the environment, for tests whose processes ask for instruction sets
    themselves."""
    monkeypatch.delenv("QKV_ISA", raising=False)


@pytest.fixture
def half_products():
    """Lets a test call qkv.set_half_products."""
    before = qkv.active_half_products()
    yield qkv.set_half_products
    qkv.set_half_products(before)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Lets a test call torch.set_num_threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
