"""Forward mode: the derivative in a direction, with every option, against the reference's."""

import warnings

import pytest
import torch
from common import HALVES
from directions import check_tangents, grouped, jvp, seeded, sizes_of
from torch.autograd import forward_ad

import qkv
from qkv import testing

B, H, L, S, D, DV = 2, 4, 7, 9, 8, 6
SIZES = sizes_of(B, H, L, S, D, DV)
OPTIONS = {
    "plain": ((), {}),
    "scale": ((), {"scale": -0.3}),
    "causal": ((), {"is_causal": True}),
    "window": ((), {"window_size": (3, 1)}),
    "softcap": ((), {"softcap": 1.5}),
    "slopes": (("alibi_slopes",), {}),
    "mask": (("attn_mask",), {}),
    "bias": (("bias",), {"is_causal": True}),
    "sinks": (("sinks",), {"window_size": (2, 0)}),
    "dropout": ((), {"dropout_p": 0.4}),
    "all": (
        tuple(SIZES)[3:],
        {"softcap": 1.5, "is_causal": True, "window_size": (5, -1), "dropout_p": 0.2},
    ),
}


def draw(names, dtype=torch.float64):
    """{name: a tensor of its size}, of what `names` names beside query, key and value."""
    names = ("query", "key", "value", *names)
    return {name: torch.randn(SIZES[name], dtype=dtype) for name in names}


def attend(inputs, **options):
    torch.manual_seed(1)
    return qkv.attention(**inputs, **options, return_lse=True)


def reference(inputs, **options):
    return testing.attention(**inputs, **seeded(**options), return_lse=True)


@pytest.mark.parametrize("case", OPTIONS)
class TestOptions:
    def test_results_and_tangents(self, case):
        names, options = OPTIONS[case]
        check_tangents(attend, reference, draw(names), draw(names), options)

    def test_dual_numbers(self, case):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), draw(names)
        expected = jvp(reference, inputs, tangents, **options)[1]
        with forward_ad.dual_level(), torch.no_grad():
            duals = {n: forward_ad.make_dual(x, tangents[n]) for n, x in inputs.items()}
            results = [forward_ad.unpack_dual(x) for x in attend(duals, **options)]
        torch.testing.assert_close(tuple(x.tangent for x in results), expected)

    @pytest.mark.one_in(8)
    def test_gradcheck(self, case):
        names, options = OPTIONS[case]
        inputs = {name: x.requires_grad_() for name, x in draw(names).items()}
        assert torch.autograd.gradcheck(
            lambda *x: attend(dict(zip(inputs, x, strict=True)), **options),
            tuple(inputs.values()),
            check_forward_ad=True,
            check_backward_ad=False,
            check_batched_grad=False,
            check_undefined_grad=False,
        )

    def test_vmap(self, case):
        """As one call for each would give it; dropout keeps the same set in each."""
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), [draw(names) for _ in range(3)]
        stacked = {name: torch.stack([t[name] for t in tangents]) for name in inputs}

        def f(t):
            return jvp(attend, inputs, t, **options)[1]

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop")  # torch's loop
            found = torch.vmap(f, randomness="same")(stacked)
        each = [f(t) for t in tangents]
        for i, result in enumerate(found):
            torch.testing.assert_close(result, torch.stack([x[i] for x in each]))

    @pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
    def test_accuracy(self, case, dtype):
        """As close to the truth as the same steps of torch's operators in the same type."""
        names, options = OPTIONS[case]
        inputs, tangents = draw(names, dtype), draw(names, dtype)
        found = jvp(attend, inputs, tangents, **options)[1]
        wide = [{n: x.double() for n, x in given.items()} for given in (inputs, tangents)]
        expected = jvp(reference, *wide, **options)[1]

        def in_float32(x, **options):
            return reference({n: t.float() for n, t in x.items()}, dtype=torch.float32, **options)

        baseline = jvp(in_float32, inputs, tangents, **options)[1]
        baseline = (baseline[0].to(dtype), baseline[1])
        for result, truth, torchs in zip(found, expected, baseline, strict=True):
            testing.assert_close(result, truth, torchs, times=2)

    def test_backward_through_the_tangent(self, case):
        names, options = OPTIONS[case]
        inputs, tangents = draw(names), draw(names)
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
        seeds = [torch.randn(B, H, L, DV).double(), torch.randn(B, H, L).double()]

        def gradients(function):
            results = jvp(function, inputs, tangents, **options)[1]
            return torch.autograd.grad(results, tuple(inputs.values()), seeds, allow_unused=True)

        torch.testing.assert_close(gradients(attend), gradients(reference))


