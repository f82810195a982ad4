"""qkv.rotate: the norm over a head and the rotation of its first numbers, against torch's operators
in float64."""

import pytest
import torch
from common import COMPILERS, assert_example_runs, dtypes_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import LAYOUTS, lay_out
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, hessian, jvp, vmap

import qkv
from qkv import testing

pytestmark = pytest.mark.usefixtures("isa")
NAMES = ("query", "key", "cos", "sin", "query_weight", "key_weight")


def composed(query, key, cos, sin, *, query_weight=None, key_weight=None, eps=1e-6,
             interleaved=False, dtype=torch.float64):  # fmt: skip
    """What qkv.rotate says, of torch's operators, in dtype."""

    def rotated(x, weight):
        x = x.to(dtype)
        if weight is not None:
            norm = (x * x).mean(-1, keepdim=True).add(eps).rsqrt()
            x = x * norm * weight.to(dtype)[..., None, None, :]
        c, s = (t.to(dtype).unsqueeze(-3) for t in (cos, sin))
        pairs = c.size(-1)
        first, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (first[..., ::2], first[..., 1::2]) if interleaved else first.chunk(2, -1)
        if pairs == 0:
            a = b = first
        turned = a * c - b * s, b * c + a * s
        turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        return torch.cat([turned, rest], -1)

    return rotated(query, query_weight), rotated(key, key_weight)


def make(dtype=torch.float64, batch=(2,), H=3, Hkv=2, L=5, D=12, pairs=4, weights=(True, True),
         tables=None, seed=0):  # fmt: skip
    """The tensors of a call, by their names. tables: the leading sizes of cos and sin; None: those
    of query."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    tables = batch if tables is None else tables
    call = {"query": normal(*batch, H, L, D), "key": normal(*batch, Hkv, L, D)}
    call |= {name: normal(*tables, L, pairs) for name in ("cos", "sin")}
    given = zip(NAMES[4:], weights, strict=True)
    return call | {name: normal(D) for name, is_given in given if is_given}


def gradients(function, call, grads, **options):
    """(results, {name: gradient}) of a function of the call."""
    leaves = {name: x.detach().requires_grad_() for name, x in call.items()}
    results = function(**leaves, **options)
    pairs = [(y, g.to(y.dtype)) for y, g in zip(results, grads, strict=True) if y.requires_grad]
    ys, gs = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, [*leaves.values()], gs, allow_unused=True)
    return [y.detach() for y in results], dict(zip(leaves, found, strict=True))


@st.composite
def drawn(draw):
    """A call and its options. Positions may lie in any order, and be the same for all items."""
    D, batch = draw(st.integers(0, 150)), tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    pairs = draw(st.sampled_from([D // 2, D // 4, draw(st.integers(0, D // 2))]))
    tables = draw(st.sampled_from([batch, (), tuple(1 for _ in batch), batch[1:]]))
    call = make(
        torch.float64, batch, draw(st.integers(0, 5)), draw(st.integers(0, 3)),
        draw(st.integers(0, 40)), D, pairs, draw(st.tuples(st.booleans(), st.booleans())), tables,
        draw(st.integers(0, 99)),
    )  # fmt: skip
    layouts = {name: draw(st.sampled_from(LAYOUTS)) for name in call}
    wide = {name for name in NAMES[2:] if draw(st.booleans())}
    options = {"interleaved": draw(st.booleans()), "eps": draw(st.sampled_from([1e-6, 1e-2]))}
    return call, layouts, wide, options


@dtypes_of("f32", "f64", "bf16", "f16")
@given(case=drawn())
def test_as_torch(dtype, case):
    """No error is larger than that of torch's operators, in float32 where it is half precision."""
    call, layouts, wide, options = case
    as_wide = torch.float64 if dtype == torch.float64 else torch.float32
    call = {
        name: lay_out(x.to(as_wide if name in wide else dtype), layouts[name])
        for name, x in call.items()
    }
    grads = [torch.randn_like(call[name]) for name in ("query", "key")]
    found, gs = gradients(qkv.rotate, call, grads, **options)
    truth, true_gs = gradients(composed, {n: x.double() for n, x in call.items()}, grads, **options)
    theirs, their_gs = gradients(
        lambda **c: [y.to(dtype) for y in composed(**c, dtype=as_wide)], call, grads, **options
    )
    testing.assert_close(found, truth, theirs)
    for name, x in call.items():
        assert gs[name].dtype == x.dtype
        testing.assert_close(gs[name], true_gs[name], their_gs[name], times=1.5, name=name)
    assert all(y.dtype == dtype for y in found)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_with_every_number_twice(interleaved):
    call = make(torch.float32, D=16, pairs=8, tables=())
    expected = qkv.rotate(**call, interleaved=interleaved)
    twice = (lambda x: x.repeat_interleave(2, -1)) if interleaved else lambda x: x.repeat(1, 2)
    back = (lambda x: x[..., ::2]) if interleaved else lambda x: x[..., :8]
    call |= {name: back(twice(call[name])) for name in ("cos", "sin")}
    assert all(map(torch.equal, qkv.rotate(**call, interleaved=interleaved), expected))


