"""torch.utils.flop_counter counts what torch counts for its own attention on other devices."""

import pytest
import samples
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import qkv

B, H, L, S, D, DV = 2, 4, 6, 9, 8, 5
PAIRS = 2 * B * H * L * S  # a multiplication and an addition for each


def make(heads=H):
    shapes = (B, H, L, D), (B, heads, S, D), (B, heads, S, DV)
    return [torch.randn(s, requires_grad=True) for s in shapes]


def count(f):
    with FlopCounterMode(display=False) as mode:
        f()
    return mode.get_total_flops()


def test_every_operator_has_a_formula():
    """But those that are made of others, and are not called below vmap, autograd and the like, and
    those that have no products."""
    computing = [
        name for name in samples.names()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(
            f"qkv::{name}", "CompositeImplicitAutograd"
        )
    ]  # fmt: skip
    without = [n for n in computing if getattr(torch.ops.qkv, n) not in flop_registry]
    assert without == ["dropout_seed", "rotate", "rotate_backward"]


@pytest.mark.parametrize("heads", [H, 1])
def test_as_torchs(heads):
    inputs = make(heads)
    shapes = [x.shape for x in inputs]
    forward = sdpa_flop_count(*shapes)
    call = lambda **options: qkv.attention(*inputs, enable_gqa=True, **options)  # noqa: E731
    assert count(call) == forward == PAIRS * (D + DV)
    assert count(lambda: call(is_causal=True, window_size=(1, 1), dropout_p=0.5)) == forward
    both = forward + sdpa_backward_flop_count((B, H, L, DV), *shapes)
    assert count(lambda: call().sum().backward()) == both


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="docs/compare.md, of 2.13")
def test_torch_counts_nothing_on_a_cpu():
    inputs = [torch.randn(B, H, L, D) for _ in range(3)]
    assert count(lambda: F.scaled_dot_product_attention(*inputs)) == 0


def test_as_torchs_math_path():
    """Which keeps the weights, and so has a product fewer backward."""
    inputs = make()
    with sdpa_kernel(SDPBackend.MATH):
        assert count(lambda: F.scaled_dot_product_attention(*inputs)) == PAIRS * (D + DV)
        both = count(lambda: F.scaled_dot_product_attention(*inputs).sum().backward())
    assert count(lambda: qkv.attention(*inputs).sum().backward()) == both + PAIRS * D


@pytest.mark.parametrize("wanted, products", [
    ((0, 1, 2), 3 * D + 2 * DV), ((0,), 2 * D + DV), ((1,), 2 * D + DV), ((2,), D + DV),
])  # fmt: skip
def test_gradients_that_are_wanted(wanted, products):
    inputs = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(make())]
    output = qkv.attention(*inputs)
    assert count(lambda: output.sum().backward()) == PAIRS * products


def test_gradient_of_the_lse_alone():
    _, lse = qkv.attention(*(inputs := make()), return_lse=True)
    assert count(lambda: torch.autograd.grad(lse.sum(), inputs[:2])) == PAIRS * 3 * D


JVP, DOUBLE = 3 * D + 3 * DV, 10 * D + 5 * DV


def test_forward_mode():
    inputs = tuple(x.detach() for x in make())
    assert count(lambda: torch.func.jvp(qkv.attention, inputs, inputs)) == PAIRS * JVP


def test_double_backward():
    """Pass 1 of docs/report.md is five products, pass 2 ten."""
    inputs = make()
    output = qkv.attention(*inputs)
    grads = torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True)
    loss = sum(x.sin().sum() for x in grads)
    assert count(lambda: torch.autograd.grad(loss, inputs)) == PAIRS * DOUBLE


def test_second_order_of_forward_mode():
    """The gradients of the tangents are those of a backward pass."""
    inputs = [x.detach() for x in make()]

    def loss(*inputs):
        return torch.func.jvp(qkv.attention, inputs, inputs)[1].sin().sum()

    found = count(lambda: torch.func.grad(loss, (0, 1, 2))(*inputs))
    assert found == PAIRS * (JVP + DOUBLE + 3 * D + 2 * DV)


