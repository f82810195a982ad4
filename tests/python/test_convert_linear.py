"""qkv.convert(model, linear=True): linear layers, by oneDNN."""

import copy
import pickle

import pytest
import torch
from common import products
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import qkv
from qkv._classes import own_class


class OwnLinear(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


def make():
    torch.manual_seed(0)
    normed, own = weight_norm(nn.Linear(16, 16)), OwnLinear(16, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), normed, own)
    model.append(nn.Linear(8, 8, bias=False)).append(nn.MultiheadAttention(8, 2))
    return model[:5], model


def results(model, x):
    output = model(x)
    return output, *torch.autograd.grad(output.square().sum(), [*model.parameters()])


def test_linear_layers(onednn):
    layers, model = make()
    x, parameters = torch.randn(5, 8), [*model.parameters()]
    expected, classes = results(layers, x), [*map(own_class, model.modules())]
    conversion = qkv.convert(model, linear=True)
    assert {*conversion.changed} == {"0", "2", "4", "5"}
    assert conversion.changed["0"] == "Linear -> by oneDNN"
    assert products(lambda: layers(x)) == 3
    torch.testing.assert_close(results(layers, x), expected)
    assert [*model.parameters()] == parameters
    again = qkv.convert(model, linear=True)
    assert again.left["4"] == "converted already"
    again.undo()
    assert products(lambda: layers(x)) == 3
    conversion.undo()
    assert [*map(own_class, model.modules())] == classes and not products(lambda: layers(x))
    torch.testing.assert_close(results(layers, x), expected, rtol=0, atol=0)


def test_copies(onednn):
    layers, x = make()[0][3:], torch.randn(5, 16)
    expected = layers(x)
    qkv.convert(layers, linear=True)
    for made in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert products(lambda made=made: made(x)) == 1
        conversion = qkv.convert(made, linear=True)
        assert [*conversion.changed] == ["4"]
        conversion.undo()
        assert type(made[1]) is nn.Linear and not products(lambda made=made: made(x))
        torch.testing.assert_close(made(x), expected)
    assert products(lambda: layers(x)) == 1


def test_not_asked_for_and_not_faster(onednn):
    layers, x = make()[0], torch.randn(5, 8)
    assert not qkv.convert(layers).changed and not products(lambda: layers(x))
    torch.ops.qkv._set_projections("torch")
    conversion = qkv.convert(layers, linear=True)
    assert not conversion.changed
    assert conversion.left["0"] == "torch multiplies as fast on this CPU"
    assert type(layers[0]) is nn.Linear


def test_a_layer_with_a_forward_of_its_own_is_left(onednn):
    layers, x = make()[0], torch.randn(5, 8)
    layers[0].forward = layers[0].forward
    conversion = qkv.convert(layers, linear=True)
    assert {*conversion.changed} == {"2", "4"} and products(lambda: layers(x)) == 2
    assert conversion.left["0"] == "it has a forward of its own"
    layers[2].forward = layers[2].forward
    conversion.undo()
    assert not products(lambda: layers(x))


def test_layers_of_transformers(onednn):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes)).eval()
    ids = torch.arange(14).view(2, 7)
    expected = model(ids).last_hidden_state
    conversion = qkv.convert(model, linear=True)
    assert {"h.0.attn.c_attn", "h.0.mlp.c_proj"} <= {*conversion.changed}
    assert products(lambda: model(ids)) == 4
    torch.testing.assert_close(model(ids).last_hidden_state, expected)
    model.h[0].mlp.c_fc.forward = model.h[0].mlp.c_fc.forward
    assert products(lambda: pickle.loads(pickle.dumps(model))(ids)) == 4
    conversion.undo()
    assert not products(lambda: model(ids))
