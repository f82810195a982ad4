"""torch's own samples of scaled_dot_product_attention, nn.MultiheadAttention and the Transformer
layers (torch.testing._internal), forward and gradients of first and second order, and forward mode,
with qkv in place and without.

What differs, and why:

- dropout drops other weights than torch's math path, drawn from the same generator. The samples
  with dropout are held against attention composed of torch's operators, with qkv's draw;
- the last digits. The samples saturate the softmax, and torch composes most of them: it has the
  weights when it computes the gradients. A fused backward pass, torch's too, begins with the
  rounded output: up to 8 times the error of the gradients.

Both are so with every version of torch that qkv is built for. What the versions differ in are the
samples of scaled_dot_product_attention: torch 2.13 has each of them twice; since 2.14 one of the
two asks for enable_gqa. The samples of the layers are the same ones from 2.13 to 2.15.
"""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import qkv
from qkv import testing

pytest.importorskip("expecttest")  # torch.testing._internal imports it
LAYERS = (
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "Transformer",
)


# torch's lists take seconds to import, whatever else is collected beside this file.
@functools.cache
def sdpa():
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    (found,) = (
        x for x in invocations.op_db if x.name == "nn.functional.scaled_dot_product_attention"
    )
    return found


@functools.cache
def modules():
    database = pytest.importorskip("torch.testing._internal.common_modules").module_db
    return {x.name.removeprefix("nn."): x for x in database}


def direction(tensor):
    return torch.linspace(-1, 1, tensor.numel()).view_as(tensor).to(tensor)


def run(function, sample, dtype=None, dual=False):
    """The output, and the inputs that require grad. dtype: of these, if not their own. dual:
    whether they have tangents."""
    torch.manual_seed(0)
    copies = {
        id(t): t.detach()
        .to(dtype if t.is_floating_point() else None)
        .requires_grad_(t.requires_grad)
        for t in (sample.input, *sample.args, *sample.kwargs.values())
        if isinstance(t, torch.Tensor)
    }
    leaves = [t for t in copies.values() if t.requires_grad]
    if dual:
        copies = {
            i: forward_ad.make_dual(t, direction(t)) if t.requires_grad else t
            for i, t in copies.items()
        }
    args = [copies.get(id(t), t) for t in (sample.input, *sample.args)]
    output = function(*args, **{n: copies.get(id(t), t) for n, t in sample.kwargs.items()})
    return output, leaves


def results_of(function, sample, dtype=None):
    """The output and all gradients, as one: the samples saturate the softmax, and a gradient that
    cancels to nothing is as exact as its terms."""
    output, leaves = run(function, sample, dtype)
    results = (output.detach(), *torch.autograd.grad(output.sum(), leaves))
    return torch.cat([r.flatten() for r in results])


def composed(*args, **options):
    """In the dtype of the arguments, dropping what qkv drops after the same manual_seed."""
    if options.get("dropout_p"):
        options["dropout_seed"] = testing.dropout_seed()
    return testing.attention(*args, dtype=args[0].dtype, **options)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_scaled_dot_product_attention(dtype):
    number = 0
    for sample in sdpa().sample_inputs("cpu", dtype, requires_grad=True):
        with qkv.replace_sdpa():
            found = results_of(F.scaled_dot_product_attention, sample)
        assert qkv.sdpa_report().taken and not qkv.sdpa_report().left
        drops = sample.kwargs.get("dropout_p", 0) > 0
        torchs = results_of(composed if drops else F.scaled_dot_product_attention, sample)
        exact = results_of(composed, sample, torch.float64)
        testing.assert_close(found, exact, torchs, times=8)
        number += 1
    assert number > 10


def test_second_order_and_forward_mode():
    """Of scaled_dot_product_attention: torch's math path has both, its fused kernel neither."""
    for sample in sdpa().sample_inputs("cpu", torch.float64, requires_grad=True):
        found = []
        for function in (F.scaled_dot_product_attention, composed):
            with qkv.replace_sdpa(), forward_ad.dual_level():
                output, leaves = run(function, sample)
                grads = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
                loss = sum((g * direction(g)).sum() for g in grads)
                second = torch.autograd.grad(loss, leaves)
                dual, _ = run(function, sample, dual=True)
                tangent = forward_ad.unpack_dual(dual).tangent.detach()
            found.append(torch.cat([x.flatten() for x in (tangent, *second)]))
        size = found[1].abs().max().item()
        torch.testing.assert_close(*found, rtol=0, atol=1e-12 * size)


def derivatives(module, call):
    """Of second order along a direction in the parameters, and the results' tangents along it."""
    names, leaves = zip(*module.named_parameters(), strict=True)
    module.zero_grad()
    output = module(*call.args, **call.kwargs)
    grads = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum((g * direction(g)).sum() for g in grads), leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, direction(x)) for x in leaves]
        moved = functional_call(
            module, dict(zip(names, duals, strict=True)), call.args, call.kwargs
        )
        return [*second, forward_ad.unpack_dual(moved).tangent.detach()]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LAYERS[1:])
def test_second_order_and_forward_mode_of_layers(name):
    info, dtype = modules()[name], torch.float64
    for sample in info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=False, training=False
    ):
        torch.manual_seed(1)
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).to(dtype).eval()
        with sdpa_kernel(SDPBackend.MATH):
            expected = derivatives(module, sample.forward_input)
        with qkv.replace_sdpa():
            found = derivatives(module, sample.forward_input)
        assert qkv.sdpa_report().taken and not qkv.sdpa_report().left
        torch.testing.assert_close(found, expected)


def run_module(module, sample, grad):
    torch.manual_seed(2)
    module.zero_grad()
    with torch.set_grad_enabled(grad):
        results = module(*sample.args, **sample.kwargs)
        results = results if isinstance(results, tuple) else (results,)
        results = [r for r in results if r is not None]
        if grad:
            sum(r.sum() for r in results if r.requires_grad).backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [r.detach().clone() for r in (*results, *gradients)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, training):
    info, taken, dtype = modules()[name], 0, torch.float64
    for sample in info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=False, training=training
    ):
        torch.manual_seed(1)
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
        for grad in (True, False):
            expected = run_module(module, sample.forward_input, grad)
            with qkv.replace_sdpa():
                found = run_module(module, sample.forward_input, grad)
            torch.testing.assert_close(found, expected)
            taken += sum(qkv.sdpa_report().taken.values())
            assert not qkv.sdpa_report().left
    # Its samples ask for the weights, which are not made by either function that is replaced.
    assert (taken > 0) == (name != "MultiheadAttention")
