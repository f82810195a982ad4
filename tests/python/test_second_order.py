"""Second derivatives and third ones, with every option, whatever transforms they are asked with,
against the reference's."""

import itertools

import pytest
import torch
from common import HALVES, compute_type
from directions import sizes_of
from test_forward_mode import OPTIONS, attend, reference
from test_func import never_by_a_loop  # noqa: F401
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vjp

import qkv
from qkv import testing

B, H, L, S, D, DV = 1, 2, 3, 4, 2, 3
SIZES = sizes_of(B, H, L, S, D, DV)
# What is attended, and with which shapes: those of SIZES but where it says otherwise.
CASES = {name: (names, options, {}) for name, (names, options) in OPTIONS.items()} | {
    "gqa": (("sinks",), {"enable_gqa": True, "softcap": 1.5},
            {"key": (B, 1, S, D), "value": (B, 1, S, DV)}),
    "broadcast": (("attn_mask",), {"is_causal": True},
                  {"query": (2, 1, L, D), "key": (H, S, D), "attn_mask": (2, 1, 1, S)}),
    "one head": (("bias",), {"dropout_p": 0.3},
                 {"query": (L, D), "key": (S, D), "value": (S, DV), "bias": (S,)}),
    "nothing to attend to": ((), {"attn_mask": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0],
                                                             [0, 1, 0, 0]]) > 0}, {}),
    "all dropped": (("sinks",), {"dropout_p": 1.0}, {}),
}  # fmt: skip
# How each derivative is taken: forward, or in reverse.
SECOND, THIRD = (["".join(x) for x in itertools.product("fr", repeat=n)] for n in (2, 3))
FUSED = [mode for mode in SECOND if "r" in mode]  # the tangent of a tangent is composed


def draw(case, dtype=torch.float64):
    """{name: a tensor}, and the other options."""
    names, options, sizes = CASES[case]
    sizes = SIZES | sizes
    names = ("query", "key", "value", *names)
    return {name: torch.randn(sizes[name]).to(dtype) for name in names}, options


def like(inputs):
    return tuple(torch.randn_like(x) for x in inputs.values())


def positional(function, inputs, options):
    """(output, lse) as a function of the tensors alone; the lse is 0 where it is -inf."""

    def f(*tensors):
        output, lse = function(dict(zip(inputs, tensors, strict=True)), **options)
        return output, lse.masked_fill(lse == -torch.inf, 0)

    return f


def loss_of(function, inputs, options):
    """A number of whose derivatives none is zero, as the results enter it as sines."""
    f = positional(function, inputs, options)
    return lambda *x: sum((y.double() * (n + 1)).sin().sum() for n, y in enumerate(f(*x)))


def directional(loss, modes, directions):
    """The derivative of `loss` along one of `directions` after the other, each forward or in
    reverse."""
    for mode, direction in zip(modes, directions, strict=True):
        loss = along(loss, mode, direction)
    return loss


def along(loss, mode, direction):
    everything = tuple(range(len(direction)))
    if mode == "f":
        return lambda *x: jvp(loss, x, direction)[1]
    gradient = grad(loss, everything)
    return lambda *x: sum((g * t).sum() for g, t in zip(gradient(*x), direction, strict=True))


def double_backward(function, inputs, options, seeds, directions):
    """The gradients of the first gradients, along `directions`, for seeds and inputs."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs.values())
    seeds = [x.detach().requires_grad_() for x in seeds]
    results = positional(function, inputs, options)(*leaves)
    first = torch.autograd.grad(results, leaves, seeds, create_graph=True)
    return torch.autograd.grad(first, [*seeds, *leaves], directions, materialize_grads=True)


def assert_accurate(inputs, options, seeds, directions, times=1.0):
    dtype = inputs["query"].dtype
    widen = lambda tensors: [x.double() for x in tensors]  # noqa: E731

    def steps(inputs, **options):
        """torch's math path, which computes half precision in float32."""
        output, lse = reference(inputs, dtype=compute_type(dtype), **options)
        return output.to(dtype), lse

    found = double_backward(attend, inputs, options, seeds, directions)
    theirs = double_backward(steps, inputs, options, seeds, directions)
    wide = dict(zip(inputs, widen(inputs.values()), strict=True))
    truth = double_backward(reference, wide, options, widen(seeds), widen(directions))
    testing.assert_close(found, truth, theirs, times=times)