def test_grouped_heads_and_broadcast_batches():
    inputs, tangents = grouped(L, S, D, DV)
    options = {"enable_gqa": True, "is_causal": True}
    found = jvp(attend, inputs, tangents, **options)
    torch.testing.assert_close(found, jvp(reference, inputs, tangents, **options))


def test_strides_of_tangents_are_their_own():
    inputs, tangents = draw(()), draw(())
    expected = jvp(attend, inputs, tangents)
    tangents["query"] = tangents["query"].transpose(1, 2).contiguous().transpose(1, 2)
    tangents["key"] = tangents["key"].mT.contiguous().mT
    tangents["value"] = torch.randn(1, H, 1, DV).double().expand(B, H, S, DV)
    found = jvp(attend, inputs, tangents)
    torch.testing.assert_close(found, jvp(reference, inputs, tangents))
    torch.testing.assert_close(found[0], expected[0])


def test_rows_with_nothing_to_attend_to_stand_still():
    inputs, tangents = draw(()), draw(())
    mask = torch.rand(L, S) < 0.5
    mask[3] = False
    (output, lse), (output_tangent, lse_tangent) = jvp(attend, inputs, tangents, attn_mask=mask)
    assert (output[:, :, 3] == 0).all() and (lse[:, :, 3] == -torch.inf).all()
    assert (output_tangent[:, :, 3] == 0).all() and (lse_tangent[:, :, 3] == 0).all()


def test_tangents_of_what_is_hidden_do_not_leak():
    inputs, tangents = draw(()), draw(())
    seen = torch.arange(S) != 4
    expected = jvp(attend, inputs, tangents, attn_mask=seen)
    for name in ("key", "value"):
        for given in (inputs, tangents):
            given[name] = given[name].clone()
            given[name][:, :, 4] = torch.nan
    found = jvp(attend, inputs, tangents, attn_mask=seen)
    torch.testing.assert_close(found, expected)


def test_any_number_of_threads(threads):
    inputs = {name: torch.randn(3, 4, 200, 32) for name in ("query", "key", "value")}
    tangents = {name: torch.randn_like(x) for name, x in inputs.items()}
    results = []
    for n in (1, 2, 5):
        threads(n)
        results.append(jvp(attend, inputs, tangents, is_causal=True))
    for other in results[1:]:
        for a, b in zip(results[0][0] + results[0][1], other[0] + other[1], strict=True):
            assert torch.equal(a, b)


def test_sizes_of_zero():
    for shape in ((0, H, L, D), (B, H, 0, D)):
        x = torch.randn(shape).double()
        (output, _), (tangent, _) = jvp(attend, {"query": x, "key": x, "value": x}, {"value": x})
        assert output.shape == tangent.shape == shape
    inputs = draw(()) | {"key": torch.randn(B, H, 0, D).double()}
    inputs["value"] = torch.randn(B, H, 0, DV).double()
    (output, _), (tangent, _) = jvp(attend, inputs, {"query": inputs["query"]})
    assert torch.equal(tangent, torch.zeros_like(output))


def test_linearize_and_jacfwd():
    x = torch.randn(2, 3, 4).double()

    def f(function):
        return lambda q: function({"query": q, "key": x, "value": x}, softcap=2.0)[0]

    output, linear = torch.func.linearize(f(attend), x)
    torch.testing.assert_close(output, f(attend)(x))
    expected = torch.func.jacfwd(f(reference))(x)
    torch.testing.assert_close(torch.func.jacfwd(f(attend))(x), expected)
    torch.testing.assert_close(linear(x), torch.einsum("abcdef,def->abc", expected, x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """A compiled jvp is no silent zero."""
    inputs, tangents = draw(("bias",)), draw(("bias",))
    attend_unseeded = lambda x, **o: qkv.attention(**x, **o, return_lse=True)  # noqa: E731
    f = lambda x, t: jvp(attend_unseeded, x, t, softcap=1.5)  # noqa: E731
    found = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")(inputs, tangents)
    torch.testing.assert_close(found, f(inputs, tangents))
