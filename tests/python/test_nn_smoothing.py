"""qkv.nn.GaussianSmoothing against its formula."""

import pytest
import torch
from common import assert_example_runs
from torch._subclasses.fake_tensor import FakeTensorMode

from qkv.nn import GaussianSmoothing

B, L, S, P, DV = 2, 4, 7, 2, 3


def bell(query_position, position, sigma):
    """Weights `[..., L, S]`, float64."""
    difference = query_position.double().unsqueeze(-2) - position.double().unsqueeze(-3)
    weights = (difference.square().sum(-1) / (-2 * sigma**2)).exp()
    return weights / weights.sum(-1, keepdim=True)


def grid(length):
    return torch.arange(length).unsqueeze(-1)


@pytest.mark.parametrize("sigma", [0.05, 1.0, 3.5, 1e4, 1e30])
@pytest.mark.parametrize("length", [1, 5, 300])
def test_a_regular_series(sigma, length):
    value = torch.randn(B, length, DV, dtype=torch.float64)
    output, weights = GaussianSmoothing(sigma)(value, need_weights=True)
    expected = bell(grid(length), grid(length), sigma)
    torch.testing.assert_close(output, expected @ value, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights, expected.expand(B, -1, -1), rtol=1e-10, atol=1e-12)


def test_a_long_series_by_its_neighbours_alone():
    """All pairs of 200 000 values would be 4e10; the window makes it 18 sigma for each."""
    value = torch.randn(200_000, 1)
    output = GaussianSmoothing(5.0)(value)
    for i in (0, 99_999, 199_999):
        expected = bell(torch.tensor([[i]]), grid(len(value)), 5.0) @ value.double()
        torch.testing.assert_close(output[i].double(), expected[0], rtol=1e-6, atol=1e-7)


def test_places_of_its_own():
    value = torch.randn(B, S, DV, dtype=torch.float64)
    position = 1000 + torch.rand(B, S, P, dtype=torch.float64)
    query_position = 1000 + torch.rand(L, P, dtype=torch.float64)
    output, weights = GaussianSmoothing(0.3)(value, position, query_position, need_weights=True)
    expected = bell(query_position, position, 0.3)
    torch.testing.assert_close(output, expected @ value)
    torch.testing.assert_close(weights, expected)


def test_shuffled_positions_smooth_the_same():
    value, order = torch.randn(S, DV, dtype=torch.float64), torch.randperm(S)
    smooth = GaussianSmoothing(1.2)
    shuffled = smooth(value[order], grid(S)[order].double())
    torch.testing.assert_close(shuffled, smooth(value)[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rounding(dtype):
    value = torch.randn(S, DV).to(dtype)
    exact = GaussianSmoothing(1.5)(value.double())
    assert torch.equal(GaussianSmoothing(1.5)(value), exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_layers(dtype):
    """sigma is float64 in a layer whose log_sigma is not."""
    layer, value = GaussianSmoothing(1.0).to(dtype), torch.randn(S, DV).to(dtype)
    assert layer.sigma.dtype == torch.float64
    assert torch.equal(layer(value), GaussianSmoothing(1.0)(value))


def test_positions_without_dimensions():
    value = torch.randn(S, DV, dtype=torch.float64)
    output = GaussianSmoothing(1.0)(value, torch.zeros(S, 0))
    torch.testing.assert_close(output, value.mean(0).expand(S, DV))


def test_missing_values():
    value = torch.randn(S, DV, dtype=torch.float64)
    known = torch.arange(S) != 3
    holed = value.clone()
    holed[3] = torch.nan
    output = GaussianSmoothing(1.0)(holed, attn_mask=known)
    torch.testing.assert_close(output, bell(grid(S), grid(S)[known], 1.0) @ value[known])


def test_derivatives_reach_values_positions_and_sigma():
    smooth = GaussianSmoothing(0.8, trainable=True)
    value, position, query_position = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((S, DV), (S, P), (L, P))
    )

    def f(log_sigma, *arguments):
        return torch.func.functional_call(smooth, {"log_sigma": log_sigma}, arguments)

    arguments = (smooth.log_sigma, value, position, query_position)
    assert torch.autograd.gradcheck(f, arguments)
    assert torch.autograd.gradcheck(f, arguments[:2])  # the regular series, through its window
    assert torch.autograd.gradgradcheck(f, arguments)


def test_sigma_is_learnt():
    """From a series smoothed by 2, the width is found again, starting at 0.5."""
    value = torch.randn(200, 1, dtype=torch.float64)
    target = GaussianSmoothing(2.0)(value)
    smooth = GaussianSmoothing(0.5, trainable=True)
    adam = torch.optim.Adam(smooth.parameters(), lr=0.1)
    for _ in range(100):
        adam.zero_grad()
        (smooth(value) - target).square().sum().backward()
        adam.step()
    assert smooth.sigma.item() == pytest.approx(2.0, abs=0.01)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_sigma_is_learnt_by_a_traced_layer():
    layer, value = GaussianSmoothing(1.0, trainable=True), torch.randn(200, 3)
    traced = torch.jit.trace(layer, value, check_trace=False)
    with torch.no_grad():
        layer.log_sigma.fill_(3.0)
    torch.testing.assert_close(traced(value), layer(value))


def test_many_sigmas():
    """An ensemble: vmap over what is learnt."""
    smooth, value = GaussianSmoothing(1.0, trainable=True), torch.randn(50, 2, dtype=torch.float64)
    sigmas = torch.tensor([0.5, 1.0, 20.0]).double()
    call = lambda x: torch.func.functional_call(smooth, {"log_sigma": x}, value)  # noqa: E731
    found = torch.func.vmap(call)(sigmas.log())
    expected = torch.stack([GaussianSmoothing(x)(value) for x in sigmas.tolist()])
    torch.testing.assert_close(found, expected)


def test_without_numbers():
    value = torch.randn(5, 2)
    layer = GaussianSmoothing(1.0).to("meta")
    assert layer(value.to("meta")).shape == value.shape and repr(layer) == "GaussianSmoothing()"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert GaussianSmoothing(1.0)(mode.from_tensor(value)).shape == value.shape


def test_state():
    assert list(GaussianSmoothing(1.0).parameters()) == []
    other = GaussianSmoothing(7.0)
    other.load_state_dict(GaussianSmoothing(2.0, trainable=True).state_dict())
    assert other.sigma.item() == pytest.approx(2.0) and "sigma=2" in repr(other)


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf")])
def test_sigma_is_positive(sigma):
    with pytest.raises(ValueError, match=f"sigma is {sigma}, but a positive number"):
        GaussianSmoothing(sigma)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3),), "value is torch.float32 .3., but"),
        ((torch.zeros(3, 1, dtype=torch.int64),), "value is torch.int64 .3, 1., but a floating"),
        ((torch.zeros(3, 1), torch.zeros(4, 1)), r"position is \[4, 1\], but \[\.\.\., 3, P\]"),
        ((torch.zeros(3, 1), torch.zeros(3)), r"position is \[3\], but"),
        (
            (torch.zeros(3, 1), torch.zeros(3, 2), torch.zeros(5, 1)),
            r"query_position is \[5, 1\], but \[\.\.\., L, 2\]",
        ),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        GaussianSmoothing(1.0)(*arguments)


def test_example():
    assert_example_runs(GaussianSmoothing)
