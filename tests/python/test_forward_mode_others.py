"""Forward mode of what is not attention alone: the best key, weights, parts put together."""

import pytest
import torch
from common import HALVES
from directions import jvp
from test_forward_mode import OPTIONS, B, D, H, L, S, attend, draw, reference

import qkv
from qkv import testing

HARD = {
    case: (names, {n: x for n, x in options.items() if n != "dropout_p"})
    for case, (names, options) in OPTIONS.items()
}
HARD["all"] = (tuple(n for n in HARD["all"][0] if n != "sinks"), HARD["all"][1])
for case in ("dropout", "sinks"):  # which it does not have
    del HARD[case]


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def hard(inputs, **options):
    return qkv.hard_attention(**inputs, **options)


def hard_reference(inputs, **options):
    return testing.hard_attention(**inputs, **options)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("case", HARD)
class TestHard:
    def test_tangents(self, case, straight_through):
        names, options = HARD[case]
        options = {**options, "straight_through": straight_through}
        inputs, tangents = draw(names), draw(names)
        found = jvp(hard, inputs, tangents, **options)
        torch.testing.assert_close(found, jvp(hard_reference, inputs, tangents, **options))
        assert torch.equal(found[0], hard(inputs, **options))
        for name in inputs:
            alone = {name: tangents[name]}
            expected = jvp(hard_reference, inputs, alone, **options)[1]
            torch.testing.assert_close(jvp(hard, inputs, alone, **options)[1], expected)

    def test_dual_of_the_gradients(self, case, straight_through):
        names, options = HARD[case]
        options = {**options, "straight_through": straight_through}
        inputs, tangents = draw(names), draw(names)
        tangent = jvp(hard, inputs, tangents, **options)[1]
        seed = torch.randn_like(tangent)
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        grads = torch.autograd.grad(
            hard(leaves, **options), tuple(leaves.values()), seed, materialize_grads=True
        )
        expected = sum((g * t).sum() for g, t in zip(grads, tangents.values(), strict=True))
        torch.testing.assert_close((seed * tangent).sum(), expected)

    def test_vmap(self, case, straight_through):
        names, options = HARD[case]
        options = {**options, "straight_through": straight_through}
        inputs, tangents = draw(names), [draw(names) for _ in range(2)]
        stacked = {name: torch.stack([t[name] for t in tangents]) for name in inputs}
        f = lambda t: jvp(hard, inputs, t, **options)[1]  # noqa: E731
        torch.testing.assert_close(torch.vmap(f)(stacked), torch.stack([*map(f, tangents)]))


def test_hard_index_and_rows_without_keys():
    """The index has no tangent, a row that sees nothing has one of 0."""
    inputs, tangents = draw(()), draw(())
    mask = torch.rand(L, S) < 0.5
    mask[3] = False
    for straight_through in (False, True):
        options = {"attn_mask": mask, "straight_through": straight_through, "return_index": True}
        (output, index), (moved, none) = jvp(hard, inputs, tangents, **options)
        assert_equal(output, hard(inputs, **options)[0])
        assert (index[:, :, 3] == -1).all() and (none == 0).all()
        assert (moved[:, :, 3] == 0).all() and (moved[:, :, 2] != 0).any()


def test_hard_in_every_dtype():
    for dtype in (torch.float32, *HALVES):
        inputs, tangents = draw((), dtype), draw((), dtype)
        _, index = hard(inputs, return_index=True)
        moved = jvp(hard, inputs, tangents)[1]
        places = index.unsqueeze(-1).expand(*index.shape, moved.size(-1))
        assert_equal(moved, tangents["value"].gather(-2, places))


def test_hard_backward_through_the_tangent():
    """The tangent is linear in that of value: its gradient is the lookup's."""
    inputs, tangents = draw(()), draw(())
    tangents["value"].requires_grad_()
    moved = jvp(hard, inputs, tangents)[1]
    seed = torch.randn_like(moved)
    (grad,) = torch.autograd.grad(moved, tangents["value"], seed)
    value = inputs["value"].requires_grad_()
    (expected,) = torch.autograd.grad(hard(inputs), value, seed)
    assert_equal(grad, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_hard_compiled(dynamic):
    inputs, tangents = draw(("bias",)), draw(("bias",))
    f = lambda x, t: jvp(hard, x, t, straight_through=True)  # noqa: E731
    found = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")(inputs, tangents)
    torch.testing.assert_close(found, f(inputs, tangents))


def weights(inputs, *, dropout_p=0.0, reduce=None, with_output=False, **options):
    torch.manual_seed(1)
    if with_output:
        return qkv.attention_with_weights(**inputs, **options, dropout_p=dropout_p, reduce=reduce)
    inputs = {name: x for name, x in inputs.items() if name != "value"}
    return (qkv.attention_weights(**inputs, **options, dropout_p=dropout_p, reduce=reduce),)


def weights_reference(inputs, *, dropout_p=0.0, reduce=None, with_output=False, **options):
    torch.manual_seed(1)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": testing.dropout_seed()}
    without = {name: x for name, x in inputs.items() if name != "value"}
    found = testing.attention_weights(**without, **options, reduce=reduce)
    return (testing.attention(**inputs, **options), found) if with_output else (found,)


@pytest.mark.parametrize("with_output", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_weights(case, with_output):
    names, options = OPTIONS[case]
    inputs, tangents = draw(names), draw(names)
    for reduce in (None, "heads", "queries"):
        options = {**options, "reduce": reduce, "with_output": with_output}
        found = jvp(weights, inputs, tangents, **options)
        torch.testing.assert_close(found, jvp(weights_reference, inputs, tangents, **options))


@pytest.mark.parametrize("case", ["plain", "scale", "softcap"])
def test_merge(case):
    """Halves of the keys, put together, change as the whole does."""
    _, options = OPTIONS[case]
    inputs, tangents = draw(()), draw(())

    def halves(x):
        pieces = zip(*(x[name].chunk(2, -2) for name in ("key", "value")), strict=True)
        parts = [attend(x | {"key": k, "value": v}, **options) for k, v in pieces]
        return qkv.merge(*zip(*parts, strict=True))

    found = jvp(halves, inputs, tangents)
    torch.testing.assert_close(found, jvp(reference, inputs, tangents, **options))


def test_cache():
    """For inference: an error whatever moves, and the caches stay as they were."""
    call = {
        "query": torch.randn(B, H, 1, D),
        "k_cache": torch.zeros(B, H, S, D),
        "v_cache": torch.zeros(B, H, S, D),
        "key": torch.randn(B, H, 1, D),
        "value": torch.randn(B, H, 1, D),
        "bias": torch.randn(H, 1, S),
    }
    for name, x in call.items():

        def f(x, name=name):
            return qkv.attention_with_kvcache(**{**call, name: x}, cache_seqlens=0)

        with pytest.raises(NotImplementedError, match="attention_with_kvcache: forward-mode"):
            torch.func.jvp(f, (x,), (torch.ones_like(x),))
        assert not call["k_cache"].any() and not call["v_cache"].any()
