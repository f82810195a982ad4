"""torch.func.vmap of every operator and its derivatives: one call for all samples, never torch's
loop, whichever of the arguments are batched, and whatever their dimensions."""

import itertools
from collections import Counter
from functools import partial

import pytest
import samples
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qkv

SIZE = 3


@pytest.fixture(autouse=True)
def no_loop():
    """torch's fallback is an error here."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def test_the_fallback_would_be_found_out():
    x = torch.randn(2, 1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="hit the vmap fallback which is currently disabled"):
        torch.func.vmap(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)(x, x, x)


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def tensors_of(call):
    return [name for name, x in call.items() if isinstance(x, torch.Tensor)]


def batch_of(name, x, number=SIZE):
    """[number, ...]: x and others like it, for an argument of this name."""
    if x.is_floating_point():
        return torch.stack([x, *(torch.randn_like(x) for _ in range(number - 1))])
    if name in ("cu_seq_q", "cu_seq_k"):  # the last rows belong to no document
        return torch.stack([(x - n).clamp(min=0) for n in range(number)])
    if name == "dropout_seed":
        return torch.stack([x + n for n in range(number)])
    if name in ("block_table", "cache_batch_idx"):
        return torch.stack([x.roll(n, 0) for n in range(number)])
    return torch.stack([(x - n).clamp(min=0) for n in range(number)])  # lengths


def combinations(names):
    """Which arguments are batched: all, each alone, all but one."""
    rest = [[n for n in names if n != name] for name in names]
    return [names, *([n] for n in names), *(some for some in rest if some)]


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def compare(function, call, batched, batches, **options):
    """Compares vmap of function(call), over batches[name] of the arguments named in `batched`, with
    one call after the other. The samples lie along another dimension in each argument."""
    dims = {n: (i + batches[n].dim() - 1) % batches[n].dim() for i, n in enumerate(batched)}
    given = {n: batches[n].movedim(0, d) for n, d in dims.items()}

    def f(some):
        return function(call | some)

    found = as_tuple(torch.func.vmap(f, (dims,), **options)(given))
    one_by_one = [as_tuple(f({n: batches[n][i] for n in batched})) for i in range(SIZE)]
    assert len(found) == len(one_by_one[0])
    for n, x in enumerate(found):
        close(x, torch.stack([each[n] for each in one_by_one]))


class Calls(TorchDispatchMode):
    """Counts the calls of each operator that has a kernel."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def forward(name):
    def f(call):
        found = samples.results(name, call).values()
        return tuple(x for x in found if x is not None)

    return f


def calls_of(name):
    """Calls without dropout, of which TestDropout takes care."""
    for call in samples.calls(name):
        yield call | ({"dropout_p": 0.0} if call.get("dropout_p") else {})


FORWARD = [
    name for name in samples.names()
    if not name.endswith("_backward")
    and name not in ("dropout_seed", "merge")
    and not name.endswith("with_kvcache")
]  # fmt: skip
DIFFERENTIABLE = [name for name in FORWARD if name.endswith("_forward")]
SECOND = ["attention_double_backward", "attention_forward_jvp_backward"]


@pytest.mark.parametrize("name", [*FORWARD, *SECOND])
def test_every_operator(name):
    for call in calls_of(name):
        batches = {n: batch_of(n, call[n]) for n in tensors_of(call)}
        for batched in combinations([*batches]):
            compare(forward(name), call, batched, batches)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_gradient(name):
    """Per-sample gradients, of what is batched and of what is the same for all samples."""
    for call in calls_of(name):
        wanted = [n for n in tensors_of(call) if call[n].is_floating_point()]

        def gradients(call, wanted=wanted):
            def loss(values):
                found = forward(name)(call | values)
                return sum(x.masked_fill(x.isinf(), 0).sin().sum() for x in found
                           if x.is_floating_point())  # fmt: skip

            return tuple(torch.func.grad(loss)({n: call[n] for n in wanted}).values())

        batches = {n: batch_of(n, call[n]) for n in tensors_of(call)}
        for batched in combinations([*batches]):
            compare(gradients, call, batched, batches)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_backward_pass_alone(name):
    """As jacrev calls it: the gradients of the results are batched, and nothing else."""
    for call in calls_of(name):
        wanted = {n: x for n in tensors_of(call) if (x := call[n]).is_floating_point()}

        def results(values, call=call):
            return [x for x in forward(name)(call | values) if x.is_floating_point()]

        found, pull = torch.func.vjp(results, wanted)
        seeds = [torch.randn(SIZE, *x.shape, dtype=x.dtype) for x in found]
        batched = torch.func.vmap(lambda seeds, pull=pull: pull(seeds)[0])(seeds)
        for i in range(SIZE):
            alone = pull([x[i] for x in seeds])[0]
            for n, x in batched.items():
                close(x[i], alone[n])


