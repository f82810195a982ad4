"""torch's own checks of a custom operator, on every operator of the package."""

import pytest
import samples
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.testing._internal.optests import OpCheckError

NO_GRADIENT = (
    "attention_with_kvcache", "varlen_attention_paged", "latent_attention_with_kvcache",
    "dropout_seed",
)  # fmt: skip
# Which of an operator's calls in samples.py have no derivatives: third ones of packed documents,
# and second ones of hard attention.
NO_DERIVATIVE = {
    "attention_double_backward": (2, 3), "attention_forward_jvp_backward": (2, 3),
    "hard_backward": (0, 1),
}  # fmt: skip


def test_every_operator_has_a_call():
    assert samples.missing() == []
    assert {"attention", "attention_forward_jvp"} <= {*samples.names()}


def test_an_operator_without_a_call_is_found_out():
    library = torch.library.Library("qkv", "FRAGMENT")
    library.define("nobody_calls_this(Tensor query) -> Tensor")
    try:
        assert samples.missing() == ["nobody_calls_this"]
    finally:
        library._destroy()


def requiring_grad(x, wanted):
    if isinstance(x, list):
        return [requiring_grad(y, wanted) for y in x]
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().requires_grad_(wanted)
    return x


def check(name, call):
    # Random results differ from call to call, whoever makes them.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    draws = "dropout_seed" not in call and call.get("dropout_p", 0) > 0
    more = () if draws or name == "dropout_seed" else ("test_aot_dispatch_dynamic",)
    opcheck(samples.operator(name), (), call, test_utils=(*tests, *more))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", samples.names())
def test_opcheck(name):
    for call in samples.calls(name, torch.float32):
        check(name, call)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", [n for n in samples.names() if n not in NO_GRADIENT])
def test_opcheck_with_gradients(name):
    for number, call in enumerate(samples.calls(name, torch.float32)):
        if call.get("block_table") is not None:
            continue  # it has no gradients: test_gradients_are_refused
        call = {n: requiring_grad(x, True) for n, x in call.items()}
        if number in NO_DERIVATIVE.get(name, ()):
            with pytest.raises(OpCheckError, match="derivatives are not implemented yet"):
                check(name, call)
        else:
            check(name, call)


@pytest.mark.parametrize("name", NO_GRADIENT[:3])
def test_gradients_are_refused(name):
    call = samples.calls(name, torch.float32)[0]
    query = samples.arguments(name)[0]
    call[query].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{query} requires grad, but this is for inference on"):
        samples.operator(name)(**call)


def describe(name, results):
    """Without the strides of indexed_attention: it is made of others, and of which of them, the
    numbers of its indices say, that fake tensors have not."""
    results = (results,) if isinstance(results, torch.Tensor) else results
    strides = (lambda x: ()) if name == "indexed_attention" else torch.Tensor.stride
    return [None if x is None else (x.shape, strides(x), x.dtype) for x in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", samples.names())
def test_fake_tensors_are_described_as_real_ones(name, dtype):
    op = samples.operator(name)
    for call in samples.calls(name, dtype):
        expected = describe(name, op(**call))
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, call)
            assert describe(name, op(**fake)) == expected
