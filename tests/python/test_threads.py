"""Threads: the same bits for any number of them, torch's settings obeyed, no hang after fork()."""

import concurrent.futures
import threading

import pytest
import torch
from common import dtypes_of, run_python
from forks import run_forked

attention_with_lse = torch.ops.qkv.attention_with_lse

# (H, Hkv, L, S, D), options. Between them: one key split, many, tails of every kind, many small
# items, one large one, heads that share keys.
SHAPES = {
    "decode": ((8, 8, 1, 2000, 64), {}),
    "decode, gqa": ((8, 2, 1, 1100, 128), {"enable_gqa": True}),
    "few queries, many keys": ((2, 1, 5, 3000, 33), {"enable_gqa": True}),
    "tiny": ((1, 1, 1, 1, 8), {}),
    "small": ((4, 4, 16, 16, 32), {}),
    "tails": ((3, 3, 197, 131, 40), {}),
    "causal": ((4, 4, 300, 300, 64), {"is_causal": True}),
    "causal, gqa": ((6, 2, 257, 300, 24), {"is_causal": True, "enable_gqa": True}),
    "many heads": ((40, 40, 20, 33, 16), {}),
    "one long head": ((1, 1, 1500, 1500, 64), {}),
    "one long causal head": ((1, 1, 1201, 1201, 17), {"is_causal": True}),
    "window": ((2, 2, 400, 500, 24), {"window_size": (70, 0)}),
    "window on one side, softcap": (
        (3, 1, 150, 90, 16),
        {"window_size": (-1, 20), "softcap": 4.0, "enable_gqa": True},
    ),
    "many queries, few keys": ((1, 1, 3000, 3, 64), {}),
}


def inputs_of(shape, batch=1, dtype=torch.float32):
    H, Hkv, L, S, D = shape
    sizes = [(H, L, D), (Hkv, S, D), (Hkv, S, D)]
    return [torch.randn(batch, *size, dtype=dtype).requires_grad_() for size in sizes]