def test_results_and_gradients_lie_like_their_inputs():
    call = make(torch.float32, D=16, pairs=8)
    for name in NAMES[:2]:
        call[name] = lay_out(call[name], "transposed")
    grads = [torch.randn_like(call[name]) for name in NAMES[:2]]
    results, gs = gradients(qkv.rotate, call, grads)
    for y, name in zip(results, NAMES[:2], strict=True):
        assert y.stride() == gs[name].stride() == call[name].stride()


@pytest.mark.parametrize("kept", [set(), {"query_weight"}, {"cos"}])
def test_what_is_kept_for_the_backward_pass(kept):
    """A rotation alone is linear: query and key are kept for norms and gradients of tables."""
    weights = "query_weight" in kept, False
    call = make(L=50, H=4, Hkv=1, D=16, pairs=8, weights=weights, tables=())
    leaves = {n: x.requires_grad_(n in {"query", "key"} | kept) for n, x in call.items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        results = qkv.rotate(**leaves)
    found = {name for name in NAMES[:2] for x in saved if x.data_ptr() == call[name].data_ptr()}
    assert found == ({"query"} if weights[0] else {"query", "key"} if kept else set())
    loss = sum(y.sin().sum() for y in results)
    wanted = [x for x in leaves.values() if x.requires_grad]
    expected = torch.autograd.grad(sum(y.sin().sum() for y in composed(**leaves)), wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected)


@pytest.mark.parametrize("D", [64, 80])
@dtypes_of("f32", "f64", "bf16", "f16")
def test_same_bits_for_any_number_of_threads(dtype, D):
    call = make(dtype, (3,), 4, 2, 100, D, D // 2, tables=())
    grads = [torch.randn_like(call[name]) for name in ("query", "key")]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results, gs = gradients(qkv.rotate, call, grads)
            found.append([*results, *gs.values()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def as_function(interleaved=False, names=NAMES, of=qkv.rotate):
    def function(*tensors):
        return of(**dict(zip(names, tensors, strict=True)), eps=0.1, interleaved=interleaved)

    return function


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("weights", [(True, True), (False, True), (False, False)])
class TestDerivatives:
    def leaves(self, weights, **sizes):
        call = make(**({"H": 2, "Hkv": 1, "L": 3, "D": 6, "pairs": 2} | sizes), weights=weights)
        return [x.requires_grad_() for x in call.values()], tuple(call)

    def test_first(self, interleaved, weights):
        leaves, names = self.leaves(weights)
        function = as_function(interleaved, names)
        assert gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True,
                         check_batched_forward_grad=True)  # fmt: skip

    @pytest.mark.one_in(3)
    def test_second(self, interleaved, weights):
        leaves, names = self.leaves(weights, tables=(1,), H=1, L=2)
        assert gradgradcheck(as_function(interleaved, names), leaves, check_fwd_over_rev=True)


def test_weights_of_each_item():
    call = make(weights=(False, False)) | {"query_weight": torch.randn(2, 12).double()}
    ones = [torch.ones((), dtype=torch.float64).expand_as(call[n]) for n in NAMES[:2]]
    found, gs = gradients(qkv.rotate, call, ones)
    truth, expected = gradients(composed, call, ones)
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(gs, expected)


@pytest.mark.parametrize("of", [0, 1])
def test_one_gradient_alone(of):
    """Of query's result, or of key's: the other has none."""
    call = {name: x.requires_grad_() for name, x in make().items()}
    leaves = [*call.values()]
    found = torch.autograd.grad(qkv.rotate(**call)[of].sin().sum(), leaves, allow_unused=True)
    expected = torch.autograd.grad(composed(**call)[of].sin().sum(), leaves, allow_unused=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.zeros_like(x) if y is None else y, x)


class TestTransforms:
    def test_vmap(self):
        call = make(batch=(4, 2), tables=())
        names = tuple(call)
        dims = (0, 0, None, None, None, None)
        found = vmap(as_function(names=names), dims)(*call.values())
        torch.testing.assert_close(found, as_function(names=names)(*call.values()))

    def test_gradients_of_samples(self):
        """Each sample has gradients of its own with respect to what all of them share."""
        call = make(batch=(4, 2), tables=())

        def loss(query, key, cos, weight):
            q, k = qkv.rotate(query, key, cos, call["sin"], query_weight=weight)
            return (q.sin().sum() + k.cos().sum()) * cos.sum()

        shared = call["cos"], call["query_weight"]
        per_sample = vmap(grad(loss, (0, 1, 2, 3)), (0, 0, None, None))
        found = per_sample(call["query"], call["key"], *shared)
        for i in range(4):
            alone = grad(loss, (0, 1, 2, 3))(call["query"][i], call["key"][i], *shared)
            torch.testing.assert_close(tuple(x[i] for x in found), alone)

    def test_jvp_and_hessian(self):
        call = make(L=2, H=1, Hkv=1, D=4, pairs=2, batch=())
        names, primals = tuple(call), tuple(call.values())
        tangents = tuple(torch.randn_like(x) for x in primals)
        found = jvp(as_function(names=names), primals, tangents)
        expected = jvp(as_function(names=names, of=composed), primals, tangents)
        torch.testing.assert_close(found, expected)

        def loss(function):
            return lambda query: function(**(call | {"query": query}))[0].sin().sum()

        torch.testing.assert_close(
            hessian(loss(qkv.rotate))(call["query"]), hessian(loss(composed))(call["query"])
        )

    def test_forward_mode_of_the_backward_pass(self):
        call = make()
        query, direction = call.pop("query"), torch.randn(2, 3, 5, 12).double()
        with dual_level():
            dual = make_dual(query, direction).requires_grad_()
            (g,) = torch.autograd.grad(
                qkv.rotate(dual, **call)[0].sin().sum(), dual, create_graph=True
            )
            change = unpack_dual(g).tangent
        f = grad(lambda x: composed(x, **call)[0].sin().sum())
        torch.testing.assert_close(change, jvp(f, (query,), (direction,))[1])

    @pytest.mark.parametrize("backend", COMPILERS)
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compile(self, backend, dynamic):
        torch.compiler.reset()

        def loss(call):
            q, k = qkv.rotate(**call)
            return q.sin().sum() + k.sin().sum()

        compiled = torch.compile(loss, backend=backend, dynamic=dynamic, fullgraph=True)
        for L in (5, 9):
            call = {n: x.requires_grad_() for n, x in make(torch.float32, L=L, tables=()).items()}
            leaves = [*call.values()]
            found = torch.autograd.grad(compiled(call), leaves)
            torch.testing.assert_close(found, torch.autograd.grad(loss(call), leaves))

    def test_autocast_casts_nothing(self):
        call = make(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, qkv.rotate(**call), qkv.rotate(**call)))
            assert qkv.rotate(**call)[0].dtype == torch.float32


def test_nan_stays_in_its_row():
    call = make(torch.float32, L=40, D=64, pairs=16)
    expected = qkv.rotate(**call)[0]
    call["query"][1, 2, 7, 3] = float("nan")
    found = qkv.rotate(**call)[0]
    assert found[1, 2, 7].isnan().all()
    found[1, 2, 7] = expected[1, 2, 7]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("heads, D", [(1, 0), (0, 4)])
def test_any_number_of_rows_without_numbers(heads, D):
    """They are as many as no loop could count, and so the result is there at once."""
    L = 2**60
    query = torch.empty(heads, L, D, requires_grad=True)
    table = torch.ones(1, D // 2).expand(L, -1)
    found = qkv.rotate(query, query, table, table)
    assert all(x.shape == query.shape for x in found)
    found[0].sum().backward()
    assert query.grad.shape == query.shape


ERRORS = {
    "query has the shape [3, 4], but 3 to 11 dimensions": {"query": torch.zeros(3, 4)},
    "key has the shape [2, 2, 5, 10], but query's is expected, [2, 3, 5, 12]": {
        "key": torch.zeros(2, 2, 5, 10)
    },
    "key has the shape [1, 2, 5, 12], but query's": {"key": torch.zeros(1, 2, 5, 12)},
    "key is float64, but query is float32": {"key": torch.zeros(2, 2, 5, 12).double()},
    "query is int64, but float32": {"query": torch.zeros(2, 3, 5, 12).long()},
    "cos has the shape [2, 5, 7], but no more than D / 2 pairs": {
        "cos": torch.zeros(2, 5, 7), "sin": torch.zeros(2, 5, 7)
    },
    "cos has the shape [1, 4], but [..., L, R / 2] = [2, 5, 4]": {"cos": torch.zeros(1, 4)},
    "cos has the shape [3, 5, 4], but": {"cos": torch.zeros(3, 5, 4)},
    "cos has the shape [2, 3, 5, 4], but": {"cos": torch.zeros(2, 3, 5, 4)},
    "cos has the shape [4], but": {"cos": torch.zeros(4)},
    "cos is float64, but float32 or query's dtype": {"cos": torch.zeros(2, 5, 4).double()},
    "sin has the shape [5, 4], but that of cos is expected, [2, 5, 4]": {"sin": torch.zeros(5, 4)},
    "query_weight has the shape [1], but [..., D] = [2, 12]": {"query_weight": torch.zeros(1)},
    "key_weight has the shape [3, 12], but": {"key_weight": torch.zeros(3, 12)},
    "key_weight is float16, but": {"key_weight": torch.zeros(12).half()},
    "key is on meta, but query is on cpu": {"key": torch.zeros(2, 2, 5, 12, device="meta")},
    "eps is -1": {"eps": -1.0},
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    with pytest.raises((RuntimeError, ValueError), match="rotate: ") as error:
        qkv.rotate(**(make(torch.float32) | ERRORS[message]))
    assert message in str(error.value)


def test_example():
    assert_example_runs(qkv.rotate)