@pytest.mark.parametrize("case", CASES)
class TestCases:
    @pytest.mark.one_in(3)
    def test_gradcheck(self, case):
        inputs, options = draw(case)
        leaves = tuple(x.requires_grad_() for x in inputs.values())
        f = positional(attend, inputs, options)
        assert gradcheck(f, leaves, check_forward_ad=True, check_batched_grad=True,
                         check_batched_forward_grad=True)  # fmt: skip

    @pytest.mark.one_in(3)
    def test_gradgradcheck(self, case):
        inputs, options = draw(case)
        leaves = tuple(x.requires_grad_() for x in inputs.values())
        f = positional(attend, inputs, options)
        assert gradgradcheck(f, leaves, check_fwd_over_rev=True, check_batched_grad=True)

    @pytest.mark.one_in(4)
    @pytest.mark.parametrize("transforms", [
        (jacfwd, jacfwd), (jacfwd, jacrev), (jacrev, jacfwd), (jacrev, jacrev),
    ], ids=SECOND)  # fmt: skip
    def test_jacobians(self, case, transforms):
        """Of both results with respect to all inputs, twice."""
        inputs, options = draw(case)
        everything = tuple(range(len(inputs)))

        def twice(f):
            for transform in reversed(transforms):
                more = {"randomness": "same"} if transform is jacfwd else {}
                f = transform(f, everything, **more)
            return f(*inputs.values())

        found, expected = (twice(positional(f, inputs, options)) for f in (attend, reference))
        torch.testing.assert_close(found, expected)

    @pytest.mark.one_in(4)
    @pytest.mark.parametrize("modes", THIRD)
    def test_third_derivatives(self, case, modes):
        inputs, options = draw(case)
        directions = [like(inputs) for _ in modes]
        found, expected = (
            directional(loss_of(f, inputs, options), modes, directions)(*inputs.values())
            for f in (attend, reference)
        )
        torch.testing.assert_close(found, expected)
        assert found != 0

    @pytest.mark.one_in(4)
    @pytest.mark.parametrize("modes", ["frr", "rfr", "rrf", "rrr"])
    def test_third_derivatives_without_transforms(self, case, modes):
        """By torch.autograd.grad and dual numbers: not the calls that torch.func makes."""
        inputs, options = draw(case)
        directions, loss = [like(inputs) for _ in modes], loss_of(attend, inputs, options)
        with forward_ad.dual_level():
            leaves = duals = [x.clone().requires_grad_() for x in inputs.values()]
            if "f" in modes:
                along = directions[modes.index("f")]
                duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, along, strict=True)]
            number = loss(*duals)
            for mode, direction in zip(modes, directions, strict=True):
                if mode == "f":
                    number = forward_ad.unpack_dual(number).tangent
                    continue
                grads = torch.autograd.grad(number, leaves, create_graph=True)
                number = sum((g * t).sum() for g, t in zip(grads, direction, strict=True))
        torch.testing.assert_close(number, directional(loss, modes, directions)(*inputs.values()))

    def test_each_input_alone(self, case):
        """Where only one requires grad."""
        inputs, options = draw(case)

        def second(function, name):
            loss = loss_of(function, inputs, options)
            alone = lambda x: loss(*(inputs | {name: x}).values())  # noqa: E731
            return jacfwd(jacrev(alone), randomness="same")(inputs[name])

        for name in inputs:
            torch.testing.assert_close(second(attend, name), second(reference, name))

    def test_gradients_of_the_incoming_gradients(self, case):
        """Which are output and lse again, whose derivative the gradient is; with one alone, too."""
        inputs, options = draw(case)
        leaves = tuple(x.requires_grad_() for x in inputs.values())
        directions = like(inputs)
        for wanted in ((0,), (1,), (0, 1)):
            found = []
            for function in (attend, reference):
                torch.manual_seed(2)
                results = [positional(function, inputs, options)(*leaves)[i] for i in wanted]
                seeds = [torch.randn_like(x, requires_grad=True) for x in results]
                first = torch.autograd.grad(results, leaves, seeds, create_graph=True,
                                            materialize_grads=True)  # fmt: skip
                found.append(torch.autograd.grad(first, [*seeds, *leaves], directions,
                                                 materialize_grads=True))  # fmt: skip
            torch.testing.assert_close(*found)

    def test_inputs_that_do_not_require_grad(self, case):
        """A jvp of the pull-back, of constants as autograd sees them, is no silent zero."""
        inputs, options = draw(case)
        seeds = [torch.randn(x.shape).double() for x in attend(inputs, **options)]
        directions = like(inputs)

        def pull_back(function):
            f = positional(function, inputs, options)
            pull = lambda *x: vjp(f, *x)[1](tuple(seeds))  # noqa: E731
            return jvp(pull, tuple(inputs.values()), directions)

        torch.testing.assert_close(pull_back(attend), pull_back(reference))

    @pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
    def test_accuracy(self, case, dtype):
        """As close to the truth as the same steps of torch's operators in the same type."""
        inputs, options = draw(case, dtype)
        seeds = [torch.randn(x.shape).to(x.dtype) for x in attend(inputs, **options)]
        assert_accurate(inputs, options, seeds, like(inputs), times=2)