def test_tangents():
    """vmap of jvp, with any of the primals and tangents batched."""
    call = next(calls_of("attention_forward"))
    names = [n for n in tensors_of(call) if call[n].is_floating_point()]
    tangents = {f"{n}_tangent": torch.randn_like(call[n]) for n in names}

    def jvp(given):
        primals = {n: given[n] for n in names}
        directions = {n: given[f"{n}_tangent"] for n in names}
        output = lambda p: tuple(forward("attention_forward")(call | p))  # noqa: E731
        results, moved = torch.func.jvp(output, (primals,), (directions,))
        return *results, *moved

    whole = {n: call[n] for n in names} | tangents
    batches = {n: batch_of(n, x) for n, x in whole.items()}
    for batched in combinations([*batches]):
        compare(jvp, whole, batched, batches)


TWICE = {
    "grad(grad)": lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).sin().sum())(x),
    "jvp(grad)": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),))[1],
    "grad(jvp)": lambda f, x: torch.func.grad(lambda y: torch.func.jvp(f, (y,), (x.cos(),))[1])(x),
}


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("twice", TWICE.values(), ids=TWICE)
def test_second_order(twice, number):
    """Of dense and of packed samples, with every option and with none."""
    call = [*calls_of("attention_forward")][number]
    batches = {n: batch_of(n, call[n]) for n in tensors_of(call)}

    def second(call):
        def loss(query):
            found = forward("attention_forward")(call | {"query": query})
            return sum(x.masked_fill(x.isinf(), 0).sin().sum() for x in found)

        return twice(loss, call["query"])

    for batched in ([*batches], ["query"], [n for n in batches if n != "query"]):
        compare(second, call, batched, batches)


@pytest.mark.parametrize("twice", TWICE.values(), ids=TWICE)
def test_one_call_of_second_order(twice):
    f = lambda x: qkv.attention(x, x, x, softcap=2.0).sin().sum()  # noqa: E731
    counts = []
    for run in (lambda: twice(f, plain()), lambda: torch.func.vmap(partial(twice, f))(plain(SIZE))):
        with Calls() as calls:
            run()
        counts.append({op: n for op, n in calls.seen.items() if op.namespace == "qkv"})
    assert counts[0] == counts[1] and torch.ops.qkv.attention_double_backward.default in counts[0]


def test_hessians():
    x = plain(SIZE)
    f = lambda x: qkv.attention(x, x, x, is_causal=True).sin().sum()  # noqa: E731
    hessian = torch.func.hessian(f)
    close(torch.func.vmap(hessian)(x), torch.stack([hessian(each) for each in x]))


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_one_call_for_all(name, randomness):
    """Forward and backward, with dropout, too."""
    for call in samples.calls(name):
        query = batch_of("query", call["query"])

        def loss(query, call=call):
            found = forward(name)(call | {"query": query})
            return sum(x.sum() for x in found if x.is_floating_point())

        with Calls() as calls:
            torch.func.vmap(torch.func.grad(loss), randomness=randomness)(query)
        ours = {op.name(): n for op, n in calls.seen.items() if op.namespace == "qkv"}
        assert ours == {f"qkv::{name}": 1, f"qkv::{name.replace('_forward', '_backward')}": 1}


SEEDED = [n for n in DIFFERENTIABLE if n != "hard_forward"]


