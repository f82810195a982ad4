"""qkv.nn.SoftDictionary against a dictionary, and against its formula."""

import pytest
import torch
from common import assert_example_runs

from qkv.nn import SoftDictionary

N, DK, DV = 6, 5, 3


def make(**arguments):
    keys, values = torch.randn(N, DK), torch.randn(N, DV)
    return SoftDictionary(keys, values, **arguments), keys, values


@pytest.mark.parametrize("scale", [None, 0.0, 2.5])
@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
def test_an_average_of_the_values(scale, leading):
    dictionary, keys, values = make(scale=scale)
    query = torch.randn(*leading, 7, DK)
    output, weights = dictionary(query, need_weights=True)
    factor = DK**-0.5 if scale is None else scale
    expected = (factor * query @ keys.T).softmax(-1)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(output, expected @ values)
    torch.testing.assert_close(dictionary(query), output)


def test_a_hard_one_is_a_python_dictionary():
    keys = torch.nn.functional.one_hot(torch.randperm(N)).float()
    values = torch.randn(N, DV)
    plain = {tuple(key.tolist()): value for key, value in zip(keys, values, strict=True)}
    asked = keys[[4, 0, 5, 4]]
    expected = torch.stack([plain[tuple(query.tolist())] for query in asked])
    dictionary = SoftDictionary(keys, values)
    output, weights = dictionary(asked, hard=True, need_weights=True)
    assert torch.equal(output, expected) and torch.equal(dictionary(asked, hard=True), expected)
    assert torch.equal(weights, asked @ keys.T)


def test_a_large_scale_comes_to_the_same_as_hard():
    dictionary, *_ = make(scale=1e4)
    query = torch.randn(20, DK)
    torch.testing.assert_close(dictionary(query), dictionary(query, hard=True))


def test_derivatives():
    keys, values, query = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((N, DK), (N, DV), (4, DK))
    )
    dictionary = SoftDictionary(keys, values, trainable=True)

    def f(keys, values, query):
        return torch.func.functional_call(dictionary, {"keys": keys, "values": values}, (query,))

    assert torch.autograd.gradcheck(f, (keys, values, query))
    assert torch.autograd.gradgradcheck(f, (keys, values, query))


def test_a_memory_that_is_written_by_learning():
    """Keys and values start at random; after training each question has its own answer."""
    questions, answers = torch.eye(8), torch.randn(8, DV)
    memory = SoftDictionary(torch.randn(8, 8), torch.randn(8, DV), scale=3.0, trainable=True)
    adam = torch.optim.Adam(memory.parameters(), lr=0.05)
    for _ in range(300):
        adam.zero_grad()
        loss = (memory(questions) - answers).square().mean()
        loss.backward()
        adam.step()
    assert loss < 1e-3


def test_state_and_size():
    dictionary, keys, values = make()
    assert len(dictionary) == N and list(dictionary.parameters()) == []
    keys.zero_()
    assert dictionary.keys.abs().sum() > 0  # a copy
    other = make(trainable=True)[0]
    other.load_state_dict(dictionary.state_dict())
    assert torch.equal(other.values, values)
    assert "entries=6, key_dim=5, value_dim=3" in repr(other)


def test_an_empty_one():
    dictionary = SoftDictionary(torch.zeros(0, DK), torch.zeros(0, DV))
    for hard in (False, True):
        output, weights = dictionary(torch.randn(2, DK), hard, need_weights=True)
        assert torch.equal(output, torch.zeros(2, DV)) and weights.shape == (2, 0)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (torch.zeros(3), torch.zeros(3, 1), r"keys is \[3\], but \[N, D\]"),
        (torch.zeros(3, 1), torch.zeros(3, 1, 1), r"values is \[3, 1, 1\], but \[N, D\]"),
        (torch.zeros(3, 1), torch.zeros(4, 1), r"values is \[4, 1\], but a row for each of the 3"),
        (torch.zeros(3, 1), torch.zeros(3, 1).double(), "values is torch.float64, but"),
    ],
)
def test_bad_entries(keys, values, message):
    with pytest.raises(ValueError, match=message):
        SoftDictionary(keys, values)


@pytest.mark.parametrize("query", [torch.zeros(DK), torch.zeros(2, DK + 1)])
def test_bad_query(query):
    with pytest.raises(RuntimeError, match=r"query is \[.*\], but \[\.\.\., L, 5\]"):
        make()[0](query)


def test_example():
    assert_example_runs(SoftDictionary)
