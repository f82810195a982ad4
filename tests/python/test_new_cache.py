"""new_cache: zeros in huge pages."""

import gc
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import qkv

HUGE_PAGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address):
    """The flags of this process's memory at this address (proc(5)); none where there is none."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in match.groups())
        elif line.startswith("VmFlags:") and begin <= address < end:
            return line.split()[1:]
    return []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (2, 2, 4096, 128), (3, 0, 4), ()], ids=str)
def test_zeros_of_the_shape_and_dtype_which_can_be_written(shape, dtype):
    cache = qkv.new_cache(shape, dtype=dtype)
    assert cache.shape == shape and cache.dtype == dtype and cache.is_contiguous()
    assert torch.equal(cache, torch.zeros(shape, dtype=dtype))
    cache.fill_(3)
    assert torch.equal(cache, torch.full(shape, 3, dtype=dtype))


def test_the_dtype_is_torchs_default():
    assert qkv.new_cache((1,)).dtype == torch.get_default_dtype()


@pytest.mark.skipif(not SETTING.exists(), reason="this system has no transparent huge pages")
def test_a_large_cache_asks_for_huge_pages_and_begins_with_one():
    cache = qkv.new_cache((2, HUGE_PAGE + 1), dtype=torch.int8)
    assert cache.data_ptr() % HUGE_PAGE == 0
    for byte in (0, cache.numel() - 1):
        assert "hg" in flags_at(cache.data_ptr() + byte)


@pytest.mark.long
@pytest.mark.skipif(not SETTING.exists(), reason="this system has no transparent huge pages")
def test_the_memory_lives_as_long_as_views_of_the_cache():
    cache = qkv.new_cache((2, HUGE_PAGE), dtype=torch.int8)
    last, begin = cache[1, -1:], cache.data_ptr()
    del cache
    gc.collect()
    assert last.item() == 0 and "hg" in flags_at(begin)
    del last
    gc.collect()
    assert "hg" not in flags_at(begin)


def test_attention_reads_and_writes_it_as_any_cache():
    torch.manual_seed(0)
    plain = torch.zeros(2, 1, 2, 4096, 64)
    huge = qkv.new_cache(plain.shape)
    query = torch.randn(1, 8, 3, 64)
    key, value = torch.randn(2, 1, 2, 3, 64)
    outputs = []
    for keys, values in (plain, huge):
        keys[..., :4000, :] = values[..., :4000, :] = torch.arange(64) / 64
        outputs.append(
            qkv.attention_with_kvcache(query, keys, values, key, value, cache_seqlens=4000)
        )
    assert torch.equal(*outputs) and torch.equal(plain, huge)


def test_a_negative_size_is_an_error():
    with pytest.raises(ValueError, match=r"shape: .*\(2, -1\)"):
        qkv.new_cache((2, -1))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("record", [
    lambda f, x: torch.compile(f, backend="aot_eager", fullgraph=True),
    lambda f, x: make_fx(f)(x),
    lambda f, x: torch.jit.trace(f, x, check_trace=False),
], ids=["compile", "make_fx", "trace"])  # fmt: skip
def test_what_is_recorded_makes_a_large_cache_in_each_run(record):
    def written(x):
        return qkv.new_cache((HUGE_PAGE,)).add_(x)

    one = torch.ones(())
    program = record(written, one)
    assert all(torch.equal(program(one), torch.ones(HUGE_PAGE)) for _ in range(2))


def test_a_large_cache_under_fake_tensor_mode():
    with FakeTensorMode() as mode:
        cache = qkv.new_cache((HUGE_PAGE,))
    assert mode.is_our_fake(cache) and cache.shape == (HUGE_PAGE,)
