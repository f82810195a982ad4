"""Every operator in the child of a fork(), where torch's OpenMP threads are gone: what opens a
parallel region there waits for them for ever. So in DataLoader workers."""

import json

import pytest
from forks import run_forked

# Results of torch operators that ours call, each with more elements than torch leaves to one
# thread (32768). Inputs are made before the fork, gradients asked for by autograd.grad, and bits
# compared by numpy: none of that opens a region.
CASES = """
import json, os, signal, sys, torch, qkv
torch.manual_seed(0)
torch.set_num_threads(2)

def make(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)

def inputs(B=4, H=4, L=128, S=128, D=64, **options):
    return [make(B, H, n, D, **options) for n in (L, S, S)]

def step(f, leaves):
    # Runs f, which has one result or several, forward and backward.
    results = f()
    results = [results] if torch.is_tensor(results) else [x for x in results if x.requires_grad]
    seeds = [torch.ones(1, dtype=x.dtype).expand(x.shape) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, seeds)]

def attention(*x, **options):
    leaves = [t for t in (*x, *options.values()) if torch.is_tensor(t) and t.requires_grad]
    return step(lambda: qkv.attention(*x, **options), leaves)

def misaligned(*shape):
    # A tensor that begins one byte after where a float may begin.
    memory = torch.zeros(4 * torch.Size(shape).numel() + 1, dtype=torch.uint8)
    return torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=1,
                            count=torch.Size(shape).numel()).view(shape)

Q, K, V = inputs()
H, I, J = inputs(dtype=torch.bfloat16)
ONE = make(4, 1, 128, 64)  # a key whose gradient is summed over heads
HALF_ONE = make(4, 1, 128, 64, dtype=torch.bfloat16)
SHARED = make(1, 4, 128, 64)  # ... over the batch
NO_KEYS = make(4, 4, 0, 64)
MASK, WIDE_MASK = make(4, 4, 128, 128), make(8, 4, 256, 256)  # 1 and 8 MiB
ROWS, COLUMNS = make(128, 128), make(4, 1, 1, 128)
PACKED = [make(1000, 4, 64) for _ in range(3)]
ENDS = torch.tensor([200, 500, 600])  # gaps of 200 and 400 rows
BYTES = [misaligned(4, 4, 128, 64) for _ in range(3)]
CACHE = [make(4, 4, 300, 64, grad=False) for _ in range(2)]
NEW = [make(4, 4, 8, 64, grad=False) for _ in range(3)]
LENGTHS = torch.full((4,), 200, dtype=torch.int32)
BATCH = make(3, 4, 4, 128, 64, grad=False)
GRAD = make(4, 4, 128, 64, grad=False)
PARTS = [[make(*shape, grad=False) for _ in range(2)] for shape in ((4, 8, 256, 64), (4, 8, 256))]
LATENT = [make(*shape, grad=False) for shape in (
    (4, 8, 256, 64), (4, 8, 256, 64), (4, 1, 256, 64), (4, 1, 256, 64), (8, 64, 64), (8, 64, 64))]
JAGGED = torch.nested.nested_tensor_from_jagged(make(1000, 4, 64, grad=False),
                                                torch.tensor([0, 300, 1000]))

def autocast(f):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return f()

def cases():
    plain = [x.detach() for x in (Q, K, V)]
    return {
        "attention": lambda: attention(Q, K, V),
        "with lse": lambda: attention(Q, K, V, return_lse=True),
        "half": lambda: attention(H, I, J),
        "broadcast key": lambda: attention(Q, ONE, V),
        "key of one batch item": lambda: attention(Q, SHARED, V),
        "broadcast key in half": lambda: attention(H, HALF_ONE, J),
        "no keys": lambda: attention(Q, NO_KEYS, NO_KEYS),
        "mask": lambda: attention(Q, K, V, MASK),
        "large mask": lambda: attention(*LARGE, WIDE_MASK),
        "mask for all": lambda: attention(Q, K, V, ROWS),
        "mask of keys": lambda: attention(Q, K, V, COLUMNS),
        "slopes and sinks": lambda: attention(
            Q, K, V, alibi_slopes=make(4, 4), sinks=make(4), dropout_p=0.3),
        "misaligned": lambda: [qkv.attention(*BYTES)],
        "autocast": lambda: [autocast(lambda: qkv.attention(*plain))],
        "autocast, jagged": lambda: [
            autocast(lambda: qkv.attention(*[JAGGED.transpose(1, 2)] * 3)).values()],
        "varlen with gaps": lambda: step(
            lambda: qkv.varlen_attn(*PACKED, ENDS, None, 300, 300), PACKED),
        "autocast, varlen": lambda: [autocast(
            lambda: qkv.varlen_attn(*PACKED, ENDS, None, 300, 300))],
        "weights": lambda: step(lambda: qkv.attention_weights(Q, K), [Q, K]),
        "weights in half": lambda: step(lambda: qkv.attention_weights(H, I), [H, I]),
        "weights, heads": lambda: step(
            lambda: qkv.attention_weights(Q, ONE, reduce="heads"), [Q, ONE]),
        "weights, queries": lambda: step(
            lambda: qkv.attention_weights(*LARGE[:2], MASK_OF_ALL, reduce="queries"), LARGE[:2]),
        "hard": lambda: step(lambda: qkv.hard_attention(Q, K, V), [V]),
        "hard, straight through": lambda: step(
            lambda: qkv.hard_attention(Q, ONE, V, straight_through=True), [Q, ONE, V]),
        "hard in half": lambda: step(lambda: qkv.hard_attention(H, I, J), [J]),
        "kvcache": lambda: [qkv.attention_with_kvcache(
            NEW[0], *CACHE, *NEW[1:], cache_seqlens=LENGTHS), *CACHE],
        "misaligned kvcache": lambda: [qkv.attention_with_kvcache(BYTES[0], *BYTES[1:])],
        "merge": lambda: qkv.merge(*PARTS),
        "latents": lambda: [qkv.latent_attention(*LATENT, absorb=False)],
        "latents, absorbed": lambda: [qkv.latent_attention(*LATENT, absorb=True)],
        "vmap": lambda: [torch.func.vmap(qkv.attention)(BATCH, BATCH, BATCH)],
        "func": lambda: torch.func.vjp(
            qkv.attention, plain[0], ONE.detach(), plain[2])[1](GRAD),
    }

LARGE = inputs(8, 4, 256, 256, 8)
MASK_OF_ALL = torch.ones(256, 256, dtype=torch.bool)
"""

RUN = """
def bits(results):
    import numpy
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [x.detach().view(views[x.element_size()]).numpy().tobytes()
            for x in results]

def after_fork(case):
    torch.manual_seed(0)  # of dropout
    expected = bits(case())
    torch.manual_seed(0)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a hang ends here
        try:
            same = bits(case()) == expected
            os._exit(0 if same and torch.get_num_threads() == 2 else 1)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

torch.ones(1000, 1000).sum()  # so that there are threads that the children lack
print(json.dumps({name: after_fork(case) for name, case in cases().items()}))
"""

NAMES = [line.split('"')[1] for line in CASES.splitlines() if line.startswith('        "')]


@pytest.fixture(scope="module")
def exit_codes():
    """The exit codes of one child for each case."""
    *_, last = run_forked(CASES + RUN, timeout=600).splitlines()  # warnings come before it
    return json.loads(last)


@pytest.mark.parametrize("name", NAMES)
def test_operator(name, exit_codes):
    """An exit code of -14 is a child that hung until SIGALRM, and 1 a child with other bits or
    other settings than its parent."""
    assert exit_codes[name] == 0
