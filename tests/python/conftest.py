"""Fixtures for every test; what the quick layer leaves to the long one; hypothesis' settings."""

import os
import zlib

# This is set before torch is imported: threads sleep, and do not spin, between the thousands of
# short parallel regions here. Spinning makes the tests many times slower where something else wants
# the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The cache of compiled backward passes is off: its key does not know which version of the operators
# one was made for.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import hypothesis
import pytest
import torch
import torchvision_operators  # noqa: F401

import qkv


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="the long layer: see CONTRIBUTING.md")
    parser.addoption("--only-bf16", action="store_true", help="tests that run in bf16, no others")


def pytest_configure(config):
    """The quick layer draws the same few examples each time, so that a change is judged by the
    change; the long one draws many new ones. QKV_TEST_EXAMPLES=<n> draws n new ones in either."""
    config.addinivalue_line("markers", "bf16: runs in bf16, though no parameter says so")
    config.addinivalue_line("markers", "long: in the long layer only")
    config.addinivalue_line("markers", "one_in(n): in the quick layer one in n of its parameters")
    long, examples = config.getoption("--long"), os.environ.get("QKV_TEST_EXAMPLES")
    hypothesis.settings.register_profile(
        "qkv",
        deadline=None,
        derandomize=not (long or examples),
        database=None,
        max_examples=int(examples or (200 if long else 50)),
        print_blob=True,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
        ],
    )
    hypothesis.settings.load_profile("qkv")


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


def pytest_collection_modifyitems(config, items):
    left_out = set()
    if config.getoption("--only-bf16"):
        left_out |= {x for x in items if not runs_in_bf16(x)}
    if not config.getoption("--long"):
        left_out |= {x for x in items if x.get_closest_marker("long") or repeats_another(x)}
        left_out |= set(thinned_out([x for x in items if x not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=[x for x in items if x in left_out])
        items[:] = [x for x in items if x not in left_out]


# QKV_TEST_ISAS=avx2,generic runs the tests on these instruction sets. They may be emulated ones, of
# the library that QKV_LIBRARY names (tests/emulation/twins.sh).
ISAS = [x for x in os.environ.get("QKV_TEST_ISAS", "").split(",") if x] or qkv.supported_isas()


@pytest.fixture(scope="module", params=ISAS)
def isa(request):
    """Runs the test on every instruction set of this host."""
    before = qkv.active_isa()
    qkv.set_isa(request.param)
    yield request.param
    qkv.set_isa(before)


@pytest.fixture
def no_isa_asked_for(monkeypatch):
    """Removes QKV_ISA from the environment, for tests whose processes ask for instruction sets
    themselves."""
    monkeypatch.delenv("QKV_ISA", raising=False)


@pytest.fixture
def half_products():
    """Lets a test call qkv.set_half_products."""
    before = qkv.half_products()
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