def test_vmap_counts_all_samples():
    inputs = [x.detach() for x in make()]
    assert count(lambda: torch.func.vmap(qkv.attention)(*inputs)) == PAIRS * (D + DV)


@pytest.mark.parametrize("f, products", [
    (lambda q, k, v: qkv.attention_weights(q, k), D),
    (lambda q, k, v: qkv.attention_weights(q, k).sin().sum().backward(), 4 * D),
    (lambda q, k, v: qkv.attention_with_weights(q, k, v), D + DV),
    (lambda q, k, v: sum(x.sin().sum() for x in qkv.attention_with_weights(q, k, v)).backward(),
     4 * D + 3 * DV),
    (lambda q, k, v: qkv.hard_attention(q, k, v), D),
    (lambda q, k, v: qkv.hard_attention(q, k, v).sum().backward(), D),
    (lambda q, k, v: qkv.hard_attention(q, k, v, straight_through=True).sum().backward(),
     5 * D + 2 * DV),  # soft attention's output is made anew
    (lambda q, k, v: qkv.hard_attention(
        q.detach(), k.detach(), v, straight_through=True).sum().backward(), D),
])  # fmt: skip
def test_other_functions(f, products):
    inputs = make()
    assert count(lambda: f(*inputs)) == PAIRS * products


def test_documents():
    """Of 2 and 4 queries, and of 3 and 1 keys that are used."""
    query, key, value = (torch.randn(7, 2, n, requires_grad=True) for n in (D, D, DV))
    ends = torch.tensor([0, 2, 6])
    call = lambda **more: qkv.varlen_attn(query, key, value, ends, None, 4, 4, **more)  # noqa: E731
    pairs = 2 * 2 * (2 * 2 + 4 * 4)
    assert count(call) == pairs * (D + DV)
    assert count(lambda: call().sum().backward()) == pairs * (4 * D + 3 * DV)
    used = torch.tensor([1, 3])
    assert count(lambda: call(seqused_k=used)) == 2 * 2 * (2 * 1 + 4 * 3) * (D + DV)
    fewer = torch.tensor([0, 1, 2])
    found = count(lambda: qkv.varlen_attn(query, key, value, ends, fewer, 4, 4))
    assert found == 2 * 2 * (2 * 1 + 4 * 1) * (D + DV)


def test_pages():
    call = samples.calls("varlen_attention_paged")[1]
    lengths = zip(call["cu_seq_q"].diff(), call["seqused_k"], strict=True)
    pairs = sum(int(q) * int(k) for q, k in lengths)
    (_, heads, d), dv = call["query"].shape, call["value"].size(-1)
    found = count(lambda: torch.ops.qkv.varlen_attention_paged(**call))
    assert found == 2 * heads * pairs * (d + dv)


def test_cache():
    """A row has the keys that it had before, and the new ones, but for those that are not seen."""
    indexed, paged, reading = samples.calls("attention_with_kvcache")
    op = torch.ops.qkv.attention_with_kvcache
    B, H, L, D = reading["query"].shape
    Dv, rows = reading["v_cache"].size(-1), reading["k_cache"].size(2)
    assert count(lambda: op(**reading)) == 2 * B * H * L * rows * (D + Dv)
    assert count(lambda: op(**indexed)) == 2 * H * L * (4 + 2 + 2 * 2 - 1) * (D + Dv)
    assert count(lambda: op(**paged)) == 2 * H * L * (4 + 2 + 2 * 2) * (D + Dv)


def test_lengths_that_nobody_knows():
    """In a program that is being traced there are no numbers in the tensors of lengths."""
    with torch._subclasses.FakeTensorMode() as mode:
        for name in ("attention_forward", "attention_with_kvcache", "varlen_attention_paged"):
            for call in samples.calls(name):
                fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, call)
                assert count(lambda f=fake, n=name: samples.operator(n)(**f)) > 0
