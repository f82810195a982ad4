"""qkv.distributed.shard and unshard: which rank holds what of a sequence, there and back."""

import math

import pytest
import torch
import torch.distributed as dist
from distributed_calls import mesh_of
from distributed_world import run
from torch.distributed.tensor import DeviceMesh, distribute_tensor

from qkv.distributed import ring_attention, shard, unshard

SIZES = [1, 2, 3, 4]


def positions(length):
    own = shard(torch.arange(length), 0, value=-1)
    return own, unshard(own, 0), unshard(own, 0, seqlen=length)


@pytest.mark.parametrize("size", [*SIZES, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 16, 48, 51])
def test_order(size, length):
    chunk = math.ceil(length / (2 * size))
    padded = torch.arange(2 * size * chunk)
    padded[length:] = -1
    chunks = padded.view(2 * size, chunk)
    for rank, (own, whole, trimmed) in enumerate(run(size, positions, length)):
        assert torch.equal(own, torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]))
        assert torch.equal(whole, padded)
        assert torch.equal(trimmed, torch.arange(length))


def there_and_back(dtype, dim):
    whole = torch.randn(2, 3, 13, 4).mul(3).to(dtype).transpose(2, dim)
    own = shard(whole, dim)
    return own.shape, torch.equal(unshard(own.conj(), dim, seqlen=13), whole.conj())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.cfloat])
@pytest.mark.parametrize("dim", [0, 2, -1, -3])
def test_every_dtype_and_dimension(dtype, dim):
    for shape, same in run(2, there_and_back, dtype, dim):
        assert same and shape[dim] == 8  # of 4 chunks of 4


def on_mesh(shape):
    mesh = mesh_of(shape)
    own = shard(torch.arange(29), 0, mesh, value=-1)
    return own, unshard(own, 0, mesh, seqlen=29), shard(torch.arange(29), 0, value=-1)


def test_a_mesh_of_two_dimensions():
    """(heads, ring): the ranks of a column have neighbouring chunks."""
    found = run(4, on_mesh, (2, 2))
    for _, whole, _ in found:
        assert torch.equal(whole, torch.arange(29))
    flat = [own for _, _, own in found]
    for rank, shard_number in enumerate([0, 2, 1, 3]):
        assert torch.equal(found[rank][0], flat[shard_number])