class TestDropout:
    """Beside those of test_func.py, which look at what the user's functions keep: every operator
    with a seed, of which a call takes one, or one for each of several parts of the batch."""

    def call(self, name, number=0):
        call = samples.calls(name)[number]
        assert call["dropout_p"] > 0
        return call

    @pytest.mark.parametrize("name, number", [(n, 0) for n in SEEDED] + [("attention_forward", 2)])
    def test_as_alone(self, name, number):
        """With the same randomness, and with seeds of their own, samples keep what they keep
        alone."""
        call = self.call(name, number)
        batches = {n: batch_of(n, call[n]) for n in tensors_of(call)}
        for batched in combinations([*batches]):
            own = "dropout_seed" in batched
            for randomness in ("same", "different", "error") if own else ("same",):
                compare(forward(name), call, batched, batches, randomness=randomness)

    @pytest.mark.parametrize("name, number", [(n, 0) for n in SEEDED] + [("attention_forward", 2)])
    def test_gradients_as_alone(self, name, number):
        call = self.call(name, number)
        batches = {n: batch_of(n, call[n]) for n in ("query", "key", "dropout_seed")}

        def gradients(call):
            def loss(query):
                found = forward(name)(call | {"query": query})
                return sum(x.masked_fill(x.isinf(), 0).sin().sum() for x in found)

            return torch.func.grad(loss)(call["query"])

        for batched in (["query"], ["dropout_seed"], ["key", "dropout_seed"]):
            compare(gradients, call, batched, batches, randomness="same")

    @pytest.mark.parametrize("randomness", [*itertools.product(["same", "different"], repeat=3)])
    @pytest.mark.parametrize("packed", [False, True])
    def test_nested(self, randomness, packed):
        """Three levels, each of which is the same or different: the weights that are kept are equal
        along those that are the same, and no two others are."""
        call = self.call("attention_forward", 2 if packed else 0)
        dim = 0 if packed else -2
        L, S = call["query"].size(dim), call["key"].size(dim)
        call |= {"softcap": 0.0, "window_size": None, "is_causal": False, "scale": 0.0}
        shape = [*call["value"].shape[:-1], S]
        eye = torch.eye(S, dtype=torch.float64)
        call["value"] = (eye[:, None] if packed else eye).expand(shape)

        def f(query):
            return samples.results("attention_forward", call | {"query": query})["output"] != 0

        for r in reversed(randomness):
            f = torch.func.vmap(f, randomness=r)
        kept = f(torch.zeros(2, 3, 2, *call["query"].shape, dtype=torch.float64))
        assert 0 < kept.double().mean() < 1 and L > 1
        distinct = {}
        for place in itertools.product(range(2), range(3), range(2)):
            which = tuple(i for i, r in zip(place, randomness, strict=True) if r == "different")
            distinct.setdefault(which, []).append(kept[place])
        for alike in distinct.values():
            assert all(torch.equal(x, alike[0]) for x in alike)
        first = [alike[0] for alike in distinct.values()]
        for x, y in itertools.combinations(first, 2):
            assert not torch.equal(x, y)

    def test_nested_as_alone(self):
        """The same at each level: what one call keeps."""
        call = self.call("attention_forward")
        query = batch_of("query", call["query"], 6).unflatten(0, (2, 3))
        f = lambda q: samples.results("attention_forward", call | {"query": q})["output"]  # noqa: E731
        g = torch.func.vmap(torch.func.vmap(f, randomness="same"), randomness="same")
        for i, j in itertools.product(range(2), range(3)):
            close(g(query)[i, j], f(query[i, j]))


