"""torch's own samples of scaled_dot_product_attention, nn.MultiheadAttention and the Transformer
layers (torch.testing._internal), forward and gradients, with qkv in place and without.

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

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import qkv
from qkv import testing

pytest.importorskip("expecttest")  # torch.testing._internal imports it
invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
modules = pytest.importorskip("torch.testing._internal.common_modules")

SDPA = next(o for o in invocations.op_db if o.name == "nn.functional.scaled_dot_product_attention")
MODULES = {m.name.removeprefix("nn."): m for m in modules.module_db}
LAYERS = (
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "Transformer",
)


def results_of(function, sample, dtype=None):
    """The output and all gradients, as one: the samples saturate the softmax, and a gradient that
    cancels to nothing is as exact as its terms. dtype: of the inputs, if not their own."""
    torch.manual_seed(0)
    copies = {
        id(t): t.detach()
        .to(dtype if t.is_floating_point() else None)
        .requires_grad_(t.requires_grad)
        for t in (sample.input, *sample.args, *sample.kwargs.values())
        if isinstance(t, torch.Tensor)
    }
    args = [copies.get(id(t), t) for t in (sample.input, *sample.args)]
    output = function(*args, **{n: copies.get(id(t), t) for n, t in sample.kwargs.items()})
    leaves = [t for t in copies.values() if t.requires_grad]
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
    for sample in SDPA.sample_inputs("cpu", dtype, requires_grad=True):
        with qkv.replace_sdpa():
            found = results_of(F.scaled_dot_product_attention, sample)
        assert qkv.sdpa_report().taken and not qkv.sdpa_report().left
        drops = sample.kwargs.get("dropout_p", 0) > 0
        torchs = results_of(composed if drops else F.scaled_dot_product_attention, sample)
        exact = results_of(composed, sample, torch.float64)
        testing.assert_close(found, exact, torchs, times=8)
        number += 1
    assert number > 10


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


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, training):
    info, taken, dtype = MODULES[name], 0, torch.float64
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