def in_group():
    group, mesh = dist.new_group([0, 2]), DeviceMesh("cpu", [0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(
            ValueError, match="shard: this process is not in the mesh that group is"
        ):
            shard(torch.arange(4), 0, mesh)
        with pytest.raises(ValueError, match="shard: this process is not in the process group"):
            shard(torch.arange(4), 0, group)
        return None
    own = shard(torch.arange(4), 0, group)
    return own.tolist(), unshard(own, 0, group).tolist()


def test_a_group_of_some_ranks():
    assert run(3, in_group) == [([0, 3], [0, 1, 2, 3]), None, ([1, 2], [0, 1, 2, 3])]


class TestGradients:
    def test_of_shard_is_the_own_part(self):
        for rank, grad in enumerate(run(2, gradient_of_shard)):
            expected = torch.zeros(7)
            expected[[0, 1, 6] if rank == 0 else [2, 3, 4, 5]] = rank + 1.0
            assert torch.equal(grad, expected)

    def test_of_padding_alone(self):
        """One position on 2 ranks: the second one's shard requires a gradient, too, without which
        the ranks would be told that they differ."""
        for grad in run(2, gradient_of_one_position):
            assert torch.equal(grad, torch.ones(3, 1, 4))

    def test_of_unshard_is_summed_over_the_ranks_losses(self):
        weights = sum(torch.arange(7.0) * (rank + 1) for rank in range(3))
        padded = torch.cat([weights, torch.zeros(5)]).view(6, 2)
        for rank, (grad, tangent) in enumerate(run(3, gradient_of_unshard)):
            assert torch.equal(grad, torch.cat([padded[rank], padded[5 - rank]]))
            assert torch.equal(tangent, 2 * torch.arange(7.0))

    def test_of_complex_numbers(self):
        for grad in run(2, gradient_of_complex_numbers):
            assert torch.equal(grad, torch.full((4,), -2j))

    def test_of_unshard_twice(self):
        for (second,) in run(2, second_derivative_of_unshard):
            # Of (s * w)^2 summed over both ranks' losses, w 1 and 2: 2 * (1 + 4).
            assert torch.equal(second, torch.full((4,), 10.0))

    def test_a_replicated_layer(self):
        """Summed over the ranks, as DDP does, gradients of a layer are those of the whole."""
        for summed, by_unshard, whole in run(4, layer_gradients):
            torch.testing.assert_close(summed, whole, rtol=1e-12, atol=1e-12)
            # Each rank computes the loss of the whole, so the sum counts it four times.
            torch.testing.assert_close(by_unshard, 4 * whole, rtol=1e-12, atol=1e-12)


def gradient_of_shard():
    whole = torch.randn(7, requires_grad=True)
    shard(whole, 0).sum().mul(dist.get_rank() + 1).backward()
    return whole.grad


def gradient_of_one_position():
    whole = torch.randn(3, 1, 4, requires_grad=True)
    ring_attention(*[shard(whole, -2)] * 3, seqlen=1).sum().backward()
    dist.all_reduce(whole.grad)
    return whole.grad


def gradient_of_unshard():
    own = shard(torch.randn(7), 0).requires_grad_()
    weights = torch.arange(7.0) * (dist.get_rank() + 1)
    (unshard(own, 0, seqlen=7) * weights).sum().backward()
    tangents = (shard(2 * torch.arange(7.0), 0),)
    _, tangent = torch.func.jvp(lambda x: unshard(x, 0, seqlen=7), (own.detach(),), tangents)
    return own.grad, tangent


def gradient_of_complex_numbers():
    own = torch.zeros(4, dtype=torch.complex64, requires_grad=True)
    (unshard(own, 0) * 1j).real.sum().backward()
    return own.grad


def second_derivative_of_unshard():
    own = shard(torch.randn(8), 0).requires_grad_()
    loss = (unshard(own, 0) * (dist.get_rank() + 1)).square().sum()
    (first,) = torch.autograd.grad(loss, own, create_graph=True)
    return torch.autograd.grad(first.sum(), own)


def layer_gradients():
    whole = torch.randn(2, 13, 8, dtype=torch.float64)
    layer = torch.nn.Linear(8, 8, dtype=torch.float64)

    def gradient(loss):
        (grad,) = torch.autograd.grad(loss, layer.weight)
        return grad

    of_whole = gradient(layer(whole).square().sum())
    own, is_real = shard(whole, 1), shard(torch.ones(13), 0).bool()[:, None]
    by_unshard = gradient(unshard(layer(own), 1, seqlen=13).square().sum())
    summed = gradient(layer(own).where(is_real, 0).square().sum())
    for grad in (by_unshard, summed):
        dist.all_reduce(grad)
    return summed, by_unshard, of_whole


def raises(function):
    with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as error:
        function()
    return str(error.value)


def unshard_of_unlike_shapes():
    return raises(lambda: unshard(torch.zeros(4, 2 + dist.get_rank()), 0))


def unshard_where_one_wants_a_gradient():
    return raises(lambda: unshard(torch.zeros(4, requires_grad=dist.get_rank() == 0), 0))


def unshard_of_one_without_numbers():
    return raises(lambda: unshard(torch.zeros(4, device=["cpu", "meta"][dist.get_rank()]), 0))


def unshard_along_unlike_dimensions():
    return raises(lambda: unshard(torch.zeros(4, 4), dist.get_rank()))


def unshard_of_unlike_lengths():
    return raises(lambda: unshard(torch.zeros(4), 0, seqlen=7 + dist.get_rank()))


def unshard_of_an_odd_one():
    return raises(lambda: unshard(torch.zeros(4 + dist.get_rank()), 0))


def unshard_of_too_long_a_sequence():
    return raises(lambda: unshard(torch.zeros(4), 0, seqlen=9))


def unshard_of_no_length():
    return raises(lambda: unshard(torch.zeros(4), 0, seqlen=True))


def unshard_along_no_dimension():
    return raises(lambda: unshard(torch.zeros(4), 1))


def unshard_of_no_tensor():
    return raises(lambda: unshard(torch.zeros(4) if dist.get_rank() == 0 else [0.0] * 4, 0))


def unshard_along_a_name():
    return raises(lambda: unshard(torch.zeros(4), "rows"))


def unshard_of_a_dtensor():
    return raises(lambda: unshard(distribute_tensor(torch.zeros(8), mesh_of((2,))), 0))


def shard_of_no_tensor():
    return raises(lambda: shard([0.0] * 4, 0))


def shard_by_no_group():
    return raises(lambda: shard(torch.zeros(4), 0, "world"))


def shard_by_a_tensor():
    return raises(lambda: shard(torch.zeros(4), 0, torch.zeros(3)))


def shard_by_a_large_mesh():
    return raises(lambda: shard(torch.zeros(4), 0, mesh_of((1, 1, 2))))


@pytest.mark.parametrize(
    "function, message",
    {
        unshard_of_unlike_shapes: "unshard: tensor is float32 [4, 2] on rank 0, but float32 [4, 3] "
        "on rank 1; the same is expected on all ranks",
        unshard_where_one_wants_a_gradient: "unshard: tensor is float32 [4] that requires grad on "
        "rank 0, but float32 [4] on rank 1; the same is expected on all ranks",
        unshard_of_one_without_numbers: "unshard: tensor is float32 [4] on rank 0, but float32 [4] "
        "on meta on rank 1; the same is expected on all ranks",
        unshard_along_unlike_dimensions: "unshard: dim is 0 on rank 0, but 1 on rank 1; the same "
        "is expected on all ranks",
        unshard_of_unlike_lengths: "unshard: seqlen is 7 on rank 0, but 8 on rank 1; the same is "
        "expected on all ranks",
        unshard_of_an_odd_one: "unshard: on rank 1: dim 0 of tensor has 5 rows, but an even "
        "number is expected, as qkv.distributed.shard returns",
        unshard_of_too_long_a_sequence: "unshard: seqlen is 9, but 0 to 8 is expected: 2 shards "
        "of 4 rows",
        unshard_of_no_length: "unshard: seqlen is True, but an int is expected",
        unshard_along_no_dimension: "unshard: dim is 1, but 0 to 0 is expected",
        unshard_of_no_tensor: "unshard: on rank 1: tensor is [0.0, 0.0, 0.0, 0.0], but a dense "
        "tensor is expected",
        unshard_along_a_name: "unshard: dim is 'rows', but an int is expected",
        unshard_of_a_dtensor: "unshard: tensor is a DTensor, but what this rank has of it, "
        ".to_local(), is expected",
        shard_of_no_tensor: "shard: tensor is [0.0, 0.0, 0.0, 0.0], but a dense tensor is expected",
        shard_by_no_group: "shard: group is 'world', but a process group, a DeviceMesh or None, "
        "the default group, is expected",
        shard_by_a_tensor: "shard: group is tensor([0., 0., 0.]), but a process group, a "
        "DeviceMesh or None, the default group, is expected",
        shard_by_a_large_mesh: "shard: group is a mesh of 3 dimensions, but one (ring) or two "
        "(heads, ring) are expected; mesh[names] takes a part of one",
    }.items(),
)
def test_errors(function, message):
    assert run(2, function) == [message] * 2


def test_without_torch_distributed():
    with pytest.raises(RuntimeError, match="shard: torch.distributed is not initialized; start"):
        shard(torch.zeros(4), 0)