def plain(*shape):
    return torch.randn(*shape, 2, 5, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", [*FORWARD, *SECOND, "attention_with_kvcache"])
def test_meta_tensors(name):
    """Shapes and dtypes without numbers, as torch.compile asks for them."""
    for call in calls_of(name):
        batches = {n: batch_of(n, call[n]) for n in tensors_of(call)}
        rest = {n: x for n, x in call.items() if n not in batches}

        def describe(device, batches=batches, rest=rest):
            given = {n: x.clone().to(device) for n, x in batches.items()}
            found = torch.func.vmap(lambda some: forward(name)(rest | some))(given)
            return [(x.shape, x.dtype) for x in found]

        assert describe("meta") == describe("cpu")


def test_no_samples():
    x = plain(0)
    f = lambda x: qkv.attention(x, x, x, dropout_p=0.1)  # noqa: E731
    assert torch.func.vmap(f, randomness="same")(x).shape == x.shape
    packed = torch.randn(0, 9, 2, 4)
    ends = torch.tensor([0, 2, 9])
    g = lambda x: qkv.varlen_attn(x, x, x, ends, None, 7, 7)  # noqa: E731
    assert torch.func.vmap(g)(packed).shape == packed.shape


def test_boundaries_that_are_no_integers_are_refused():
    packed, ends = torch.randn(SIZE, 9, 2, 4), torch.tensor([0.0, 2.5, 9.0])
    f = lambda x: qkv.varlen_attn(x, x, x, ends, None, 7, 7)  # noqa: E731
    with pytest.raises(RuntimeError, match="cu_seq_q is float32, but int32 or int64 is expected"):
        torch.func.vmap(f)(packed)


class TestShapesOfBatches:
    @pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
    @pytest.mark.parametrize("out_dim", [0, 1, 2, -1])
    def test_dimensions(self, in_dim, out_dim):
        x = plain(SIZE)
        given = x.movedim(0, in_dim)
        found = torch.func.vmap(qkv.attention, in_dim, out_dim)(given, given, given)
        close(found.movedim(out_dim, 0), qkv.attention(x, x, x))

    @pytest.mark.parametrize("chunk_size", [1, 2, 3, 5])
    def test_chunks(self, chunk_size):
        x = plain(SIZE)
        per_sample = torch.func.grad(lambda x: qkv.attention(x, x, x).sin().sum())
        found = torch.func.vmap(per_sample, chunk_size=chunk_size)(x)
        close(found, torch.stack([per_sample(row) for row in x]))

    def test_nested(self):
        """Each level batches other arguments, along another dimension."""
        query, key, value = plain(SIZE), plain(2), plain(SIZE, 2)
        inner = torch.func.vmap(qkv.attention, (None, 0, 1), out_dims=1)
        found = torch.func.vmap(inner, (0, None, 0))(query, key, value.movedim(1, 2))
        for i, j in itertools.product(range(SIZE), range(2)):
            close(found[i, :, j], qkv.attention(query[i], key[j], value[i, j]))

    def test_a_level_that_batches_something_else(self):
        x, y = plain(SIZE), plain(2)
        inner = lambda x: torch.func.vmap(lambda y: qkv.attention(x, x, x) + y)(y)  # noqa: E731
        close(torch.func.vmap(inner)(x), qkv.attention(x, x, x)[:, None] + y)

    def test_nested_documents(self):
        query = torch.randn(SIZE, 9, 2, 4, dtype=torch.float64)
        value = torch.randn(2, 9, 2, 4, dtype=torch.float64)
        ends = torch.tensor([[0, 2, 9], [1, 8, 8]])

        def f(query, value, ends):
            loss = lambda q, v: qkv.varlen_attn(q, q, v, ends, None, 9, 9).sin().sum()  # noqa: E731
            return torch.func.grad(loss, (0, 1))(query, value)

        inner = torch.func.vmap(f, (None, 0, 0))
        found = torch.func.vmap(inner, (0, None, None))(query, value, ends)
        for i, j in itertools.product(range(SIZE), range(2)):
            for x, alone in zip(found, f(query[i], value[j], ends[j]), strict=True):
                close(x[i, j], alone)

    def test_compiled(self):
        torch.compiler.reset()
        x = plain(SIZE)
        per_sample = torch.func.vmap(torch.func.grad(lambda x: qkv.attention(x, x, x).sin().sum()))
        compiled = torch.compile(per_sample, backend="aot_eager", fullgraph=True)
        close(compiled(x), per_sample(x))

    def test_an_ensemble_of_layers(self):
        layers = [qkv.nn.MultiheadAttention(8, 2).double() for _ in range(SIZE)]
        parameters, buffers = torch.func.stack_module_state(layers)
        x = torch.randn(2, 5, 8, dtype=torch.float64)

        def loss(parameters, buffers):
            state = parameters, buffers
            return torch.func.functional_call(layers[0], state, (x, x, x))[0].sin().sum()

        found = torch.func.vmap(torch.func.grad(loss))(parameters, buffers)
        for i, layer in enumerate(layers):
            own = dict(layer.named_parameters())
            alone = torch.autograd.grad(layer(x, x, x)[0].sin().sum(), own.values())
            close([x[i] for x in found.values()], [*alone])


class TestOfTorchsCore:
    """torch.autograd has a vmap of its own, which is no dispatch key of torch.func's."""

    def calls(self, f):
        with Calls() as calls:
            results = f()
        return results, {op.name(): n for op, n in calls.seen.items() if op.namespace == "qkv"}

    @pytest.mark.parametrize("name", DIFFERENTIABLE)
    def test_gradients_batched(self, name):
        """Dropout keeps what the forward pass has kept."""
        for call in samples.calls(name):
            leaves = [x.requires_grad_() for n in tensors_of(call)
                      if (x := call[n]).is_floating_point()]  # fmt: skip
            results = [x for x in forward(name)(call) if x.requires_grad]
            seeds = [torch.randn(SIZE, *x.shape, dtype=x.dtype) for x in results]

            def gradients(seeds, batched, results=results, leaves=leaves):
                return torch.autograd.grad(
                    results, leaves, seeds, is_grads_batched=batched, retain_graph=True,
                    allow_unused=True,
                )  # fmt: skip

            found, ours = self.calls(lambda s=seeds, g=gradients: g(s, True))
            assert ours == {f"qkv::{name.replace('_forward', '_backward')}": 1}
            for i in range(SIZE):
                alone = gradients([x[i] for x in seeds], False)
                for x, y in zip(found, alone, strict=True):
                    assert (x is None) == (y is None)
                    if x is not None:
                        close(x[i], y)

    @pytest.mark.parametrize("strategy", ["forward-mode", "reverse-mode"])
    def test_jacobian(self, strategy):
        x, key = plain()[0], plain()[0]
        f = lambda x: qkv.attention(x, key, key, softcap=2.0)  # noqa: E731
        jacobian = torch.autograd.functional.jacobian
        found, ours = self.calls(lambda: jacobian(f, x, vectorize=True, strategy=strategy))
        close(found, torch.func.jacrev(f)(x))
        assert sum(ours.values()) <= 3  # once for its results and once for all directions

    def test_nested(self):
        x, key = plain()[0], plain()[0]
        value = plain()[0].requires_grad_()
        output = qkv.attention(x, key, value)
        seeds = torch.randn(2, SIZE, *output.shape, dtype=x.dtype)

        def gradient(g, batched=True):
            return torch.autograd.grad(
                output, value, g, is_grads_batched=batched, retain_graph=True
            )[0]  # fmt: skip

        found = torch._vmap_internals._vmap(gradient)(seeds)
        for i, j in itertools.product(range(2), range(SIZE)):
            close(found[i, j], gradient(seeds[i, j], False))


def test_merge():
    call = samples.calls("merge")[0]
    stacked = {n: [batch_of(n, x) for x in parts] for n, parts in call.items()}
    for batched in (["outputs", "lses"], ["outputs"], ["lses"]):
        dims = {n: 0 if n in batched else None for n in call}
        given = {n: stacked[n] if n in batched else call[n] for n in call}
        found = torch.func.vmap(lambda c: qkv.merge(**c), (dims,))(given)
        for i in range(SIZE):
            one = {n: [x[i] for x in given[n]] if n in batched else given[n] for n in call}
            close([x[i] for x in found], [*qkv.merge(**one)])


class TestCache:
    """attention_with_kvcache writes to its caches, so that each sample needs one of its own."""

    def both(self, call, dims):
        """(results, caches) of vmap, and of one call after the other."""
        batches = {n: batch_of(n, call[n]).movedim(0, d or 0).contiguous()
                   for n, d in dims.items() if d is not None}  # fmt: skip
        twin = {n: x.clone() for n, x in batches.items()}
        dims = {n: dims.get(n) for n in call}

        def f(call):
            return torch.ops.qkv.attention_with_kvcache(**call)

        tensors = {n: x for n, x in call.items() if isinstance(x, torch.Tensor)}
        rest = {n: x for n, x in call.items() if n not in tensors}
        found = torch.func.vmap(lambda c: f(c | rest), ({n: dims[n] for n in tensors},))(
            tensors | batches
        )
        alone = [f(call | {n: x.select(dims[n], i) for n, x in twin.items()}) for i in range(SIZE)]
        caches = [(batches[n], twin[n]) for n in ("k_cache", "v_cache") if n in batches]
        return [
            (x, torch.stack(y)) for x, y in zip(found, zip(*alone, strict=True), strict=True)
        ], caches

    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.parametrize("dim", [0, 1, 3])
    def test_own_caches(self, number, dim):
        """Along the first dimension the caches are one piece of memory; else they are copied and
        written back."""
        call = samples.calls("attention_with_kvcache")[number]
        everything = {n: 0 for n in tensors_of(call)} | {"k_cache": dim, "v_cache": dim}
        needed = {n: everything[n] for n in ("query", "k_cache", "v_cache")}
        for dims in (everything, needed):
            results, caches = self.both(call, dims)
            for found, expected in results + caches:
                close(found, expected)

    def test_queries_at_one_place(self):
        """Neither causal nor in a window, which may be said as one that is open on both sides."""
        call = samples.calls("attention_with_kvcache")[0] | {"causal": False}
        for window in (None, (-1, -1)):
            call["window_size"] = window
            results, caches = self.both(call, {n: 0 for n in tensors_of(call)})
            for found, expected in results + caches:
                close(found, expected)

    @pytest.mark.parametrize("number", range(3))
    def test_one_cache_for_all_that_read(self, number):
        call = samples.calls("attention_with_kvcache")[number]
        call |= dict.fromkeys(("key", "value", "rotary_cos", "rotary_sin"))
        given = tensors_of(call)
        others = [n for n in given if n not in ("k_cache", "v_cache")]
        for batched in (*combinations(others), given, ["v_cache"]):
            results, caches = self.both(call, dict.fromkeys(batched, 0))
            for found, expected in results + caches:
                close(found, expected)

    def test_writing_to_one_cache_is_refused(self):
        call = samples.calls("attention_with_kvcache")[0]
        before = call["k_cache"].clone()
        for name in ("k_cache", "v_cache"):
            dims = dict.fromkeys(("query", "k_cache", "v_cache"), 0)
            dims.pop(name)
            with pytest.raises(RuntimeError, match=f"but {name} is the same tensor for all"):
                self.both(call, dims)
        assert torch.equal(call["k_cache"], before)

    @pytest.mark.parametrize("number, name", [(0, "cache_batch_idx"), (1, "block_table")])
    def test_an_index_beyond_the_own_cache_is_refused(self, number, name):
        """It would be a row of the next sample's."""
        call = samples.calls("attention_with_kvcache")[number]
        call[name][0] = len(call["k_cache"])
        with pytest.raises(RuntimeError, match=f"{name}.* is -1"):
            self.both(call, dict.fromkeys(("query", "k_cache", "v_cache"), 0))

    def test_two_kinds_of_index_are_refused(self):
        call = samples.calls("attention_with_kvcache")[1]
        call["cache_batch_idx"] = torch.tensor([1, 0])
        with pytest.raises(RuntimeError, match="cache_batch_idx and block_table are given, but"):
            self.both(call, dict.fromkeys(("query", "k_cache", "v_cache"), 0))

    @pytest.mark.parametrize(
        "others, message",
        [
            ({"rotary_cos": torch.ones(3, 1), "rotary_sin": torch.ones(3, 1)}, "rotary_cos has 3"),
            ({"rotary_sin": None}, "rotary_cos is given, but rotary_sin is None"),
            ({"cache_seqlens": None}, "key is given, but cache_seqlens is None"),
        ],
    )
    def test_what_tables_of_each_sample_lack(self, others, message):
        call = samples.calls("attention_with_kvcache")[0] | others
        with pytest.raises(RuntimeError, match=f"attention_with_kvcache: {message}"):
            self.both(call, {n: 0 for n in tensors_of(call)})


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dim", [0, 1, 3])
@pytest.mark.parametrize("others", [False, True])
def test_a_cache_of_latents(number, dim, others):
    """Of which the values are a part: copies of both would not be. others: batched as well."""
    call = samples.calls("latent_attention_with_kvcache")[number]
    batches = {n: batch_of(n, call[n]) for n in (tensors_of(call) if others else ("cache",))}
    twin = batches["cache"].clone()
    dims = {n: 0 for n in batches} | {"cache": dim}
    given = batches | {"cache": batches["cache"].movedim(0, dim).contiguous()}
    f = lambda some: torch.ops.qkv.latent_attention_with_kvcache(**(call | some))  # noqa: E731
    found = torch.func.vmap(f, (dims,))(given)
    alone = [f({n: x[i] for n, x in batches.items()} | {"cache": twin[i]}) for i in range(SIZE)]
    for x, y in zip(found, zip(*alone, strict=True), strict=True):
        close(x, torch.stack(y))
    close(given["cache"].movedim(dim, 0), twin)


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("dims", [(None, 0), (0, None), (0, 0)])
def test_layers(inputs, dims):
    """Inputs of one layer, and an ensemble of layers."""
    make = [qkv.nn.SelfAttention, qkv.nn.CrossAttention][inputs - 1]
    layer = make(16, 4, 2, qk_norm=True, gate=True, dtype=torch.float64)
    weights = {name: batch_of(name, p.detach()) for name, p in layer.named_parameters()}
    x = torch.randn(SIZE, 2, 5, 16, dtype=torch.float64)

    def call(p, x):
        return torch.func.functional_call(layer, p, (x,) * inputs)

    def sample(i):
        return {n: p[i] for n, p in weights.items()}, x[i]

    places = [[i if dim == 0 else 0 for dim in dims] for i in range(SIZE)]
    expected = [call(sample(of_layer)[0], sample(of_x)[1]) for of_layer, of_x in places]
    given = weights if dims[0] == 0 else sample(0)[0], x if dims[1] == 0 else x[0]
    close(torch.func.vmap(call, dims)(*given), torch.stack(expected))