def everything(inputs, seeds, options):
    """Output, lse and gradients of a call."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = attention_with_lse(*inputs, **options)
    return [*results, *torch.autograd.grad(results, inputs, seeds)]


def seeds_of(inputs, options):
    return [torch.randn_like(x) for x in attention_with_lse(*inputs, **options)]


def assert_same_bits(x, y):
    for a, b in zip(x, y, strict=True):
        assert torch.equal(a, b)


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", SHAPES)
@dtypes_of("f32", "f64", "bf16", "f16")
class TestSameBits:
    def test_any_number_of_threads(self, shape, dtype, threads):
        sizes, options = SHAPES[shape]
        inputs = inputs_of(sizes, dtype=dtype)
        seeds = seeds_of(inputs, options)
        threads(1)
        expected = everything(inputs, seeds, options)
        for n in (2, 3, 4, 4, 7):  # 4 twice, since runs may differ, too
            threads(n)
            assert_same_bits(everything(inputs, seeds, options), expected)

    def test_any_batch_size(self, shape, dtype, threads):
        sizes, options = SHAPES[shape]
        inputs = inputs_of(sizes, 8, dtype)
        seeds = seeds_of(inputs, options)
        whole = everything(inputs, seeds, options)
        for n, item in [(4, 0), (3, 5), (1, 7)]:
            threads(n)
            alone = everything(
                *([x[item : item + 1] for x in xs] for xs in (inputs, seeds)), options
            )
            assert_same_bits(alone, [x[item : item + 1] for x in whole])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("group", [1, 3])
def test_a_bias_that_key_heads_share(group, threads):
    """Planes add to the same elements, in their order."""
    query, key, value = inputs_of((2 * group, 2, 390 // group, 512, 8))
    bias = torch.randn(390 // group, 512, requires_grad=True)
    grad = torch.randn_like(query)

    def grad_bias():
        output = torch.ops.qkv.attention(query, key, value, bias=bias, enable_gqa=True)
        return torch.autograd.grad(output, bias, grad)

    threads(1)
    expected = grad_bias()
    for n in (2, 3, 7):
        threads(n)
        assert_same_bits(grad_bias(), expected)


@pytest.mark.usefixtures("isa")
class TestCallers:
    """Attention is called from wherever it may be called."""

    def work(self):
        torch.manual_seed(0)
        inputs = inputs_of((4, 2, 130, 170, 24))
        options = {"enable_gqa": True}
        return inputs, seeds_of(inputs, options), options

    def test_several_python_threads(self):
        call = self.work()
        expected = everything(*call)
        start = threading.Barrier(4)

        def caller():
            start.wait()
            return [everything(*call) for _ in range(10)]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(caller) for _ in range(4)]:
                for results in future.result(timeout=60):
                    assert_same_bits(results, expected)

    def test_threads_that_end(self):
        """Each thread that ends may leave a team of OpenMP threads behind, which must not disturb
        the next."""
        call = self.work()
        expected = everything(*call)
        results = []
        for _ in range(20):
            thread = threading.Thread(target=lambda: results.append(everything(*call)))
            thread.start()
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert len(results) == 20
        for result in results:
            assert_same_bits(result, expected)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_inside_jit_fork(self):
        """torch.jit.fork calls from torch's inter-op pool."""
        inputs, _, options = self.work()
        expected = attention_with_lse(*inputs, **options)
        futures = [torch.jit.fork(attention_with_lse, *inputs, **options) for _ in range(8)]
        for future in futures:
            assert_same_bits(torch.jit.wait(future), expected)

    def test_backward_of_several_graphs_at_once(self):
        inputs, seeds, options = self.work()
        expected = everything(inputs, seeds, options)[2:]
        outputs = [attention_with_lse(*inputs, **options) for _ in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            run = lambda o: torch.autograd.grad(o, inputs, seeds)  # noqa: E731
            for found in pool.map(run, outputs):
                assert_same_bits(found, expected)


# No operator of torch's gets enough to do here to open a parallel region: it would start threads
# that are not ours, and hang in the child of a fork.
SETUP = """
import os, torch, qkv
def threads():
    return len(os.listdir("/proc/self/task"))
def ones(n):
    return torch.ones(1).expand(1, 4, n, 64)
def forward(n=512):
    x = [ones(n).requires_grad_() for _ in range(3)]
    return torch.ops.qkv.attention(*x), x
def step(n=512):
    y, x = forward(n)
    grads = torch.autograd.grad(y, x, ones(n))
    for z in (y, grads[2]):
        assert (z[:, ::3, ::7, ::9] - 1).abs().max() < 1e-5
"""


@pytest.mark.parametrize("n", [1, 2, 3])
def test_set_num_threads(n):
    code = f"torch.set_num_threads({n}); before = threads(); forward(); print(threads() - before);"
    code += "step(); step(); print(threads() - before)"
    forward, both = map(int, run_forked(SETUP + code).split())
    assert forward == n - 1
    assert both == forward or both == forward + 1  # autograd may have a thread of its own


def test_calls_start_no_threads():
    """A call with fewer items than threads must not end threads that torch then starts anew."""
    code = """
torch.set_num_threads(8)
def started(call, known):
    call()
    torch_op()
    new = ids() - known
    known |= new
    return len(new)
def ids():
    return set(os.listdir("/proc/self/task"))
def torch_op():
    return (torch.ones(2000, 2000) * 2).sum()
q = torch.randn(1, 3, 300, 32, requires_grad=True)
rows = torch.randn(900, 3, 32, requires_grad=True)
ends = torch.tensor([0, 200, 500, 900], dtype=torch.int32)
calls = {
    "forward": lambda: torch.ops.qkv.attention(q, q, q),
    "backward": lambda: torch.ops.qkv.attention(q, q, q).sum().backward(),
    "weights": lambda: qkv.attention_weights(q, q).square().sum().backward(),
    "hard": lambda: qkv.hard_attention(q, q, q),
    "varlen": lambda: qkv.varlen_attn(rows, rows, rows, ends, ends, 400, 400).sum().backward(),
}
before = ids()
calls["forward"]()
print("first", len(ids() - before))  # before torch has started any itself
for call in calls.values():  # torch's own, and that of the autograd engine
    started(call, ids())
known = ids()
for name, call in calls.items():
    print(name, len(known) >= 8, sum(started(call, known) for _ in range(5)))
"""
    names = ["forward", "backward", "weights", "hard", "varlen"]
    expected = ["first 7", *(f"{name} True 0" for name in names)]
    assert run_forked(SETUP + code).splitlines() == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [1, 2])
def test_omp_num_threads(n):
    code = "before = threads(); forward(); print(threads() - before)"
    assert int(run_python(SETUP + code, env={"OMP_NUM_THREADS": str(n)})) == n - 1


@pytest.mark.parametrize("used_before", ["", "step(); torch.ones(99, 999) @ torch.ones(999, 99)"])
@pytest.mark.parametrize("child", ["step()", "torch.set_num_threads(2); step()", "step(8)"])
def test_after_fork(used_before, child):
    """The child of a fork lacks its parent's OpenMP threads: workers of a DataLoader, for one."""
    code = f"""
import warnings
warnings.simplefilter("ignore")  # Python 3.12's, of forks of a process that has threads
{used_before}
pid = os.fork()
if pid == 0:
    try:
        {child}; {child}
        os._exit(0)
    except BaseException as error:
        print(error, flush=True)
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
step()
print("parent")
"""
    assert run_forked(SETUP + code, timeout=60).strip() == "parent"


def test_data_loader_workers():
    code = """
class Set(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        x = torch.full((1, 2, 300, 32), float(i))
        return torch.ops.qkv.attention(x, x, x)
step()
how = dict(batch_size=None, num_workers=2, multiprocessing_context="fork")
for i, y in enumerate(torch.utils.data.DataLoader(Set(), **how)):
    assert (y - i).abs().max() < 1e-5
    step()
print("done")
"""
    assert run_forked(SETUP + code, timeout=90).strip() == "done"


def test_one_openmp_runtime():
    code = """
torch.ones(512, 512) @ torch.ones(512, 512)
step()
files = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(*(f for f in files if os.path.basename(f).startswith(("libgomp", "libiomp", "libomp"))))
"""
    assert len(run_forked(SETUP + code).split()) == 1