@pytest.mark.parametrize("modes", SECOND)
def test_rows_with_nothing_to_attend_to(modes):
    """What such rows have to say is 0, whatever their queries and the keys hold."""
    inputs, _ = draw("plain")
    mask = torch.ones(L, S, dtype=torch.bool)
    mask[1] = False
    f = lambda *x: (qkv.attention(*x, mask)[:, :, 1] * 3).exp().sum()  # noqa: E731
    second = directional(f, modes, [like(inputs) for _ in modes])
    assert all((x == 0).all() for x in grad(second, (0, 1, 2))(*inputs.values()))


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "dropout_p": 0.3}], ids=["plain", "more"])
@pytest.mark.parametrize("modes", FUSED)
def test_what_is_hidden_does_not_leak(modes, options, name):
    inputs, _ = draw("plain")
    options = options | {"attn_mask": torch.arange(S) != 2}
    directions = [like(inputs) for _ in modes]
    second = directional(loss_of(attend, inputs, options), modes, directions)
    expected = second(*inputs.values())
    inputs[name][:, :, 2] = torch.nan
    torch.testing.assert_close(second(*inputs.values()), expected, rtol=0, atol=0)


def hidden_key(poison):
    """The second derivatives where a key that no query may see is `poison`, and so is its
    direction."""
    torch.manual_seed(0)
    inputs, _ = draw("sinks")
    directions = like(inputs)
    seeds = [torch.randn(x.shape).double() for x in attend(inputs)]
    for x in (inputs["key"], inputs["value"], *directions[1:3]):
        x[:, :, 2] = poison
    options = {"attn_mask": torch.arange(S) != 2, "softcap": 1.5}
    return double_backward(attend, inputs, options, seeds, directions)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_hidden_keys_and_their_directions_do_not_leak(poison):
    found = hidden_key(poison)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found, hidden_key(1.0), rtol=0, atol=0)


def test_heads_without_a_width():
    """Scores of no numbers are 0, composed ones too: their default scale is no infinity."""
    empty, mask = torch.zeros(1, 2, L, 0), torch.randn(L, L, requires_grad=True)
    weights = qkv.attention_weights(empty, empty, attn_mask=mask)
    (first,) = torch.autograd.grad(weights.square().sum(), mask, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), mask)
    assert second.isfinite().all() and second.any()


