"""Fixtures for every test; hypothesis' settings. QKV_TEST_EXAMPLES=<n> draws n, at random.

QKV_TEST_ISAS=<name>,<name> runs on those instruction sets instead of all that this CPU has: on the
emulated ones, say, of the library that QKV_LIBRARY names (tests/emulation/twins.sh)."""

import os

# Before torch is imported: threads that sleep, not spin, between the thousands of short parallel
# regions here. Spinning makes the tests many times slower where something else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Its key does not know which version of the operators a compiled backward pass was made for.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import hypothesis
import pytest
import torch

import qkv

EXAMPLES = os.environ.get("QKV_TEST_EXAMPLES")
hypothesis.settings.register_profile(
    "qkv",
    deadline=None,
    derandomize=EXAMPLES is None,
    database=None,
    max_examples=int(EXAMPLES or 200),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("qkv")


ISAS = os.environ["QKV_TEST_ISAS"].split(",") if "QKV_TEST_ISAS" in os.environ else None


@pytest.fixture(scope="module", params=ISAS or qkv.supported_isas())
def isa(request):
    """Runs the test on every instruction set of this host."""
    before = qkv.active_isa()
    qkv.set_isa(request.param)
    yield request.param
    qkv.set_isa(before)


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
