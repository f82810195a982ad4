"""register(kernels=True): the RMS norms of transformers' models are computed by qkv.rotate."""

import sys

import pytest
import torch
from common import HALVES
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

import decoder_models  # noqa: E402
from decoder_models import check_training  # noqa: E402

import qkv.integrations.transformers as integration  # noqa: E402

integration.register()

from qkv.integrations.transformers import _norms  # noqa: E402

# How many norms a model with two layers has: two a layer and one at the end; those of query and
# key; Gemma's, by 1 + weight, around what others have them before.
NORMS = {"llama": 5, "qwen3": 9, "gemma2": 9, "mistral": 5}


@pytest.fixture
def norms(monkeypatch):
    """The shapes that models norm by qkv.rotate."""
    with decoder_models.counting(monkeypatch, _norms, "_normed", lambda x: x.shape) as shapes:
        yield shapes


def model_of(family: str):
    """With norms of which each number is another one."""
    model = decoder_models.model_of(family)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, parameter[0].item(), 0.3)
    return model


@pytest.mark.parametrize("family", NORMS)
def test_results_and_gradients(family, norms):
    assert check_training(model_of(family), norms) == NORMS[family]


def norm_of(family: str, name: str, shapes):
    """A norm of 24 numbers, ours and theirs by one class."""
    model_of(family).set_attn_implementation("qkv")
    cls = getattr(sys.modules[f"transformers.models.{family}.modeling_{family}"], name)
    norm = cls(24)
    torch.nn.init.normal_(norm.weight)
    shapes.clear()  # of the trials
    return norm, _norms.replaced[cls, "forward"]


CLASSES = [("llama", "LlamaRMSNorm"), ("gemma2", "Gemma2RMSNorm")]


def exact(norm, x, offset):
    x, weight = x.double(), norm.weight.double() + offset
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("family, name", CLASSES)
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_err_no_more_than_the_class_itself(family, name, dtype, norms):
    """Of the output and of both gradients."""
    norm, own = norm_of(family, name, norms)
    norm.to(dtype)
    x = torch.randn(3, 7, 24).to(dtype).requires_grad_()
    ahead = torch.randn(3, 7, 24).to(dtype)
    inputs = (x, norm.weight)
    wanted = exact(norm, x, family == "gemma2")
    truth = (wanted, *torch.autograd.grad(wanted, inputs, ahead.double()))
    errors = []
    for function in (own, type(norm).forward):
        y = function(norm, x)
        assert y.dtype == dtype
        results = (y, *torch.autograd.grad(y, inputs, ahead))
        errors.append([(a - b).norm() for a, b in zip(results, truth, strict=True)])
    assert norms == [x.shape]
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= theirs * 1.05


@pytest.mark.parametrize("family, name", CLASSES)
def test_any_shape_and_strides(family, name, norms):
    norm, own = norm_of(family, name, norms)
    for x in (torch.randn(24), torch.randn(4, 24, 3).mT, torch.randn(2, 3, 5, 24)):
        assert_close(norm(x), own(norm, x))
    assert_close(norm(**{own.__code__.co_varnames[1]: x}), own(norm, x))
    assert len(norms) == 4
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        norm(row=x)


def test_what_is_left_to_the_class(norms):
    norm, own = norm_of("llama", "LlamaRMSNorm", norms)
    half = torch.randn(2, 24).bfloat16()
    assert norm(half).dtype == torch.float32  # of a weight in float32
    assert norm(torch.zeros(0, 24)).shape == (0, 24)
    x = torch.randn(5, 24)
    assert_close(torch.vmap(norm)(x), own(norm, x))
    assert_close(torch.compile(norm, backend="aot_eager", fullgraph=True)(x), own(norm, x))
    assert not norms


def test_what_is_replaced(norms):
    """Norms of groups, with gates, and without a weight are not."""
    falcon = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")
    for module in (falcon, sys.modules["transformers.models.llama.modeling_llama"]):
        _norms.replace_norms(module.__name__)
    replaced = {x.__name__ for x, name in _norms.replaced if name == "forward"}
    assert replaced == {"FalconH1RMSNorm", "LlamaRMSNorm"}


def test_a_layer_whose_module_is_gone(norms):
    """As after runpy.run_path."""
    model = decoder_models.model_of("llama")
    model.extra = type("Extra", (torch.nn.Module,), {"__module__": "gone"})()
    model.set_attn_implementation("qkv")
    assert model.config._attn_implementation == "qkv"


class Others(torch.nn.Module):
    """What the trial is to tell from a norm; `kind` says what it computes."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.eps = eps
        if self.kind == "bias":
            self.bias = torch.nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        mean = x.square().mean(-1, keepdim=True)
        return {
            "norm": lambda: self.weight * x * (mean + self.eps).rsqrt(),
            "bias": lambda: self.weight * x * (mean + self.eps).rsqrt() + self.bias,
            "centred": lambda: self.weight * (x - x.mean(-1, keepdim=True)) * mean.rsqrt(),
            "fixed eps": lambda: self.weight * x * (mean + 1e-6).rsqrt(),
            "no weight": lambda: x * (mean + self.eps).rsqrt(),
            "float32": lambda: self.weight * x.float() * (mean + self.eps).rsqrt(),
            "error": lambda: self.weight @ x.T @ x,
        }[self.kind]()


@pytest.mark.parametrize(
    "kind", ["norm", "bias", "centred", "fixed eps", "no weight", "float32", "error"]
)
def test_the_trial(kind):
    cls = type("SomeNorm", (Others,), {"kind": kind})
    assert (_norms._trial(cls) is not None) == (kind == "norm")


def test_undone(norms):
    norm, own = norm_of("llama", "LlamaRMSNorm", norms)
    assert type(norm).forward is not own
    integration.unregister()
    assert type(norm).forward is own and not _norms.replaced
