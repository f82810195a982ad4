"""Results that lie in memory of their own, 4 MiB and more, are tensors like any other."""

import copy
import io
import multiprocessing

import pytest
import torch

import qkv

N = 1024  # [1024, 1024] f32: 4 MiB, the least that is mapped


def mask_gradient():
    x = [torch.randn(1, 1, N, 8) for _ in range(3)]
    mask = torch.zeros(N, N, requires_grad=True)
    return torch.autograd.grad(qkv.attention(*x, mask).square().sum(), mask)[0]


def weights():
    return qkv.attention_weights(*(torch.randn(1, 1, N, 8) for _ in range(2)))[0, 0]


def both(test):
    return pytest.mark.parametrize("make", [mask_gradient, weights])(test)


def total(x):
    return x.sum().item()


@both
class TestResizing:
    def test_it_is_large(self, make):
        assert make().untyped_storage().nbytes() == 4 << 20
        assert make().untyped_storage().resizable()

    @pytest.mark.parametrize("rows", [1, N - 1, N + 1, 3 * N])
    def test_resize(self, make, rows):
        x = make()
        expected = x.clone().resize_(rows, N)
        x.resize_(rows, N)
        kept = min(rows, N)
        assert x.shape == (rows, N) and torch.equal(x[:kept], expected[:kept])
        x.fill_(1)
        assert total(x) == rows * N

    def test_resize_as(self, make):
        assert make().resize_as_(torch.empty(2 * N, N)).shape == (2 * N, N)

    def test_storage(self, make):
        """Storage may be freed and later filled again, as FSDP does."""
        x = make()
        expected = x.clone()
        storage = x.untyped_storage()
        storage.resize_(0)
        assert storage.nbytes() == 0
        storage.resize_(4 << 20)
        assert torch.equal(x.copy_(expected), expected)

    def test_as_out(self, make):
        out = make()
        a = torch.randn(2 * N, N)
        with pytest.warns(UserWarning, match="was resized"):
            torch.add(a, a, out=out)
        assert torch.equal(out, 2 * a)

    def test_set(self, make):
        x, other = make(), torch.ones(3)
        x.set_(other)
        assert torch.equal(x, other)
        other.set_(make().untyped_storage(), 8, (5,), (2,))
        assert other.shape == (5,)


def read_once(x, written, queue):
    """One number only: torch's sum of many has threads, which a fork lacks, and would hang."""
    written.wait()
    queue.put(x[3, 5].item())


@both
class TestCopying:
    def test_clone_and_deepcopy(self, make):
        x = make()
        for y in (x.clone(), copy.deepcopy(x), torch._lazy_clone(x)):
            assert torch.equal(x, y)
            y[0, 0] += 1
            assert not torch.equal(x, y)

    def test_saving(self, make):
        x, file = make(), io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        assert torch.equal(torch.load(file), x)

    def test_share_memory(self, make):
        x = make()
        expected = x.clone()
        assert x.share_memory_().is_shared() and torch.equal(x, expected)
        # The other process has started before x is written to here.
        context = multiprocessing.get_context("fork")
        queue, written = context.SimpleQueue(), context.Event()
        process = context.Process(target=read_once, args=(x, written, queue))
        process.start()
        x[3, 5] = 7
        written.set()
        assert queue.get() == 7
        process.join()

    def test_numpy_keeps_it_alive(self, make):
        x = make()
        expected = x.clone()
        array = x.numpy()
        del x
        assert (array == expected.numpy()).all()

    def test_profiler_sees_the_memory(self, make):
        with torch.profiler.profile(profile_memory=True) as profile:
            x = make()
        changes = [event.self_cpu_memory_usage for event in profile.key_averages()]
        assert sum(changes) >= x.untyped_storage().nbytes()


def test_each_is_freed():
    """Memory is mapped anew for each result, and given back: 100 of them would be 400 MiB."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    mask_gradient()
    before = resident()
    for _ in range(50):
        mask_gradient().resize_(2 * N, N)
        weights()
    assert resident() - before < 100