LARGE = {
    "causal": {"is_causal": True},
    "options": {"softcap": 2.0, "window_size": (70, 10), "dropout_p": 0.1},
    "gqa": {"enable_gqa": True},
}


def large(options, batch=3, dtype=torch.float32):
    """Inputs of more than one block of rows, seeds and directions."""
    kv_heads = 2 if options.get("enable_gqa") else 4
    inputs = {
        "query": torch.randn(batch, 4, 150, 32).to(dtype),
        "key": torch.randn(batch, kv_heads, 170, 32).to(dtype),
        "value": torch.randn(batch, kv_heads, 170, 24).to(dtype),
    }
    lse = torch.randn(batch, 4, 150, dtype=compute_type(dtype))
    return inputs, [torch.randn(batch, 4, 150, 24).to(dtype), lse], like(inputs)


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", LARGE.values(), ids=LARGE)
def test_any_number_of_threads(options, dtype, threads):
    inputs, seeds, directions = large(options, dtype=dtype)
    results = []
    for n in (1, 2, 3, 4):
        threads(n)
        results.append(double_backward(attend, inputs, options, seeds, directions))
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "gqa"])
def test_a_batch_item_alone(name, dtype):
    options = LARGE[name]
    inputs, seeds, directions = large(options, dtype=dtype)
    together = double_backward(attend, inputs, options, seeds, directions)
    for i in range(3):
        own = {name: x[i : i + 1] for name, x in inputs.items()}
        parts = [[x[i : i + 1] for x in given] for given in (seeds, directions)]
        alone = double_backward(attend, own, options, *parts)
        assert_same_bits(alone, [x[i : i + 1] for x in together])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("options", LARGE.values(), ids=LARGE)
def test_large(options, dtype):
    """Of more than one block, as accurate as torch's operators."""
    inputs, seeds, directions = large(options, 1, dtype)
    assert_accurate(inputs, options, seeds, directions)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("modes", FUSED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(modes, dynamic):
    """A compiled second derivative is no silent zero."""
    inputs, _ = draw("bias")
    directions = [like(inputs) for _ in modes]
    loss = lambda *x: qkv.attention(*x[:3], bias=x[3], softcap=1.5).sin().sum()  # noqa: E731
    f = lambda *x: directional(loss, modes, directions)(*x)  # noqa: E731
    found = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*inputs.values())
    expected = f(*inputs.values())
    assert expected != 0
    torch.testing.assert_close(found, expected)


def test_backward_through_a_compiled_tangent():
    inputs, _ = draw("bias")
    leaves = [x.requires_grad_() for x in inputs.values()]

    def f(*x):
        moved = lambda q: qkv.attention(q, *x[1:3], bias=x[3], softcap=1.5)  # noqa: E731
        return jvp(moved, x[:1], x[:1])[1]

    found, expected = (
        torch.autograd.grad(g(*leaves).sin().sum(), leaves)
        for g in (torch.compile(f, fullgraph=True, backend="aot_eager"), f)
    )
    torch.testing.assert_close(found, expected)


DOCUMENTS = {"plain": {}, "options": {"softcap": 1.5, "window_size": (3, 0)}}


@pytest.mark.parametrize("modes", FUSED)
@pytest.mark.parametrize("options", DOCUMENTS.values(), ids=DOCUMENTS)
def test_packed_documents(options, modes):
    """As each document alone."""
    lengths, ends = [3, 1, 4], torch.tensor([0, 3, 4, 8])
    inputs = tuple(torch.randn(8, H, n).double() for n in (D, D, DV))
    directions = [tuple(torch.randn_like(x) for x in inputs) for _ in modes]

    def packed(*x):
        return qkv.varlen_attn(*x, ends, None, 4, 4, **options).sin().sum()

    def separately(*x):
        parts = zip(*(y.transpose(0, 1).split(lengths, 1) for y in x), strict=True)
        return sum(qkv.attention(*part, **options).sin().sum() for part in parts)

    found, expected = (directional(f, modes, directions)(*inputs) for f in (packed, separately))
    torch.testing.assert_close(found, expected)
